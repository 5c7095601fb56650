"""The matrix as data: which cells there are, what each must show, the seeded schedule of its faults, and its verdict.

A fault is a row of ``FAULTS``. Sinks and modes come from the sinks' own registry, engines from ``ENGINES``, and what a
guarantee permits from ``avow.guarantee``: a new one of any of them is in the matrix as soon as it is registered.

Owns: the table and every judgement that needs no I/O. Must not know: how a fault is done (``faults``) or how anything
is read back (``oracles``).
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType

from avow.guarantee import Anomaly, Guarantee
from avow.sinks import SINKS


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to run a pipeline, or something like one."""

    name: str  # what the pipeline file calls it
    spark: Mapping[str, str]  # what it wants under [spark]
    source: Mapping[str, int]  # and under [source.kafka]
    on_spark_cluster: bool = False  # tasks run on executors of the test cluster's Spark cluster
    modes: frozenset[str] | None = None  # that are proven on it; all if None
    load: float = 1  # the share of it that it can follow on two busy cores
    plain: bool = False  # no pipeline: plain consumers, with a handler of ours that appends to a table in PostgreSQL

    def supports(self, sink: str, mode: str, full_mode: str) -> bool:
        if self.plain:
            return "postgres-server" in SINKS[sink].faults and mode == "append"
        return mode in (self.modes or {mode}) | {full_mode}


_APPEND = frozenset({"append"})
_SPARK_CLUSTER_CONFIG = {
    "driver.host": "127.0.0.1",
    "driver.bindAddress": "127.0.0.1",
    # Half of the cluster: a second driver must find room beside the first.
    "cores.max": "2",
    "executor.cores": "1",
    "executor.memory": "512m",
    "executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "locality.wait": "0s",  # executors come and go here
}
# Partitions that are added are seen while a cell lasts, and a member that is dead is missed.
_SPARK_CONFIG = MappingProxyType({"metadata.max.age.ms": 1000})
_CONSUMER_CONFIG = MappingProxyType({"topic.metadata.refresh.interval.ms": 1000, "session.timeout.ms": 6000})
ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        # A mode concerns the sink, wherever its task runs: all modes are proven on the engine whose cells are cheapest.
        "spark": Engine("spark", MappingProxyType({"master": "local[2,4]"}), _SPARK_CONFIG, modes=_APPEND),
        "spark-cluster": Engine(
            "spark", MappingProxyType(_SPARK_CLUSTER_CONFIG), _SPARK_CONFIG, on_spark_cluster=True, modes=_APPEND
        ),
        "consumer": Engine("consumer", MappingProxyType({}), _CONSUMER_CONFIG),
        "plain": Engine("plain", MappingProxyType({}), _CONSUMER_CONFIG, load=1 / 3, plain=True),
    }
)
SPARK_LOCAL, SPARK_CLUSTER, CONSUMER, PLAIN = ("spark",), ("spark-cluster",), ("consumer",), ("plain",)
GROUP_MEMBERS = CONSUMER + PLAIN  # members of a consumer group, which share the partitions
ALL_ENGINES = SPARK_LOCAL + SPARK_CLUSTER + GROUP_MEMBERS
PIPELINES = SPARK_LOCAL + CONSUMER

AT_MOST, AT_LEAST, EXACTLY = Guarantee.AT_MOST_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE


