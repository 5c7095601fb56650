"""``avow run``: move records until stopped, or until drained."""

from __future__ import annotations

import json
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from avow.cli import hooks_of_caller, plain, verbose_option
from avow.engines.progress import Progress
from avow.pipeline import Engine, Pipeline


class View(AbstractContextManager["View"]):
    """How a run is shown: to a person at a terminal, in a log, or to a machine."""

    @abstractmethod
    def progress(self, told: Progress) -> None:
        """After every batch."""

    @abstractmethod
    def event(self, text: str) -> None:
        """Something that a person wants to know."""

    def __exit__(self, *_: object) -> None:
        return None


class LiveLine(View):
    """One line that changes, for a terminal; events scroll by above it."""

    def __init__(self, console: Console, first: str) -> None:
        self._console = console
        self._status = Status(first, console=console)

    def __enter__(self) -> LiveLine:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def progress(self, told: Progress) -> None:
        rate = told.offsets / told.seconds if told.seconds else 0
        lag = f"{told.lag_records:,} records"
        if told.lag_seconds is not None:
            lag += f", {told.lag_seconds:,.1f} s"
        self._status.update(
            f"[bold]{rate:,.0f}[/] records/s · lag {lag} · written {told.counts.written:,} · "
            f"dead letters {told.counts.dead:,} · skipped {told.counts.skipped:,} · "
            f"batch {told.batch} took {told.seconds:.1f} s"
        )

    def event(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {plain(text)}", soft_wrap=True)


class KeyValues(View):
    """Key-value lines, for a log."""

    def progress(self, told: Progress) -> None:
        unknown = "unknown" if told.lag_records else 0  # it is asked for a moment after the run has begun
        self._line(**{name: unknown if value is None else value for name, value in _flat(told).items()})

    def event(self, text: str) -> None:
        self._line(event=json.dumps(text, ensure_ascii=False))

    def _line(self, **values: object) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        print(f"time={now}", *(f"{key}={value}" for key, value in values.items()), file=sys.stderr, flush=True)


class JsonLines(View):
    """One JSON object a line on standard output."""

    def progress(self, told: Progress) -> None:
        print(json.dumps(_flat(told)), flush=True)

    def event(self, text: str) -> None:
        print(json.dumps({"event": text}), flush=True)


def _flat(told: Progress) -> dict[str, object]:
    """A progress as one flat row. Rates and ages rounded: they are not exact anyway."""
    age = told.lag_seconds
    return {
        "run": told.run,
        "batch": told.batch,
        "offsets": told.offsets,
        "seconds": round(told.seconds, 3),
        "offsets_per_second": round(told.offsets / told.seconds) if told.seconds else 0,
        **asdict(told.counts),
        "lag_records": told.lag_records,
        "lag_seconds": round(age, 3) if age is not None else None,
    }


@click.command(
    epilog="Exit codes: 0 drained or stopped · 1 failed · 2 refused · 4 Kafka · 5 the sink · 10 topic-recreated · "
    "11 log-truncated · 12 retention-loss · 13 superseded · 14 dead-letters · "
    "19 --once was stopped before it had drained · 70 a bug of ours"
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--once", is_flag=True, help="Drain to the end offsets of the start, then exit 0; if stopped first, 19.")
@click.option("--engine", type=click.Choice(["spark", "consumer"]), help="In place of the file's.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for machines.")
@verbose_option
def run(file: Path, once: bool, engine: Engine | None, as_json: bool) -> None:
    """Run a pipeline: from Kafka into its sink, under its guarantee.

    Starts from the ledger in the sink. Runs until SIGTERM or Ctrl-C, which end it after the current batch; a second
    Ctrl-C ends it at once, which is safe too.

    The consumer engine needs no Java and starts at once; several of them share the partitions. A group without members
    waits for more of them before it begins: the brokers' group.initial.rebalance.delay.ms, 3 s unless set. What a
    killed one had is taken over after session.timeout.ms, 10 s unless the file says otherwise. A pipeline may change
    its engine at any time: the ledger is the same.
    """
    pipeline = Pipeline.load(file)
    console = Console(stderr=True, highlight=False)
    live = LiveLine(console, f"starting {'Spark' if (engine or pipeline.config.engine) == 'spark' else 'the consumer'}")
    show: View = JsonLines() if as_json else live if console.is_terminal else KeyValues()
    with show:
        running = pipeline.start(
            once=once, engine=engine, on_progress=show.progress, on_event=show.event, hooks=hooks_of_caller()
        )
        stop_on_signals(running.stop, show.event)
        running.await_termination()
    show.event("drained" if once else "stopped")


def stop_on_signals(stop: Callable[[], None], event: Callable[[str], None]) -> None:
    def asked(number: int, _frame: object) -> None:
        # A second signal is not caught: the reader wants out.
        signal.signal(number, signal.SIG_DFL)
        event("stopping after the current batch")
        stop()

    signal.signal(signal.SIGTERM, asked)
    signal.signal(signal.SIGINT, asked)
