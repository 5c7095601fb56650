"""Which rows of a lake are meant, in each spelling; and dead letters as rows and back."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyiceberg.expressions import parser

from avow.kafka.log import TopicPartition
from avow.sinks.base import DEAD_LETTER_COLUMNS, DeadLetter, dead_letter_of, dead_letter_values
from avow.sinks.lake import dead_letters
from avow.sinks.lake.table import RowFilter

TP = TopicPartition("pay.ments", 1)
ROWS = pa.table(
    {
        "topic": ["pay.ments"] * 6 + ["other"],
        "partition": pa.array([1, 1, 1, 1, 1, 0, 1], pa.int32()),
        "offset": [0, 1, 2, 3, 4, 2, 2],
        "redrive": pa.array([None, 7, None, 8, 7, 7, 7], pa.int64()),
    }
)


@pytest.mark.parametrize(
    ("row_filter", "offsets", "predicate"),
    [
        (RowFilter(TP), [0, 1, 2, 3, 4], ""),
        (RowFilter(TP, start=2), [2, 3, 4], ' AND "offset" >= 2'),
        (RowFilter(TP, start=0, until=2), [0, 1], ' AND "offset" >= 0 AND "offset" < 2'),
        (RowFilter(TP, offsets=(1, 3, 9)), [1, 3], ' AND "offset" IN (1, 3, 9)'),
        (RowFilter(TP, redrive=7), [1, 4], ' AND "redrive" = 7'),
    ],
)
def test_a_row_filter_means_the_same_in_every_spelling(
    row_filter: RowFilter, offsets: list[int], predicate: str
) -> None:
    assert ROWS.filter(row_filter.expression())["offset"].to_pylist() == offsets
    assert row_filter.predicate() == f'"topic" = \'pay.ments\' AND "partition" = 1{predicate}'
    parser.parse(row_filter.predicate())


def test_a_row_filter_by_the_lineage_columns() -> None:
    named = ROWS.rename_columns(["_t", 'a"b', "_o", "redrive"])
    row_filter = RowFilter(TP, ("_t", 'a"b', "_o"), offsets=(3,))
    assert named.filter(row_filter.expression())["_o"].to_pylist() == [3]
    assert row_filter.predicate() == '"_t" = \'pay.ments\' AND "a""b" = 1 AND "_o" IN (3)'


def test_dead_letters_as_rows_and_back() -> None:
    headers: list[tuple[str, bytes | None]] = [("a", b"\xff"), ("a", None), ("é", b"")]
    whole = DeadLetter("t", 3, 2**40, -1, None, b"\0\xff", headers, "not-json", "at 1: '\\'")
    empty = DeadLetter("t", 0, 0, 1, b"k", None, [], "empty", "")
    for dead_letter in (whole, empty):
        values = dead_letter_values(dead_letter)
        assert tuple(values) == DEAD_LETTER_COLUMNS
        assert dead_letter_of(list(values.values())) == dead_letter
    rows = dead_letters.as_rows([whole, empty], 5, datetime(2026, 1, 1, tzinfo=UTC), dead_letters.SCHEMA)
    assert dead_letters.from_rows(pa.Table.from_batches([rows])) == [whole, empty]
    assert rows.select(["run", "redrive"]).to_pylist() == [{"run": 5, "redrive": None}] * 2
