"""What decoding a batch comes to: rows, deletes, dead letters and skipped records, each input record in exactly one.

Owns: the shape of the outcome and the reasons of dead letters. Must not know: any format. Its neighbours are the
decoders of this package, which fill it, and the engines' task, which writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import pyarrow as pa

DETAIL_CHARS_MAX = 500
_SHOWN_CHARS_MAX = 60


class Reason(StrEnum):
    """Why a record is a dead letter: a code that people filter by."""

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


REASONS = frozenset(reason.value for reason in Reason)


class Refused(Exception):
    """One record cannot be taken. Raised by the strict readers, turned into a ``Dead``."""

    def __init__(self, reason: Reason, detail: str, path: str = "") -> None:
        super().__init__(reason, detail, path)
        self.reason = reason
        self.detail = detail
        self.path = path

    def inside(self, name: str) -> Refused:
        """The same refusal, seen from one level further out."""
        inner = self.path if not self.path or self.path.startswith("[") else f".{self.path}"
        return Refused(self.reason, self.detail, f"{name}{inner}")


@dataclass(frozen=True, slots=True)
class Dead:
    """One record that cannot be taken."""

    index: int  # its row in the input batch
    reason: Reason
    detail: str  # for a person: the field, what was found, what is due; at most 500 printable characters

    @classmethod
    def of(cls, index: int, refused: Refused) -> Dead:
        where = f"{refused.path}: " if refused.path else ""
        return cls(index, refused.reason, printable(where + refused.detail, DETAIL_CHARS_MAX))


@dataclass(frozen=True, slots=True)
class Decoded:
    """One batch, decoded: ``len(rows) + len(deletes) + len(dead) + skipped`` is the number of its records."""

    rows: pa.RecordBatch  # the good rows, exactly in the decoder's schema
    kept: pa.Int64Array  # for each of them: its row in the input batch, ascending
    deletes: pa.RecordBatch  # upsert only: the key columns of records with a null value
    deleted: pa.Int64Array  # for each of them: its row in the input batch, ascending
    dead: tuple[Dead, ...]  # ascending by index
    skipped: int  # null values under tombstones = "skip"


class Decoder(Protocol):
    """Turns the bytes of records into rows. Cheap to build and to pickle: every task has its own."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def key_schema(self) -> pa.Schema: ...

    def decode(self, batch: pa.RecordBatch) -> Decoded: ...


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
