"""The consumer engine beside Spark's and a plain consumer, and how late a record is: ``python -m bench.consumer``.

Two questions on one cluster. *Draining*: the same topic into a fresh table by each contender in turn, round after
round; ratios are made within a round. *Latency*: records are sent in handfuls, a hundred times a second, and another
connection asks PostgreSQL every few milliseconds how far the table is; a record's latency is the time from its
``produce`` to the first such answer that has it. Both engines in turn, round after round, and before them a consumer
that does nothing with what it gets: no engine can be quicker. What is sent while one warms up does not count.

Owns: who takes part, the targets, the pace and the poller. Neighbours: ``contenders``, ``measure``, ``plot``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self

import click
import numpy as np
import psycopg
from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from avow.guarantee import Guarantee
from avow.kafka import metadata
from bench import contenders, measure, plot
from bench.contenders import Task
from bench.decode import record
from bench.measure import PARTITIONS, Command, Outcome, Rig, Round, Tree

CONSUMER, SPARK, PLAIN = "avow, consumer engine", "avow, Spark engine", "one by one"
ENGINES = {CONSUMER: "consumer", SPARK: "spark"}
WATCHED = {"Kafka alone": "", **ENGINES}  # how late records are
# What the consumer engine is to reach, as a multiple of each other contender's rows/s. Beside Spark: no target.
TARGETS = {PLAIN: 50.0, SPARK: 0.0}
P99_TARGET_MS = 100.0

TICK_S = 0.01  # records are sent in handfuls, so often
POLL_S = 0.005
HEAR_S = 0.05
START_TIMEOUT_S = 180
DRAIN_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Options:
    records: int
    rounds: int
    part: int  # of the records, for the plain consumer
    max_records: int
    rate: int  # records a second
    seconds: int
    warm_up: int  # seconds of the same before that
    master: str
    memory: str


# Draining


def compare(rig: Rig, options: Options, console: Console) -> list[Round]:
    topic = rig.filled_topic(options.records, console)
    word = str(Guarantee.EXACTLY_ONCE)
    starts: dict[str, tuple[int, Callable[[Task], Command]]] = {
        CONSUMER: (options.records, lambda task: contenders.avow(rig, task, word, engine="consumer")),
        SPARK: (options.records, lambda task: contenders.avow(rig, task, word)),
        PLAIN: (options.part, lambda task: contenders.plain(rig, task, options.part)),
    }
    turns = {name: partial(one, rig, topic, *start, options) for name, start in starts.items()}
    return measure.take_turns(options.rounds, turns, console)


def one(rig: Rig, topic: str, records: int, start: Callable[[Task], Command], options: Options) -> Outcome:
    table = rig.make_table()
    task = Task(topic, table, options.max_records, options.master, options.memory)
    run = measure.run(start(task), rig)
    outcome = measure.judged(rig, run, table, records, options.records)
    rig.drop(table)
    return outcome


def ratios(rounds: list[Round], against: str) -> list[float]:
    pairs = [(each[CONSUMER], each[against]) for each in rounds]
    return [a.drain.rows_per_s / b.drain.rows_per_s for a, b in pairs if not a.problem and not b.problem]


# Latency


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one engine in one round, in milliseconds."""

    records: int
    p50: float
    p99: float
    most: float
    rate: float  # records a second that were really sent
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        numbers = {"p50_ms": self.p50, "p99_ms": self.p99, "most_ms": self.most, "rate": self.rate}
        return {"records": self.records, "problem": self.problem} | {k: round(v, 2) for k, v in numbers.items()}


class Watcher(threading.Thread, ABC):
    """Sees up to which offset the records of each partition have come."""

    def __init__(self) -> None:
        super().__init__(name="watcher", daemon=True)
        self._enough = threading.Event()
        self.seen: list[tuple[float, list[int]]] = []  # when, and the highest offsets
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.watch()
        except (psycopg.Error, ValueError) as error:
            self.error = error

    @abstractmethod
    def watch(self) -> None:
        """Add to ``seen`` until it is enough."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self.join()
        if self.error is not None:
            raise self.error

    def wait_for(self, number: int, tree: Tree, timeout_s: float) -> None:
        """Until the records below ``number`` have come."""
        deadline = time.monotonic() + timeout_s
        while not self.seen or any(
            highest < (number - 1 - partition) // PARTITIONS for partition, highest in enumerate(self.seen[-1][1])
        ):
            if self.error is not None or tree.ended(0.01) or time.monotonic() > deadline:
                told = tree.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"not all records came within {timeout_s:g} s: {self.error or told}")


class Poller(Watcher):
    """Asks the table, over its own connection, what is visible."""

    def __init__(self, url: str, table: str) -> None:
        super().__init__()
        self._url, self._table = url, table

    def watch(self) -> None:
        each = [
            f"(SELECT coalesce(max(_kafka_offset), -1) FROM {self._table} WHERE _kafka_partition = {number})"
            for number in range(PARTITIONS)
        ]
        query = f"SELECT {', '.join(each)}".encode()
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._enough.is_set():
                row = connection.execute(query).fetchone()
                assert row is not None
                if not self.seen or list(row) != self.seen[-1][1]:
                    self.seen.append((time.monotonic(), list(row)))
                time.sleep(POLL_S)


class Hearer(Watcher):
    """Reads what ``bench.listen`` prints, whose times these are."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    def watch(self) -> None:
        line = ""
        with self._log.open() as log:
            while not self._enough.is_set():
                line += log.readline()
                if not line.endswith("\n"):
                    time.sleep(HEAR_S)
                    continue
                when, highest = json.loads(line)
                self.seen.append((when, highest))
                line = ""


