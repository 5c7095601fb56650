"""Transforms by SQL on Spark: decode, then the query, then write, in one narrow pass.

The query runs between two Python functions of the same Spark task. Dead letters, tombstones and the count of records
cannot pass through somebody's WHERE, so the first function leaves them in a *note*: a file in the executor's own
folder, named after the task attempt, complete when the last row has gone through, read and removed by the second.

Owns: the narrow check, the note, and what columns a transform gives. Must not know: the ledger or any sink's SQL.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from avow import schema
from avow.engines.columns import CARRIED
from avow.engines.columns import output_fields as transformed_fields
from avow.engines.task import (
    HOPELESS,
    BatchWork,
    DeadLetterCounts,
    Prepared,
    RangePreparer,
    RangeReader,
    check_lineage,
    decoded,
    numbers,
)
from avow.errors import ConfigError, TooManyDeadLetters, first_line
from avow.kafka.batches import headers_from_text, headers_to_text
from avow.kafka.log import TopicPartition
from avow.ledger import Fingerprint, OffsetRange
from avow.settings import REST_COLUMN, PipelineConfig
from avow.sinks.base import DeadLetter, RowChanges

# What a narrow query is made of. Anything else moves records between partitions, or looks at more than one at a time.
NARROW = frozenset(
    {"Project", "Filter", "Generate", "SubqueryAlias", "View", "Range", "LogicalRDD", "MapInArrow"}
    | {"WithCTE", "CTERelationDef", "CTERelationRef"}
)


# A line of a plan below its root, which is ours: how deep it is, and its name. Other lines go on with a text constant.
_NODE = re.compile(r"^((?:[: ]  )*)[+:]- (\w*)", re.MULTILINE)

# Which partition a task's input stands for, and how its records are read. None: the task has nothing to do.
Begin = Callable[[Iterator[pa.RecordBatch], BatchWork], tuple[TopicPartition, RangeReader]]


@dataclass(slots=True)
class Note:
    """What the decoding half of a task passes to the writing half, beside the rows."""

    tp: TopicPartition
    offsets: list[np.ndarray] = field(default_factory=list)  # of every visible record
    dead_letters: list[DeadLetter] = field(default_factory=list)
    deletes: list[pa.RecordBatch] = field(default_factory=list)
    last: Fingerprint | None = None
    stop: TooManyDeadLetters | None = None  # more than the run takes: what is here ends before the range does


def output_fields(spark: SparkSession, pipeline: PipelineConfig) -> tuple[schema.Field, ...]:
    """The columns the query gives, lineage left out. Refuses a wide one, and one that loses lineage."""
    nothing = spark.range(1).mapInArrow(lambda _: iter(()), decoded_ddl(pipeline))
    frame = _query(spark, nothing, pipeline)
    (explained,) = _sql(spark, nothing, pipeline, "EXPLAIN EXTENDED ").collect()
    refuse_wide(explained[0])
    return transformed_fields(((f.name, f.dataType.simpleString(), f.nullable) for f in frame.schema.fields), pipeline)


def decoded_ddl(pipeline: PipelineConfig) -> str:
    """The columns that the query sees as ``records``, in Spark's spelling."""
    rest = [f"`{REST_COLUMN}` string"] if pipeline.decode.keeps_unknown_fields else []
    topic, partition, offset, timestamp = (f"`{name}`" for name in pipeline.sink.lineage)
    lineage = [f"{topic} string", f"{partition} int", f"{offset} long", f"{timestamp} timestamp"]
    carried = [f"`{column}` {CARRIED[part].spelling}" for part, column in pipeline.carried.items()]
    return ", ".join([str(pipeline.decode.columns), *rest, *lineage, *carried])


def _query(spark: SparkSession, records: DataFrame, pipeline: PipelineConfig) -> DataFrame:
    try:
        frame = _sql(spark, records, pipeline)
        _ = frame.schema  # Spark Connect would look at the query no sooner than the job starts
        return frame
    except PySparkException as error:
        said = first_line(error).rstrip("; ")
        said = re.sub(r"\bline (\d+)", lambda at: f"line {int(at[1]) - 1}", said)  # as the user's lines are counted
        raise ConfigError(f"transform.sql: {said}", advice="The query reads FROM records.") from None


