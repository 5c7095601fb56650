"""JSON lines as records: each with its number, its end in the file, its key and its idempotency key.

A line is a JSON object, read as strictly as a pipeline reads it; its bytes are sent as they are, or what an encoder
makes of the object. Lines of nothing but white space are passed over. Owns: lines. Must not know: Kafka, schemas.
Neighbours: ``imports`` and the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO
from uuid import uuid4

from avow.errors import ConfigError
from avow.formats.base import DETAIL_CHARS_MAX, DecodeError, Reason, printable, shown
from avow.formats.json.document import Json, Number, parse

LINE_BYTES_MAX = 100 << 20  # more than any broker takes


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, as it is there."""

    number: int  # from 1
    raw: bytes  # with what ends it
    until: int  # where it ends in the file, in bytes

    @property
    def value(self) -> bytes:
        return self.raw.rstrip(b"\r\n")

    @property
    def blank(self) -> bool:
        return not self.raw.strip()


@dataclass(frozen=True, slots=True)
class Message:
    """A line as it is sent."""

    line: Line
    value: bytes
    key: bytes | str | None
    idempotency_key: str | None


class BadLine(ConfigError):
    """A line that cannot be sent."""

    def __init__(self, name: str, line: Line, why: str) -> None:
        super().__init__(
            f"{name}:{line.number}: {why}",
            advice="Fix the line, or skip and count such lines with --skip-bad.",
        )


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How lines become messages."""

    name: str  # the file's, for messages
    key_field: str | None = None
    idempotency_field: str | None = None
    make_idempotency_key: bool = False
    # Of a format with a schema, from a parsed line, or from what its key field has. ValueError: it does not fit.
    encode: Callable[[Json], bytes] | None = None
    encode_key: Callable[[Json], bytes] | None = None

    def message(self, line: Line) -> Message:
        """The message, or ``BadLine``."""
        if len(line.raw) > LINE_BYTES_MAX:
            # Not to be skipped: where it ends is not known.
            raise ConfigError(f"{self.name}:{line.number}: the line is longer than {LINE_BYTES_MAX:,} bytes")
        try:
            document = parse(line.value)
            key = self._key(document)
            idempotency_key = _text(document, self.idempotency_field) if self.idempotency_field else None
            value = self.encode(document) if self.encode else line.value
        except DecodeError as error:
            path = f"{error.path}: " if error.path else ""
            raise BadLine(self.name, line, f"{path}{error.detail}") from None
        except ValueError as error:
            raise BadLine(self.name, line, printable(str(error), DETAIL_CHARS_MAX)) from None
        if self.make_idempotency_key:
            idempotency_key = str(uuid4())
        return Message(line, value, key, idempotency_key)

    def _key(self, document: dict[str, Json]) -> bytes | str | None:
        if self.key_field is None:
            return None
        if self.encode_key is None:
            return _text(document, self.key_field)
        if self.key_field not in document:
            raise DecodeError(Reason.MISSING_FIELD, f"there is no key field {shown(self.key_field)}")
        try:
            return self.encode_key(document[self.key_field])
        except ValueError as error:
            raise ValueError(f"key {self.key_field}: {error}") from None


def read(stream: BinaryIO, after: Line | None = None) -> Iterator[Line]:
    """The lines that follow ``after``, where the stream stands."""
    number, until = (after.number, after.until) if after else (0, 0)
    while raw := stream.readline(LINE_BYTES_MAX + 1):
        number, until = number + 1, until + len(raw)
        yield Line(number, raw, until)


def _text(document: dict[str, Json], field: str) -> str:
    """A field as a key: text as it is, numbers and truth values as JSON spells them."""
    value = document.get(field)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Number):
        return value.decode()
    if isinstance(value, str):
        return value
    raise DecodeError(Reason.MISSING_FIELD, f"the key field {shown(field)} is not a string, number or boolean")
