"""One value as Debezium encodes it, as a value of a declared type: exactly, or refused by name.

What a value stands for is said by the record's schema, where it brings one. Where it does not, the form decides if only
one is possible (a number for a date is days), and else what the pipeline declares in the connector's own words:
``decimal_handling_mode``, ``time_precision_mode``, ``binary_handling_mode``. None is assumed.

=================  ====================================================================================================
declared           taken
=================  ====================================================================================================
boolean            boolean, ``bit(1)`` among them
byte to long       whole numbers, whatever they stand for: a time of day or an interval as Debezium writes it
float, double      numbers, and the texts NaN, Infinity and -Infinity
decimal            Connect's Decimal (bytes, or a number), VariableScaleDecimal, text, numbers
string             text, whatever it stands for: json, xml, uuid, enum, a zoned time
binary             bytes, ``bit(n)`` among them
date               days, or ISO text
timestamp_ntz      milli-, micro- or nanoseconds, or ISO text
timestamp          ISO text with its zone
array, map         the same of their elements, pgvector's vectors among them
struct             a struct that is none of the above; geometry is refused
=================  ====================================================================================================

Owns: the encodings. Must not know: any payload, records. Its neighbours are ``columns``, which reads rows by it, and
``connect``.
"""

from __future__ import annotations

import binascii
import decimal
import re
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from hashlib import md5
from typing import Literal, NoReturn
from uuid import UUID

from avow.formats.base import DecodeError, Reason, shown
from avow.formats.debezium.connect import ConnectType, Payload, Reader, Value
from avow.formats.json.values import base64_decode
from avow.formats.text import refuse_nul
from avow.schema import Array, Decimal, Field, Map, Scalar, Struct, Type

# Reasons of our own.
UNAVAILABLE = "unavailable-value"  # a large value that the update left alone, and that the connector did not get
NOT_DECLARED = "encoding-not-declared"  # it has several meanings, and nothing says which one it is

ReadFields = Callable[[Mapping[str, Value]], dict[str, object]]
DecimalMode = Literal["precise", "double", "string"]
TimeMode = Literal["adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds", "nanoseconds"]
BinaryMode = Literal["bytes", "base64", "base64-url-safe", "hex"]

