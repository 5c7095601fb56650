"""The consumer engine: the same pipeline without Spark and without a JVM, for small loads and low latency.

Theory of operation
-------------------
The process is a member of a consumer group, which shares out the partitions among all that run the pipeline so. The
group is not the pipeline's own (``NAME``), which is told the positions for lag tools, and which for some sinks is the
ledger: it is ``NAME.members``, and nothing is ever committed to it. When partitions become ours, a run's number is
taken and older runs are fenced in them, the ledger says where to begin, and the client reads on from there. When they
are taken away, what was read of them and not delivered is forgotten: whoever has them next begins at the ledger.

Records are taken as they come. What is at hand is a batch: few records when little is sent, many when much is, so that
a record waits no longer than the batch before it. Each partition's part goes through ``task.deliver``, which is what
Spark's tasks run. Its range begins at our position and ends behind the last record; at the end of a partition the
client says where that is, so that markers and aborted records are claimed as well.

Everything happens in one thread, also the client's calls to say that partitions come and go: a batch is never cut.

Owns: membership, and what makes a batch. Must not know: how a sink writes. Neighbours: ``driver``, ``task``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import confluent_kafka as client
import pyarrow as pa
from confluent_kafka import KafkaError

from avow import sinks
from avow.engines import failpoints
from avow.engines.columns import Columns, sink_columns
from avow.engines.driver import Driver, attempts
from avow.engines.progress import Observer
from avow.engines.task import Reading, decoded, deliver
from avow.errors import SourceError
from avow.kafka.connect import made, settings_of, strike
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import BATCH_BYTES, BATCH_RECORDS, FETCH, FIXED, TAKE_RECORDS, as_batch
from avow.ledger import OffsetRange
from avow.settings import Pipeline, revealed

WAIT_S = 0.1  # for a first record; also how soon a wish to stop is seen
TELL_EVERY_S = 1.0
BYTES_MAX = 64 * 1024 * 1024  # of a batch
TOPICS_EVERY_S = 10.0
SILENT = Observer()

NEWS = {"topic.metadata.refresh.interval.ms": 10_000}  # how soon added partitions are seen, unless declared
MEMBER = {"partition.assignment.strategy": "cooperative-sticky"}


class Run:
    """One execution of a pipeline, in this process."""

    def __init__(self, pipeline: Pipeline, *, once: bool = False, observer: Observer = SILENT) -> None:
        self._pipeline = pipeline
        self._once = once
        self._observer = observer
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ask the run to end after the current batch. Safe to call from a signal handler."""
        self._stop.set()

    def execute(self) -> None:
        """Run until drained, stopped, or ended by a named stop."""
        os.environ[failpoints.DRIVER] = str(os.getpid())
        pipeline = self._pipeline
        columns = sink_columns(pipeline)
        with sinks.driver_sink(pipeline) as store, Log(pipeline.source, pipeline.name) as log:
            store.prepare()
            known = log.partitions()
            ends = log.stable_ends(known) if self._once else None
            if store.prepare_table(columns[0], rest=columns[1]):
                self._observer.event(f"made {pipeline.sink.target}")

        def make() -> _Attempt:
            return _Attempt(pipeline, columns, known, ends, self._stop, self._observer)

        # Whatever a sink's client raises in a task, as on Spark: what does not pass is bounded by the attempts.
        attempts(make, self._stop, self._observer, (Exception,))


@dataclass(slots=True)
class _Taken:
    """What has come of one partition since its last claim."""

    messages: list[client.Message] = field(default_factory=list)
    until: int = 0  # one past the last offset that is known to be of it, markers included


