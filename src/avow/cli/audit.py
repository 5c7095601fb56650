"""``avow audit``: print what an audit found, and end with the verdict's exit code.

Owns: the report's looks. Must not know: how anything is judged; ``avow.audit`` says it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from avow.cli import file_argument, native_option, plain, print_json, printable, verbose_option
from avow.errors import ConfigError
from avow.findings import SPANS_MAX, Finding, permits
from avow.pipeline import Pipeline

if TYPE_CHECKING:  # they bring Arrow with them, which a bad file need not wait for
    from avow.audit.compare import Tally
    from avow.audit.report import AuditReport
    from avow.ledger import Counts

COLOURS = {"held": "bold green", "broken": "bold red", "unknown": "bold yellow"}
SHOWN = 10
SAY_EVERY_S = 10.0
HERE, NOWHERE = Path(".avow"), Path("-")  # of --out; the first is the dashboard's default folder


@click.command(
    epilog="Exit codes: 0 held · 1 broken · 2 unknown: nothing could be audited or decided, or the file was refused"
)
@file_argument
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option(
    "--max-shown", type=click.IntRange(min=0), default=SHOWN, help="The most offset ranges to show of each anomaly."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Store the report in this folder, for the dashboard's --evidence; '-': do not store it.  "
    "[default: .avow, if it is writable]",
)
@native_option
@verbose_option
def audit(file: Path, as_json: bool, max_shown: int, out: Path | None, native: bool | None) -> None:
    """Compare a pipeline's topics with its table, dead letters and ledger, offset by offset.

    Only reads: one snapshot of the database, and the topics up to their last stable offsets at that time. The pipeline
    may keep running. Reports whether the declared guarantee held, and names every anomaly with its offsets.
    """
    pipeline = Pipeline.load(file, native=native)
    # Imported here: they import Arrow, and a bad file should be reported at once.
    from avow.audit.archive import keep
    from avow.audit.judge import EXIT_CODES

    with _status() as notify:
        report = pipeline.audit(on_progress=notify)
    if out != NOWHERE:
        try:
            keep(report, out or HERE)
        except OSError as error:
            if out is not None:  # the default folder may be read-only: an audit works without it
                raise ConfigError(f"--out {out}: the report cannot be written: {error.strerror}") from error
    if as_json:
        print_json(report.as_json(max_shown))
    else:
        show(Console(highlight=False), report, max_shown)
    raise SystemExit(EXIT_CODES[report.verdict])


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Says what is being done: to a person on one changing line, to a log every ten seconds."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(plain(text))
        return
    doing, ended, started = ["starting"], threading.Event(), time.monotonic()

    def say() -> None:
        while not ended.wait(SAY_EVERY_S):
            print(f"after {time.monotonic() - started:.0f} s: {plain(doing[-1])}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield doing.append
    finally:
        ended.set()
        thread.join()


def show(console: Console, report: AuditReport, max_shown: int) -> None:
    """The report for a person. All of it as ``Text``, never as markup: names may hold square brackets."""
    console.print(Text(f"{report.pipeline}: {report.guarantee}, {report.mode}, {report.seconds:.1f} s", "bold"))
    if report.partitions:
        console.print()
        console.print(_partitions(report))
        console.print(Text(_accounting(report)))
    if report.findings:
        console.print()
        console.print(_findings(report, max_shown))
    if report.notes:
        console.print()
    for note in report.notes:
        console.print(Text.assemble(("note: ", "bold"), printable(note)))
    word, _, rest = report.sentence.partition(":")
    console.print(Text.assemble("\n", (word, COLOURS[report.verdict]), ":", printable(rest)))
    if report.advice:
        console.print(Text.assemble(("what to do: ", "bold"), printable(report.advice)))


def _partitions(report: AuditReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("partition", overflow="fold")
    for name in ("audited", "read", "written", "dead", "skipped", "lost", "anomalies"):
        table.add_column(name, justify="right", no_wrap=True)
    for partition in report.partitions:
        findings = [f for f in report.findings if (f.topic, f.partition) == (partition.topic, partition.partition)]
        table.add_row(
            Text(f"{partition.topic}/{partition.partition}"),
            f"[{partition.start:,}, {partition.until:,})".replace("[", r"\["),
            *_numbers(partition.tally),
            f"{sum(f.count for f in findings):,}",
        )
    if len(report.partitions) > 1:
        total = f"{sum(f.count for f in report.findings):,}"
        table.add_row("total", "", *_numbers(report.tally), total, style="bold")
    return table


def _numbers(tally: Tally) -> Iterator[str]:
    return (f"{n:,}" for n in (tally.read, tally.written, tally.dead, tally.skipped, tally.lost))


def _accounting(report: AuditReport) -> str:
    """The identity as found, and beside it what the ledger says."""
    lost = f" + {report.tally.lost:,} lost" if report.tally.lost else ""
    found, claimed = _identity(report.tally), _identity(report.counts)
    if found == claimed:
        return f"{found}{lost}; the ledger says the same."
    return f"{found}{lost};\nthe ledger says {claimed}."


def _identity(counts: Tally | Counts) -> str:
    return f"{counts.read:,} read = {counts.written:,} written + {counts.dead:,} dead + {counts.skipped:,} skipped"


def _findings(report: AuditReport, max_shown: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("anomaly", no_wrap=True)
    table.add_column("partition", overflow="fold")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("offsets", overflow="fold")
    for finding in report.findings:
        allowed = permits(report.guarantee, finding.kind)
        name = Text(finding.kind, "yellow" if allowed else "red")
        partition = Text(f"{finding.topic}/{finding.partition}")
        table.add_row(name, partition, f"{finding.count:,}", Text(_offsets(finding, max_shown)))
        for remark in _remarks(finding, allowed=allowed):
            table.add_row("", "", "", Text(printable(remark), "dim"))
    return table


def _offsets(finding: Finding, max_shown: int) -> str:
    shown = [str(span.start) if span.until == span.start + 1 else str(span) for span in finding.spans[:max_shown]]
    left = len(finding.spans) - len(shown)
    more = [f"and {left:,}{' or more' if len(finding.spans) == SPANS_MAX else ''} ranges more"] if left > 0 else []
    return ", ".join([*shown, *more])


def _remarks(finding: Finding, *, allowed: bool) -> Iterator[str]:
    if finding.columns:
        yield f"in {', '.join(finding.columns)}"
    if finding.detail:
        yield finding.detail
    if allowed:
        yield "permitted"
