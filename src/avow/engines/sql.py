"""Transforms by SQL on Spark: decode, then the query, then write, in one narrow pass.

The query runs between two Python functions of the same Spark task. Dead letters, tombstones and the count of records
cannot pass through somebody's WHERE, so the first function leaves them in a *note*: a file in the executor's own
folder, named after the task attempt, complete when the last row has gone through, read and removed by the second.

Owns: the narrow check, the note, and what columns a transform gives. Must not know: the ledger or any sink's SQL.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from avow import schema
from avow.decode import decoder
from avow.engines.task import Prepared, Preparing, Reading, Work, decoded, numbers, python_transform
from avow.errors import ConfigError
from avow.kafka.log import TopicPartition
from avow.kafka.reader import HEADERS, headers_from_text, headers_to_text
from avow.ledger import Fingerprint, OffsetRange
from avow.settings import REST_COLUMN, Pipeline
from avow.sinks.base import DeadLetter, Rows

# What a narrow query is made of. Anything else moves records between partitions, or looks at more than one at a time.
NARROW = frozenset(
    {"Project", "Filter", "Generate", "SubqueryAlias", "View", "Range", "LogicalRDD", "MapInArrow"}
    | {"WithCTE", "CTERelationDef", "CTERelationRef"}
)


# Which partition a task's input stands for, and how its records are read. None: the task has nothing to do.
Begin = Callable[[Iterator[pa.RecordBatch], Work], tuple[TopicPartition, Reading] | None]


@dataclass(slots=True)
class Note:
    """What the decoding half of a task tells the writing half, beside the rows."""

    where: TopicPartition
    offsets: list[np.ndarray] = field(default_factory=list)  # of every visible record
    letters: list[DeadLetter] = field(default_factory=list)
    deletes: list[pa.RecordBatch] = field(default_factory=list)
    last: Fingerprint | None = None


def output_fields(spark: SparkSession, pipeline: Pipeline) -> tuple[schema.Field, ...]:
    """The columns a transform gives, lineage left out. Refuses a wide one, and one that loses lineage."""
    lineage = (*pipeline.sink.lineage, *pipeline.carried.values())
    if (change := python_transform(pipeline)) is not None:
        empty = pa.RecordBatch.from_pylist([], schema=_decoded_schema(pipeline))
        out = change(empty)
        if not isinstance(out, pa.RecordBatch):
            raise ConfigError(
                f"transform.python: it gave a {type(out).__name__} for an empty batch",
                advice="Take a pyarrow.RecordBatch and give one, also when it has no rows.",
            )
        found = [(f.name, _spelling(f.type), f.nullable) for f in out.schema]
    else:
        nothing = spark.range(1).mapInArrow(lambda _: iter(()), decoded_ddl(pipeline))
        frame = _query(spark, nothing, pipeline)
        refuse_wide(frame)
        found = [(f.name, f.dataType.simpleString(), f.nullable) for f in frame.schema.fields]
    missing = [name for name in lineage if name not in {name for name, _, _ in found}]
    if missing:
        raise ConfigError(
            f"transform: the result has lost {', '.join(missing)}",
            advice="Every row keeps its record's identity: SELECT * keeps these columns, or name them.",
        )
    quoted = ", ".join(
        f"`{name.replace('`', '``')}` {type_}{'' if nullable else ' not null'}"
        for name, type_, nullable in found
        if name not in lineage
    )
    try:
        return schema.parse(quoted).fields
    except ConfigError as error:
        raise ConfigError(f"transform: the result cannot be kept: {error}", advice=error.advice) from error


def decoded_ddl(pipeline: Pipeline) -> str:
    """The columns that the query sees as ``records``, in Spark's spelling."""
    rest = [f"`{REST_COLUMN}` string"] if _keeps_rest(pipeline) else []
    topic, partition, offset, timestamp = (f"`{name}`" for name in pipeline.sink.lineage)
    lineage = [f"{topic} string", f"{partition} int", f"{offset} long", f"{timestamp} timestamp"]
    carried = [f"`{column}` {_CARRIED[part].spelling}" for part, column in pipeline.carried.items()]
    return ", ".join([str(pipeline.decode.columns), *rest, *lineage, *carried])


