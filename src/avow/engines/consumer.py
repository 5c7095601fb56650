"""The consumer engine: the same pipeline without Spark and without a JVM, for small loads and low latency.

Theory of operation
-------------------
The process is a member of a consumer group, which shares out the partitions among all that run the pipeline so. The
group is not the pipeline's own (``NAME``), to which positions are committed for lag tools, and which for some sinks is
the ledger: it is ``NAME.members``, and nothing is ever committed to it. When partitions are assigned, a run's number is
taken and older runs are fenced in them, the ledger says where to begin, and the client reads on from there. When they
are revoked, what was read of them and not delivered is dropped: their next owner begins at the ledger.

Records are gathered as they come. What is at hand is a batch: few records when little is sent, many when much is, so
that a record waits no longer than the batch before it. Each partition's part goes through ``task.deliver``, which is
what Spark's tasks run; where the sink can do it, small parts of many partitions go together, in one transaction. A
part's range begins at our position and ends behind the last record; at the end of a partition the client says where
that is, so that markers and aborted records are claimed as well.

Several transactions, or ranges, are delivered side by side, by a few threads (``_Lanes``), and meanwhile this thread
gathers the next batch. It serves no callbacks of the group then: partitions come and go between two batches.

Owns: what makes a batch. Must not know: how a sink writes. Neighbours: ``kafka.group_batches`` (the membership, and
what it has gathered), ``driver``, ``task``.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from avow import sinks
from avow.client_cache import close_clients
from avow.engines.columns import sink_columns
from avow.engines.driver import EngineRun, Executed, RunDriver, prepare_table, remark_new_ledger
from avow.engines.isolation import Isolation
from avow.engines.progress import Observer
from avow.engines.task import (
    BatchWork,
    can_join,
    decoded,
    deliver,
    deliver_joined,
    from_memory,
    recreated_topics,
    set_aside,
)
from avow.engines.topics import Topics
from avow.errors import Superseded, TopicRecreated
from avow.kafka.connect import Connection
from avow.kafka.group_batches import BatchMember, fetch_limits
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import BATCH_BYTES, BATCH_RECORDS
from avow.ledger import Counts, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.base import StagingSink

Answer = TypeVar("Answer")

ConfirmTopics = Callable[[Collection[str]], None]  # raises what forbids to go on with these topics

WAIT_S = 0.1  # for a first record; also how soon a wish to stop is seen
SILENCE_S = 30.0  # without a record; then Kafka is asked, which the member itself says nothing of when it is away
BYTES_MAX = 64 * 1024 * 1024  # of a batch
RECORDS_MAX = 8_000_000  # of a batch, whatever is declared: Arrow has room for 2 GB of topic names, of 249 bytes each
LANES_MAX = 4
GATHER_EVERY_S = 0.005  # while a batch is delivered
# A batch costs a fraction of a millisecond for each partition that it has records of, however few. So long they wait
# for more of them: not for one partition, but for hundreds.
GATHER_S_EACH = 0.0002
# After that the client is left alone: the group takes our partitions away if the sink hangs for longer than
# max.poll.interval.ms, and gathering counts as polling.
GATHER_S = 10.0
TOPICS_EVERY_S = 10.0

# The user's own win over these.
DEFAULTS = {
    # A member that was killed keeps its partitions so long. The client's own 45 s spare those whom it hurts to be
    # thrown out by mistake: here the ledger makes it harmless.
    "session.timeout.ms": 10_000,
    "heartbeat.interval.ms": 2_000,
}


class ConsumerRun(EngineRun):
    """One execution of a pipeline, in this process."""

    def execute(self) -> None:
        pipeline = self._pipeline
        topics = self._topics
        if not topics.by_topic:
            _load(pipeline)
        with sinks.driver_sink(pipeline) as sink, Log(pipeline.source, pipeline.name) as log:
            sink.prepare()
            known = topics.partitions(log)
            remark_new_ledger(sink, log, known, pipeline, self._observer)
            ends = log.stable_ends(known) if self._once else None
            if not topics.by_topic:
                prepare_table(sink, pipeline, sink_columns(pipeline), self._observer)
            elif known:
                with topics.apart(one := min(known).topic):
                    _load(topics.part(one))
            # Topics that were read before: what they have now and the ledger does not know was added since.
            begun = {state.entry.topic_id for state in sink.ledger_snapshot().values()}
            fresh = {tp for tp, topic_id in known.items() if topic_id not in begun}

        self._attempts(lambda isolation: ConsumerAttempt(topics, fresh, ends, self._stop, self._observer, isolation))
        topics.raise_stopped()


def _load(pipeline: PipelineConfig) -> None:
    """Decoder and transform are loaded now, and not while the first record waits."""
    for _ in decoded(from_memory(None), pipeline, ahead=False)(OffsetRange("", 0, 0, 0)):
        pass


class _Lanes:
    """Threads that deliver ranges side by side, each with connections and producers of its own."""

    def __init__(self, count: int) -> None:
        self._threads = [ThreadPoolExecutor(1, f"lane-{number}") for number in range(count)]

    def submit(self, number: int, work: Callable[[], Answer]) -> Future[Answer]:
        return self._threads[number % len(self._threads)].submit(work)

    def close(self) -> None:
        for thread in self._threads:
            thread.submit(close_clients)
            thread.shutdown()


class _TopicChecks:
    """``recreated_topics`` in a thread of its own, while the records in question are decoded and written."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._log = Log(pipeline.source, pipeline.name)
        self._thread = ThreadPoolExecutor(1, "topic-check")

    def begin(self, work: BatchWork) -> Callable[[], Mapping[str, TopicRecreated]]:
        """To be called after the records were read. What it gives waits for the outcome."""
        return self._thread.submit(recreated_topics, work, self._log).result

    def close(self) -> None:
        self._thread.shutdown()
        self._log.close()


