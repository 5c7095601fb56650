"""The contract of a format: ``FormatPlugin``, the ``Decoder`` that it opens, and what decoding a batch gives.

Owns: the shape of all this, and the reasons of dead letters. Must not know: any one format. Neighbours:
``avow.formats`` (the registry), ``rows`` (what decoders are made of) and the engines' task, which writes the outcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from avow.errors import ConfigError
from avow.settings import FormatConfig, PipelineConfig

if TYPE_CHECKING:  # `avow plan` need not wait for Arrow
    import pyarrow as pa

    from avow.formats.registry.config import Text

DETAIL_CHARS_MAX = 500
_SHOWN_CHARS_MAX = 60


class FormatPlugin(ABC):
    """A format, by the word in ``decode.format``: its settings, its decoder, what it promises, and sample records.

    A plugin is a subclass, and one instance of it that ``avow.plugins`` finds. The instance lives as long as its
    process (a driver, a worker of Spark), so what is costly to have and the same for every task (a client, schemas by
    id) belongs to the plugin or to ``avow.client_cache``, and not to a decoder. Its module imports neither Arrow nor a
    client: ``decoder`` does, when it is called.
    """

    format: ClassVar[str]
    Config: ClassVar[type[FormatConfig]]  # reads [decode], and says which columns there are

    @abstractmethod
    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        """For one task of a run. ``refuse_nul``: the sink cannot hold NUL in text, so such a record is refused."""

    @abstractmethod
    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:
        """For ``avow plan``, a sentence each: what is done with a record, then what else that promises."""

    @abstractmethod
    def samples(self) -> Samples:
        """Records that it must take and refuse, for ``avow.testing.formats``."""

    # For people who look at records and write them (``avow consume``, ``avow produce``, the dashboard). A format whose
    # schemas a registry keeps has all of it, others nothing.

    schema_kind: ClassVar[str] = ""  # what registries call its schemas: AVRO, PROTOBUF, JSON

    def show(self, schema: Text, value: bytes, at: int) -> Shown:
        """One value, all of it, by the schema that wrote it; ``at``: behind the schema's id. ``DecodeError`` where the
        bytes cannot be taken, ``ValueError`` where the schema cannot be read."""
        raise NotImplementedError

    def encoder(self, schema: Text, message: str | None = None) -> Encode:
        """Writes documents by a schema: what stands behind its id. ``message``: which type of the schema, where it has
        several. ``ValueError`` where the schema cannot be read."""
        raise NotImplementedError

    # For ``avow prove`` with a user's file. A format without these is proved by its own tests alone.

    def sample_value(self, pipeline: PipelineConfig, number: int, key: int) -> bytes:  # noqa: ARG002
        """The value of a good record. ``number``: no other record's; ``key``: what the columns of sink.key are made
        of."""
        raise ConfigError(
            f"decode.format: avow prove cannot generate records of format {self.format}",
            advice="Run avow prove without a pipeline file, or with a file of another format.",
        )

    def sample_key_columns(self, pipeline: PipelineConfig) -> frozenset[str]:  # noqa: ARG002
        """The columns that ``sample_value`` can make of a ``key``, or that hold the record's own key."""
        return frozenset()


class Decoder(Protocol):
    """Turns the bytes of records into rows. Cheap to make: every task has its own."""

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        """``batch``: the columns ``key`` and ``value``, and mostly ``headers`` and the others of a record.

        A record that cannot be taken is refused in the outcome, never raised: whatever the bytes of one record are,
        the others are decoded. What is raised is an error of another kind, and ends the attempt: an ``AvowError`` or
        ``OSError`` for what is no record's fault, such as a registry that does not answer; ``ColumnsChanged`` where the
        format has more columns by now (``FormatConfig.for_source``).
        """


