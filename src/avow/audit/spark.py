"""Spark's part of an audit: reading topics, comparing partitions in tasks, bringing keys together.

A task reads and compares some partitions, one after another; behind a query, one. It reads with the run's own client:
Spark's Kafka source cannot read every record that a producer can send (a timestamp beyond 2^63 microseconds fails its
task), and an audit must. A task returns the result of each partition, pickled, and with a key the keys that it saw;
those stay on the executors' disks until the results are known.

Owns: frames and what runs in tasks. Must not know: how anything is judged. Neighbours: ``partition`` (what a task
does), ``keys`` (the rules for keys), ``engines`` (whose decoding is used as it is).
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from avow import native, sinks
from avow.audit import keys
from avow.audit.compare import NONE, Compared
from avow.audit.content import Expected
from avow.audit.keys import SHARED_SHOWN, KeyAnomaly, SharedKeys
from avow.audit.partition import ComparisonJob, compare_partition, offsets_of_phantoms
from avow.engines import sql
from avow.engines.session import is_connect
from avow.engines.spark import begin_task, task_per_range
from avow.engines.task import Prepared, decoded, numbers
from avow.findings import Finding, Offsets
from avow.kafka.log import TopicPartition
from avow.kafka.reader import reader
from avow.ledger import OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.auditing import AuditReader

# A task costs as much as a small partition, and a connection to the sink. With a few to a core, partitions of unlike
# size still share the cores.
TASKS_A_CORE = 4

_RESULT = pa.field("result", pa.binary())


class SparkComparison(AbstractContextManager["SparkComparison"]):
    """One comparison over all partitions that have records to compare."""

    def __init__(self, session: Callable[[], SparkSession], job: ComparisonJob) -> None:
        self._session = session
        self._job = job
        self._frame = self._compared() if job.work.ranges else None

    def __exit__(self, *_: object) -> None:
        if self._frame is not None:
            self._frame.unpersist()

    def _compared(self) -> DataFrame:
        job, session, count = self._job, self._session(), len(self._job.work.ranges)
        schema = from_arrow_schema(_schema(job))
        if job.work.pipeline.by_sql:
            rows = sql.decode_frame(task_per_range(session, count), job.work, begin_task)
            compared = rows.mapInArrow(lambda batches: _behind_query(iter(batches), job), schema)
        else:
            # Over Spark Connect the number of cores is unknown; Spark makes a task for each partition.
            cores = None if is_connect(session) else session.sparkContext.defaultParallelism
            numbered = session.range(0, count, 1, cores and min(count, cores * TASKS_A_CORE))
            compared = numbered.mapInArrow(lambda batches: _on_records(iter(batches), job), schema)
        return compared.persist(StorageLevel.DISK_ONLY) if job.key_types else compared

    def results(self) -> dict[TopicPartition, Compared]:
        """What each task came to. No item for a partition in which no record is visible."""
        if self._frame is None:
            return {}
        results: list[Compared] = _collected(self._frame.where("result IS NOT NULL").select("result"))
        return {TopicPartition(compared.topic, compared.partition): compared for compared in results}

    def judge_keys(self, extra: list[pa.RecordBatch]) -> tuple[list[Finding], SharedKeys]:
        """What is wrong by key, over what the tasks saw and ``extra``, which was seen elsewhere."""
        job, pipeline = self._job, self._job.work.pipeline
        frames = [] if self._frame is None else [self._frame.where("result IS NULL").drop("result")]
        if extra:
            seen_here = pa.Table.from_batches(extra)
            frames.append(self._session().createDataFrame(seen_here, from_arrow_schema(job.key_schema)))
        frame = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
        histories = frame.groupBy(*job.key_names, "part").agg(
            f.min("offset").alias("first"),
            f.max(f.struct("offset", "deletes")).alias("latest"),
            f.max(f.when(f.col("there"), f.col("offset"))).alias("held"),
            f.sum(f.col("there").cast("long")).alias("rows"),
        )
        each = f.struct("part", "first", "latest.offset", "latest.deletes", "held", "rows")
        by_key = histories.groupBy(*job.key_names).agg(f.collect_list(each).alias("histories"))
        judged: list[tuple[tuple[KeyAnomaly, ...], SharedKeys]]
        judged = _collected(by_key.mapInArrow(lambda batches: _judged(batches, pipeline), "result binary"))
        anomalies = (anomaly for of_batch, _ in judged for anomaly in of_batch)
        texts = [text for _, shared in judged for text in shared.shown]
        count = sum(shared.count for _, shared in judged)
        return keys.findings(anomalies, job.partitions), SharedKeys(count, tuple(texts[:SHARED_SHOWN]))

    def expected(self) -> Expected:
        """By content, all that is due."""
        if self._frame is None:
            return Expected(NONE, NONE, NONE)
        seen = self._frame.where("result IS NULL").select("k0", "part", "offset").toArrow()
        return Expected(*(column.to_numpy() for column in seen.columns))

    def uncommitted(
        self, ranges: Mapping[TopicPartition, OffsetRange], phantoms: Iterable[Finding]
    ) -> dict[TopicPartition, Offsets]:
        """Of the phantoms' offsets, those at which there is a record, committed or not."""
        # Only these go into the tasks.
        pipeline, planned = self._job.work.pipeline, sorted(ranges.items())
        spans = {TopicPartition(finding.topic, finding.partition): finding.spans for finding in phantoms}

        def record_offsets(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number in _ids(batches):
                tp, range_ = planned[number]
                yield _pickled((tp, np.concatenate([NONE, *offsets_of_phantoms(pipeline, range_, spans[tp])])))

        tasks = task_per_range(self._session(), len(planned))
        records: dict[TopicPartition, Offsets] = dict.fromkeys(spans, NONE)
        return records | dict(_collected(tasks.mapInArrow(record_offsets, "result binary")))


def _pickled(result: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"result": pa.array([pickle.dumps(result)], pa.binary())})


