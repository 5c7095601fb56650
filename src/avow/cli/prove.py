"""``avow prove``: show the progress of a proof and its verdicts, and exit with a code for the worst of them."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from avow.cli import GUARANTEES, PIPELINE_FILE, plain
from avow.errors import ConfigError
from avow.plan import load_checked
from avow.prove import history, report
from avow.prove.cells import ENGINES, FAULTS, Cell, CellVerdict
from avow.prove.selection import CellFilter, select_cells
from avow.sinks import SINKS

if TYPE_CHECKING:  # they bring Spark with them, which `--list` need not wait for
    from avow.prove.runner import Options
    from avow.prove.workload_spec import WorkloadSpec

COLOURS = {
    CellVerdict.HELD: "green",
    CellVerdict.CAUGHT: "green",
    CellVerdict.BROKEN: "bold red",
    CellVerdict.MISSED: "bold red",
    CellVerdict.UNPROVEN: "yellow",
    CellVerdict.UNKNOWN: "yellow",
    CellVerdict.NOT_RUN: "dim",
}
MODES = tuple(dict.fromkeys(mode for kind in SINKS.values() for mode in kind.offers))


@click.command(
    "prove",
    epilog="Exit codes: 0 every cell held and every canary was caught · 1 broken, or a canary was missed · "
    "2 unknown or unproven",
)
@click.option("--quick", "is_quick", is_flag=True, help="One cell per fault, and the canaries: about ten minutes.")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="The whole matrix: takes hours, less with --jobs. --resume continues an interrupted proof.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    type=click.Choice(list(FAULTS)),
    metavar="NAME",
    help="Only this fault; see --list.",
)
@click.option("--guarantee", "guarantees", multiple=True, type=GUARANTEES)
@click.option("--sink", "sinks", multiple=True, type=click.Choice(list(SINKS)))
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES))
@click.option("--engine", "engines", multiple=True, type=click.Choice(list(ENGINES)))
@click.option("--pipeline", type=PIPELINE_FILE, help="Prove this pipeline, on topics and tables made for the proof.")
@click.option("--seed", type=click.IntRange(0), help="Seed of every random choice.  [default: a new one, printed]")
@click.option("--records", type=click.IntRange(100), default=2_000, help="Records in each cell, at least.")
@click.option(
    "--minutes",
    type=click.FloatRange(0),
    default=0,
    show_default=False,
    help="Repeat the faults of each cell for this long.",
)
@click.option("--jobs", type=click.IntRange(1, 16), default=1, help="Clusters to use in parallel.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for history, report and logs.  [default: .avow/proofs/TIME-SEED]",
)
@click.option("--resume", is_flag=True, help="Skip cells that already have a verdict in the history in --out.")
@click.option("--keep", is_flag=True, help="Keep the drivers' logs of cells that held, too.")
@click.option("--list", "only_list", is_flag=True, help="List the cells and exit.")
def prove(
    is_quick: bool,
    everything: bool,
    pipeline: Path | None,
    seed: int | None,
    records: int,
    minutes: float,
    jobs: int,
    out: Path | None,
    resume: bool,
    keep: bool,
    only_list: bool,
    **filters: tuple[str, ...],
) -> None:
    """Inject faults into real pipelines and judge the result, by the audit and by an independent check.

    Starts a cluster of its own (three Kafka nodes and PostgreSQL, in a temporary folder), and for each cell a pipeline
    as a real process under a steady load of numbered records. Then it injects the fault (kill -9, pause, partition,
    full disk, ...), recovers, drains and compares. A cell whose fault did not verifiably happen is unknown.

    With --pipeline, your own pipeline is proven: the file's schema, transform, sink, mode and guarantee, with records
    generated from its schema. Its topics and tables are not touched.
    """
    config = load_checked(pipeline) if pipeline else None
    only = CellFilter(**filters)
    cells = select_cells(only, quick_only=is_quick, pipeline=config)
    console = Console(highlight=False, soft_wrap=True)
    if only_list:
        _list(cells)
        return
    if not (is_quick or everything or only.faults or only.guarantees):
        raise ConfigError("no cells selected", advice="Use --quick, --fault NAME, --guarantee NAME or --all.")
    if not cells:
        raise ConfigError("no cell matches these options", advice="`avow prove --list` lists all cells.")
    seed = random.randrange(10**6) if seed is None else seed
    out = out or Path(".avow", "proofs", f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}")
    if resume:
        done = {name for name, line in history.verdicts(out).items() if line["verdict"] != CellVerdict.UNKNOWN}
        cells = [cell for cell in cells if cell.name not in done]
    # SIGTERM must stop the cluster, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    spec = None
    if pipeline and config:
        from avow.prove.workload_spec import UserPipeline

        spec = UserPipeline(pipeline, config)
    # Imported here: Spark's Python side takes a second, and a bad option should be reported at once.
    from avow.prove.runner import Options

    options = Options(seed=seed, records=records, minutes=minutes)
    raise SystemExit(_prove(console, cells, out, spec, options, jobs, keep))


def _prove(
    console: Console,
    cells: list[Cell],
    out: Path,
    spec: WorkloadSpec | None,
    options: Options,
    jobs: int,
    keep: bool,
) -> int:
    from avow.prove.proof import prove

    console.print(f"{len(cells)} cells, seed {options.seed}, evidence in {plain(str(out))}")
    began = time.monotonic()
    with console.status("starting the cluster") as status:

        def notify(cell: Cell, text: str) -> None:
            status.update(f"{plain(cell.name)}: {plain(text)}")

        results = prove(cells, out, options, jobs=jobs, keep=keep, own=spec, notify=notify)
        for done, result in enumerate(results, start=1):
            report.write(out)
            colour = COLOURS[result.verdict]
            left = remaining(done, len(cells), time.monotonic() - began)
            console.print(
                f"[dim]{done:>3}/{len(cells)}[/] [{colour}]{result.verdict:<8}[/] "
                f"{plain(result.cell.name)} [dim]{result.seconds:.0f} s: {plain(result.why)}; {left}[/]"
            )
    page, _ = report.write(out)
    verdicts = Counter(CellVerdict(line["verdict"]) for line in history.verdicts(out).values())
    console.print(
        ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) + f"; report: {plain(str(page))}"
    )
    return exit_code(verdicts)


def remaining(done: int, of: int, seconds: float) -> str:
    """An estimate from the cells that are done."""
    minutes = seconds / done * (of - done) / 60
    return "done" if done == of else f"about {minutes:.0f} min left" if minutes >= 1.5 else "a minute left"


def exit_code(verdicts: Counter[CellVerdict]) -> int:
    """Broken beats unknown."""
    if verdicts[CellVerdict.BROKEN] or verdicts[CellVerdict.MISSED]:
        return 1
    good = verdicts[CellVerdict.HELD] + verdicts[CellVerdict.CAUGHT]
    return 2 if verdicts[CellVerdict.UNKNOWN] or verdicts[CellVerdict.UNPROVEN] or not good else 0


def _list(cells: list[Cell]) -> None:
    names = max((len(cell.fault.name) for cell in cells), default=0)
    for cell in cells:
        fault = cell.fault
        expected = f"must show {cell.must_show}" if cell.must_show else ""
        if fault.stop:
            expected = f"must stop: {fault.stop_name}"
        if cell.canary:
            expected = "must be judged broken"
        column = f"{cell.sink}/{cell.mode}/{cell.engine}"
        text = f"{fault.number or '':>2}  {fault.name:<{names}}  {cell.guarantee:<13}  {column:<29}  {fault.title}"
        click.echo(f"{text} ({expected})" if expected else text)
