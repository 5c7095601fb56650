"""From Kafka into PostgreSQL: avow, what it could be at best, and what others use: ``python -m bench.postgres``.

One run on one cluster: the same topic is drained by each contender in turn, round after round, into a fresh table each
time. Ratios are made within a round, where both sides met the same machine, and the median over the rounds counts. With
several numbers of partitions all of it is done for each of them, and what a record costs is compared.

Owns: who takes part, the goals, the tables. Neighbours: ``contenders``, ``floor``, ``measure``, ``plot``.
"""

from __future__ import annotations

import time
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
from bench import contenders, floor, measure, plot
from bench.contenders import Task
from bench.measure import GROUPS, Command, NotMeasuredError, Outcome, Rig, Round, Run, Span
from bench.records import COLUMNS, PARTITIONS, Shape

FLOOR, KCAT, CONSUMER, SPARK = "floor", "kcat", "consumer", "spark"
LEAST, MOST = str(Guarantee.AT_LEAST_ONCE), str(Guarantee.AT_MOST_ONCE)
JDBC, TUNED, PLAIN = "jdbc", "jdbc-tuned", "one-by-one"
FIELD = (FLOOR, KCAT, CONSUMER, SPARK, LEAST, MOST, JDBC, TUNED, PLAIN)
ENGINES = (CONSUMER, SPARK)
PARTITIONS_WITHIN = 1.3
COLOURS = {"reached": "green", "missed": "red", "unknown": "yellow"}


@dataclass(frozen=True, slots=True)
class Options:
    records: int
    rounds: int
    only: list[str]
    partitions: list[int]
    value_bytes: int
    columns: int
    part: int  # of the records, for the plain consumer
    max_records: int
    master: str
    memory: str
    jdbc_bare: bool
    jdbc_java: str


@dataclass(frozen=True, slots=True)
class Goal:
    """What a contender is to reach, as a multiple of another one's."""

    of: str
    against: str
    what: str
    value: Callable[[Outcome], float | None]
    factor: float
    at_most: bool = False

    def ratios(self, rounds: list[Round]) -> list[float]:
        """Of the rounds in which both wrote what they should, and both have the value."""
        pairs = [(each[self.of], each[self.against]) for each in rounds]
        values = [(self.value(a), self.value(b)) for a, b in pairs if not a.problem and not b.problem]
        return [a / b for a, b in values if a and b]


def rows_per_s(outcome: Outcome) -> float:
    return outcome.drain.rows_per_s


def steady_rows_per_s(outcome: Outcome) -> float | None:
    return span.rows_per_s if (span := steady(outcome)) else None


def steady_cost(outcome: Outcome) -> float | None:
    return span.core_s_per_million() if (span := steady(outcome)) else None


def steady(outcome: Outcome) -> Span | None:
    """Without what starts up; nothing if there was one batch and no more."""
    return outcome.steady if outcome.warm or not outcome.run.planned else None


GOALS = (
    Goal(CONSUMER, FLOOR, "rows/s", steady_rows_per_s, 0.7),
    Goal(CONSUMER, FLOOR, "core-seconds", steady_cost, 2.0, at_most=True),
    Goal(SPARK, FLOOR, "rows/s after batch 1", steady_rows_per_s, 0.5),
    Goal(SPARK, FLOOR, "core-seconds after batch 1", steady_cost, 3.0, at_most=True),
    Goal(SPARK, LEAST, "rows/s", rows_per_s, 0.98),
    Goal(SPARK, JDBC, "rows/s", rows_per_s, 3.0),
    Goal(SPARK, TUNED, "rows/s", rows_per_s, 1.9),
    Goal(SPARK, PLAIN, "rows/s", rows_per_s, 50.0),
    Goal(CONSUMER, PLAIN, "rows/s", rows_per_s, 50.0),
)


def command(name: str, rig: Rig, task: Task, options: Options) -> Command:
    exactly = str(Guarantee.EXACTLY_ONCE)
    match name:
        case "floor":
            return floor.command(rig, task)
        case "kcat":
            return contenders.kcat(rig, task)
        case "consumer" | "spark":
            return contenders.avow(rig, task, exactly, engine=name)
        case "jdbc" | "jdbc-tuned":
            given: dict[str, Any] = {"bare": options.jdbc_bare, "java_options": options.jdbc_java}
            return contenders.jdbc(rig, task, tuned=name == TUNED, **given)
        case "one-by-one":
            return contenders.plain(rig, task, options.part)
        case _:
            return contenders.avow(rig, task, name)


