"""One JSON value as a value of a declared type, strictly: it fits exactly, or it is refused by name.

How a type is written in JSON:

- integers as a number without fraction and exponent, in range: ``1.0`` and ``1e2`` are refused
- float and double as a number; the nearest value is taken, but not infinity, and zero only for zero; a whole number,
  written without fraction and exponent, must be held exactly
- decimals as a number or as a string that spells one, exact: no digit beyond the scale except zeros
- date as ``2026-01-31``, timestamp as RFC 3339 with a zone, timestamp_ntz the same without one: years 0001 to 9999,
  no digit beyond microseconds except zeros, no leap second
- binary as a string of standard base64 with its padding
- array as an array, map and struct as an object; boolean and string as themselves

Owns: what a value must look like. Must not know: Arrow arrays, records, JSON's syntax. Its neighbours are ``document``,
which gives it values, and ``columns``, which is the same judgement on whole columns.
"""

from __future__ import annotations

import base64
import binascii
import decimal
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime

import pyarrow as pa

from avow.formats.base import DecodeError, Reason, shown
from avow.formats.json.document import Json, Number, describe
from avow.formats.text import refuse_nul
from avow.schema import Array, Decimal, Field, Map, Scalar, Struct, Type

Reader = Callable[[Json], object]  # never called with null

_INTEGER_BITS = {Scalar.BYTE: 8, Scalar.SHORT: 16, Scalar.INT: 32, Scalar.LONG: 64}
_LONG_DIGITS_MAX = 19
WHOLE_UNTIL = {Scalar.FLOAT: 2.0**24, Scalar.DOUBLE: 2.0**53}  # below, every whole number is held exactly
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# The forms; whether a month has a day is the calendar's to say. Tighter than fromisoformat, which knows more of them.
_DATE_FORM = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK_FORM = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_DATE = re.compile(_DATE_FORM)
_TIMESTAMP = re.compile(rf"{_DATE_FORM}[Tt]{_CLOCK_FORM}:[0-5][0-9](?:\.([0-9]+))?([Zz]|[+-]{_CLOCK_FORM})?")
_MICROSECOND_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ReadRules:
    """What holds for every value of a pipeline."""

    refuse_nul: bool  # the sink cannot hold NUL in text
    ignore_unknown: bool  # fields of a struct that are not declared are dropped, not refused


def reader(type: Type, rules: ReadRules) -> Reader:
    """A function that reads a JSON value, not null, as this type, or raises ``DecodeError``."""
    if isinstance(type, Decimal):
        return _decimal(type)
    if isinstance(type, Array):
        return _array(reader(type.element, rules))
    if isinstance(type, Map):
        return _map(reader(type.value, rules), rules)
    if isinstance(type, Struct):
        return _struct(type, rules)
    if type in _INTEGER_BITS:
        return _integer(type)
    if type is Scalar.STRING:
        return _string(rules)
    return {
        Scalar.BOOLEAN: _boolean,
        Scalar.FLOAT: _float,
        Scalar.DOUBLE: _double,
        Scalar.BINARY: _binary,
        Scalar.DATE: _date,
        Scalar.TIMESTAMP: _timestamp,
        Scalar.TIMESTAMP_NTZ: _timestamp_ntz,
    }[type]


def fields_reader(fields: tuple[Field, ...], rules: ReadRules) -> Callable[[dict[str, Json]], dict[str, object]]:
    """An object's declared fields, all of them, absent ones as null. Others are the caller's business."""
    readers = [(field.name, reader(field.type, rules), field.required) for field in fields]

    def read(document: dict[str, Json]) -> dict[str, object]:
        row: dict[str, object] = {}
        name = ""
        try:
            for name, read_value, required in readers:
                value = document.get(name)
                if value is not None:
                    row[name] = read_value(value)
                elif required:
                    presence = "null" if name in document else "absent"
                    raise DecodeError(Reason.MISSING_FIELD, f"{presence}, but declared not null")
                else:
                    row[name] = None
        except DecodeError as error:
            raise error.inside(name) from None
        return row

    return read


def _wrong_type(value: Json, expected: str) -> DecodeError:
    return DecodeError(Reason.WRONG_TYPE, f"expected {expected}, found {describe(value)}")


def _boolean(value: Json) -> bool:
    if value is True or value is False:
        return value
    raise _wrong_type(value, "true or false")


def _integer(type: Scalar) -> Reader:
    limit = 1 << (_INTEGER_BITS[type] - 1)

    def read(value: Json) -> int:
        if not isinstance(value, Number) or not _is_whole(value):
            raise _wrong_type(value, f"{type} (digits only)")
        # Short first: int() of a thousand digits is slow, and longer ones it refuses itself.
        number = int(value) if len(value) <= _LONG_DIGITS_MAX + 1 else limit
        if not -limit <= number < limit:
            raise DecodeError(Reason.OUT_OF_RANGE, f"{describe(value)} does not fit into {type}")
        return number

    return read


def _is_whole(token: Number) -> bool:
    return token.removeprefix(b"-").isdigit()


def _double(value: Json) -> float:
    if not isinstance(value, Number):
        raise _wrong_type(value, "double")
    return _exact(float(value), value, Scalar.DOUBLE)


def _float(value: Json) -> float:
    if not isinstance(value, Number):
        raise _wrong_type(value, "float")
    # By way of a double it would be rounded twice; Arrow rounds once.
    return _exact(pa.scalar(value.decode()).cast(pa.float32()).as_py(), value, Scalar.FLOAT)


