"""What the benches share: a cluster of their own, and what a process and all it starts cost while it runs.

Time
----
All times are this machine's clock, so that three sources can be compared: when a process was started (here), when a
batch was planned on Spark (by a streaming query: the time of ``offsets/N`` in its checkpoint folder; by avow: the time
of a batch's progress line, less the seconds that the batch took), and when rows were committed (PostgreSQL keeps the
time of every commit; asked afterwards, so that asking costs a contender nothing).

CPU
---
Brokers live through all runs: their CPU time is read as it is. PostgreSQL's main process adds up its ended children,
so the sum over it and its living children is exact, but while a child ends. A contender's processes are looked at every
0.2 s and the last look counts: what a process does between its last look and its end is missed. A contender without a
JVM lasts seconds or less, so there the kernel is asked at the end what all of it has used.

A core of a shared machine is not always the same core: the same loop may cost half as much again a minute later, with
nothing else running here. So each look also times a loop of its own, the yardstick, and a cost can be given in these.

Owns: the cluster, the samples. Must not know: who is compared with whom. Neighbour: ``contenders``.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import psutil
import psycopg
from confluent_kafka import Producer
from confluent_kafka.cimpl import NewTopic
from rich.console import Console
from rich.markup import escape

from avow.kafka import metadata
from avow.local import jars, java
from avow.local.cluster import Cluster
from bench.records import LINEAGE, PARTITIONS, Shape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
SAMPLE_EVERY_S = 0.2
YARDSTICK = 30_000  # additions: about 3 ms of each 200
GROUPS = ("brokers", "jvm", "client", "postgres")  # client: what a contender has beside its JVM
BUSY_LOAD = 0.5
COMMITS_AT_LEAST = 8  # where there are no batches: what others had at work when the first one came would count for free
USUAL = Shape()


class NotMeasuredError(Exception):
    """A contender lacks something on this machine."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a contender is started."""

    arguments: list[str]
    folder: Path  # its own: files, checkpoint, temporary files
    reports_batches: bool = False  # on standard output, as ``avow run --json`` does on Spark
    is_one_batch: bool = False  # which begins when the process does
    timeout_s: float = 3600
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Commit:
    at: float
    rows: int


