"""``avow produce``: JSON lines into a topic, every one accounted for; and what the choices mean and cost."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from avow.cli import plain
from avow.cli.kafka import cluster_options, settings_option, source_of
from avow.clients.durability import Choice, Durability, choose, explain
from avow.clients.sending import Sending
from avow.errors import AvowError, ConfigError, SourceError
from avow.guarantee import Guarantee
from avow.settings import Source, revealed

FAILURES_SHOWN = 10
TELL_EVERY_S = 2.0


@click.command(
    epilog="Exit codes: 0 every line was acknowledged (with fire-and-forget: has left) · 1 stopped before the end · "
    "2 refused, or a line that cannot be sent · 4 Kafka: a line failed, or nobody knows · 13 superseded by another "
    "import of the same name"
)
@click.argument("topic", required=False)
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--guarantee",
    type=click.Choice([str(word) for word in Guarantee]),
    default=str(Guarantee.AT_LEAST_ONCE),
    show_default=True,
    help="What may happen to a line on its way.",
)
@click.option(
    "--durability",
    type=click.Choice([str(word) for word in Durability]),
    help="When a line counts as sent.  [default: the guarantee's; transactional for a file sent exactly-once]",
)
@click.option("--explain", "explaining", is_flag=True, help="Say what this choice means, and send nothing.")
@click.option("--key", "key_field", metavar="FIELD", help="The record's key is this field of the line.")
@click.option(
    "--idempotency-key",
    metavar="FIELD|make",
    help="The header avow-key is this field of the line, or made up, by which readers know a line that came twice.",
)
@click.option("--skip-bad", is_flag=True, help="Leave out lines that are not JSON objects, and count them.")
@click.option("--name", help="Who an exactly-once import of a file is; another name sends the file again.")
@click.option(
    "--transaction-lines",
    type=click.IntRange(1, 100_000),
    default=10_000,
    show_default=True,
    help="How many lines of such an import are one transaction.",
)
@click.option(
    "--delivery-timeout",
    "timeout_s",
    type=click.FloatRange(1, 3600),
    default=120,
    show_default=True,
    help="Seconds until a line that was not acknowledged is given up.",
)
@click.option(
    "--measure", "measuring", is_flag=True, help="Measure every durability on this cluster, in a topic of its own."
)
@click.option(
    "--records", type=click.IntRange(100), default=20_000, show_default=True, help="How many to measure with."
)
@click.option(
    "--size", "record_bytes", type=click.IntRange(1, 900_000), default=200, show_default=True, help="Their bytes."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The measurement as a picture, beside the bars that are printed: a .svg file.",
)
@settings_option
@cluster_options
def produce(
    topic: str | None,
    file: Path | None,
    guarantee: str,
    durability: str | None,
    explaining: bool,
    measuring: bool,
    settings: tuple[str, ...],
    brokers: str | None,
    pipeline: Path | None,
    folder: Path,
    as_json: bool,
    records: int,
    record_bytes: int,
    out: Path | None,
    **options: Any,
) -> None:
    """Send JSON lines from FILE, or from standard input, to TOPIC.

    Every line ends as acknowledged, failed or unknown, and the totals add up. Ctrl-C stops reading, waits for what is
    on its way, and reports.

    A FILE sent with --guarantee exactly-once goes out in transactions that also carry how far it was read: killed and
    started again, it goes on behind the last line that was committed.
    """
    given = None if file is None or str(file) == "-" else file
    by_import = guarantee == Guarantee.EXACTLY_ONCE and given is not None
    choice = choose(guarantee, durability or (Durability.TRANSACTIONAL if by_import else None))
    if explaining:
        cluster = source_of(brokers, pipeline, folder, settings) if topic else None
        _explain(choice, topic, cluster, as_json, resumable=by_import and choice.transactional)
        return
    cluster = source_of(brokers, pipeline, folder, settings)
    if measuring:
        _measure(cluster, topic, records, record_bytes, out, as_json)
        return
    if topic is None:
        raise ConfigError("which topic?", advice="avow produce TOPIC [FILE]")
    if choice.transactional and given is None:
        raise ConfigError(
            "standard input cannot be read again, so there is nothing to go on from after a crash",
            advice="Give a FILE, or take --durability idempotent.",
        )
    job = Job(cluster, topic, given, choice, as_json, **options)
    job.check_topic()
    (job.import_file if choice.transactional else job.send_lines)()


@dataclass
class Job:
    """One call of the command that sends."""

    cluster: Source
    topic: str
    path: Path | None
    choice: Choice
    as_json: bool
    key_field: str | None
    idempotency_key: str | None
    skip_bad: bool
    name: str | None
    transaction_lines: int
    timeout_s: float
    failed: int = 0
    failures: list[str] = field(default_factory=list)  # the first of them

    def __post_init__(self) -> None:
        from avow.clients.lines import Form

        make = self.idempotency_key == "make"
        self.form = Form(
            str(self.path or "stdin"), self.key_field, None if make else self.idempotency_key, make_idempotency_key=make
        )
        self.kafka = revealed(self.cluster.kafka)
        self.console = Console(stderr=True, highlight=False)

    def check_topic(self) -> None:
        """A topic that is not there might be made by a broker, with somebody's typing error for a name."""
        from avow.clients.cluster import facts

        if facts(self.cluster.brokers, self.kafka, self.topic) is None:
            raise ConfigError(
                f"there is no topic {self.topic} at {self.cluster.shown('brokers')}",
                advice="`avow topics` lists them. Make it first, with the partitions and replicas it should have.",
            )

    def send_lines(self) -> None:
        """Each line by itself."""
        from avow.clients.lines import BadLine, read
        from avow.clients.producer import Producer

        lines = bad = 0
        problem: ConfigError | None = None
        producer = Producer(
            self.cluster.brokers,
            guarantee=self.choice.guarantee,
            durability=self.choice.durability,
            on_failure=self._failed,
            delivery_timeout_s=self.timeout_s,
            kafka=self.kafka,
        )
        with Stop() as stop, self._view() as show, producer:
            stop.tell(producer.stop_waiting)
            with self._opened() as stream:
                for line in stop.until_asked(read(stream)):
                    lines = line.number
                    if line.blank:
                        continue
                    try:
                        message = self.form.message(line)
                    except ConfigError as error:
                        bad += 1
                        if not (self.skip_bad and isinstance(error, BadLine)):
                            problem = error
                            break
                        show.event(str(error))
                        continue
                    tag = f"{self.form.name}:{line.number}"
                    producer.send(
                        self.topic, line.value, key=message.key, idempotency_key=message.idempotency_key, tag=tag
                    )
                    show.progress(line.until, producer.totals)
                    if self.failed and self.choice.retries:
                        break  # under at-most-once a loss is permitted, and sending goes on
            show.event("waiting for what is on its way")
        told = asdict(producer.totals) | {"lines": lines, "bad": bad, "stopped": stop.asked}
        self._report(told, str(producer.totals), problem)

    def _failed(self, one: Sending) -> None:
        self.failed += 1
        if len(self.failures) < FAILURES_SHOWN:
            self.failures.append(f"{one.tag}: {one.outcome}: {one.error}")

    def import_file(self) -> None:
        """The file in transactions, from where the last run ended."""
        from avow.clients.imports import Import

        assert self.path is not None
        name = self.name or f"avow-import/{self.topic}/{self.path.absolute()}"
        with Stop() as stop, self._view() as show:
            running = Import(
                self.cluster.brokers,
                self.topic,
                self.path,
                self.form,
                name=name,
                skip_bad=self.skip_bad,
                lines_per_transaction=self.transaction_lines,
                delivery_timeout_s=self.timeout_s,
                kafka=self.kafka,
                progress=lambda done: show.progress(done.bytes, f"{done.acknowledged:,} lines committed"),
                event=show.event,
            )
            stop.tell(running.stop)
            problem: AvowError | None = None
            try:
                running.execute()
            except AvowError as error:
                problem = error
        done = running.done
        text = f"{done.acknowledged:,} lines committed; {done.lines_before:,} lines had been before"
        self._report(asdict(done), text, problem)

    def _opened(self) -> AbstractContextManager[BinaryIO]:
        if self.path is None:
            return _borrowed(sys.stdin.buffer)
        try:
            return self.path.open("rb")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from None

    def _view(self) -> View:
        size = self.path.stat().st_size if self.path is not None and self.path.is_file() else None
        return View(self.console, size, quiet=self.as_json)

    def _report(self, told: dict[str, Any], text: str, problem: AvowError | None) -> None:
        """The totals, on standard output; then what was wrong, as the exit code."""
        if self.as_json:
            words = {"guarantee": str(self.choice.guarantee), "durability": str(self.choice.durability)}
            click.echo(json.dumps({"topic": self.topic, **words, **told, "failures": self.failures}))
        else:
            left_out = f"; {told['bad']:,} bad lines left out" if told["bad"] and self.skip_bad else ""
            click.echo(text + left_out)
        if problem is not None:
            raise problem
        if self.failed:
            more = [f"and {self.failed - len(self.failures):,} more"] if self.failed > len(self.failures) else []
            raise SourceError(
                "\n".join([f"{self.failed:,} lines were not acknowledged:", *self.failures, *more]),
                advice=self._advice(),
            )
        if told["stopped"]:
            self.console.print(f"stopped after line {told['lines']:,}, before the end", markup=False)
            sys.exit(1)

    def _advice(self) -> str:
        from avow.clients.cluster import in_sync_problem

        short = in_sync_problem(self.cluster.brokers, self.kafka, self.topic) if self.choice.level.acks == "all" else ""
        return short or "Lines that failed are not in the topic; those that are unknown may be."


