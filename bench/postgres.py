"""avow under each guarantee, Spark's JDBC writer and a plain consumer, side by side: ``python -m bench.postgres``.

One run on one cluster: the same topic is drained by each contender in turn, round after round, into a fresh table each
time. Ratios are made within a round, where both sides met the same machine, and the median over the rounds counts.

Owns: who takes part, the ratios and their targets, the table. Neighbours: ``contenders``, ``measure``, ``plot``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from avow.guarantee import Guarantee
from avow.local import jars
from bench import contenders, measure, plot
from bench.contenders import Task
from bench.measure import GROUPS, Command, Outcome, Rig, Round, Span

JDBC, TUNED, PLAIN = "Spark JDBC", "Spark JDBC, tuned", "one by one"
OURS = f"avow {Guarantee.EXACTLY_ONCE}"
# What exactly-once is to reach, as a multiple of each other contender's rows/s.
TARGETS = {JDBC: 3.0, TUNED: 1.9, f"avow {Guarantee.AT_LEAST_ONCE}": 0.95, PLAIN: 50.0}


@dataclass(frozen=True, slots=True)
class Options:
    records: int
    rounds: int
    part: int  # of the records, for the plain consumer
    max_records: int
    master: str
    memory: str
    jdbc_bare: bool
    jdbc_java: str


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    records: int
    start: Callable[[Rig, Task], Command]


def field(options: Options) -> list[Contender]:
    """Who takes part, in the order of a round."""

    def ours(guarantee: Guarantee) -> Contender:
        return Contender(
            f"avow {guarantee}", options.records, lambda rig, task: contenders.avow(rig, task, str(guarantee))
        )

    def theirs(name: str, *, tuned: bool) -> Contender:
        given: dict[str, Any] = {"tuned": tuned, "bare": options.jdbc_bare, "java_options": options.jdbc_java}
        return Contender(name, options.records, lambda rig, task: contenders.jdbc(rig, task, **given))

    return [
        *(ours(word) for word in (Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE)),
        theirs(JDBC, tuned=False),
        theirs(TUNED, tuned=True),
        Contender(PLAIN, options.part, lambda rig, task: contenders.plain(rig, task, options.part)),
    ]


def compare(rig: Rig, options: Options, console: Console) -> list[Round]:
    topic = rig.filled_topic(options.records, console)
    turns = {contender.name: partial(one, rig, topic, contender, options) for contender in field(options)}
    return measure.take_turns(options.rounds, turns, console)


def one(rig: Rig, topic: str, contender: Contender, options: Options) -> Outcome:
    bare = options.jdbc_bare and contender.name in (JDBC, TUNED)
    table = rig.make_table(lineage=not bare)
    task = Task(topic, table, options.max_records, options.master, options.memory)
    run = measure.run(contender.start(rig, task), rig)
    outcome = measure.judged(rig, run, table, contender.records, options.records)
    rig.drop(table)
    return outcome


@dataclass(frozen=True, slots=True)
class Ratio:
    """Exactly-once against another, by rows/s."""

    against: str
    target: float
    by_round: list[float]  # of the rounds in which both wrote what they should
    warm: list[float]  # the same without each run's first batch, where there was more than one

    @property
    def found(self) -> float | None:
        return median(self.by_round) if self.by_round else None

    @property
    def verdict(self) -> str:
        """A ratio that could not be measured is unknown, never missed."""
        return "unknown" if self.found is None else "reached" if self.found >= self.target else "missed"


def ratios(rounds: list[Round]) -> list[Ratio]:
    found = []
    for against, target in TARGETS.items():
        pairs = [(each[OURS], each[against]) for each in rounds]
        sound = [(ours, theirs) for ours, theirs in pairs if not ours.problem and not theirs.problem]
        found.append(
            Ratio(
                against,
                target,
                [ours.drain.rows_per_s / theirs.drain.rows_per_s for ours, theirs in sound],
                [o.warm.rows_per_s / (t.warm or t.drain).rows_per_s for o, t in sound if o.warm],
            )
        )
    return found


def middle(outcomes: list[Outcome], value: Callable[[Outcome], float]) -> float:
    return median(value(outcome) for outcome in outcomes)


def speed_table(rounds: list[Round]) -> Table:
    table = Table(title="medians over the rounds", caption="start-up is not in rows/s; wall has it")
    table.add_column("contender")
    for name in ("rows/s", "rows/s after batch 1", "wall s", "peak MB: JVM", "Python", "table"):
        table.add_column(name, justify="right")
    for name in rounds[0]:
        sound, told = measure.sound(rounds, name)
        if not sound:
            table.add_row(name, *["-"] * 5, told)
            continue
        warm = [outcome.warm.rows_per_s for outcome in sound if outcome.warm]
        peaks = [outcome.run.peak_mb() for outcome in sound]
        table.add_row(
            name,
            f"{middle(sound, lambda o: o.drain.rows_per_s):,.0f}",
            f"{median(warm):,.0f}" if warm else "-",
            f"{middle(sound, lambda o: o.whole.seconds):.1f}",
            f"{max(peak['jvm'] for peak in peaks):,.0f}",
            f"{max(peak['workers'] + peak['driver'] for peak in peaks):,.0f}",
            told,
        )
    return table


def cost_table(rounds: list[Round]) -> Table:
    table = Table(
        title="core-seconds per million rows, draining (whole process, with start-up)",
        caption="others: what else the machine did while draining, this bench's own looking included",
    )
    table.add_column("contender")
    for name in ("brokers", "JVM", "Python", "PostgreSQL", "together", "others"):
        table.add_column(name, justify="right")
    for name in rounds[0]:
        sound, _ = measure.sound(rounds, name)
        if not sound:
            continue
        cells = [_cost(sound, group) for group in (*GROUPS, None)]
        others = middle(sound, lambda o: o.drain.core_s_per_million("others"))
        table.add_row(name, *cells, f"{others:.1f}")
    return table


def _cost(outcomes: list[Outcome], group: str | None) -> str:
    def of(span: Callable[[Outcome], Span]) -> float:
        return middle(outcomes, lambda outcome: span(outcome).core_s_per_million(group))

    return f"{of(lambda o: o.drain):.1f} ({of(lambda o: o.whole):.1f})"


def ratio_table(found: list[Ratio]) -> Table:
    table = Table(title=f"{OURS} against the others, by rows/s")
    table.add_column("against")
    for name in ("ratio", "each round", "after batch 1", "to reach", ""):
        table.add_column(name, justify="right")
    colours = {"reached": "green", "missed": "red", "unknown": "yellow"}
    for ratio in found:
        table.add_row(
            ratio.against,
            f"{ratio.found:.2f}" if ratio.found is not None else "-",
            ", ".join(f"{value:.2f}" for value in ratio.by_round) or "-",
            f"{median(ratio.warm):.2f}" if ratio.warm else "-",
            f"{ratio.target:g}",
            f"[{colours[ratio.verdict]}]{ratio.verdict}[/]",
        )
    return table


def result(options: Options, rounds: list[Round], found: list[Ratio], where: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": where,
        "jdbc_driver": jars.ON_REQUEST["bench"][0],
        "options": {name: getattr(options, name) for name in options.__slots__},
        "rounds": [{name: outcome.as_json() for name, outcome in each.items()} for each in rounds],
        "ratios": [
            {
                "of": OURS,
                "against": ratio.against,
                "ratio": round(ratio.found, 3) if ratio.found is not None else None,
                "by_round": [round(value, 3) for value in ratio.by_round],
                "after_batch_1": [round(value, 3) for value in ratio.warm],
                "target": ratio.target,
                "verdict": ratio.verdict,
            }
            for ratio in found
        ],
    }


@click.command(help=__doc__)
@click.option("--records", default=2_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--part", default=20_000, show_default=True, help="Records for the one-by-one consumer.")
@click.option("--max-records", default=500_000, show_default=True, help="Of one batch, for all on Spark.")
@click.option("--master", default=contenders.MASTER, show_default=True, help="Spark's, for all on Spark.")
@click.option("--memory", default=contenders.MEMORY, show_default=True, help="Of the driver's JVM, for all on Spark.")
@click.option("--jdbc-bare", is_flag=True, help="Spark JDBC writes the payload only, without lineage columns.")
@click.option("--jdbc-java", default="", help="JVM options for Spark JDBC. Empty: Spark's own.")
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(results: Path, **given: Any) -> None:
    options = Options(**{**given, "part": min(given["part"], given["records"])})
    console = Console()
    where = measure.machine()
    jars.classpath("bench")
    with measure.rig(console) as rig:
        rounds = compare(rig, options, console)
    found = ratios(rounds)
    for table in (speed_table(rounds), cost_table(rounds), ratio_table(found)):
        console.print(table)
    path = measure.save(results, "postgres", result(options, rounds, found, where))
    picture = plot.bars(rounds, path.with_suffix(".png"), f"{options.records:,} records, {where['cores']} cores")
    console.print(f"{path}\n{picture}", highlight=False)


if __name__ == "__main__":
    main()
