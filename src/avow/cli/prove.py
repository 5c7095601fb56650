"""``avow prove``: choose cells, show how they go, and end with a code that says what came of it."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from avow.cli import plain
from avow.errors import ConfigError
from avow.guarantee import Guarantee
from avow.plan import load_checked
from avow.prove import history, report
from avow.prove.cells import ENGINES, FAULTS, Cell, Verdict, matrix, quick
from avow.sinks import SINKS

if TYPE_CHECKING:  # they bring Spark with them, which `--list` need not wait for
    from avow.prove.form import Form
    from avow.prove.play import Outcome

COLOURS = {
    Verdict.HELD: "green",
    Verdict.CAUGHT: "green",
    Verdict.BROKEN: "bold red",
    Verdict.MISSED: "bold red",
    Verdict.UNPROVEN: "yellow",
    Verdict.UNKNOWN: "yellow",
    Verdict.NOT_RUN: "dim",
}
MODES = tuple(dict.fromkeys(mode for kind in SINKS.values() for mode in kind.offers))


@click.command(
    "prove",
    epilog="Exit codes: 0 every cell held and every canary was caught · 1 broken, or a canary was missed · "
    "2 unknown or unproven",
)
@click.option("--quick", "is_quick", is_flag=True, help="One cell per fault, and the canaries: about ten minutes.")
@click.option(
    "--all", "everything", is_flag=True, help="The whole matrix. Hours, fewer with --jobs; use --resume after a break."
)
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(FAULTS)), metavar="NAME", help="See --list.")
@click.option("--guarantee", "guarantees", multiple=True, type=click.Choice([str(word) for word in Guarantee]))
@click.option("--sink", "sinks", multiple=True, type=click.Choice(list(SINKS)))
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES))
@click.option("--engine", "engines", multiple=True, type=click.Choice(list(ENGINES)))
@click.option(
    "--pipeline", type=click.Path(dir_okay=False, path_type=Path), help="Prove this pipeline, in a scratch place."
)
@click.option("--seed", type=click.IntRange(0), help="Decides every choice. A fresh one by default; it is shown.")
@click.option("--records", type=click.IntRange(100), default=2_000, show_default=True, help="Of a cell, at least.")
@click.option("--minutes", type=click.FloatRange(0), default=0, help="Repeat a cell's faults for so long.")
@click.option("--jobs", type=click.IntRange(1, 16), default=1, show_default=True, help="Clusters side by side.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Where the evidence goes.")
@click.option("--resume", is_flag=True, help="Leave out what the history in --out has a verdict for.")
@click.option("--keep", is_flag=True, help="Keep the drivers' logs of cells that held, too.")
@click.option("--list", "only_list", is_flag=True, help="List the cells and do nothing.")
def prove(
    is_quick: bool,
    everything: bool,
    faults: tuple[str, ...],
    guarantees: tuple[str, ...],
    sinks: tuple[str, ...],
    modes: tuple[str, ...],
    engines: tuple[str, ...],
    pipeline: Path | None,
    seed: int | None,
    records: int,
    minutes: float,
    jobs: int,
    out: Path | None,
    resume: bool,
    keep: bool,
    only_list: bool,
) -> None:
    """Hurt real pipelines in real ways and judge what comes of it, by the audit and by an independent check.

    Starts a cluster of its own (three Kafka nodes and PostgreSQL, in a temporary folder), and for each cell a pipeline
    as a real process under a steady load of numbered records. Then it kills, pauses, cuts and fills, heals, drains,
    and compares. A fault that cannot be shown to have happened proves nothing, and the cell is unknown.

    With --pipeline the pipelines are yours: the file's schema, transform, sink, mode and guarantee, with records made
    from its schema. Its own topics and tables are not touched.
    """
    own, declared = _own(pipeline) if pipeline else (None, None)
    source = matrix(declared[2]) if declared else matrix()
    if is_quick:
        # A pipeline of one's own has one guarantee: there, quick is one cell per fault under that one.
        source = (
            chain.from_iterable(quick(sinks=some, engines=engines) for some in [[one] for one in sinks] or [[]])
            if declared is None
            else quick(declared[0], declared[2], [declared[1]], _named(declared[3]))
        )
    cells = [
        cell
        for cell in source
        if (not faults or cell.fault.name in faults)
        and (not guarantees or cell.guarantee in guarantees)
        and (not sinks or cell.sink in sinks)
        and (not modes or cell.mode in modes)
        and (not engines or cell.engine in engines)
        and (declared is None or _declares(declared, cell))
    ]
    console = Console(highlight=False, soft_wrap=True)
    if only_list:
        _list(cells)
        return
    if not (is_quick or everything or faults or guarantees):
        raise ConfigError("no cells chosen", advice="Try --quick, name faults with --fault, or take --all.")
    if not cells:
        raise ConfigError("no such cell", advice="`avow prove --list` shows what there is.")
    seed = random.randrange(10**6) if seed is None else seed
    out = out or Path(".avow", "proofs", f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}")
    if resume:
        done = {name for name, told in history.verdicts(out).items() if told["verdict"] != Verdict.UNKNOWN}
        cells = [cell for cell in cells if cell.name not in done]
    # A polite kill must still take the cluster down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise SystemExit(_prove(console, cells, out, (seed, records, minutes), jobs, keep, own))


def _declares(declared: tuple[str, str, str, str], cell: Cell) -> bool:
    """Canaries are the harness's own pipelines, into the same sink."""
    word, sink, mode, engine = declared
    if cell.sink != sink or cell.engine not in _named(engine):
        return False
    return cell.canary or (cell.guarantee, cell.mode) == (word, mode)


