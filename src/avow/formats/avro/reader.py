"""One Avro record, strictly: what the bytes say by the steps of ``resolution``, or why they cannot be taken.

Stricter than Avro's libraries, which take a boolean byte of 7, a branch that the union has not, a decimal beyond its
precision, bytes behind the record. A number is never rounded: a long that a double does not hold is refused.

Owns: the reading of bytes, one record at a time; it has the last word. Must not know: frames, schemas by id.
"""

from __future__ import annotations

import decimal
import re
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

from avow import schema as ddl
from avow.formats.avro.resolution import (
    Branches,
    Default,
    Entries,
    Fields,
    Items,
    Member,
    Mismatch,
    Null,
    ReadField,
    Skip,
    Step,
    Symbols,
    Value,
)
from avow.formats.avro.schema import Array, Enum, Fixed, Map, Primitive, Record, Type, Union
from avow.formats.base import DecodeError, Reason, shown
from avow.formats.text import refuse_nul, text_of
from avow.schema import Scalar

NOT_AVRO = "not-avro"  # bytes that the writer's schema cannot have written
UNKNOWN_SYMBOL = "unknown-symbol"  # of an enum, and the reader has no default for it
WRONG_BRANCH = "wrong-branch"  # of a union, and the reader's schema has none for it

SKIPPED_DEPTH_MAX = 64  # of what is skipped: a recursive type has no other end
EMPTY_ITEMS_MAX = 100_000  # items that take no bytes: any number of them fits into a few
_UUID = re.compile("[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
EPOCH, EPOCH_UTC = datetime(1970, 1, 1), datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_DAY, _LAST_DAY = (day.toordinal() - date(1970, 1, 1).toordinal() for day in (date.min, date.max))
_MICROS_IN_DAY = 86_400_000_000
_FIRST_MICRO, _LAST_MICRO = _FIRST_DAY * _MICROS_IN_DAY, (_LAST_DAY + 1) * _MICROS_IN_DAY - 1
_TIME_END = {"time-millis": 86_400_000, "time-micros": _MICROS_IN_DAY}
_WHOLE_UNTIL = {"float": 1 << 24, "double": 1 << 53}

Read = Callable[[bytes, int], tuple[Any, int]]  # data and a place in it; the value there, and the place behind it


class AvroReader:
    """Reads what one schema has written. What is no record (a key may be none) is the only column."""

    def __init__(self, step: Step, columns: ddl.Schema, *, is_record: bool, refuse_nul: bool) -> None:
        (only, *_) = columns.fields
        self._read = _Compiler(refuse_nul=refuse_nul).reader(
            step, ddl.Struct(columns.fields) if is_record else only.type
        )
        self._column = None if is_record else only.name

    def row(self, value: bytes, at: int) -> Mapping[str, object]:
        """The columns of a value that begins here, or ``DecodeError``."""
        found, end = self._read(value, at)
        if end != len(value):
            raise DecodeError(NOT_AVRO, f"{len(value) - end:,} more bytes behind the record")
        if self._column is not None:
            return {self._column: found}
        if not isinstance(found, dict):
            raise DecodeError(WRONG_BRANCH, "a null where a record is due")
        return found


def read_long(data: bytes, at: int) -> tuple[int, int]:
    shift = number = 0
    while True:
        if at == len(data):
            raise _truncated("a number")
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise DecodeError(NOT_AVRO, "a number of more than 10 bytes")
    if number >> 64:
        raise DecodeError(NOT_AVRO, "a number of more than 64 bits")
    return (number >> 1) ^ -(number & 1), at


def read_int(data: bytes, at: int) -> tuple[int, int]:
    number, end = read_long(data, at)
    if end - at > 5 or not -(1 << 31) <= number < 1 << 31:
        raise DecodeError(NOT_AVRO, "a number of more than 32 bits where an int is due")
    return number, end


def _read_boolean(data: bytes, at: int) -> tuple[bool, int]:
    if at == len(data):
        raise _truncated("a boolean")
    if data[at] > 1:
        raise DecodeError(NOT_AVRO, f"a boolean of byte 0x{data[at]:02x}, which is neither 0 nor 1")
    return data[at] == 1, at + 1


def _read_float(data: bytes, at: int) -> tuple[float, int]:
    return struct.unpack("<f", fixed_bytes(data, at, 4))[0], at + 4


def _read_double(data: bytes, at: int) -> tuple[float, int]:
    return struct.unpack("<d", fixed_bytes(data, at, 8))[0], at + 8


def _read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = read_long(data, at)
    if size < 0:
        raise DecodeError(NOT_AVRO, "a negative length")
    return fixed_bytes(data, at, size), at + size


def fixed_bytes(data: bytes, at: int, size: int) -> bytes:
    if size > len(data) - at:
        raise _truncated(f"{size:,} bytes")
    return data[at : at + size]


def _truncated(what: str) -> DecodeError:
    return DecodeError(NOT_AVRO, f"it ends where {what} is due")


WIRES: dict[str, Read] = {
    "null": lambda _, at: (None, at),
    "boolean": _read_boolean,
    "int": read_int,
    "long": read_long,
    "float": _read_float,
    "double": _read_double,
    "bytes": _read_bytes,
    "string": _read_bytes,
}


def _wire(name: str, size: int) -> Read:
    if name == "fixed":
        return lambda data, at: (fixed_bytes(data, at, size), at + size)
    return WIRES[name]


class _Compiler:
    """Makes functions of steps."""

    def __init__(self, *, refuse_nul: bool) -> None:
        self._refuse_nul = refuse_nul

    def reader(self, step: Step, type: ddl.Type) -> Read:
        match step:
            case Value():
                return converted(_wire(step.wire, step.size), self._conversion(step, type))
            case Symbols():
                return enum_of(step)
            case Items(item):
                assert isinstance(type, ddl.Array)
                return array_of(self.reader(item, type.element))
            case Entries(value):
                assert isinstance(type, ddl.Map)
                return map_of(converted(_read_bytes, self._text), self.reader(value, type.value))
            case Fields():
                assert isinstance(type, ddl.Struct)
                return self.fields(step, type.fields)
            case Branches(branches):
                return union_of([self.reader(branch, type) for branch in branches])
            case Member(number, count, inner):
                assert isinstance(type, ddl.Struct)
                return _member(number, count, self.reader(inner, type.fields[number].type))
            case Null():
                return WIRES["null"]
            case Mismatch(why):
                return _mismatch(why)
            case Skip(skipped):
                return lambda data, at: (None, _skip(skipped, data, at, 0))

    def fields(self, step: Fields, columns: tuple[ddl.Field, ...]) -> Read:
        reads = [(f.name, None if f.to is None else step.names[f.to], self._field(f, columns)) for f in step.fields]
        defaults = {step.names[d.to]: self._default(d, columns) for d in step.defaults}

        def read(data: bytes, at: int) -> tuple[dict[str, object], int]:
            row = dict(defaults)
            here = ""
            try:
                for written, name, read_value in reads:
                    here = written
                    value, at = read_value(data, at)
                    if name is not None:
                        row[name] = value
            except DecodeError as error:
                raise error.inside(here) from None
            return row, at

        return read

    def _field(self, field: ReadField, columns: tuple[ddl.Field, ...]) -> Read:
        # Of what is skipped the type does not matter.
        return self.reader(field.step, Scalar.BINARY if field.to is None else columns[field.to].type)

    def _default(self, default: Default, columns: tuple[ddl.Field, ...]) -> object:
        return self.reader(default.step, columns[default.to].type)(default.data, 0)[0]

    def _conversion(self, value: Value, type: ddl.Type) -> Callable[[Any], object] | None:
        match value.form:
            case "float" | "double" if value.wire in ("int", "long"):
                return _whole(value.form)
            case "string":
                return self._text
            case "uuid":
                return self._uuid if value.wire == "string" else _uuid_of_bytes if value.wire == "fixed" else self._uuid
            case "decimal":
                assert isinstance(type, ddl.Decimal)
                return _decimal(value.precision, type.scale)
            case "date":
                return _date
            case "time-millis" | "time-micros":
                return _time(value.form)
            case "millis" | "micros" | "nanos":
                return _moment(value.form, EPOCH_UTC if type is Scalar.TIMESTAMP else EPOCH)
        return None

    def _text(self, value: bytes) -> str:
        text = text_of(value)
        if self._refuse_nul:
            refuse_nul(text)
        return text

    def _uuid(self, value: bytes) -> str:
        text = text_of(value)
        if not _UUID.fullmatch(text):
            raise DecodeError(Reason.BAD_TEXT, f"expected a uuid, found {shown(text)}")
        return text


def array_of(read_item: Read) -> Read:
    def read(data: bytes, at: int) -> tuple[list[object], int]:
        found: list[object] = []

        def read_one(at: int) -> int:
            item, at = read_item(data, at)
            found.append(item)
            return at

        try:
            return found, read_blocks(data, at, read_one)
        except DecodeError as error:
            raise error.inside(f"[{len(found)}]") from None

    return read


def map_of(read_key: Read, read_value: Read) -> Read:
    def read(data: bytes, at: int) -> tuple[list[tuple[str, object]], int]:
        found: dict[str, object] = {}

        def read_one(at: int) -> int:
            key, at = read_key(data, at)
            if key in found:
                raise DecodeError(Reason.DUPLICATE_FIELD, f"the key {shown(key)} occurs twice")
            try:
                found[key], at = read_value(data, at)
            except DecodeError as error:
                raise error.inside(f"[{shown(key)}]") from None
            return at

        at = read_blocks(data, at, read_one)
        return list(found.items()), at

    return read


def converted(read: Read, convert: Callable[[Any], object] | None) -> Read:
    if convert is None:
        return read

    def read_converted(data: bytes, at: int) -> tuple[object, int]:
        value, at = read(data, at)
        return convert(value), at

    return read_converted


def enum_of(step: Symbols) -> Read:
    symbols, names = step.symbols, step.names

    def read(data: bytes, at: int) -> tuple[str, int]:
        number, at = read_int(data, at)
        if not 0 <= number < len(symbols):
            raise DecodeError(NOT_AVRO, f"symbol {number} of an enum of {len(symbols)}")
        symbol = symbols[number]
        if symbol is None:
            raise DecodeError(UNKNOWN_SYMBOL, f"the reader's schema has no symbol {names[number]}, and no default")
        return symbol, at

    return read


def union_of(branches: list[Read]) -> Read:
    def read(data: bytes, at: int) -> tuple[object, int]:
        number, at = read_long(data, at)
        if not 0 <= number < len(branches):
            raise DecodeError(NOT_AVRO, f"branch {number} of a union of {len(branches)}")
        return branches[number](data, at)

    return read


def _member(number: int, count: int, read_inner: Read) -> Read:
    def read(data: bytes, at: int) -> tuple[dict[str, object], int]:
        value, at = read_inner(data, at)
        return {f"member{n}": value if n == number else None for n in range(count)}, at

    return read


def _mismatch(why: str) -> Read:
    def read(data: bytes, at: int) -> tuple[object, int]:  # noqa: ARG001
        raise DecodeError(WRONG_BRANCH, why)

    return read


def read_blocks(data: bytes, at: int, read_one: Callable[[int], int]) -> int:
    """The blocks of an array or a map. Returns the place behind them."""
    empty = 0
    while True:
        count, at = read_long(data, at)
        if count == 0:
            return at
        end = None
        if count < 0:
            count = -count
            size, at = read_long(data, at)
            if not 0 <= size <= len(data) - at:
                raise _truncated(f"a block of {size:,} bytes")
            end = at + size
        for _ in range(count):
            start = at
            at = read_one(at)
            empty += at == start
            if empty > EMPTY_ITEMS_MAX:
                raise DecodeError(Reason.OUT_OF_RANGE, f"more than {EMPTY_ITEMS_MAX:,} items without bytes")
        if end is not None and at != end:
            raise DecodeError(NOT_AVRO, f"a block has {end - at:+,} bytes more than its items")


def _skip(type: Type, data: bytes, at: int, depth: int) -> int:
    """The place behind a value that the reader does not want. Of text only the length is looked at."""
    if depth > SKIPPED_DEPTH_MAX:
        raise DecodeError(Reason.TOO_DEEP, f"nested more than {SKIPPED_DEPTH_MAX} deep")
    match type:
        case Primitive(name):
            return WIRES[name](data, at)[1]
        case Fixed():
            fixed_bytes(data, at, type.size)
            return at + type.size
        case Enum(_, symbols):
            number, at = read_int(data, at)
            if not 0 <= number < len(symbols):
                raise DecodeError(NOT_AVRO, f"symbol {number} of an enum of {len(symbols)}")
            return at
        case Record():
            for field in type.fields:
                at = _skip(field.type, data, at, depth + 1)
            return at
        case Array(items):
            return read_blocks(data, at, lambda at: _skip(items, data, at, depth + 1))
        case Map(values):
            return read_blocks(data, at, lambda at: _skip(values, data, _read_bytes(data, at)[1], depth + 1))
        case Union(branches):
            number, at = read_long(data, at)
            if not 0 <= number < len(branches):
                raise DecodeError(NOT_AVRO, f"branch {number} of a union of {len(branches)}")
            return _skip(branches[number], data, at, depth + 1)


def _whole(name: str) -> Callable[[int], float]:
    until = _WHOLE_UNTIL[name]

    def convert(number: int) -> float:
        if abs(number) > until:
            exact = struct.unpack("<f", struct.pack("<f", number))[0] if name == "float" else float(number)
            if int(exact) != number:
                raise DecodeError(Reason.OUT_OF_RANGE, f"{number} cannot be represented exactly as {name}")
        return float(number)

    return convert


def _decimal(precision: int, scale: int) -> Callable[[bytes], decimal.Decimal]:
    limit = 10**precision
    context = decimal.Context(prec=ddl.MAX_PRECISION)

    def convert(data: bytes) -> decimal.Decimal:
        if not data:
            raise DecodeError(NOT_AVRO, "a decimal of no bytes")
        units = int.from_bytes(data, "big", signed=True)
        if not -limit < units < limit:
            raise DecodeError(Reason.OUT_OF_RANGE, f"a decimal of more than {precision} digits")
        return decimal.Decimal(units).scaleb(-scale, context)

    return convert


def _date(days: int) -> date:
    if not _FIRST_DAY <= days <= _LAST_DAY:
        raise DecodeError(Reason.OUT_OF_RANGE, f"day {days:,} is not between the years 0001 and 9999")
    return date(1970, 1, 1) + timedelta(days=days)


def _time(name: str) -> Callable[[int], int]:
    end = _TIME_END[name]

    def convert(number: int) -> int:
        if not 0 <= number < end:
            raise DecodeError(Reason.OUT_OF_RANGE, f"{name} {number:,} is not within a day")
        return number

    return convert


def _moment(unit: str, epoch: datetime) -> Callable[[int], datetime]:
    def convert(number: int) -> datetime:
        if unit == "nanos" and number % 1000:
            raise DecodeError(Reason.OUT_OF_RANGE, f"{number:,} nanoseconds have digits beyond microseconds")
        micros = number * 1000 if unit == "millis" else number // 1000 if unit == "nanos" else number
        if not _FIRST_MICRO <= micros <= _LAST_MICRO:
            raise DecodeError(Reason.OUT_OF_RANGE, f"{number:,} {unit} is not between the years 0001 and 9999")
        return epoch + timedelta(microseconds=micros)

    return convert


def _uuid_of_bytes(value: bytes) -> str:
    return str(UUID(bytes=value))