def _collected(frame: DataFrame) -> list[Any]:
    return [pickle.loads(line.result) for line in frame.collect()]


def _schema(job: ComparisonJob) -> pa.Schema:
    """Of what a task gives: rows with a key, or one row with a result."""
    return pa.schema([*(job.key_schema if job.key_types else ()), _RESULT])


def _on_records(batches: Iterator[pa.RecordBatch], job: ComparisonJob) -> Iterator[pa.RecordBatch]:
    """In a task: the numbers of some ranges in, keys and a result for each out."""
    pipeline, places = job.work.pipeline, sorted(job.work.ranges)
    native.allow(pipeline.native)
    with sinks.audit_reader(pipeline, job.snapshot) as reading:
        for number in _ids(batches):
            tp = places[number]
            read = decoded(reader(pipeline.source, pipeline.name).read, pipeline, hopeless=0)
            yield from _to_batches(job, tp, read(job.work.ranges[tp]), reading)


def _ids(batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
    """The numbers of the ranges that a task is given."""
    return (int(number) for batch in batches for number in numbers(batch.column("id")))


def _behind_query(batches: Iterator[pa.RecordBatch], job: ComparisonJob) -> Iterator[pa.RecordBatch]:
    """In a task behind a SQL query: its rows in, keys and a result out."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is not None:
        lineage = job.work.pipeline.sink.lineage
        topic, partition = (first.column(name)[0].as_py() for name in (lineage.topic, lineage.partition))
        tp, note = TopicPartition(topic, partition), None
    else:
        note = sql.take_note(job.work)
        if note is None:
            return
        tp = note.tp
    rows = itertools.chain([first] if first is not None else [], filled)
    with sinks.audit_reader(job.work.pipeline, job.snapshot) as reading:
        yield from _to_batches(job, tp, sql.prepared(rows, job.work, tp, note)(job.work.ranges[tp]), reading)


def _to_batches(
    job: ComparisonJob, tp: TopicPartition, prepared: Iterable[Prepared], reading: AuditReader
) -> Iterator[pa.RecordBatch]:
    schema = _schema(job)
    for result in compare_partition(job, tp, prepared, reading):
        if isinstance(result, Compared):
            nothing = [pa.nulls(1, field.type) for field in schema][:-1]
            columns = [*nothing, pa.array([pickle.dumps(result)], pa.binary())]
        else:
            columns = [*result.columns, pa.nulls(result.num_rows, pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _judged(batches: Iterable[pa.RecordBatch], pipeline: PipelineConfig) -> Iterator[pa.RecordBatch]:
    """In a task: one row a key with its histories in, what is wrong and which keys are shared out, pickled."""
    for batch in batches:
        lists = batch.column("histories")
        part, first, last, deletes, held, rows = lists.flatten().flatten()
        judged = keys.judge(
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
        shown = batch.drop_columns(["histories"]).take(pa.array(judged.shared[:SHARED_SHOWN])).to_pylist()
        shared = SharedKeys(len(judged.shared), keys.as_texts(shown))
        yield _pickled((judged.anomalies, shared))