class Sender:
    """Sends records at a pace, and keeps when. Record n is offset n // PARTITIONS of partition n % PARTITIONS."""

    def __init__(self, rig: Rig, topic: str) -> None:
        self.failed: list[object] = []
        settings = {"bootstrap.servers": rig.cluster.bootstrap, "enable.idempotence": True, "linger.ms": 1}
        self._producer = Producer(
            {**settings, "on_delivery": lambda error, _: self.failed.append(error) if error else None},
            logger=metadata.QUIET,
        )
        self._topic = topic
        self.sent: list[float] = []

    def send(self, count: int) -> None:
        for number in range(len(self.sent), len(self.sent) + count):
            value = record(number)
            self.sent.append(time.monotonic())
            self._producer.produce(self._topic, value, partition=number % PARTITIONS)
        self._producer.poll(0)

    def pace(self, rate: int, seconds: float) -> None:
        """Late handfuls are made up for, so that the rate holds."""
        began, first = time.monotonic(), len(self.sent)
        while (passed := time.monotonic() - began) < seconds:
            self.send(first + int(passed * rate) - len(self.sent))
            time.sleep(TICK_S)

    def flush(self) -> None:
        left = self._producer.flush(60)
        if left or self.failed:
            raise RuntimeError(f"{left} records not delivered, {len(self.failed)} refused: {self.failed[:1]}")


def latency(rig: Rig, engine: str, options: Options) -> Latency:
    """``engine``: of avow, or none, which is Kafka alone."""
    topic = rig.make_topic()
    sender = Sender(rig, topic)
    if not engine:
        folder = rig.new_folder("listen")
        (folder / "log").touch()
        command = Command([sys.executable, "-m", "bench.listen", rig.cluster.bootstrap, topic], folder)
        found, _ = _paced(rig, sender, Hearer(folder / "log"), command, options)
        return found
    table = rig.make_table()
    rig.query(f"CREATE INDEX ON {table} (_kafka_partition, _kafka_offset)")  # for the poller's sake
    task = Task(topic, table, options.max_records, options.master, options.memory)
    word = str(Guarantee.EXACTLY_ONCE)
    # Spark waits a second between batches unless told otherwise: here the engine is measured, not the pause.
    command = contenders.avow(rig, task, word, engine=engine, interval="0s", once=False)
    found, sent = _paced(rig, sender, Poller(rig.url, table), command, options)
    problem = rig.wrong(table, sent, sent)
    rig.drop(table)
    return replace(found, problem=problem)


def _paced(rig: Rig, sender: Sender, watcher: Watcher, command: Command, options: Options) -> tuple[Latency, int]:
    """How late records were, and how many were sent."""
    rig.settle()
    with watcher, Tree(command, rig) as tree:
        sender.send(PARTITIONS)
        sender.flush()
        watcher.wait_for(PARTITIONS, tree, START_TIMEOUT_S)
        sender.pace(options.rate, options.warm_up)
        first, began = len(sender.sent), time.monotonic()
        sender.pace(options.rate, options.seconds)
        rate = (len(sender.sent) - first) / (time.monotonic() - began)
        sender.flush()
        watcher.wait_for(len(sender.sent), tree, DRAIN_TIMEOUT_S)
    found = delays_ms(np.array(sender.sent), watcher.seen)[first:]
    p50, p99 = np.percentile(found, [50, 99])
    return Latency(len(found), float(p50), float(p99), float(found.max()), rate), len(sender.sent)


