"""Orders in which several actors can load and change the same tables, played one after the other on real local tables.

An actor is a function in a thread of its own, and only one of them goes on at a time. Before every load and every
commit of a table, by whatever path the library is reached, the actor waits until the schedule chooses it. A schedule is
the list of choices; the rest of the world is deterministic, so a schedule that was found can be played again.

``explore`` plays every schedule with no more than so many *preemptions* (a switch away from an actor that could have
gone on), fewest first, then random ones. After each the tables must keep the contract (``World.check``), and again
after a restart that delivers the rest and a redrive that brings in all dead letters, where an actor was killed or has
given up.

``python -m tests.interleaving --preemptions 2 --random 500`` is the long run; a failure prints the schedule, and
``--play`` plays one again. With ``--postgres URL`` an actor waits before the statements of its transactions, and one
that waits for a lock of another is no choice until it has it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.table import TableAlterer, TableMerger, TableOptimizer
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException

from avow import sinks
from avow.engines import redrive as redriving
from avow.engines.redrive import redrive
from avow.errors import AvowError, PositionMoved, SinkError, Superseded
from avow.kafka.log import TopicPartition
from avow.ledger import LogView, OffsetRange
from avow.sinks.base import PartitionState, Selection
from avow.sinks.iceberg import table as iceberg
from avow.sinks.lake import driver, maintenance
from avow.sinks.lake.files import path_of
from avow.sinks.lake.ledger_snapshot import from_json
from avow.sinks.lake.plugin import lake_tables
from avow.sinks.postgres import session
from avow.sinks.postgres.session import Session
from avow.testing.bench import batch
from avow.testing.sinks import TOPIC, Runner, record
from tests.fix_sinks import Bench, iceberg_table

Place = tuple[int, int]  # partition and offset of a record
THEIRS = (-1, -1)  # where rows of somebody else are

# Every way to load or to change a table, in both libraries; a file that is removed is gone for all.
POINTS: list[tuple[type, str, str]] = [
    (DeltaTable, "__init__", "load"),
    (DeltaTable, "update_incremental", "load"),
    (DeltaTable, "create_write_transaction", "commit"),
    (DeltaTable, "delete", "commit"),
    (DeltaTable, "update", "commit"),
    (TableMerger, "execute", "commit"),
    (TableAlterer, "set_table_properties", "commit"),
    (TableAlterer, "add_columns", "commit"),
    (TableOptimizer, "compact", "commit"),
    (SqlCatalog, "load_table", "load"),
    (SqlCatalog, "commit_table", "commit"),
    (maintenance.Orphan, "remove", "remove"),
]
HUNG_S = 120.0


class Killed(BaseException):
    """An actor was killed where it waited."""


@dataclass
class Actor:
    name: str
    work: Callable[[], object]
    waits_before: str = "begin"
    killed: bool = False
    ended: bool = False
    error: BaseException | None = None
    connections: list[Session] = field(default_factory=list)
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def start(self) -> None:
        threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def _run(self) -> None:
        self.go.acquire()
        _HERE.actor = self
        try:
            if not self.killed:
                self.work()
        except Killed:
            for connection in self.connections:
                connection.close()  # as the kernel does
        except BaseException as error:  # noqa: BLE001 - it is judged by the contract
            self.error = error
        self.ended = True
        self.back.release()

    def give_way(self, point: str) -> None:
        self.waits_before = point
        self.back.release()
        self.go.acquire()
        if self.killed:
            raise Killed


_HERE = threading.local()


# In PostgreSQL: where transactions begin and end, and every statement on avow's own tables.
STATEMENTS = re.compile(r"(BEGIN|COMMIT|LOCK)\b|.*\bavow\.(ledger|dead_letters|runs|claims)\b", re.DOTALL)


@contextmanager
def points() -> Iterator[None]:
    """Let actors wait at every point. What a library does inside of one is not another."""
    sessions: dict[tuple[int, str], Session] = {}
    connect = Session.__init__

    def cached(url: str, application: str) -> Session:
        """As in a process of its own."""
        key = (threading.get_ident(), url)
        sessions[key] = sessions.get(key) or Session(url, application)
        return sessions[key]

    def opened(self: Session, *arguments: Any) -> None:
        if actor := getattr(_HERE, "actor", None):
            actor.connections.append(self)
        connect(self, *arguments)

    def forget(url: str) -> None:
        if found := sessions.pop((threading.get_ident(), url), None):
            found.close()

    with pytest.MonkeyPatch.context() as patched:
        for owner, name, kind in POINTS:
            patched.setattr(owner, name, _waiting(getattr(owner, name), kind))
        for name in ("run", "query", "run_many"):
            patched.setattr(Session, name, _waiting(getattr(Session, name), "statement", STATEMENTS))
        patched.setattr(Session, "copy", _waiting(Session.copy, "statement"))
        patched.setattr(Session, "__init__", opened)
        patched.setattr(session, "cached", cached)
        patched.setattr(session, "forget", forget)
        # Refused commits are tried again at once: the order is the schedule's.
        patched.setattr(driver, "PAUSE_S", 0.0)
        patched.setattr(iceberg, "PAUSE_S", 0.0)
        patched.setattr(redriving, "PAUSE_S", 0.0)
        yield
    for one in sessions.values():
        one.close()


class Topic:
    """What a redrive by key asks Kafka for, which is not here: whether later records have deleted a row."""

    deletes = False

    def __init__(self, *_: object) -> None:
        pass

    def view(self, entries: Mapping[TopicPartition, object]) -> dict[TopicPartition, LogView]:
        return {tp: LogView(tp.topic, tp.partition, "id", 0, END[tp.partition]) for tp in entries}

    def stable_ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: END[tp.partition] for tp in partitions}

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        partition, start, until = wanted.partition, wanted.start, wanted.until
        yield batch(
            values(partition, start, until, deletes=self.deletes), partition, start, keys(partition, start, until)
        )

    def close(self) -> None:
        pass


@contextmanager
def without_kafka(*, deletes: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Topic, "deletes", deletes)
        for name in ("Log", "Reader"):
            patched.setattr(redriving, name, Topic)
        yield


def _waiting(real: Callable[..., Any], kind: str, statements: re.Pattern[str] | None = None) -> Callable[..., Any]:
    def waiting(*arguments: Any, **more: Any) -> Any:
        actor: Actor | None = getattr(_HERE, "actor", None)
        if actor is None or (statements is not None and not statements.match(arguments[1])):
            return real(*arguments, **more)
        actor.give_way(f"{kind} {arguments[1][:70] if statements else real.__name__}")
        _HERE.actor = None
        try:
            return real(*arguments, **more)
        finally:
            _HERE.actor = actor

    return waiting


# Schedules.


@dataclass(frozen=True)
class Step:
    options: tuple[str, ...]
    current: str  # who was at it before; it could go on if it is among the options
    chosen: str
    point: str  # before which the chosen one waited

    def preempts(self, other: str) -> bool:
        return self.current in self.options and other != self.current


Choose = Callable[[Sequence[Step], tuple[str, ...], str], str]


class Broken(AssertionError):
    """The contract is broken."""


@dataclass(frozen=True)
class Cast:
    """The actors of a scenario. ``kill X`` is a choice like any other, for each mortal X that has begun."""

    work: Mapping[str, Callable[[], object]]
    mortal: Sequence[str] = ()

    def play(self, choose: Choose, steps: list[Step], stuck: Callable[[], int] = lambda: 0) -> bool:
        """One schedule, noted in ``steps``. Raises where an actor ends as it never may: a run may be superseded, and a
        redrive or a compaction may ask to be repeated. False if one did, or was killed. ``stuck``: how many actors wait
        for a lock of another's; they are no options until they have it."""
        actors = {name: Actor(name, function) for name, function in self.work.items()}
        for actor in actors.values():
            actor.start()
        current, out = "", set[str]()
        while any(not actor.ended for actor in actors.values()):
            going = [name for name, actor in actors.items() if not actor.ended and name not in out]
            if not going:  # a lock is given up a moment after its holder was killed, or by a time-out
                out = _settled(actors, out, lambda: 0)
                continue
            kills = [f"kill {name}" for name in self.mortal if name in going and actors[name].waits_before != "begin"]
            options = (*going, *kills)
            chosen = choose(steps, options, current)
            actor = actors[chosen.removeprefix("kill ")]
            steps.append(Step(options, current, chosen, actor.waits_before))
            actor.killed = chosen.startswith("kill ")
            actor.go.release()
            out = _settled(actors, out | {actor.name}, stuck)
            current = chosen
        for actor in actors.values():
            if actor.error is not None and not isinstance(actor.error, SinkError | Superseded | PositionMoved):
                raise Broken(f"{actor.name} ended with {type(actor.error).__name__}: {actor.error}") from actor.error
        return not any(actor.killed or actor.error for actor in actors.values())