class ConsumerAttempt:
    """From the ledger to the first failure. ``fresh``: the partitions there were when the run began, of topics that the
    ledger did not know then; only these begin at the declared start. ``ends``: where to stop, if it is to stop by
    itself."""

    def __init__(
        self,
        topics: Topics,
        fresh: Collection[TopicPartition],
        ends: dict[TopicPartition, int] | None,
        stop: threading.Event,
        observer: Observer,
        isolation: Isolation,
    ) -> None:
        self._pipeline = pipeline = topics.pipeline
        self._topics = topics
        self._isolation = isolation
        self._joins = can_join(pipeline)
        self._fresh = fresh
        self._ends = ends
        self._stop = stop
        self._observer = observer
        self.driver = RunDriver(pipeline, observer, topics)
        with ExitStack() as opened:
            opened.callback(self.driver.close)  # unless all goes well
            self.member = BatchMember(
                Connection.of(pipeline.source, f"{pipeline.name}.members"),
                on_assign=self._begin,
                on_revoke=lambda gone, lost: self.driver.release(gone, lost=lost),
                on_event=observer.event,
                defaults=DEFAULTS | fetch_limits(len(topics.partitions(self.driver.log))),
                advice="It is retried from the ledger. If it persists, check the brokers and the topics' leaders.",
            )
            opened.pop_all()
        # A transform of the user's is not called by two threads at once.
        self._topic_checks = _TopicChecks(pipeline)
        self._lanes = _Lanes(1 if pipeline.transform else min(os.cpu_count() or 1, LANES_MAX))
        self._batch_at = 0.0  # when the last one began
        self._gathered_at = 0.0  # when the first records of the next one came
        self._sign_at = time.monotonic()  # of life, by Kafka: records or an answer
        self._topics_at: float | None = None
        self._left: set[str] = set()  # topics that have stopped, and that the member no longer reads

    def close(self) -> None:
        with ExitStack() as closing:  # in reverse, all of them
            closing.callback(self.driver.close)
            closing.callback(self.member.close)
            closing.callback(self._topic_checks.close)
            closing.callback(self._lanes.close)

    def execute(self) -> bool:
        if not self._topics.by_topic:
            self.driver.prepare(sink_columns(self._pipeline))
        while not self._stop.is_set():
            self._leave_stopped()
            if not self._subscribe():
                return True
            self._gather()
            self._ask_after_silence()
            if self._is_due():
                self._deliver()
            self.driver.publish()
            self.driver.keepalive()
            ends = self._ends
            if ends is not None:
                ends = {tp: end for tp, end in ends.items() if tp.topic not in self._topics.stopped}
            if ends is not None and self.member.drained(ends, self.driver.positions, self._reached_elsewhere):
                return True
        return False

    # Membership

    def _subscribe(self) -> bool:
        """To the topics by name, looked up now and then where a pattern is declared: the client's own patterns are not
        Python's. False if all have stopped."""
        now, pattern = time.monotonic(), self._pipeline.source.topics_pattern
        if self._topics_at is not None and (pattern is None or now - self._topics_at < TOPICS_EVERY_S):
            return True
        topics = {tp.topic for tp in self._topics.partitions(self.driver.log)}
        if topics:
            self.member.subscribe(topics)
        self._topics_at = now
        return bool(topics)

    def _leave_stopped(self) -> None:
        """Read no more of topics that have stopped, and leave them to nobody: another process would stop there too."""
        stopped = self._topics.stopped.keys() - self._left
        if stopped:
            self.member.leave(stopped)
            self._left |= stopped
            self._topics_at = None

    def _begin(self, ours: list[TopicPartition]) -> dict[TopicPartition, int]:
        self.driver.begin(ours, added=[tp for tp in ours if tp not in self._fresh])
        positions = self.driver.positions
        return {tp: positions[tp] for tp in ours if tp.topic not in self._topics.stopped}

    def _superseded(self, ranges: Collection[TopicPartition], error: Superseded) -> None:
        """A newer run has one of these. Of the others, the ledger knows how much was done."""
        gone = self.driver.refresh(ranges)
        positions = self.driver.positions
        self.member.rewind({tp: positions[tp] for tp in ranges if tp not in gone and tp in positions})
        self.member.give_up(gone, error)

    # Batches

    def _gather(self) -> None:
        """What is at hand; where there is nothing, what comes next."""
        had = self.member.partitions_gathered
        records, size = self._room()
        self.member.gather(max(1, records), max(1, size), min(WAIT_S, max(0.0, self._rest())) if had else WAIT_S)
        if not had:
            self._gathered_at = time.monotonic()

    def _ask_after_silence(self) -> None:
        """End the attempt if Kafka is away, or a partition has no leader: the client waits for them without a word, and
        without an end."""
        now = time.monotonic()
        if self.member.partitions_gathered:
            self._sign_at = now
        elif now - self._sign_at >= SILENCE_S:
            known = list(self.driver.positions) or list(self._topics.partitions(self.driver.log))
            self.driver.log.stable_ends(known)
            self._sign_at = time.monotonic()

    def _room(self) -> tuple[int, int]:
        """How many records and bytes a batch may still take."""
        records_max = min(self._pipeline.batch.max_records, RECORDS_MAX)
        return records_max - self.member.count, BYTES_MAX - self.member.size

    def _rest(self) -> float:
        """How long the next batch has to wait."""
        due = self._batch_at + self._pipeline.interval.total_seconds()
        return max(due, self._gathered_at + GATHER_S_EACH * self.member.partitions_gathered) - time.monotonic()

    def _is_due(self) -> bool:
        return self.member.partitions_gathered > 0 and (min(self._room()) <= 0 or self._rest() <= 0)

    def _deliver(self) -> None:
        self._batch_at = time.monotonic()
        gathered, positions = self.member.cut(), self.driver.positions
        ranges = {
            tp: OffsetRange(tp.topic, tp.partition, positions[tp], part.until)
            for tp, part in sorted(gathered.items())
            if tp in positions and part.until > positions[tp]
        }
        if not ranges:
            return

        def execute(work: BatchWork) -> Executed:
            recreated = self._topic_checks.begin(work)
            records = {tp: gathered[tp].records for tp in work.ranges}

            def confirm(topics: Collection[str]) -> None:
                for topic, error in recreated().items():
                    if topic in topics or not work.topics:
                        raise error

            try:
                executed = self._execute(records, work, confirm)
            finally:
                if not work.topics:
                    confirm(())  # the driver's commit comes next; and records of another topic explain why they are bad
            return replace(executed, failed={**executed.failed, **recreated()})

        try:
            self.driver.deliver(ranges, execute, self._isolation, self._stop)
        except Superseded as error:
            self._superseded(ranges, error)

    def _execute(
        self, records: Mapping[TopicPartition, pa.RecordBatch | None], work: BatchWork, confirm: ConfirmTopics
    ) -> Executed:
        """Side by side, if there is more than one group."""
        groups = together(records, by_topic=self._topics.by_topic) if self._joins else [[tp] for tp in records]
        if len(groups) == 1 and len(records) > 1 and not work.topics:
            return Executed(*self._deliver_group(groups[0], records, work, confirm))
        self._gathered_at = time.monotonic()
        futures = [
            # A partition has the same lane every time where its producer is the lane's: two would fence each other.
            self._lanes.submit(
                number if self._joins else zlib.crc32(group[0].topic.encode()) + group[0].partition,
                partial(self._deliver_group, group, records, work, confirm),
            )
            for number, group in enumerate(groups)
        ]
        self._gather_until_done(futures)
        task_outputs: list[tuple[str, object]] = []
        counts: dict[TopicPartition, Counts] = {}
        failed: dict[str, Exception] = {}
        for group, future in zip(groups, futures, strict=True):
            error = future.exception()
            if work.topics and isinstance(error, Exception):
                failed.setdefault(group[0].topic, error)
                continue
            outputs, of_group = future.result()
            task_outputs += outputs
            counts |= of_group
        return Executed(task_outputs, counts, failed)

    def _gather_until_done(self, futures: Collection[Future[Any]]) -> None:
        until = time.monotonic() + GATHER_S
        while self.member.is_native and time.monotonic() < until and wait(futures, GATHER_EVERY_S).not_done:
            records, size = self._room()
            if records > 0 and size > 0:
                self.member.gather_more(records, size)
        wait(futures)

    def _deliver_group(
        self,
        group: Sequence[TopicPartition],
        records: Mapping[TopicPartition, pa.RecordBatch | None],
        work: BatchWork,
        confirm: ConfirmTopics,
    ) -> tuple[list[tuple[str, object]], dict[TopicPartition, Counts]]:
        topic = group[0].topic
        work = work.for_topic(topic)
        pipeline, confirm_group = work.pipeline, partial(confirm, {tp.topic for tp in group})
        sink = sinks.task_sink(pipeline, work.run, work.task_context)
        if len(group) > 1:
            assert not isinstance(sink, StagingSink)
            done = deliver_joined({work.ranges[tp]: records[tp] for tp in group}, work, sink, confirm_group)
            return [], {tp: done[work.ranges[tp]] for tp in group}
        (tp,) = group
        batch, planned = records[tp], work.ranges[tp]
        read = from_memory(batch)
        if work.set_aside:
            prepare = set_aside(read, pipeline, work.set_aside)
        else:
            prepare = decoded(read, pipeline, ahead=batch is not None and batch.num_rows > BATCH_RECORDS)
        report = deliver(prepare, planned, work, sink, confirm_group)
        return [] if report.task_output is None else [(topic, report.task_output)], {tp: report.counts}

    def _reached_elsewhere(self, others: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        entries = self.driver.sink.entries()
        return {tp: entries[tp].position for tp in others if tp in entries}


def together(
    records: Mapping[TopicPartition, pa.RecordBatch | None], *, by_topic: bool = False
) -> list[list[TopicPartition]]:
    """Which partitions' records go into the same acts: as many as make one batch for the decoder; with ``by_topic``
    none of two topics."""
    groups: list[list[TopicPartition]] = []
    rows_left = bytes_left = -1
    for tp, batch in records.items():
        rows, size = (0, 0) if batch is None else (batch.num_rows, batch.nbytes)
        other_topic = by_topic and groups and groups[-1][0].topic != tp.topic
        if rows > rows_left or size > bytes_left or other_topic:
            groups.append([])
            rows_left, bytes_left = BATCH_RECORDS, BATCH_BYTES
        groups[-1].append(tp)
        rows_left, bytes_left = rows_left - rows, bytes_left - size
    return groups
