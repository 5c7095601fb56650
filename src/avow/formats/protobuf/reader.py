"""One message, strictly: it is read exactly, or it is refused by name. This reader has the last word.

What the format allows is taken: fields in any order, repeated numbers packed or not, a field given again (the last one
counts; messages are merged), the members of a oneof one after the other (the last one counts), keys of a map twice
(likewise). What libraries take in silence is refused: another wire type than the field's, numbers that do not fit,
a boolean other than 0 and 1, text that is not UTF-8 (also in proto2).

A message is read in two steps: ``read`` gathers what is there in a dict by field number, so that a message which comes
in parts is merged as the specification says, and ``finish`` makes the values of it.

Owns: what a field's bytes must look like. Must not know: Arrow, frames. Neighbours: ``wire``, ``layout`` and
``wellknown``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from avow.formats.base import DecodeError, Reason, shown
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
    default,
)
from avow.formats.protobuf.wellknown import CONVERT, DECIMAL_RECORD, RECORDS, decimal_of, json_text
from avow.formats.protobuf.wire import (
    DEPTH_MAX,
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    WIRE_NAMES,
    read_fixed,
    read_length,
    read_tag,
    read_varint,
    skip,
    too_deep,
)
from avow.formats.text import refuse_nul, text_of

UNKNOWN_ENUM = "unknown-enum"  # the reason: a number that is no value of the enum

State = dict[int, Any]  # what was read of a message, by field number
ReadScalar = Callable[[bytes, int, int], tuple[Any, int]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every message of a pipeline."""

    refuse_nul: bool  # the sink cannot hold NUL in text
    refuse_unknown_fields: bool = False
    keep_unknown_enums: bool = False  # as their number, in text


class StrictReader:
    """Reads messages of one layout."""

    def __init__(self, record: Record, rules: Rules) -> None:
        self._message = _Compiler(rules).message(record)

    def row(self, data: bytes) -> Mapping[str, object]:
        """The columns of a message, or ``DecodeError``."""
        state: State = {}
        self._message.read(data, 0, len(data), state, 1)
        row: Mapping[str, object] = self._message.finish(state)
        return row


class _Message:
    """Reads a message: a struct, or what ``convert`` makes of one."""

    wire = LENGTH

    def __init__(self, rules: Rules, convert: Callable[[dict[str, Any]], Any] | None) -> None:
        self._refuse_unknown = rules.refuse_unknown_fields
        self._convert = convert
        self._fields: dict[int, _Field] = {}  # set behind: a message of JSON values contains itself

    def set_fields(self, fields: list[_Field]) -> None:
        self._fields = {field.slot.number: field for field in fields}

    def read(self, data: bytes, at: int, end: int, state: State, depth: int) -> None:
        if depth > DEPTH_MAX:
            too_deep()
        while at < end:
            number, wire, at = read_tag(data, at, end)
            field = self._fields.get(number)
            if field is not None:
                try:
                    at = field.read(data, at, end, wire, state, depth)
                except DecodeError as error:
                    raise error.inside(field.slot.name) from None
                continue
            at = skip(data, at, end, number, wire, depth)
            if self._refuse_unknown:
                raise DecodeError(Reason.UNKNOWN_FIELD, f"the schema has no field with the number {number}")

    def finish(self, state: State) -> Any:
        values: dict[str, Any] = {}
        for number, field in self._fields.items():
            name = field.slot.name
            try:
                values[name] = field.finish(state[number]) if number in state else field.absent()
            except DecodeError as error:
                raise error.inside(name) from None
        return values if self._convert is None else self._convert(values)


class _Scalar:
    """Reads a number, text or bytes."""

    def __init__(self, wire: int, read: ReadScalar) -> None:
        self.wire = wire
        self.read = read


_Reader = _Scalar | _Message


class _Field:
    """Reads a field into the state of its message."""

    def __init__(self, slot: Slot, reader: _Reader, rivals: tuple[int, ...]) -> None:
        self.slot = slot
        self._reader = reader
        self._rivals = rivals  # the other members of its oneof

    def read(self, data: bytes, at: int, end: int, wire: int, state: State, depth: int) -> int:
        reader = self._reader
        self._check_wire(wire, reader.wire)
        for rival in self._rivals:
            state.pop(rival, None)
        if isinstance(reader, _Message):
            start, stop = read_length(data, at, end)
            reader.read(data, start, stop, state.setdefault(self.slot.number, {}), depth + 1)
            return stop
        state[self.slot.number], at = reader.read(data, at, end)
        return at

    def finish(self, found: Any) -> Any:
        return self._reader.finish(found) if isinstance(self._reader, _Message) else found

    def absent(self) -> Any:
        if self.slot.absent is Absent.REFUSED:
            raise DecodeError(Reason.MISSING_FIELD, "absent, but required")
        if self.slot.absent is Absent.NULL_KEY:
            raise DecodeError(Reason.NULL_KEY, "not set, and sink.key names it")
        return None if self.slot.absent is Absent.NULL else self.slot.absent

    def _check_wire(self, wire: int, due: int) -> None:
        if wire != due:
            raise DecodeError(Reason.WRONG_TYPE, f"expected {WIRE_NAMES[due]}, found {WIRE_NAMES[wire]}")