def _settled(actors: Mapping[str, Actor], out: set[str], stuck: Callable[[], int]) -> set[str]:
    """Wait until whoever has gone on is at its next point, or waits for a lock. Who those are."""
    deadline = time.monotonic() + HUNG_S
    while out := {name for name in out if not actors[name].back.acquire(timeout=0.02)}:
        if stuck() >= len(out):
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"{out} hang behind {[actors[name].waits_before for name in out]}")
    return out


@dataclass(frozen=True)
class Found:
    """What came of an exploration: how many schedules were played, and the last one if it broke the contract."""

    schedules: int
    problem: str = ""
    steps: tuple[Step, ...] = ()

    @property
    def schedule(self) -> str:
        """With runs of the same choice in short: ``a*3,b``."""
        return ",".join(f"{name}*{len(list(some))}" for name, some in groupby(step.chosen for step in self.steps))

    def told(self) -> str:
        points = "\n".join(f"  {step.chosen}: {step.point}" for step in self.steps)
        return f"schedule {self.schedules}: {self.problem}\n--play '{self.schedule}'\n{points}"


def explore(world: World, preemptions: int, *, at_most: int = sys.maxsize, walks: int = 0, seed: int = 0) -> Found:
    """Every schedule with up to so many preemptions, fewest first, then random ones; up to the first that breaks the
    contract. ``at_most``: of the former."""
    played, chance = 0, random.Random(seed)
    waiting: list[tuple[int, float, tuple[str, ...]]] = [(0, 0, ())]  # by chance, so that a bound leaves out no place
    while waiting and played < at_most:
        used, _, prefix = heapq.heappop(waiting)
        problem, steps = world.play(partial(_follow, prefix))
        played += 1
        if problem:
            return Found(played, problem, tuple(steps))
        for at in range(len(prefix), len(steps)):
            step = steps[at]
            for other in step.options:
                cost = used + step.preempts(other)
                if other != step.chosen and cost <= preemptions:
                    before = (one.chosen for one in steps[:at])
                    heapq.heappush(waiting, (cost, chance.random(), (*before, other)))
    for walk in range(walks):
        problem, steps = world.play(partial(_walk, random.Random(f"{seed}/{walk}")))
        played += 1
        if problem:
            return Found(played, problem, tuple(steps))
    return Found(played)