@dataclass(frozen=True, slots=True)
class Decoded:
    """One batch, decoded. Each of its records is in exactly one place:
    ``len(rows) + len(deletes) + len(refused) + skipped`` is their number.

    The ``_at`` arrays have, for each row, the index of its record in the batch, ascending.
    """

    rows: pa.RecordBatch  # the columns of ``rows.row_schema``
    rows_at: pa.Int64Array
    deletes: pa.RecordBatch  # upsert only: the columns of ``tombstones.key_fields``, of rows to delete
    deletes_at: pa.Int64Array
    refused: tuple[RefusedRecord, ...]  # ascending by index
    skipped: int  # records left out by declaration, such as null values under tombstones = "skip"


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record that cannot be taken: a dead letter."""

    index: int  # its row in the batch
    reason: str  # a ``Reason``, or a format's own short code: people filter by it
    detail: str  # for a person: the field, what was found, what is due; at most 500 printable characters

    @classmethod
    def of(cls, index: int, error: DecodeError) -> RefusedRecord:
        path = f"{error.path}: " if error.path else ""
        return cls(index, error.reason, printable(path + error.detail, DETAIL_CHARS_MAX))


class DecodeError(Exception):
    """One record cannot be taken. Raised where a record is read on its own, and turned into a ``RefusedRecord``."""

    def __init__(self, reason: str, detail: str, path: str = "") -> None:
        super().__init__(reason, detail, path)
        self.reason = reason
        self.detail = detail
        self.path = path

    def inside(self, name: str) -> DecodeError:
        """The same error, seen from one level further out."""
        inner = self.path if not self.path or self.path.startswith("[") else f".{self.path}"
        return DecodeError(self.reason, self.detail, f"{name}{inner}")


class Reason(StrEnum):
    """Why a record is a dead letter, as avow's own formats say it."""

    TIMESTAMP = "timestamp-out-of-range"  # the record's own, which no sink's column can hold
    HEADER_NAME = "header-not-utf8"  # the name of one of its headers
    CORRUPTED = "corrupted"  # the value is not the one whose checksum its producer put beside it
    EMPTY = "empty"  # a value of zero bytes
    TOMBSTONE = "tombstone"  # a null value, where the pipeline takes none
    TOMBSTONE_KEY = "tombstone-key"  # a null value that should delete, and a key that does not say which row
    NULL_KEY = "null-key"  # no key, where the key names the row
    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"  # truncated, trailing garbage, NaN, ...
    NOT_OBJECT = "not-object"  # JSON, but a scalar or an array
    LONE_SURROGATE = "lone-surrogate"  # an escape such as \ud800 that stands for no character
    NUL = "nul"  # a NUL in text that the sink cannot hold
    TOO_DEEP = "too-deep"
    LONG_NUMBER = "long-number"
    DUPLICATE_FIELD = "duplicate-field"
    UNKNOWN_FIELD = "unknown-field"
    MISSING_FIELD = "missing-field"  # absent or null, and declared not null
    WRONG_TYPE = "wrong-type"
    OUT_OF_RANGE = "out-of-range"  # a number or a time that the column's type cannot hold exactly
    BAD_TEXT = "bad-text"  # text that does not spell a date, a timestamp, a decimal or base64


@dataclass(frozen=True, slots=True)
class Shown:
    """One value for people."""

    type_name: str  # as its schema calls it; empty where it has no name
    document: object  # what JSON has: None, bool, int, float (finite), str, list, dict


# A document as ``json.loads`` gives it to bytes, or ``ValueError`` with the field and what is wrong with it. A float's
# ``repr`` may be the digits as they were written: more than a float holds.
Encode = Callable[[object], bytes]


@dataclass(frozen=True, slots=True)
class Samples:
    """Records without a key, of a pipeline whose sink cannot hold NUL."""

    decode: Mapping[str, Any]  # the keys of [decode] that they are for, ``format`` among them
    good: tuple[tuple[bytes, Mapping[str, object]], ...]  # a value, and its row
    bad: tuple[tuple[bytes, str], ...]  # a value, and the reason why it is refused


def printable(text: str, chars_max: int) -> str:
    """Text from a record, safe to show anywhere: control characters escaped, cut to a length."""
    cut = text[:chars_max]
    escaped = cut if cut.isprintable() else "".join(map(_escape, cut))
    if len(text) > chars_max or len(escaped) > chars_max:
        return escaped[: chars_max - 1] + "…"
    return escaped


def shown(text: str) -> str:
    """A piece of a record, short and quoted, for a detail."""
    return f'"{printable(text, _SHOWN_CHARS_MAX)}"'


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