def _keeps_rest(pipeline: Pipeline) -> bool:
    return pipeline.decode.format == "json" and pipeline.decode.unknown_fields == "keep"


def _decoded_schema(pipeline: Pipeline) -> pa.Schema:
    types = (pa.string(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC"))
    payload = decoder(pipeline, refuse_nul=True).schema
    carried = [pa.field(column, _CARRIED[part].type) for part, column in pipeline.carried.items()]
    return pa.schema([*payload, *map(pa.field, pipeline.sink.lineage, types), *carried])


class _Carried(NamedTuple):
    spelling: str  # Spark's: headers go through its JVM as text
    type: pa.DataType


# What of a record can travel beside its row.
_CARRIED = {
    "key": _Carried("binary", pa.binary()),
    "value": _Carried("binary", pa.binary()),
    "headers": _Carried("string", HEADERS),
    "tombstone": _Carried("boolean", pa.bool_()),
}


_SPELLINGS = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp_ntz",
    pa.timestamp("us", "UTC"): "timestamp",
}


def _spelling(type_: pa.DataType) -> str:
    """An Arrow type in our schema's spelling."""
    if pa.types.is_decimal(type_):
        return f"decimal({type_.precision},{type_.scale})"
    if pa.types.is_list(type_):
        return f"array<{_spelling(type_.value_type)}>"
    if pa.types.is_map(type_):
        return f"map<string,{_spelling(type_.item_type)}>"
    if pa.types.is_struct(type_):
        return "struct<" + ", ".join(f"`{f.name}`: {_spelling(f.type)}" for f in type_.fields) + ">"
    if type_ not in _SPELLINGS:
        raise ConfigError(
            f"transform.python: a column of type {type_} cannot be kept",
            advice=f"Cast it to one of {', '.join(map(str, _SPELLINGS))}, a decimal, list, map or struct.",
        )
    return _SPELLINGS[type_]


def _query(spark: SparkSession, records: DataFrame, pipeline: Pipeline) -> DataFrame:
    assert pipeline.transform is not None
    assert pipeline.transform.sql is not None
    records.createOrReplaceTempView("records")
    try:
        return spark.sql(pipeline.transform.sql)
    except PySparkException as error:
        text = str(error).split("\n\nJVM stacktrace")[0].strip()
        raise ConfigError(f"transform.sql: {text}", advice="The query reads FROM records.") from None


def _headers(rows: pa.RecordBatch, pipeline: Pipeline, change: Callable[[pa.Array], pa.Array]) -> pa.RecordBatch:
    """Rows with their records' headers, if they have them, in another form."""
    name = pipeline.carried.get("headers")
    if name is None:
        return rows
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, name, change(rows.column(at)))


def apply(spark: SparkSession, rows: pa.RecordBatch, pipeline: Pipeline) -> pa.RecordBatch:
    """The query over a few rows at hand, in the driver, in the order of their offsets."""
    rows = _headers(rows, pipeline, headers_to_text)
    records = spark.createDataFrame(pa.Table.from_batches([rows]), decoded_ddl(pipeline))
    out = _query(spark, records, pipeline).toArrow().combine_chunks().sort_by(pipeline.sink.lineage[2])
    found = out.to_batches()[0] if out.num_rows else pa.RecordBatch.from_pylist([], schema=out.schema)
    return _headers(found, pipeline, headers_from_text)


