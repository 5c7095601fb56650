"""Equality of rows: the expected values against the values in the table, column by column.

The table's values are cast to the expected types, exactly or not at all: a value that does not fit the type differs
from all that do. JSON is compared by its meaning (order of members and spelling of numbers aside), numbers exactly,
times as instants. Whole columns are compared at once; only where a window differs are its rows given *codes* that are
equal for equal rows, and only changed rows are compared one by one.

Owns: equality of values, and what kind of difference it is. Must not know: Kafka, Spark, how a sink writes; nothing
here is shared with the code that wrote the rows. Neighbour: ``compare``, which works on the codes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, ROUND_HALF_UP, Context, Decimal
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from avow.audit.compare import Bags, CodedRows
from avow.findings import Kind, Offsets
from avow.sinks.auditing import Evolved

Codes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Changed:
    """Offsets whose rows are not what is due, by kind of difference, and the columns that differ."""

    kind: Kind
    offsets: Offsets
    columns: set[str]


class Window:
    """The rows of one window from both sides, in the same columns."""

    def __init__(
        self, expected: pa.RecordBatch, actual: pa.RecordBatch, offset: str, json_columns: frozenset[str]
    ) -> None:
        self._expected_offsets = expected.column(offset).to_numpy()
        self._actual_offsets = actual.column(offset).to_numpy()
        self._columns = {
            name: _pair(expected.column(name), actual.column(name), as_json=name in json_columns)
            for name in expected.schema.names
            if name != offset
        }
        self._same = np.array_equal(self._expected_offsets, self._actual_offsets) and all(
            expected_column.equals(actual_column) for expected_column, actual_column in self._columns.values()
        )

    def rows(self) -> tuple[CodedRows, CodedRows]:
        """Due and there, with codes."""
        if self._same:
            codes = np.arange(len(self._expected_offsets))
            return CodedRows(self._expected_offsets, codes), CodedRows(self._actual_offsets, codes)
        codes = np.zeros(len(self._expected_offsets) + len(self._actual_offsets), np.int64)
        for pair in self._columns.values():
            codes = _combined(codes, _codes(*pair))
        return self._split(codes)

    def _split(self, codes: Codes) -> tuple[CodedRows, CodedRows]:
        middle = len(self._expected_offsets)
        return CodedRows(self._expected_offsets, codes[:middle]), CodedRows(self._actual_offsets, codes[middle:])

    def changed(self, offsets: Offsets) -> list[Changed]:
        """What is different at these offsets."""
        if not len(offsets):
            return []
        differs = {name: np.isin(offsets, self._differing(name, offsets)) for name in self._columns}
        lossy = self._lossy(offsets, differs)
        return [
            Changed(kind, offsets[mask], {name for name, at in differs.items() if (at & mask).any()})
            for kind, mask in ((Kind.COERCED, lossy), (Kind.CORRUPTED, ~lossy))
        ]

    def _differing(self, name: str, offsets: Offsets) -> Offsets:
        """Where this column has other values than are due, whatever row they are in."""
        expected, actual = self._split(_codes(*self._columns[name]))
        bags = Bags.of(_only(expected, offsets), _only(actual, offsets))
        return bags.offsets[(bags.missing > 0) | (bags.alien > 0)]

    def _lossy(self, offsets: Offsets, differs: dict[str, Mask]) -> Mask:
        """Whether every difference is a coerced value. Known only where both sides have one row."""
        (first, firsts), (second, seconds) = (
            (np.searchsorted(side, offsets), np.searchsorted(side, offsets, "right"))
            for side in (self._expected_offsets, self._actual_offsets)
        )
        lossy: Mask = (firsts - first == 1) & (seconds - second == 1)
        for name, at in differs.items():
            expected, actual = self._columns[name]
            for number in np.flatnonzero(at & lossy).tolist():
                expected_value, actual_value = expected[int(first[number])], actual[int(second[number])]
                lossy[number] = _lost_something(expected_value.as_py(), actual_value.as_py())
        return lossy


def as_written(due: pa.RecordBatch, actual: pa.RecordBatch, offset: str, evolved: Iterable[Evolved]) -> pa.RecordBatch:
    """The rows that are due, as they were when the table had other columns: without a column that was added since, and
    with a float's values in one that was a float. Where a row of the record has more than that, all of it is due."""
    at, at_actual = due.column(offset).to_numpy(), actual.column(offset).to_numpy()
    for change in evolved:
        number = due.schema.get_field_index(change.column)
        if number < 0 or not (at < change.until).any():
            continue
        column, existing = due.column(number), actual.column(change.column)
        if change.was_float:
            before = column.cast(pa.float32()).cast(column.type)
            values = existing.to_numpy(zero_copy_only=False)
            with np.errstate(invalid="ignore", over="ignore"):
                whole = ~(np.isnan(values) | (values.astype(np.float32) == values))
        else:
            before = pa.nulls(len(column), column.type)
            whole = existing.is_valid().to_numpy(zero_copy_only=False)
        early = (at < change.until) & ~np.isin(at, at_actual[whole])
        chosen = np.where(early, np.arange(len(at)) + len(at), np.arange(len(at)))
        column = pa.concat_arrays([column, before]).take(pa.array(chosen))
        due = due.set_column(number, due.schema.field(number), column)
    return due


def _only(rows: CodedRows, offsets: Offsets) -> CodedRows:
    mask = np.isin(rows.offsets, offsets)
    return CodedRows(rows.offsets[mask], rows.codes[mask])


