"""Does cost grow with size? Exactly-once over ever more records, and into a full table: ``python -m bench.growth``.

A topic of each size, drained in turns, each time under a name of its own and into a table of its own. Cost is judged
without each run's first batch: starting up costs the same once, and would make small runs look dear. It is judged in
yardsticks (see ``measure``), the median of the rounds; core-seconds as they were are shown beside it.

Neighbours: ``contenders``, ``measure``.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from avow.guarantee import Guarantee
from bench import contenders, measure
from bench.contenders import Task
from bench.measure import GROUPS, Outcome, Rig, Span

FLAT_WITHIN = 0.15


@dataclass(frozen=True, slots=True)
class Step:
    """One run: so many records, into a table that held so many rows."""

    records: int
    rows_before: int
    outcome: Outcome

    @property
    def name(self) -> str:
        return f"{self.records:,} into {f'{self.rows_before:,} rows' if self.rows_before else 'an empty table'}"

    @property
    def steady(self) -> Span:
        """Without the first batch, where there was a second."""
        return self.outcome.steady

    def halves_mb(self) -> list[dict[str, float]]:
        """Peak memory in each half of the draining: what leaks is higher in the second."""
        end = self.outcome.commits[-1].at
        begin = end - self.outcome.drain.seconds
        middle = (begin + end) / 2
        return [self.outcome.run.peak_mb(begin, middle), self.outcome.run.peak_mb(middle, end)]


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    growth: float | None  # how much dearer a record is in a bigger run than in any smaller one; below 0: cheaper in all
    spread: float | None  # dearest over cheapest, less one, whichever was bigger
    raw: float | None  # the same of core-seconds as they were

    @property
    def word(self) -> str:
        if self.spread is None:
            return "unknown"
        return "reached" if self.spread <= FLAT_WITHIN else "missed"


def fill(rig: Rig, table: str, rows: int) -> None:
    """Rows that were there before, with ids below 0, at rest: vacuumed, so that nothing is left to do in the run."""
    rig.query(
        f"INSERT INTO {table} SELECT -n, 'acc-' || n % 10000, n % 999, now(), 'a note of some bytes',"
        f" 'before', 0, n, now() FROM generate_series(1, {rows}) n"
    )
    rig.query(f"VACUUM ANALYZE {table}")


def step(rig: Rig, topic: str, records: int, rows_before: int, max_records: int) -> Step:
    table = rig.make_table()
    if rows_before:
        fill(rig, table, rows_before)
    command = contenders.avow(rig, Task(topic, table, max_records), str(Guarantee.EXACTLY_ONCE))
    run = measure.run(command, rig)
    outcome = measure.judged(rig, run, table, records, records)
    rig.drop(table)
    return Step(records, rows_before, outcome)


def grow(rig: Rig, sizes: list[int], rows_before: int, max_records: int, rounds: int, console: Console) -> list[Step]:
    topics = {}
    for size in sizes:
        with console.status(f"producing {size:,} records"):
            topics[size] = rig.make_topic()
            rig.produce(topics[size], range(size))
    # The smallest goes into the full table too, so that only the table differs between the two.
    cases = [(sizes[0], rows_before)] * bool(rows_before) + [(size, 0) for size in sizes]
    steps: list[Step] = []
    for turn, (size, before) in itertools.product(range(rounds), cases):
        with console.status(f"round {turn + 1}: {size:,} records, {before:,} rows before", refresh_per_second=1):
            steps.append(step(rig, topics[size], size, before, max_records))
        done = steps[-1]
        told = escape(done.outcome.problem) or f"{done.steady.rows_per_s:,.0f} rows/s"
        console.print(f"{done.name:40} {told}", highlight=False)
    return steps


def verdicts(steps: list[Step]) -> list[Verdict]:
    smallest = min(step.records for step in steps)
    return [
        _verdict("cost per record, by number of records", [s for s in steps if not s.rows_before]),
        _verdict("cost per record, by rows before", [s for s in steps if s.records == smallest]),
    ]


def _verdict(what: str, steps: list[Step]) -> Verdict:
    # Runs of one batch measure their start-up: there is nothing steady in them to compare.
    if any(s.outcome.problem or not s.outcome.warm for s in steps) or len(cases := by_case(steps)) < 2:
        return Verdict(what, None, None, None)
    costs = [statistics.median(s.steady.yardsticks_per_row() for s in case) for case in cases]
    raw = [statistics.median(s.steady.core_s_per_million() for s in case) for case in cases]
    growth = max(bigger / smaller for smaller, bigger in itertools.combinations(costs, 2)) - 1
    return Verdict(what, growth, max(costs) / min(costs) - 1, max(raw) / min(raw) - 1)


def by_case(steps: list[Step]) -> list[list[Step]]:
    """The rounds of each number of records and rows before, smallest first."""
    cases = sorted({(s.records, s.rows_before) for s in steps})
    return [[s for s in steps if (s.records, s.rows_before) == case] for case in cases]


def step_table(steps: list[Step]) -> Table:
    table = Table(
        title="after the first batch, per million rows; yardsticks per thousand",
        caption="peak memory in each half of the draining",
    )
    table.add_column("records")
    cores = ("brokers", "JVM", "client", "PG", "all")
    for name in ("s", *cores, "yardstick ms", "yardsticks", "JVM MB", "driver MB", "workers MB"):
        table.add_column(name, justify="right")
    for done in itertools.chain.from_iterable(by_case(steps)):
        if done.outcome.problem:
            table.add_row(done.name, f"[red]{escape(done.outcome.problem)}[/]")
            continue
        first, second = done.halves_mb()
        table.add_row(
            done.name,
            f"{done.steady.seconds_per_million:.2f}",
            *(f"{done.steady.core_s_per_million(group):.2f}" for group in (*GROUPS, None)),
            f"{done.steady.yardstick_s * 1e3:.2f}",
            f"{done.steady.yardsticks_per_row() * 1e3:.2f}",
            *(f"{first[part]:,.0f}, {second[part]:,.0f}" for part in ("jvm", "driver", "workers")),
        )
    return table


def as_json(done: Step) -> dict[str, Any]:
    told = {"records": done.records, "rows_before": done.rows_before, **done.outcome.as_json()}
    if not done.outcome.problem:
        told["peak_mb_by_half"] = [{part: round(mb) for part, mb in half.items()} for half in done.halves_mb()]
    return told


@click.command(help=__doc__)
@click.option("--sizes", default="1000000,4000000,16000000", show_default=True, help="Records, with commas.")
@click.option("--rows-before", default=10_000_000, show_default=True, help="In the full table; 0 leaves it out.")
@click.option("--rounds", default=3, show_default=True, help="Of all of them, in turns.")
@click.option("--max-records", default=250_000, show_default=True, help="Of one batch.")
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(sizes: str, rows_before: int, rounds: int, max_records: int, results: Path) -> None:
    console = Console()
    where = measure.machine()
    with measure.rig(console) as rig:
        steps = grow(rig, sorted(map(int, sizes.split(","))), rows_before, max_records, rounds, console)
    console.print(step_table(steps))
    found = verdicts(steps)
    for verdict in found:
        told = (
            f"spread {verdict.spread:.1%} (growth {verdict.growth:+.1%}; of plain core-seconds {verdict.raw:.1%})"
            if verdict.spread is not None
            else "not measured"
        )
        console.print(f"{verdict.what}: {told}, spread to reach {FLAT_WITHIN:.0%}: {verdict.word}", highlight=False)
    result = {
        "machine": where,
        "max_records": max_records,
        "steps": [as_json(done) for done in steps],
        "verdicts": [asdict(v) | {"target": FLAT_WITHIN, "verdict": v.word} for v in found],
    }
    console.print(str(measure.save(results, "growth", result)), highlight=False)


if __name__ == "__main__":
    main()
