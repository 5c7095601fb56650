"""When two rows are the same: the values that records give against the values in the table, column by column.

The table's side is brought to the types of the records' side, exactly or not at all: a value that does not fit the type
is different from all that do. JSON is compared as what it says (order of members and spelling of numbers aside),
numbers exactly, times as instants. Whole columns are compared at once; only where a window differs are its rows told
apart, by *codes* that are equal for equal rows, and only changed rows are looked at one by one.

Owns: equality of values, and what kind of difference it is. Must not know: Kafka, Spark, how a sink writes; nothing
here is shared with the code that wrote the rows. Neighbour: ``compare``, which works on the codes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, ROUND_HALF_UP, Context, Decimal
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from avow.audit.compare import Bags, Rows
from avow.findings import Kind, Offsets

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

    def __init__(self, due: pa.RecordBatch, there: pa.RecordBatch, offset: str, json_columns: frozenset[str]) -> None:
        self._due_offsets = due.column(offset).to_numpy()
        self._there_offsets = there.column(offset).to_numpy()
        self._columns = {
            name: _pair(due.column(name), there.column(name), as_json=name in json_columns)
            for name in due.schema.names
            if name != offset
        }
        self._same = np.array_equal(self._due_offsets, self._there_offsets) and all(
            one.equals(other) for one, other in self._columns.values()
        )

    def rows(self) -> tuple[Rows, Rows]:
        """Due and there, with codes."""
        if self._same:
            codes = np.arange(len(self._due_offsets))
            return Rows(self._due_offsets, codes), Rows(self._there_offsets, codes)
        codes = np.zeros(len(self._due_offsets) + len(self._there_offsets), np.int64)
        for pair in self._columns.values():
            codes = _combined(codes, _codes(*pair))
        return self._split(codes)

    def _split(self, codes: Codes) -> tuple[Rows, Rows]:
        middle = len(self._due_offsets)
        return Rows(self._due_offsets, codes[:middle]), Rows(self._there_offsets, codes[middle:])

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
        due, there = self._split(_codes(*self._columns[name]))
        bags = Bags.of(_only(due, offsets), _only(there, offsets))
        return bags.offsets[(bags.missing > 0) | (bags.alien > 0)]

    def _lossy(self, offsets: Offsets, differs: dict[str, Mask]) -> Mask:
        """Whether every difference is a value that lost something. Told only where both sides have one row."""
        (first, firsts), (second, seconds) = (
            (np.searchsorted(side, offsets), np.searchsorted(side, offsets, "right"))
            for side in (self._due_offsets, self._there_offsets)
        )
        lossy: Mask = (firsts - first == 1) & (seconds - second == 1)
        for name, at in differs.items():
            due, there = self._columns[name]
            for number in np.flatnonzero(at & lossy).tolist():
                one, other = due[int(first[number])], there[int(second[number])]
                lossy[number] = _lost_something(one.as_py(), other.as_py())
        return lossy


def _only(rows: Rows, offsets: Offsets) -> Rows:
    mask = np.isin(rows.offsets, offsets)
    return Rows(rows.offsets[mask], rows.codes[mask])


def _codes(one: pa.Array, other: pa.Array) -> Codes:
    """Numbers for values, the same for the same value on both sides; a null is a value too."""
    if pa.types.is_nested(one.type):  # Arrow cannot tell these apart; as text they are
        one, other = (_texts(side, partial(_said, type_=side.type)) for side in (one, other))
    encoded = pa.concat_arrays([one, other]).dictionary_encode(null_encoding="encode")
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


def _pair(due: pa.Array, there: pa.Array, *, as_json: bool) -> tuple[pa.Array, pa.Array]:
    """Both sides in one type."""
    # Numeric and JSON come from the table as text in a type of their own.
    due, there = (side.storage if isinstance(side, pa.ExtensionArray) else side for side in (due, there))
    if as_json:
        parsed = partial(_parsed, type_=due.type)
        return _texts(due, parsed if pa.types.is_string(due.type) else partial(_said, type_=due.type)), _texts(
            there, parsed
        )
    if there.type == due.type:
        return due, there
    try:
        return due, there.cast(due.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _reprs(due), _reprs_as(there, due.type)


def _reprs(array: pa.Array) -> pa.Array:
    return pa.array([None if value is None else repr(value) for value in array.to_pylist()], pa.string())


def _reprs_as(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Value by value: those that fit the type as it shows them, the others as they are."""
    texts = []
    for value in array:
        try:
            texts.append(value.cast(type_).as_py())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            texts.append(_Other(value.as_py()))
    return pa.array([None if text is None else repr(text) for text in texts], pa.string())


@dataclass(frozen=True, slots=True)
class _Other:
    """A value outside the type that is due: its repr equals that of no value inside."""

    value: object


# JSON


def _texts(array: pa.Array, read: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else read(value) for value in array.to_pylist()], pa.string())


_EXACT = Context(prec=5_000)


def _parsed(text: str, type_: pa.DataType) -> str:
    """JSON in the one spelling that we compare by."""
    return _spelled(_with_floats(json.loads(text, parse_float=Decimal, parse_int=Decimal), type_))


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


def _said(value: Any, type_: pa.DataType) -> str:
    """What a nested value is as JSON, in the same spelling."""
    return _spelled(_plain(value, type_))


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


def _spelled(value: Any) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return "{" + ",".join(f"{_spelled(key)}:{_spelled(value[key])}" for key in sorted(value)) + "}"
        case list():
            return "[" + ",".join(map(_spelled, value)) + "]"
        case _:
            return _number(value if isinstance(value, Decimal) else Decimal(repr(value)))


def _number(value: Decimal) -> str:
    return str(value.normalize(_EXACT)) if value else "0"


# Coercion

_ROUNDINGS = (ROUND_HALF_EVEN, ROUND_HALF_UP, ROUND_DOWN)
_TICKS = (timedelta(milliseconds=1), timedelta(seconds=1))


def _lost_something(due: Any, there: Any) -> bool:
    """Whether ``there`` is what is left of ``due`` after nulling, rounding or cutting it."""
    if due is None or there is None or isinstance(due, bool):
        return there is None
    match due:
        case str() | bytes():
            return len(there) < len(due) and bool(due.startswith(there))
        case float() if isinstance(there, float) and float(np.float32(due)) == there:
            return True
        case float() | Decimal():
            return _rounded(Decimal(repr(due)) if isinstance(due, float) else due, Decimal(str(there)))
        case datetime():
            midnight = there.replace(hour=0, minute=0, second=0, microsecond=0)
            return any(abs(due - there) < tick and not (there - midnight) % tick for tick in _TICKS)
    return False


def _rounded(due: Decimal, there: Decimal) -> bool:
    exponent = due.as_tuple().exponent
    digits = -exponent if isinstance(exponent, int) else 0  # NaN and infinities have none to lose
    return any(
        due.quantize(Decimal(1).scaleb(-places), rounding=rounding, context=_EXACT) == there
        for places in range(digits)
        for rounding in _ROUNDINGS
    )
