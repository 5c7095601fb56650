"""What the task output of a batch adds to the table of rows: whole files, rows to merge by key, or files of new keys.

Under append these are the tasks' own files. With a key, tasks have written staging files, which are read here and
compared with the table, in the version on which the commit is then made.

Owns: that comparison. Must not know: positions, the order of acts, how a commit is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from avow.ledger import OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.lake.config import LakeConfig
from avow.sinks.lake.files import DataFile, Location
from avow.sinks.lake.table import LakeTable, numbered_keys
from avow.sinks.lake.task import DELETED, LakeTaskContext, LakeTaskOutput, PartitionedWriter, partition_values

_NUMBER = "__avow_number"  # of a row, beside its key while keys are joined or grouped


@dataclass(frozen=True, slots=True)
class NewRows:
    files: Sequence[DataFile] = ()
    merged: pa.Table | None = None  # rows to be brought in by key
    skipped: Mapping[OffsetRange, int] = field(default_factory=dict)  # by dedupe: records whose keys are known


def new_rows(
    outputs: Sequence[LakeTaskOutput], table: LakeTable, pipeline: PipelineConfig, context: LakeTaskContext, run: int
) -> NewRows:
    sink = pipeline.sink
    assert isinstance(sink, LakeConfig)
    if sink.mode == "append":
        return NewRows([file for output in outputs for file in output.files])
    # Deletes stand behind the rows of their batch there; the order that counts is that of the offsets.
    staged = {
        output.done: read_files(context.staging, output.files).sort_by(sink.lineage.offset)
        for output in outputs
        if output.files
    }
    if not staged:
        return NewRows()
    rows = pa.concat_tables(staged.values())
    if sink.mode == "upsert":
        return NewRows(merged=_with_partition(_one_per_key(rows, sink, "max"), table, context, sink))
    fresh = _unknown_keys(_one_per_key(rows, sink, "min").drop_columns([DELETED]), table, sink)
    writer = PartitionedWriter(pipeline, run, context, sink)
    for batch in fresh.to_batches():
        writer.write(pa.RecordBatch.from_arrays(batch.columns, schema=context.schema))
    return NewRows(writer.close(), skipped=_skipped(staged, fresh, sink))


def _unknown_keys(rows: pa.Table, table: LakeTable, sink: LakeConfig) -> pa.Table:
    """The rows whose keys the table does not have. This version cannot change before the commit does."""
    keys = list(sink.key)
    known = table.keys(keys, rows)
    if not known.num_rows:
        return rows
    # Joined by numbers: a join keeps no order, and takes no nested columns along.
    unknown = numbered_keys(rows, keys, _NUMBER).join(known, keys, join_type="left anti")[_NUMBER]
    return rows.take(unknown.combine_chunks().sort())


def _skipped(staged: Mapping[OffsetRange, pa.Table], fresh: pa.Table, sink: LakeConfig) -> dict[OffsetRange, int]:
    """How many records of each range have no row among those that are ``fresh``."""
    topic, partition, offset, _ = sink.lineage
    taken = fresh.select([topic, partition, offset]).group_by([topic, partition, offset]).aggregate([])
    skipped = {}
    for done, rows in staged.items():
        of_range = pc.and_(pc.equal(taken[topic], done.topic), pc.equal(taken[partition], done.partition))
        skipped[done] = pc.count_distinct(rows[offset]).as_py() - taken.filter(of_range).num_rows
    return skipped


def _with_partition(rows: pa.Table, table: LakeTable, context: LakeTaskContext, sink: LakeConfig) -> pa.Table:
    """With the column that is derived for partitioning, where the table has it as one of its own."""
    partition = context.partition
    if partition is None or table.partition_in_files or partition.name in rows.schema.names:
        return rows
    values = [partition_values(batch, sink) for batch in rows.to_batches()]
    return rows.append_column(partition, pa.chunked_array(values, partition.type))


def _one_per_key(rows: pa.Table, sink: LakeConfig, which: Literal["min", "max"]) -> pa.Table:
    """The first or the last row of each key. Rows of one partition stand in their order; partitions have none."""
    keys = numbered_keys(rows, sink.key, _NUMBER)
    by_key = keys.group_by(list(sink.key), use_threads=False).aggregate([(_NUMBER, which)])
    return rows.take(by_key[f"{_NUMBER}_{which}"].combine_chunks().sort())


def read_files(folder: Location, files: Sequence[DataFile]) -> pa.Table:
    filesystem = folder.filesystem
    return pa.concat_tables(pq.read_table(f"{folder.root}/{file.name}", filesystem=filesystem) for file in files)