class _Attempt:
    """From the ledger to the first failure. ``known``: the partitions there were when the run began. ``ends``: where
    to stop, if it is to stop by itself."""

    def __init__(
        self,
        pipeline: Pipeline,
        columns: Columns,
        known: Collection[TopicPartition],
        ends: dict[TopicPartition, int] | None,
        stop: threading.Event,
        observer: Observer,
    ) -> None:
        self._pipeline = pipeline
        self._columns = columns
        self._known = known
        self._ends = ends
        self._stop = stop
        self._observer = observer
        self.driver = Driver(pipeline, observer, tell_every_s=TELL_EVERY_S)
        given = revealed(pipeline.source.kafka)
        settings = settings_of(pipeline.source) | FETCH | NEWS | given | FIXED | MEMBER
        self._consumer = made(client.Consumer, settings | {"group.id": f"{pipeline.name}.members"}, given)
        self._taken: dict[TopicPartition, _Taken] = {}
        self._bytes = 0
        self._batch = 0
        self._batch_at = 0.0  # when the last one began
        self._topics: list[str] = []
        self._topics_at = 0.0
        self._joined = False  # the group has said which partitions are ours, be it none

    def close(self) -> None:
        self._taken.clear()
        self._consumer.close()
        self.driver.close()

    def execute(self) -> None:
        self.driver.prepare(self._columns)
        while not self._stop.is_set():
            self._subscribe()
            self._take()
            if self._is_due():
                self._deliver()
            if self._ends is not None and self._drained(self._ends):
                return

    # Membership

    def _subscribe(self) -> None:
        """To the topics by name, looked up now and then where a pattern is declared: the client's own patterns are not
        Python's."""
        now = time.monotonic()
        if self._topics and (self._pipeline.source.topics_pattern is None or now - self._topics_at < TOPICS_EVERY_S):
            return
        self._topics_at = now
        topics = sorted({where.topic for where in self.driver.log.partitions()})
        if topics != self._topics:
            self._topics = topics
            given, taken = self._on_assign, self._on_revoke
            self._consumer.subscribe(topics, on_assign=given, on_revoke=taken, on_lost=taken)

    def _on_assign(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        self._joined = True
        ours = [TopicPartition(one.topic, one.partition) for one in partitions]
        if ours:
            self.driver.begin(ours, added=[where for where in ours if where not in self._known])
        begin = [client.TopicPartition(w.topic, w.partition, self.driver.positions[w]) for w in ours]
        consumer.incremental_assign(begin)

    def _on_revoke(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        """Nothing is in flight: this is called between two batches. What was not delivered is somebody else's now."""
        gone = [TopicPartition(one.topic, one.partition) for one in partitions]
        for where in gone:
            self._taken.pop(where, None)
        self.driver.release(gone)
        consumer.incremental_unassign(partitions)

    # Batches

    def _take(self) -> None:
        """What is at hand; where there is nothing, what comes next."""
        wait = WAIT_S if not self._taken else min(WAIT_S, max(0.0, self._rest()))
        first = self._consumer.poll(wait)
        if first is None:
            return
        more = min(TAKE_RECORDS, self._pipeline.batch.max_records - self._count()) - 1
        for (topic, partition), some in groupby([first, *self._consumer.consume(max(0, more), 0)], _place):
            records = list(some)
            if topic is None:  # not of a partition
                raise self._failure(records[0].error())
            where = TopicPartition(topic, partition)
            if where not in self.driver.positions:
                continue  # it was taken away while these were on their way
            taken = self._taken.setdefault(where, _Taken(until=self.driver.positions[where]))
            if any(map(client.Message.error, records)):
                records = self._without_errors(records, taken)
            if records:
                taken.messages += records
                self._bytes += sum(map(len, records))
                taken.until = max(taken.until, records[-1].offset() + 1)  # type: ignore[operator]

    def _without_errors(self, messages: list[client.Message], taken: _Taken) -> list[client.Message]:
        records = []
        for message in messages:
            error = message.error()
            if error is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                taken.until = max(taken.until, message.offset() or 0)
            else:
                raise self._failure(error)
        return records

    def _failure(self, error: KafkaError | None) -> SourceError:
        source = self._pipeline.source
        said = strike(revealed(source.kafka).values(), error.str() if error else "")
        return SourceError(
            f"Kafka at {source.shown('brokers')}, asked for records: {said}",
            advice="It is tried again from the ledger. If it stays so, check the brokers and the topics' leaders.",
        )

    def _rest(self) -> float:
        """How long the next batch has to wait."""
        return self._batch_at + self._pipeline.interval.total_seconds() - time.monotonic()

    def _is_due(self) -> bool:
        if not self._taken:
            return False
        full = self._count() >= self._pipeline.batch.max_records or self._bytes >= BYTES_MAX
        return full or self._rest() <= 0

    def _count(self) -> int:
        return sum(len(taken.messages) for taken in self._taken.values())

    def _deliver(self) -> None:
        started = time.monotonic()
        taken, self._taken, self._bytes, self._batch_at = self._taken, {}, 0, started
        positions = self.driver.positions
        ranges = {
            where: OffsetRange(where.topic, where.partition, positions[where], one.until)
            for where, one in taken.items()
            if one.until > positions[where]
        }
        if not ranges:
            return
        work = self.driver.work(self._batch, ranges)
        staged = []
        for where, planned in sorted(ranges.items()):
            sink = sinks.task_sink(self._pipeline, self.driver.run, work.brief)
            prepare = decoded(_reading(taken[where].messages), self._pipeline)
            report = deliver(prepare, planned, work, sink)
            staged += [report.staged] if report.staged is not None else []
        self.driver.finish(work, staged, started)
        self._batch += 1

    def _drained(self, ends: dict[TopicPartition, int]) -> bool:
        """Whether all of it is claimed, by us or by those who share the partitions with us. Not before the rules have
        been asked about ours: there may be a reason to stop."""
        if not self._joined:
            return False
        positions = self.driver.positions
        if any(position < ends.get(where, 0) for where, position in positions.items()):
            return False
        others = [where for where, end in ends.items() if where not in positions and end]
        if not others:
            return bool(positions) or not any(ends.values())
        entries = self.driver.store.entries()
        return all(where in entries and entries[where].position >= ends[where] for where in others)


def _place(message: client.Message) -> tuple[str | None, int]:
    return message.topic(), message.partition()  # type: ignore[return-value]


def _reading(messages: list[client.Message]) -> Reading:
    """These records, for ``task.decoded``."""

    def read(todo: OffsetRange) -> Iterator[pa.RecordBatch]:
        some: list[client.Message] = []
        size = 0
        for message in messages:
            if message.offset() < todo.start:  # type: ignore[operator]
                continue
            some.append(message)
            size += len(message)
            if len(some) >= BATCH_RECORDS or size >= BATCH_BYTES:
                yield as_batch(todo, some)
                some, size = [], 0
        if some:
            yield as_batch(todo, some)

    return read
