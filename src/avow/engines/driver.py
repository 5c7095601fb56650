"""What the driver of every engine does around its batches: begin from the ledger, commit, publish, and begin anew.

Theory of operation
-------------------
A run is made of attempts. Each opens the sink and the log, takes a run's number and asks ``ledger.plan_start`` about
every partition it is to read. Then it delivers batches: an engine plans their ranges and executes them, and
``RunDriver.deliver`` does the rest, the same for every engine. A failure that may pass (a broker, the database, a
worker) ends the attempt, and another starts from the ledger, with back-off and a bound. A named stop ends the run.

Offsets are committed to the consumer group best-effort, by a background thread with a short time-out, so that neither
batches nor shutdown block on a broker. Counts come from the tasks' reports;
the ledger is read for them only where it is at hand anyway, or where nobody else knows.

Owns: positions, and publishing them. Must not know: where batches come from, how a sink writes. Neighbours:
``spark`` and ``consumer`` (which plan and execute batches), ``task`` (what is done with a range), ``ledger`` (the
rules).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from avow import ledger, sinks
from avow.engines.causes import own_error, trace, translated
from avow.engines.columns import Columns, sink_columns
from avow.engines.isolation import BatchPart, Isolation
from avow.engines.progress import SILENT, Observer, Progress
from avow.engines.task import BatchWork, TopicWork, check_topics, commit_task_outputs
from avow.engines.topics import TOPIC_STOPS, GaveUp, Topics
from avow.errors import (
    AvowError,
    ColumnsChanged,
    ConfigError,
    LogTruncated,
    NotDrained,
    PositionBehind,
    PositionGone,
    PositionMoved,
    ProtocolViolation,
    RegistryRefused,
    RetentionLoss,
    SinkError,
    SinkUnavailable,
    SourceError,
    Superseded,
    TooManyDeadLetters,
    TopicRecreated,
    UnknownSubject,
    first_line,
)
from avow.kafka.log import NO_TIMESTAMP, Log, TopicPartition
from avow.ledger import Counts, Entry, OffsetRange, Start
from avow.settings import PipelineConfig
from avow.sinks.base import GIVEN_UP_BATCH, CommittingSink, DriverSink

LOGGER = logging.getLogger("avow.engines")  # traces: silent unless somebody listens

ATTEMPTS_WITHOUT_PROGRESS = 8
BACK_OFF_S = (0.5, 1, 2, 5, 10, 20, 30)
LAG_EVERY_S = 5.0  # how often the log is asked where it ends
PUBLISH_EVERY_S = 1.0
PUBLISH_TIMEOUT_S = 3.0  # of one commit to the group, or one request for lag
KEEPALIVE_EVERY_S = 3600.0

# What ends a run for good. Anything else may pass, and is tried again.
STOPS: dict[str, type[AvowError]] = {
    stop.__name__: stop
    for stop in (
        ConfigError,
        LogTruncated,
        PositionGone,
        ProtocolViolation,
        RegistryRefused,
        RetentionLoss,
        Superseded,
        TooManyDeadLetters,
        TopicRecreated,
        UnknownSubject,
    )
}


@dataclass(frozen=True, slots=True)
class Executed:
    """What the tasks of a batch have come to."""

    task_outputs: Sequence[tuple[str, object]] = ()  # topic and what was staged, where the commit is the driver's
    counts: Mapping[TopicPartition, Counts] | None = None  # what became of each range, if that is known
    failed: Mapping[str, Exception] = field(default_factory=dict)  # by topic, where each has a table of its own


# Of the whole run, in whichever topic it shows.
OF_THE_RUN = (Superseded, ProtocolViolation)


class RunAttempt(Protocol):
    """From the ledger to the first failure."""

    driver: RunDriver

    def execute(self) -> bool:
        """Whether it ended by itself, with everything drained; not if it was stopped."""

    def close(self) -> None: ...


def attempts(
    make: Callable[[], RunAttempt],
    stop: threading.Event,
    observer: Observer,
    on_failure: Callable[[Exception], None] = lambda _: None,
) -> bool:
    """Try until it is done (True), stopped (False), or hopeless. Whatever is raised may pass, unless it is a named
    stop; ``on_failure`` may find that a failure will not pass, and raise."""
    failures = 0
    while not stop.is_set():
        progressed = False
        try:
            # Opening one may fail as well: the database that ended the last attempt may not be back yet.
            attempt = make()
            try:
                return attempt.execute()
            finally:
                progressed = attempt.driver.batches > 0
                attempt.close()
        except tuple(STOPS.values()):
            raise
        except GaveUp as given_up:
            raise given_up.error from given_up
        except Exception as failure:
            LOGGER.debug("an attempt failed\n%s", trace(failure))
            on_failure(failure)
            error = translated(failure)
            if type(error).__name__ in STOPS:  # of a Spark task, outside of what reports stops
                raise error from failure
            failures = 1 if progressed else failures + 1
            if failures > ATTEMPTS_WITHOUT_PROGRESS:
                raise last_word(error, failures) from failure
            if isinstance(error, ColumnsChanged):
                observer.event(f"{first_line(error)}; going on from the ledger with the columns of now")
                continue
            pause = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            observer.event(f"failed ({first_line(error)}); trying again from the ledger in {pause:g} s")
            stop.wait(pause)
    return False


def last_word(error: AvowError, failures: int) -> AvowError:
    return type(error)(
        f"gave up after {failures} attempts without progress: {first_line(error)}",
        advice=error.advice
        or "The ledger is whole: start again when the cause is fixed. --verbose shows the whole trace.",
    )


def prepare_table(sink: DriverSink, pipeline: PipelineConfig, columns: Columns, observer: Observer) -> None:
    """Before an attempt: make or check where rows go, and log what there is to say of it."""
    if sink.prepare_table(columns[0], rest=columns[1]):
        observer.event(f"made {pipeline.sink.target}")
    for remark in sink.remarks:
        observer.event(remark)


def remark_new_ledger(
    sink: DriverSink, log: Log, known: Collection[TopicPartition], pipeline: PipelineConfig, observer: Observer
) -> None:
    """Where the sink has no position of this pipeline and its consumer group has: it has written elsewhere before. A
    lake's ledger is in its table, so another table lacks it. Starting over on purpose looks the same, and goes on."""
    if sinks.plugin_of(pipeline).ledger_in_group or sink.ledger_snapshot():
        return
    with suppress(AvowError):  # the offsets of the group are a hint: no start fails for it
        committed = {tp: offset for tp, offset in log.committed_offsets(known).items() if offset}
        if committed:
            tp, offset = min(committed.items())
            observer.event(
                f"{pipeline.sink.target} has no position of pipeline {pipeline.name}, but consumer group "
                f"{pipeline.name} has committed offsets in {len(committed)} partitions ({tp} at {offset}): the "
                "pipeline has written to another place before. It begins here at source.start, and the rows of before "
                "stay there. If the sink was renamed by mistake, stop, name the old one again, and remove this one"
            )


