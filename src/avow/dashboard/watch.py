"""Samples of every pipeline, taken every few seconds by a background thread: positions, counts and lag.

A pipeline is known by its file. Samples of the last hour are kept; pages, metrics and charts are made of them, so that
no request waits for a database or a broker that does not answer. If a sample fails, the last good one stays, with its
time and the failure beside it.

Owns: sampling and the samples. Must not know: pages. Neighbours: ``avow.sinks`` (the ledger), ``avow.kafka.log``.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from avow import sinks
from avow.errors import AvowError, ConfigError, RegistryUnavailable, SourceError, first_line
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
class PartitionSample:
    """One partition of a pipeline's source, in a sample."""

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
    """The state of a pipeline at one moment."""

    at: float  # seconds since 1970
    partitions: tuple[PartitionSample, ...] = ()
    lag_seconds: float | None = None  # the age of the oldest record that waits; None: none does, or it is not known
    lag_note: str = ""  # why the age is not known, if something waits
    processes: int | None = None  # that are members of the pipeline's group; None: not known
    run: int = 0
    last_claim: Claim | None = None

    @property
    def lag(self) -> int:
        return sum(partition.lag for partition in self.partitions)

    @property
    def counts(self) -> Counts:
        return sum((Counts(p.read, p.written, p.dead, p.skipped) for p in self.partitions), NOTHING)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample could not be taken."""

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
class WatchedPipeline:
    """One pipeline file. ``pipeline`` is None if the file is refused."""

    file: Path
    name: str
    pipeline: PipelineConfig | None = None
    problem: str = ""
    sampled: PipelineConfig | None = None  # what the sample and the points are of
    sample: Sample | None = None  # what was seen last
    failure: Failure | None = None  # of the last look, if it saw nothing
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=KEPT))
    moved_at: float | None = None  # when positions were seen to move
    waiting_since: float | None = None  # since when records wait and positions stand; None: they do not
    reads: frozenset[str] = frozenset()  # topics
    writes: frozenset[str] = frozenset()

    @property
    def rate(self) -> float | None:
        """Records a second, over the last while; None: not known yet."""
        return _slope([(point.at, point.read) for point in self.points], RATE_OVER_S)

    @property
    def trend(self) -> str:
        """What the lag does."""
        slope = _slope([(point.at, point.lag) for point in self.points], TREND_OVER_S)
        if slope is None:
            return ""
        return "rising" if slope > 0.5 else "falling" if slope < -0.5 else "steady"


def _slope(points: Sequence[tuple[float, int]], over_s: float) -> float | None:
    if len(points) < 2:
        return None
    at, now = points[-1]
    then, before = next(point for point in points if point[0] >= at - over_s)
    return (now - before) / (at - then) if at > then else None


class Watch:
    """Samples the pipelines of files and folders until it is closed."""

    def __init__(
        self, paths: Sequence[Path] = (), env: Mapping[str, str] | None = None, *, timeout_s: float = 4
    ) -> None:
        self._given = tuple(paths)
        self._timeout_s = timeout_s  # of a request to Kafka, and of a query to the sink
        self._env = env
        self._known: dict[Path, WatchedPipeline] = {}
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

    def pipelines(self) -> list[WatchedPipeline]:
        with self._lock:
            return sorted(self._known.values(), key=lambda watched: watched.name)

    def find(self, name: str) -> WatchedPipeline | None:
        return next((watched for watched in self.pipelines() if watched.name == name), None)

    def groups(self) -> dict[str, str]:
        """The Kafka groups that belong to pipelines -> whose they are."""
        owners: dict[str, str] = {}
        for watched in self.pipelines():
            owners |= {watched.name: watched.name, f"{watched.name}.members": watched.name}
        return owners

    def sample_now(self) -> None:
        """Sample all of them in this thread."""
        with self._looking:  # a log's clients are not for two at once
            self._reload()
            known = self.pipelines()
            for file in self._logs.keys() - {watched.file for watched in known}:
                self._forget(file)
            if known:
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(self._refresh, known))

    def _work(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self.sample_now()
            self._wake.wait(max(0.5, EVERY_S - (time.monotonic() - began)))
        for file in list(self._logs):
            self._forget(file)

    # Files

    def _reload(self) -> None:
        files = list(_files(self._given))[:FILES_MAX]
        current: dict[Path, WatchedPipeline] = {}
        for file, asked_for in files:
            old = self._known.get(file)
            name, pipeline, problem = self._load(file)
            if pipeline is None and not asked_for and not _looks_like_pipeline(file):
                continue
            if old is not None and pipeline is not None and _is_another(old.sampled, pipeline):
                old = None  # its positions and counts are none of this one's
            watched = old or WatchedPipeline(file, name)
            watched.name, watched.pipeline, watched.problem = name, pipeline, problem
            watched.reads = frozenset(pipeline.source.topics) if pipeline else frozenset()
            watched.writes = sinks.plugin_of(pipeline).topics_written(pipeline) if pipeline else frozenset()
            current[file] = watched
        with self._lock:
            self._known = current

    def _load(self, file: Path) -> tuple[str, PipelineConfig | None, str]:
        try:
            pipeline = load_checked(file) if self._env is None else load_checked(file, self._env)
        except RegistryUnavailable as error:
            before = self._known.get(file)  # the file is as good as before
            return (file.stem, None, str(error)) if before is None else (before.name, before.pipeline, "")
        except AvowError as error:
            return file.stem, None, str(error)
        sink = pipeline.sink.with_timeout(self._timeout_s)
        return pipeline.name, pipeline.model_copy(update={"sink": sink}), ""

    # Looking

    def _refresh(self, watched: WatchedPipeline) -> None:
        if watched.pipeline is None:
            return
        at = time.time()
        before = watched.sample
        try:
            sample = self._sample(watched, watched.pipeline, at)
        except AvowError as error:
            watched.failure = Failure(at, str(error), error.advice)
            return
        except Exception as error:  # noqa: BLE001 - any error of a client library is shown on the page
            watched.failure = Failure(at, f"{type(error).__name__}: {first_line(error)}")
            return
        watched.sampled, watched.sample, watched.failure = watched.pipeline, sample, None
        if before is not None and before.counts != sample.counts:
            watched.moved_at, watched.waiting_since = sample.at, None
        watched.waiting_since = (watched.waiting_since or sample.at) if sample.lag else None
        watched.reads = frozenset(partition.topic for partition in sample.partitions) or watched.reads
        counts = sample.counts
        lag_seconds = sample.lag_seconds if sample.lag else 0.0
        watched.points.append(Point(sample.at, counts.read, counts.written, counts.dead, sample.lag, lag_seconds))

    def _sample(self, watched: WatchedPipeline, pipeline: PipelineConfig, at: float) -> Sample:
        with sinks.driver_sink(pipeline) as ledger:
            entries = {tp: state.entry for tp, state in ledger.ledger_snapshot().items()}
            newest = ledger.claims(1)
        log = self._log(watched.file, pipeline)
        try:
            partitions = log.partitions()
            offsets, stable = log.offsets(partitions), log.stable_ends(partitions)
            # What waits; without a position, all that is there does.
            next_up = {
                tp: max(entries[tp].position, offsets[tp][0]) if tp in entries else offsets[tp][0] for tp in partitions
            }
            stamps = log.timestamps_at(next_up, stable)
            processes = _processes(log, pipeline.name)
        except AvowError:
            self._forget(watched.file)  # it may be stuck
            raise
        waiting = [stamp for stamp in stamps.values() if stamp is not None]
        known = [stamp for stamp in waiting if stamp != NO_TIMESTAMP]
        return Sample(
            at=at,
            partitions=tuple(
                _partition_sample(tp, entries.get(tp), offsets[tp], stable[tp], stamps[tp]) for tp in partitions
            ),
            lag_seconds=max(0.0, at - min(known) / 1000) if known else None,
            lag_note="the oldest unclaimed record has no timestamp" if waiting and not known else "",
            processes=processes,
            run=max((entry.run for entry in entries.values()), default=0),
            last_claim=newest[0] if newest else None,
        )

    def _log(self, file: Path, pipeline: PipelineConfig) -> Log:
        """The file's own, made anew when the file names another cluster, other topics or another name."""
        cached = self._logs.get(file)
        if cached is not None and cached[:2] != (pipeline.source, pipeline.name):
            self._forget(file)
            cached = None
        if cached is None:
            log = Log(pipeline.source, pipeline.name, timeout_s=self._timeout_s)
            cached = self._logs[file] = (pipeline.source, pipeline.name, log)
        return cached[2]

    def _forget(self, file: Path) -> None:
        self._logs.pop(file)[2].close()