_TIME, _CONNECT = "io.debezium.time.", "org.apache.kafka.connect.data."
DECIMAL, _VARIABLE_SCALE = f"{_CONNECT}Decimal", "io.debezium.data.VariableScaleDecimal"
_GEOMETRY = "io.debezium.data.geometry."
DAYS = {f"{_TIME}Date", f"{_CONNECT}Date"}
UNITS = {  # how many make a second
    f"{_TIME}Timestamp": 1_000,
    f"{_CONNECT}Timestamp": 1_000,
    f"{_TIME}MicroTimestamp": 1_000_000,
    f"{_TIME}NanoTimestamp": 1_000_000_000,
}
NAMES_OF_LOGICAL = {  # what Avro's own types are for Connect
    "date": f"{_CONNECT}Date",
    "timestamp-millis": f"{_CONNECT}Timestamp",
    "timestamp-micros": f"{_TIME}MicroTimestamp",
    "timestamp-nanos": f"{_TIME}NanoTimestamp",
    "local-timestamp-millis": f"{_CONNECT}Timestamp",
    "local-timestamp-micros": f"{_TIME}MicroTimestamp",
    "local-timestamp-nanos": f"{_TIME}NanoTimestamp",
}
MODE_UNITS = {"connect": 1_000, "microseconds": 1_000_000, "nanoseconds": 1_000_000_000}
_INTEGERS = {"int8", "int16", "int32", "int64"}
_FLOATS = {"float", "double", "float32", "float64"}
_NOT_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_SCALE_MAX = 20_000  # PostgreSQL's own is 16,383
_EXACT = decimal.Context(prec=100)
_EPOCH = datetime(1970, 1, 1)
FIRST_DAY, LAST_DAY = ((day - date(1970, 1, 1)).days for day in (date.min, date.max))
MICROS_MIN, MICROS_MAX = ((moment - _EPOCH) // timedelta(microseconds=1) for moment in (datetime.min, datetime.max))


@dataclass(frozen=True, slots=True)
class Encoding:
    """What holds for every value of a pipeline."""

    payload: Payload
    refuse_nul: bool  # the sink cannot hold NUL in text
    ignore_unknown: bool  # fields of a struct that are not declared are dropped
    decimal_mode: DecimalMode | None
    time_mode: TimeMode | None
    binary_mode: BinaryMode | None
    millisecond_columns: frozenset[str]  # whose timestamps are milliseconds, where the record has no schema
    unavailable: str  # stands in place of a value that the connector did not get


def reader(type: Type, connect: ConnectType | None, how: Encoding) -> Reader:
    """A function that reads a value, not null, as this type. Where the record's own type is another one, it refuses
    every value."""
    match type:
        case Decimal():
            return _decimal(type, connect, how)
        case Array(element):
            return _array(element, connect, how)
        case Map(value):
            return _map(value, connect, how)
        case Struct():
            return _struct(type, connect, how)
        case Scalar.STRING:
            return how.payload.plain(type) if _is(connect, {"string"}) else _mismatch(type, connect)
        case Scalar.BINARY:
            return _binary(connect, how)
        case Scalar.DATE:
            return _date(connect, how)
        case Scalar.TIMESTAMP_NTZ:
            return _timestamp_ntz(connect, how)
        case Scalar.TIMESTAMP:
            return _timestamp(connect, how)
        case Scalar.BOOLEAN:
            return how.payload.plain(type) if _is(connect, {"boolean"}) else _mismatch(type, connect)
        case Scalar.FLOAT | Scalar.DOUBLE:
            return _float(type, connect, how)
    return how.payload.plain(type) if _is(connect, _INTEGERS) else _mismatch(type, connect)


def unavailable_forms(how: Encoding) -> Callable[[Value], bool]:
    """Whether a value is one of the forms that the placeholder takes: text, bytes, and each as the only element of an
    array; of uuids, the one that Java makes of it; of numbers, its characters. Seen in 3.6.2; of other types Debezium
    writes null."""
    text = how.unavailable
    uuid = str(UUID(bytes=md5(text.encode(), usedforsecurity=False).digest(), version=3))
    texts = {text, uuid, b64encode(text.encode()).decode()}
    bare = texts - {uuid}
    data = text.encode()
    numbers = [*map(ord, text)]
    payload = how.payload

    def is_unavailable(value: Value) -> bool:
        if isinstance(value, str):
            return value in bare
        if type(value) is bytes:  # and no number of JSON, which is a kind of them
            return value == data
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str):
                return value[0] in texts
            if len(value) == 1 and type(value[0]) is bytes:
                return value[0] == data
            return len(value) == len(numbers) and _integers(payload, value) == numbers
        return isinstance(value, dict) and value.keys() == {text}

    return is_unavailable


def _integers(payload: Payload, values: list[Value]) -> list[int] | None:
    try:
        return [payload.integer(value) for value in values]
    except DecodeError:
        return None


def _is(connect: ConnectType | None, types: set[str], names: set[str] | None = None) -> bool:
    """Whether the record's own type, if it brings one, is one of these."""
    return connect is None or (connect.type in types and (names is None or connect.name in names))


def _mismatch(type: Type, connect: ConnectType | None, advice: str = "") -> Reader:
    assert connect is not None
    if connect.name.startswith(_GEOMETRY):
        advice = 'geometry is not supported: exclude the column in the connector, or unknown_fields = "ignore"'

    def refuse(value: Value) -> NoReturn:  # noqa: ARG001
        raise DecodeError(
            Reason.WRONG_TYPE,
            f"declared {type}, but the record's schema has {shown(str(connect))}{advice and f': {advice}'}",
        )

    return refuse


