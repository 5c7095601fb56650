"""Pipelines as seen from outside: their files, their ledgers, and how far they are behind; looked at every few seconds.

A pipeline is known by its file. A thread looks at each in turn and keeps what it saw, for an hour: pages, metrics and
charts are made of that, so that a database or a broker that does not answer makes nobody wait. A look that failed takes
nothing away: what was seen last stays, with its time, and beside it stands what went wrong.

Owns: looking, and the memory of it. Must not know: pages. Neighbours: ``avow.sinks`` (``look``), ``avow.kafka.log``.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from avow import sinks
from avow.errors import AvowError, ConfigError, SourceError, first_line
from avow.kafka import groups
from avow.kafka.log import NO_TIMESTAMP, Log, TopicPartition
from avow.ledger import NOTHING, Counts, Entry
from avow.plan import load_checked
from avow.settings import PipelineConfig, Source
from avow.sinks.base import Claim

EVERY_S = 3.0
KEPT = 1_200  # an hour
RATE_OVER_S = 20.0
TREND_OVER_S = 60.0
FILES_MAX = 200
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Where:
    """One partition of a pipeline's source."""

    topic: str
    partition: int
    earliest: int
    stable_end: int
    end: int
    position: int | None  # None: nothing was claimed yet
    lag: int  # records, at most: markers and aborted ones in between are counted
    read: int
    written: int
    dead: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen of a pipeline at one moment."""

    at: float  # seconds since 1970
    took_s: float
    partitions: tuple[Where, ...] = ()
    lag_seconds: float | None = None  # the age of the oldest record that waits; None: none does, or it is not known
    lag_note: str = ""  # why the age is not known, if something waits
    processes: int | None = None  # that are members of the pipeline's group; None: not known
    run: int = 0
    last_claim: Claim | None = None

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.partitions)

    @property
    def counts(self) -> Counts:
        return sum((Counts(one.read, one.written, one.dead, one.skipped) for one in self.partitions), NOTHING)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a look saw nothing."""

    at: float  # seconds since 1970
    problem: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A sample as charts need it."""

    at: float
    read: int
    written: int
    dead: int
    lag: int
    lag_seconds: float | None  # None: not known


@dataclass(slots=True)
class Watched:
    """One pipeline file. ``pipeline`` is None if the file is refused."""

    file: Path
    name: str
    pipeline: PipelineConfig | None = None
    problem: str = ""
    looked_at: PipelineConfig | None = None  # what the sample and the points are of
    sample: Sample | None = None  # what was seen last
    trouble: Trouble | None = None  # of the last look, if it saw nothing
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=KEPT))
    moved_at: float | None = None  # when positions were seen to move
    still_since: float | None = None  # since when records wait and positions stand; None: they do not
    reads: frozenset[str] = frozenset()  # topics
    writes: frozenset[str] = frozenset()

    @property
    def rate(self) -> float | None:
        """Records a second, over the last while; None: not known yet."""
        return _slope([(one.at, one.read) for one in self.points], RATE_OVER_S)

    @property
    def trend(self) -> str:
        """What the lag does."""
        slope = _slope([(one.at, one.lag) for one in self.points], TREND_OVER_S)
        if slope is None:
            return ""
        return "rising" if slope > 0.5 else "falling" if slope < -0.5 else "steady"


def _slope(points: Sequence[tuple[float, int]], over_s: float) -> float | None:
    if len(points) < 2:
        return None
    at, now = points[-1]
    then, before = next(one for one in points if one[0] >= at - over_s)
    return (now - before) / (at - then) if at > then else None


class Watch:
    """Looks at the pipelines of files and folders until it is closed."""

    def __init__(
        self, given: Sequence[Path] = (), env: Mapping[str, str] | None = None, *, timeout_s: float = 4
    ) -> None:
        self._given = tuple(given)
        self._timeout_s = timeout_s  # of a question to Kafka
        self._env = env
        self._known: dict[Path, Watched] = {}
        self._logs: dict[Path, tuple[Source, str, Log]] = {}
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="avow-watch", daemon=True)
        self._reload()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._timeout_s)

    def pipelines(self) -> list[Watched]:
        with self._lock:
            return sorted(self._known.values(), key=lambda one: one.name)

    def find(self, name: str) -> Watched | None:
        return next((one for one in self.pipelines() if one.name == name), None)

    def groups(self) -> dict[str, str]:
        """The Kafka groups that belong to pipelines -> whose they are."""
        found: dict[str, str] = {}
        for one in self.pipelines():
            found |= {one.name: one.name, f"{one.name}.members": one.name}
        return found

    def look_now(self) -> None:
        """Look at all of them, here and now."""
        with self._looking:  # a log's clients are not for two at once
            self._reload()
            known = self.pipelines()
            for gone in self._logs.keys() - {one.file for one in known}:
                self._forget(gone)
            if known:
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(self._look, known))

    def _work(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self.look_now()
            self._wake.wait(max(0.5, EVERY_S - (time.monotonic() - began)))
        for file in list(self._logs):
            self._forget(file)

    # Files

    def _reload(self) -> None:
        files = list(_files(self._given))[:FILES_MAX]
        found: dict[Path, Watched] = {}
        for file, asked_for in files:
            old = self._known.get(file)
            name, pipeline, problem = self._load(file)
            if pipeline is None and not asked_for and not _looks_like_one(file):
                continue
            if old is not None and pipeline is not None and _another(old.looked_at, pipeline):
                old = None  # its positions and counts are none of this one's
            one = old or Watched(file, name)
            one.name, one.pipeline, one.problem = name, pipeline, problem
            one.reads = frozenset(pipeline.source.topics) if pipeline else frozenset()
            one.writes = sinks.plugin_of(pipeline).topics_written(pipeline) if pipeline else frozenset()
            found[file] = one
        with self._lock:
            self._known = found

    def _load(self, file: Path) -> tuple[str, PipelineConfig | None, str]:
        try:
            pipeline = load_checked(file) if self._env is None else load_checked(file, self._env)
        except AvowError as error:
            return file.stem, None, str(error)
        return pipeline.name, pipeline, ""

    # Looking

    def _look(self, one: Watched) -> None:
        if one.pipeline is None:
            return
        began, at = time.monotonic(), time.time()
        before = one.sample
        try:
            sample = self._seen(one, one.pipeline, at, began)
        except AvowError as error:
            one.trouble = Trouble(at, str(error), error.advice)
            return
        except Exception as error:  # noqa: BLE001 - a client of somebody else: it is told where people look
            one.trouble = Trouble(at, f"{type(error).__name__}: {first_line(error)}")
            return
        one.looked_at, one.sample, one.trouble = one.pipeline, sample, None
        if before is not None and before.counts != sample.counts:
            one.moved_at, one.still_since = sample.at, None
        one.still_since = (one.still_since or sample.at) if sample.lag else None
        one.reads = frozenset(where.topic for where in sample.partitions) or one.reads
        counts = sample.counts
        one.points.append(
            Point(
                *(sample.at, counts.read, counts.written, counts.dead, sample.lag),
                sample.lag_seconds if sample.lag else 0.0,
            )
        )

    def _seen(self, one: Watched, pipeline: PipelineConfig, at: float, began: float) -> Sample:
        with sinks.driver_sink(pipeline) as ledger:
            entries = {where: held.entry for where, held in ledger.look().items()}
            newest = ledger.claims(1)
        log = self._log(one.file, pipeline)
        try:
            there = log.partitions()
            offsets, stable = log.offsets(there), log.stable_ends(there)
            # What waits; without a position, all that is there does.
            next_up = {
                where: max(entries[where].position, offsets[where][0]) if where in entries else offsets[where][0]
                for where in there
            }
            stamps = log.timestamps_at(next_up, stable)
            processes = _processes(log, pipeline.name)
        except AvowError:
            self._forget(one.file)  # it may be stuck
            raise
        waiting = [stamp for stamp in stamps.values() if stamp is not None]
        known = [stamp for stamp in waiting if stamp != NO_TIMESTAMP]
        return Sample(
            at=at,
            took_s=time.monotonic() - began,
            partitions=tuple(
                _where(where, entries.get(where), offsets[where], stable[where], stamps[where]) for where in there
            ),
            lag_seconds=max(0.0, at - min(known) / 1000) if known else None,
            lag_note="the oldest record that waits has no timestamp" if waiting and not known else "",
            processes=processes,
            run=max((entry.run for entry in entries.values()), default=0),
            last_claim=newest[0] if newest else None,
        )

    def _log(self, file: Path, pipeline: PipelineConfig) -> Log:
        """The file's own, made anew when the file names another cluster, other topics or another name."""
        kept = self._logs.get(file)
        if kept is not None and kept[:2] != (pipeline.source, pipeline.name):
            self._forget(file)
            kept = None
        if kept is None:
            log = Log(pipeline.source, pipeline.name, timeout_s=self._timeout_s)
            kept = self._logs[file] = (pipeline.source, pipeline.name, log)
        return kept[2]

    def _forget(self, file: Path) -> None:
        self._logs.pop(file)[2].close()