class CellVerdict(StrEnum):
    HELD = "held"
    BROKEN = "broken"
    UNPROVEN = "unproven"  # the permitted anomaly had to show, and never did
    UNKNOWN = "unknown"  # the fault did not fire, or the outcome could not be read
    NOT_RUN = "not-run"  # not built, or this machine cannot do it; the reason says which
    CAUGHT = "caught"  # a canary, judged broken as it must be
    MISSED = "missed"  # a canary that was not judged broken: the harness itself is wrong


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One row of the matrix."""

    name: str
    number: int  # in the list of faults; several ways of one fault share it. 0: a canary
    title: str
    shows: frozenset[Guarantee] = frozenset()  # under these the permitted anomaly must appear, or nothing is proven
    hold_s: tuple[float, float] = (1, 3)  # how long it lasts, from and to
    times: int = 1
    stop: tuple[int, str] | None = None  # the run must stop: with this exit code, and this finding in the audit, if any
    destroys: bool = False  # with what it does, records that were delivered are gone: that is not the pipeline's loss
    live: bool = False  # the running driver must stop by itself; else it is stopped first, and the next one must refuse
    crash: bool = True  # something dies or an answer is lost; else not even what the guarantee permits may appear
    in_mix: bool = False
    alone: bool = False  # needs a pipeline of its own from its first start on, and leaves it unfit for others
    # Those that it can affect, or where it shows what no other engine shows.
    engines: tuple[str, ...] = SPARK_LOCAL + GROUP_MEMBERS
    only: str = ""  # it concerns sinks that have this among their ``faults``; empty: every one
    guarantees: frozenset[Guarantee] = frozenset(Guarantee)  # under which it can happen
    needs_ledger: bool = False  # only the ledger can notice it
    append_only: bool = False  # unless the whole matrix is asked for in another mode
    in_task: bool = False  # what it ``shows`` comes of a task's acts, and cannot where the acts are the driver's

    @property
    def stop_name(self) -> str:
        """The stop's name: the audit's finding, or its exit code."""
        if self.stop is None:
            return ""
        return self.stop[1] or f"exit code {self.stop[0]}"


def _fault(number: int, name: str, title: str, *shows: Guarantee, **options: object) -> FaultSpec:
    return FaultSpec(name, number, title, frozenset(shows), **options)  # type: ignore[arg-type]


def _before(number: int, name: str, title: str, **options: object) -> FaultSpec:
    """A fault upstream of the sink. In any mode the sink only sees ranges that come late, again or never: it is proven
    in append mode, where a duplicate is visible."""
    return _fault(number, name, title, append_only=True, **options)


def _alone(number: int, name: str, title: str, **options: object) -> FaultSpec:
    """One that takes a pipeline from its first start on, and leaves it unfit for others."""
    return _fault(number, name, title, alone=True, engines=PIPELINES, **{"hold_s": (0, 0), **options})


def _stops(number: int, name: str, title: str, code: int, finding: str, **options: object) -> FaultSpec:
    """One on the source's side after which the run must stop, by name."""
    return _before(number, name, title, hold_s=(0, 0), stop=(code, finding), **options)


