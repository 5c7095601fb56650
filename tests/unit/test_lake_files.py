"""Parquet files of lakes: what their columns are encoded with."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from avow.sinks.lake.files import FileWriter, Location


def test_texts_and_short_numbers_have_a_dictionary_also_in_nested_columns(tmp_path: Path) -> None:
    pairs = pa.struct([("a.b", pa.string()), ("c", pa.float64())])
    rows = pa.table(
        {
            "text": pa.array(["x", None, "x"]),
            "number": pa.array([1, 1, 1], pa.int64()),
            "short": pa.array([1, 1, 1], pa.int16()),
            "texts": pa.array([["y", "y"], [], None], pa.list_(pa.string())),
            "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
            "pair": pa.array([{"a.b": "z", "c": 1.0}] * 3, pairs),
        }
    )
    writer = FileWriter(Location(tmp_path.as_uri()), rows.schema, ("p", 1), target=1 << 20)
    writer.write(rows.to_batches()[0])
    (file,) = writer.close()
    group = pq.read_metadata(tmp_path / file.name).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    assert {column.path_in_schema for column in columns if column.has_dictionary_page} == {
        "text",
        "short",
        "texts.list.element",
        "map.key_value.key",
        "pair.a.b",
    }
    assert all(column.is_stats_set for column in columns)
    assert pq.read_table(tmp_path / file.name).equals(rows)