def _follow(prefix: Sequence[str], steps: Sequence[Step], options: tuple[str, ...], current: str) -> str:
    """The prefix, then whoever is at it, then whoever is first."""
    if len(steps) < len(prefix):
        return prefix[len(steps)]
    return current if current in options else options[0]


def _walk(chance: random.Random, _: Sequence[Step], options: tuple[str, ...], current: str) -> str:
    if current in options and chance.random() < 0.6:
        return current
    chosen = chance.choice(options)
    return chosen if not chosen.startswith("kill ") or chance.random() < 0.2 else options[0]


# The tables, and what is done to them. Every second record of a partition is bad for the pipeline and good for the one
# that redrives.

END = {0: 8, 1: 4}
BEFORE = 4  # records of partition 0 that a run has delivered before; partition 1 is new


DELETES = {(0, 4): (0, 1), (0, 6): (0, 3)}  # in some scenarios: null values, and whose key they delete


def values(partition: int, start: int, until: int, *, deletes: bool = False) -> list[bytes | None]:
    return [
        None
        if deletes and (partition, n) in DELETES
        else record(100 * partition + n, **({"extra": 1} if n % 2 else {}))
        for n in range(start, until)
    ]


def keys(partition: int, start: int, until: int) -> list[bytes | None]:
    deleted = (DELETES.get((partition, n)) for n in range(start, until))
    return [None if at is None else str(100 * at[0] + at[1]).encode() for at in deleted]