# The part of a sink that a fault concerns, as plugins name it.
_POSTGRES, _KAFKA, _COMMIT, _FILES = "postgres-server", "kafka-transactions", "batch-commit", "lake-files"
_into_kafka, _into_postgres = partial(_fault, only=_KAFKA), partial(_fault, only=_POSTGRES)
_IN_ONE_ACT = frozenset({EXACTLY})  # the others write outside of any transaction
_FAULTS = (
    _fault(1, "killed-after-claim", "kill -9 right after the claim", AT_MOST, engines=ALL_ENGINES),
    _fault(2, "killed-after-write", "kill -9 right after the write", AT_LEAST, engines=ALL_ENGINES),
    _fault(3, "killed-in-mid-write", "kill -9 in the middle of the write", AT_MOST, engines=ALL_ENGINES, in_task=True),
    _fault(3, "killed-before-commit", "kill -9 between the files and their commit", only=_COMMIT),
    _fault(4, "killed-at-random", "driver kill -9 at random times", times=2, in_mix=True, engines=ALL_ENGINES),
    _fault(5, "zombie", "driver paused, a second one takes over, the first resumes", engines=ALL_ENGINES),
    _fault(5, "two-drivers", "two drivers at once"),
    _fault(5, "three-drivers", "three drivers at once, one killed with kill -9", only=_COMMIT),
    _fault(6, "worker-killed", "Python worker kill -9", times=2, in_mix=True, engines=SPARK_LOCAL),
    _fault(6, "jvm-killed", "Spark's JVM kill -9", engines=SPARK_LOCAL),
    _fault(6, "executor-killed", "executor kill -9", times=2, in_mix=True, engines=SPARK_CLUSTER),
    _fault(6, "spark-worker-killed", "Spark worker kill -9, its executors with it", in_mix=True, engines=SPARK_CLUSTER),
    _fault(6, "spark-master-killed", "Spark master kill -9", hold_s=(2, 4), engines=SPARK_CLUSTER),
    _before(7, "leader-killed", "partition leader kill -9", hold_s=(4, 7), in_mix=True, engines=ALL_ENGINES),
    _before(8, "controller-killed", "controller kill -9", hold_s=(4, 7), in_mix=True),
    _before(
        8, "coordinator-killed", "transaction coordinator kill -9 while upstream commits and aborts", hold_s=(4, 7)
    ),
    _into_kafka(8, "sink-coordinator-killed", "coordinator of the sink's transactions kill -9", hold_s=(4, 7)),
    _before(9, "broker-paused", "broker paused longer than its session time-out", hold_s=(9, 12)),
    _before(10, "all-brokers-killed", "all brokers kill -9", hold_s=(1, 2)),
    _before(11, "broker-cut-off", "one broker cut off from the others and the pipeline", hold_s=(8, 12)),
    _before(11, "brokers-cut-apart", "network partition between two brokers", hold_s=(8, 12)),
    _before(12, "cut-from-brokers", "pipeline cut off from the brokers", hold_s=(4, 8), in_mix=True),
    _before(12, "brokers-one-way", "requests reach the brokers, responses do not come back", hold_s=(4, 8)),
    _before(12, "brokers-slow", "every packet between pipeline and brokers is 200 ms late", hold_s=(4, 8)),
    _into_kafka(13, "produce-reply-lost", "the produce acknowledgement is dropped", hold_s=(3, 4)),
    _into_kafka(
        *(14, "transaction-times-out", "transaction times out while the task is paused"), guarantees=_IN_ONE_ACT
    ),
    _into_postgres(15, "postgres-killed", "PostgreSQL kill -9", in_mix=True, engines=ALL_ENGINES),
    _into_postgres(15, "postgres-immediate", "PostgreSQL immediate shutdown"),
    _into_postgres(15, "postgres-cut", "pipeline cut off from PostgreSQL", in_mix=True),
    _into_postgres(
        *(16, "commit-reply-lost", "the reply to COMMIT is dropped", AT_LEAST), hold_s=(3, 4), engines=ALL_ENGINES
    ),
    _fault(17, "lake-commit-unknown", "lake commit with unknown outcome", AT_LEAST, only=_COMMIT),
    _into_postgres(18, "disk-full-database", "disk full under the table", hold_s=(4, 6)),
    _fault(18, "disk-full-lake", "disk full under the table's files", hold_s=(4, 6), alone=True, only=_FILES),
    _before(18, "disk-full-broker", "disk full under a broker", hold_s=(2, 4)),
    _stops(20, "retention", "retention passed the position", 12, "retention-loss"),
    # With a topic Kafka deletes its positions: a consumer that has no others begins anew.
    _stops(
        21, "topic-recreated", "topic deleted and recreated with more records", 10, "topic-recreated", needs_ledger=True
    ),
    _stops(22, "log-truncated", "unclean leader election", 11, "log-truncated", alone=True),
    _before(23, "partitions-added", "partitions added while running"),
    _before(24, "upstream-aborts", "upstream aborts every third transaction", hold_s=(3, 5)),
    _fault(
        *(25, "group-rebalance", "a member joins the group and another is killed with kill -9"),
        times=2,
        in_mix=True,
        engines=GROUP_MEMBERS,
    ),
    _fault(26, "mix", "a seeded mix of faults, quiet a quarter of the time", hold_s=(2, 6), engines=ALL_ENGINES),
    _stops(
        *(27, "topic-recreated-live", "topic deleted and recreated while a run reads it", 10, "topic-recreated"),
        live=True,
        needs_ledger=True,
        engines=PIPELINES,
    ),
    _alone(
        *(28, "partition-added-between-runs", "partition added between two runs that start at the latest offset"),
        crash=False,
        append_only=True,
    ),
    _alone(29, "redrives-beside-a-run", "two redrives at once during a run, one killed with kill -9"),
    _alone(29, "redrive-after-crash", "driver kill -9, then a redrive before the next driver starts"),
    _alone(
        *(30, "poison-records", "records with extreme numbers, text, keys, headers and timestamps"),
        hold_s=(3, 5),
        crash=False,
    ),
    _alone(
        *(31, "dead-letter-stop", "more bad records than dead_letters.max_share allows"),
        stop=(14, ""),
        live=True,
        crash=False,
    ),
    _alone(
        *(32, "failover-lost-commits", "PostgreSQL fails over to a standby that missed its last commits"),
        hold_s=(2, 4),
        only=_POSTGRES,
    ),
    _before(
        33, "refused-start", "a second start, which is refused, during a healthy run", crash=False, engines=PIPELINES
    ),
    _alone(
        *(34, "output-recreated-live", "output topic deleted and recreated while a run writes to it"),
        stop=(10, "topic-recreated"),
        destroys=True,
        live=True,
        only=_KAFKA,
    ),
    _alone(
        *(35, "behind-a-pooler", "PostgreSQL behind a pooler in transaction mode, and the driver kill -9"),
        only=_POSTGRES,
    ),
    _fault(0, "canary-swapped", "canary: claim before write under at-least-once", alone=True),
    _fault(0, "canary-drops", "canary: a sink that drops one record in 10,000", alone=True),
    _fault(0, "canary-doubles", "canary: a sink that duplicates one record in 10,000", alone=True),
)
FAULTS: Mapping[str, FaultSpec] = MappingProxyType({fault.name: fault for fault in _FAULTS})

