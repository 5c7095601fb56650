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
Spark's tasks run; where the sink can do it, small parts of many partitions go together, in one transaction. A part's
range begins at our position and ends behind the last record; at the end of a partition the client says where that is,
so that markers and aborted records are claimed as well.

A process that stood still, or lost Kafka, for longer than the group waits is thrown out, and somebody else fences its
partitions. It may find that out from the ledger, before the group says so. Then it lets go of those partitions and goes
on as a member; the group will give it others. Only if the group still calls them ours after a while, the newer run is
no member's but stands beside the group (Spark, by mistake), and that one has the pipeline.

Everything happens in one thread, also the client's calls to say that partitions come and go: a batch is never cut.

Owns: membership, and what makes a batch. Must not know: how a sink writes. Neighbours: ``driver``, ``task``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

import confluent_kafka as client
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from avow import sinks
from avow.engines.columns import Columns, sink_columns
from avow.engines.driver import STOPS, Driver, Executed, attempts, not_drained, prepare_table, remark_new_ledger
from avow.engines.isolation import Isolation
from avow.engines.progress import Observer
from avow.engines.task import Reading, Report, Work, can_join, check_topics, decoded, deliver, deliver_joined, set_aside
from avow.errors import AvowError, ConfigError, SourceError, Superseded, first_line
from avow.kafka.connect import first_permanent, grant, is_permanent, made, settings_of, strike, words
from avow.kafka.headers import size_of
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import BATCH_BYTES, BATCH_RECORDS, FETCH, FIXED, TAKE_RECORDS, as_batch
from avow.ledger import OffsetRange
from avow.settings import PipelineConfig, revealed
from avow.sinks.base import StagingSink

WAIT_S = 0.1  # for a first record; also how soon a wish to stop is seen
BYTES_MAX = 64 * 1024 * 1024  # of a batch
TOPICS_EVERY_S = 10.0
FENCED_S = 60.0  # how long a newer run may have a partition that the group says is ours
SILENT = Observer()

# The user's own win over these.
DEFAULTS = {
    "topic.metadata.refresh.interval.ms": 10_000,  # how soon added partitions are seen
    # A member that was killed keeps its partitions so long. The client's own 45 s spare those whom it hurts to be
    # thrown out by mistake: here the ledger makes it harmless.
    "session.timeout.ms": 10_000,
    "heartbeat.interval.ms": 2_000,
}
MEMBER = {"partition.assignment.strategy": "cooperative-sticky"}


class Run:
    """One execution of a pipeline, in this process."""

    def __init__(self, pipeline: PipelineConfig, *, once: bool = False, observer: Observer = SILENT) -> None:
        self._pipeline = pipeline
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
        columns = sink_columns(pipeline)
        for _ in decoded(_reading([]), pipeline, ahead=False)(OffsetRange("", 0, 0, 0)):
            pass  # decoder and transform are loaded now, and not while the first record waits
        with sinks.driver_sink(pipeline) as store, Log(pipeline.source, pipeline.name) as log:
            store.prepare()
            known = log.partitions()
            remark_new_ledger(store, log, known, pipeline, self._observer)
            ends = log.stable_ends(known) if self._once else None
            prepare_table(store, pipeline, columns, self._observer)
            # Topics that were read before: what they have now and the ledger does not know was added since.
            begun = {entry.topic_id for entry in store.entries().values()}
            fresh = {where for where, topic_id in known.items() if topic_id not in begun}

        # What Kafka does not answer says nothing about a record, nor does a stop by name.
        isolation = Isolation((SourceError, *STOPS.values()), self._observer.event)

        def make() -> _Attempt:
            return _Attempt(pipeline, columns, fresh, ends, self._stop, self._observer, isolation)

        if not attempts(make, self._stop, self._observer) and self._once:
            raise not_drained(pipeline)


@dataclass(slots=True)
class _Taken:
    """What has come of one partition since its last claim."""

    messages: list[client.Message] = field(default_factory=list)
    until: int = 0  # one past the last offset that is known to be of it, markers included


