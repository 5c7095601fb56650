"""The rows of a query, in batches that end between two records."""

from __future__ import annotations

import pyarrow as pa
import pytest

from avow.engines.sql import whole_records


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([[]], []),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[1, 2], [], [2, 3]], [[1, 2, 2], [3]]),
        ([[1], [1], [1, 2], [2], [3, 3]], [[1, 1, 1], [2, 2], [3, 3]]),
        ([[1, 1], [1, 1]], [[1, 1, 1, 1]]),
    ],
)
def test_no_record_is_in_two_batches(given: list[list[int]], expected: list[list[int]]) -> None:
    batches = [pa.RecordBatch.from_pydict({"at": pa.array(offsets, pa.int64())}) for offsets in given]
    assert [batch.column("at").to_pylist() for batch in whole_records(batches, "at")] == expected
