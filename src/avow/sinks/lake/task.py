"""One task's side of a lake sink: rows and dead letters into files that nobody sees yet.

Under append the files are the table's own, once the driver's commit names them. With a key they are staging files for
the driver, which brings them into the table by key (``driver``): such a file has a column that marks deletes.

Owns: what goes into which file. Must not know: the order of acts, any commit. Neighbours: ``files`` (writing),
``driver`` (which is handed what ``task_output`` gives).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from avow.errors import ProtocolViolation
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Fingerprint, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter, RowChanges, StagingSink, Written, refuse_whole
from avow.sinks.lake import dead_letters as dead_letter_rows
from avow.sinks.lake.config import LakeConfig
from avow.sinks.lake.files import DataFile, FileWriter, Location

DELETED = "__avow_deleted"  # marks a tombstone in a note; settings keep the name free

FOLDER_BYTES_MAX = 255  # of one name, on every common file system
DAY_S = 86_400
FIRST_DAY, END_DAY = -719_162, 2_932_897  # since 1970: 0001-01-01, and the day after 9999-12-31


@dataclass(frozen=True, slots=True)
class LakeTaskContext:
    """What the driver passes to every task."""

    # The table's columns that we fill, required ones not nullable; with field ids where the format has some.
    schema: pa.Schema
    data: Location
    dead_letters: Location
    dead_letter_schema: pa.Schema
    staging: Location  # for files that are not the table's own
    partition: pa.Field | None = None  # the column that partitions, as it is derived from the rows
    in_files: bool = True  # whether that column is in the files too


@dataclass(frozen=True, slots=True)
class LakeTaskOutput:
    """What a task has ready for one range."""

    done: OffsetRange
    counts: Counts
    last: Fingerprint | None
    files: tuple[DataFile, ...] = ()
    dead_letters: tuple[DataFile, ...] = ()

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.done.topic, self.done.partition)


class LakeTask(StagingSink):
    def __init__(self, pipeline: PipelineConfig, run: int, task_context: LakeTaskContext) -> None:
        assert isinstance(pipeline.sink, LakeConfig)
        self._pipeline, self._sink, self._run = pipeline, pipeline.sink, run
        self._context = task_context
        self._dead_letters: list[DataFile] = []
        self._keyed = self._sink.mode != "append"
        columns = [field.with_nullable(True) for field in self._context.schema]  # there every column may be null
        self._staging_schema = pa.schema([*columns, pa.field(DELETED, pa.bool_())])
        self._rows: FileWriter | PartitionedWriter = (
            self._writer(self._context.staging, self._staging_schema)
            if self._keyed
            else PartitionedWriter(pipeline, run, self._context, self._sink)
        )
        self._supplied = 0  # rows that were given to writers

    def write(self, rows: RowChanges) -> Written:
        """Put rows into files; with a key, deletes too. Refused are rows that the table's own columns cannot take."""
        batch, refused = self._fitted(rows.rows)
        if self._keyed:
            self._write_staging(batch, deleted=False)
            if rows.deletes.num_rows:
                # Deletes have the key and the lineage; the other columns are null.
                columns = columns_of(self._context.schema, rows.deletes)
                deletes = pa.RecordBatch.from_arrays(columns, names=self._context.schema.names)
                self._write_staging(deletes, deleted=True)
        else:
            self._supplied += batch.num_rows
            self._rows.write(batch)
        return Written(refused=refused)

    def _fitted(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Rows in the table's columns and types, without those that lack a value they must have, or have one that
        the table's files, folders and statistics cannot hold."""
        refused: dict[int, str] = {}
        columns = [rows.column(field.name) for field in self._context.schema]
        for field, column in zip(self._context.schema, columns, strict=True):
            if not field.nullable and column.null_count:
                why = f"column {field.name!r} is null, but NOT NULL in the table"
                refused |= dict.fromkeys(pc.indices_nonzero(column.is_null()).to_pylist(), why)
            far = pc.indices_nonzero(_beyond_years(column)).to_pylist()
            refused |= dict.fromkeys(far, f"column {field.name!r} is outside the years 1 to 9999")
        by = self._sink.partition_by
        if by is not None and not by.day and not self._context.in_files:
            refused |= _folder_problems(by.column, rows.column(by.column))
        if refused:
            refused = refuse_whole(refused, rows.column(self._sink.lineage.offset).to_pylist())
            taken = pa.array([row for row in range(rows.num_rows) if row not in refused], pa.int64())
            columns = [column.take(taken) for column in columns]
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for field, column in zip(self._context.schema, columns, strict=True)
        ]
        # The flags of the schema are for the file. Here they would have to be true of every piece on its way there.
        return pa.RecordBatch.from_arrays(columns, schema=self._context.schema), refused

    def _write_staging(self, batch: pa.RecordBatch, *, deleted: bool) -> None:
        if not batch.num_rows:
            return  # all of them were refused: no key to look for
        self._supplied += batch.num_rows
        marks = pa.repeat(deleted, batch.num_rows)
        self._rows.write(pa.RecordBatch.from_arrays([*batch.columns, marks], schema=self._staging_schema))

    def _writer(self, folder: Location, schema: pa.Schema) -> FileWriter:
        return FileWriter(folder, schema, (self._pipeline.name, self._run), self._sink.file_mb << 20)

    def add_dead_letters(self, dead_letters: list[DeadLetter]) -> None:
        """Dead letters into a file of their own table."""
        if not dead_letters:
            return
        schema = self._context.dead_letter_schema
        writer = self._writer(self._context.dead_letters, schema)
        writer.write(dead_letter_rows.as_rows(dead_letters, self._run, datetime.now(UTC), schema))
        self._dead_letters += writer.close()

    def task_output(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> LakeTaskOutput:
        """End the files, and say what there is for the driver."""
        files = self._rows.close()
        rows = sum(file.rows for file in files)
        if rows != self._supplied:
            raise ProtocolViolation(f"{rows} rows of {done} are in files, but {self._supplied} were supplied")
        return LakeTaskOutput(done, counts, last, tuple(files), tuple(self._dead_letters))


class PartitionedWriter:
    """A writer for each value by which files are put."""

    def __init__(self, pipeline: PipelineConfig, run: int, task_context: LakeTaskContext, sink: LakeConfig) -> None:
        self._name, self._context, self._sink = (pipeline.name, run), task_context, sink
        self._by = task_context.partition
        self._schema = task_context.schema
        if self._by is not None and self._dropped:
            self._schema = self._schema.remove(self._schema.get_field_index(self._by.name))
        self._writers: dict[Any, FileWriter] = {}

    @property
    def _dropped(self) -> bool:
        """Whether the column is left out of the files: the table has it from the commit."""
        return self._by is not None and not self._context.in_files and self._by.name in self._context.schema.names

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._by is None:
            self._writer(None).write(batch)
            return
        values = partition_values(batch, self._sink)
        if self._dropped:
            batch = batch.drop_columns([self._by.name])
        for value, part in parts_by(values, batch):
            self._writer(value).write(part)

    def _writer(self, value: Any) -> FileWriter:
        if value not in self._writers:
            # Where the column is not in the files, some readers take its value from the folder's name, as Hive did.
            folder = "" if self._by is None or self._context.in_files else f"{_folder(self._by.name, value)}/"
            target = self._sink.file_mb << 20
            self._writers[value] = FileWriter(self._context.data, self._schema, self._name, target, value, folder)
        return self._writers[value]

    def close(self) -> list[DataFile]:
        return [file for writer in self._writers.values() for file in writer.close()]


def _folder(column: str, value: Any) -> str:
    text = "__HIVE_DEFAULT_PARTITION__" if value is None else quote(partition_text(value), safe="")
    return f"{quote(column, safe='')}={text}"


def _folder_problems(column: str, texts: pa.Array) -> dict[int, str]:
    """By row, why a value cannot name a folder."""
    if pa.types.is_decimal(texts.type):
        negative = pc.indices_nonzero(pc.less(texts, pa.scalar(Decimal(0), texts.type)).fill_null(False)).to_pylist()
        why = f"column {column!r} partitions the table, where deltalake (1.6.6) cannot read negative decimals"
        return dict.fromkeys(negative, why)
    if not pa.types.is_string(texts.type):
        return {}
    bad = {"": f"column {column!r} is empty, which a partition folder cannot distinguish from null"}
    for text in texts.unique().drop_null().to_pylist():
        if len(_folder(column, text)) > FOLDER_BYTES_MAX:
            bad[text] = f"column {column!r} partitions the table, and its value is too long for a folder name"
    rows = pc.indices_nonzero(pc.is_in(texts, value_set=pa.array(bad, pa.string()))).to_pylist()
    return {row: bad[texts[row].as_py()] for row in rows}


def _beyond_years(column: pa.Array) -> pa.Array:
    """Which days and times are outside the years that Parquet's statistics, Spark and Python can spell."""
    if pa.types.is_date32(column.type):
        ticks, numbers = 1, column.cast(pa.int32()).cast(pa.int64())
    elif pa.types.is_timestamp(column.type) and column.type.unit != "ns":  # of those all are inside
        ticks, numbers = DAY_S * {"s": 1, "ms": 1_000, "us": 1_000_000}[column.type.unit], column.cast(pa.int64())
    else:
        return pa.array([], pa.bool_())
    inside = pc.and_(pc.greater_equal(numbers, FIRST_DAY * ticks), pc.less(numbers, END_DAY * ticks))
    return pc.invert(inside).fill_null(False)


def partition_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def partition_values(rows: pa.RecordBatch, sink: LakeConfig) -> pa.Array:
    """The value by which each row is put."""
    assert sink.partition_by is not None
    column = rows.column(sink.partition_by.column)
    return day_of(column) if sink.partition_by.day else column


def columns_of(schema: pa.Schema, rows: Any) -> list[Any]:
    """The columns of a schema, of a batch or a table; null where that has none."""
    return [
        rows[field.name].cast(field.type) if field.name in rows.schema.names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]


def day_of(times: Any) -> Any:
    """Of an instant the day in UTC, of a wall clock its own."""
    return times.cast(pa.timestamp("us")).cast(pa.date32(), safe=False)


def parts_by(values: Any, rows: Any) -> Iterator[tuple[Any, Any]]:
    """Rows of a batch or a table by the value that each has."""
    for value in pc.unique(values).to_pylist():
        same = values.is_null() if value is None else pc.equal(values, pa.scalar(value, values.type))
        yield value, rows.filter(same)