def _undeclared(setting: str, value: str) -> DecodeError:
    return DecodeError(
        NOT_DECLARED,
        f"{value} has several meanings, and the record has no schema: declare decode.{setting} as the connector has it",
    )


def _float(type: Scalar, connect: ConnectType | None, how: Encoding) -> Reader:
    if not _is(connect, _FLOATS | _INTEGERS):
        return _mismatch(type, connect)
    if type is Scalar.FLOAT and connect is not None and connect.type in ("double", "float64"):
        return _mismatch(type, connect, "declare double")
    payload, plain = how.payload, how.payload.plain(type)

    def read(value: Value) -> object:
        if payload.is_text(value) and (number := _NOT_NUMBERS.get(payload.text(value))) is not None:
            return number
        return plain(value)

    return read


# ---- decimals --------------------------------------------------------------------------------------------------------


def _decimal(type: Decimal, connect: ConnectType | None, how: Encoding) -> Reader:
    payload, plain = how.payload, how.payload.plain(type)
    if connect is None:
        return _decimal_without_schema(type, how)
    if connect.name == DECIMAL and connect.type == "bytes":
        scale = connect.parameters.get("scale", "")
        if not re.fullmatch("-?[0-9]{1,5}", scale):
            return _mismatch(type, connect, f"its scale is {shown(scale)}")
        return lambda value: (
            plain(value) if payload.is_number(value) else _unscaled(type, payload.data(value), int(scale))
        )
    if connect.name == _VARIABLE_SCALE:
        return _variable_scale(type, payload)
    if connect.type in {"string"} | _FLOATS | _INTEGERS and not connect.name:
        return plain
    return _mismatch(type, connect)


def _decimal_without_schema(type: Decimal, how: Encoding) -> Reader:
    payload, plain = how.payload, how.payload.plain(type)
    variable = _variable_scale(type, payload)

    def read(value: Value) -> object:
        if payload.is_object(value):
            return variable(value)
        if payload.is_text(value):
            if how.decimal_mode is None:
                raise _undeclared("decimal_handling_mode", f"a decimal as {payload.describe(value)}")
            if how.decimal_mode == "precise":
                return _unscaled(type, payload.data(value), type.scale)
        return plain(value)

    return read


def _variable_scale(type: Decimal, payload: Payload) -> Reader:
    def read(value: Value) -> object:
        members = payload.members(value)
        if members.keys() != {"scale", "value"}:
            raise DecodeError(Reason.WRONG_TYPE, f"expected {type}, found {payload.describe(value)}")
        return _unscaled(type, payload.data(members["value"]), payload.integer(members["scale"]))

    return read


def _unscaled(type: Decimal, data: bytes, scale: int) -> decimal.Decimal:
    """The number of these bytes, big-endian in two's complement, with so many digits behind the point."""
    if not data:
        raise DecodeError(Reason.BAD_TEXT, f"expected {type}, found no bytes")
    number, rest, shift = int.from_bytes(data, "big", signed=True), 0, type.scale - scale
    if number and abs(shift) > _SCALE_MAX:
        rest = 1
    elif number and shift >= 0:
        number *= 10**shift
    elif number:
        number, rest = divmod(number, 10**-shift)
    if rest or abs(number) >= 10**type.precision:
        raise DecodeError(
            Reason.OUT_OF_RANGE, f"a decimal of scale {scale} and {len(data)} bytes does not fit exactly into {type}"
        )
    return decimal.Decimal(number).scaleb(-type.scale, _EXACT)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _binary(connect: ConnectType | None, how: Encoding) -> Reader:
    payload, mode = how.payload, how.binary_mode
    if connect is not None and connect.type == "bytes" and connect.name != DECIMAL:
        return payload.data
    if connect is not None and (connect.type != "string" or connect.name or mode in (None, "bytes")):
        return _mismatch(Scalar.BINARY, connect, "declare string, or decode.binary_handling_mode")

    def read(value: Value) -> object:
        if mode is None:
            raise _undeclared("binary_handling_mode", f"binary as {payload.describe(value)}")
        if mode == "bytes":
            return payload.data(value)
        text = payload.text(value)
        data = {"hex": _unhex, "base64": base64_decode}.get(mode, _url_safe)(text)
        if data is None:
            raise DecodeError(Reason.BAD_TEXT, f"expected {mode}, found {shown(text)}")
        return data

    return read


