"""The Spark engine: each batch is one Spark job, whose tasks bring its ranges into the sink.

Theory of operation
-------------------
A run starts from the ledger: it takes a run number, fences older runs and asks ``ledger.plan_start`` about every
partition. From these positions ``planner`` cuts the log into batches, and each batch is one job. A partition's range is
in one task, so order and claims are per task; small ranges share one, and where the sink's acts span partitions, they
share these too. A task reads its ranges itself (``kafka.reader``): records go from the broker into Arrow and on to the
sink without a step through the JVM, which schedules tasks and runs the query. Spark keeps nothing from batch to batch:
no checkpoint, no streaming query.

Owns: Spark's part in a run. Must not know: how a sink writes. Neighbours: ``driver`` (what every engine does around its
batches), ``planner`` (which ranges are next), ``task`` (what a task does).
"""

from __future__ import annotations

import pickle
import threading
import time
from array import array
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from avow import errors, native, sinks
from avow.arrow import binaries
from avow.client_cache import ClientCache
from avow.engines import sql
from avow.engines.causes import cause_line, translated
from avow.engines.columns import Columns, sink_columns
from avow.engines.driver import STOPS, EngineRun, Executed, RunDriver, prepare_table, remark_new_ledger
from avow.engines.isolation import Isolation
from avow.engines.planner import Planner, share_out
from avow.engines.progress import SILENT, Observer
from avow.engines.session import collect, has_ended, is_local, keep_log, meet_executors, warm_up
from avow.engines.task import (
    BatchWork,
    RangePreparer,
    RangeReader,
    can_join,
    decoded,
    deliver,
    deliver_joined,
    from_memory,
    numbers,
    of_these_topics,
    python_transform,
    recreated_topics,
    set_aside,
)
from avow.engines.topics import Topics
from avow.errors import AvowError, ColumnsChanged, ProtocolViolation
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import BATCH_BYTES, gatherer, reader
from avow.ledger import OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.base import DriverSink, StagingSink, TaskSink

SHORT_BELOW = 1_000_000  # records that a run has to drain
IDLE_S = 0.1  # how soon the log is asked again, where it had nothing new

REPORTED: dict[str, type[AvowError]] = STOPS | {ColumnsChanged.__name__: ColumnsChanged}

REPORT = "topic string, partition int, stop string, message string, advice string, task_output binary"
_REPORT = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32())]
    + [(name, pa.string()) for name in ("stop", "message", "advice")]
    + [("task_output", pa.binary())]
)


class SparkRun(EngineRun):
    """One execution of a pipeline, in Spark.

    ``spark`` gives the session, once all that needs none has been checked; its argument is whether the run will be
    short.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        spark: Callable[[bool], SparkSession],
        *,
        once: bool = False,
        observer: Observer = SILENT,
    ) -> None:
        super().__init__(pipeline, once=once, observer=observer)
        self._spark = spark

    def execute(self) -> None:
        pipeline = self._pipeline
        # What needs no JVM is asked before one starts: a wrong password or a missing topic is reported at once.
        python_transform(pipeline)
        topics = self._topics
        with sinks.driver_sink(pipeline) as sink, Log(pipeline.source, pipeline.name) as log:
            sink.prepare()
            known = topics.partitions(log)
            remark_new_ledger(sink, log, known, pipeline, self._observer)
            # Only a query's records go through the JVM: for the others a long run is a short one.
            short = self._once and (not pipeline.by_sql or _backlog(sink, log, known) < SHORT_BELOW)
            spark = self._spark(short)
            if is_local(spark.conf.get("spark.master") or ""):
                warm_up(spark)
            else:
                meet_executors(spark, self._stop, self._observer.event)
            ends = log.stable_ends(known) if self._once else None
            topics.columns_of = partial(sink_fields, spark)
            if not topics.by_topic:
                prepare_table(sink, pipeline, topics.columns(""), self._observer)

        def make(isolation: Isolation) -> SparkAttempt:
            return SparkAttempt(topics, spark, ends, self._stop, self._observer, isolation)

        self._attempts(make, partial(_refuse_ended, spark))
        topics.raise_stopped()


def _refuse_ended(spark: SparkSession, error: Exception) -> None:
    """Stop if the failure of an attempt is that Spark itself has ended."""
    if has_ended(spark):
        raise AvowError(
            f"Spark has ended, and the run with it: {cause_line(error)}",
            advice="The ledger is whole: start again. If it happens again, Spark's own log "
            f"({keep_log()}), the master's page or the kernel's log (out of memory: raise [spark] "
            "driver.memory) say why.",
        ) from error


def _backlog(sink: DriverSink, log: Log, known: Iterable[TopicPartition]) -> int:
    """About how many records there are to drain. Nothing rests on it but how Java is started."""
    positions = {tp: entry.position for tp, entry in sink.entries().items()}
    earliest = log.declared_start("earliest", known)
    return sum(end - positions.get(tp, earliest[tp]) for tp, end in log.stable_ends(known).items())


def sink_fields(spark: SparkSession, pipeline: PipelineConfig) -> Columns:
    """The payload's columns in the sink, after the transform, and whether unknown fields are kept beside them."""
    return (sql.output_fields(spark, pipeline), False) if pipeline.by_sql else sink_columns(pipeline)