class World:
    """The two tables of one pipeline as a run left them, brought back before every schedule."""

    def __init__(self, kind: str, folder: Path, scenario: str) -> None:
        self.scenario = SCENARIOS[scenario]
        self._base = folder / "base"
        self._begin(Bench(kind, folder / "now"))
        if self.scenario.interrupted:
            self._interrupt_redrive()
        shutil.copytree(self._bench.folder, self._base)

    def _begin(self, bench: Bench) -> None:
        self._bench = bench
        lines = [f'mode = "{self.scenario.mode}"', *(['key = ["id"]'] if self.scenario.mode != "append" else [])]
        self.strict = bench.pipeline(self.scenario.guarantee, *lines)
        decode = self.strict.decode.model_copy(update={"unknown_fields": "ignore"})
        self.lenient = self.strict.model_copy(update={"decode": decode})
        with Runner(self.strict, member=[0]) as run:
            for start in range(0, BEFORE, 2):
                run.deliver({0: values(0, start, start + 2)})

    def _restore(self) -> None:
        shutil.rmtree(self._bench.folder)
        shutil.copytree(self._base, self._bench.folder)

    def _stuck(self) -> int:
        return 0  # nobody waits for a lock

    def _interrupt_redrive(self) -> None:
        """One that has marked its dead letters, and was killed then."""
        with points():
            cast = Cast({"redrive": self.redrive}, ["redrive"])
            cast.play(lambda steps, options, _: options[-1 if _marked(steps) else 0], [])

    # Actors

    def member(self, *partitions: int) -> None:
        """A process that shares the partitions, until they are at their end or others have them."""
        self.begun(*partitions)()

    def begun(self, *partitions: int) -> Callable[[], None]:
        """The same, with its run begun already."""
        run = Runner(self.strict, member=partitions)

        def deliver() -> None:
            with run:
                while todo := {p: at for p in partitions if (at := run.position(p)) < END[p]}:
                    self._deliver(run, {p: (at, at + 2) for p, at in todo.items()})
                    for partition, at in todo.items():
                        self._claimed[partition] = max(self._claimed[partition], at + 2)

        return deliver

    def _deliver(self, run: Runner, spans: Mapping[int, tuple[int, int]]) -> None:
        records = {p: values(p, *span, deletes=self.scenario.deletes) for p, span in spans.items()}
        starts = {p: start for p, (start, _) in spans.items()}
        run.deliver(records, starts=starts, keys={p: keys(p, *span) for p, span in spans.items()})

    def redrive(self, start: int = 0, until: int | None = None) -> None:
        redrive(self.lenient, Selection(from_offset=start, until_offset=until), _no_spark)

    def redrive_in_vain(self) -> None:
        """It settles what others have left, and finds every dead letter still bad."""
        redrive(self.strict, Selection(), _no_spark)

    def clean(self) -> None:
        for orphan in maintenance.orphans(lake_tables(self.strict), self.strict.name):
            orphan.remove()

    def compact(self) -> None:
        for table in lake_tables(self.strict):
            maintenance.compact(table, self.strict.name, 1 << 20)

    def foreign(self) -> None:
        """Somebody else's commits: a property, and a row."""
        row = {"id": 999, "account": "theirs", "_kafka_topic": "theirs", "_kafka_partition": 0, "_kafka_offset": 0}
        if self._bench.kind == "delta":
            with suppress(DeltaError):
                DeltaTable(self._bench.path).alter.set_table_properties({"their.own": "x"}, raise_if_not_exists=False)
            table = DeltaTable(self._bench.path)
            write_deltalake(table, pa.Table.from_pylist([row], pa.schema(table.schema().to_arrow())), mode="append")
            self._theirs += 1
        else:
            there = iceberg_table(self._bench.folder, self._bench.table)
            with suppress(CommitFailedException), there.transaction() as transaction:
                transaction.set_properties({"their.own": "x"})
            there = iceberg_table(self._bench.folder, self._bench.table)
            with suppress(CommitFailedException):
                there.append(pa.Table.from_pylist([row], there.schema().as_arrow()))
                self._theirs += 1

    # The contract

    def play(self, choose: Choose) -> tuple[str, list[Step]]:
        """One schedule, and what is wrong after it; nothing if the contract was kept."""
        with without_kafka(deletes=self.scenario.deletes):
            return self._play(choose)

    def _play(self, choose: Choose) -> tuple[str, list[Step]]:
        self._restore()
        self._claimed, self._theirs = Counter({0: BEFORE}), 0
        steps: list[Step] = []
        try:
            with points():
                whole = self.scenario.cast(self).play(choose, steps, self._stuck)
            self.check()
            if not whole:
                self._finish()
        except Broken as broken:
            return str(broken), steps
        except AvowError as error:
            return f"afterwards: {type(error).__name__}: {error}", steps
        return "", steps

    def _finish(self) -> None:
        """A run delivers the rest, and a redrive all dead letters: each record is a row then, once."""
        with Runner(self.strict, partitions=len(END)) as run:
            todo = {p: run.position(p) for p in END if run.position(p) < END[p]}
            if todo:
                self._deliver(run, {p: (at, END[p]) for p, at in todo.items()})
        self._claimed = Counter(END)
        self.redrive()
        listed, kept = self.check()
        if (listed or kept) and self.scenario.guarantee != "at-most-once":  # there some may wait for the next batch
            raise Broken(f"after a redrive of everything there are dead letters: {listed}, {kept}")

    def check(self) -> tuple[Counter[Place], Counter[Place]]:
        """What must hold at any time. Gives the dead letters as they are listed, and as their table has them."""
        rows, letters = (self._read(suffix) for suffix in ("", "_dead_letters"))
        if (theirs := rows.pop(THEIRS, 0)) != self._theirs:
            raise Broken(f"somebody else has put {self._theirs} rows there, and there are {theirs}")
        held = self._held()
        listed = self._listed(held)
        for partition, claimed in self._claimed.items():
            position = _position(held, partition)
            if position < claimed:
                raise Broken(f"the position of {partition} is {position}, and {claimed} was claimed")
        for where, one in held.items():
            partition = where.partition
            for offset in range(one.entry.position):
                at = (partition, offset)
                if self.scenario.deletes and (at in DELETES or at in DELETES.values()):
                    self._check_deleted(at, one.entry.position, rows[at], listed[at])
                    continue
                if not self._is_kept(rows[at], listed[at]) or (listed[at] and not offset % 2):
                    raise Broken(f"{at} is claimed, and there are {rows[at]} rows and {listed[at]} dead letters of it")
            self._check_counts(one, *(len([at for at in some if at[0] == partition]) for some in (rows, listed)))
        unclaimed = listed if self.scenario.guarantee == "at-least-once" else rows + listed
        if early := [at for at in unclaimed if at[1] >= _position(held, at[0])]:
            raise Broken(f"rows or listed dead letters of records that nobody has claimed: {early}")
        if twice := [at for at, number in letters.items() if number > 1]:
            raise Broken(f"dead letters that are in their table twice: {twice}")
        self._check_history()
        return listed, letters

    def _check_deleted(self, at: Place, position: int, rows: int, letters: int) -> None:
        """A null value is neither a row nor a dead letter. What it deletes is no row once it is claimed, and the dead
        letter stays, or is left out by a redrive."""
        by = next((by for by, deleted in DELETES.items() if deleted == at), None)
        alive = by is not None and by[1] >= position
        if rows > alive or rows + letters > (by is not None):
            raise Broken(f"{at} deletes or is deleted, and there are {rows} rows and {letters} dead letters of it")

    def _listed(self, held: Mapping[TopicPartition, PartitionState]) -> Counter[Place]:  # noqa: ARG002 - listed is what is claimed
        with sinks.dead_letters(self.strict) as listing:
            return Counter((letter.partition, letter.offset) for letter in listing.select(Selection(), 1_000))

    def _is_kept(self, rows: int, letters: int) -> bool:
        """Of a record that is claimed: what there is of it."""
        match self.scenario.guarantee:
            case "at-most-once":
                return rows + letters <= 1
            case "at-least-once":
                return bool(rows) != bool(letters)
        return rows + letters == 1

    def _check_counts(self, held: PartitionState, rows: int, letters: int) -> None:
        counts, read = held.entry.counts, held.entry.position - held.start
        match self.scenario.guarantee:
            case _ if self.scenario.deletes:  # of rows that are gone
                right = (counts.read, counts.dead) == (read, letters)
            case "at-most-once":  # dead letters that a crash has left uncounted
                right = counts.written == rows and counts.dead <= letters and counts.read <= read
            case "at-least-once":  # rows of a claim that has not come
                right = counts.read == read and counts.written <= rows and counts.dead == letters
            case _:
                right = (counts.read, counts.written, counts.dead) == (read, rows, letters)
        if not right:
            raise Broken(f"{read} are claimed, of {rows} there are rows, of {letters} dead letters; it says {counts}")

    def _held(self) -> Mapping[TopicPartition, PartitionState]:
        rows, _ = lake_tables(self.strict)
        rows.load()
        return rows.ledger().partitions

    def _read(self, suffix: str) -> Counter[Place]:
        """The records in a table, by the library itself."""
        names = (
            ("_kafka_topic", "_kafka_partition", "_kafka_offset") if not suffix else ("topic", "partition", "offset")
        )
        if self._bench.kind == "delta":
            found = pa.table(DeltaTable(f"{self._bench.path}{suffix}").to_pyarrow_table(columns=list(names)))
        else:
            table = iceberg_table(self._bench.folder, f"{self._bench.table}{suffix}")
            found = table.scan(selected_fields=names).to_arrow()
        columns = [found[name].to_pylist() for name in names]
        return Counter((p, o) if topic == TOPIC else THEIRS for topic, p, o in zip(*columns, strict=True))

    def _check_history(self) -> None:
        """Positions, fences and numbers of redrives never go back, from one version to the next. Positions of the
        table of dead letters may: they are taken back."""
        for suffix in ("", "_dead_letters"):
            before: dict[str, int] = {}
            for version in self._history(suffix):
                for name, number in version.items():
                    if number < before.get(name, 0):
                        raise Broken(f"{name} of table {suffix or 'rows'} went back from {before[name]} to {number}")
                before |= version

    def _history(self, suffix: str) -> Iterator[dict[str, int]]:
        """The numbers that each version of a table has brought."""
        prefix = f"avow/{self.strict.name}"
        if self._bench.kind == "delta":
            for file in sorted(Path(f"{self._bench.path}{suffix}/_delta_log").glob("*.json")):
                told = (json.loads(line).get("txn") for line in file.read_bytes().splitlines())
                numbers = {one["appId"].removeprefix(prefix): one["version"] for one in told if one}
                # Counts may fall, the last record's fingerprint may have any number.
                yield {
                    name: number
                    for name, number in numbers.items()
                    if name.rpartition("/")[2] in ("", "redrives", "newest", "owner")
                    or (not suffix and re.fullmatch(rf"/{TOPIC}/\d+", name))
                }
            return
        metadata = iceberg_table(self._bench.folder, f"{self._bench.table}{suffix}")
        past = [entry.metadata_file for entry in metadata.metadata.metadata_log]
        for name in (*past, metadata.metadata_location):
            properties = json.loads(Path(path_of(name)).read_bytes())["properties"]
            if text := properties.get(f"avow.{self.strict.name}"):
                book = from_json(json.loads(text)["book"])
                numbers = {"run": book.run, "newest": book.newest, "redrives": book.redrives}
                numbers |= {f"owner {where}": entry.run for where, entry in book.entries().items()}
                if not suffix:
                    numbers |= {f"position {where}": entry.position for where, entry in book.entries().items()}
                yield numbers