def _unhex(text: str) -> bytes | None:
    try:
        return binascii.unhexlify(text)
    except ValueError:
        return None


def _url_safe(text: str) -> bytes | None:
    try:
        data = urlsafe_b64decode(text)
    except ValueError:
        return None
    return data if urlsafe_b64encode(data).decode() == text else None


# ---- dates and times -------------------------------------------------------------------------------------------------


def _date(connect: ConnectType | None, how: Encoding) -> Reader:
    payload, plain = how.payload, how.payload.plain(Scalar.DATE)
    iso = connect is not None and connect.name == f"{_TIME}IsoDate"
    if not (iso or _is(connect, {"int32"}, DAYS)):
        return _mismatch(Scalar.DATE, connect)

    def read(value: Value) -> object:
        if payload.is_text(value) and (iso or connect is None):
            text = payload.text(value)
            if not text.endswith("Z"):
                raise DecodeError(Reason.BAD_TEXT, f"expected a date such as 2026-01-31Z, found {shown(text)}")
            return plain(text.removesuffix("Z"))
        days = payload.integer(value)
        if not FIRST_DAY <= days <= LAST_DAY:
            raise DecodeError(
                Reason.OUT_OF_RANGE, f"day {days} after 1970-01-01 is not between the years 0001 and 9999"
            )
        return date(1970, 1, 1) + timedelta(days=days)

    return read


def _timestamp_ntz(connect: ConnectType | None, how: Encoding) -> Reader:
    payload = how.payload
    if connect is None:
        return _timestamp_without_schema(how)
    if connect.name == f"{_TIME}IsoTimestamp" and connect.type == "string":
        return _iso_timestamp(how)
    if connect.type == "int64" and (unit := UNITS.get(connect.name)):
        return lambda value: _moment(payload.integer(value), unit)
    advice = "declare timestamp, or string" if connect.name == f"{_TIME}ZonedTimestamp" else ""
    return _mismatch(Scalar.TIMESTAMP_NTZ, connect, advice)


def _of(field: Field, how: Encoding) -> Encoding:
    return replace(how, time_mode="connect") if field.name in how.millisecond_columns else how


def _timestamp_without_schema(how: Encoding) -> Reader:
    payload, mode, iso = how.payload, how.time_mode, _iso_timestamp(how)
    unit = MODE_UNITS.get(mode or "", 1_000_000)

    def read(value: Value) -> object:
        if mode is None:
            raise _undeclared("time_precision_mode", f"a timestamp as {payload.describe(value)}")
        return iso(value) if mode == "isostring" else _moment(payload.integer(value), unit)

    return read


def _iso_timestamp(how: Encoding) -> Reader:
    """Debezium writes a Z behind what has no zone."""
    payload, plain = how.payload, how.payload.plain(Scalar.TIMESTAMP_NTZ)

    def read(value: Value) -> object:
        text = payload.text(value)
        if not text.endswith("Z"):
            raise DecodeError(
                Reason.BAD_TEXT, f"expected a timestamp such as 2026-01-31T12:00:00Z, found {shown(text)}"
            )
        return plain(text.removesuffix("Z"))

    return read


def _moment(number: int, per_second: int) -> datetime:
    micros, rest = divmod(number * 1_000_000, per_second)
    if rest:
        raise DecodeError(Reason.OUT_OF_RANGE, f"{number} ns after 1970-01-01 has digits beyond microseconds")
    if not MICROS_MIN <= micros <= MICROS_MAX:
        raise DecodeError(Reason.OUT_OF_RANGE, f"{micros} µs after 1970-01-01 is not between the years 0001 and 9999")
    return _EPOCH + timedelta(microseconds=micros)