class SparkAttempt:
    """From the ledger to the first failure. ``ends``: where to stop, if it is to stop by itself."""

    def __init__(
        self,
        topics: Topics,
        spark: SparkSession,
        ends: Mapping[TopicPartition, int] | None,
        stop: threading.Event,
        observer: Observer,
        isolation: Isolation,
    ) -> None:
        pipeline = topics.pipeline
        self._interval_s = pipeline.interval.total_seconds()
        self._topics = topics
        self._spark = spark
        self._ends = ends
        self._stop = stop
        self._isolation = isolation
        self.driver = RunDriver(pipeline, observer, topics)
        self._planner = Planner(self.driver, pipeline.batch.max_records, ends)

    def close(self) -> None:
        self.driver.close()

    def execute(self) -> bool:
        if not self._topics.by_topic:
            self.driver.prepare(self._topics.columns(""))
        self.driver.begin()
        while not self._stop.is_set():
            if self._topics.stopped and not self.driver.positions:
                return True
            next_at = time.monotonic() + self._interval_s
            ranges = self._planner.next_batch()
            if ranges:
                self.driver.deliver(ranges, self._execute, self._isolation, self._stop)
            elif self._ends is not None:
                return True
            self.driver.publish()
            self.driver.keepalive()
            if self._ends is None:
                # A batch with records is followed by the next at once, if the interval is over.
                self._stop.wait(max(0.0 if ranges else IDLE_S, next_at - time.monotonic()))
        return False

    def _execute(self, work: BatchWork) -> Executed:
        """One job. What became of the ranges is not known: a task that Spark repeats finds its range claimed."""
        done, task_outputs = set(), []
        failed: dict[str, Exception] = {}
        for report in collect(work_frame(self._spark, work)):
            if report.stop is not None:
                error: AvowError = getattr(errors, report.stop, AvowError)(report.message, advice=report.advice)
                if not work.topics:
                    raise error
                failed.setdefault(report.topic, error)
            done.add(TopicPartition(report.topic, report.partition))
            if report.task_output is not None:
                task_outputs.append((report.topic, pickle.loads(report.task_output)))
        if done != work.ranges.keys():
            raise ProtocolViolation(f"tasks reported {sorted(map(str, done))}, of {sorted(map(str, work.ranges))}")
        return Executed(task_outputs, None, failed)


def work_frame(spark: SparkSession, work: BatchWork) -> DataFrame:
    """The job of one batch: tasks that read ranges, deliver them and report. Behind a query, a task has one range."""
    if work.pipeline.by_sql and not work.set_aside:
        rows = sql.decode_frame(task_per_range(spark, len(work.ranges)), work, begin_task, stops=True)
        return rows.mapInArrow(lambda batches: _write_task(iter(batches), work), REPORT)
    tasks = spark.range(0, (count := len(share_out(work.ranges.values()))), 1, count)
    return tasks.mapInArrow(lambda batches: _decode_and_write_task(iter(batches), work), REPORT)


def task_per_range(spark: SparkSession, count: int) -> DataFrame:
    """A frame of one number a task: ``begin_task`` takes the range with this number."""
    return spark.range(0, count, 1, count)


_logs = ClientCache(Log.close, keep=1)


def begin_task(batches: Iterator[pa.RecordBatch], work: BatchWork) -> tuple[TopicPartition, RangeReader]:
    """In a Python worker: the range with this task's number, and how it is read."""
    native.allow(work.pipeline.native)
    tp = sorted(work.ranges)[_task_number(batches)]
    return tp, _range_reader(tp, work)


def _task_number(batches: Iterator[pa.RecordBatch]) -> int:
    (number,) = (int(number) for batch in batches for number in numbers(batch.column("id")))
    return number


def _range_reader(tp: TopicPartition, work: BatchWork) -> RangeReader:
    read: RangeReader = reader(work.pipeline.source, work.pipeline.name).read
    return of_these_topics(read, *_topics_of(work, [tp])) if tp.topic in work.topic_ids else read


def _topics_of(work: BatchWork, partitions: Iterable[TopicPartition]) -> tuple[BatchWork, Log]:
    """For ``check_topics``: these partitions' topics alone, and who is asked."""
    source, name = work.pipeline.source, work.pipeline.name
    ids = {tp.topic: work.topic_ids[tp.topic] for tp in partitions}
    return replace(work, topic_ids=ids), _logs.get((source, name), lambda: Log(source, name))


