"""The Spark engine: Structured Streaming plans offset ranges, each task brings one range into the sink.

Theory of operation
-------------------
A run starts from the ledger, never from a checkpoint: it takes a run number, fences older runs, asks
``ledger.plan_start`` about every partition, and hands Spark the positions as ``startingOffsets``. Spark's checkpoint is
a temporary folder, thrown away with the attempt. For each micro-batch the planned ranges are read from the checkpoint's
offset log and passed into the tasks; one task is one partition's range, so order and claims are per task. A task reads
its range itself (``kafka.reader``): records go from the broker into Arrow and on to the sink without a step through the
JVM, which has the plan and the query. After each batch the positions are told to the Kafka group, for lag tools.

Owns: Spark's part in a run. Must not know: how a sink writes. Neighbours: ``driver`` (what every engine does around its
batches), ``task`` (what a task does).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from avow import sinks
from avow.arrow import binaries
from avow.engines import failpoints, sql
from avow.engines.causes import cause_line
from avow.engines.columns import Columns, sink_columns
from avow.engines.driver import STOPS, Driver, attempts, not_drained, prepare_table, remark_new_ledger
from avow.engines.isolation import Isolation, Part
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
from avow.ledger import OffsetRange
from avow.settings import PipelineConfig, Source, revealed
from avow.sinks.base import DriverSink

SHORT_BELOW = 1_000_000  # records that a run has to drain
SILENT = Observer()

REPORT = "topic string, partition int, stop string, message string, advice string, staged binary"
_REPORT = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32())]
    + [(name, pa.string()) for name in ("stop", "message", "advice")]
    + [("staged", pa.binary())]
)


class _StopAsked(Exception):
    """Raised into Spark to end the query between two batches."""


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
        self._batch_running = threading.Lock()

    def stop(self) -> None:
        """Ask the run to end after the current batch. Safe to call from a signal handler."""
        self._stop.set()

    def execute(self) -> None:
        """Run until drained, stopped, or ended by a named stop. Stopped before it has drained, ``once`` raises
        ``NotDrained``."""
        os.environ[failpoints.DRIVER] = str(os.getpid())
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
            columns = sink_fields(spark, pipeline)
            prepare_table(store, pipeline, columns, self._observer)
        if not self._attempts(spark, columns) and self._once:
            raise not_drained(pipeline)

    def _attempts(self, spark: SparkSession, columns: Columns) -> bool:
        def look(error: Exception) -> None:
            if has_ended(spark):
                raise AvowError(
                    f"Spark has ended, and the run with it: {cause_line(error)}",
                    advice="The ledger is whole: start again. If it happens again, Spark's own log "
                    f"({keep_log()}), the master's page or the kernel's log (out of memory: raise [spark] "
                    "driver.memory) say why.",
                ) from error

        # What Kafka does not answer says nothing about a record, nor does a stop by name.
        isolation = Isolation((SourceError, *STOPS.values(), _StopAsked), self._observer.event)

        def make() -> _Attempt:
            stop, running, observer = self._stop, self._batch_running, self._observer
            return _Attempt(self._pipeline, spark, columns, stop, running, observer, self._once, isolation)

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
    """From the ledger to the first failure."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        spark: SparkSession,
        columns: Columns,
        stop: threading.Event,
        batch_running: threading.Lock,
        observer: Observer,
        once: bool,
        isolation: Isolation,
    ) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._columns = columns
        self._stop = stop
        self._batch_running = batch_running
        self._once = once
        self._isolation = isolation
        self.driver = Driver(pipeline, observer)
        self._checkpoint = Path(tempfile.mkdtemp(prefix="avow-checkpoint-"))
        self._query: StreamingQuery | None = None
        self._failure: BaseException | None = None

    def close(self) -> None:
        if self._query is not None:
            with suppress(PySparkException, Py4JError, OSError):  # the JVM may be gone
                self._query.stop()
        self.driver.close()
        shutil.rmtree(self._checkpoint, ignore_errors=True)

    def execute(self) -> bool:
        self.driver.prepare(self._columns)
        self.driver.begin()
        self._query = self._start_query()
        try:
            while not self._query.awaitTermination(1):
                # Between two batches nothing is in flight; inside one, the batch ends first.
                if self._batch_running.acquire(blocking=False):
                    try:
                        if self._stop.is_set():
                            return False
                        self.driver.keep()
                    finally:
                        self._batch_running.release()
        except StreamingQueryException:
            # Spark tells of our own exception as text; the exception itself says more.
            if self._failure is None:
                raise
            if not isinstance(self._failure, _StopAsked):
                raise self._failure from None
            return False
        return True

    def _start_query(self) -> StreamingQuery:
        source, batch = self._pipeline.source, self._pipeline.batch
        starting: dict[str, dict[str, int]] = {}
        for where, position in self.driver.positions.items():
            starting.setdefault(where.topic, {})[str(where.partition)] = position
        reader = (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", source.brokers)
            .option("startingOffsets", json.dumps(starting))
            .option("failOnDataLoss", "true")
            .option("maxOffsetsPerTrigger", str(batch.max_records))
        )
        for key, value in revealed(source.kafka).items():
            reader = reader.option(f"kafka.{key}", value)
        reader = reader.option("kafka.isolation.level", "read_committed")
        if source.topics_pattern is not None:
            reader = reader.option("subscribePattern", source.topics_pattern)
        else:
            reader = reader.option("subscribe", ",".join(source.topics))
        interval_ms = max(1, round(self._pipeline.interval.total_seconds() * 1000))
        writer = (
            reader.load()
            .writeStream.foreachBatch(self._on_batch)
            .option("checkpointLocation", self._checkpoint.as_uri())
        )
        when = {"availableNow": True} if self._once else {"processingTime": f"{interval_ms} milliseconds"}
        return writer.trigger(**when).start()

    def _on_batch(self, _: DataFrame, batch: int) -> None:
        with self._batch_running:
            try:
                if self._stop.is_set():
                    raise _StopAsked
                self._deliver_batch(batch)
            except BaseException as error:
                self._failure = error
                raise

    def _deliver_batch(self, batch: int) -> None:
        started = time.monotonic()
        ranges = self._planned(batch)
        if not ranges:
            return
        for part in self._isolation.parts(ranges):
            with self._isolation.trying(part):
                self._deliver_part(batch, part, started)
            started = time.monotonic()

    def _deliver_part(self, batch: int, part: Part, started: float) -> None:
        if self._stop.is_set():
            raise _StopAsked
        work = self.driver.work(batch, part)
        done, staged = set(), []
        for report in work_frame(self._spark, work).collect():
            if report.stop is not None:
                raise STOPS[report.stop](report.message, advice=report.advice)
            done.add(TopicPartition(report.topic, report.partition))
            staged += [bytes(report.staged)] if report.staged is not None else []
        if done != part.ranges.keys():
            raise ProtocolViolation(f"tasks reported {sorted(map(str, done))}, of {sorted(map(str, part.ranges))}")
        self.driver.finish(work, staged, started)

    def _planned(self, batch: int) -> dict[TopicPartition, OffsetRange]:
        """The batch's ranges, from Spark's own offset log: each ends where it says, and starts where the last ended."""
        lines = (self._checkpoint / "offsets" / str(batch)).read_text().splitlines()
        ends = {
            TopicPartition(topic, int(partition)): end
            for topic, partitions in json.loads(lines[-1]).items()
            for partition, end in partitions.items()
        }
        positions = self.driver.positions
        self.driver.adopt_new(ends.keys() - positions.keys())
        return {
            where: OffsetRange(where.topic, where.partition, positions[where], end)
            for where, end in ends.items()
            if end > positions[where]
        }


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
        told.append(pa.nulls(1, pa.binary()) if report.staged is None else binaries(report.staged))
    except tuple(STOPS.values()) as stop:
        told = [_text(type(stop).__name__), _text(str(stop)), _text(stop.advice), pa.nulls(1, pa.binary())]
    return pa.RecordBatch.from_arrays([*columns, *told], schema=_REPORT)


def _text(value: str) -> pa.Array:
    data = value.encode()
    return pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, len(data))), pa.py_buffer(data))


def _bytes(value: int) -> pa.Buffer:
    return pa.py_buffer(struct.pack("<i", value))
