"""The Spark engine: each batch is one Spark job, whose tasks bring one range each into the sink.

Theory of operation
-------------------
A run starts from the ledger: it takes a run number, fences older runs and asks ``ledger.plan_start`` about every
partition. From these positions ``planner`` cuts the log into batches, and each batch is one job: one task is one
partition's range, so order and claims are per task. A task reads its range itself (``kafka.reader``): records go from
the broker into Arrow and on to the sink without a step through the JVM, which schedules tasks and runs the query. Spark
keeps nothing from batch to batch: no checkpoint, no streaming query.

Owns: Spark's part in a run. Must not know: how a sink writes. Neighbours: ``driver`` (what every engine does around its
batches), ``planner`` (which ranges are next), ``task`` (what a task does).
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from avow import sinks
from avow.arrow import binaries
from avow.engines import sql
from avow.engines.causes import cause_line
from avow.engines.columns import Columns, sink_columns
from avow.engines.driver import STOPS, Driver, Executed, attempts, not_drained, prepare_table, remark_new_ledger
from avow.engines.isolation import Isolation
from avow.engines.planner import Planner
from avow.engines.progress import Observer
from avow.engines.session import has_ended, is_local, keep_log, meet_executors, warm_up
from avow.engines.task import (
    Preparing,
    Reading,
    Work,
    decoded,
    deliver,
    numbers,
    of_these_topics,
    python_transform,
    set_aside,
)
from avow.errors import AvowError, ProtocolViolation, SourceError
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import reader
from avow.settings import PipelineConfig, Source
from avow.sinks.base import DriverSink

SHORT_BELOW = 1_000_000  # records that a run has to drain
IDLE_S = 0.1  # how soon the log is asked again, where it had nothing new
SILENT = Observer()

REPORT = "topic string, partition int, stop string, message string, advice string, staged binary"
_REPORT = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32())]
    + [(name, pa.string()) for name in ("stop", "message", "advice")]
    + [("staged", pa.binary())]
)


class Run:
    """One execution of a pipeline.

    ``spark`` gives the session, once all that needs none has been checked; it is told whether the run will be short.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        spark: Callable[[bool], SparkSession],
        *,
        once: bool = False,
        observer: Observer = SILENT,
    ) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._once = once
        self._observer = observer
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ask the run to end after the current batch. Safe to call from a signal handler."""
        self._stop.set()

    def execute(self) -> None:
        """Run until drained, stopped, or ended by a named stop. Stopped before it has drained, ``once`` raises
        ``NotDrained``."""
        pipeline = self._pipeline
        # What needs no JVM is asked before one starts: a wrong password or a missing topic is told at once.
        python_transform(pipeline)
        with sinks.driver_sink(pipeline) as store, Log(pipeline.source, pipeline.name) as log:
            store.prepare()
            known = log.partitions()
            remark_new_ledger(store, log, known, pipeline, self._observer)
            # Only a query's records go through the JVM: for the others a long run is a short one.
            short = self._once and (not pipeline.by_sql or _backlog(store, log, known) < SHORT_BELOW)
            spark = self._spark(short)
            if is_local(spark.conf.get("spark.master") or ""):
                warm_up(spark)
            else:
                meet_executors(spark, self._stop, self._observer.event)
            ends = log.stable_ends(known) if self._once else None
            columns = sink_fields(spark, pipeline)
            prepare_table(store, pipeline, columns, self._observer)
        if not self._attempts(spark, columns, ends) and self._once:
            raise not_drained(pipeline)

    def _attempts(self, spark: SparkSession, columns: Columns, ends: Mapping[TopicPartition, int] | None) -> bool:
        def look(error: Exception) -> None:
            if has_ended(spark):
                raise AvowError(
                    f"Spark has ended, and the run with it: {cause_line(error)}",
                    advice="The ledger is whole: start again. If it happens again, Spark's own log "
                    f"({keep_log()}), the master's page or the kernel's log (out of memory: raise [spark] "
                    "driver.memory) say why.",
                ) from error

        # What Kafka does not answer says nothing about a record, nor does a stop by name.
        isolation = Isolation((SourceError, *STOPS.values()), self._observer.event)

        def make() -> _Attempt:
            return _Attempt(self._pipeline, spark, columns, ends, self._stop, self._observer, isolation)

        return attempts(make, self._stop, self._observer, look)


def _backlog(store: DriverSink, log: Log, known: Iterable[TopicPartition]) -> int:
    """About how many records there are to drain. Nothing rests on it but how Java is started."""
    positions = {where: entry.position for where, entry in store.entries().items()}
    earliest = log.declared_start("earliest", known)
    return sum(end - positions.get(where, earliest[where]) for where, end in log.stable_ends(known).items())


def sink_fields(spark: SparkSession, pipeline: PipelineConfig) -> Columns:
    """The payload's columns in the sink, after the transform, and whether unknown fields are kept beside them."""
    return (sql.output_fields(spark, pipeline), False) if pipeline.by_sql else sink_columns(pipeline)