def _decode_and_write_task(batches: Iterator[pa.RecordBatch], work: BatchWork) -> Iterator[pa.RecordBatch]:
    native.allow(work.pipeline.native)
    ranges = {
        TopicPartition(range_.topic, range_.partition): range_
        for range_ in share_out(work.ranges.values())[_task_number(batches)]
    }
    if len(ranges) > 1:
        gathered = yield from _deliver_gathered(ranges, work)
        ranges = {tp: range_ for tp, range_ in ranges.items() if tp not in gathered}
    for tp in ranges:
        own = work.for_topic(tp.topic)
        read, pipeline, why = _range_reader(tp, work), own.pipeline, work.set_aside
        yield _reported(tp, own, set_aside(read, pipeline, why) if why else decoded(read, pipeline))


def _deliver_gathered(
    ranges: Mapping[TopicPartition, OffsetRange], work: BatchWork
) -> Generator[pa.RecordBatch, None, Collection[TopicPartition]]:
    """Small ranges, read at the same time and kept in memory. Gives those that were small enough for that."""
    pipeline = work.pipeline
    gathered = gatherer(pipeline.source, pipeline.name).gather(ranges, BATCH_BYTES)
    stopped = set()
    for topic, stop in (recreated_topics(*_topics_of(work, ranges)) if work.topic_ids else {}).items():
        stopped |= {tp for tp in ranges if tp.topic == topic or not work.topics}
        yield _report([tp for tp in stopped if tp.topic == topic or not work.topics], stop=stop)
        if not work.topics:
            return ranges.keys()
    for group in together({tp: records for tp, records in gathered.items() if tp not in stopped}, work):
        own = work.for_topic(next(iter(group)).topic)
        if can_join(pipeline) and len(group) > 1:
            yield _joined(group, own)
        else:
            for tp, records in group.items():
                yield _reported(tp, own, decoded(from_memory(records), own.pipeline, ahead=False))
    return gathered.keys() | stopped


def together(
    gathered: Mapping[TopicPartition, pa.RecordBatch | None], work: BatchWork
) -> list[dict[TopicPartition, pa.RecordBatch | None]]:
    """What can go into the same acts: all, or what is of one topic where each has a table of its own."""
    groups: dict[str, dict[TopicPartition, pa.RecordBatch | None]] = {}
    for tp, records in gathered.items():
        groups.setdefault(tp.topic if work.topics else "", {})[tp] = records
    return list(groups.values())


def _write_task(batches: Iterator[pa.RecordBatch], work: BatchWork) -> Iterator[pa.RecordBatch]:
    """In a Python worker behind the query: its rows in, a report out."""
    native.allow(work.pipeline.native)
    rows = (batch for batch in batches if batch.num_rows)
    tp = sql.task_partition(work)
    yield _reported(tp, work.for_topic(tp.topic), sql.prepared(rows, work, tp))
    for _ in rows:
        pass
    sql.take_note(work)  # a replay has not taken it


def _reported(tp: TopicPartition, work: BatchWork, prepare: RangePreparer) -> pa.RecordBatch:
    """Deliver one range."""

    def act(sink: TaskSink | StagingSink) -> object:
        return deliver(prepare, work.ranges[tp], work, sink).task_output

    return _reports([tp], work, act)


def _joined(gathered: Mapping[TopicPartition, pa.RecordBatch | None], work: BatchWork) -> pa.RecordBatch:
    """Deliver ranges in the same acts."""

    def act(sink: TaskSink | StagingSink) -> None:
        assert not isinstance(sink, StagingSink)
        deliver_joined({work.ranges[tp]: records for tp, records in gathered.items()}, work, sink)

    return _reports(list(gathered), work, act)


def _reports(
    partitions: Sequence[TopicPartition], work: BatchWork, act: Callable[[TaskSink | StagingSink], object]
) -> pa.RecordBatch:
    """A line for each partition after the act. A named stop is reported and not raised, and so is what ends the attempt
    anyway: Spark would try again what must not be tried again. And so is any failure where each topic has a table of
    its own, or it would end the work on the others."""
    try:
        return _report(partitions, act(sinks.task_sink(work.pipeline, work.run, work.task_context)))
    except tuple(REPORTED.values()) as stop:
        return _report(partitions, stop=stop)
    except Exception as error:
        if work.pipeline.topic is None:
            raise
        return _report(partitions, stop=translated(error))


def _report(
    partitions: Sequence[TopicPartition], task_output: object = None, stop: AvowError | None = None
) -> pa.RecordBatch:
    # From bytes and not from Python values: those would import pandas, half a second for a worker's first task.
    count = len(partitions)
    places = array("i", [tp.partition for tp in partitions])
    columns = [
        _texts(tp.topic for tp in partitions),
        pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(places)]),
    ]
    if stop is None:
        columns += [pa.nulls(count, pa.string())] * 3
    else:
        columns += [_texts([text] * count) for text in (type(stop).__name__, str(stop), stop.advice)]
    columns.append(pa.nulls(count, pa.binary()) if task_output is None else binaries(pickle.dumps(task_output)))
    return pa.RecordBatch.from_arrays(columns, schema=_REPORT)


def _texts(values: Iterable[str]) -> pa.Array:
    return binaries(*(value.encode() for value in values)).cast(pa.string())
