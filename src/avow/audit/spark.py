"""Spark's part of an audit: reading topics, comparing a partition a task, bringing keys together.

Topics are read by Spark's own source, another client than the run's (``kafka.reader``): what one of them got wrong the
other would not. One task compares one partition, since Spark makes one of each (no ``minPartitions``). What a task
gives is its result, pickled, and with a key the keys that it saw; those wait on the executors' disks until the results
are known.

Owns: frames and what runs in tasks. Must not know: how anything is judged. Neighbours: ``partition`` (what a task
does), ``keys`` (the rules for keys), ``engines`` (whose decoding is used as it is).
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from avow.audit import keys
from avow.audit.compare import NONE, Compared
from avow.audit.content import Due
from avow.audit.findings import Finding, Kind, Offsets, Spans
from avow.audit.partition import Job, compare_partition
from avow.engines import sql
from avow.engines.task import Prepared, Reading, Work, decoded
from avow.kafka.headers import CHECKSUM
from avow.kafka.log import TopicPartition
from avow.kafka.reader import headers_from_text
from avow.ledger import OffsetRange
from avow.settings import Pipeline, revealed

TIME = pa.timestamp("us", "UTC")
SHARED_SHOWN = 5


def _record(headers: str) -> tuple[str, ...]:
    """A record with these of its headers. They go as JSON text: over a nested column Spark 4.1 recounts its whole batch
    for every row it adds."""
    text = f"to_json(transform({headers}, h -> struct(h.key AS k, base64(h.value) AS v)))"
    spelled = f"CASE WHEN size({headers}) > 0 THEN {text} END AS headers"
    return ("topic", "partition", "offset", "timestamp", "key", "value", spelled)


_WITH_HEADERS = _record("headers")
# Unless the sink wants them, they are part of no row; but one of them says what the value must be.
_WITH_CHECKSUM = _record(f"filter(headers, h -> h.key = '{CHECKSUM}')")
_RESULT = pa.field("result", pa.binary())
_WRONG = pa.schema([("kind", pa.string()), ("part", pa.int32()), ("offset", pa.int64()), ("shown", pa.string())])
_SHARED = "shared"  # in place of a kind: ``offset`` is then how many keys


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys in more than one partition."""

    count: int = 0
    shown: tuple[str, ...] = ()  # a few of them, as JSON