def one(name: str, rig: Rig, topic: str, shape: Shape, options: Options) -> Outcome:
    bare = options.jdbc_bare and name in (JDBC, TUNED)
    table = rig.make_table(shape, lineage=not bare)
    task = Task(topic, table, options.max_records, options.master, options.memory, shape)
    try:
        run = measure.run(command(name, rig, task, options), rig)
        records = options.part if name == PLAIN else options.records
        return measure.judged(rig, run, table, records, options.records)
    except NotMeasuredError as error:
        return Outcome(Run(time.time()), [], f"not measured: {error}")
    finally:
        rig.drop(table)


def compare(rig: Rig, shape: Shape, options: Options, console: Console) -> list[Round]:
    topic = rig.filled_topic(options.records, console, shape)
    turns = {name: partial(one, name, rig, topic, shape, options) for name in options.only}
    return measure.take_turns(options.rounds, turns, console)


def middle(outcomes: list[Outcome], value: Callable[[Outcome], float]) -> float:
    return median(value(outcome) for outcome in outcomes)


def speed_table(rounds: list[Round], title: str, record_bytes: float | None) -> Table:
    """``record_bytes``: of records that are not the usual ones, for which bytes say more."""
    table = Table(title=title, caption="start-up is not in rows/s; wall has it")
    table.add_column("contender")
    further = ["MB/s", "core-s per GB"] if record_bytes else []
    titles = ["rows/s", "after batch 1", "first to last commit", *further, "wall s", "peak MB: JVM", "other", "table"]
    for each in titles:
        table.add_column(each, justify="right")
    for name in rounds[0]:
        sound, status = measure.sound(rounds, name)
        if not sound:
            table.add_row(name, *["-"] * (len(titles) - 1), status)
            continue
        speed, peaks = middle(sound, rows_per_s), [outcome.run.peak_mb() for outcome in sound]
        warm = [outcome.warm.rows_per_s for outcome in sound if outcome.warm]
        between = [outcome.committing.rows_per_s for outcome in sound if len(outcome.commits) > 1]
        in_bytes = [f"{speed * record_bytes / 1e6:,.0f}", _cost_per_gb(sound, record_bytes)] if record_bytes else []
        table.add_row(
            name,
            f"{speed:,.0f}",
            f"{median(warm):,.0f}" if warm else "-",
            f"{median(between):,.0f}" if between else "-",
            *in_bytes,
            f"{middle(sound, lambda o: o.whole.seconds):.1f}",
            f"{max(peak['jvm'] for peak in peaks):,.0f}",
            f"{max(peak['workers'] + peak['driver'] for peak in peaks):,.0f}",
            status,
        )
    return table


def _cost_per_gb(outcomes: list[Outcome], record_bytes: float) -> str:
    return f"{middle(outcomes, lambda o: o.drain.core_s_per_million()) / record_bytes * 1e3:.1f}"


def cost_table(rounds: list[Round]) -> Table:
    table = Table(
        title="core-seconds per million rows, draining (whole process, with start-up)",
        caption="others: what else the machine did while draining, this bench's own looking included",
    )
    table.add_column("contender")
    for name in ("brokers", "JVM", "client", "PostgreSQL", "together", "after batch 1", "others"):
        table.add_column(name, justify="right")
    for name in rounds[0]:
        sound, _ = measure.sound(rounds, name)
        if not sound:
            continue
        cells = [_cost(sound, group) for group in (*GROUPS, None)]
        warm = [outcome.warm.core_s_per_million() for outcome in sound if outcome.warm]
        others = middle(sound, lambda o: o.drain.core_s_per_million("others"))
        table.add_row(name, *cells, f"{median(warm):.2f}" if warm else "-", f"{others:.2f}")
    return table


def _cost(outcomes: list[Outcome], group: str | None) -> str:
    def of(span: Callable[[Outcome], Span]) -> float:
        return middle(outcomes, lambda outcome: span(outcome).core_s_per_million(group))

    return f"{of(lambda o: o.drain):.2f} ({of(lambda o: o.whole):.2f})"