def _named(engine: str) -> list[str]:
    """What the matrix has of an engine that a pipeline file names."""
    return [name for name, found in ENGINES.items() if found.name == engine]


def _own(file: Path) -> tuple[Form, tuple[str, str, str, str]]:
    """A user's pipeline, and the one column of the matrix that it declares."""
    from avow.prove.form import Own

    pipeline = load_checked(file)
    return Own(file, pipeline), (pipeline.guarantee, pipeline.sink.kind, pipeline.sink.mode, pipeline.engine)


def _prove(
    console: Console,
    cells: list[Cell],
    out: Path,
    numbers: tuple[int, int, float],
    jobs: int,
    keep: bool,
    own: Form | None,
) -> int:
    # Imported here: Spark's Python side takes a second, and a bad option should be told at once.
    from avow.prove.play import Options
    from avow.prove.runner import prove

    seed, records, minutes = numbers
    console.print(f"{len(cells)} cells, seed {seed}, evidence in {plain(str(out))}")
    options = Options(seed=seed, records=records, minutes=minutes)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with console.status("starting the cluster") as status:
        for outcome in prove(
            cells,
            out,
            options,
            jobs=jobs,
            keep=keep,
            own=own,
            tell=lambda cell, text: status.update(f"{plain(cell.name)}: {plain(text)}"),
        ):
            outcomes.append(outcome)
            report.write(out)
            colour = COLOURS[outcome.verdict]
            left = remaining(len(outcomes), len(cells), time.monotonic() - began)
            console.print(
                f"[dim]{len(outcomes):>3}/{len(cells)}[/] [{colour}]{outcome.verdict:<8}[/] "
                f"{plain(outcome.cell.name)} [dim]{outcome.seconds:.0f} s: {plain(outcome.why)}; {left}[/]"
            )
    page, _ = report.write(out)
    told = Counter(Verdict(line["verdict"]) for line in history.verdicts(out).values())
    console.print(", ".join(f"{count} {verdict}" for verdict, count in told.items()) + f"; report: {plain(str(page))}")
    return exit_code(told)


def remaining(done: int, of: int, seconds: float) -> str:
    """How long the rest takes if it goes on as it went: side by side or not, it is cells by the clock."""
    minutes = seconds / done * (of - done) / 60
    return "done" if done == of else f"about {minutes:.0f} min left" if minutes >= 1.5 else "a minute left"


def exit_code(told: Counter[Verdict]) -> int:
    """Broken beats unknown."""
    if told[Verdict.BROKEN] or told[Verdict.MISSED]:
        return 1
    held = told[Verdict.HELD] + told[Verdict.CAUGHT]
    return 2 if told[Verdict.UNKNOWN] or told[Verdict.UNPROVEN] or not held else 0


def _list(cells: list[Cell]) -> None:
    for cell in cells:
        fault = cell.fault
        due = f"must show {cell.must_show}" if cell.must_show else ""
        if fault.stop:
            due = f"must stop: {fault.stop_name}"
        if cell.canary:
            due = "must be judged broken"
        place = f"{cell.sink}/{cell.mode}/{cell.engine}"
        line = f"{fault.number or '':>2}  {fault.name:<22}{cell.guarantee:<15}{place:<31}{fault.title}"
        click.echo(f"{line} ({due})" if due else line)
