"""What the driver of every engine does around its batches: begin from the ledger, commit, publish, and begin anew.

Theory of operation
-------------------
A run is made of attempts. Each opens the sink and the log, takes a run's number and asks ``ledger.plan_start`` about
every partition it is to read. Then it delivers batches: an engine plans their ranges and executes them, and
``Driver.deliver`` does the rest, the same for every engine. A failure that may pass (a broker, the database, a worker)
ends the attempt, and another starts from the ledger, with back-off and a bound. A named stop ends the run.

What is told, to the Kafka group and to whoever watches, is a courtesy. A thread of its own talks to Kafka for it, and
not for long: no batch waits for a broker that is away, and no end of a run does. Counts come from the tasks' reports;
the ledger is read for them only where it is at hand anyway, or where nobody else knows.

Owns: positions, and what is told of them. Must not know: where batches come from, how a sink writes. Neighbours:
``spark`` and ``consumer`` (which plan and execute batches), ``task`` (what is done with a range), ``ledger`` (the
rules).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from avow import ledger, sinks
from avow.engines.causes import trace, translated
from avow.engines.columns import Columns
from avow.engines.isolation import Isolation, Part
from avow.engines.progress import Observer, Progress
from avow.engines.task import Work, commit_staged
from avow.errors import (
    AvowError,
    ConfigError,
    LogTruncated,
    NotDrained,
    ProtocolViolation,
    RetentionLoss,
    SinkError,
    SourceError,
    Superseded,
    TooManyDeadLetters,
    TopicRecreated,
    first_line,
)
from avow.kafka.log import NO_TIMESTAMP, Log, TopicPartition
from avow.ledger import Counts, Entry, OffsetRange, Start
from avow.settings import PipelineConfig
from avow.sinks.base import GIVEN_UP_BATCH, CommittingSink, DriverSink, Remarking

LOGGER = logging.getLogger("avow.engines")  # traces: silent unless somebody listens

ATTEMPTS_WITHOUT_PROGRESS = 8
BACK_OFF_S = (0.5, 1, 2, 5, 10, 20, 30)
LAG_EVERY_S = 5.0  # how often the log is asked where it ends
TELL_EVERY_S = 1.0
TELL_S = 3.0  # for one telling, or one question about lag
KEEP_EVERY_S = 3600.0

# What ends a run for good. Anything else may pass, and is tried again.
STOPS: dict[str, type[AvowError]] = {
    stop.__name__: stop
    for stop in (
        ConfigError,
        LogTruncated,
        ProtocolViolation,
        RetentionLoss,
        Superseded,
        TooManyDeadLetters,
        TopicRecreated,
    )
}


# What the tasks of a batch staged, where the commit is the driver's; and what became of each range, if that is known.
Executed = tuple[Sequence[object], Mapping[TopicPartition, Counts] | None]


class Attempt(Protocol):
    """From the ledger to the first failure."""

    driver: Driver

    def execute(self) -> bool:
        """Whether it ended by itself, with everything drained; not if it was stopped."""

    def close(self) -> None: ...


def attempts(
    make: Callable[[], Attempt],
    stop: threading.Event,
    observer: Observer,
    look: Callable[[Exception], None] = lambda _: None,
) -> bool:
    """Try until it is done (True), stopped (False), or hopeless. Whatever is raised may pass, unless it is a named
    stop; ``look`` may find that a failure will not pass, and raise."""
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
        except Exception as failure:
            LOGGER.debug("an attempt failed\n%s", trace(failure))
            look(failure)
            error = translated(failure)
            if type(error).__name__ in STOPS:  # of a Spark task, outside of what reports stops
                raise error from failure
            failures = 1 if progressed else failures + 1
            if failures > ATTEMPTS_WITHOUT_PROGRESS:
                raise _last_word(error, failures) from failure
            pause = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            observer.event(f"failed ({first_line(error)}); trying again from the ledger in {pause:g} s")
            stop.wait(pause)
    return False


def not_drained(pipeline: PipelineConfig) -> NotDrained:
    return NotDrained(
        f"pipeline {pipeline.name} was stopped before it had drained its topics: records are left that were there when "
        "it started",
        advice="Nothing failed. Run it again: it continues from the ledger.",
    )


def _last_word(error: AvowError, failures: int) -> AvowError:
    return type(error)(
        f"gave up after {failures} attempts without progress: {first_line(error)}",
        advice=error.advice
        or "The ledger is whole: start again when the cause is fixed. --verbose shows the whole trace.",
    )


def prepare_table(store: DriverSink, pipeline: PipelineConfig, columns: Columns, observer: Observer) -> None:
    """Before the first attempt: make or check where rows go, and log what there is to say of it."""
    if store.prepare_table(columns[0], rest=columns[1]):
        observer.event(f"made {pipeline.sink.target}")
    for remark in store.remarks if isinstance(store, Remarking) else ():
        observer.event(remark)


def remark_new_ledger(
    store: DriverSink, log: Log, known: Collection[TopicPartition], pipeline: PipelineConfig, observer: Observer
) -> None:
    """Where the sink has no position of this pipeline and its consumer group has: it has written elsewhere before. A
    lake's ledger is in its table, so another table cannot tell; a start over on purpose looks the same, and goes on."""
    if sinks.plugin_of(pipeline).ledger_in_group or store.look():
        return
    with suppress(AvowError):  # the offsets of the group are a hint: no start fails for it
        found = {where: offset for where, offset in log.told(known).items() if offset}
        if found:
            where, offset = min(found.items())
            observer.event(
                f"{pipeline.sink.target} has no position of pipeline {pipeline.name}, but consumer group "
                f"{pipeline.name} has committed offsets in {len(found)} partitions ({where} at {offset}): the pipeline "
                "has written to another place before. It begins here at source.start, and the rows of before stay "
                "there. If the sink was renamed by mistake, stop, name the old one again, and remove this one"
            )