@contextmanager
def _borrowed(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Standard input is not ours to close."""
    yield stream


class _Asked(Exception):
    """Ctrl-C, while nothing but reading was going on."""


class Stop(AbstractContextManager["Stop"]):
    """Ctrl-C and SIGTERM end the reading of lines. A second one is not caught: the reader wants out."""

    def __init__(self) -> None:
        self.asked = False
        self._reading = False
        self._tell: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}

    def tell(self, whom: Callable[[], None]) -> None:
        self._tell = whom

    def until_asked(self, lines: Iterator[Any]) -> Iterator[Any]:
        """The lines, until it is asked for: also while one is waited for."""
        while not self.asked:
            try:
                self._reading = True
                line = next(lines, None)
                self._reading = False
            except _Asked:
                return
            if line is None:
                return
            yield line

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _heard(self, number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.asked = True
        self._tell()
        if self._reading:
            self._reading = False
            raise _Asked


class View(AbstractContextManager["View"]):
    """How sending is shown: a bar at a terminal, a line every two seconds in a log, nothing to a machine."""

    def __init__(self, console: Console, size: int | None, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._told_at = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn()) if size else ()
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
            self._task = self._bar.add_task("sending", total=size)

    def __enter__(self) -> View:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def progress(self, position: int, told: object) -> None:
        now = time.monotonic()
        if self._quiet or now - self._told_at < (0.1 if self._bar else TELL_EVERY_S):
            return
        self._told_at = now
        if self._bar is not None:
            self._bar.update(self._task, completed=position, description=str(told))
        else:
            self.event(str(told))

    def event(self, text: str) -> None:
        if not self._quiet:
            self._console.print(f"{time.strftime('%H:%M:%S')} {plain(text)}", soft_wrap=True)


def _explain(choice: Choice, topic: str | None, cluster: Source | None, as_json: bool, *, resumable: bool) -> None:
    from avow.clients.cluster import facts

    found = None
    if topic is not None and cluster is not None:
        found = facts(cluster.brokers, revealed(cluster.kafka), topic)
        if found is None:
            raise ConfigError(f"there is no topic {topic} at {cluster.shown('brokers')}")
    said = list(explain(choice, found))
    if resumable:
        said.append(
            "This file's position is committed with its lines: killed and started again, it goes on behind the last "
            "line that was committed, and refuses a file that has changed."
        )
    if as_json:
        words = {"guarantee": str(choice.guarantee), "durability": str(choice.durability)}
        settings = choice.settings()
        topic_facts = asdict(found) if found else None
        click.echo(json.dumps({**words, "settings": settings, "topic": topic_facts, "explained": said}, indent=2))
        return
    for sentence in said:
        click.echo(f"- {sentence}" if sentence is not said[0] else sentence)


def _measure(
    cluster: Source, topic: str | None, records: int, record_bytes: int, out: Path | None, as_json: bool
) -> None:
    from avow.clients.measure import Load, measure
    from avow.clients.picture import bars, svg

    console = Console(stderr=True, highlight=False)
    load = Load(records, record_bytes=record_bytes)
    with console.status("measuring") as status:
        found = measure(
            cluster.brokers,
            load,
            topic=topic,
            kafka=revealed(cluster.kafka),
            event=lambda text: status.update(plain(text)),
        )
    if as_json:
        click.echo(json.dumps([one.as_dict() for one in found], indent=2))
    else:
        table = Table(
            "durability", "acks", "p50 ms", "p95 ms", "p99 ms", "max ms", "records/s", box=None, pad_edge=False
        )
        for one in found:
            told = one.as_dict()
            times = [f"{told[name]:.2f}" for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms")]
            table.add_row(str(told["durability"]), str(told["acks"]), *times, f"{told['records_per_s']:,}")
        Console(highlight=False).print(table, "", bars(found), sep="\n")
    if out is not None:
        out.write_text(svg(found, f"{records:,} records of {record_bytes:,} bytes"), encoding="utf-8")
        console.print(f"picture: {out}", markup=False)