# A canary runs under the guarantee that it breaks.
CANARIES: Mapping[str, Guarantee] = MappingProxyType(
    {"canary-swapped": AT_LEAST, "canary-drops": EXACTLY, "canary-doubles": EXACTLY}
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One guarantee of one sink in one mode on one engine, under one fault."""

    fault: FaultSpec
    guarantee: Guarantee
    sink: str = next(iter(SINKS))
    mode: str = "append"
    engine: str = "spark"

    @property
    def name(self) -> str:
        return f"{self.fault.name}/{self.guarantee}/{self.sink}/{self.mode}/{self.engine}"

    @property
    def column(self) -> tuple[str, ...]:
        """What the pipeline is, whatever is done to it."""
        return (self.guarantee, self.sink, self.mode, self.engine)

    @property
    def canary(self) -> bool:
        return self.fault.name in CANARIES

    @property
    def audited(self) -> bool:
        """Whether there is a ledger, which the audit believes. Where there is only a group's position, the independent
        check is the one judge."""
        return not ENGINES[self.engine].plain or self.guarantee is EXACTLY

    @property
    def must_show(self) -> Anomaly | None:
        """The permitted anomaly that has to appear here. A table with a key cannot hold a record twice."""
        if self.guarantee not in self.fault.shows or unseen(self.fault, self.sink):
            return None
        (anomaly,) = self.guarantee.permits
        return None if anomaly is Anomaly.DUPLICATED and self.mode != "append" else anomaly

    def options(self, seed: int) -> str:
        """The options that run this cell again."""
        return (
            f"--fault {self.fault.name} --guarantee {self.guarantee} --sink {self.sink} --mode {self.mode} "
            f"--engine {self.engine} --seed {seed}"
        )


def matrix(full_mode: str = "append") -> Iterator[Cell]:
    """Every cell there is: the canaries of each sink and engine, then by fault, guarantee, sink, mode and engine. The
    mode ``full_mode`` has every fault on every engine."""
    for engine in SPARK_LOCAL + GROUP_MEMBERS:
        for kind in (kind for kind in SINKS if ENGINES[engine].supports(kind, "append", full_mode)):
            yield from (Cell(FAULTS[name], guarantee, kind, engine=engine) for name, guarantee in CANARIES.items())
    for fault in (fault for fault in FAULTS.values() if fault.name not in CANARIES):
        for guarantee in (guarantee for guarantee in Guarantee if guarantee in fault.guarantees):
            for sink in SINKS.values():
                for mode in sink.offers if concerns(fault, sink.kind) else ():
                    if guarantee in sink.offered(mode) and (mode == full_mode or not fault.append_only):
                        engines = [name for name in fault.engines if ENGINES[name].supports(sink.kind, mode, full_mode)]
                        cells = (Cell(fault, guarantee, sink.kind, mode, engine) for engine in engines)
                        yield from (cell for cell in cells if cell.audited or not fault.needs_ledger)


def concerns(fault: FaultSpec, sink: str) -> bool:
    return not fault.only or fault.only in SINKS[sink].faults


def unseen(fault: FaultSpec, sink: str) -> bool:
    """Whether what the fault ``shows`` cannot come of it in this sink."""
    return fault.in_task and SINKS[sink].commits_per_batch


def quick(
    guarantee: str | None = None, mode: str = "append", sinks: Collection[str] = (), engines: Collection[str] = ()
) -> Iterator[Cell]:
    """One cell for each numbered fault, one on each other engine, and the canaries. Under one ``guarantee``, or the one
    that the fault tests hardest: the one that must show its anomaly, else exactly-once. Into the first sink that has
    the fault, of ``sinks`` or of all, on the first of ``engines``."""
    seen: set[int | str] = set()
    cells = [c for c in matrix(mode) if (not sinks or c.sink in sinks) and (not engines or c.engine in engines)]
    for cell in cells:
        # On another engine than the first: only faults that the first cannot have.
        elsewhere = cell.engine if cells[0].engine not in cell.fault.engines else 0
        kind = cell.fault.number if cell.engine == cells[0].engine else elsewhere
        if cell.canary:
            if (cell.sink, cell.engine) == (cells[0].sink, cells[0].engine):
                yield cell
        elif kind and cell.mode == mode and kind not in seen:
            says_most = min(cell.fault.shows) if cell.fault.shows else EXACTLY
            if cell.guarantee == (guarantee or says_most):
                seen.add(kind)
                yield cell


class Queue:
    """Assigns cells to runners; thread-safe. A pipeline that ended a cell without anomalies is reused for the next cell
    of its column: most of a cell's time is the start of a driver.

    Canaries come first: if one of them is missed, nothing after it is worth the wait. Of a column, those that cannot
    share a pipeline come first, and those that stop it for good last.
    """

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._lock = threading.Lock()
        self._columns: dict[tuple[str, ...], deque[Cell]] = {}
        for cell in sorted(cells, key=_when):  # sorting keeps what is equal in order
            self._columns.setdefault(("canary",) if cell.canary else cell.column, deque()).append(cell)

    def take(self, column: tuple[str, ...] = ()) -> Cell | None:
        """The next cell: of this ``column`` while there are any, then of the one with most left."""
        with self._lock:
            left = {name: cells for name, cells in self._columns.items() if cells}
            if not left:
                return None
            most = max(left, key=lambda name: len(left[name]))
            name = next((name for name in (("canary",), column) if name in left), most)
            return left[name].popleft()

    def clear(self) -> None:
        with self._lock:
            self._columns.clear()


def _when(cell: Cell) -> int:
    return 0 if cell.canary else 1 if cell.fault.alone or cell.must_show else 3 if cell.fault.stop else 2


# The schedule: what happens when, from the seed alone.


@dataclass(frozen=True, slots=True)
class Step:
    quiet_s: float  # before it
    fault: str  # empty: nothing, and the quiet goes on
    hold_s: float
    seed: int  # what else the fault has to choose


MIX_S = 20.0
QUIET_SHARE = 0.25


def schedule(cell: Cell, seed: int, minutes: float = 0) -> tuple[Step, ...]:
    """The faults of a cell, in order. With ``minutes`` they go on at least so long."""
    rng = random.Random(f"{seed}/{cell.name}")
    least_s = minutes * 60
    mixed: list[FaultSpec] = []
    if cell.fault.name == "mix":
        there = (fault for fault in FAULTS.values() if cell.engine in fault.engines and concerns(fault, cell.sink))
        mixed = [fault for fault in there if fault.in_mix]
        least_s = least_s or MIX_S
    steps: list[Step] = []
    while len(steps) < cell.fault.times or sum(step.quiet_s + step.hold_s for step in steps) < least_s:
        quiet = bool(mixed) and rng.random() < QUIET_SHARE
        fault = rng.choice(mixed) if mixed else cell.fault
        name = "" if quiet else fault.name
        hold = round(rng.uniform(*fault.hold_s), 2)
        steps.append(Step(round(rng.uniform(0.3, 2), 2), name, hold, rng.randrange(2**31)))
        if cell.fault.stop or cell.canary:
            break  # a pipeline that stopped for good takes no more faults
    if mixed and not any(step.fault for step in steps):
        steps.append(Step(0.5, rng.choice(mixed).name, 3.0, rng.randrange(2**31)))
    return tuple(steps)


# The verdict.


@dataclass(frozen=True, slots=True)
class Observation:
    """What a cell came to, as far as it was seen."""

    fired: tuple[str, ...]  # the proof of each fault, as a sentence; empty where it did not fire
    check: Mapping[str, int]  # anomaly -> records, by the independent check
    audit: Mapping[str, int]  # anomaly -> records, by the audit
    audit_verdict: str  # empty: no audit was run
    records: int  # that were compared
    drained: bool  # whether the pipeline claimed everything in the end
    exit_code: int | None = None  # of the last run, where a named stop is expected
    kafka_lost: int = 0  # acknowledged to the producer, and not in the log: Kafka's own loss
    notes: tuple[str, ...] = field(default=())
    live: Mapping[str, int] = field(default_factory=dict)  # anomaly -> records, by the live reader of an output topic
    violations: tuple[str, ...] = ()  # what the run itself did wrong, as sentences


def judge(cell: Cell, observed: Observation) -> tuple[CellVerdict, str]:
    """The verdict, and why."""
    allowed = {str(anomaly) for anomaly in cell.guarantee.permits} if cell.fault.crash else set()
    allowed |= {"ledger-behind"} if cell.guarantee is AT_LEAST else set()
    allowed |= {cell.fault.stop[1]} if cell.fault.stop else set()
    allowed |= {str(Anomaly.LOST)} if cell.fault.destroys else set()
    violations = {
        f"{count:,} {kind} ({judge})"
        for judge, counts in (("check", observed.check), ("audit", observed.audit))
        for kind, count in counts.items()
        if count and kind not in allowed
    }
    # Under any guarantee a live reader of committed records has seen exactly what is in the topic in the end.
    violations |= {f"{count:,} {kind} (live reader)" for kind, count in observed.live.items() if count}
    violations |= set(observed.violations)
    if cell.canary:
        judges = {"check": observed.check} | ({"audit": observed.audit} if cell.audited else {})
        found = [name for name, counts in judges.items() if set(counts) - allowed]
        if len(found) == len(judges):
            return CellVerdict.CAUGHT, f"judged broken, as required: {', '.join(sorted(violations))}"
        by = " and ".join(found) or "neither"
        return CellVerdict.MISSED, f"judged broken by {by}, but must be by {' and '.join(judges)}"
    if violations:
        return CellVerdict.BROKEN, f"{', '.join(sorted(violations))}: {cell.guarantee} does not permit that"
    return _not_broken(cell, observed)


def _not_broken(cell: Cell, observed: Observation) -> tuple[CellVerdict, str]:
    if not observed.fired or not all(observed.fired):
        return CellVerdict.UNKNOWN, "the fault did not fire, so nothing was proven"
    if observed.kafka_lost:
        return CellVerdict.UNKNOWN, f"Kafka lost {observed.kafka_lost:,} records that it had acknowledged"
    if not observed.records:
        return CellVerdict.UNKNOWN, "no record was compared"
    if cell.fault.stop:
        (code, named), stop = cell.fault.stop, cell.fault.stop_name
        if observed.exit_code != code:
            return CellVerdict.BROKEN, f"the run had to stop with {code}, {stop}, but ended with {observed.exit_code}"
        if cell.audited and named and named not in observed.audit:
            return CellVerdict.BROKEN, f"the audit did not name {stop}"
        stopped = f"{code}, {named}," if named else f"exit code {code}"
        return CellVerdict.HELD, f"stopped with {stopped} and nothing was written past it{_audit(cell)}"
    if not observed.drained:
        return CellVerdict.UNKNOWN, "the pipeline did not reach the end of the log after the fault"
    # With a key the two count differently: the check by keys that lack their winner, the audit by records.
    for kind in map(str, cell.guarantee.permits if cell.mode == "append" and cell.audited else ()):
        if observed.check.get(kind, 0) != observed.audit.get(kind, 0):
            counts = f"check says {observed.check.get(kind, 0):,} {kind}, audit says {observed.audit.get(kind, 0):,}"
            return CellVerdict.UNKNOWN, f"check and audit disagree: {counts}"
    show = cell.must_show
    if show and not observed.check.get(str(show)):
        return CellVerdict.UNPROVEN, f"the permitted anomaly {show} had to appear, but did not"
    permitted = ", ".join(f"{count:,} {kind}" for kind, count in observed.check.items() if count)
    permitted = f"; {permitted}, as permitted" if permitted else ""
    return CellVerdict.HELD, f"{observed.records:,} records{permitted}{_audit(cell)}"


def _audit(cell: Cell) -> str:
    return "" if cell.audited else "; judged by the check alone, because there is no ledger to audit"
