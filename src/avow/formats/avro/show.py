"""One Avro value as a document for people: every field of its own writer's schema, as JSON would have it.

There is no reader's schema and there are no columns, so whatever a writer can write is shown: types inside themselves,
durations, times beyond the year 9999. ``encode`` takes the same spelling back. The bytes are read as strictly as in a
pipeline: what is shown is what is there.

Owns: that spelling. Must not know: frames, registries. Its neighbour is ``reader``, which reads the bytes.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np

from avow.formats.avro.encode import DURATION
from avow.formats.avro.reader import EPOCH, EPOCH_UTC, NOT_AVRO, WIRES, fixed_bytes, read_blocks, read_int, read_long
from avow.formats.avro.schema import Array, Enum, Fixed, Map, Primitive, Record, Type, Union
from avow.formats.base import DecodeError, Reason, shown
from avow.formats.text import text_of

DEPTH_MAX = 64  # a type may be inside itself


def show(type: Type, data: bytes, at: int) -> Any:
    """The value that begins here and ends with the data, or ``DecodeError``."""
    document, end = _read(type, data, at, 0)
    if end != len(data):
        raise DecodeError(NOT_AVRO, f"{len(data) - end:,} more bytes behind the value")
    return document


def _read(type: Type, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > DEPTH_MAX:
        raise DecodeError(Reason.TOO_DEEP, f"nested more than {DEPTH_MAX} deep")
    match type:
        case Primitive():
            value, at = WIRES[type.name](data, at)
            return _primitive(type, value), at
        case Fixed():
            return _fixed(type, fixed_bytes(data, at, type.size)), at + type.size
        case Enum(_, symbols):
            number, at = read_int(data, at)
            if not 0 <= number < len(symbols):
                raise DecodeError(NOT_AVRO, f"symbol {number} of an enum of {len(symbols)}")
            return symbols[number], at
        case Record():
            return _record(type, data, at, depth)
        case Array(items):
            return _items(items, data, at, depth)
        case Map(values):
            return _entries(values, data, at, depth)
        case Union(branches):
            number, at = read_long(data, at)
            if not 0 <= number < len(branches):
                raise DecodeError(NOT_AVRO, f"branch {number} of a union of {len(branches)}")
            return _read(branches[number], data, at, depth + 1)


def _record(record: Record, data: bytes, at: int, depth: int) -> tuple[dict[str, Any], int]:
    document: dict[str, Any] = {}
    for field in record.fields:
        try:
            document[field.name], at = _read(field.type, data, at, depth + 1)
        except DecodeError as error:
            raise error.inside(field.name) from None
    return document, at


def _items(type: Type, data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []

    def read_one(at: int) -> int:
        item, at = _read(type, data, at, depth + 1)
        items.append(item)
        return at

    try:
        return items, read_blocks(data, at, read_one)
    except DecodeError as error:
        raise error.inside(f"[{len(items)}]") from None


def _entries(type: Type, data: bytes, at: int, depth: int) -> tuple[dict[str, Any], int]:
    entries: dict[str, Any] = {}

    def read_one(at: int) -> int:
        raw, at = WIRES["string"](data, at)
        key = text_of(raw)
        if key in entries:
            raise DecodeError(Reason.DUPLICATE_FIELD, f"the key {shown(key)} occurs twice")
        try:
            entries[key], at = _read(type, data, at, depth + 1)
        except DecodeError as error:
            raise error.inside(f"[{shown(key)}]") from None
        return at

    return entries, read_blocks(data, at, read_one)


def _primitive(type: Primitive, value: Any) -> Any:
    match type.name:
        case "string":
            return text_of(value)
        case "bytes":
            return _decimal(type, value) if type.logical == "decimal" else _base64(value)
        case "float" | "double":
            return _float(type.name, value)
        case "int" | "long" if type.logical:
            return _temporal(type.logical, value)
    return value


def _fixed(type: Fixed, value: bytes) -> Any:
    match type.logical:
        case "decimal":
            return _decimal(type, value)
        case "uuid":
            return str(UUID(bytes=value))
        case "duration":
            return dict(zip(DURATION, struct.unpack("<III", value), strict=True))
    return _base64(value)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decimal(type: Primitive | Fixed, value: bytes) -> str:
    """All its digits, also where they are more than the precision has."""
    if not value:
        raise DecodeError(NOT_AVRO, "a decimal of no bytes")
    units = int.from_bytes(value, "big", signed=True)
    digits = tuple(map(int, _digits(abs(units))))
    return format(Decimal((units < 0, digits, -type.scale)), "f")


def _digits(units: int) -> str:
    try:
        return str(units)
    except ValueError:  # Python's bound on the digits of such a number
        raise DecodeError(Reason.LONG_NUMBER, "a decimal of more than 4,300 digits") from None


def _float(name: str, value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if name == "double":
        return value
    return float(str(np.float32(value)))  # the fewest digits that say which float it is


def _temporal(logical: str, number: int) -> str | int:
    """ISO 8601. What the calendar or the day has no place for stays a number."""
    try:
        return _spelled(logical)(number)
    except (OverflowError, ValueError):
        return number


def _spelled(logical: str) -> Callable[[int], str]:
    if logical == "date":
        return lambda days: date.fromordinal(EPOCH.toordinal() + days).isoformat()
    kind, _, unit = logical.rpartition("-")
    if kind == "time":
        return lambda number: _time(number, unit)
    epoch = EPOCH if kind.startswith("local-") else EPOCH_UTC
    return lambda number: _moment(epoch, number, unit)


def _moment(epoch: datetime, number: int, unit: str) -> str:
    micros, nanos = divmod(number, 1000) if unit == "nanos" else (number * (1000 if unit == "millis" else 1), 0)
    moment = epoch + timedelta(microseconds=micros)
    text = moment.replace(tzinfo=None).isoformat(timespec="microseconds" if nanos else "auto")
    return f"{text}{f'{nanos:03d}' if nanos else ''}{'Z' if epoch.tzinfo else ''}"


def _time(number: int, unit: str) -> str:
    micros = number * (1000 if unit == "millis" else 1)
    seconds, micros = divmod(micros, 1_000_000)
    return time(seconds // 3600, seconds // 60 % 60, seconds % 60, micros).isoformat()
