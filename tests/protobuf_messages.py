"""Protobuf schemas and messages made at random, and what Google's library reads of bytes: for the tests of our readers.

A schema is text, so that the compiler is tested too. ``row`` says what a message of Google's library is in our columns,
by its reflection and without our code.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError as GoogleRefuses

from avow.formats.protobuf.compile import compile_text, descriptor_set
from avow.formats.protobuf.descriptors import Schema

INTEGERS = ["int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32", "sfixed64"]
SCALARS = [*INTEGERS, "double", "float", "bool", "string", "bytes"]
KEYS = [*INTEGERS, "bool", "string"]
KNOWN = ["Timestamp", "Duration", "Struct", "Value", "ListValue", "Any", "Empty", "FieldMask"]
KNOWN += [
    f"{name}Value" for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
]
DECIMAL, DATE = "confluent.type.Decimal", "google.type.Date"
PARAMS = '(confluent.field_meta) = { params: [{key: "precision", value: "20"}, {key: "scale", value: "2"}] }'
BUILT_IN = ["confluent/meta", "confluent/type/decimal", "google/type/date", "google/type/timeofday"]
IMPORTS = ["timestamp", "duration", "struct", "any", "empty", "field_mask", "wrappers"]
TEXTS = ["", "a", "text", "é😀", "\u2028", "\x7f" * 130, "null"]
DEFAULTS = {"string": '"d\\303\\251"', "bytes": '"\\000\\377"', "bool": "true", "float": "1.5", "double": "-2.25"}


class Refused(Exception):
    """Google's library takes the bytes, and our columns cannot hold what they say."""


@dataclass(frozen=True)
class Case:
    text: str
    schema: Schema
    type: Any  # the class of Google's library for the message t.M0

    def parse(self, data: bytes) -> Any:
        """Google's message, or None where it refuses the bytes."""
        try:
            return self.type.FromString(data)
        except GoogleRefuses:
            return None


def case(text: str) -> Case:
    serialized = descriptor_set(text)
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(serialized).file:
        pool.Add(file)  # type: ignore[no-untyped-call,unused-ignore]
    type_ = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.M0"))
    return Case(text, compile_text(text), type_)


def schema_text(chance: random.Random) -> str:
    """Messages M0 to M3 of which each holds only later ones, and two enums."""
    syntax = chance.choice(["proto2", "proto3", "proto3"])
    lines = [f'syntax = "{syntax}";', "package t;", *(f'import "google/protobuf/{name}.proto";' for name in IMPORTS)]
    lines += [f'import "{name}.proto";' for name in BUILT_IN]
    lines.append("enum Color { RED = 0; GREEN = 1; BLUE = -5; }")
    lines.append("enum Size { option allow_alias = true; NONE = 0; SMALL = 7; TINY = 7; BIG = 2147483647; }")
    for number in range(4):
        lines += [f"message M{number} {{", *_fields(chance, syntax, number), "}"]
    return "\n".join(lines)


def _fields(chance: random.Random, syntax: str, message: int) -> list[str]:
    types = [*SCALARS, *SCALARS, "Color", "Size", *(f"google.protobuf.{name}" for name in KNOWN)]
    types += [DATE, DECIMAL, "google.type.TimeOfDay"]
    types += [f"M{number}" for number in range(message + 1, 4)] * 3
    numbers = chance.sample([*range(1, 40), 1_000, 70_000, 2**29 - 1], chance.randint(1, 9))
    lines, oneof = [], []
    for number in numbers:
        name, type_ = f"f{number}", chance.choice(types)
        shape = chance.choice(["one", "one", "optional", "repeated", "map", "oneof"])
        if shape == "map":
            lines.append(f"  map<{chance.choice(KEYS)}, {type_}> {name} = {number};")
        elif type_ == DECIMAL:
            label = "repeated" if shape == "repeated" else "optional"
            lines.append(f"  {label} {type_} {name} = {number}{chance.choice(['', f' [{PARAMS}]'])};")
        elif shape == "repeated":
            packable = (type_ in SCALARS and type_ not in ("string", "bytes")) or type_ in ("Color", "Size")
            option = chance.choice(["", " [packed = true]", " [packed = false]"]) if packable else ""
            lines.append(f"  repeated {type_} {name} = {number}{option};")
        elif shape == "oneof":
            oneof.append(f"    {type_} {name} = {number};")
        elif syntax == "proto2":
            label = chance.choice(["optional", "optional", "required"])
            default = f" [default = {DEFAULTS.get(type_, '7')}]" if type_ in SCALARS and chance.random() < 0.5 else ""
            lines.append(f"  {label} {type_} {name} = {number}{default};")
        else:
            lines.append(f"  {'optional ' if shape == 'optional' else ''}{type_} {name} = {number};")
    return [*lines, *(["  oneof choice {", *oneof, "  }"] if oneof else [])]


# ---- messages ------------------------------------------------------------------------------------------------------


