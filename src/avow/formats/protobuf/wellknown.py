"""The messages of google.protobuf that are not structs: what their fields are, and what value they stand for.

Owns: that. Must not know: bytes. Neighbours: ``layout``, which recognizes them, and ``reader``, which reads the fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import Any

from avow.formats.base import DecodeError, Reason
from avow.formats.protobuf.descriptors import Kind
from avow.formats.protobuf.layout import Enumeration, Exact, Many, Record, Slot, Special
from avow.schema import MAX_PRECISION

SECONDS_MIN, SECONDS_MAX = -62_135_596_800, 253_402_300_799  # 0001-01-01 to 9999-12-31, as protobuf has it
DURATION_SECONDS_MAX = 315_576_000_000  # 10,000 years, as protobuf has it
_NANOS_MAX = 999_999_999
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WHOLE_UNTIL = 2.0**53
_DECIMAL_BYTES_MAX = 1_000
_SHIFT_MAX = 5_000  # beyond the digits of the bytes above

_SPAN = Record("", (Slot(1, "seconds", Kind.INT64, absent=0), Slot(2, "nanos", Kind.INT32, absent=0)))
_DATE = ("year", "month", "day")
DECIMAL_RECORD = Record(
    "",
    (
        Slot(1, "value", Kind.BYTES, absent=b""),
        Slot(2, "precision", Kind.UINT32, absent=0),
        Slot(3, "scale", Kind.INT32, absent=0),
    ),
)
RECORDS = {
    Special.TIMESTAMP: _SPAN,
    Special.DURATION: _SPAN,
    Special.EMPTY: Record("", ()),
    Special.DATE: Record("", tuple(Slot(n, name, Kind.INT32, absent=0) for n, name in enumerate(_DATE, start=1))),
    Special.JSON_OBJECT: Record("", (Slot(1, "fields", Special.JSON_VALUE, Many.MAP, Kind.STRING),)),
    Special.JSON_ARRAY: Record("", (Slot(1, "values", Special.JSON_VALUE, Many.LIST),)),
    Special.JSON_VALUE: Record(
        "",
        (
            Slot(1, "null_value", Enumeration({0: "NULL_VALUE"}), oneof="kind"),
            Slot(2, "number_value", Kind.DOUBLE, oneof="kind"),
            Slot(3, "string_value", Kind.STRING, oneof="kind"),
            Slot(4, "bool_value", Kind.BOOL, oneof="kind"),
            Slot(5, "struct_value", Special.JSON_OBJECT, oneof="kind"),
            Slot(6, "list_value", Special.JSON_ARRAY, oneof="kind"),
        ),
    ),
}


def _timestamp(found: dict[str, Any]) -> datetime:
    seconds, nanos = found["seconds"], found["nanos"]
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        raise DecodeError(Reason.OUT_OF_RANGE, f"{seconds:,} s from 1970 on is not between the years 0001 and 9999")
    if not 0 <= nanos <= _NANOS_MAX:
        raise DecodeError(Reason.OUT_OF_RANGE, f"{nanos:,} ns are not part of a second")
    return _EPOCH + timedelta(seconds=seconds, microseconds=_micros(nanos))


def _duration(found: dict[str, Any]) -> int:
    seconds, nanos = found["seconds"], found["nanos"]
    if abs(seconds) > DURATION_SECONDS_MAX:
        raise DecodeError(Reason.OUT_OF_RANGE, f"a duration of {seconds:,} s is longer than 10,000 years")
    if abs(nanos) > _NANOS_MAX or seconds * nanos < 0:
        raise DecodeError(Reason.OUT_OF_RANGE, f"{nanos:,} ns are not part of a duration of {seconds:,} s")
    micros: int = seconds * 1_000_000 + _micros(nanos)
    return micros


def _date(found: dict[str, Any]) -> date:
    year, month, day = (found[name] for name in _DATE)
    try:
        return date(year, month, day)
    except (ValueError, OverflowError):
        raise DecodeError(Reason.OUT_OF_RANGE, f"there is no day {year}-{month}-{day} of the years 1 to 9999") from None


def decimal_of(exact: Exact) -> Callable[[dict[str, Any]], Decimal]:
    """A function that reads a confluent.type.Decimal. Its own scale may be another one, if no digit is lost."""
    limit = 10**exact.precision
    context = Context(prec=MAX_PRECISION)

    def convert(found: dict[str, Any]) -> Decimal:
        data, shift = found["value"], exact.scale - found["scale"]
        if not data:
            raise DecodeError(Reason.OUT_OF_RANGE, "a decimal of no bytes")
        units = int.from_bytes(data, "big", signed=True) if len(data) <= _DECIMAL_BYTES_MAX else limit
        power = 10 ** min(abs(shift), _SHIFT_MAX)
        units, rest = (units * power, 0) if shift >= 0 else divmod(units, power)
        if rest or abs(units) >= limit:
            name = f"decimal({exact.precision},{exact.scale})"
            raise DecodeError(Reason.OUT_OF_RANGE, f"a decimal of {len(data):,} bytes does not fit into {name}")
        return Decimal(units).scaleb(-exact.scale, context)

    return convert


def _micros(nanos: int) -> int:
    if nanos % 1_000:
        raise DecodeError(Reason.OUT_OF_RANGE, f"{nanos:,} ns have digits beyond microseconds")
    return nanos // 1_000


def _json_value(found: dict[str, Any]) -> object:
    value = next((value for value in found.values() if value is not None), None)
    if value is None:
        raise DecodeError(Reason.MISSING_FIELD, "a google.protobuf.Value that has none")
    if found["null_value"] is not None:
        return None
    return _json_number(value) if isinstance(value, float) else value


def _json_number(number: float) -> float | int:
    """Whole numbers as JSON is used to write them: 17 and not 17.0."""
    if not math.isfinite(number):
        raise DecodeError(Reason.OUT_OF_RANGE, f"JSON has no {number}")
    is_whole = number.is_integer() and abs(number) < _WHOLE_UNTIL and str(number) != "-0.0"
    return int(number) if is_whole else number


def json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# What the fields of such a message, absent ones null, stand for.
CONVERT: dict[Special, Callable[[dict[str, Any]], Any]] = {
    Special.TIMESTAMP: _timestamp,
    Special.DURATION: _duration,
    Special.DATE: _date,
    Special.EMPTY: lambda _: True,
    Special.JSON_OBJECT: lambda found: dict(found["fields"]),
    Special.JSON_ARRAY: lambda found: found["values"],
    Special.JSON_VALUE: _json_value,
}