def _sql(spark: SparkSession, records: DataFrame, pipeline: PipelineConfig, command: str = "") -> DataFrame:
    """The user's query with ``records`` as a name in it. Not as a view: the session may have one of this name, two runs
    may share the session, and Spark Connect looks for it again with each job."""
    assert pipeline.transform is not None
    assert pipeline.transform.sql is not None
    query = pipeline.transform.sql.rstrip("; \t\r\n").replace("{", "{{").replace("}", "}}")
    text = f"{command}WITH records AS (SELECT * FROM {{records}}) SELECT * FROM (\n{query}\n)"
    return spark.sql(text, records=records)


def _headers(rows: pa.RecordBatch, pipeline: PipelineConfig, change: Callable[[pa.Array], pa.Array]) -> pa.RecordBatch:
    """Rows with their records' headers, if they have them, in another form."""
    name = pipeline.carried.get("headers")
    if name is None:
        return rows
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, name, change(rows.column(at)))


def apply(spark: SparkSession, rows: pa.RecordBatch, pipeline: PipelineConfig) -> tuple[pa.RecordBatch, set[int]]:
    """The query over a few rows at hand, in the driver, in the order of their offsets; and the offsets of those on
    which it fails. These are found by halves."""
    try:
        return _result(spark, rows, pipeline), set()
    except PySparkException:
        if rows.num_rows < 2:
            return _result(spark, rows.slice(0, 0), pipeline), set(
                rows.column(pipeline.sink.lineage.offset).to_pylist()
            )
    middle = rows.num_rows // 2
    (first, failed), (second, too) = (
        apply(spark, part, pipeline) for part in (rows.slice(0, middle), rows.slice(middle))
    )
    return pa.concat_batches([first, second]), failed | too


def _result(spark: SparkSession, rows: pa.RecordBatch, pipeline: PipelineConfig) -> pa.RecordBatch:
    rows = _headers(rows, pipeline, headers_to_text)
    records = spark.createDataFrame(pa.Table.from_batches([rows]), decoded_ddl(pipeline))
    out = _query(spark, records, pipeline).toArrow().combine_chunks().sort_by(pipeline.sink.lineage.offset)
    found = out.to_batches()[0] if out.num_rows else pa.RecordBatch.from_pylist([], schema=out.schema)
    return _headers(found, pipeline, headers_from_text)