def fill(chance: random.Random, message: Any, share: float = 0.7) -> None:
    """Sets fields of Google's message."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() > share and not field.is_required:
            continue
        if field.is_required and chance.random() < 0.02:
            continue
        if not field.is_repeated:
            _set(chance, message, field)
            continue
        for _ in range(chance.choice([0, 1, 1, 2, 5])):
            values = getattr(message, field.name)
            if field.message_type and field.message_type.GetOptions().map_entry:
                key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
                if value.message_type:
                    _fill_inner(chance, values[_scalar(chance, key)])
                else:
                    values[_scalar(chance, key)] = _scalar(chance, value)
            elif field.message_type:
                _fill_inner(chance, values.add())
            else:
                values.append(_scalar(chance, field))


def _set(chance: random.Random, message: Any, field: Any) -> None:
    if field.message_type:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _fill_inner(chance, inner)
    else:
        setattr(message, field.name, _scalar(chance, field))


def _fill_inner(chance: random.Random, inner: Any) -> None:
    match inner.DESCRIPTOR.full_name:
        case "google.protobuf.Timestamp":
            edges = [-62_135_596_800, 253_402_300_799, 253_402_300_800, -62_135_596_801, -1, 0]
            inner.seconds = chance.choice([*edges, *(chance.randrange(2_000_000_000) for _ in range(20))])
            inner.nanos = chance.choice([*[chance.randrange(10**6) * 1_000 for _ in range(20)], 0, 1, -1_000, 10**9])
        case "google.protobuf.Duration":
            inner.seconds = chance.choice([0, 5, 315_576_000_000, 315_576_000_001, chance.randrange(10**9)])
            inner.nanos = chance.choice([0, chance.randrange(10**6) * 1_000, chance.randrange(10**9), 10**9])
            if chance.random() < 0.3:
                inner.seconds, inner.nanos = -inner.seconds, -inner.nanos
        case "google.type.Date":
            inner.year = chance.choice([0, 1, 1900, 2000, 2024, 2026, 9999, 10_000])
            inner.month, inner.day = chance.choice([*range(1, 13), 0, 13]), chance.choice([1, 28, 29, 30, 31, 32])
        case "confluent.type.Decimal":
            units = chance.choice([0, 1, -1, 127, -128, 12_345, 10**20 - 1, -(10**20) + 1, 10**20, 10**18 - 1])
            inner.value = (
                b"" if chance.random() < 0.05 else units.to_bytes(chance.choice([9, 10, 16, 17]), "big", signed=True)
            )
            inner.precision, inner.scale = 20, chance.choice([2, 2, 2, 2, 0, 1, 3, -1, 2**31 - 1])
        case "google.protobuf.Struct":
            for _ in range(chance.randrange(3)):
                _fill_inner(chance, inner.fields[chance.choice(TEXTS)])
        case "google.protobuf.ListValue":
            for _ in range(chance.randrange(3)):
                _fill_inner(chance, inner.values.add())
        case "google.protobuf.Value":
            fields = ["null_value", "number_value", "string_value", "bool_value", "struct_value", "list_value"]
            _set(chance, inner, inner.DESCRIPTOR.fields_by_name[chance.choice(fields)])
            if inner.WhichOneof("kind") == "null_value":
                inner.null_value = 0
        case _:
            fill(chance, inner)


def _scalar(chance: random.Random, field: Any) -> Any:
    kinds = descriptor_pb2.FieldDescriptorProto
    match field.type:
        case kinds.TYPE_STRING:
            return chance.choice(TEXTS)
        case kinds.TYPE_BYTES:
            return chance.choice([b"", b"\0", b"\xff\xfe", chance.randbytes(200)])
        case kinds.TYPE_BOOL:
            return chance.random() < 0.5
        case kinds.TYPE_DOUBLE | kinds.TYPE_FLOAT:
            rare = [math.nan, math.inf, -math.inf] if chance.random() < 0.1 else [-0.0]
            return chance.choice([*rare, 0.0, 1.5, -0.1, 1e30, 5e-324, chance.random()])
        case kinds.TYPE_ENUM:
            numbers = [value.number for value in field.enum_type.values]
            is_open = not field.enum_type.is_closed
            return 5 if is_open and chance.random() < 0.02 else chance.choice(numbers)
        case kinds.TYPE_INT32 | kinds.TYPE_SINT32 | kinds.TYPE_SFIXED32:
            return chance.choice([0, 1, -1, 300, 2**31 - 1, -(2**31)])
        case kinds.TYPE_INT64 | kinds.TYPE_SINT64 | kinds.TYPE_SFIXED64:
            return chance.choice([0, 1, -1, 2**31, 2**63 - 1, -(2**63)])
        case kinds.TYPE_UINT32 | kinds.TYPE_FIXED32:
            return chance.choice([0, 1, 2**31, 2**32 - 1])
        case _:
            return chance.choice([0, 1, 2**63, 2**64 - 1])


# ---- what a message is in our columns ------------------------------------------------------------------------------


def row(message: Any) -> dict[str, Any]:
    """Its columns; maps as dicts, JSON text as what it says."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Any, field: Any) -> Any:
    type_ = field.message_type
    if type_ and type_.GetOptions().map_entry:
        inner = type_.fields_by_name["value"]
        return {_key(key): _one(value, inner) for key, value in getattr(message, field.name).items()}
    if field.is_repeated:
        return [_one(value, field) for value in getattr(message, field.name)]
    if field.has_presence and not message.HasField(field.name):
        if field.is_required:
            raise Refused(f"{field.name} is required")
        in_oneof = field.containing_oneof is not None and len(field.containing_oneof.fields) > 1
        if not field.has_default_value or in_oneof:
            return None
    return _one(getattr(message, field.name), field)


