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
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from avow.cli import file_argument, hooks_of_caller, native_option, plain, verbose_option
from avow.engines.progress import Progress
from avow.pipeline import Engine, Pipeline


class RunView(AbstractContextManager["RunView"]):
    """How a run is displayed: on a terminal, in a log, or as JSON."""

    @abstractmethod
    def progress(self, progress: Progress) -> None:
        """After every batch."""

    @abstractmethod
    def event(self, text: str) -> None:
        """A message for the operator."""

    def __exit__(self, *_: object) -> None:
        return None


class LiveLine(RunView):
    """One line that changes, for a terminal; events scroll by above it."""

    def __init__(self, console: Console, first: str) -> None:
        self._console = console
        self._status = Status(first, console=console)

    def __enter__(self) -> LiveLine:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def progress(self, progress: Progress) -> None:
        rate = progress.offsets / progress.seconds if progress.seconds else 0
        lag = f"{progress.lag_records:,} records"
        if progress.lag_seconds is not None:
            lag += f", {progress.lag_seconds:,.1f} s"
        self._status.update(
            f"[bold]{rate:,.0f}[/] records/s · lag {lag} · written {progress.counts.written:,} · "
            f"dead letters {progress.counts.dead:,} · skipped {progress.counts.skipped:,} · "
            f"batch {progress.batch} took {progress.seconds:.1f} s"
        )

    def event(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {plain(text)}", soft_wrap=True)


class KeyValues(RunView):
    """Key-value lines, for a log."""

    def progress(self, progress: Progress) -> None:
        unknown = "unknown" if progress.lag_records else 0  # read a moment after the run has begun
        self._line(**{name: unknown if value is None else value for name, value in _flat(progress).items()})

    def event(self, text: str) -> None:
        self._line(event=json.dumps(text, ensure_ascii=False))

    def _line(self, **values: object) -> None:
        pairs = (f"{key}={value}" for key, value in values.items())
        print(f"time={_now()}", *pairs, file=sys.stderr, flush=True)


class JsonLines(RunView):
    """One JSON object a line on standard output."""

    def progress(self, progress: Progress) -> None:
        self._line(**_flat(progress))

    def event(self, text: str) -> None:
        self._line(event=text)

    def _line(self, **values: object) -> None:
        print(json.dumps({"time": _now(), **values}), flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _flat(progress: Progress) -> dict[str, object]:
    """Flat, with rates and ages rounded."""
    age = progress.lag_seconds
    return {
        "run": progress.run,
        "batch": progress.batch,
        "offsets": progress.offsets,
        "seconds": round(progress.seconds, 3),
        "offsets_per_second": round(progress.offsets / progress.seconds) if progress.seconds else 0,
        **asdict(progress.counts),
        "lag_records": progress.lag_records,
        "lag_seconds": round(age, 3) if age is not None else None,
    }


@click.command(
    epilog="Exit codes: 0 drained or stopped · 1 failed · 2 refused · 4 Kafka · 5 the sink · 10 topic-recreated · "
    "11 log-truncated · 12 retention-loss · 13 superseded · 14 dead-letters · "
    "19 --once was stopped before it had drained · 20 some topics of a pipeline with a table for each stopped · "
    "70 internal error"
)
@file_argument
@click.option(
    "--once", is_flag=True, help="Drain to the end offsets seen at the start, then exit 0; if stopped first, 19."
)
@click.option("--engine", type=click.Choice(["spark", "consumer"]), help="Overrides the engine of the pipeline file.")
@native_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
@verbose_option
def run(file: Path, once: bool, engine: Engine | None, native: bool | None, as_json: bool) -> None:
    """Run a pipeline: from Kafka into its sink, under its guarantee.

    Starts from the positions in the sink's ledger. SIGTERM or Ctrl-C ends it after the current batch; a second Ctrl-C
    ends it at once, which is also safe.

    The consumer engine needs no Java; several processes share the partitions. The first one waits for others to join:
    the brokers' group.initial.rebalance.delay.ms, 3 s by default. Partitions of a killed process are taken over after
    session.timeout.ms, 10 s by default. A pipeline may change its engine at any time: the ledger is the same.
    """
    pipeline = Pipeline.load(file, native=native)
    console = Console(stderr=True, highlight=False)
    live = LiveLine(console, f"starting {'Spark' if (engine or pipeline.config.engine) == 'spark' else 'the consumer'}")
    view: RunView = JsonLines() if as_json else live if console.is_terminal else KeyValues()
    with view:
        running = pipeline.start(
            once=once, engine=engine, on_progress=view.progress, on_event=view.event, hooks=hooks_of_caller()
        )
        stop_on_signals(running.stop, view.event)
        running.await_termination()
    view.event("drained" if once else "stopped")


def stop_on_signals(stop: Callable[[], None], event: Callable[[str], None]) -> None:
    def on_signal(number: int, _frame: object) -> None:
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        event("stopping after the current batch")
        stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