class PostgresWorld(World):
    """The same in PostgreSQL: a table, a pipeline and a ledger of its own for every schedule. There a superseded run
    may still write under at-least-once, dead letters too; and an unclaimed dead letter is listed."""

    def __init__(self, url: str, folder: Path, scenario: str) -> None:
        self.scenario = SCENARIOS[scenario]
        self._url, self._folder = url, folder
        self._connection = psycopg.connect(url, autocommit=True)

    def close(self) -> None:
        self._connection.close()

    def _restore(self) -> None:
        self._begin(Bench("postgres", self._folder, self._url))

    def _stuck(self) -> int:
        found = self._connection.execute("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted").fetchone()
        return int(found[0]) if found else 0

    def _held(self) -> Mapping[TopicPartition, PartitionState]:
        with sinks.driver_sink(self.strict) as store:
            return store.ledger_snapshot()

    def _listed(self, held: Mapping[TopicPartition, PartitionState]) -> Counter[Place]:
        found = super()._listed(held)
        if self.scenario.guarantee != "at-least-once":
            return found
        return Counter({at: n for at, n in found.items() if at[1] < _position(held, at[0])})

    def _is_kept(self, rows: int, letters: int) -> bool:
        return rows + letters >= 1 if self.scenario.guarantee == "at-least-once" else super()._is_kept(rows, letters)

    def _check_counts(self, held: PartitionState, rows: int, letters: int) -> None:
        if self.scenario.guarantee != "at-least-once":
            super()._check_counts(held, rows, letters)

    def _read(self, suffix: str) -> Counter[Place]:
        if suffix:
            found = [at[:2] for at in self._bench.dead_letters()]
        else:
            found = [(row["_kafka_partition"], row["_kafka_offset"]) for row in self._bench.rows()]
        return Counter(found)

    def _check_history(self) -> None:
        """Claims are contiguous."""
        claims = self._connection.execute(
            "SELECT partition, from_offset, until_offset FROM avow.claims WHERE pipeline = %s ORDER BY 1, 2",
            (self.strict.name,),
        )
        ends: Counter[int] = Counter()
        for partition, start, until in claims:
            if start != ends[partition]:
                raise Broken(f"partition {partition} was claimed up to {ends[partition]}, and then from {start} on")
            ends[partition] = until


