"""One Avro value as it stands there, by its writer's schema alone: logical types are left to who asks.

Text is str, bytes and fixed are bytes, an enum is its symbol, an array a list, a map or a record a dict; what is in a
union is that value itself. The bytes are read as strictly as in ``reader``.

Owns: this form of a value. Must not know: frames, columns. Its neighbour is ``reader``.
"""

from __future__ import annotations

from typing import Any

from avow.formats.avro.reader import (
    NOT_AVRO,
    WIRES,
    Read,
    array_of,
    converted,
    enum_of,
    fixed_bytes,
    map_of,
    union_of,
)
from avow.formats.avro.resolution import Symbols
from avow.formats.avro.schema import Array, BadSchema, Enum, Fixed, Map, Primitive, Record, Type, Union
from avow.formats.base import DecodeError, Reason
from avow.formats.text import text_of


class PlainReader:
    """Reads what one schema has written. ``BadSchema`` for a type that is inside itself: its values have no end."""

    def __init__(self, type: Type) -> None:
        self._records: dict[Record, Read | None] = {}  # None: it is being looked at
        try:
            self._read = self._reader(type)
        except RecursionError:
            raise BadSchema("it is nested too deeply") from None

    def value(self, data: bytes, at: int) -> Any:
        """The value that begins here and ends with the data, or ``DecodeError``."""
        try:
            value, end = self._read(data, at)
        except RecursionError:  # records in records: a schema may name as many as it likes
            raise DecodeError(Reason.TOO_DEEP, "nested too deeply") from None
        if end != len(data):
            raise DecodeError(NOT_AVRO, f"{len(data) - end:,} more bytes behind the value")
        return value

    def _reader(self, type: Type) -> Read:
        match type:
            case Primitive(name):
                return converted(WIRES[name], text_of if name == "string" else None)
            case Fixed():
                size = type.size
                return lambda data, at: (fixed_bytes(data, at, size), at + size)
            case Enum(_, symbols):
                return enum_of(Symbols(symbols, symbols))
            case Array(items):
                return array_of(self._reader(items))
            case Map(values):
                return converted(map_of(converted(WIRES["string"], text_of), self._reader(values)), dict)
            case Union(branches):
                return union_of([self._reader(branch) for branch in branches])
            case Record():
                return self._record(type)

    def _record(self, record: Record) -> Read:
        if record in self._records:
            known = self._records[record]
            if known is None:
                raise BadSchema(f"the {record} is inside itself")
            return known
        self._records[record] = None
        fields = [(field.name, self._reader(field.type)) for field in record.fields]

        def read(data: bytes, at: int) -> tuple[dict[str, Any], int]:
            members: dict[str, Any] = {}
            name = ""
            try:
                for name, read_field in fields:
                    members[name], at = read_field(data, at)
            except DecodeError as error:
                raise error.inside(name) from None
            return members, at

        self._records[record] = read
        return read
