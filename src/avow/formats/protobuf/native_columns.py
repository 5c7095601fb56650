"""Many messages at once, by avow's own C library: strict by itself, and many times faster than one by one.

Owns: a layout as the library wants it. Must not know: why a record is refused, and how messages are read. Its
neighbours are ``readers``, which chooses it where the library is there, and ``avow_native.protobuf``.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pyarrow as pa

from avow import native
from avow.arrow import arrow_type
from avow.formats.protobuf.descriptors import Kind
from avow.formats.protobuf.layout import (
    Absent,
    Enumeration,
    Exact,
    Many,
    Record,
    Slot,
    Special,
    Value,
    Wrapped,
    columns,
    default,
)
from avow.formats.protobuf.reader import Rules
from avow.formats.protobuf.wire import varint
from avow.schema import Array, Field, Map, Struct, Type

if TYPE_CHECKING:
    from avow_native.protobuf import Column
    from avow_native.protobuf import Field as NativeField

_FIXED = {
    Kind.DOUBLE: "<d",
    Kind.FLOAT: "<f",
    Kind.FIXED32: "<I",
    Kind.FIXED64: "<Q",
    Kind.SFIXED32: "<i",
    Kind.SFIXED64: "<q",
}
_SPECIAL = {
    Special.TIMESTAMP: "timestamp",
    Special.DURATION: "duration",
    Special.DATE: "date",
    Special.EMPTY: "empty",
}
_NO_MESSAGE = b"\0"  # a length of zero: a message with nothing in it


class NativeColumns:
    """Reads values into the columns of one layout. Unknown numbers of enums, and all else that is rare, it doubts."""

    def __init__(self, record: Record, rules: Rules) -> None:
        from avow_native.protobuf import ProtobufReader

        library = native.library()
        assert library is not None
        self._reader = ProtobufReader(
            library,
            [_column(field) for field in columns(record)],
            _message(record),
            refuse_nul=rules.refuse_nul,
            ignore_unknown=not rules.refuse_unknown_fields,
        )

    @staticmethod
    def can_read(record: Record) -> bool:
        """Whether the library is there, and knows these types."""
        if native.library() is None:
            return False
        from avow_native.protobuf import ProtobufReader

        return ProtobufReader.can_read([_column(field) for field in columns(record)])

    def read(self, values: pa.BinaryArray, skip: int, prefix: bytes) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The rows of the values beyond doubt, in order, and which are not. ``prefix``: what comes behind ``skip``
        bytes and before each message."""
        return self._reader.read(values, skip=skip, prefix=prefix)


def _column(field: Field) -> Column:
    from avow_native.protobuf import Column

    return Column(field.name, arrow_type(field.type), field.required, tuple(map(_column, _parts(field.type))))


def _parts(type: Type) -> tuple[Field, ...]:
    if isinstance(type, Array):
        return (Field("", type.element),)
    if isinstance(type, Map):
        return (Field("", type.value),)
    return type.fields if isinstance(type, Struct) else ()


def _message(record: Record) -> NativeField:
    from avow_native.protobuf import Field as NativeField

    oneofs = {name: number for number, name in enumerate(dict.fromkeys(slot.oneof for slot in record.slots), start=1)}
    return NativeField("message", parts=tuple(_field(slot, oneofs[slot.oneof]) for slot in record.slots))


def _field(slot: Slot, oneof: int) -> NativeField:
    from avow_native.protobuf import Field as NativeField

    if slot.many is Many.MAP:
        assert slot.key is not None
        key = _value(slot.key, 1, initial=_encoded(slot.key, default(slot.key)))
        is_plain = isinstance(slot.value, Kind | Enumeration)
        value = _value(slot.value, 2, initial=_encoded(slot.value, default(slot.value)) if is_plain else _NO_MESSAGE)
        return NativeField("doubt", slot.number, "map", parts=(key, value))
    if slot.many is Many.LIST:
        return _value(slot.value, slot.number, many="list")
    initial = None if isinstance(slot.absent, Absent) else _encoded(slot.value, slot.absent)
    return _value(
        slot.value,
        slot.number,
        initial=initial,
        required=slot.absent in (Absent.REFUSED, Absent.NULL_KEY),
        oneof=oneof if slot.oneof else 0,
    )


def _value(
    value: Value,
    number: int,
    *,
    many: str = "one",
    initial: bytes | None = None,
    required: bool = False,
    oneof: int = 0,
) -> NativeField:
    from avow_native.protobuf import Field as NativeField

    op = ""
    parts: tuple[NativeField, ...] = ()
    names: dict[int, str] = {}
    match value:
        case Enumeration():
            op, names = "enum", dict(value.names)
        case Wrapped(kind):
            op, parts = "wrapped", (_value(kind, 1, initial=_encoded(kind, default(kind))),)
        case Record():
            op, parts = "message", _message(value).parts
        case Exact():
            op = "decimal"
        case Special():
            op = _SPECIAL.get(value, "doubt")
        case _:
            op = str(value)
    return NativeField(op, number, many, initial, required, oneof, parts, names)


def _encoded(value: Value, plain: object) -> bytes:
    """A default as it would stand in a message."""
    if isinstance(value, Enumeration):
        return varint(next(number for number, name in value.names.items() if name == plain))
    assert isinstance(value, Kind)
    if value in _FIXED:
        return struct.pack(_FIXED[value], plain)
    if isinstance(plain, str):
        plain = plain.encode()
    if isinstance(plain, bytes):
        return varint(len(plain)) + plain
    assert isinstance(plain, int)
    if value in (Kind.SINT32, Kind.SINT64):
        plain = plain << 1 if plain >= 0 else (-plain << 1) - 1
    return varint(plain)
