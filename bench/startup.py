"""From process start to the first committed row, with avow's JVM options and with Spark's: ``python -m bench.startup``.

Each round starts each variant twice: *cold*, a pipeline that never ran; then all of it is killed with kill -9 as soon
as rows are there, and the same pipeline is started *after a kill*, and timed to its first new row. The end of the time
is PostgreSQL's own commit time. Two starts before the first round are not counted: they fill the machine's file cache.

``--engine consumer`` times that engine alone. After a kill the group first has to miss the dead member, so that a start
takes what is left of ``session.timeout.ms``; cold, it has nobody to wait for, since the cluster's
``group.initial.rebalance.delay.ms`` is 0.

Neighbours: ``contenders``, ``measure``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from avow.engines.consumer import DEFAULTS as DEFAULTS_OF_MEMBERS
from avow.guarantee import Guarantee
from bench import contenders, measure
from bench.contenders import Task
from bench.measure import SAMPLE_EVERY_S, Command, Rig, Tree

TARGET = 0.7
START_TIMEOUT_S = 180
OURS, DEFAULTS = "avow", "Spark's default JVM options"
JAVA_OPTIONS = {OURS: None, DEFAULTS: ""}  # None: what avow takes by itself
CONSUMER = "the consumer engine"
COLD, KILLED = WHEN = ("cold", "after a kill -9")
CONSUMER_TARGETS_S = {COLD: 2.0, KILLED: 2.0 + DEFAULTS_OF_MEMBERS["session.timeout.ms"] / 1000}
MORE = 1_000  # records for each start of the consumer engine, which is done with the others before it is killed


@dataclass(frozen=True, slots=True)
class Start:
    variant: str
    when: str
    seconds: float
    java_options: str


def timed(rig: Rig, command: Command, table: str, variant: str, when: str) -> Start:
    """Start it, wait for its first row, kill it."""
    before = _rows(rig, table)
    with Tree(command, rig) as tree:
        deadline = time.monotonic() + START_TIMEOUT_S
        while _rows(rig, table) == before and not tree.ended(SAMPLE_EVERY_S):
            tree.look()
            if time.monotonic() > deadline:
                break
    _wait_until_alone(rig)
    commits = rig.commits(table, after=tree.run.started)
    if not commits:
        raise RuntimeError(f"{variant}, {when}: no row was written.\n{tree.log.read_text(errors='replace')[-2000:]}")
    return Start(variant, when, commits[0].at - tree.run.started, tree.run.java_options)


def _rows(rig: Rig, table: str) -> int:
    return int(rig.query(f"SELECT count(*) FROM {table}")[0][0])


def _wait_until_alone(rig: Rig) -> None:
    """A killed client's last transaction may still be on its way; what it commits is not the next start's."""
    others = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    deadline = time.monotonic() + 30
    while rig.query(others)[0][0] and time.monotonic() < deadline:
        time.sleep(0.05)


def pair(rig: Rig, topic: str, max_records: int, variant: str) -> list[Start]:
    """Cold, then after a kill."""
    table = rig.make_table()
    task = Task(topic, table, max_records)
    command = contenders.avow(rig, task, str(Guarantee.EXACTLY_ONCE), java_options=JAVA_OPTIONS[variant])
    starts = [timed(rig, command, table, variant, when) for when in WHEN]
    rig.drop(table)
    return starts


def consumer_pair(rig: Rig, topic: str, first: int, max_records: int) -> list[Start]:
    """The same of the consumer engine. ``first``: the number of the first record that is to be sent."""
    table = rig.make_table()
    command = contenders.avow(
        rig, Task(topic, table, max_records), str(Guarantee.EXACTLY_ONCE), engine="consumer", once=False
    )
    starts = []
    for number, when in enumerate(WHEN):
        rig.produce(topic, range(first + number * MORE, first + (number + 1) * MORE))
        starts.append(timed(rig, command, table, CONSUMER, when))
    rig.drop(table)
    return starts


def ratio(rounds: list[list[Start]], when: str) -> float | None:
    """Ours over the defaults, each round by itself, the median of them. None if both ran on the same options."""
    found = []
    for starts in rounds:
        by_variant = {start.variant: start for start in starts if start.when == when}
        ours, theirs = by_variant[OURS], by_variant[DEFAULTS]
        if ours.java_options == theirs.java_options:
            return None
        found.append(ours.seconds / theirs.seconds)
    return median(found)


def verdict(found: float | None) -> str:
    return "unknown" if found is None else "reached" if found <= TARGET else "missed"


TITLE = "seconds from process start to the first committed row (median; least to most)"


def spread(rounds: list[list[Start]], variant: str, when: str) -> tuple[float, str]:
    """The median, and what is shown of all."""
    seconds = [s.seconds for starts in rounds for s in starts if (s.variant, s.when) == (variant, when)]
    return median(seconds), f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def consumer_table(rounds: list[list[Start]]) -> Table:
    table = Table("", CONSUMER, "to reach", "", title=TITLE)
    for when, target in CONSUMER_TARGETS_S.items():
        found, shown = spread(rounds, CONSUMER, when)
        table.add_row(when, shown, f"{target:g}", "reached" if found <= target else "missed")
    return table


def start_table(rounds: list[list[Start]]) -> Table:
    table = Table(title=TITLE)
    table.add_column("")
    for name in (*JAVA_OPTIONS, "ratio", "to reach", ""):
        table.add_column(name, justify="right")
    for when in WHEN:
        cells = [spread(rounds, variant, when)[1] for variant in JAVA_OPTIONS]
        found = ratio(rounds, when)
        told = f"{found:.2f}" if found is not None else "same options"
        table.add_row(when, *cells, told, f"{TARGET:g}", verdict(found))
    return table


def all_rounds(rounds: list[list[Start]]) -> list[list[dict[str, Any]]]:
    return [
        [{"variant": s.variant, "when": s.when, "seconds": round(s.seconds, 3)} for s in starts] for starts in rounds
    ]


def result(rounds: list[list[Start]], where: dict[str, Any], max_records: int) -> dict[str, Any]:
    ratios = {when: ratio(rounds, when) for when in WHEN}
    return {
        "machine": where,
        "max_records": max_records,
        "java_options": {start.variant: start.java_options for start in rounds[0]},
        "rounds": all_rounds(rounds),
        "ratios": [
            {"when": when, "ratio": found, "target": TARGET, "verdict": verdict(found)}
            for when, found in ratios.items()
        ],
    }


def consumer_result(rounds: list[list[Start]], where: dict[str, Any], max_records: int) -> dict[str, Any]:
    medians = {when: round(spread(rounds, CONSUMER, when)[0], 3) for when in WHEN}
    return {
        "machine": where,
        "max_records": max_records,
        "rounds": all_rounds(rounds),
        "medians_s": medians,
        "targets_s": CONSUMER_TARGETS_S,
    }


@click.command(help=__doc__)
@click.option("--engine", type=click.Choice(["spark", "consumer"]), default="spark", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--records", default=100_000, show_default=True, help="More than a run gets to before it is killed.")
@click.option("--max-records", default=4_000, show_default=True, help="Of one batch: small, as the first row counts.")
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(engine: str, rounds: int, records: int, max_records: int, results: Path) -> None:
    console = Console()
    where = measure.machine()
    done: list[list[Start]] = []
    with measure.rig(console) as rig:
        topic = rig.make_topic()
        rig.produce(topic, range(records))

        def starts(number: int) -> list[Start]:
            if engine == "consumer":
                return consumer_pair(rig, topic, records + number * len(WHEN) * MORE, max_records)
            variants = JAVA_OPTIONS if number else [OURS]
            return [start for variant in variants for start in pair(rig, topic, max_records, variant)]

        with console.status("two starts that do not count"):
            starts(0)
        for number in range(1, rounds + 1):
            with console.status(f"round {number} of {rounds}", refresh_per_second=1):
                done.append(starts(number))
            for start in done[-1]:
                console.print(
                    f"round {number}  {start.variant:28} {start.when:16} {start.seconds:.2f} s", highlight=False
                )
    if engine == "consumer":
        console.print(consumer_table(done))
        path = measure.save(results, "startup-consumer", consumer_result(done, where, max_records))
    else:
        console.print(start_table(done))
        path = measure.save(results, "startup", result(done, where, max_records))
    console.print(str(path), highlight=False)


if __name__ == "__main__":
    main()