def _timestamp(connect: ConnectType | None, how: Encoding) -> Reader:
    if _is(connect, {"string"}, {f"{_TIME}ZonedTimestamp"}):
        return how.payload.plain(Scalar.TIMESTAMP)
    assert connect is not None
    known = connect.name in UNITS or connect.name == f"{_TIME}IsoTimestamp"
    return _mismatch(Scalar.TIMESTAMP, connect, "it has no time zone, declare timestamp_ntz" if known else "")


def instant(per_second: int, how: Encoding) -> Reader:
    """A moment of the envelope, which is in UTC."""
    return lambda value: _moment(how.payload.integer(value), per_second).replace(tzinfo=UTC)


# ---- nested ----------------------------------------------------------------------------------------------------------


def _array(element: Type, connect: ConnectType | None, how: Encoding) -> Reader:
    if not _is(connect, {"array"}):
        return _mismatch(Array(element), connect)
    payload, read_element = how.payload, reader(element, connect and connect.items, how)

    def read(value: Value) -> list[object]:
        elements: list[object] = []
        try:
            for inner in payload.elements(value):
                elements.append(None if inner is None else read_element(inner))
        except DecodeError as error:
            raise error.inside(f"[{len(elements)}]") from None
        return elements

    return read


def _map(element: Type, connect: ConnectType | None, how: Encoding) -> Reader:
    if not _is(connect, {"map"}):
        return _mismatch(Map(element), connect)
    payload, read_element = how.payload, reader(element, connect and connect.items, how)

    def read(value: Value) -> list[tuple[str, object]]:
        pairs: list[tuple[str, object]] = []
        name = ""
        try:
            for name, inner in payload.members(value).items():
                if how.refuse_nul:
                    refuse_nul(name)
                pairs.append((name, None if inner is None else read_element(inner)))
        except DecodeError as error:
            raise error.inside(f"[{shown(name)}]") from None
        return pairs

    return read


def _struct(type: Struct, connect: ConnectType | None, how: Encoding) -> Reader:
    if not _is(connect, {"struct"}) or (connect is not None and connect.name.startswith(_GEOMETRY)):
        return _mismatch(type, connect)
    read_fields = fields_reader(type.fields, connect, how)

    def read(value: Value) -> dict[str, object]:
        members = how.payload.members(value)
        if "wkb" in members:
            raise DecodeError(Reason.WRONG_TYPE, "geometry is not supported")
        return read_fields(members)

    return read


def fields_reader(fields: tuple[Field, ...], connect: ConnectType | None, how: Encoding) -> ReadFields:
    """The declared fields of a struct, absent ones as null, and no others, unless these are ignored."""
    known = frozenset(field.name for field in fields)
    inner = connect.fields if connect else {}
    readers = [
        (field.name, reader(field.type, inner.get(field.name), _of(field, how)), field.required) for field in fields
    ]
    is_unavailable = unavailable_forms(how)

    def read(members: Mapping[str, Value]) -> dict[str, object]:
        if not (how.ignore_unknown or members.keys() <= known):
            name = next(name for name in members if name not in known)
            raise DecodeError(Reason.UNKNOWN_FIELD, f"the field {shown(name)} is not declared")
        row: dict[str, object] = {}
        name = ""
        try:
            for name, read_value, required in readers:
                value = members.get(name)
                if value is None:
                    if required:
                        raise DecodeError(Reason.MISSING_FIELD, "absent or null, but declared not null")
                    row[name] = None
                    continue
                if isinstance(value, str | list | dict | bytes) and is_unavailable(value):
                    raise DecodeError(
                        UNAVAILABLE,
                        "the update left this large value alone, so the connector did not get it: ALTER TABLE ... "
                        "REPLICA IDENTITY FULL",
                    )
                row[name] = read_value(value)
        except DecodeError as error:
            raise error.inside(name) from None
        return row

    return read