class _List(_Field):
    def read(self, data: bytes, at: int, end: int, wire: int, state: State, depth: int) -> int:
        reader, elements = self._reader, state.setdefault(self.slot.number, [])
        try:
            if isinstance(reader, _Scalar) and reader.wire != LENGTH and wire == LENGTH:
                at, stop = read_length(data, at, end)
                while at < stop:  # packed
                    element, at = reader.read(data, at, stop)
                    elements.append(element)
                return at
            self._check_wire(wire, reader.wire)
            if isinstance(reader, _Scalar):
                element, at = reader.read(data, at, end)
                elements.append(element)
                return at
            start, stop = read_length(data, at, end)
            inner: State = {}
            reader.read(data, start, stop, inner, depth + 1)
            elements.append(inner)
            return stop
        except DecodeError as error:
            raise error.inside(f"[{len(elements)}]") from None

    def finish(self, found: Any) -> Any:
        finished: list[Any] = []
        try:
            for element in found:
                finished.append(super().finish(element))
        except DecodeError as error:
            raise error.inside(f"[{len(finished)}]") from None
        return finished

    def absent(self) -> Any:
        return []


class _Map(_Field):
    """Its entries are messages with the fields key and value, and each is read on its own."""

    def read(self, data: bytes, at: int, end: int, wire: int, state: State, depth: int) -> int:
        assert isinstance(self._reader, _Message)
        self._check_wire(wire, LENGTH)
        start, stop = read_length(data, at, end)
        entry: State = {}
        self._reader.read(data, start, stop, entry, depth + 1)
        # The last of two equal keys counts, and takes the place of the first.
        key, value = self._reader.finish(entry).values()
        state.setdefault(self.slot.number, {})[key] = value
        return stop

    def finish(self, found: Any) -> Any:
        return list(found.items())

    def absent(self) -> Any:
        return []


class _EntryValue(_Field):
    """The value of an entry of a map: absent, it has its type's default, a message one without fields."""

    def absent(self) -> Any:
        return self._reader.finish({}) if isinstance(self._reader, _Message) else self.slot.absent


class _Compiler:
    """Makes the readers of a layout."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def message(self, record: Record, convert: Callable[[dict[str, Any]], Any] | None = None) -> _Message:
        message = _Message(self._rules, convert)
        message.set_fields(self.fields(record))
        return message

    def fields(self, record: Record) -> list[_Field]:
        oneofs: dict[str, list[int]] = {}
        for slot in record.slots:
            if slot.oneof:
                oneofs.setdefault(slot.oneof, []).append(slot.number)
        return [
            self._field(slot, tuple(number for number in oneofs.get(slot.oneof, ()) if number != slot.number))
            for slot in record.slots
        ]

    def _field(self, slot: Slot, rivals: tuple[int, ...]) -> _Field:
        if slot.many is Many.MAP:
            return _Map(slot, self._entry(slot), ())
        reader = self._reader(slot.value)
        return _List(slot, reader, ()) if slot.many is Many.LIST else _Field(slot, reader, rivals)

    def _entry(self, slot: Slot) -> _Message:
        assert slot.key is not None
        value = slot.value
        absent = default(value) if isinstance(value, Kind | Enumeration) else Absent.NULL
        # Libraries differ in what they make of an entry with other fields, and nobody writes one.
        message = _Message(replace(self._rules, refuse_unknown_fields=True), _map_entry)
        key = _Field(Slot(1, "key", slot.key, absent=default(slot.key)), self._reader(slot.key), ())
        message.set_fields([key, _EntryValue(Slot(2, "value", value, absent=absent), self._reader(value), ())])
        return message

    def _reader(self, value: Value) -> _Reader:
        match value:
            case Enumeration():
                return _Scalar(VARINT, _enum(value, keep=self._rules.keep_unknown_enums))
            case Record():
                return self.message(value)
            case Wrapped(kind):
                inner = Slot(1, "value", kind, absent=default(kind))
                return self.message(Record("", (inner,)), lambda found: found["value"])
            case Exact():
                return self.message(DECIMAL_RECORD, decimal_of(value))
            case Special():
                if value in (Special.JSON_OBJECT, Special.JSON_VALUE, Special.JSON_ARRAY):
                    return self._json(value)
                return self.message(RECORDS[value], CONVERT[value])
            case Kind.STRING:
                return _Scalar(LENGTH, _string(refuse_nul_in_it=self._rules.refuse_nul))
            case _:
                return _SCALARS[value]

    def _json(self, special: Special) -> _Message:
        """As text."""
        convert = CONVERT[special]
        text = _Message(self._rules, lambda found: json_text(convert(found)))
        text.set_fields(_JsonCompiler(replace(self._rules, keep_unknown_enums=False)).fields(RECORDS[special]))
        return text


class _JsonCompiler(_Compiler):
    """Makes the readers of JSON values, which stay values inside one another."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._messages: dict[Special, _Message] = {}  # they contain one another: one of each

    def _json(self, special: Special) -> _Message:
        if special not in self._messages:
            self._messages[special] = _Message(self._rules, CONVERT[special])
            self._messages[special].set_fields(self.fields(RECORDS[special]))
        return self._messages[special]