def delays_ms(sent: np.ndarray, seen: list[tuple[float, list[int]]]) -> np.ndarray:
    """From each record's sending to the first answer that has it."""
    at = np.array([when for when, _ in seen])
    highest = np.array([row for _, row in seen])
    numbers = np.arange(len(sent))
    delays = np.empty(len(sent))
    for partition in range(PARTITIONS):
        mine = numbers[numbers % PARTITIONS == partition]
        first = np.searchsorted(highest[:, partition], mine // PARTITIONS, side="left")
        delays[mine] = (at[first] - sent[mine]) * 1000
    return delays


def latencies(rig: Rig, options: Options, console: Console) -> list[dict[str, Latency]]:
    played: list[dict[str, Latency]] = []
    for number in range(1, options.rounds + 1):
        played.append({})
        for name, engine in WATCHED.items():
            with console.status(f"round {number} of {options.rounds}: latency, {name}", refresh_per_second=1):
                try:
                    found = latency(rig, engine, options)
                except RuntimeError as error:
                    found = Latency(0, 0, 0, 0, 0, problem=str(error))
                played[-1][name] = found
            told = found.problem or f"p50 {found.p50:,.1f} ms, p99 {found.p99:,.1f} ms, most {found.most:,.1f} ms"
            console.print(f"round {number}  {name:26} {told}", highlight=False, markup=False, soft_wrap=True)
    return played


# Telling


def speed_table(rounds: list[Round]) -> Table:
    table = Table(title="draining, medians over the rounds", caption="start-up is not in rows/s; wall has it")
    table.add_column("contender")
    for title in ("rows/s", "wall s", "core-s per million", "peak MB: JVM", "Python", "table"):
        table.add_column(title, justify="right")
    for name in rounds[0]:
        sound, told = measure.sound(rounds, name)
        if not sound:
            table.add_row(name, *["-"] * 5, told)
            continue
        peaks = [outcome.run.peak_mb() for outcome in sound]
        table.add_row(
            name,
            f"{median(outcome.drain.rows_per_s for outcome in sound):,.0f}",
            f"{median(outcome.whole.seconds for outcome in sound):.1f}",
            f"{median(outcome.drain.core_s_per_million() for outcome in sound):.1f}",
            f"{max(peak['jvm'] for peak in peaks):,.0f}",
            f"{max(peak['workers'] + peak['driver'] for peak in peaks):,.0f}",
            told,
        )
    return table


def verdict(found: list[float], target: float, *, at_most: bool = False) -> str:
    """What could not be measured is unknown, never missed."""
    if not found:
        return "unknown"
    reached = median(found) <= target if at_most else median(found) >= target
    return "reached" if reached else "missed"


def ratio_table(rounds: list[Round]) -> Table:
    table = Table(title=f"{CONSUMER} against the others, by rows/s")
    for title in ("against", "ratio", "each round", "to reach", ""):
        table.add_column(title)
    for against, target in TARGETS.items():
        found = ratios(rounds, against)
        middle = f"{median(found):.2f}" if found else "-"
        told = [f"{target:g}", verdict(found, target)] if target else ["", ""]
        table.add_row(against, middle, ", ".join(f"{r:.2f}" for r in found), *told)
    return table


def latency_table(rounds: list[dict[str, Latency]], options: Options) -> Table:
    table = Table(
        title=f"from produce to visible, {options.rate:,} records/s for {options.seconds} s, medians over the rounds"
    )
    table.add_column("engine")
    for title in ("p50 ms", "p99 ms", "each round", "most ms", "sent/s", "to reach", ""):
        table.add_column(title, justify="right")
    for name in WATCHED:
        sound, told = measure.sound(rounds, name)
        if not sound:
            table.add_row(name, *["-"] * 6, told)
            continue
        p99s = [one.p99 for one in sound]
        target = [f"{P99_TARGET_MS:g}", verdict(p99s, P99_TARGET_MS, at_most=True)] if name == CONSUMER else ["", ""]
        table.add_row(
            name,
            f"{median(one.p50 for one in sound):,.1f}",
            f"{median(p99s):,.1f}",
            ", ".join(f"{p99:,.1f}" for p99 in p99s),
            f"{max(one.most for one in sound):,.1f}",
            f"{median(one.rate for one in sound):,.0f}",
            *target,
        )
    return table


@click.command(help=__doc__)
@click.option("--records", default=2_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--part", default=20_000, show_default=True, help="Records for the one-by-one consumer.")
@click.option("--max-records", default=500_000, show_default=True, help="Of one batch.")
@click.option("--rate", default=2_000, show_default=True, help="Records a second, for the latency.")
@click.option("--seconds", default=60, show_default=True, help="Of that rate.")
@click.option("--warm-up", default=15, show_default=True, help="Seconds of the same that do not count.")
@click.option("--master", default=contenders.MASTER, show_default=True, help="Spark's.")
@click.option("--memory", default=contenders.MEMORY, show_default=True, help="Of the driver's JVM.")
@click.option("--only", type=click.Choice(["draining", "latency"]), help="One of the two questions.")
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(results: Path, only: str | None, **given: Any) -> None:
    options = Options(**{**given, "part": min(given["part"], given["records"])})
    console = Console()
    where = measure.machine()
    late: list[dict[str, Latency]] = []
    rounds: list[Round] = []
    with measure.rig(console) as rig:
        if only != "draining":
            late = latencies(rig, options, console)  # first: what draining leaves behind would be in it
        if only != "latency":
            rounds = compare(rig, options, console)
    if late:
        console.print(latency_table(late, options))
    if rounds:
        console.print(speed_table(rounds), ratio_table(rounds))
    found = {
        "machine": where,
        "options": {name: getattr(options, name) for name in options.__slots__},
        "rounds": [{name: outcome.as_json() for name, outcome in each.items()} for each in rounds],
        "ratios": {against: [round(r, 3) for r in ratios(rounds, against)] for against in TARGETS},
        "latency": [{name: one.as_json() for name, one in each.items()} for each in late],
    }
    path = measure.save(results, "consumer", found)
    if rounds:
        plot.bars(rounds, path.with_suffix(".png"), f"{options.records:,} records, {where['cores']} cores")
    console.print(str(path), highlight=False)


if __name__ == "__main__":
    main()