def _is_another(seen: PipelineConfig | None, now: PipelineConfig) -> bool:
    """Whether a file that was changed names another ledger or another log."""
    return seen is not None and (seen.name, seen.source, seen.sink) != (now.name, now.source, now.sink)


def _processes(log: Log, name: str) -> int | None:
    """How many processes of the consumer engine run; None where it is not known. Those of Spark join no group."""
    try:
        (members,) = groups.describe(log, [f"{name}.members"])
    except (SourceError, ConfigError):
        return None
    return len(members.members)


def _partition_sample(
    tp: TopicPartition, entry: Entry | None, offsets: tuple[int, int], stable: int, stamp: int | None
) -> PartitionSample:
    first, end = offsets
    counts = entry.counts if entry else NOTHING
    # Where no committed record follows, what is left are markers: nothing waits.
    lag = stable - (max(entry.position, first) if entry else first) if stamp is not None else 0
    return PartitionSample(
        topic=tp.topic,
        partition=tp.partition,
        earliest=first,
        stable_end=stable,
        end=max(end, stable),
        position=entry.position if entry else None,
        lag=lag,
        **asdict(counts),
    )


def _files(paths: Iterable[Path]) -> Iterable[tuple[Path, bool]]:
    """Every file, and whether it was named itself."""
    for path in paths:
        if path.is_dir():
            yield from ((file, False) for file in sorted(path.glob("*.toml")))
        else:
            yield path, True


def _looks_like_pipeline(file: Path) -> bool:
    """Whether a file that is refused was meant as a pipeline: a folder may hold others."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return {"name", "guarantee", "source"} <= document.keys()