def _key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _one(value: Any, field: Any) -> Any:
    if field.enum_type:
        names = [known.name for known in field.enum_type.values if known.number == value]
        if not names:
            raise Refused(f"{value} is no value of {field.enum_type.name}")
        return names[0]
    if not field.message_type:
        return "NaN" if value != value else value
    name = field.message_type.full_name
    if name == "google.protobuf.Timestamp":
        if not (-62_135_596_800 <= value.seconds <= 253_402_300_799 and 0 <= value.nanos < 10**9):
            raise Refused("a timestamp out of range")
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=value.seconds, microseconds=_micros(value.nanos))
    if name == "google.protobuf.Duration":
        if abs(value.seconds) > 315_576_000_000 or abs(value.nanos) >= 10**9 or value.seconds * value.nanos < 0:
            raise Refused("a duration out of range")
        return value.seconds * 10**6 + _micros(value.nanos)
    if name in ("google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue"):
        return _json(value)
    if name == DATE:
        try:
            return date(value.year, value.month, value.day)
        except (ValueError, OverflowError) as error:
            raise Refused(str(error)) from None
    if name == DECIMAL and field.GetOptions().ByteSize():
        return _decimal(value)
    if not field.message_type.fields:
        return True
    if name.startswith("google.protobuf.") and name.endswith("Value"):
        return row(value)["value"]
    return row(value)


def _decimal(value: Any) -> Decimal:
    number = Fraction(int.from_bytes(value.value, "big", signed=True)) / Fraction(10) ** min(value.scale, 100)
    if not value.value or (number * 100).denominator != 1 or abs(number * 100) >= 10**20:
        raise Refused("a decimal that does not fit")
    return Decimal(int(number * 100)).scaleb(-2)


def _micros(nanos: int) -> int:
    if nanos % 1_000:
        raise Refused("digits beyond microseconds")
    return nanos // 1_000


def _json(value: Any) -> Any:
    _refuse_no_json(value)
    try:
        return json.loads(json_format.MessageToJson(value))
    except json_format.Error as error:
        raise Refused(str(error)) from None


def _refuse_no_json(value: Any) -> None:
    """What json_format takes and JSON does not have."""
    name = value.DESCRIPTOR.name
    if name == "Struct":
        for inner in value.fields.values():
            _refuse_no_json(inner)
    elif name == "ListValue":
        for inner in value.values:
            _refuse_no_json(inner)
    elif (kind := value.WhichOneof("kind")) is None:
        raise Refused("a value that has none")
    elif kind in ("struct_value", "list_value"):
        _refuse_no_json(getattr(value, kind))
    elif value.null_value or not math.isfinite(value.number_value):
        raise Refused("JSON has no such value")


def comparable(value: Any, column: Any = None) -> Any:
    """A row of ours as ``row`` has it: pairs as dicts, NaN equal to itself. ``column``: the google field or message."""
    fields = column.fields_by_name
    return {name: _comparable(inner, fields[name]) for name, inner in value.items()}


def _comparable(value: Any, field: Any) -> Any:
    type_ = field.message_type
    if value is None:
        return None
    if type_ and type_.GetOptions().map_entry:
        pairs = [(key, _comparable_one(inner, type_.fields_by_name["value"])) for key, inner in value]
        assert len({key for key, _ in pairs}) == len(pairs), "a key twice"
        return dict(pairs)
    if field.is_repeated:
        return [_comparable_one(inner, field) for inner in value]
    return _comparable_one(value, field)


def _comparable_one(value: Any, field: Any) -> Any:
    type_ = field.message_type
    if isinstance(value, dict):
        return comparable(value, type_)
    if type_ and type_.full_name in ("google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue"):
        return json.loads(value)
    if isinstance(value, Decimal) and not type_:
        return int(value)
    return "NaN" if value != value else value


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The bytes of a message with some of them changed."""
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        start, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        odd = bytes([chance.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 0x0A, 0x0B, 0x0C, 0x7F, 0x80, 0x81, 0xFF])])
        flipped = bytes([data[start] ^ (1 << chance.randrange(8))]) if start < len(data) else odd
        part = chance.choice([b"", odd, odd * 9, flipped, chance.randbytes(3), data[start:end]])
        data = chance.choice(
            [data[:start], data[:start] + part + data[start + 1 :], data[:start] + part + data[start:], data + part]
        )
    return data[:5_000]