def refuse_wide(explained: str) -> None:
    """By what EXPLAIN EXTENDED says: the one plan that a classic session and Spark Connect both give."""
    headings = [f"== {name} ==\n" for name in ("Analyzed Logical Plan", "Optimized Logical Plan", "Physical Plan")]
    if not all(heading in explained for heading in headings):
        raise ConfigError(
            "transform.sql: Spark does not show its whole plan",
            advice="Leave spark.sql.maxPlanStringLength as it is: the plan says whether the query is narrow.",
        )
    # From the first to the last: a heading in a text constant of the query must not hide anything.
    analyzed = explained[explained.index(headings[0]) : explained.rindex(headings[1])]
    optimized = explained[explained.rindex(headings[1]) : explained.rindex(headings[2])]
    nodes = [(len(at[1]) // 3, at[2]) for at in _NODE.finditer(analyzed)]
    wide = sorted({name for _, name in nodes if name not in NARROW})
    # What is in an expression is shown before a node's children, and one step deeper than they are.
    if any(depth > before + 1 for (before, _), (depth, _) in pairwise(nodes)):
        wide.append("Subquery")
    if not wide and "MapInArrow" not in optimized:
        # Spark would then not read a record, and bad ones could not become dead letters.
        raise ConfigError("transform.sql: it leaves every record out", advice="Check its WHERE.")
    if wide:
        raise ConfigError(
            f"transform.sql: {', '.join(wide)} needs more than one record at a time",
            advice="A transform is narrow: SELECT, WHERE, expressions, explode. Grouping, joining, sorting and "
            "limiting belong behind the sink, where every record has arrived.",
        )


def decode_frame(frame: DataFrame, work: BatchWork, begin: Begin, *, stops: bool = False) -> DataFrame:
    """The query's result over a batch's records, each task leaving its note. ``stops``: as soon as too many of them are
    bad, which nobody else can say before all of them are at hand."""

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        where, read = begin(iter(batches), work)
        note, dead, read_so_far = Note(where), DeadLetterCounts(), 0
        share = work.pipeline.dead_letters.max_share if stops else 1.0
        for part in decoded(read, work.pipeline, hopeless=HOPELESS if stops else 0)(work.ranges[where]):
            note.offsets.append(part.offsets)
            read_so_far += len(part.offsets)
            dead.add(part.dead_letters)
            try:
                dead.check(work.ranges[where], read_so_far, share, ended=False)
            except TooManyDeadLetters as stop:
                note.stop = stop
                break
            note.dead_letters += part.dead_letters
            note.deletes.append(part.rows.deletes)
            note.last = part.last
            yield _headers(part.rows.rows, work.pipeline, headers_to_text)
        _note_path(work).write_bytes(pickle.dumps(note))

    records = frame.mapInArrow(decode, decoded_ddl(work.pipeline))
    return _query(frame.sparkSession, records, work.pipeline)


def _note_path(work: BatchWork) -> Path:
    context = TaskContext.get()
    assert context is not None
    # Spark's folder of this executor and this application: nobody else writes there (what is read back is a pickle), no
    # other pipeline of the same name can meet this one, and Spark removes it, also after an executor was killed.
    folder = os.environ["SPARK_LOCAL_DIRS"].split(",")[0]
    return Path(folder, f"avow-{work.batch}-{context.taskAttemptId()}.note")


def take_note(work: BatchWork) -> Note | None:
    """The note of this task attempt, once all rows have gone through. None: this task had no range."""
    path = _note_path(work)
    try:
        note = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    path.unlink()
    assert isinstance(note, Note)
    return note


def task_partition(work: BatchWork) -> TopicPartition:
    """Whose range this task has. Not from its rows: a query can say there what it likes."""
    context = TaskContext.get()
    assert context is not None
    return sorted(work.ranges)[context.partitionId()]


def prepared(
    rows: Iterator[pa.RecordBatch], work: BatchWork, where: TopicPartition, note: Note | None = None
) -> RangePreparer:
    """The query's rows, then what the note says of the records behind them. A note taken already is given."""
    offset = work.pipeline.sink.lineage.offset

    def checked(batch: pa.RecordBatch) -> pa.RecordBatch:
        check_lineage(batch, work.pipeline, where)
        return batch

    def prepare(todo: OffsetRange) -> Iterator[Prepared]:
        seen = [np.empty(0, np.int64)]
        columns: pa.Schema | None = None
        left = (batch.filter(pc.greater_equal(batch.column(offset), todo.start)) for batch in map(checked, rows))
        for batch in whole_records(left, offset):
            batch = _headers(batch, work.pipeline, headers_from_text)
            columns = batch.schema
            seen.append(numbers(batch.column(offset)))
            yield Prepared(RowChanges(batch, batch.slice(0, 0)), np.empty(0, np.int64))
        note_taken = note or take_note(work)
        assert note_taken is not None
        assert note_taken.tp == where
        if note_taken.stop is not None:
            raise note_taken.stop
        if note_taken.offsets:
            yield _rest_of_range(note_taken, todo, columns, np.concatenate(seen), offset)

    return prepare


def whole_records(batches: Iterable[pa.RecordBatch], offset: str) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that end between two records: one of which the query makes many rows is counted, and
    taken or refused, as one."""
    held: list[pa.RecordBatch] = []  # ends with rows of a record that may go on
    for batch in batches:
        if not batch.num_rows:
            continue
        cut = 0
        if held:
            last = held[-1].column(offset)[-1].as_py()
            cut = int(np.searchsorted(numbers(batch.column(offset)), last, "right"))
            held += [batch.slice(0, cut)] if cut else []
        if cut < batch.num_rows:
            if held:
                yield _joined(held)
            held = [batch.slice(cut)]
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _rest_of_range(note: Note, todo: OffsetRange, columns: pa.Schema | None, seen: np.ndarray, offset: str) -> Prepared:
    """The records behind the rows: how many there were, which are dead, and which keys are to be deleted."""
    offsets = np.concatenate(note.offsets)
    if not np.isin(seen, offsets).all():
        raise ConfigError(f"transform.sql: {offset} was changed", advice="Pass the lineage columns through.")
    deletes = pa.Table.from_batches(note.deletes).combine_chunks()
    batch = deletes.to_batches()[0] if deletes.num_rows else note.deletes[0]
    batch = batch.filter(pc.greater_equal(batch.column(offset), todo.start))
    return Prepared(
        RowChanges(pa.RecordBatch.from_pylist([], schema=columns or batch.schema), batch),
        offsets[offsets >= todo.start],
        [letter for letter in note.dead_letters if letter.offset >= todo.start],
        last=note.last,
    )
