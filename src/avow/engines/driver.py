"""What the driver of every engine does around its batches: begin from the ledger, commit, tell, and begin anew.

Theory of operation
-------------------
A run is made of attempts. Each opens the sink and the log, takes a run's number and asks ``ledger.plan_start`` about
every partition it is to read. A failure that may pass (a broker, the database, a worker) ends the attempt, and another
starts from the ledger, with back-off and a bound. A named stop ends the run.

Owns: positions, and what is told of them. Must not know: where batches come from, how a sink writes. Neighbours:
``spark`` and ``consumer`` (who make batches), ``task`` (what is done with a range), ``ledger`` (the rules).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from avow import ledger, sinks
from avow.engines.columns import Columns
from avow.engines.progress import Observer, Progress
from avow.engines.task import Work, commit_staged
from avow.errors import (
    AvowError,
    ConfigError,
    LogTruncated,
    ProtocolViolation,
    RetentionLoss,
    SourceError,
    Superseded,
    TooManyDeadLetters,
    TopicRecreated,
    first_line,
)
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.settings import Pipeline
from avow.sinks.base import GIVEN_UP_BATCH, CommittingSink

ATTEMPTS_WITHOUT_PROGRESS = 8
BACK_OFF_S = (0.5, 1, 2, 5, 10, 20, 30)
LAG_EVERY_S = 1.0

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


class Attempt(Protocol):
    """From the ledger to the first failure."""

    driver: Driver

    def execute(self) -> None: ...

    def close(self) -> None: ...


def attempts(
    make: Callable[[], Attempt],
    stop: threading.Event,
    observer: Observer,
    passing: tuple[type[Exception], ...],
    look: Callable[[Exception], None] = lambda _: None,
) -> None:
    """Try until it is done, stopped, or hopeless. ``look`` may find that a failure of the ``passing`` kinds will not
    pass, and raise."""
    failures = 0
    while not stop.is_set():
        progressed = False
        try:
            # Opening one may fail as well: the database that ended the last attempt may not be back yet.
            attempt = make()
            try:
                attempt.execute()
                return
            finally:
                progressed = attempt.driver.batches > 0
                attempt.close()
        except tuple(STOPS.values()):
            raise
        except passing as error:
            look(error)
            failures = 1 if progressed else failures + 1
            if failures > ATTEMPTS_WITHOUT_PROGRESS:
                raise _last_word(error, failures) from error
            pause = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            observer.event(f"failed ({first_line(error)}); trying again from the ledger in {pause:g} s")
            stop.wait(pause)


def _last_word(error: Exception, failures: int) -> AvowError:
    kind = type(error) if isinstance(error, AvowError) else SourceError
    return kind(
        f"gave up after {failures} attempts without progress: {first_line(error)}",
        advice=getattr(error, "advice", "") or "The ledger is whole: start again when the cause is mended.",
    )


class Driver:
    """One attempt's positions. ``tell_every_s`` bounds how often they are told; 0 is after every batch."""

    def __init__(self, pipeline: Pipeline, observer: Observer, *, tell_every_s: float = 0) -> None:
        self._pipeline = pipeline
        self._observer = observer
        self._tell_every_s = tell_every_s
        self.store = sinks.driver_sink(pipeline)
        self.log = Log(pipeline.source, pipeline.name)
        self.positions: dict[TopicPartition, int] = {}  # where the next planned range starts
        self.run = 0
        self.batches = 0
        self._lag: tuple[int, float | None] = (0, None)
        self._lag_at = 0.0
        self._told_at = 0.0
        self._untold = (0, 0.0)  # offsets and seconds of batches since then

    def close(self) -> None:
        self.release(list(self.positions))
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
        self.run = self.store.open_run(partitions)
        known = self.log.partitions()
        if partitions is not None:
            known = {where: known[where] for where in partitions if where in known}
        self.positions |= self._starts(known, added)
        self._observer.event(
            f"run {self.run} of {self._pipeline.name}: {self._pipeline.guarantee}, {len(known)} partitions, from the "
            "ledger"
        )
        self.tell_group()

    def _starts(
        self, known: Mapping[TopicPartition, str], added: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Ask the rules about every partition."""
        source = self._pipeline.source
        entries: dict[TopicPartition, Entry | None] = dict(self.store.entries())
        views = self.log.view({where: entries.get(where) for where in known})
        fresh = {where for where in known if not entries.get(where)}
        declared = self.log.declared_start(source.start, fresh - set(added))
        declared |= self.log.declared_start("earliest", fresh & set(added))
        starts = {
            where: ledger.plan_start(
                entries.get(where), views[where], declared.get(where, 0), skip_lost=source.on_data_loss == "skip"
            )
            for where in known
        }
        self.store.adopt({w: Entry(start.position, known[w], self.run) for w, start in starts.items() if start.adopted})
        for start in starts.values():
            if start.given_up:
                lost = len(start.given_up)
                self.store.claim(start.given_up, self.run, GIVEN_UP_BATCH, Counts(read=lost, skipped=lost))
                self._observer.event(f"retention-loss: {start.given_up} is claimed as skipped, as declared")
        return {where: start.position for where, start in starts.items()}

    def adopt_new(self, found: Collection[TopicPartition]) -> None:
        """Partitions added while running are read from their earliest offset, whatever the declared start."""
        if not found:
            return
        known = self.log.partitions()
        earliest = self.log.declared_start("earliest", found)
        entries = self.store.entries()
        fresh = {where: Entry(earliest[where], known[where], self.run) for where in found if where not in entries}
        self.store.adopt(fresh)
        for where in sorted(found):
            self.positions[where] = entries[where].position if where in entries else earliest[where]
            self._observer.event(f"partition added: {where.topic}/{where.partition}")

    def release(self, partitions: Collection[TopicPartition]) -> None:
        """They are no longer ours."""
        if any(self._untold) and partitions:
            self.tell_group()
        for where in partitions:
            self.positions.pop(where, None)

    # Batches

    def work(self, batch: int, ranges: Mapping[TopicPartition, OffsetRange]) -> Work:
        return Work(self._pipeline, self.run, batch, ranges, self.store.brief())

    def finish(self, work: Work, staged: Sequence[bytes], started: float) -> None:
        """All ranges of a batch are delivered, or staged: commit these, and tell."""
        if staged:
            assert isinstance(self.store, CommittingSink)
            commit_staged(staged, work, self.store)
        for where, planned in work.ranges.items():
            self.positions[where] = planned.until
        self.batches += 1
        now = time.monotonic()
        offsets, seconds = self._untold
        self._untold = offsets + sum(map(len, work.ranges.values())), seconds + now - started
        if now - self._told_at >= self._tell_every_s:
            self.tell_group()
            self._tell_progress(work.batch)
            self._untold, self._told_at = (0, 0.0), time.monotonic()

    # Telling

    def tell_group(self) -> None:
        """Let lag tools see the positions. It is a courtesy: the truth is in the ledger."""
        if sinks.SINKS[self._pipeline.sink.kind].ledger_in_group:
            return
        try:
            self.log.tell(self.positions)
        except SourceError as error:
            self._observer.event(f"the group could not be told its positions: {first_line(error)}")

    def _tell_progress(self, batch: int) -> None:
        now = time.monotonic()
        if now - self._lag_at > LAG_EVERY_S:
            with suppress(SourceError):
                self._lag = self._measure_lag()
            self._lag_at = now
        counts = sum((entry.counts for entry in self.store.entries().values()), ledger.NOTHING)
        self._observer.progress(Progress(self.run, batch, *self._untold, counts, *self._lag))

    def _measure_lag(self) -> tuple[int, float | None]:
        """In records, and in seconds: the age of the oldest record that is not claimed."""
        ends = self.log.stable_ends(self.positions)
        behind = {where: position for where, position in self.positions.items() if position < ends[where]}
        records = sum(ends[where] - position for where, position in behind.items())
        stamps = [stamp for stamp in self.log.timestamps_at(behind).values() if stamp is not None]
        return records, time.time() - min(stamps) / 1000 if stamps else None