def _codes(expected: pa.Array, actual: pa.Array) -> Codes:
    """Numbers for values, the same for the same value on both sides; a null is a value too."""
    if pa.types.is_nested(expected.type):  # Arrow cannot encode these; their text can be
        expected, actual = (_texts(side.to_pylist(), partial(_as_json, type_=side.type)) for side in (expected, actual))
    encoded = pa.concat_arrays([expected, actual]).dictionary_encode(null_encoding="encode")
    codes: Codes = encoded.indices.to_numpy().astype(np.int64)
    return codes


def _combined(codes: Codes, more: Codes) -> Codes:
    """One number for two, exactly."""
    if not len(codes):
        return codes
    width = int(more.max()) + 1
    if int(codes.max()) >= 2**62 // width:
        codes = np.unique(codes, return_inverse=True)[1]
    return codes * width + more


def _pair(expected: pa.Array, actual: pa.Array, *, as_json: bool) -> tuple[pa.Array, pa.Array]:
    """Both sides in one type."""
    # Numeric and JSON come from the table as text in a type of their own.
    expected, actual = (side.storage if isinstance(side, pa.ExtensionArray) else side for side in (expected, actual))
    if as_json:
        parsed = partial(_parsed, type_=expected.type)
        as_expected = parsed if pa.types.is_string(expected.type) else partial(_as_json, type_=expected.type)
        return _texts(expected.to_pylist(), as_expected), _texts(actual.to_pylist(), parsed)
    if actual.type == expected.type:
        return expected, actual
    try:
        return expected, actual.cast(expected.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Value by value: those that fit the type as it shows them, the others as they are.
        return _texts(expected.to_pylist(), repr), _texts((_fitting(value, expected.type) for value in actual), repr)


def _fitting(value: pa.Scalar, type_: pa.DataType) -> Any:
    try:
        return value.cast(type_).as_py()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _Other(value.as_py())


@dataclass(frozen=True, slots=True)
class _Other:
    """A value outside the type that is due: its repr equals that of no value inside."""

    value: object


# JSON


def _texts(values: Iterable[Any], read: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else read(value) for value in values], pa.string())


_EXACT = Context(prec=5_000)


def _parsed(text: str, type_: pa.DataType) -> str:
    """JSON in the one spelling that we compare by."""
    return _canonical(_with_floats(json.loads(text, parse_float=Decimal, parse_int=Decimal), type_))


def _with_floats(value: Any, type_: pa.DataType) -> Any:
    """Numbers where floats of 32 bits are due, as such a float is spelled: whatever digits say which one it is."""
    if isinstance(value, list) and pa.types.is_list(type_):
        return [_with_floats(item, type_.value_type) for item in value]
    if isinstance(value, dict) and pa.types.is_map(type_):
        return {key: _with_floats(item, type_.item_type) for key, item in value.items()}
    if isinstance(value, dict) and pa.types.is_struct(type_):
        types = {field.name: field.type for field in type_.fields}
        return {key: _with_floats(item, types.get(key, pa.null())) for key, item in value.items()}
    return _float(value) if isinstance(value, Decimal) and pa.types.is_float32(type_) else value


def _float(value: float | Decimal) -> Decimal:
    """The fewest digits that say which float it is."""
    return Decimal(str(np.float32(value)))


def _as_json(value: Any, type_: pa.DataType) -> str:
    """What a nested value is as JSON, in the same spelling."""
    return _canonical(_plain(value, type_))


def _plain(value: Any, type_: pa.DataType) -> Any:
    """An Arrow value as JSON has it: a map is an object, bytes are base64, times are text."""
    if value is None:
        return None
    if pa.types.is_list(type_):
        return [_plain(item, type_.value_type) for item in value]
    if pa.types.is_map(type_):
        return {key: _plain(item, type_.item_type) for key, item in value}
    if pa.types.is_struct(type_):
        return {field.name: _plain(value[field.name], field.type) for field in type_.fields}
    if pa.types.is_binary(type_):
        return base64.b64encode(value).decode()
    if pa.types.is_float32(type_):
        return _float(value)
    return value.isoformat() if pa.types.is_temporal(type_) else value


def _canonical(value: Any) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return "{" + ",".join(f"{_canonical(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
        case list():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case _:
            return _number(value if isinstance(value, Decimal) else Decimal(repr(value)))


def _number(value: Decimal) -> str:
    return str(value.normalize(_EXACT)) if value else "0"


# Coercion

_ROUNDINGS = (ROUND_HALF_EVEN, ROUND_HALF_UP, ROUND_DOWN)
_TICKS = (timedelta(milliseconds=1), timedelta(seconds=1))


def _lost_something(expected: Any, actual: Any) -> bool:
    """Whether ``actual`` is what is left of ``expected`` after nulling, rounding or cutting it."""
    if expected is None or actual is None or isinstance(expected, bool):
        return actual is None
    match expected:
        case str() | bytes():
            return len(actual) < len(expected) and bool(expected.startswith(actual))
        case float() if isinstance(actual, float) and float(np.float32(expected)) == actual:
            return True
        case float() | Decimal():
            return _rounded(Decimal(repr(expected)) if isinstance(expected, float) else expected, Decimal(str(actual)))
        case datetime():
            midnight = actual.replace(hour=0, minute=0, second=0, microsecond=0)
            return any(abs(expected - actual) < tick and not (actual - midnight) % tick for tick in _TICKS)
    return False


def _rounded(expected: Decimal, actual: Decimal) -> bool:
    exponent = expected.as_tuple().exponent
    digits = -exponent if isinstance(exponent, int) else 0  # NaN and infinities have none to lose
    return any(
        expected.quantize(Decimal(1).scaleb(-places), rounding=rounding, context=_EXACT) == actual
        for places in range(digits)
        for rounding in _ROUNDINGS
    )