def _map_entry(found: dict[str, Any]) -> dict[str, Any]:
    return {"key": _key_text(found["key"]), "value": found["value"]}


def _key_text(key: object) -> str:
    """The keys of a map column are text."""
    if isinstance(key, bool):
        return "true" if key else "false"
    return str(key)


def _string(*, refuse_nul_in_it: bool) -> ReadScalar:
    def read(data: bytes, at: int, end: int) -> tuple[str, int]:
        start, stop = read_length(data, at, end)
        text = text_of(data[start:stop])
        if refuse_nul_in_it:
            refuse_nul(text)
        return text, stop

    return read


def _bytes(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    start, stop = read_length(data, at, end)
    return data[start:stop], stop


def _enum(enumeration: Enumeration, *, keep: bool) -> ReadScalar:
    names, read_number = enumeration.names, _signed(32, "an enum")

    def read(data: bytes, at: int, end: int) -> tuple[str, int]:
        number, at = read_number(data, at, end)
        if number in names:
            return names[number], at
        if keep:
            return str(number), at
        known = shown(", ".join(f"{name} = {number}" for number, name in names.items()))
        raise DecodeError(UNKNOWN_ENUM, f"{number} is no value of the enum, which has {known}")

    return read


def _bool(data: bytes, at: int, end: int) -> tuple[bool, int]:
    number, at = read_varint(data, at, end)
    if number > 1:
        raise DecodeError(Reason.OUT_OF_RANGE, f"{number:,} is neither 0 (false) nor 1 (true)")
    return number == 1, at


def _signed(bits: int, name: str) -> ReadScalar:
    """Negative ones are written with 64 bits, whatever the type."""
    limit = 1 << (bits - 1)

    def read(data: bytes, at: int, end: int) -> tuple[int, int]:
        number, at = read_varint(data, at, end)
        if number >> 63:
            number -= 1 << 64
        if not -limit <= number < limit:
            raise DecodeError(Reason.OUT_OF_RANGE, f"{number:,} does not fit into {name}")
        return number, at

    return read


def _unsigned(bits: int, name: str) -> ReadScalar:
    def read(data: bytes, at: int, end: int) -> tuple[int, int]:
        number, at = read_varint(data, at, end)
        if number >> bits:
            raise DecodeError(Reason.OUT_OF_RANGE, f"{number:,} does not fit into {name}")
        return number, at

    return read


def _zigzag(bits: int, name: str) -> ReadScalar:
    read_number = _unsigned(bits, name)

    def read(data: bytes, at: int, end: int) -> tuple[int, int]:
        number, at = read_number(data, at, end)
        return (number >> 1) ^ -(number & 1), at

    return read


def _fixed(form: str) -> ReadScalar:
    unpack, size = struct.Struct(form).unpack, struct.calcsize(form)

    def read(data: bytes, at: int, end: int) -> tuple[Any, int]:
        number, at = read_fixed(data, at, end, size)
        return unpack(number)[0], at

    return read


_SCALARS: dict[Kind, _Scalar] = {
    Kind.DOUBLE: _Scalar(FIXED64, _fixed("<d")),
    Kind.FLOAT: _Scalar(FIXED32, _fixed("<f")),
    Kind.INT32: _Scalar(VARINT, _signed(32, "int32")),
    Kind.INT64: _Scalar(VARINT, _signed(64, "int64")),
    Kind.UINT32: _Scalar(VARINT, _unsigned(32, "uint32")),
    Kind.UINT64: _Scalar(VARINT, _unsigned(64, "uint64")),
    Kind.SINT32: _Scalar(VARINT, _zigzag(32, "sint32")),
    Kind.SINT64: _Scalar(VARINT, _zigzag(64, "sint64")),
    Kind.FIXED32: _Scalar(FIXED32, _fixed("<I")),
    Kind.FIXED64: _Scalar(FIXED64, _fixed("<Q")),
    Kind.SFIXED32: _Scalar(FIXED32, _fixed("<i")),
    Kind.SFIXED64: _Scalar(FIXED64, _fixed("<q")),
    Kind.BOOL: _Scalar(VARINT, _bool),
    Kind.BYTES: _Scalar(LENGTH, _bytes),
}
