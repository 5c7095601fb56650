"""When two rows are the same, and what kind of difference there is when they are not."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from avow.audit.values import Window
from avow.findings import Kind

NOON = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


def batch(type_: pa.DataType, values: list[Any], offsets: list[int] | None = None) -> pa.RecordBatch:
    where = pa.array(offsets or range(len(values)), pa.int64())
    array = pa.array(values, type_) if not isinstance(type_, pa.BaseExtensionType) else pa.array(values).cast(type_)
    return pa.RecordBatch.from_arrays([where, array], names=["at", "v"])


def changes(due: pa.RecordBatch, there: pa.RecordBatch, *, as_json: bool = False) -> dict[int, Kind]:
    window = Window(due, there, "at", frozenset({"v"} if as_json else ()))
    one, other = window.rows()
    differ = one.offsets[one.codes != other.codes]
    found = window.changed(differ)
    assert all(change.columns == {"v"} for change in found if len(change.offsets))
    return {int(offset): change.kind for change in found for offset in change.offsets}


SAME = [
    (pa.int64(), [1, None, -(2**63)], pa.int64(), [1, None, -(2**63)]),
    (pa.int8(), [1, None, -128], pa.int16(), [1, None, -128]),
    (pa.float64(), [0.1, float("nan"), -1e300], pa.float64(), [0.1, float("nan"), -1e300]),
    (pa.decimal128(12, 2), [Decimal("12.50"), None], pa.string(), ["12.5000", None]),
    (pa.string(), ["", "é\n", None], pa.string(), ["", "é\n", None]),
    (pa.binary(), [b"\0\xff", b""], pa.binary(), [b"\0\xff", b""]),
    (pa.timestamp("us", "UTC"), [NOON, None], pa.timestamp("us", "UTC"), [NOON, None]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)], pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    (pa.bool_(), [True, None, False], pa.bool_(), [True, None, False]),
]


@pytest.mark.parametrize(("due_type", "due", "there_type", "there"), SAME)
def test_the_same(due_type: pa.DataType, due: list[Any], there_type: pa.DataType, there: list[Any]) -> None:
    assert changes(batch(due_type, due), batch(there_type, there)) == {}


@pytest.mark.parametrize(
    ("type_", "due", "there_type", "there", "kind"),
    [
        (pa.int64(), 5, pa.int64(), 6, Kind.CORRUPTED),
        (pa.int64(), 5, pa.int64(), None, Kind.COERCED),
        (pa.int64(), None, pa.int64(), 0, Kind.CORRUPTED),
        (pa.int8(), 5, pa.int16(), 300, Kind.CORRUPTED),
        (pa.float64(), 0.1, pa.float32(), 0.1, Kind.COERCED),
        (pa.float64(), 12.75, pa.float64(), 13.0, Kind.COERCED),
        (pa.float64(), 12.75, pa.float64(), 12.0, Kind.COERCED),
        (pa.float64(), 12.75, pa.float64(), 100.0, Kind.CORRUPTED),
        (pa.float64(), 49.0, pa.float64(), 0.0, Kind.CORRUPTED),
        (pa.decimal128(12, 3), Decimal("12.345"), pa.string(), "12.35", Kind.COERCED),
        (pa.decimal128(12, 3), Decimal("12.345"), pa.string(), "12.340", Kind.COERCED),
        (pa.decimal128(12, 3), Decimal("12.345"), pa.string(), "12.346", Kind.CORRUPTED),
        (pa.decimal128(12, 3), Decimal("12.345"), pa.string(), "NaN", Kind.CORRUPTED),
        (pa.string(), "hello", pa.string(), "hell", Kind.COERCED),
        (pa.string(), "hello", pa.string(), "Hello", Kind.CORRUPTED),
        (pa.binary(), b"\1\2", pa.binary(), b"\1", Kind.COERCED),
        (pa.bool_(), True, pa.bool_(), False, Kind.CORRUPTED),
        (pa.timestamp("us", "UTC"), NOON, pa.timestamp("us", "UTC"), NOON.replace(microsecond=0), Kind.COERCED),
        (pa.timestamp("us", "UTC"), NOON, pa.timestamp("us", "UTC"), NOON.replace(hour=11), Kind.CORRUPTED),
        (pa.date32(), date(2026, 1, 1), pa.date32(), date(2026, 1, 2), Kind.CORRUPTED),
    ],
)
def test_different(type_: pa.DataType, due: Any, there_type: pa.DataType, there: Any, kind: Kind) -> None:
    fine = None  # a neighbour that is the same must stay so, however the other is compared
    assert changes(batch(type_, [fine, due]), batch(there_type, [fine, there])) == {1: kind}


def test_a_value_outside_the_type_does_not_touch_its_neighbours() -> None:
    due = batch(pa.decimal128(6, 2), [Decimal("1.50"), Decimal("2.50"), None])
    assert changes(due, batch(pa.string(), ["1.5000", "2.505", None])) == {1: Kind.CORRUPTED}


NESTED = pa.struct(
    [
        ("n", pa.float64()),
        ("d", pa.decimal128(6, 2)),
        ("tags", pa.list_(pa.string())),
        ("by", pa.map_(pa.string(), pa.int64())),
        ("raw", pa.binary()),
        ("at", pa.timestamp("us", "UTC")),
        ("ok", pa.bool_()),
    ]
)
VALUE = {"n": 1e22, "d": Decimal("1.50"), "tags": ["b", None], "by": [("x", 1)], "raw": b"\0", "at": NOON, "ok": True}
TEXT = (
    '{"at": "2026-01-31T12:00:00.123456+00:00", "by": {"x": 1}, "d": 1.50, "n": 10000000000000000000000, '
    '"ok": true, "raw": "AA==", "tags": ["b", null]}'
)


def test_json_is_compared_as_what_it_says() -> None:
    due = batch(NESTED, [VALUE, None])
    assert changes(due, batch(pa.json_(), [TEXT, None]), as_json=True) == {}


@pytest.mark.parametrize(
    ("was", "now"),
    [("1.50", "1.51"), ('"b", null', 'null, "b"'), ("true", "1"), ('{"x": 1}', "[]"), ('"AA=="', "null")],
)
def test_json_that_says_something_else(was: str, now: str) -> None:
    due = batch(NESTED, [VALUE])
    there = batch(pa.json_(), [TEXT.replace(was, now)])
    assert changes(due, there, as_json=True) == {0: Kind.CORRUPTED}


def test_empty_map_and_empty_list() -> None:
    by = pa.map_(pa.string(), pa.int64())
    assert changes(batch(by, [[]]), batch(pa.json_(), ["{}"]), as_json=True) == {}
    assert changes(batch(by, [[]]), batch(pa.json_(), ["[]"]), as_json=True) == {0: Kind.CORRUPTED}
    assert changes(batch(pa.list_(pa.int8()), [[]]), batch(pa.json_(), ["[]"]), as_json=True) == {}


def test_nested_floats_are_compared_as_floats() -> None:
    due = batch(pa.list_(pa.struct([("f", pa.float32()), ("d", pa.float64())])), [[{"f": 0.1, "d": 0.1}]])
    for text in ('[{"f": 0.1, "d": 0.1}]', '[{"f": 0.10000000149011612, "d": 0.1}]'):
        assert changes(due, batch(pa.json_(), [text]), as_json=True) == {}
    for text in ('[{"f": 0.1000001, "d": 0.1}]', '[{"f": 0.1, "d": 0.10000000149011612}]'):
        assert changes(due, batch(pa.json_(), [text]), as_json=True) == {0: Kind.CORRUPTED}


def test_unknown_fields_are_json_text() -> None:
    due = batch(pa.string(), ['{"b": 1.0, "a": [1e2]}'])
    assert changes(due, batch(pa.json_(), ['{"a": [100], "b": 1.0}']), as_json=True) == {}
    assert changes(due, batch(pa.json_(), ['{"a": [100], "b": 2}']), as_json=True) == {0: Kind.CORRUPTED}


def test_only_the_columns_that_differ_are_named() -> None:
    names = ["at", "a", "b"]
    due = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array(["x", "y"]), pa.array([1, 2])], names=names)
    there = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array(["x", "y"]), pa.array([1, 3])], names=names)
    window = Window(due, there, "at", frozenset())
    coerced, corrupted = window.changed(np.array([2]))
    assert (coerced.columns, corrupted.columns, corrupted.offsets.tolist()) == (set(), {"b"}, [2])


def test_several_rows_of_one_offset_are_compared_in_any_order() -> None:
    due = batch(pa.int64(), [1, 2, 3], [7, 7, 7])
    one, other = Window(due, batch(pa.int64(), [3, 1, 2], [7, 7, 7]), "at", frozenset()).rows()
    assert sorted(one.codes) == sorted(other.codes)
    assert Window(due, batch(pa.int64(), [3, 1], [7, 7]), "at", frozenset()).changed(np.array([7]))[1].columns == {"v"}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.none() | st.booleans()), max_size=40))
def test_codes_are_equal_exactly_for_equal_rows(rows: list[tuple[int, str, bool | None]]) -> None:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    types = (pa.int64(), pa.string(), pa.bool_())
    arrays = [pa.array(range(len(rows)), pa.int64())]
    arrays += [pa.array(column, type_) for column, type_ in zip(columns, types, strict=True)]
    due = pa.RecordBatch.from_arrays(arrays, names=["at", "x", "y", "z"])
    there = due.slice(1)
    one, other = Window(due, there, "at", frozenset()).rows()
    codes = [*one.codes.tolist(), *other.codes.tolist()]
    every = [*rows, *rows[1:]]
    assert len(set(zip(codes, every, strict=True))) == len(set(codes)) == len(set(every))