class _Attempt:
    """From the ledger to the first failure. ``ends``: where to stop, if it is to stop by itself."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        spark: SparkSession,
        columns: Columns,
        ends: Mapping[TopicPartition, int] | None,
        stop: threading.Event,
        observer: Observer,
        isolation: Isolation,
    ) -> None:
        self._interval_s = pipeline.interval.total_seconds()
        self._spark = spark
        self._columns = columns
        self._ends = ends
        self._stop = stop
        self._isolation = isolation
        self.driver = Driver(pipeline, observer)
        self._planner = Planner(self.driver, pipeline.batch.max_records, ends)

    def close(self) -> None:
        self.driver.close()

    def execute(self) -> bool:
        self.driver.prepare(self._columns)
        self.driver.begin()
        while not self._stop.is_set():
            next_at = time.monotonic() + self._interval_s
            ranges = self._planner.next_batch()
            if ranges:
                self.driver.deliver(ranges, self._execute, self._isolation, self._stop)
            elif self._ends is not None:
                return True
            self.driver.tell()
            self.driver.keep()
            if self._ends is None:
                # A batch with records is followed by the next at once, if the interval is over.
                self._stop.wait(max(0.0 if ranges else IDLE_S, next_at - time.monotonic()))
        return False

    def _execute(self, work: Work) -> Executed:
        """One job. What became of the ranges is not known: a task that Spark repeats finds its range claimed."""
        done, staged = set(), []
        for report in work_frame(self._spark, work).collect():
            if report.stop is not None:
                raise STOPS[report.stop](report.message, advice=report.advice)
            done.add(TopicPartition(report.topic, report.partition))
            staged += [pickle.loads(report.staged)] if report.staged is not None else []
        if done != work.ranges.keys():
            raise ProtocolViolation(f"tasks reported {sorted(map(str, done))}, of {sorted(map(str, work.ranges))}")
        return staged, None


def work_frame(spark: SparkSession, work: Work) -> DataFrame:
    """The job of one batch: a task for each range, which reads it, delivers it and reports."""
    tasks = task_per_range(spark, len(work.ranges))
    if work.pipeline.by_sql and not work.set_aside:
        rows = sql.decode_frame(tasks, work, begin_task, stops=True)
        return rows.mapInArrow(lambda batches: _write_task(iter(batches), work), REPORT)
    return tasks.mapInArrow(lambda batches: _decode_and_write_task(iter(batches), work), REPORT)


def task_per_range(spark: SparkSession, count: int) -> DataFrame:
    """A frame of one number a task: ``begin_task`` takes the range with this number."""
    return spark.range(0, count, 1, count)


_logs: dict[int, tuple[Source, Log]] = {}  # by process: a fork must not use its parent's


def _log(source: Source, group: str) -> Log:
    """This worker's, kept from task to task as its reader is."""
    known = _logs.get(os.getpid())
    if known is None or known[0] != source:
        if known is not None:
            known[1].close()
        known = _logs[os.getpid()] = (source, Log(source, group))
    return known[1]


def begin_task(batches: Iterator[pa.RecordBatch], work: Work) -> tuple[TopicPartition, Reading]:
    """In a Python worker: the range with this task's number, and how it is read."""
    (number,) = (int(number) for batch in batches for number in numbers(batch.column("id")))
    where = sorted(work.ranges)[number]
    source, name = work.pipeline.source, work.pipeline.name
    read: Reading = reader(source, name).read
    if where.topic in work.topic_ids:
        mine = replace(work, topic_ids={where.topic: work.topic_ids[where.topic]})
        read = of_these_topics(read, mine, _log(source, name))
    return where, read


def _decode_and_write_task(batches: Iterator[pa.RecordBatch], work: Work) -> Iterator[pa.RecordBatch]:
    where, read = begin_task(batches, work)
    pipeline, why = work.pipeline, work.set_aside
    yield _reported(where, work, set_aside(read, pipeline, why) if why else decoded(read, pipeline))


def _write_task(batches: Iterator[pa.RecordBatch], work: Work) -> Iterator[pa.RecordBatch]:
    """In a Python worker behind the query: its rows in, a report out."""
    rows = (batch for batch in batches if batch.num_rows)
    where = sql.task_partition(work)
    yield _reported(where, work, sql.prepared(rows, work, where))
    for _ in rows:
        pass
    sql.take_note(work)  # a replay has not taken it


def _reported(where: TopicPartition, work: Work, prepare: Preparing) -> pa.RecordBatch:
    """Deliver one range. A named stop is told and not raised: Spark would try again what must not be tried again."""
    # From bytes and not from Python values: those would import pandas, half a second for a worker's first task.
    columns = [_text(where.topic), pa.Array.from_buffers(pa.int32(), 1, [None, _bytes(where.partition)])]
    try:
        sink = sinks.task_sink(work.pipeline, work.run, work.brief)
        report = deliver(prepare, work.ranges[where], work, sink)
        told = [pa.nulls(1, pa.string())] * 3
        told.append(pa.nulls(1, pa.binary()) if report.staged is None else binaries(pickle.dumps(report.staged)))
    except tuple(STOPS.values()) as stop:
        told = [_text(type(stop).__name__), _text(str(stop)), _text(stop.advice), pa.nulls(1, pa.binary())]
    return pa.RecordBatch.from_arrays([*columns, *told], schema=_REPORT)


def _text(value: str) -> pa.Array:
    data = value.encode()
    return pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, len(data))), pa.py_buffer(data))


def _bytes(value: int) -> pa.Buffer:
    return pa.py_buffer(struct.pack("<i", value))