def _another(seen: PipelineConfig | None, now: PipelineConfig) -> bool:
    """Whether a file that was changed names another ledger or another log."""
    return seen is not None and (seen.name, seen.source, seen.sink) != (now.name, now.source, now.sink)


def _processes(log: Log, name: str) -> int | None:
    """How many processes of the consumer engine run; None where nobody says it. Those of Spark join no group."""
    try:
        (members,) = groups.describe(log, [f"{name}.members"])
    except (SourceError, ConfigError):
        return None
    return len(members.members)


def _where(
    where: TopicPartition, entry: Entry | None, offsets: tuple[int, int], stable: int, stamp: int | None
) -> Where:
    first, end = offsets
    counts = entry.counts if entry else NOTHING
    # Where no committed record follows, what is left are markers: nothing waits.
    lag = stable - (max(entry.position, first) if entry else first) if stamp is not None else 0
    return Where(
        topic=where.topic,
        partition=where.partition,
        earliest=first,
        stable_end=stable,
        end=max(end, stable),
        position=entry.position if entry else None,
        lag=lag,
        read=counts.read,
        written=counts.written,
        dead=counts.dead,
        skipped=counts.skipped,
    )


def _files(given: Iterable[Path]) -> Iterable[tuple[Path, bool]]:
    """Every file, and whether it was named itself."""
    for path in given:
        if path.is_dir():
            yield from ((file, False) for file in sorted(path.glob("*.toml")))
        else:
            yield path, True


def _looks_like_one(file: Path) -> bool:
    """Whether a file that is refused was meant as a pipeline: a folder may hold others."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return {"name", "guarantee", "source"} <= found.keys()