class _Attempt:
    """From the ledger to the first failure. ``fresh``: the partitions there were when the run began, of topics that the
    ledger did not know then; only these begin at the declared start. ``ends``: where to stop, if it is to stop by
    itself."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        columns: Columns,
        fresh: Collection[TopicPartition],
        ends: dict[TopicPartition, int] | None,
        stop: threading.Event,
        observer: Observer,
        isolation: Isolation,
    ) -> None:
        self._pipeline = pipeline
        self._isolation = isolation
        self._joins = can_join(pipeline)
        self._columns = columns
        self._fresh = fresh
        self._ends = ends
        self._stop = stop
        self._observer = observer
        self.driver = Driver(pipeline, observer)
        given = revealed(pipeline.source.kafka)
        settings = settings_of(pipeline.source) | FETCH | DEFAULTS | given | FIXED | MEMBER
        self._group = f"{pipeline.name}.members"
        self._complaints: deque[KafkaError] = deque(maxlen=100)
        own = {"group.id": self._group, "error_cb": self._complaints.append}
        self._consumer = made(client.Consumer, settings | own, given)
        self._taken: dict[TopicPartition, _Taken] = {}
        self._bytes = 0
        self._changed: set[TopicPartition] = set()  # came or went behind the first record of the present take
        self._astray: set[TopicPartition] = set()  # the client reads elsewhere than at our position
        self._fenced: dict[TopicPartition, tuple[float, Superseded]] = {}  # ours, says the group: since when not
        self._batch_at = 0.0  # when the last one began
        self._topics: list[str] = []
        self._topics_at = 0.0
        self._joined = False  # the group has said which partitions are ours, be it none

    def close(self) -> None:
        self._taken.clear()
        self._consumer.close()
        self.driver.close()

    def execute(self) -> bool:
        self.driver.prepare(self._columns)
        while not self._stop.is_set():
            self._subscribe()
            self._look_at_fenced()
            self._take()
            if self._is_due():
                self._deliver()
            self.driver.tell()
            self.driver.keep()
            if self._ends is not None and self._drained(self._ends):
                return True
        return False

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
            self._consumer.subscribe(topics, on_assign=given, on_revoke=taken, on_lost=self._on_lost)

    def _on_assign(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        self._joined = True
        ours = [TopicPartition(one.topic, one.partition) for one in partitions]
        self._changed.update(ours)
        begin: dict[TopicPartition, int] = {}
        try:
            if ours:
                self.driver.begin(ours, added=[where for where in ours if where not in self._fresh])
            begin = {where: self.driver.positions[where] for where in ours}
        except Superseded as error:
            self._let_go(ours, error)
        consumer.incremental_assign(_theirs(begin or dict.fromkeys(ours, client.OFFSET_END)))
        # It may have been paused in an earlier stay; and what we have let go of already is not read.
        (consumer.resume if begin else consumer.pause)(partitions)

    def _on_revoke(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        """Nothing is in flight: this is called between two batches. What was not delivered is somebody else's now."""
        self._gone(consumer, partitions, lost=False)

    def _on_lost(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        """Somebody else may have them already."""
        self._gone(consumer, partitions, lost=True)

    def _gone(self, consumer: client.Consumer, partitions: list[client.TopicPartition], *, lost: bool) -> None:
        gone = [TopicPartition(one.topic, one.partition) for one in partitions]
        self._changed.update(gone)
        self._astray.difference_update(gone)
        for where in gone:
            self._taken.pop(where, None)
            self._fenced.pop(where, None)
        self.driver.release(gone, lost=lost)
        consumer.incremental_unassign(partitions)

    def _superseded(self, ranges: Collection[TopicPartition], error: Superseded) -> None:
        """A newer run has one of these. Of the others, the ledger knows how much was done."""
        gone = self.driver.reread(ranges)
        self._astray.update(where for where in ranges if where not in gone)
        self._let_go(gone, error)
        with suppress(KafkaException):  # it is just going
            self._consumer.pause(_theirs(dict.fromkeys(gone, client.OFFSET_INVALID)))

    def _let_go(self, gone: Collection[TopicPartition], error: Superseded) -> None:
        self._observer.event(f"{', '.join(map(str, sorted(gone)))}: {first_line(error)}; waiting for the group's word")
        self._fenced |= dict.fromkeys(gone, (time.monotonic(), error))

    def _look_at_fenced(self) -> None:
        """A newer run in a partition of ours is a rebalance that we have not heard of. If we never do, it is not."""
        for since, error in self._fenced.values():
            if time.monotonic() - since > FENCED_S:
                raise error

    # Batches

    def _take(self) -> None:
        """What is at hand; where there is nothing, what comes next."""
        self._read_again()
        wait = WAIT_S if not self._taken else min(WAIT_S, max(0.0, self._rest()))
        first = self._consumer.poll(wait)
        if first is None:
            if (complaint := first_permanent(self._complaints)) is not None:
                raise self._failure(complaint)
            return
        self._changed.clear()
        more = min(TAKE_RECORDS, self._pipeline.batch.max_records - self._count()) - 1
        for (topic, partition), some in groupby([first, *self._consumer.consume(max(0, more), 0)], _place):
            records = list(some)
            if topic is None:  # not of a partition
                raise self._failure(records[0].error())
            where = TopicPartition(topic, partition)
            if where not in self.driver.positions or where in self._astray:
                continue  # it was taken away while these were on their way, or is to be read from elsewhere
            if where in self._changed:
                # It came or went behind the first record, which may be of an earlier stay: what lies between that one
                # and our position would be claimed unseen.
                self._astray.add(where)
                continue
            taken = self._taken.setdefault(where, _Taken(until=self.driver.positions[where]))
            if any(map(client.Message.error, records)):
                records = self._without_errors(records, taken)
            if records:
                taken.messages += records
                self._bytes += sum(map(size_of, records))
                taken.until = max(taken.until, records[-1].offset() + 1)  # type: ignore[operator]

    def _read_again(self) -> None:
        for where in list(self._astray):
            with suppress(KafkaException):  # it is just coming: until the client has it, nothing of it is taken
                self._consumer.seek(*_theirs({where: self.driver.positions[where]}))
                self._astray.discard(where)

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

    def _failure(self, error: KafkaError | None) -> AvowError:
        source = self._pipeline.source
        said = strike(revealed(source.kafka).values(), words(error) if error else "")
        if error is not None and is_permanent(error):
            return ConfigError(
                f"Kafka at {source.shown('brokers')} refuses records to group {self._group}: {said}",
                advice=grant(error, topics=self._topics, group=self._group),
            )
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
        size, count = self._bytes, self._count()
        taken, self._taken, self._bytes, self._batch_at = self._taken, {}, 0, started
        positions = self.driver.positions
        ranges = {
            where: OffsetRange(where.topic, where.partition, positions[where], one.until)
            for where, one in sorted(taken.items())
            if one.until > positions[where]
        }
        if not ranges:
            return
        records = {where: taken[where].messages for where in ranges}
        small = count <= BATCH_RECORDS and size <= BATCH_BYTES

        def execute(work: Work) -> Executed:
            check_topics(work, self.driver.log)
            mine = {where: records[where] for where in work.ranges}
            joined = self._joins and len(mine) > 1 and small
            return self._execute_joined(mine, work) if joined else self._execute(mine, work)

        try:
            self.driver.deliver(ranges, execute, self._isolation, self._stop)
        except Superseded as error:
            self._superseded(ranges, error)

    def _execute_joined(self, records: Mapping[TopicPartition, list[client.Message]], work: Work) -> Executed:
        sink = sinks.task_sink(self._pipeline, self.driver.run, work.brief)
        assert not isinstance(sink, StagingSink)
        parts = {work.ranges[where]: some for where, some in records.items()}
        done = deliver_joined({one: as_batch(one, some) if some else None for one, some in parts.items()}, work, sink)
        return [], {where: done[work.ranges[where]] for where in records}

    def _execute(self, records: Mapping[TopicPartition, list[client.Message]], work: Work) -> Executed:
        """One after another."""
        reports = {where: self._deliver_one(work.ranges[where], some, work) for where, some in records.items()}
        staged = [report.staged for report in reports.values() if report.staged is not None]
        return staged, {where: report.counts for where, report in reports.items()}

    def _deliver_one(self, planned: OffsetRange, records: list[client.Message], work: Work) -> Report:
        sink = sinks.task_sink(self._pipeline, self.driver.run, work.brief)
        read = _reading(records)
        if work.set_aside:
            return deliver(set_aside(read, self._pipeline, work.set_aside), planned, work, sink)
        prepare = decoded(read, self._pipeline, ahead=len(records) > BATCH_RECORDS)
        return deliver(prepare, planned, work, sink)

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


def _theirs(positions: Mapping[TopicPartition, int]) -> list[client.TopicPartition]:
    return [client.TopicPartition(where.topic, where.partition, position) for where, position in positions.items()]


def _place(message: client.Message) -> tuple[str | None, int]:
    return message.topic(), message.partition()  # type: ignore[return-value]


def _reading(messages: list[client.Message]) -> Reading:
    """These records, for ``task.decoded``."""

    def read(todo: OffsetRange) -> Iterator[pa.RecordBatch]:
        some: list[client.Message] = []
        size = 0
        for message in messages:
            if not todo.start <= message.offset() < todo.until:  # type: ignore[operator]
                continue
            some.append(message)
            size += size_of(message)
            if len(some) >= BATCH_RECORDS or size >= BATCH_BYTES:
                yield as_batch(todo, some)
                some, size = [], 0
        if some:
            yield as_batch(todo, some)

    return read