def _position(held: Mapping[TopicPartition, PartitionState], partition: int) -> int:
    return held[TopicPartition(TOPIC, partition)].entry.position


def _marked(steps: Sequence[Step]) -> bool:
    """Whether the first commit was made."""
    return any(step.point.startswith("commit") for step in steps)


def _no_spark() -> Any:
    raise Broken("no Spark is needed")


@dataclass(frozen=True)
class Scenario:
    cast: Callable[[World], Cast]
    mode: str = "append"
    guarantee: str = "exactly-once"
    deletes: bool = False  # of rows of dead letters: see DELETES
    interrupted: bool = False  # a redrive was killed before, after it had marked its dead letters


SCENARIOS = {
    "adoption": Scenario(
        lambda w: Cast({"owner": lambda: w.member(0), "adopting": lambda: w.member(1)}),
    ),
    "takeover": Scenario(
        lambda w: Cast({"first": lambda: w.member(0), "second": lambda: w.member(0, 1)}, ["first"]),
        mode="upsert",
    ),
    "two redrives": Scenario(
        lambda w: Cast({"one": lambda: w.redrive(until=2), "other": lambda: w.redrive(2)}, ["one"]),
    ),
    "redrives after one that was interrupted": Scenario(
        lambda w: Cast({"one": w.redrive, "in vain": w.redrive_in_vain}),
        interrupted=True,
    ),
    "a redrive beside a member": Scenario(
        lambda w: Cast({"member": lambda: w.member(0), "redrive": w.redrive}, ["member", "redrive"]),
    ),
    **{
        f"a redrive beside a member that deletes, {guarantee}": Scenario(
            lambda w: Cast({"member": w.begun(0), "redrive": w.redrive}, ["redrive"]),
            mode="upsert",
            guarantee=guarantee,
            deletes=True,
        )
        for guarantee in ("at-least-once", "exactly-once")
    },
    **{
        f"a redrive beside two members, {guarantee}": Scenario(
            lambda w: Cast(
                {"first": lambda: w.member(0), "second": lambda: w.member(0), "redrive": w.redrive},
                ["first", "redrive"],
            ),
            guarantee=guarantee,
        )
        for guarantee in ("at-most-once", "at-least-once")
    },
    "upkeep beside a member": Scenario(
        lambda w: Cast(
            {"member": lambda: w.member(0, 1), "clean": w.clean, "compact": w.compact, "foreign": w.foreign}, ["member"]
        ),
    ),
    "all at once": Scenario(
        lambda w: Cast(
            {
                "first": lambda: w.member(0),
                "second": lambda: w.member(0, 1),
                "redrive": w.redrive,
                "other redrive": lambda: w.redrive(until=4),
                "clean": w.clean,
                "compact": w.compact,
                "foreign": w.foreign,
            },
            ["first", "redrive"],
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Play orders of loads and commits on real local tables.")
    parser.add_argument("--kind", choices=["delta", "iceberg"], nargs="*", default=["delta", "iceberg"])
    parser.add_argument("--postgres", metavar="URL", help="there instead; not for scenarios with upkeep")
    parser.add_argument("--scenario", choices=list(SCENARIOS), nargs="*", default=list(SCENARIOS))
    parser.add_argument("--preemptions", type=int, default=1)
    parser.add_argument(
        "--at-most", type=int, default=sys.maxsize, help="schedules of each scenario, before random ones"
    )
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--play", help="one schedule, as a failure has printed it")
    told = parser.parse_args()
    failures = 0
    kinds = ["postgres"] if told.postgres else told.kind
    for kind, scenario in ((kind, scenario) for kind in kinds for scenario in told.scenario):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            made = PostgresWorld(told.postgres, Path(folder), scenario) if kind == "postgres" else None
            world, began = made or World(kind, Path(folder), scenario), time.monotonic()
            if told.play:
                pairs = (part.rpartition("*") for part in told.play.split(","))
                prefix = [name for name, _, times in pairs for _ in range(int(times))]
                problem, steps = world.play(partial(_follow, prefix))
                found = Found(1, problem, tuple(steps))
            else:
                found = explore(world, told.preemptions, at_most=told.at_most, walks=told.random, seed=told.seed)
            took = f"{found.schedules} schedules in {time.monotonic() - began:.0f} s, seed {told.seed}"
            print(f"{kind}, {scenario}: {took}: {found.told() if found.problem else 'kept'}", flush=True)
            failures += bool(found.problem)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
