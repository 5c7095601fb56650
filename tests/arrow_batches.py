"""Record batches of every type that a table of ours has a column for, for property tests: nulls, slices, extremes."""

from __future__ import annotations

import decimal
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
EPOCH_US, EPOCH_DAYS = 946_684_800_000_000, 10_957  # from 1970 to 2000
# What PostgreSQL's types hold: from 4713 BC on, all timestamps that Arrow has, and dates to the year 5874897.
TIMESTAMPS = (EPOCH_US - 211_813_488_000_000_000, 2**63 - 1)
DATES = (EPOCH_DAYS - 2_451_545, EPOCH_DAYS + 2_145_031_948)
YEARS = (-62_135_596_800_000_000, 253_402_300_799_999_999)  # 1 to 9999


def _numbers(low: int, high: int, *extremes: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([low, high, 0, *extremes]), st.integers(low, high))


def _decimals(precision: int, scale: int) -> st.SearchStrategy[decimal.Decimal]:
    most = 10**precision - 1
    whole = _numbers(-most, most, 1, -1, 10 ** (precision - 1), 10**scale if scale < precision else 0)
    exact = decimal.Context(prec=38)
    return whole.map(lambda number: exact.scaleb(decimal.Decimal(number), -scale))


@dataclass(frozen=True)
class Kind:
    """A type of a column, in Arrow and in PostgreSQL."""

    arrow: pa.DataType
    postgres: str
    values: st.SearchStrategy[Any]


def decimal_kind(precision: int, scale: int) -> Kind:
    return Kind(pa.decimal128(precision, scale), f"numeric({precision},{scale})", _decimals(precision, scale))


KINDS = {
    "boolean": Kind(pa.bool_(), "boolean", st.booleans()),
    "byte": Kind(pa.int8(), "smallint", _numbers(-(2**7), 2**7 - 1)),
    "short": Kind(pa.int16(), "smallint", _numbers(-(2**15), 2**15 - 1)),
    "int": Kind(pa.int32(), "integer", _numbers(-(2**31), 2**31 - 1)),
    "long": Kind(pa.int64(), "bigint", _numbers(-(2**63), 2**63 - 1)),
    "float": Kind(pa.float32(), "real", st.floats(width=32)),
    "double": Kind(pa.float64(), "double precision", st.floats()),
    "string": Kind(pa.string(), "text", PLAIN_TEXT),
    "binary": Kind(pa.binary(), "bytea", st.binary(max_size=40)),
    "date": Kind(pa.date32(), "date", _numbers(*DATES, EPOCH_DAYS)),
    "timestamp": Kind(pa.timestamp("us", "UTC"), "timestamptz", _numbers(*TIMESTAMPS, *YEARS, EPOCH_US)),
    "timestamp_ntz": Kind(pa.timestamp("us"), "timestamp", _numbers(*TIMESTAMPS, *YEARS, EPOCH_US)),
    "jsonb": Kind(pa.json_(), "jsonb", st.lists(PLAIN_TEXT | st.booleans() | st.none(), max_size=4).map(json.dumps)),
    "decimal(1,0)": decimal_kind(1, 0),
    "decimal(18,3)": decimal_kind(18, 3),
    "decimal(20,4)": decimal_kind(20, 4),
    "decimal(38,0)": decimal_kind(38, 0),
    "decimal(38,6)": decimal_kind(38, 6),
    "decimal(38,37)": decimal_kind(38, 37),
    "decimal(38,38)": decimal_kind(38, 38),
}


def array(kind: Kind, values: list[Any]) -> pa.Array:
    if pa.types.is_temporal(kind.arrow):  # from whole numbers: Python's own types end at the year 9999
        return pa.array(values, pa.int32() if pa.types.is_date(kind.arrow) else pa.int64()).cast(kind.arrow)
    if kind.arrow == pa.json_():
        return pa.array(values, pa.string()).cast(kind.arrow)
    return pa.array(values, kind.arrow)


@st.composite
def batches(draw: st.DrawFn, *names: str) -> pa.RecordBatch:
    """Rows with a column of each of these kinds, in their order; a part of longer columns, like what a task sends."""
    rows = draw(st.integers(0, 12))
    columns = []
    for name in names:
        kind = KINDS[name]
        column = array(kind, draw(st.lists(st.none() | kind.values, min_size=rows, max_size=rows)))
        if draw(st.booleans()):  # validity, offsets and values that begin elsewhere
            before = draw(st.integers(1, 9))
            column = pa.concat_arrays([array(kind, [None] * before), column]).slice(before)
        columns.append(column)
    batch = pa.RecordBatch.from_arrays(columns, names=[f"c{n}" for n in range(len(names))])
    start = draw(st.integers(0, rows))
    return batch.slice(start, draw(st.integers(0, rows - start)))
