"""JSON lines as records: each with its number, where it ends in its file, and what of it is key and idempotency key.

A line is a JSON object, read as strictly as a pipeline reads it; its bytes are sent as they are. Lines of nothing but
white space are passed over. Owns: lines. Must not know: Kafka. Neighbours: ``imports`` and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO
from uuid import uuid4

from avow.decode.document import Json, Number, parse
from avow.decode.result import Reason, Refused, shown
from avow.errors import ConfigError

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
    key: str | None
    idempotency_key: str | None


class BadLine(ConfigError):
    """A line that cannot be sent."""

    def __init__(self, name: str, line: Line, why: str) -> None:
        super().__init__(
            f"{name}:{line.number}: {why}",
            advice="Mend the line, or leave out such lines with --skip-bad, which counts them.",
        )


@dataclass(frozen=True, slots=True)
class Form:
    """How lines become messages."""

    name: str  # the file's, for messages
    key_field: str | None = None
    idempotency_field: str | None = None
    make_idempotency_key: bool = False

    def message(self, line: Line) -> Message:
        """The message, or ``BadLine``."""
        if len(line.raw) > LINE_BYTES_MAX:
            # Not to be skipped: where it ends is not known.
            raise ConfigError(f"{self.name}:{line.number}: longer than {LINE_BYTES_MAX:,} bytes")
        try:
            document = parse(line.value)
            key = _text(document, self.key_field) if self.key_field else None
            idempotency_key = _text(document, self.idempotency_field) if self.idempotency_field else None
        except Refused as refused:
            where = f"{refused.path}: " if refused.path else ""
            raise BadLine(self.name, line, f"{where}{refused.detail}") from None
        if self.make_idempotency_key:
            idempotency_key = str(uuid4())
        return Message(line, key, idempotency_key)


def read(stream: BinaryIO, after: Line | None = None) -> Iterator[Line]:
    """The lines that follow ``after``, where the stream stands."""
    number, until = (after.number, after.until) if after else (0, 0)
    while raw := stream.readline(LINE_BYTES_MAX + 1):
        number, until = number + 1, until + len(raw)
        yield Line(number, raw, until)


def _text(document: dict[str, Json], field: str) -> str:
    """A field as a key: text as it is, numbers and truth values as JSON spells them."""
    found = document.get(field)
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, Number):
        return found.decode()
    if isinstance(found, str):
        return found
    raise Refused(Reason.MISSING_FIELD, f"the field {shown(field)} has no text or number to be a key")