def records(session: SparkSession, pipeline: Pipeline, ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrameReader:
    """Exactly these ranges. The isolation level is still to be said."""
    wanted: defaultdict[str, dict[str, OffsetRange]] = defaultdict(dict)
    for where, planned in ranges.items():
        wanted[where.topic][str(where.partition)] = planned

    def as_json(value: Callable[[OffsetRange], int]) -> str:
        return json.dumps(
            {topic: {p: value(planned) for p, planned in parts.items()} for topic, parts in wanted.items()}
        )

    assigned = {topic: [int(partition) for partition in parts] for topic, parts in wanted.items()}
    reader = session.read.format("kafka")
    for key, value in revealed(pipeline.source.kafka).items():
        reader = reader.option(f"kafka.{key}", value)
    return (
        reader.option("kafka.bootstrap.servers", pipeline.source.brokers)
        .option("assign", json.dumps(assigned))
        .option("startingOffsets", as_json(lambda planned: planned.start))
        .option("endingOffsets", as_json(lambda planned: planned.until))
        .option("failOnDataLoss", "true")
    )


class Comparing(AbstractContextManager["Comparing"]):
    """One comparison over all partitions that have records to compare."""

    def __init__(self, session: Callable[[], SparkSession], job: Job) -> None:
        self._session = session
        self._job = job
        self._frame = self._compared() if job.work.ranges else None

    def __exit__(self, *_: object) -> None:
        if self._frame is not None:
            self._frame.unpersist()

    def _compared(self) -> DataFrame:
        job = self._job
        reader = records(self._session(), job.work.pipeline, job.work.ranges).option("includeHeaders", "true")
        frame = reader.option("kafka.isolation.level", "read_committed").load()
        frame = frame.selectExpr(*(_WITH_HEADERS if "headers" in job.work.pipeline.carried else _WITH_CHECKSUM))
        schema = from_arrow_schema(_schema(job))
        if job.work.pipeline.by_sql:
            rows = sql.decode_frame(frame, job.work, _begin)
            compared = rows.mapInArrow(lambda batches: _behind_query(iter(batches), job), schema)
        else:
            compared = frame.mapInArrow(lambda batches: _on_records(iter(batches), job), schema)
        return compared.persist(StorageLevel.DISK_ONLY) if job.key_types else compared

    def results(self) -> dict[TopicPartition, Compared]:
        """What each task came to. No item for a partition in which no record is visible."""
        if self._frame is None:
            return {}
        lines = self._frame.where("result IS NOT NULL").select("result").collect()
        found: list[Compared] = [pickle.loads(line.result) for line in lines]
        return {TopicPartition(one.topic, one.partition): one for one in found}

    def judge_keys(self, more: list[pa.RecordBatch]) -> tuple[list[Finding], SharedKeys]:
        """What is wrong by key, over what the tasks saw and ``more``, which was seen elsewhere."""
        seen = self._job.key_schema
        frames = [] if self._frame is None else [self._frame.where("result IS NULL").drop("result")]
        if more:
            frames.append(self._session().createDataFrame(pa.Table.from_batches(more), from_arrow_schema(seen)))
        frame = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
        names = [name for name in seen.names if name.startswith("k")]
        histories = frame.groupBy(*names, "part").agg(
            f.min("offset").alias("first"),
            f.max(f.struct("offset", "deletes")).alias("latest"),
            f.max(f.when(f.col("there"), f.col("offset"))).alias("held"),
            f.sum(f.col("there").cast("long")).alias("rows"),
        )
        each = f.struct("part", "first", "latest.offset", "latest.deletes", "held", "rows")
        by_key = histories.groupBy(*names).agg(f.collect_list(each).alias("histories"))
        pipeline = self._job.work.pipeline
        wrong = by_key.mapInArrow(lambda batches: _judged(batches, pipeline), from_arrow_schema(_WRONG)).toArrow()
        return self._named(wrong), _shared(wrong)

    def due(self) -> Due:
        """By content, all that is due."""
        if self._frame is None:
            return Due(NONE, NONE, NONE)
        seen = self._frame.where("result IS NULL").select("k0", "part", "offset").toArrow()
        return Due(*(column.to_numpy() for column in seen.columns))

    def _named(self, wrong: pa.Table) -> list[Finding]:
        where = {scope.number: one for one, scope in self._job.scopes.items()}
        found = []
        wrong = wrong.filter(pc.not_equal(wrong["kind"], _SHARED)).sort_by(
            [("part", "ascending"), ("offset", "ascending")]
        )
        for kind, part in sorted(set(zip(wrong["kind"].to_pylist(), wrong["part"].to_pylist(), strict=True))):
            mine = wrong.filter(pc.and_(pc.equal(wrong["kind"], kind), pc.equal(wrong["part"], part)))
            spans = Spans()
            spans.add(np.unique(mine["offset"].to_numpy()))
            one = where[part]
            found.append(Finding(Kind(kind), one.topic, one.partition, spans.joined(), spans.count, detail=_DETAIL))
        return found


_DETAIL = "by key: the row under it is not the one that should be there, or is absent"


def _schema(job: Job) -> pa.Schema:
    """Of what a task gives: rows with a key, or one row with a result."""
    return pa.schema([*(job.key_schema if job.key_types else ()), _RESULT])


def _on_records(batches: Iterator[pa.RecordBatch], job: Job) -> Iterator[pa.RecordBatch]:
    """In a task: records in, keys and a result out."""
    if (begun := _begin(batches, job.work)) is not None:
        where, read = begun
        yield from _given(job, where, decoded(read, job.work.pipeline)(job.work.ranges[where]))


def _begin(batches: Iterator[pa.RecordBatch], _: Work) -> tuple[TopicPartition, Reading] | None:
    """The partition that a task has got the records of, and these."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return None
    where = TopicPartition(first.column("topic")[0].as_py(), first.column("partition")[0].as_py())
    return where, lambda _: map(_with_headers, itertools.chain([first], filled))


def _with_headers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """As a run's own reader gives it."""
    at = batch.schema.get_field_index("headers")
    return batch.set_column(at, "headers", headers_from_text(batch.column(at)))


def _behind_query(batches: Iterator[pa.RecordBatch], job: Job) -> Iterator[pa.RecordBatch]:
    """In a task behind a SQL query: its rows in, keys and a result out."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is not None:
        topic, partition = (first.column(name)[0].as_py() for name in job.work.pipeline.sink.lineage[:2])
        where, note = TopicPartition(topic, partition), None
    else:
        note = sql.take_note(job.work)
        if note is None:
            return
        where = note.where
    rows = itertools.chain([first] if first is not None else [], filled)
    yield from _given(job, where, sql.prepared(rows, job.work, note)(job.work.ranges[where]))


def _given(job: Job, where: TopicPartition, prepared: Iterable[Prepared]) -> Iterator[pa.RecordBatch]:
    schema = _schema(job)
    for given in compare_partition(job, where, prepared):
        if isinstance(given, Compared):
            nothing = [pa.nulls(1, field.type) for field in schema][:-1]
            columns = [*nothing, pa.array([pickle.dumps(given)], pa.binary())]
        else:
            columns = [*given.columns, pa.nulls(given.num_rows, pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _judged(batches: Iterable[pa.RecordBatch], pipeline: Pipeline) -> Iterator[pa.RecordBatch]:
    """In a task: one row a key with its histories in, what is wrong out."""
    for batch in batches:
        lists = batch.column("histories")
        part, first, last, deletes, held, rows = lists.flatten().flatten()
        found = keys.judge(
            keys.Histories(
                pc.list_parent_indices(lists).to_numpy(),
                part.to_numpy(),
                first.to_numpy(),
                last.to_numpy(),
                deletes.to_numpy(zero_copy_only=False),
                held.fill_null(keys.ABSENT).to_numpy(),
                rows.to_numpy(),
            ),
            pipeline.sink.mode,
            pipeline.guarantee,
        )
        for wrong in found.wrong:
            yield _wrong(wrong.kind, wrong.partition, wrong.offset)
        if len(found.shared):
            shown = batch.drop_columns(["histories"]).take(pa.array(found.shared[:SHARED_SHOWN])).to_pylist()
            texts = [json.dumps([*key.values()], default=str) for key in shown]
            yield _wrong(_SHARED, np.array([0]), np.array([len(found.shared)]), "\n".join(texts))


def _wrong(kind: str, parts: Offsets, offsets: Offsets, shown: str | None = None) -> pa.RecordBatch:
    count = len(offsets)
    columns = [pa.repeat(str(kind), count), pa.array(parts, pa.int32()), pa.array(offsets, pa.int64())]
    return pa.RecordBatch.from_arrays([*columns, pa.array([shown] * count, pa.string())], schema=_WRONG)


def _shared(wrong: pa.Table) -> SharedKeys:
    lines = wrong.filter(pc.equal(wrong["kind"], _SHARED))
    texts = [text for shown in lines["shown"].to_pylist() for text in shown.split("\n")]
    return SharedKeys(pc.sum(lines["offset"]).as_py() or 0, tuple(texts[:SHARED_SHOWN]))


def uncommitted(
    session: SparkSession,
    pipeline: Pipeline,
    ranges: Mapping[TopicPartition, OffsetRange],
    phantoms: Iterable[Finding],
) -> dict[tuple[str, int], Offsets]:
    """Of the phantoms' offsets, those at which there is a record, committed or not."""
    spans = {(finding.topic, finding.partition): finding.spans for finding in phantoms}

    def wanted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not batch.num_rows:
                continue
            mine = spans[batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()]
            offsets = batch.column("offset").to_numpy()
            starts, untils = np.array([s.start for s in mine]), np.array([s.until for s in mine])
            at = np.searchsorted(starts, offsets, "right") - 1
            yield batch.filter(pa.array((at >= 0) & (offsets < untils[at])))

    reader = records(session, pipeline, ranges).option("kafka.isolation.level", "read_uncommitted")
    frame = reader.load().select("topic", "partition", "offset")
    found = frame.mapInArrow(wanted, frame.schema).toArrow().sort_by("offset")
    there: dict[tuple[str, int], Offsets] = dict.fromkeys(spans, NONE)
    for topic, partition in spans:
        mine = found.filter(pc.and_(pc.equal(found["topic"], topic), pc.equal(found["partition"], partition)))
        there[topic, partition] = mine["offset"].to_numpy()
    return there
