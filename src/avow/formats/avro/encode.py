"""JSON into Avro's binary encoding: the defaults of a reader schema, and records that are produced.

A value is written as JSON would have it: text for strings, enums, uuids, dates and timestamps (or the number that Avro
has for them), a number or its text for decimals, and the first branch of a union that takes it. Bytes are base64, as
``show`` spells them, or text of the characters U+0000 to U+00FF, as in Avro's own JSON, where a default in a schema has
no other. A branch may be named, as there: ``{"string": "x"}``.

Owns: writing. Must not know: records of Kafka, columns. Its neighbour is ``schema``.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import re
import struct
from typing import Any

from avow.formats.avro.schema import (
    NO_DEFAULT,
    Array,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    branch_name,
    placed,
)

_EPOCH = dt.datetime(1970, 1, 1)
DURATION = ("months", "days", "milliseconds")
_UUID = re.compile("[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_FRACTION = re.compile(r"(.*[.,]\d{6})(\d+)(.*)")  # of more digits than Python reads, which drops them
_PER_SECOND = {"millis": 1_000, "micros": 1_000_000, "nanos": 1_000_000_000}


class DoesNotFit(ValueError):
    """A value that its schema cannot have."""


def encode(type: Type, value: Any, *, in_schema: bool = False) -> bytes:
    """The bytes of a JSON value, or ``DoesNotFit``. ``in_schema``: it is a field's default, where a decimal is text of
    bytes."""
    out = bytearray()
    try:
        _Encoder(in_schema=in_schema).write(type, value, out)
    except RecursionError:
        raise DoesNotFit("the value is nested too deeply") from None
    return bytes(out)


def zigzag(number: int) -> bytes:
    """A long."""
    number = number << 1 if number >= 0 else (-number << 1) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class _Encoder:
    """``in_schema``: the value is a default in a schema, where decimals are text of bytes."""

    def __init__(self, *, in_schema: bool) -> None:
        self._in_schema = in_schema

    def write(self, type: Type, value: Any, out: bytearray) -> None:
        match type:
            case Record():
                self._write_record(type, value, out)
            case Union():
                self._write_union(type, value, out)
            case Array(items):
                if not isinstance(value, list):
                    raise _wrong(value, "an array")
                if value:
                    out += zigzag(len(value))
                    for number, item in enumerate(value):
                        self._inside(f"[{number}]", items, item, out)
                out.append(0)
            case Map(values):
                if not isinstance(value, dict):
                    raise _wrong(value, "an object")
                if value:
                    out += zigzag(len(value))
                    for key, item in value.items():
                        _write_text(key, out)
                        self._inside(f"[{key!r}]", values, item, out)
                out.append(0)
            case Enum(_, symbols):
                if value not in symbols:
                    raise _wrong(value, f"one of {', '.join(symbols)}")
                out += zigzag(symbols.index(value))
            case Fixed():
                out += self._fixed(type, value)
            case Primitive():
                self._write_primitive(type, value, out)

    def _inside(self, name: str, type: Type, value: Any, out: bytearray) -> None:
        try:
            self.write(type, value, out)
        except DoesNotFit as error:
            raise DoesNotFit(placed(name, error)) from None

    def _write_record(self, record: Record, value: Any, out: bytearray) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, "an object")
        known = {field.name for field in record.fields}
        for name in value:
            if name not in known:
                raise DoesNotFit(f"{record} has no field {name!r}")
        for field in record.fields:
            if field.name in value:
                self._inside(field.name, field.type, value[field.name], out)
            elif field.default is not NO_DEFAULT:
                _Encoder(in_schema=True)._inside(field.name, field.type, field.default, out)
            elif _takes_null(field.type):
                self.write(field.type, None, out)
            else:
                raise DoesNotFit(f"{field.name}: the field is missing, and has no default")

    def _write_union(self, union: Union, value: Any, out: bytearray) -> None:
        why = []
        for number, branch in enumerate(union.branches):
            named = isinstance(value, dict) and list(value) == [branch_name(branch)]
            for candidate in (value, value[branch_name(branch)]) if named else (value,):
                inner = bytearray()
                try:
                    self.write(branch, candidate, inner)
                except DoesNotFit as error:
                    why.append(str(error))
                else:
                    out += zigzag(number) + inner
                    return
        raise DoesNotFit(why[-1] if len(why) <= 2 else f"no branch of the {union} takes {_shown(value)}")

    def _write_primitive(self, type: Primitive, value: Any, out: bytearray) -> None:
        match type.name:
            case "null":
                if value is not None:
                    raise _wrong(value, "null")
            case "boolean":
                if value is not True and value is not False:
                    raise _wrong(value, "true or false")
                out.append(value)
            case "int" | "long":
                number = _temporal(type, value) if isinstance(value, str) and type.logical else value
                bits = 31 if type.name == "int" else 63
                if not isinstance(number, int) or isinstance(number, bool) or not -(1 << bits) <= number < 1 << bits:
                    raise _wrong(value, f"{'an' if bits == 31 else 'a'} {type}")
                out += zigzag(number)
            case "float" | "double":
                out += _float(type.name, value)
            case "string":
                if type.logical == "uuid" and not (isinstance(value, str) and _UUID.fullmatch(value)):
                    raise _wrong(value, "a uuid")
                _write_text(value, out)
            case "bytes":
                decimal_ = type.logical == "decimal" and not self._in_schema
                data = _units(type, value, None) if decimal_ else self._bytes(value)
                out += zigzag(len(data)) + data

    def _fixed(self, type: Fixed, value: Any) -> bytes:
        if type.logical == "decimal" and not self._in_schema:
            return _units(type, value, type.size)
        if type.logical == "uuid" and isinstance(value, str) and _UUID.fullmatch(value):
            return bytes.fromhex(value.replace("-", ""))
        if type.logical == "duration" and isinstance(value, dict):
            return _duration(value)
        data = self._bytes(value)
        if len(data) != type.size:
            raise _wrong(value, f"{type.size} bytes")
        return data

    def _bytes(self, value: Any) -> bytes:
        try:
            if self._in_schema:
                return str.encode(value, "latin-1")
            return base64.b64decode(str.encode(value, "ascii"), validate=True)
        except (TypeError, ValueError):
            raise _wrong(value, "text of the characters U+0000 to U+00FF" if self._in_schema else "base64") from None


def _takes_null(type: Type) -> bool:
    return isinstance(type, Union) and any(isinstance(b, Primitive) and b.name == "null" for b in type.branches)


def _write_text(value: Any, out: bytearray) -> None:
    if not isinstance(value, str):
        raise _wrong(value, "a string")
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise DoesNotFit("the text has a lone surrogate") from None
    out += zigzag(len(data)) + data


def _duration(value: dict[str, Any]) -> bytes:
    parts = [value.get(name) for name in DURATION]
    if value.keys() != set(DURATION) or not all(type(part) is int and 0 <= part < 1 << 32 for part in parts):
        raise _wrong(value, f"a duration: {', '.join(DURATION)}, as whole numbers of 32 bits")
    return struct.pack("<III", *parts)


def _float(name: str, value: Any) -> bytes:
    if value in ("NaN", "Infinity", "-Infinity"):
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(value, f"a {name}")
    try:
        return struct.pack("<f" if name == "float" else "<d", value)
    except (OverflowError, struct.error):
        raise _wrong(value, f"a {name}") from None


def _units(type: Primitive | Fixed, value: Any, size: int | None) -> bytes:
    """A decimal as big-endian bytes, in as few as possible where there is no size."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise decimal.InvalidOperation
        number = decimal.Decimal(repr(value) if isinstance(value, float) else value)
        context = decimal.Context(prec=max(type.precision, 1), traps=[decimal.Inexact, decimal.InvalidOperation])
        exact = number.quantize(decimal.Decimal(1).scaleb(-type.scale), context=context)
        units = int(exact.scaleb(type.scale, decimal.Context(prec=type.precision + 1)))
    except decimal.DecimalException:
        raise _wrong(value, f"a decimal of {type.precision} digits, {type.scale} of them after the point") from None
    needed = (units if units >= 0 else ~units).bit_length() // 8 + 1
    return units.to_bytes(size or needed, "big", signed=True)