def _exact(number: float, token: Number, type: Scalar) -> float:
    if math.isinf(number):
        raise DecodeError(Reason.OUT_OF_RANGE, f"{describe(token)} is too large for {type}")
    if number == 0 and not _is_zero(token.decode()):
        raise DecodeError(Reason.OUT_OF_RANGE, f"{describe(token)} is too small for {type}: it would become zero")
    if abs(number) >= WHOLE_UNTIL[type] and _is_whole(token) and number != int(token):
        raise DecodeError(Reason.OUT_OF_RANGE, f"{describe(token)} cannot be represented exactly as {type}")
    return number


def _is_zero(token: str) -> bool:
    mantissa = re.split("[eE]", token, maxsplit=1)[0]
    return not mantissa.strip("+-0.")


def _decimal(type: Decimal) -> Reader:
    context = decimal.Context(prec=type.precision, traps=[decimal.Inexact, decimal.InvalidOperation])
    unit = decimal.Decimal(1).scaleb(-type.scale)

    def read(value: Json) -> decimal.Decimal:
        if not isinstance(value, (str, Number)):
            raise _wrong_type(value, f"{type}")
        text = value if isinstance(value, str) else value.decode()
        if not _DECIMAL.fullmatch(text):
            raise _bad_text(text, f"{type}")
        if _is_zero(text):
            return decimal.Decimal(0)
        try:
            return decimal.Decimal(text).quantize(unit, context=context)
        except decimal.DecimalException:
            raise DecodeError(
                Reason.OUT_OF_RANGE, f"{describe(value)} cannot be represented exactly as {type}"
            ) from None

    return read


def _string(rules: ReadRules) -> Reader:
    def read(value: Json) -> str:
        if not isinstance(value, str):
            raise _wrong_type(value, "a string")
        if rules.refuse_nul:
            refuse_nul(value)
        return value

    return read


def _text(value: Json, expected: str) -> str:
    if not isinstance(value, str):
        raise _wrong_type(value, expected)
    return value


def _bad_text(text: str, expected: str) -> DecodeError:
    return DecodeError(Reason.BAD_TEXT, f"expected {expected}, found {shown(text)}")


def _binary(value: Json) -> bytes:
    expected = "a base64 string"
    text = _text(value, expected)
    if not (text.isascii() and (decoded := base64_decode(text)) is not None):
        raise _bad_text(text, expected)
    return decoded


def base64_decode(text: str) -> bytes | None:
    """The bytes, if this is how standard base64 writes them: one spelling each."""
    try:
        decoded = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return None
    return decoded if base64.b64encode(decoded).decode("ascii") == text else None


def _date(value: Json) -> date:
    expected = "a date such as 2026-01-31"
    text = _text(value, expected)
    if not _DATE.fullmatch(text):
        raise _bad_text(text, expected)
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise DecodeError(Reason.BAD_TEXT, f"{shown(text)}: {error}") from None


def is_day(text: str) -> bool:
    """Whether the calendar has this day, given in the right form."""
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _timestamp(value: Json) -> datetime:
    text, moment = _moment(value, "a timestamp with a time zone, such as 2026-01-31T12:00:00Z", zoned=True)
    try:
        return moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    except OverflowError:
        raise DecodeError(Reason.OUT_OF_RANGE, f"{shown(text)} is not between the years 0001 and 9999 in UTC") from None


def _timestamp_ntz(value: Json) -> datetime:
    return _moment(value, "a timestamp without a time zone, such as 2026-01-31T12:00:00", zoned=False)[1]


def _moment(value: Json, expected: str, *, zoned: bool) -> tuple[str, datetime]:
    text = _text(value, expected)
    match = _TIMESTAMP.fullmatch(text)
    if not match or bool(match[2]) is not zoned:
        raise _bad_text(text, expected)
    fraction = match[1]
    spelled = text.upper()
    if fraction and len(fraction) > _MICROSECOND_DIGITS:
        if fraction[_MICROSECOND_DIGITS:].strip("0"):
            raise DecodeError(Reason.OUT_OF_RANGE, f"{shown(text)} has digits beyond microseconds")
        spelled = spelled.replace(fraction, fraction[:_MICROSECOND_DIGITS])
    try:
        return text, datetime.fromisoformat(spelled)
    except ValueError as error:
        raise DecodeError(Reason.BAD_TEXT, f"{shown(text)}: {error}") from None


def _array(element: Reader) -> Reader:
    def read(value: Json) -> list[object]:
        if not isinstance(value, list):
            raise _wrong_type(value, "an array")
        elements: list[object] = []
        try:
            for inner in value:
                elements.append(None if inner is None else element(inner))
        except DecodeError as error:
            raise error.inside(f"[{len(elements)}]") from None
        return elements

    return read


def _map(element: Reader, rules: ReadRules) -> Reader:
    def read(value: Json) -> list[tuple[str, object]]:
        if not isinstance(value, dict):
            raise _wrong_type(value, "an object")
        pairs: list[tuple[str, object]] = []
        name = ""
        try:
            for name, inner in value.items():
                if rules.refuse_nul:
                    refuse_nul(name)
                pairs.append((name, None if inner is None else element(inner)))
        except DecodeError as error:
            raise error.inside(f"[{shown(name)}]") from None
        return pairs

    return read


def _struct(struct: Struct, rules: ReadRules) -> Reader:
    read_fields = fields_reader(struct.fields, rules)
    known = frozenset(field.name for field in struct.fields)

    def read(value: Json) -> dict[str, object]:
        if not isinstance(value, dict):
            raise _wrong_type(value, "an object")
        if not rules.ignore_unknown:
            refuse_unknown(value, known)
        return read_fields(value)

    return read


def refuse_unknown(document: dict[str, Json], known: frozenset[str]) -> None:
    if not document.keys() <= known:
        unknown = next(name for name in document if name not in known)
        raise DecodeError(Reason.UNKNOWN_FIELD, f"the field {shown(unknown)} is not declared")