def goal_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="goals, each a multiple of the other contender's")
    for name in ("contender", "against", "by", "ratio", "each round", "goal", ""):
        table.add_column(name)
    for result in results:
        ratios, verdict = result["by_round"], result["verdict"]
        figures = [f"{median(ratios):.2f}", ", ".join(f"{ratio:.2f}" for ratio in ratios)] if ratios else ["-", "-"]
        cells = [result["of"], result["against"], result["what"], *figures, result["goal"]]
        table.add_row(*cells, f"[{COLOURS[verdict]}]{verdict}[/]")
    return table


def goal_result(goal: Goal, ratios: list[float]) -> dict[str, Any]:
    return {
        "of": goal.of,
        "against": goal.against,
        "what": goal.what,
        "by_round": [round(ratio, 3) for ratio in ratios],
        "goal": f"at {'most' if goal.at_most else 'least'} {goal.factor:g}",
        "verdict": measure.verdict(ratios, goal.factor, at_most=goal.at_most),
    }


def partitions_table(cases: dict[int, list[Round]], only: list[str]) -> Table:
    """What a record costs over the number of partitions: each engine's dearest over its cheapest."""
    table = Table(title="core-seconds per million rows, by number of partitions, without what starts up")
    for title in ("engine", *(f"{number}" for number in cases), "dearest over cheapest", "goal", ""):
        table.add_column(title)
    for name in (name for name in ENGINES if name in only):
        found = [
            [cost for o in measure.sound(rounds, name)[0] if (cost := steady_cost(o))] for rounds in cases.values()
        ]
        costs = [median(rounds) if rounds else 0.0 for rounds in found]
        spread = [max(costs) / min(costs)] if all(costs) else []
        verdict = measure.verdict(spread, PARTITIONS_WITHIN, at_most=True)
        each = [f"{cost:.2f}" if cost else "-" for cost in costs]
        figures = [f"{spread[0]:.2f}" if spread else "-", f"at most {PARTITIONS_WITHIN}"]
        table.add_row(name, *each, *figures, f"[{COLOURS[verdict]}]{verdict}[/]")
    return table


def report(shape: Shape, rounds: list[Round], options: Options, console: Console) -> dict[str, Any]:
    size = None if shape.is_usual else float(len(shape.value(options.records // 2)))
    title = f"{shape.partitions} partitions, medians over the rounds"
    taking_part = [goal for goal in GOALS if {goal.of, goal.against} <= set(options.only)]
    goals = [goal_result(goal, goal.ratios(rounds)) for goal in taking_part]
    console.print(speed_table(rounds, title, size), cost_table(rounds), goal_table(goals))
    outcomes = [{name: outcome.as_json() for name, outcome in each.items()} for each in rounds]
    return {"partitions": shape.partitions, "record_bytes": size, "rounds": outcomes, "goals": goals}


def _names(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    names = value.split(",")
    if unknown := set(names) - set(FIELD):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(FIELD)}")
    return names


def _numbers(_: click.Context, __: click.Parameter, value: str) -> list[int]:
    return [int(number) for number in value.split(",")]


@click.command(help=__doc__)
@click.option("--records", default=2_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--only", default=",".join(FIELD), show_default=True, callback=_names, help="Contenders, with commas.")
@click.option("--partitions", default=str(PARTITIONS), show_default=True, callback=_numbers, help="With commas.")
@click.option("--value-bytes", default=0, help="Larger records, by a longer note.")
@click.option("--columns", default=COLUMNS, show_default=True, help="Wider records.")
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
    cases: dict[int, list[Round]] = {}
    reports = []
    with measure.rig(console) as rig:
        for number in options.partitions:
            shape = Shape(number, options.value_bytes, options.columns)
            cases[number] = compare(rig, shape, options, console)
            reports.append(report(shape, cases[number], options, console))
    if len(cases) > 1:
        console.print(partitions_table(cases, options.only))
    result = {
        "machine": where,
        "jdbc_driver": jars.ON_REQUEST["bench"][0],
        "options": {name: getattr(options, name) for name in options.__slots__},
        "cases": reports,
    }
    path = measure.save(results, "postgres", result)
    for number, rounds in cases.items():
        title = f"{options.records:,} records, {number} partitions, {where['cores']} cores"
        plot.bars(rounds, path.with_name(f"postgres-{number}.png"), title)
    console.print(str(path), highlight=False)


if __name__ == "__main__":
    main()