def _temporal(type: Primitive, text: str) -> int | None:
    """The number of a date, a time or a timestamp that is given as text; None if it is not one."""
    logical = type.logical or ""
    try:
        if logical == "date":
            return dt.date.fromisoformat(text).toordinal() - _EPOCH.toordinal()
        per_second = _PER_SECOND[logical.rpartition("-")[2]]
        nanos = 0
        if more := _FRACTION.fullmatch(text):
            if more[2][3:].strip("0"):
                return None
            text, nanos = f"{more[1]}{more[3]}", int(more[2][:3].ljust(3, "0"))
        if logical.startswith("time-"):
            span = dt.datetime.combine(_EPOCH, dt.time.fromisoformat(text)) - _EPOCH
        else:
            moment = dt.datetime.fromisoformat(text.upper())
            if (moment.tzinfo is None) is not logical.startswith("local-"):
                return None
            span = (moment if moment.tzinfo is None else moment.astimezone(dt.UTC).replace(tzinfo=None)) - _EPOCH
        units, rest = divmod((span // dt.timedelta(microseconds=1) * 1000 + nanos) * per_second, 1_000_000_000)
        return None if rest else units
    except (ValueError, OverflowError, TypeError):  # TypeError: a time of day with a zone
        return None


def _wrong(value: Any, expected: str) -> DoesNotFit:
    return DoesNotFit(f"expected {expected}, found {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