class Driver:
    """One attempt's positions. They are told about once a second, beside the batches, none of which waits for it."""

    def __init__(self, pipeline: PipelineConfig, observer: Observer) -> None:
        self._pipeline = pipeline
        self._observer = observer
        self.store = sinks.driver_sink(pipeline)
        self.log = Log(pipeline.source, pipeline.name)
        self.positions: dict[TopicPartition, int] = {}  # where the next planned range starts
        self._topic_ids: dict[str, str] = {}  # of the topics that are read, as they were when that began
        self.run = 0
        self.batches = 0
        self._batch = -1  # the newest one's number
        self._counts: dict[TopicPartition, Counts] = {}  # over the pipeline's life, in our partitions
        self._counted = True  # else the ledger is to be asked
        self._kept_at = time.monotonic()
        self._teller = _Teller(pipeline)
        self._moved = False  # positions that the group was not told
        self._untold = (0, 0.0)  # offsets and seconds of batches since the last progress
        self._told_at = self._lag_at = float("-inf")
        self._ends: dict[TopicPartition, int] = {}  # where the log ended when it was last asked
        self._oldest: float | None = None  # when the oldest record was made that was not claimed then
        self._lag_told = 0

    def close(self) -> None:
        self.release(list(self.positions))
        self._teller.close()
        self.store.close()
        self.log.close()

    # Positions

    def prepare(self, columns: Columns) -> None:
        """The table may have been altered since it was last looked at."""
        self.store.prepare_table(columns[0], rest=columns[1])

    def begin(
        self, partitions: Collection[TopicPartition] | None = None, added: Collection[TopicPartition] = ()
    ) -> None:
        """Take a run's number, fence older ones, and find where to begin: in all partitions, or in those that have
        become ours. First positions are written before anything is read. What was ``added`` while running begins at
        its earliest offset, whatever the declared start."""
        known = self.log.partitions()
        if partitions is not None:
            known = {where: known[where] for where in partitions if where in known}
        entries = {where: held.entry for where, held in self.store.look().items()}
        if partitions is None:
            added = _added_since(known, entries)
        # What refuses this start does so before it fences: a healthy run beside it goes on. Then the older runs are
        # fenced, which can move positions no more, and the rules are asked again.
        self._planned(known, added, entries)
        self.run = self.store.open_run(partitions)
        self._observer.began(self.run, entries)
        self.positions |= self._starts(known, added)
        self._topic_ids |= {where.topic: topic_id for where, topic_id in known.items()}
        self._observer.event(
            f"run {self.run} of {self._pipeline.name}: {self._pipeline.guarantee}, {len(known)} partitions, from the "
            "ledger"
        )
        self._moved = True
        self._lag_told = self._lag()[0]
        if self._teller.tell(self.positions, group=False, lag=True):  # else the first lag shown has no age
            self._lag_at = time.monotonic()

    def _planned(
        self,
        known: Mapping[TopicPartition, str],
        added: Collection[TopicPartition],
        entries: Mapping[TopicPartition, Entry],
    ) -> dict[TopicPartition, Start]:
        """Ask the rules about every partition. Nothing is changed."""
        source = self._pipeline.source
        fresh = {where for where in known if not entries.get(where)}
        by_offset = isinstance(source.start, Mapping)
        from_earliest = set() if by_offset else fresh & set(added)
        # In this order: the log only grows, so its end, asked later, does not lie before a declared ``latest``. Its
        # beginning moves on as well, by retention, and a start that was not declared as an offset moves with it.
        declared = self.log.declared_start(source.start, fresh - from_earliest)
        declared |= self.log.declared_start("earliest", from_earliest)
        views = self.log.view({where: entries.get(where) for where in known})
        if not by_offset:
            declared = {where: max(offset, views[where].earliest) for where, offset in declared.items()}
        self._counts |= {where: entry.counts for where in known if (entry := entries.get(where))}
        self._ends |= {where: views[where].end for where in known}
        return {
            where: ledger.plan_start(
                entries.get(where), views[where], declared.get(where, 0), skip_lost=source.on_data_loss == "skip"
            )
            for where in known
        }

    def _starts(
        self, known: Mapping[TopicPartition, str], added: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Where to begin, with first positions written."""
        starts = self._planned(known, added, self.store.entries())
        self.store.adopt({w: Entry(start.position, known[w], self.run) for w, start in starts.items() if start.adopted})
        for where, start in starts.items():
            if start.given_up:
                lost = Counts(read=len(start.given_up), skipped=len(start.given_up))
                self.store.claim(start.given_up, self.run, GIVEN_UP_BATCH, lost)
                self._counts[where] += lost
                self._observer.event(f"retention-loss: {start.given_up} is claimed as skipped, as declared")
        return {where: start.position for where, start in starts.items()}

    def adopt_new(self, found: Collection[TopicPartition]) -> None:
        """Partitions added while running are read from their earliest offset, whatever the declared start."""
        if not found:
            return
        known = self.log.partitions()
        for where in found:
            topic_id = self._topic_ids.setdefault(where.topic, known[where])
            ledger.check_topic(f"{where.topic} is read", topic_id, known[where])
        earliest = self.log.declared_start("earliest", found)
        entries = self.store.entries()
        fresh = {where: Entry(earliest[where], known[where], self.run) for where in found if where not in entries}
        self.store.adopt(fresh)
        for where in sorted(found):
            self.positions[where] = entries[where].position if where in entries else earliest[where]
            self._observer.event(f"partition added: {where.topic}/{where.partition}")

    def release(self, partitions: Collection[TopicPartition], *, lost: bool = False) -> None:
        """They are no longer ours, and what is told of them neither. ``lost``: somebody else may have them already, and
        the last word is theirs."""
        if partitions and not lost:
            # Waited for, so that none of our tellings comes after somebody else's; not tried again if Kafka is away.
            if self._hear(wait=True) and self._moved:
                self.tell_group()
            if self._untold[0]:
                with suppress(AvowError):
                    self._show()
        for where in partitions:
            self.positions.pop(where, None)
            self._counts.pop(where, None)

    def reread(self, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
        """Go by the ledger: a newer run has some of these, or all. Which those are; they are no longer ours."""
        entries = self.store.entries()
        gone = [where for where in partitions if entries[where].run > self.run] or list(partitions)
        self.release(gone, lost=True)
        self.positions |= {where: entries[where].position for where in partitions if where in self.positions}
        self._counts |= {where: entries[where].counts for where in partitions if where in self.positions}
        return gone

    def keep(self) -> None:
        """To be called often, also when nothing comes: about hourly, positions that the sink would forget, because they
        do not change, are written anew."""
        if time.monotonic() - self._kept_at >= KEEP_EVERY_S:
            self._kept_at = time.monotonic()
            with suppress(SinkError):  # there is time for many more tries
                self.store.keepalive()

    # Batches

    def deliver(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        execute: Callable[[Work], Executed],
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
            with isolation.trying(part):
                work = self._work(part)
                staged, counts = execute(work)
                self._finish(work, staged, counts, started)
            started = time.monotonic()

    def _work(self, part: Part) -> Work:
        ranges = part.ranges
        topic_ids = {where.topic: self._topic_ids[where.topic] for where in ranges}
        context, hooks = self.store.task_context(), self._observer.hooks
        return Work(self._pipeline, self.run, self._batch, ranges, context, topic_ids, part.set_aside, hooks)

    def _finish(
        self, work: Work, staged: Sequence[object], counts: Mapping[TopicPartition, Counts] | None, started: float
    ) -> None:
        """``counts``: what became of each range, where no attempt can have done it whose report is lost."""
        if staged:
            assert isinstance(self.store, CommittingSink)
            commit_staged(staged, work, self.store)
        for where, planned in work.ranges.items():
            self.positions[where] = planned.until
        self.batches += 1
        self._moved = True
        offsets, seconds = self._untold
        self._untold = offsets + sum(map(len, work.ranges.values())), seconds + time.monotonic() - started
        if counts is None or staged:  # a commit may have found some of it claimed already
            self._counted = False
        else:
            self._counts |= {where: self._counts.get(where, ledger.NOTHING) + new for where, new in counts.items()}

    # Telling

    def tell(self) -> None:
        """To be called often, also when nothing comes: tells what is untold, if it is time."""
        self._hear()
        now = time.monotonic()
        if now - self._told_at < TELL_EVERY_S:
            return
        lag = now - self._lag_at >= LAG_EVERY_S
        if self.positions and (self._moved or lag) and self._teller.tell(self.positions, group=self._moved, lag=lag):
            self._moved = False
            self._lag_at = now if lag else self._lag_at
        if self._untold[0] or self._lag()[0] != self._lag_told:
            self._show()
        self._told_at = now

    def _show(self) -> None:
        if not self._counted:
            entries = self.store.entries()
            self._counts = {where: entries[where].counts for where in self.positions if where in entries}
            self._counted = True
        lag = self._lag()
        counts = sum(self._counts.values(), ledger.NOTHING)
        self._observer.progress(Progress(self.run, max(0, self._batch), *self._untold, counts, *lag))
        self._untold, self._lag_told = (0, 0.0), lag[0]

    def _lag(self) -> tuple[int, float | None]:
        """In records, as far as the log went when it was last asked; and the age of the oldest."""
        late = [end - at for where, at in self.positions.items() if (end := self._ends.get(where, at)) > at]
        return sum(late), time.time() - self._oldest if late and self._oldest is not None else None

    def tell_group(self) -> None:
        """Let lag tools see the positions, and wait for it. It is a courtesy: the truth is in the ledger."""
        self._hear(wait=True)
        self._moved = False
        self._teller.tell(self.positions, group=True, lag=False)
        self._hear(wait=True)

    def _hear(self, *, wait: bool = False) -> bool:
        """What the teller has to say. ``wait``: until it is done. False if it has failed."""
        match self._teller.heard(wait=wait):
            case ConfigError() as error:  # it stays so: said once, and not asked again
                self._teller.stop_telling()
                self._observer.event(
                    f"offsets are not committed to consumer group {self._pipeline.name} (lag tools will not see them; "
                    f"delivery is not affected): {first_line(error)}. {error.advice}"
                )
                return False
            case SourceError() as error:
                self._moved = True
                self._observer.event(f"the group could not be told its positions: {first_line(error)}")
                return False
            case _Ends(ends, oldest):
                self._ends |= ends
                self._oldest = oldest
        return True


def _added_since(known: Mapping[TopicPartition, str], entries: Mapping[TopicPartition, Entry]) -> set[TopicPartition]:
    """Partitions without a position whose topic has one in the ledger: they were added since it was first read, and
    ``latest`` would pass over what they hold."""
    begun = {entry.topic_id for entry in entries.values()}
    return {where for where, topic_id in known.items() if where not in entries and topic_id in begun}


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where the log ended, and when the oldest record was made that was not claimed by then."""

    ends: dict[TopicPartition, int]
    oldest: float | None


class _Teller:
    """Tells the group its positions and looks where the log ends, in a thread with clients of its own."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._pipeline = pipeline
        self._tells = not sinks.plugin_of(pipeline).ledger_in_group
        self._log: Log | None = None
        self._thread = ThreadPoolExecutor(1, "teller")
        self._telling: Future[_Ends | None] | None = None

    def tell(self, positions: Mapping[TopicPartition, int], *, group: bool, lag: bool) -> bool:
        """Begin, unless it is still at it."""
        if self._telling is not None:
            return False
        self._telling = self._thread.submit(self._tell, dict(positions), group and self._tells, lag)
        return True

    def stop_telling(self) -> None:
        self._tells = False

    def heard(self, *, wait: bool = False) -> _Ends | SourceError | ConfigError | None:
        """What came of it, once."""
        if self._telling is None or not (wait or self._telling.done()):
            return None
        telling, self._telling = self._telling, None
        try:
            return telling.result()
        except (SourceError, ConfigError) as error:
            return error

    def _tell(self, positions: dict[TopicPartition, int], group: bool, lag: bool) -> _Ends | None:
        self._log = self._log or Log(self._pipeline.source, self._pipeline.name, timeout_s=TELL_S)
        try:
            if group:
                self._log.tell(positions)
        except (SourceError, ConfigError):
            self._let_go()
            raise
        try:
            return _ends(self._log, positions) if lag else None
        except (SourceError, ConfigError):
            self._let_go()
            return None

    def _let_go(self) -> None:
        """A client goes on asking the broker that it believes in charge: the next question has a new one."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def close(self) -> None:
        self._thread.shutdown()
        self._let_go()


def _ends(log: Log, positions: Mapping[TopicPartition, int]) -> _Ends:
    ends = log.stable_ends(positions)
    earliest = log.declared_start("earliest", positions)  # retention may have passed a position
    stamps = log.timestamps_at({where: max(at, earliest[where]) for where, at in positions.items()}, ends)
    # Where no committed record follows, what is left are markers and aborted records: nothing waits.
    waiting = {where: end if stamps[where] is not None else positions[where] for where, end in ends.items()}
    known = [stamp for stamp in stamps.values() if stamp is not None and stamp != NO_TIMESTAMP]
    return _Ends(waiting, min(known) / 1000 if known else None)
