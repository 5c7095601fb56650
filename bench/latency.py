"""How late is a record? Both engines, and Kafka alone: ``python -m bench.latency``.

Records are sent in handfuls, a hundred times a second, and another connection asks PostgreSQL every few milliseconds
how far the table is; a record's latency is the time from its ``produce`` to the first such answer that has it. Both
engines in turn, round after round, and before them a consumer that does nothing with what it gets: no engine can be
quicker. What is sent while one warms up does not count.

Owns: the goal, the pace and the poller. Neighbours: ``contenders``, ``measure``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
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
from bench import contenders, measure
from bench.contenders import Task
from bench.decode import record
from bench.measure import Command, Rig, Tree
from bench.records import PARTITIONS

CONSUMER = "consumer engine"
ENGINES = {"Kafka alone": "", CONSUMER: "consumer", "Spark engine": "spark"}
P99_GOAL_MS = 100.0

TICK_S = 0.01  # records are sent in handfuls, so often
POLL_S = 0.005
HEAR_S = 0.05
START_TIMEOUT_S = 180
DRAIN_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    max_records: int
    rate: int  # records a second
    seconds: int
    warm_up: int  # seconds of the same before that
    master: str
    memory: str


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
                log = tree.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"not all records came within {timeout_s:g} s: {self.error or log}")


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
    # Spark waits a second between batches unless set otherwise: here the engine is measured, not the pause.
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
        for name, engine in ENGINES.items():
            with console.status(f"round {number} of {options.rounds}: latency, {name}", refresh_per_second=1):
                try:
                    found = latency(rig, engine, options)
                except RuntimeError as error:
                    found = Latency(0, 0, 0, 0, 0, problem=str(error))
                played[-1][name] = found
            status = found.problem or f"p50 {found.p50:,.1f} ms, p99 {found.p99:,.1f} ms, most {found.most:,.1f} ms"
            console.print(f"round {number}  {name:26} {status}", highlight=False, markup=False, soft_wrap=True)
    return played


def latency_table(rounds: list[dict[str, Latency]], options: Options) -> Table:
    table = Table(
        title=f"from produce to visible, {options.rate:,} records/s for {options.seconds} s, medians over the rounds"
    )
    table.add_column("engine")
    for title in ("p50 ms", "p99 ms", "each round", "most ms", "sent/s", "goal", ""):
        table.add_column(title, justify="right")
    for name in ENGINES:
        sound, status = measure.sound(rounds, name)
        if not sound:
            table.add_row(name, *["-"] * 6, status)
            continue
        p99s = [one.p99 for one in sound]
        verdict = measure.verdict(p99s, P99_GOAL_MS, at_most=True)
        goal = [f"{P99_GOAL_MS:g}", verdict] if name == CONSUMER else ["", ""]
        table.add_row(
            name,
            f"{median(one.p50 for one in sound):,.1f}",
            f"{median(p99s):,.1f}",
            ", ".join(f"{p99:,.1f}" for p99 in p99s),
            f"{max(one.most for one in sound):,.1f}",
            f"{median(one.rate for one in sound):,.0f}",
            *goal,
        )
    return table


@click.command(help=__doc__)
@click.option("--rounds", default=2, show_default=True)
@click.option("--max-records", default=500_000, show_default=True, help="Of one batch.")
@click.option("--rate", default=2_000, show_default=True, help="Records a second, for the latency.")
@click.option("--seconds", default=60, show_default=True, help="Of that rate.")
@click.option("--warm-up", default=15, show_default=True, help="Seconds of the same that do not count.")
@click.option("--master", default=contenders.MASTER, show_default=True, help="Spark's.")
@click.option("--memory", default=contenders.MEMORY, show_default=True, help="Of the driver's JVM.")
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(results: Path, **given: Any) -> None:
    options = Options(**given)
    console = Console()
    where = measure.machine()
    with measure.rig(console) as rig:
        found = latencies(rig, options, console)
    console.print(latency_table(found, options))
    result = {
        "machine": where,
        "options": {name: getattr(options, name) for name in options.__slots__},
        "latency": [{name: one.as_json() for name, one in each.items()} for each in found],
    }
    console.print(str(measure.save(results, "latency", result)), highlight=False)


if __name__ == "__main__":
    main()
