"""Which columns a message becomes, and how each of its fields is read: a tree that the readers are made of.

- numbers as the column that holds them exactly: uint32 and fixed32 are long, uint64 and fixed64 decimal(20,0)
- an enum is the name of its value
- a message is a struct, a repeated field an array, a map a map with its keys as text
- a field without presence (proto3 without ``optional``) has its default where it is absent, and so has one with a
  declared default. A field with presence, and one in a oneof, is null where it is not set.
- only a required field is declared not null: any other may be added when a table is there, whose rows have none
- google.protobuf.Timestamp is a timestamp, Duration the microseconds as long, a wrapper (Int64Value ...) its value or
  null, Struct, Value and ListValue JSON text. Any and FieldMask are structs as other messages.
- google.type.Date is a date, confluent.type.Decimal a decimal where the schema says its precision and scale
- a message without fields has nothing for a struct to hold: it is a boolean, true where it is set

Refused by name: a message that contains itself, groups, names that differ by case only.

Owns: this mapping. Must not know: bytes, Arrow. Neighbours: ``descriptors``, ``reader`` and ``native_columns``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum as PlainEnum
from enum import StrEnum

from avow import schema as ddl
from avow.formats.protobuf.descriptors import BadSchema, Field, Kind, Message, Presence, Schema
from avow.schema import Array, Decimal, Map, Scalar, Struct

DECIMAL = "confluent.type.Decimal"
FIELDS_MAX = 10_000  # of all messages in one another: a bound for what a small schema can unfold to


class Absent(PlainEnum):
    """What a field that is not there is, if not a default."""

    NULL = "null"
    REFUSED = "refused"  # the record is not valid
    NULL_KEY = "null-key"  # the column names the row


class Many(StrEnum):
    ONE = "one"
    LIST = "list"
    MAP = "map"


class Special(StrEnum):
    """A message that is not a struct."""

    TIMESTAMP = "google.protobuf.Timestamp"
    DURATION = "google.protobuf.Duration"
    DATE = "google.type.Date"
    JSON_OBJECT = "google.protobuf.Struct"
    JSON_VALUE = "google.protobuf.Value"
    JSON_ARRAY = "google.protobuf.ListValue"
    EMPTY = "message without fields"


@dataclass(frozen=True, slots=True)
class Enumeration:
    names: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A message with one field, number 1, that stands for a value which may be null."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class Exact:
    """A confluent.type.Decimal whose precision and scale the schema says."""

    precision: int
    scale: int


@dataclass(frozen=True, slots=True)
class Record:
    """A message as a struct, or as the row itself."""

    name: str
    slots: tuple[Slot, ...]


Value = Kind | Enumeration | Wrapped | Exact | Special | Record  # a Kind that is no enum, message or group


@dataclass(frozen=True, slots=True)
class Slot:
    """One field."""

    number: int
    name: str
    value: Value
    many: Many = Many.ONE
    key: Kind | None = None  # of a map
    absent: object = Absent.NULL  # an ``Absent``, or the default
    oneof: str = ""

    @property
    def required(self) -> bool:
        return self.absent is Absent.REFUSED


def layout(schema: Schema, message: str) -> Record:
    """The columns of a message of the schema, or ``BadSchema``."""
    if message not in schema.messages:
        raise BadSchema(f"there is no message {message}; there are: {', '.join(schema.places.values()) or 'none'}")
    record = _Builder(schema).record(schema.messages[message], ())
    if not record.slots:
        raise BadSchema(f"the message {message} has no fields: there is nothing to make columns of")
    return record


def with_keys(record: Record, keys: frozenset[str]) -> Record:
    """The same where these columns may not be null."""
    absent = {slot.name: Absent.NULL_KEY for slot in record.slots if slot.name in keys and slot.absent is Absent.NULL}
    slots = (replace(slot, absent=absent.get(slot.name, slot.absent)) for slot in record.slots)
    return replace(record, slots=tuple(slots)) if absent else record


def columns(record: Record) -> ddl.Schema:
    return ddl.Schema(_fields(record))


def _fields(record: Record) -> tuple[ddl.Field, ...]:
    return tuple(ddl.Field(slot.name, _type(slot), slot.required) for slot in record.slots)


def _type(slot: Slot) -> ddl.Type:
    type_ = _value_type(slot.value)
    if slot.many is Many.LIST:
        return Array(type_)
    return Map(type_) if slot.many is Many.MAP else type_


def _value_type(value: Value) -> ddl.Type:
    match value:
        case Enumeration():
            return Scalar.STRING
        case Record():
            return Struct(_fields(value))
        case Special():
            return _SPECIAL[value]
        case Wrapped(kind):
            return _TYPES[kind]
        case Exact(precision, scale):
            return Decimal(precision, scale)
        case _:
            return _TYPES[value]


class _Builder:
    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._fields = 0

    def record(self, message: Message, inside: tuple[str, ...]) -> Record:
        """``inside``: the messages around it, the outermost first."""
        if message.name in inside:
            path = " in ".join((message.name, *reversed(inside)))
            raise BadSchema(f"the message {message.name} contains itself ({path}): no column has an end like that")
        if len(inside) >= ddl.MAX_DEPTH:
            raise BadSchema(f"the message {inside[0]} is nested more than {ddl.MAX_DEPTH} deep")
        _refuse_equal_names(message)
        return Record(message.name, tuple(self._slot(field, message, inside) for field in message.fields))

    def _slot(self, field: Field, message: Message, inside: tuple[str, ...]) -> Slot:
        self._fields += 1
        if self._fields > FIELDS_MAX:
            raise BadSchema(f"the message {(*inside, message.name)[0]} has more than {FIELDS_MAX:,} fields in all")
        if field.kind is Kind.GROUP:
            raise BadSchema(
                f"the field {field.name} of {message.name} is a group, or has message_encoding = DELIMITED: such "
                "fields are not read"
            )
        around = (*inside, message.name)
        entry = self._schema.messages.get(field.type_name)
        if entry is not None and entry.is_map_entry:
            key, value = sorted(entry.fields, key=lambda part: part.number)
            return Slot(field.number, field.name, self._value(value, around), Many.MAP, key.kind, absent=())
        value_ = self._value(field, around)
        if field.is_repeated:
            return Slot(field.number, field.name, value_, Many.LIST, absent=())
        return Slot(field.number, field.name, value_, absent=_absent(field, value_), oneof=field.oneof)

    def _value(self, field: Field, around: tuple[str, ...]) -> Value:
        if field.kind is Kind.ENUM:
            return Enumeration(self._schema.enums[field.type_name].values)
        if field.kind is not Kind.MESSAGE:
            return field.kind
        if field.type_name in WRAPPERS:
            return Wrapped(WRAPPERS[field.type_name])
        if field.type_name == DECIMAL and 0 < field.precision <= ddl.MAX_PRECISION and field.scale <= field.precision:
            return Exact(field.precision, field.scale)
        if field.type_name in _SPECIAL_NAMES:
            return Special(field.type_name)
        message = self._schema.messages[field.type_name]
        return self.record(message, around) if message.fields else Special.EMPTY


def _refuse_equal_names(message: Message) -> None:
    names: dict[str, str] = {}
    for field in message.fields:
        other = names.setdefault(field.name.lower(), field.name)
        if other != field.name:
            raise BadSchema(
                f"the fields {other} and {field.name} of {message.name} differ by case only, and so would their columns"
            )


def _absent(field: Field, value: Value) -> object:
    if field.presence is Presence.REQUIRED:
        return Absent.REFUSED
    if field.oneof:
        return Absent.NULL
    if field.default is not None:
        return field.default
    return Absent.NULL if field.presence is Presence.EXPLICIT else default(value)


def default(value: Value) -> object:
    """What a field without presence is where it is absent."""
    if isinstance(value, Enumeration):
        return next(iter(value.names.values()))
    assert isinstance(value, Kind)
    return _DEFAULTS.get(value, 0)


WRAPPERS = {
    "google.protobuf.DoubleValue": Kind.DOUBLE,
    "google.protobuf.FloatValue": Kind.FLOAT,
    "google.protobuf.Int64Value": Kind.INT64,
    "google.protobuf.UInt64Value": Kind.UINT64,
    "google.protobuf.Int32Value": Kind.INT32,
    "google.protobuf.UInt32Value": Kind.UINT32,
    "google.protobuf.BoolValue": Kind.BOOL,
    "google.protobuf.StringValue": Kind.STRING,
    "google.protobuf.BytesValue": Kind.BYTES,
}
_DEFAULTS = {Kind.DOUBLE: 0.0, Kind.FLOAT: 0.0, Kind.BOOL: False, Kind.STRING: "", Kind.BYTES: b""}
_TYPES: dict[Kind, ddl.Type] = {
    Kind.DOUBLE: Scalar.DOUBLE,
    Kind.FLOAT: Scalar.FLOAT,
    Kind.INT32: Scalar.INT,
    Kind.SINT32: Scalar.INT,
    Kind.SFIXED32: Scalar.INT,
    Kind.INT64: Scalar.LONG,
    Kind.SINT64: Scalar.LONG,
    Kind.SFIXED64: Scalar.LONG,
    Kind.UINT32: Scalar.LONG,
    Kind.FIXED32: Scalar.LONG,
    Kind.UINT64: Decimal(20, 0),
    Kind.FIXED64: Decimal(20, 0),
    Kind.BOOL: Scalar.BOOLEAN,
    Kind.STRING: Scalar.STRING,
    Kind.BYTES: Scalar.BINARY,
}
_SPECIAL: dict[Special, ddl.Type] = {
    Special.TIMESTAMP: Scalar.TIMESTAMP,
    Special.DURATION: Scalar.LONG,
    Special.DATE: Scalar.DATE,
    Special.JSON_OBJECT: Scalar.STRING,
    Special.JSON_VALUE: Scalar.STRING,
    Special.JSON_ARRAY: Scalar.STRING,
    Special.EMPTY: Scalar.BOOLEAN,
}
_SPECIAL_NAMES = frozenset(special.value for special in Special if special is not Special.EMPTY)
