"""How messages of a writer's schema are read as those of the reader's: fields are the same by number, not by name.

The bytes do not say their type, so a field that has changed its type may be read as another value without a trace. Here
it is not: types may differ only where every value is read as itself or refused (``int32`` as ``int64``; ``int64`` as
``int32``, whose larger values are refused; ``uint64`` as ``int64`` not, whose larger values would be negative).

Owns: the rules. Must not know: bytes. Neighbours: ``layout``, the reader's side, and ``descriptors``, the writer's.
"""

from __future__ import annotations

from dataclasses import replace

from avow.formats.protobuf.descriptors import Field, Kind, Message, Presence, Schema
from avow.formats.protobuf.layout import (
    DECIMAL,
    Absent,
    Enumeration,
    Exact,
    Many,
    Record,
    Slot,
    Special,
    Value,
    Wrapped,
    default,
)


class Incompatible(ValueError):
    """Messages of the writer's schema cannot be read as the reader's."""


# What else than itself a type is read of.
_SMALL = {Kind.INT32, Kind.UINT32, Kind.BOOL, Kind.ENUM}
_READ_OF: dict[Kind, set[Kind]] = {
    Kind.INT32: {*_SMALL, Kind.INT64},
    Kind.INT64: {*_SMALL},
    Kind.UINT32: {Kind.BOOL, Kind.INT32, Kind.INT64, Kind.UINT64},
    Kind.UINT64: {Kind.BOOL, Kind.UINT32},
    Kind.BOOL: {Kind.INT32, Kind.INT64, Kind.UINT32, Kind.UINT64},
    Kind.SINT32: {Kind.SINT64},
    Kind.SINT64: {Kind.SINT32},
    Kind.STRING: {Kind.BYTES},
    Kind.BYTES: {Kind.STRING},
    Kind.ENUM: {Kind.INT32, Kind.INT64},
}


def resolve(record: Record, writer: Schema) -> Record:
    """The reader's layout for messages of the writer's schema, or ``Incompatible``."""
    return _record(record, writer.messages[record.name], writer)


def _record(record: Record, message: Message, writer: Schema) -> Record:
    fields = {field.number: field for field in message.fields}
    slots = []
    for slot in record.slots:
        try:
            slots.append(_slot(slot, fields.get(slot.number), writer))
        except Incompatible as error:
            inner = str(error)
            raise Incompatible(f"{slot.name}.{inner}" if inner.partition(":")[1] else f"{slot.name}: {inner}") from None
    return replace(record, slots=tuple(slots))


def _slot(slot: Slot, field: Field | None, writer: Schema) -> Slot:
    if field is None:
        if slot.absent is Absent.REFUSED:
            raise Incompatible(f"it is required, and the writer's schema has no field {slot.number}")
        return slot
    entry = writer.messages.get(field.type_name) if field.is_repeated else None
    many = Many.MAP if entry and entry.is_map_entry else Many.LIST if field.is_repeated else Many.ONE
    if many is not slot.many:
        raise Incompatible(f"{_NOUNS[many]} cannot be read as {_NOUNS[slot.many]}")
    if many is Many.MAP and entry is not None:
        key, value = sorted(entry.fields, key=lambda part: part.number)
        assert slot.key is not None
        _value(slot.key, key, writer)
        return replace(slot, value=_value(slot.value, value, writer))
    value_ = _value(slot.value, field, writer)
    return replace(slot, value=value_, absent=_absent(slot, field))


def _absent(slot: Slot, field: Field) -> object:
    """A writer without presence leaves out what is the default, and the reader must not take it for null."""
    is_left_out = field.presence is Presence.IMPLICIT and not field.oneof and slot.many is Many.ONE
    if slot.absent is Absent.NULL and is_left_out and isinstance(slot.value, Kind | Enumeration):
        return default(slot.value)
    return slot.absent


def _value(value: Value, field: Field, writer: Schema) -> Value:
    match value:
        case Kind():
            _check_kind(value, field)
        case Enumeration():
            _check_kind(Kind.ENUM, field)
        case Wrapped(kind):
            # Another wrapper, or any message like one.
            inner = next((f for f in _message(field, writer).fields if f.number == 1), None)
            if inner is not None:
                if inner.is_repeated:
                    raise Incompatible(f"{field.type_name} cannot be read as a wrapper of {kind}")
                _check_kind(kind, inner)
        case Exact():
            if field.type_name != DECIMAL:
                raise Incompatible(f"{field.type_name or field.kind} cannot be read as {DECIMAL}")
        case Special.EMPTY:
            _message(field, writer)
        case Special():
            if field.type_name != value:
                raise Incompatible(f"{field.type_name or field.kind} cannot be read as {value}")
        case Record():
            return _record(value, _message(field, writer), writer)
    return value


def _check_kind(kind: Kind, field: Field) -> None:
    if field.kind is not kind and field.kind not in _READ_OF.get(kind, ()):
        raise Incompatible(f"{field.type_name or field.kind} cannot be read as {kind}")


def _message(field: Field, writer: Schema) -> Message:
    if field.kind is not Kind.MESSAGE:
        raise Incompatible(f"{field.type_name or field.kind} cannot be read as a message")
    return writer.messages[field.type_name]


_NOUNS = {Many.ONE: "a single field", Many.LIST: "a repeated field", Many.MAP: "a map"}