def refuse_wide(frame: DataFrame) -> None:
    plan = frame._jdf.queryExecution().analyzed()
    wide = sorted({name for name in _nodes(plan) if name not in NARROW})
    if plan.subqueriesAll().length():
        wide.append("Subquery")
    if not wide and "MapInArrow" not in _nodes(frame._jdf.queryExecution().optimizedPlan()):
        # Spark would then not read a record, and bad ones could not become dead letters.
        raise ConfigError("transform.sql: it leaves every record out", advice="Check its WHERE.")
    if wide:
        raise ConfigError(
            f"transform.sql: {', '.join(wide)} needs more than one record at a time",
            advice="A transform is narrow: SELECT, WHERE, expressions, explode. Grouping, joining, sorting and "
            "limiting belong behind the sink, where every record has arrived.",
        )


def _nodes(plan: Any) -> Iterator[str]:
    yield plan.nodeName()
    children = plan.children()
    for index in range(children.length()):
        yield from _nodes(children.apply(index))


def decode_frame(frame: DataFrame, work: Work, begin: Begin) -> DataFrame:
    """The query's result over a batch's records, each task leaving its note."""

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begun = begin(iter(batches), work)
        if begun is None:
            return
        where, read = begun
        note = Note(where)
        for part in decoded(read, work.pipeline)(work.ranges[where]):
            note.offsets.append(part.offsets)
            note.letters += part.letters
            note.deletes.append(part.rows.deletes)
            note.last = part.last
            yield _headers(part.rows.rows, work.pipeline, headers_to_text)
        _note_path(work).write_bytes(pickle.dumps(note))

    records = frame.mapInArrow(decode, decoded_ddl(work.pipeline))
    return _query(frame.sparkSession, records, work.pipeline)


def _note_path(work: Work) -> Path:
    context = TaskContext.get()
    assert context is not None
    # Spark's folder of this executor and this application: nobody else writes there (what is read back is a pickle), no
    # other pipeline of the same name can meet this one, and Spark removes it, also after an executor was killed.
    folder = os.environ["SPARK_LOCAL_DIRS"].split(",")[0]
    return Path(folder, f"avow-{work.batch}-{context.taskAttemptId()}.note")


def take_note(work: Work) -> Note | None:
    """The note of this task attempt, once all rows have gone through. None: this task had no range."""
    path = _note_path(work)
    try:
        note = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    path.unlink()
    assert isinstance(note, Note)
    return note


def prepared(rows: Iterator[pa.RecordBatch], work: Work, note: Note | None) -> Preparing:
    """The query's rows, then what the note says of the records behind them. A note taken already is given."""
    offset = work.pipeline.sink.lineage[2]

    def prepare(todo: OffsetRange) -> Iterator[Prepared]:
        seen = [np.empty(0, np.int64)]
        columns: pa.Schema | None = None
        for batch in rows:
            batch = batch.filter(pc.greater_equal(batch.column(offset), todo.start))
            batch = _headers(batch, work.pipeline, headers_from_text)
            columns = batch.schema
            seen.append(numbers(batch.column(offset)))
            yield Prepared(Rows(batch, batch.slice(0, 0)), np.empty(0, np.int64))
        told = note or take_note(work)
        assert told is not None
        if told.offsets:
            yield _told(told, todo, columns, np.concatenate(seen), offset)

    return prepare


def _told(note: Note, todo: OffsetRange, columns: pa.Schema | None, seen: np.ndarray, offset: str) -> Prepared:
    """The records behind the rows: how many there were, which are dead, and which keys are to be deleted."""
    offsets = np.concatenate(note.offsets)
    if not np.isin(seen, offsets).all():
        raise ConfigError(f"transform.sql: {offset} was changed", advice="Pass the lineage columns through.")
    deletes = pa.Table.from_batches(note.deletes).combine_chunks()
    batch = deletes.to_batches()[0] if deletes.num_rows else note.deletes[0]
    batch = batch.filter(pc.greater_equal(batch.column(offset), todo.start))
    return Prepared(
        Rows(pa.RecordBatch.from_pylist([], schema=columns or batch.schema), batch),
        offsets[offsets >= todo.start],
        [letter for letter in note.letters if letter.offset >= todo.start],
        last=note.last,
    )