@dataclass(frozen=True, slots=True)
class Rig:
    """The cluster and what a bench does on it."""

    cluster: Cluster
    folder: Path

    @property
    def url(self) -> str:
        url = self.cluster.postgres_url
        assert url, "the bench's cluster has PostgreSQL"
        return url

    def query(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            done = connection.execute(text.encode())
            return done.fetchall() if done.description else []

    def new_folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{uuid4().hex[:8]}"
        folder.mkdir()
        return folder

    def make_topic(self, partitions: int = PARTITIONS) -> str:
        name = f"bench-{uuid4().hex[:8]}"
        client = metadata.admin(self.cluster.bootstrap)
        client.create_topics([NewTopic(name, partitions)], operation_timeout=30)[name].result()
        return name

    def produce(self, topic: str, numbers: range, shape: Shape = USUAL) -> None:
        """Records with these numbers, round the partitions, all of them acknowledged by all replicas."""
        failed: list[object] = []
        # Without idempotence a send that is tried again may be there twice, as with 500 partitions on a busy machine.
        settings = {"bootstrap.servers": self.cluster.bootstrap, "enable.idempotence": True, "linger.ms": 50}
        producer = Producer(
            {**settings, "on_delivery": lambda error, _: failed.append(error) if error else None},
            logger=metadata.QUIET,
        )
        for number in numbers:
            value, where = shape.value(number), number % shape.partitions
            while True:
                try:
                    producer.produce(topic, value, partition=where)
                    break
                except BufferError:
                    producer.poll(0.1)
        left = producer.flush(120)
        if left or failed:
            raise RuntimeError(f"{left} records not delivered, {len(failed)} refused: {failed[:1]}")

    def filled_topic(self, records: int, console: Console, shape: Shape = USUAL) -> str:
        topic = self.make_topic(shape.partitions)
        with console.status(f"producing {records:,} records"):
            self.produce(topic, range(records), shape)
        return topic

    def make_table(self, shape: Shape = USUAL, *, lineage: bool = True) -> str:
        name = f"bench_{uuid4().hex[:8]}"
        self.query(f"CREATE TABLE {name} ({shape.payload}{f', {LINEAGE}' if lineage else ''})")
        return name

    def settle(self) -> None:
        """Write out what earlier runs left in memory, so that the next does not pay for it."""
        self.query("CHECKPOINT")

    def commits(self, table: str, after: float = 0) -> list[Commit]:
        """The table's growth: each transaction that put rows into it since ``after``, in order."""
        found = self.query(
            f"SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 AS at, count(*) FROM {table}"
            " GROUP BY xmin ORDER BY at"
        )
        return [Commit(at, rows) for at, rows in found if at is not None and at > after]

    def wrong(self, table: str, expected: int, produced: int) -> str:
        """What is wrong with the table; empty if it holds ``expected`` of the records produced, each once."""
        # Rows that were there before have ids below 0.
        counts = self.query(f"SELECT count(*), count(DISTINCT id), max(id) FROM {table} WHERE id >= 0")
        rows, different, highest = counts[0]
        if (rows, different) != (expected, expected):
            return f"{rows:,} rows, {different:,} different, of {expected:,}"
        return "" if highest < produced else f"id {highest} was never produced"

    def drop(self, table: str) -> None:
        self.query(f"DROP TABLE {table}")


@contextmanager
def rig(console: Console) -> Iterator[Rig]:
    """A cluster in a temporary folder. Whatever happens, it is stopped and removed."""
    # A polite kill must still stop the cluster.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        console.print(f"[yellow]This machine is busy (load {load:.1f}): what is measured now says little.[/]")
    with tempfile.TemporaryDirectory(prefix="avow-bench-") as name:
        folder = Path(name)
        cluster = Cluster(folder / "cluster")
        try:
            with console.status("starting three Kafka nodes and PostgreSQL"):
                cluster.up()
                made = Rig(cluster, folder)
                made.query("ALTER SYSTEM SET track_commit_timestamp = on")
                cluster.restart("postgres")
            yield made
        finally:
            if cluster.exists:
                cluster.down()


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. CPU is cumulative, so that any two looks make a cost."""

    at: float
    cpu_s: dict[str, float]  # by group, and "machine" for all that ran on it
    rss_mb: dict[str, float]  # jvm, driver (the process that was started), workers (all others)
    yardstick_s: float  # the CPU time of a loop that is always the same


@dataclass(slots=True)
class Run:
    """What was seen of one process tree from start to end."""

    started: float
    ended: float = 0
    samples: list[Sample] = field(default_factory=list)
    planned: dict[int, float] = field(default_factory=dict)  # Spark batch -> when it was planned
    java_options: str = ""  # of the JVM that really ran
    problem: str = ""

    def cpu_s(self, begin: float, end: float) -> dict[str, float]:
        """Core-seconds by group between two times; "others" is whatever else the machine did meanwhile."""
        first, last = self._cpu_at(begin), self._cpu_at(end)
        spent = {group: last[group] - first[group] for group in GROUPS}
        spent["others"] = max(0.0, last["machine"] - first["machine"] - sum(spent.values()))
        return spent

    def _cpu_at(self, at: float) -> dict[str, float]:
        """Between two looks, CPU is taken to have been used evenly."""
        before = max((s for s in self.samples if s.at <= at), key=lambda s: s.at, default=self.samples[0])
        after = min((s for s in self.samples if s.at >= at), key=lambda s: s.at, default=self.samples[-1])
        share = (at - before.at) / (after.at - before.at) if after.at > before.at else 0.0
        return {group: spent + share * (after.cpu_s[group] - spent) for group, spent in before.cpu_s.items()}

    def yardstick_s(self, begin: float, end: float) -> float:
        within = [s.yardstick_s for s in self.samples if begin <= s.at <= end]
        return statistics.mean(within or [s.yardstick_s for s in self.samples])

    def peak_mb(self, begin: float = 0, end: float = float("inf")) -> dict[str, float]:
        within = [sample.rss_mb for sample in self.samples if begin <= sample.at <= end]
        return {part: max((rss[part] for rss in within), default=0.0) for part in ("jvm", "driver", "workers")}


class Tree:
    """A process, all that it starts, and the cluster beside it."""

    def __init__(self, command: Command, rig: Rig) -> None:
        self._command = command
        self._brokers = [process for broker in rig.cluster.brokers() if (process := broker.process())]
        server = rig.cluster.part("postgres").process()
        assert server is not None, "PostgreSQL is up"
        self._postgres = server
        self._seen: dict[psutil.Process, tuple[str, float]] = {}  # kind and CPU at the last look
        self.log = command.folder / "log"
        temporary = str(command.folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "DATABASE_URL": rig.url,
            # What a contender leaves behind goes with its folder, and its checkpoint can be found.
            "TMPDIR": temporary,
            "SPARK_LOCAL_DIRS": temporary,
            **command.environment,
        }
        self._waited_before = _waited_cpu()
        with self.log.open("wb") as log:
            self.run = Run(time.time())
            self.child = subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=command.folder,
                env=environment,
                start_new_session=True,  # a Ctrl-C is ours to handle
            )
        self._root = psutil.Process(self.child.pid)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ended(self, within_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(within_s)
            return True
        return False

    def look(self) -> None:
        """Take one sample."""
        rss = dict.fromkeys(("jvm", "driver", "workers"), 0.0)
        family = self._family()
        for process in family:
            with suppress(psutil.NoSuchProcess), process.oneshot():
                kind, times = _kind(process), process.cpu_times()
                self._seen[process] = (kind, times.user + times.system)
                part = "jvm" if kind == "jvm" else "driver" if process == self._root else "workers"
                rss[part] += process.memory_info().rss / 1e6
        spent = {kind: sum(cpu for found, cpu in self._seen.values() if found == kind) for kind in ("jvm", "client")}
        spent["brokers"] = sum(_own_cpu(process) for process in self._brokers)
        spent["postgres"] = _cpu_with_children(self._postgres)
        spent["machine"] = _machine_cpu()
        # A process that ends while it is counted may be neither among the living nor among the ended ones. Nothing of
        # this can fall, so what it has used is kept until it is counted again.
        before = self.run.samples[-1].cpu_s if self.run.samples else spent
        spent = {group: max(cpu, before[group]) for group, cpu in spent.items()}
        self.run.samples.append(Sample(time.time(), spent, rss, _yardstick_s()))
        self._note_batches()
        self._note_java(family)

    def _add_missed(self) -> None:
        """What was used after the last look. A JVM may be nobody's child any more, and is never waited for here."""
        if all(kind == "client" for kind, _ in self._seen.values()):
            missed = _waited_cpu() - self._waited_before - sum(cpu for _, cpu in self._seen.values())
            kind, seen = self._seen.get(self._root, ("client", 0.0))
            self._seen[self._root] = kind, seen + max(0.0, missed)

    def _family(self) -> list[psutil.Process]:
        """All of it that lives, also what lost its parent."""
        found = {process for process in self._seen if process.is_running()} | {self._root}
        with suppress(psutil.NoSuchProcess):
            found |= set(self._root.children(recursive=True))
        return list(found)

    def _note_batches(self) -> None:
        for path in self._command.folder.glob("*checkpoint*/offsets/[0-9]*"):
            with suppress(FileNotFoundError, ValueError):
                self.run.planned.setdefault(int(path.name), path.stat().st_mtime)

    def _note_reported_batches(self) -> None:
        for line in self.log.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                report = json.loads(line)
                if "batch" in report:
                    began = datetime.fromisoformat(report["time"]).timestamp() - report["seconds"]
                    self.run.planned[len(self.run.planned)] = began

    def _note_java(self, family: list[psutil.Process]) -> None:
        """Spark's JVM, and not the launcher's, which only makes its command line and so names the same class."""
        if self.run.java_options:
            return
        for process in family:
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if "org.apache.spark.deploy.SparkSubmit" in words and "org.apache.spark.launcher.Main" not in words:
                    self.run.java_options = " ".join(word for word in words if word.startswith(("-XX", "-Xm")))

    def kill(self) -> None:
        """kill -9 of all of it, and return once all of it is gone."""
        family = self._family()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.child.wait()
        psutil.wait_procs(family, 30)

    def end(self) -> None:
        """The driver has ended: note when and how, and wait for its JVM, which may live a moment longer."""
        self.run.ended = time.time()
        self._add_missed()
        self.look()
        if self._command.reports_batches:
            self._note_reported_batches()
        if self._command.is_one_batch:
            self.run.planned[0] = self.run.started
        if self.child.returncode:
            lines = self.log.read_text(errors="replace").splitlines()
            self.run.problem = f"exit code {self.child.returncode}: " + " | ".join(lines[-3:])
        psutil.wait_procs([process for process in self._seen if process != self._root], 10)


def run(command: Command, rig: Rig) -> Run:
    """Run a command to its end and look at it meanwhile."""
    rig.settle()
    with Tree(command, rig) as tree:
        tree.look()
        deadline = time.monotonic() + command.timeout_s
        while not tree.ended(SAMPLE_EVERY_S):
            tree.look()
            if time.monotonic() > deadline:
                tree.run.ended, tree.run.problem = time.time(), f"not done after {command.timeout_s:g} s"
                return tree.run
        tree.end()
    return tree.run


def _yardstick_s() -> float:
    begin, total = time.thread_time(), 0
    for number in range(YARDSTICK):
        total += number
    return time.thread_time() - begin


def _kind(process: psutil.Process) -> str:
    return "jvm" if process.name() == "java" else "client"


def _own_cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _waited_cpu() -> float:
    """Of all processes that this one has waited for, and those that they have."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _cpu_with_children(process: psutil.Process) -> float:
    """Its own, its ended children's (it has waited for them) and its living ones'."""
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += _own_cpu(child)
    return total


def _machine_cpu() -> float:
    """All cores' busy time, interrupts and stolen time included. Guest time is part of user time already."""
    times = psutil.cpu_times()._asdict()
    return float(sum(spent for kind, spent in times.items() if kind not in ("idle", "iowait", "guest", "guest_nice")))


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a run, and what it cost."""

    seconds: float
    rows: int
    cpu_s: dict[str, float]
    yardstick_s: float  # what the yardstick cost meanwhile

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_per_million(self) -> float:
        return self.seconds / self.rows * 1e6 if self.rows else 0.0

    def core_s_per_million(self, group: str | None = None) -> float:
        """Of one group, or of all four together ("others" are not ours)."""
        spent = self.cpu_s[group] if group else sum(self.cpu_s[each] for each in GROUPS)
        return spent / self.rows * 1e6 if self.rows else 0.0

    def yardsticks_per_row(self) -> float:
        """All four together, in a unit that a slow hour of a shared machine stretches as well."""
        return self.core_s_per_million() / 1e6 / self.yardstick_s

    def as_json(self) -> dict[str, Any]:
        groups = (*GROUPS, "others")
        return {
            "seconds": round(self.seconds, 3),
            "rows": self.rows,
            "rows_per_s": round(self.rows_per_s),
            "core_s_per_million": {group: round(self.core_s_per_million(group), 3) for group in groups},
            "core_s_per_million_total": round(self.core_s_per_million(), 3),
            "yardstick_ms": round(self.yardstick_s * 1e3, 3),
        }


@dataclass(frozen=True)
class Outcome:
    """One run, judged: its spans, its memory, and whether it wrote what it should."""

    run: Run
    commits: list[Commit]
    problem: str  # empty: every record is in the table, once

    @property
    def rows(self) -> int:
        return sum(commit.rows for commit in self.commits)

    @property
    def first_row_s(self) -> float:
        return self.commits[0].at - self.run.started

    @cached_property
    def whole(self) -> Span:
        """From process start to its end: start-up, draining and shutting down."""
        return self._span(self.run.started, self.run.ended, self.rows)

    @cached_property
    def drain(self) -> Span:
        """From Spark's plan of the first batch to the last commit. Without batches: from the first commit on."""
        begin = self.run.planned.get(0)
        if begin is None:
            return self.committing
        return self._span(begin, self.commits[-1].at, self.rows)

    @cached_property
    def committing(self) -> Span:
        """From the first commit to the last, and the rows of all but the first."""
        first, *rest = self.commits
        return self._span(first.at, self.commits[-1].at, sum(commit.rows for commit in rest))

    @cached_property
    def warm(self) -> Span | None:
        """As ``drain``, without the first batch, in which workers start and classes load."""
        begin = self.run.planned.get(1)
        if begin is None:
            return None
        return self._span(begin, self.commits[-1].at, sum(commit.rows for commit in self.commits if commit.at > begin))

    @property
    def steady(self) -> Span:
        """Without what starts up: the first batch, or where there are no batches, what came before the first commit."""
        return self.warm or self.drain

    def _span(self, begin: float, end: float, rows: int) -> Span:
        return Span(end - begin, rows, self.run.cpu_s(begin, end), self.run.yardstick_s(begin, end))

    def as_json(self) -> dict[str, Any]:
        if self.problem and not self.commits:
            return {"problem": self.problem}
        return {
            "problem": self.problem,
            "rows": self.rows,
            "commits": len(self.commits),
            "batches": len(self.run.planned),
            "java_options": self.run.java_options,
            "first_row_s": round(self.first_row_s, 3),
            "whole": self.whole.as_json(),
            "drain": self.drain.as_json(),
            "warm": self.warm.as_json() if self.warm else None,
            "committing": self.committing.as_json(),
            "peak_mb": {part: round(peak) for part, peak in self.run.peak_mb().items()},
        }


Round = dict[str, Outcome]


class HasProblem(Protocol):
    @property
    def problem(self) -> str: ...


Judged = TypeVar("Judged", bound=HasProblem)


def sound(rounds: Sequence[Mapping[str, Judged]], name: str) -> tuple[list[Judged], str]:
    """A contender's outcomes that count, and what a table is to say: that all were right, or what was wrong."""
    wrong = next((each[name].problem for each in rounds if each[name].problem), "")
    return [each[name] for each in rounds if not each[name].problem], f"[red]{escape(wrong)}[/]" if wrong else "right"


def verdict(values: Sequence[float], goal: float, *, at_most: bool = False) -> str:
    """Of the median. What could not be measured is unknown, never missed and never reached."""
    if not values:
        return "unknown"
    middle = statistics.median(values)
    return "reached" if (middle <= goal if at_most else middle >= goal) else "missed"


def take_turns(rounds: int, field: Mapping[str, Callable[[], Outcome]], console: Console) -> list[Round]:
    """Every contender of the field, round after round. Ratios are made within a round: there both met one machine."""
    played: list[Round] = []
    for number in range(1, rounds + 1):
        played.append({})
        for name, play in field.items():
            with console.status(f"round {number} of {rounds}: {name}", refresh_per_second=1):
                outcome = played[-1][name] = play()
            status = outcome.problem or f"{outcome.drain.rows_per_s:,.0f} rows/s"
            console.print(f"round {number}  {name:26} {status}", highlight=False, markup=False)
    return played


def judged(rig: Rig, run: Run, table: str, expected: int, produced: int) -> Outcome:
    """Look into the table a run has filled."""
    commits = rig.commits(table, after=run.started)
    problem = run.problem or rig.wrong(table, expected, produced)
    if not problem and len(commits) < COMMITS_AT_LEAST and not run.planned:
        problem = "too few commits to measure"
    return Outcome(run, commits, problem)


def machine() -> dict[str, Any]:
    """Where this was measured."""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "java": java.find().version,
        "kafka": jars.KAFKA_VERSION,
        "spark": jars.SPARK_VERSION,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def save(folder: Path, name: str, result: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