class EngineRun(ABC):
    """One execution of a pipeline, by any engine."""

    def __init__(self, pipeline: PipelineConfig, *, once: bool = False, observer: Observer = SILENT) -> None:
        self._pipeline = pipeline
        self._once = once
        self._observer = observer
        self._topics = Topics(pipeline, sink_columns, observer)
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ask the run to end after the current batch. Safe to call from a signal handler."""
        self._stop.set()

    @abstractmethod
    def execute(self) -> None:
        """Run until drained, stopped, or ended by a named stop. Stopped before it has drained, ``once`` raises
        ``NotDrained``."""

    # ``make`` begins with ``self._pipeline`` as it is then: its columns may be other ones than at the start.
    def _attempts(
        self, make: Callable[[Isolation], RunAttempt], on_failure: Callable[[Exception], None] = lambda _: None
    ) -> None:
        # What does not answer says nothing about a record, nor does who came first, nor a stop by name.
        blameless: tuple[type[Exception], ...] = (
            ColumnsChanged,
            SourceError,
            SinkUnavailable,
            PositionMoved,
            PositionBehind,
            *STOPS.values(),
        )
        isolation = Isolation(blameless, self._observer.event)
        changed = False

        def failed(error: Exception) -> None:
            nonlocal changed
            on_failure(error)
            changed = changed or isinstance(own_error(error), ColumnsChanged)

        def begin() -> RunAttempt:
            nonlocal changed
            if changed:  # here and not above: a registry that does not answer is tried again
                self._topics.renew()
                self._pipeline = self._topics.pipeline
                changed = False
            return make(isolation)

        if not attempts(begin, self._stop, self._observer, failed) and self._once:
            raise NotDrained(
                f"pipeline {self._pipeline.name} was stopped before it had drained its topics: records are left that "
                "were there when it started",
                advice="Nothing failed. Run it again: it continues from the ledger.",
            )


class RunDriver:
    """One attempt's positions. They are published about once a second, beside the batches, none of which waits."""

    def __init__(self, pipeline: PipelineConfig, observer: Observer, topics: Topics | None = None) -> None:
        self._pipeline = pipeline
        self._observer = observer
        self.topics = topics or Topics(pipeline, sink_columns, observer)
        self.sink = sinks.driver_sink(pipeline)
        self._topic_sinks: dict[str, DriverSink] = {}  # that are prepared, where each topic has a table of its own
        self._topic_runs: dict[str, int] = {}  # where each has a ledger of its own
        self.log = Log(pipeline.source, pipeline.name)
        self.positions: dict[TopicPartition, int] = {}  # where the next planned range starts
        self._topic_ids: dict[str, str] = {}  # of the topics that are read, as they were when that began
        self.run = 0
        self.batches = 0
        self._batch = -1  # the newest one's number
        self._counts: dict[TopicPartition, Counts] = {}  # over the pipeline's life, in our partitions
        self._counted = True  # else the ledger is to be asked
        self._keepalive_at = time.monotonic()
        self._publisher = _OffsetPublisher(pipeline)
        self._moved = False  # positions that were not committed to the group
        self._unreported = (0, 0.0)  # offsets and seconds of batches since the last progress
        self._published_at = self._lag_at = float("-inf")
        self._ends: dict[TopicPartition, int] = {}  # where the log ended when it was last asked
        self._oldest: float | None = None  # when the oldest record was made that was not claimed then
        self._lag_reported = 0

    def close(self) -> None:
        self.release(list(self.positions))
        self._publisher.close()
        self.sink.close()
        self.log.close()

    # Positions

    def prepare(self, columns: Columns) -> None:
        """The table may have been altered since it was last looked at, or is to follow other columns than then."""
        prepare_table(self.sink, self._pipeline, columns, self._observer)

    def begin(
        self, partitions: Collection[TopicPartition] | None = None, added: Collection[TopicPartition] = ()
    ) -> None:
        """Take a run's number, fence older ones, and find where to begin: in all partitions, or in those that have
        become ours. First positions are written before anything is read. What was ``added`` while running begins at
        its earliest offset, whatever the declared start."""
        known = self.topics.partitions(self.log)
        entries = {tp: state.entry for tp, state in self.sink.ledger_snapshot().items()}
        self._open_topics(known, entries, partitions)
        known = self.topics.going(known)
        if partitions is not None:
            known = {tp: known[tp] for tp in partitions if tp in known}
        if partitions is None:
            added = _added_since(known, entries)
        # What refuses this start does so before it fences: a healthy run beside it goes on. Then the older runs are
        # fenced, which can move positions no more, and the rules are asked again.
        self._plan_starts(known, added, entries)
        known = self.topics.going(known)
        self._open_run(known, partitions)
        self._observer.began(self.run, entries)
        self.positions |= self._starts(self.topics.going(known), added)
        known = self.topics.going(known)
        columns_from = self._pipeline.decode.columns_from if self._pipeline.decode.is_resolved else ""
        self._observer.event(
            f"run {self.run} of {self._pipeline.name}: {self._pipeline.guarantee}, {len(known)} partitions, from the "
            f"ledger{columns_from and f'; columns of {columns_from}'}"
        )
        self._moved = True
        self._lag_reported = self._lag()[0]
        if self._publisher.publish(self.positions, group=False, lag=True):  # else the first lag shown has no age
            self._lag_at = time.monotonic()

    def _open_topics(
        self,
        known: Collection[TopicPartition],
        entries: Collection[TopicPartition],
        partitions: Collection[TopicPartition] | None = None,
    ) -> None:
        """Where each topic has a table of its own: make or check those of these partitions, as far as they are new to
        this attempt. ``known`` are the partitions of all topics, and ``entries`` those that the ledger knows."""
        wanted = {tp.topic for tp in (known if partitions is None else partitions)} & {tp.topic for tp in known}
        if not self.topics.by_topic or not wanted - self._topic_sinks.keys():
            return
        self.topics.check_places({tp.topic for tp in known}, {tp.topic for tp in entries})
        for topic in sorted(wanted - self._topic_sinks.keys() - self.topics.stopped.keys()):
            with self.topics.apart(topic):
                sink = self.sink.open_topic(self.topics.part(topic))
                prepare_table(sink, self.topics.part(topic), self.topics.columns(topic), self._observer)
                self._topic_sinks[topic] = sink

    def _sink_of(self, topic: str) -> DriverSink:
        return self._topic_sinks.get(topic, self.sink)

    def _run_of(self, topic: str) -> int:
        return self._topic_runs.get(topic, self.run)

    def _open_run(self, known: Collection[TopicPartition], partitions: Collection[TopicPartition] | None) -> None:
        """One number for all; where each topic has a ledger of its own, one for each that these partitions are of."""
        if not (self.topics.by_topic and sinks.plugin_of(self._pipeline).ledger_by_topic):
            self.run = self.sink.open_run(partitions)
            return
        for topic in sorted({tp.topic for tp in known}):
            with self.topics.apart(topic):
                own = None if partitions is None else [tp for tp in partitions if tp.topic == topic]
                self._topic_runs[topic] = self._topic_sinks[topic].open_run(own)
        self.run = max(self._topic_runs.values(), default=0)

    def _plan_starts(
        self,
        known: Mapping[TopicPartition, str],
        added: Collection[TopicPartition],
        entries: Mapping[TopicPartition, Entry],
    ) -> dict[TopicPartition, Start]:
        """Ask the rules about every partition. Nothing in the ledger is changed."""
        source = self._pipeline.source
        self._check_topics(known, entries)
        known = self.topics.going(known)
        fresh = {tp for tp in known if not entries.get(tp)}
        by_offset = isinstance(source.start, Mapping)
        from_earliest = set() if by_offset else fresh & set(added)
        # In this order: the log only grows, so its end, asked later, does not lie before a declared ``latest``. Its
        # beginning moves on as well, by retention, and a start that was not declared as an offset moves with it.
        declared = self.log.declared_start(source.start, fresh - from_earliest)
        declared |= self.log.declared_start("earliest", from_earliest)
        views = self.log.view({tp: entries.get(tp) for tp in known})
        if not by_offset:
            declared = {tp: max(offset, views[tp].earliest) for tp, offset in declared.items()}
        self._counts |= {tp: entry.counts for tp in known if (entry := entries.get(tp))}
        self._ends |= {tp: views[tp].end for tp in known}
        starts = {}
        for tp in known:
            with self.topics.apart(tp.topic):
                starts[tp] = ledger.plan_start(
                    entries.get(tp), views[tp], declared.get(tp, 0), skip_lost=source.on_data_loss == "skip"
                )
        return {tp: start for tp, start in starts.items() if tp.topic not in self.topics.stopped}

    def _check_topics(self, known: Mapping[TopicPartition, str], entries: Mapping[TopicPartition, Entry]) -> None:
        """Refuse new partitions of a topic that was deleted and made again with more of them. Other partitions of it
        may be read already, by us or by another member: their records would be those of the new topic from then on."""
        claimed = {tp.topic: (tp, entry) for tp, entry in entries.items()}
        for tp, topic_id in known.items():
            with self.topics.apart(tp.topic):
                ledger.check_topic(f"{tp.topic} is read", self._topic_ids.setdefault(tp.topic, topic_id), topic_id)
                if tp not in entries and tp.topic in claimed:
                    other, entry = claimed[tp.topic]
                    ledger.check_topic(f"{other} was claimed up to offset {entry.position}", entry.topic_id, topic_id)

    def _starts(
        self, known: Mapping[TopicPartition, str], added: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Where to begin, with first positions written."""
        starts = self._plan_starts(known, added, self.sink.entries())
        self._adopt({tp: (start.position, known[tp]) for tp, start in starts.items() if start.adopted})
        for tp, start in starts.items():
            if start.given_up and tp.topic not in self.topics.stopped:
                lost = Counts(read=len(start.given_up), skipped=len(start.given_up))
                self._sink_of(tp.topic).claim(start.given_up, self._run_of(tp.topic), GIVEN_UP_BATCH, lost)
                self._counts[tp] += lost
                self._observer.event(f"retention-loss: {start.given_up} is claimed as skipped, as declared")
        return {tp: start.position for tp, start in starts.items() if tp.topic not in self.topics.stopped}

    def _adopt(self, first: Mapping[TopicPartition, tuple[int, str]]) -> None:
        """Write first positions, each with its topic's id."""
        entries = {tp: Entry(at, topic_id, self._run_of(tp.topic)) for tp, (at, topic_id) in first.items()}
        if not self.topics.by_topic:
            self.sink.adopt(entries)
            return
        for topic in sorted({tp.topic for tp in entries}):
            with self.topics.apart(topic):
                self._sink_of(topic).adopt({tp: entry for tp, entry in entries.items() if tp.topic == topic})

    def adopt_new(self, added: Collection[TopicPartition]) -> None:
        """Partitions added while running are read from their earliest offset, whatever the declared start."""
        if not added:
            return
        known = self.topics.partitions(self.log)
        new_topics = {tp.topic for tp in added} - self._topic_sinks.keys()
        self._open_topics(known, self.sink.entries())
        added = self.topics.going({tp: known[tp] for tp in added if tp in known})
        earliest = self.log.declared_start("earliest", added)
        entries = self.sink.entries()
        self._check_topics({tp: known[tp] for tp in earliest}, entries)
        if self.topics.by_topic and sinks.plugin_of(self._pipeline).ledger_by_topic:
            self._open_run([tp for tp in self.topics.going(known) if tp.topic in new_topics], None)
        self._adopt({tp: (at, known[tp]) for tp, at in earliest.items() if tp not in entries})
        for tp in sorted(self.topics.going({tp: known[tp] for tp in earliest})):
            self.positions[tp] = entries[tp].position if tp in entries else earliest[tp]
            self._observer.event(f"partition added: {tp.topic}/{tp.partition}")

    def release(self, partitions: Collection[TopicPartition], *, lost: bool = False) -> None:
        """They are no longer ours. ``lost``: another run may own them already, and then nothing more is published."""
        if partitions and not lost:
            # Waited for, so that no commit of ours comes after one of the next owner; not retried if Kafka is away.
            if self._collect(wait=True) and self._moved:
                self.publish_now()
            if self._unreported[0]:
                with suppress(AvowError):
                    self._report_progress()
        for tp in partitions:
            self.positions.pop(tp, None)
            self._counts.pop(tp, None)

    def refresh(self, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
        """Go by the ledger: a newer run has some of these, or all. Which those are; they are no longer ours."""
        entries = self.sink.entries()
        gone = [tp for tp in partitions if entries[tp].run > self._run_of(tp.topic)] or list(partitions)
        self.release(gone, lost=True)
        self.positions |= {tp: entries[tp].position for tp in partitions if tp in self.positions}
        self._counts |= {tp: entries[tp].counts for tp in partitions if tp in self.positions}
        return gone

    def keepalive(self) -> None:
        """To be called often, also when nothing comes: about hourly, positions that the sink would forget, because they
        do not change, are written anew."""
        if time.monotonic() - self._keepalive_at >= KEEPALIVE_EVERY_S:
            self._keepalive_at = time.monotonic()
            with suppress(SinkError):  # there is time for many more tries
                self.sink.keepalive()

    # Batches

    def deliver(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        execute: Callable[[BatchWork], Executed],
        isolation: Isolation,
        stop: threading.Event,
    ) -> None:
        """One batch: execute its ranges, commit what was staged, and move the positions. Where ranges have failed
        before, ``isolation`` cuts them into parts, and between two of them the run can be stopped."""
        started = time.monotonic()
        self._batch += 1
        for part in isolation.parts(ranges):
            if stop.is_set():
                return
            if self.topics.by_topic:
                self._deliver_topics(part, execute, isolation, started)
            else:
                with isolation.trying(part):
                    work = self._work(part)
                    try:
                        executed = execute(work)
                    except PositionGone:
                        check_topics(work, self.log)  # a ledger in a consumer group goes with its topic
                        raise
                    self._finish(work, self.sink, executed, started)
            started = time.monotonic()

    def _deliver_topics(
        self, part: BatchPart, execute: Callable[[BatchWork], Executed], isolation: Isolation, started: float
    ) -> None:
        """The same, with a table for each topic: what fails for one is done, or tried again, for the others."""
        part = replace(part, ranges={tp: r for tp, r in part.ranges.items() if tp.topic not in self.topics.stopped})
        if not part.ranges:
            return
        try:
            work = self._work(part)
            executed = execute(work)
        except Exception as error:  # noqa: BLE001 - of no topic's alone
            isolation.failed(part, error)
            return
        failures: list[Exception] = []
        for topic in sorted({tp.topic for tp in part.ranges}):
            own = work.for_topic(topic)
            try:
                with isolation.trying(replace(part, ranges=own.ranges)):
                    if topic in executed.failed:
                        raise executed.failed[topic]
                    self._finish(own, self._sink_of(topic), executed, started)
                    self.topics.delivered(topic)
                    started = time.monotonic()
            except TOPIC_STOPS as error:
                self._stop_topic(topic, error)
            except Exception as error:  # noqa: BLE001 - raised when the other topics are done
                if isinstance(own_error(error), ColumnsChanged):
                    self.topics.renew(topic)
                if not isinstance(error, OF_THE_RUN) and self.topics.failed(topic) > ATTEMPTS_WITHOUT_PROGRESS:
                    self._give_up(topic, last_word(translated(error), ATTEMPTS_WITHOUT_PROGRESS + 1))
                else:
                    failures.append(error)
        if failures:
            raise next((error for error in failures if isinstance(error, OF_THE_RUN)), failures[0])

    def _give_up(self, topic: str, error: AvowError) -> None:
        try:
            self._stop_topic(topic, error)
        except AvowError as stop:  # without a name of its own it would be tried again
            raise GaveUp(stop) from stop

    def _stop_topic(self, topic: str, error: AvowError) -> None:
        self.topics.stop(topic, error)
        for tp in [tp for tp in self.positions if tp.topic == topic]:
            del self.positions[tp]

    def _work(self, part: BatchPart) -> BatchWork:
        ranges = part.ranges
        topic_ids = {tp.topic: self._topic_ids[tp.topic] for tp in ranges}
        hooks = self._observer.hooks
        if not self.topics.by_topic:
            context = self.sink.task_context()
            return BatchWork(self._pipeline, self.run, self._batch, ranges, context, topic_ids, part.set_aside, hooks)
        topics = {
            topic: TopicWork(self.topics.part(topic), self._run_of(topic), self._sink_of(topic).task_context())
            for topic in topic_ids
        }
        return BatchWork(self._pipeline, self.run, self._batch, ranges, None, topic_ids, part.set_aside, hooks, topics)

    def _finish(self, work: BatchWork, sink: DriverSink, executed: Executed, started: float) -> None:
        """Commit what was staged of these ranges, and move their positions."""
        topics = {tp.topic for tp in work.ranges}
        task_outputs = [output for topic, output in executed.task_outputs if topic in topics]
        counts = executed.counts
        if task_outputs:
            assert isinstance(sink, CommittingSink)
            commit_task_outputs(task_outputs, work, sink)
        for tp, planned in work.ranges.items():
            self.positions[tp] = planned.until
        self.batches += 1
        self._moved = True
        offsets, seconds = self._unreported
        self._unreported = offsets + sum(map(len, work.ranges.values())), seconds + time.monotonic() - started
        if counts is None or task_outputs:  # a commit may have found some of it claimed already
            self._counted = False
        else:
            self._counts |= {
                tp: self._counts.get(tp, ledger.NOTHING) + new for tp, new in counts.items() if tp in work.ranges
            }

    # Publishing

    def publish(self) -> None:
        """To be called often, also when nothing comes: publishes what is due."""
        self._collect()
        now = time.monotonic()
        if now - self._published_at < PUBLISH_EVERY_S:
            return
        lag = now - self._lag_at >= LAG_EVERY_S
        if (
            self.positions
            and (self._moved or lag)
            and self._publisher.publish(self.positions, group=self._moved, lag=lag)
        ):
            self._moved = False
            self._lag_at = now if lag else self._lag_at
        if self._unreported[0] or self._lag()[0] != self._lag_reported:
            self._report_progress()
        self._published_at = now

    def _report_progress(self) -> None:
        if not self._counted:
            entries = self.sink.entries()
            self._counts = {tp: entries[tp].counts for tp in self.positions if tp in entries}
            self._counted = True
        lag = self._lag()
        counts = sum(self._counts.values(), ledger.NOTHING)
        self._observer.progress(Progress(self.run, max(0, self._batch), *self._unreported, counts, *lag))
        self._unreported, self._lag_reported = (0, 0.0), lag[0]

    def _lag(self) -> tuple[int, float | None]:
        """In records, as far as the log went when it was last asked; and the age of the oldest."""
        late = [end - at for tp, at in self.positions.items() if (end := self._ends.get(tp, at)) > at]
        return sum(late), time.time() - self._oldest if late and self._oldest is not None else None

    def publish_now(self) -> None:
        """Commit the positions to the consumer group, for lag tools, and wait for it. Best-effort: nothing reads them
        back."""
        self._collect(wait=True)
        self._moved = False
        self._publisher.publish(self.positions, group=True, lag=False)
        self._collect(wait=True)

    def _collect(self, *, wait: bool = False) -> bool:
        """The result of what the publisher did last. ``wait``: until it is done. False if it has failed."""
        match self._publisher.collect(wait=wait):
            case ConfigError() as error:  # it stays so: said once, and not asked again
                self._publisher.disable()
                self._observer.event(
                    f"offsets are not committed to consumer group {self._pipeline.name} (lag tools will not see them; "
                    f"delivery is not affected): {first_line(error)}. {error.advice}"
                )
                return False
            case SourceError() as error:
                self._moved = True
                self._observer.event(
                    f"could not commit offsets to consumer group {self._pipeline.name} (lag tools will show stale "
                    f"lag; delivery is not affected): {first_line(error)}"
                )
                return False
            case _Ends(ends, oldest):
                self._ends |= ends
                self._oldest = oldest
        return True


def _added_since(known: Mapping[TopicPartition, str], entries: Mapping[TopicPartition, Entry]) -> set[TopicPartition]:
    """Partitions without a position whose topic has one in the ledger: they were added since it was first read, and
    ``latest`` would pass over what they hold."""
    begun = {entry.topic_id for entry in entries.values()}
    return {tp for tp, topic_id in known.items() if tp not in entries and topic_id in begun}


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where the log ended, and when the oldest record was made that was not claimed by then."""

    ends: dict[TopicPartition, int]
    oldest: float | None


class _OffsetPublisher:
    """Commits offsets to the group and asks where the log ends, in a thread with clients of its own."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._pipeline = pipeline
        self._enabled = not sinks.plugin_of(pipeline).ledger_in_group
        self._log: Log | None = None
        self._thread = ThreadPoolExecutor(1, "offset-publisher")
        self._pending: Future[_Ends | None] | None = None

    def publish(self, positions: Mapping[TopicPartition, int], *, group: bool, lag: bool) -> bool:
        """Begin, unless it is still at it."""
        if self._pending is not None:
            return False
        self._pending = self._thread.submit(self._publish, dict(positions), group and self._enabled, lag)
        return True

    def disable(self) -> None:
        self._enabled = False

    def collect(self, *, wait: bool = False) -> _Ends | SourceError | ConfigError | None:
        """What came of it, once."""
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        try:
            return pending.result()
        except (SourceError, ConfigError) as error:
            return error

    def _publish(self, positions: dict[TopicPartition, int], group: bool, lag: bool) -> _Ends | None:
        self._log = self._log or Log(self._pipeline.source, self._pipeline.name, timeout_s=PUBLISH_TIMEOUT_S)
        try:
            if group:
                self._log.commit_offsets(positions)
        except (SourceError, ConfigError):
            self._close_log()
            raise
        try:
            return _ends(self._log, positions) if lag else None
        except (SourceError, ConfigError):
            self._close_log()
            return None

    def _close_log(self) -> None:
        """A client goes on asking the broker that it believes in charge: the next question has a new one."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def close(self) -> None:
        self._thread.shutdown()
        self._close_log()


def _ends(log: Log, positions: Mapping[TopicPartition, int]) -> _Ends:
    ends = log.stable_ends(positions)
    earliest = log.declared_start("earliest", positions)  # retention may have passed a position
    stamps = log.timestamps_at({tp: max(at, earliest[tp]) for tp, at in positions.items()}, ends)
    # Where no committed record follows, what is left are markers and aborted records: nothing waits.
    waiting = {tp: end if stamps[tp] is not None else positions[tp] for tp, end in ends.items()}
    known = [stamp for stamp in stamps.values() if stamp is not None and stamp != NO_TIMESTAMP]
    return _Ends(waiting, min(known) / 1000 if known else None)
