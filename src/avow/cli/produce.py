"""``avow produce``: send JSON lines to a topic, account for each of them, explain and measure the durabilities."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from avow.cli import GUARANTEES, json_option, plain, print_json
from avow.cli.kafka import ClusterSelection, cluster_options
from avow.cli.registry import RegistrySelection, registry_options
from avow.clients.delivery import Delivery
from avow.clients.durability import Choice, Durability, choose, explain
from avow.errors import AvowError, ConfigError, SourceError
from avow.guarantee import Guarantee
from avow.settings import Source, unwrap_secrets

if TYPE_CHECKING:
    from avow.formats.base import FormatPlugin
    from avow.formats.registry.config import Text
    from avow.schema_registry import SchemaRegistry

EncodeLine = Callable[[object], bytes]  # of a parsed line
FROM_REGISTRY = "registry"
FAILURES_SHOWN = 10
TELL_EVERY_S = 2.0


@click.command(
    epilog="Exit codes: 0 every line was acknowledged (with fire-and-forget: sent) · 1 stopped before the end · "
    "2 refused, or a line that cannot be sent · 4 Kafka: a line failed, or its outcome is unknown · 13 superseded by "
    "another import of the same name"
)
@click.argument("topic", required=False)
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--guarantee",
    type=GUARANTEES,
    default=str(Guarantee.AT_LEAST_ONCE),
    help="The delivery guarantee: whether a line may be lost or duplicated.",
)
@click.option(
    "--durability",
    type=click.Choice([str(word) for word in Durability]),
    help="When a line counts as sent.  [default: the guarantee's; transactional for a file sent exactly-once]",
)
@click.option("--explain", "explaining", is_flag=True, help="Explain what the options mean, and send nothing.")
@click.option("--key", "key_field", metavar="FIELD", help="Use this field of the line as the record's key.")
@click.option(
    "--idempotency-key",
    metavar="FIELD|make",
    help="Set the header avow-key to this field of the line ('make': to a generated key), so that readers can "
    "deduplicate.",
)
@click.option("--skip-bad", is_flag=True, help="Skip and count lines that are not JSON objects.")
@click.option("--name", help="Name of an exactly-once import; under another name the file is sent again.")
@click.option(
    "--transaction-lines",
    type=click.IntRange(1, 100_000),
    default=10_000,
    help="Lines per transaction of an exactly-once import.",
)
@click.option(
    "--delivery-timeout",
    "timeout_s",
    type=click.FloatRange(1, 3600),
    default=120,
    help="Seconds to wait for a line's acknowledgement (delivery.timeout.ms).",
)
@click.option(
    "--measure", "measuring", is_flag=True, help="Measure every durability on this cluster, in a temporary topic."
)
@click.option("--records", type=click.IntRange(100), default=20_000, help="Records to measure with.")
@click.option(
    "--size", "record_bytes", type=click.IntRange(1, 900_000), default=200, help="Size of a record, in bytes."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the measurement as a chart to this .svg file.",
)
@click.option(
    "--format",
    "format_",
    metavar="NAME",
    help="Encode the lines in a format whose schemas a registry keeps, such as avro.  [default: lines are sent as they "
    "are]",
)
@click.option(
    "--schema",
    metavar="FILE|registry",
    help="With --format: the schema, registered under the subject; 'registry': the subject's newest version.",
)
@click.option("--subject", help="With --format: the subject of the schema.  [default: TOPIC-value]")
@click.option("--message", metavar="NAME", help="With --format: the type, where the schema has several messages.")
@click.option(
    "--key-schema",
    metavar="FILE|registry",
    help="With --format and --key: encode the key by this schema, of the subject TOPIC-key.  [default: keys are text]",
)
@click.option("--register", is_flag=True, help="Register a schema FILE under its subject, if it is not yet.")
@cluster_options
@registry_options
@json_option
def produce(
    topic: str | None,
    file: Path | None,
    guarantee: str,
    durability: str | None,
    explaining: bool,
    measuring: bool,
    selection: ClusterSelection,
    as_json: bool,
    records: int,
    record_bytes: int,
    out: Path | None,
    registry: RegistrySelection,
    **options: Any,
) -> None:
    """Send JSON lines from FILE, or from standard input, to TOPIC.

    With --format, lines become values of a schema that a schema registry keeps, behind its id. A line that does not fit
    the schema is an error that names the line and the field.

    Every line ends as acknowledged, failed or unknown, and the totals add up. Ctrl-C stops reading, waits for
    outstanding acknowledgements, and reports.

    A FILE sent with --guarantee exactly-once is sent in transactions that also commit the position in the file: after a
    crash, the import continues after the last committed line.
    """
    source = None if file is None or str(file) == "-" else file
    by_import = guarantee == Guarantee.EXACTLY_ONCE and source is not None
    wanted = _encoding(registry, options)
    choice = choose(guarantee, durability or (Durability.TRANSACTIONAL if by_import else None))
    if explaining:
        cluster = selection.source() if topic else None
        _explain(choice, topic, cluster, as_json, resumable=by_import and choice.transactional, wanted=wanted)
        return
    cluster = selection.source()
    if measuring:
        _measure(cluster, topic, records, record_bytes, out, as_json)
        return
    if topic is None:
        raise ConfigError("the topic is missing", advice="avow produce TOPIC [FILE]")
    if choice.transactional and source is None:
        raise ConfigError(
            "durability transactional needs a FILE: standard input cannot be read again after a crash",
            advice="Give a FILE, or use --durability idempotent.",
        )
    job = ProduceJob(cluster, topic, source, choice, as_json, wanted, **options)
    job.prepare()
    (job.import_file if choice.transactional else job.send_lines)()


@dataclass
class ProduceJob:
    """One call of the command that sends."""

    cluster: Source
    topic: str
    path: Path | None
    choice: Choice
    as_json: bool
    wanted: Encoding | None
    key_field: str | None
    idempotency_key: str | None
    skip_bad: bool
    name: str | None
    transaction_lines: int
    timeout_s: float
    failed: int = 0
    failures: list[str] = field(default_factory=list)  # the first of them

    def __post_init__(self) -> None:
        from avow.clients.cluster import connect

        self.kafka = unwrap_secrets(self.cluster.kafka)
        self.connection = connect(self.cluster.brokers, self.kafka, self.topic)
        self.console = Console(stderr=True, highlight=False)

    def prepare(self) -> None:
        """What must be there: the topic (a broker might create a missing one, under a mistyped name), the schemas."""
        from avow.clients.cluster import facts
        from avow.clients.jsonl import MessageFormat

        if facts(self.connection, self.topic) is None:
            raise _no_topic(self.topic, self.cluster)
        make = self.idempotency_key == "make"
        encode, encode_key = self.wanted.encoders(self.topic) if self.wanted else (None, None)
        self.form = MessageFormat(
            str(self.path or "stdin"),
            self.key_field,
            None if make else self.idempotency_key,
            make_idempotency_key=make,
            encode=encode,
            encode_key=encode_key,
        )

    def send_lines(self) -> None:
        """Each line by itself."""
        from avow.clients.jsonl import BadLine, read
        from avow.clients.producer import Producer

        lines = bad = 0
        problem: ConfigError | None = None
        producer = Producer(
            self.cluster.brokers,
            guarantee=self.choice.guarantee,
            durability=self.choice.durability,
            on_failure=self._failed,
            delivery_timeout_ms=int(self.timeout_s * 1000),
            config=self.kafka,
        )
        with Stop() as stop, self._view() as show, producer:
            stop.on_stop(producer.stop_waiting)
            with self._opened() as stream:
                for line in stop.until_requested(read(stream)):
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
                        self.topic, message.value, key=message.key, idempotency_key=message.idempotency_key, tag=tag
                    )
                    show.progress(line.until, producer.totals)
                    if self.failed and self.choice.retries:
                        break  # under at-most-once a loss is permitted, and sending goes on
            show.event("waiting for outstanding acknowledgements")
        summary = asdict(producer.totals) | {"lines": lines, "bad": bad, "stopped": stop.requested}
        self._report(summary, str(producer.totals), problem)

    def _failed(self, delivery: Delivery) -> None:
        self.failed += 1
        if len(self.failures) < FAILURES_SHOWN:
            self.failures.append(f"{delivery.tag}: {delivery.outcome}: {delivery.error}")

    def import_file(self) -> None:
        """The file in transactions, from where the last run ended."""
        from avow.clients.imports import Import

        assert self.path is not None
        name = self.name or f"avow-import/{self.topic}/{self.path.absolute()}"
        with Stop() as stop, self._view() as show:
            running = Import(
                self.connection,
                self.topic,
                self.path,
                self.form,
                name=name,
                skip_bad=self.skip_bad,
                lines_per_transaction=self.transaction_lines,
                delivery_timeout_ms=int(self.timeout_s * 1000),
                progress=lambda done: show.progress(done.bytes, f"{done.acknowledged:,} lines committed"),
                event=show.event,
            )
            stop.on_stop(running.stop)
            problem: AvowError | None = None
            try:
                running.execute()
            except AvowError as error:
                problem = error
        done = running.done
        text = f"{done.acknowledged:,} lines committed; {done.lines_before:,} lines were committed earlier"
        self._report(asdict(done), text, problem)

    def _opened(self) -> AbstractContextManager[BinaryIO]:
        if self.path is None:
            return nullcontext(sys.stdin.buffer)  # not ours to close
        try:
            return self.path.open("rb")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from None

    def _view(self) -> ProduceView:
        size = self.path.stat().st_size if self.path is not None and self.path.is_file() else None
        return ProduceView(self.console, size, quiet=self.as_json)

    def _report(self, summary: dict[str, Any], text: str, problem: AvowError | None) -> None:
        """The totals, on standard output; then what was wrong, as the exit code."""
        if self.as_json:
            words = {"guarantee": str(self.choice.guarantee), "durability": str(self.choice.durability)}
            click.echo(json.dumps({"topic": self.topic, **words, **summary, "failures": self.failures}))
        else:
            left_out = f"; {summary['bad']:,} bad lines skipped" if summary["bad"] and self.skip_bad else ""
            click.echo(text + left_out)
        if problem is not None:
            raise problem
        if self.failed:
            more = [f"and {self.failed - len(self.failures):,} more"] if self.failed > len(self.failures) else []
            raise SourceError(
                "\n".join([f"{self.failed:,} lines were not acknowledged:", *self.failures, *more]),
                advice=self._advice(),
            )
        if summary["stopped"]:
            self.console.print(f"stopped after line {summary['lines']:,}, before the end", markup=False)
            sys.exit(1)

    def _advice(self) -> str:
        from avow.clients.cluster import in_sync_problem

        short = in_sync_problem(self.connection, self.topic) if self.choice.level.acks == "all" else ""
        return short or "Failed lines are not in the topic; unknown lines may be."


_ENCODING = ("format_", "schema", "subject", "message", "key_schema", "register")


def _encoding(registry: RegistrySelection, options: dict[str, Any]) -> Encoding | None:
    """What the options say of schemas, taken out of them."""
    given = {name: options.pop(name) for name in _ENCODING}
    if given["format_"] is None:
        if name := next((name for name in _ENCODING if given[name]), None):
            raise ConfigError(
                f"--{name.replace('_', '-')} is given without --format", advice="Give --format, such as avro."
            )
        return None
    if given["schema"] is None:
        raise ConfigError(
            "--schema is missing", advice="Give a schema FILE, or --schema registry for the subject's newest version."
        )
    if given["key_schema"] and not options["key_field"]:
        raise ConfigError("--key-schema is given without --key", advice="Name the field of the key with --key FIELD.")
    return Encoding(registry, given.pop("format_"), **given)


@dataclass(frozen=True)
class Encoding:
    """Lines become values of a format with schemas."""

    registry: RegistrySelection
    format: str
    schema: str
    subject: str | None
    message: str | None
    key_schema: str | None
    register: bool

    def explain(self, topic: str) -> str:
        subject = self.subject or f"{topic}-value"
        if self.schema == FROM_REGISTRY:
            return f"Each line is encoded as {self.format}, by the newest version of the subject {subject}."
        rest = "registered if it is not yet" if self.register else "which must be registered"
        return f"Each line is encoded as {self.format}, by {self.schema} under the subject {subject}, {rest}."

    def encoders(self, topic: str) -> tuple[EncodeLine, EncodeLine | None]:
        """Of values, and of keys if they have a schema."""
        client = self.registry.client()
        if client is None:
            raise ConfigError(
                f"--format {self.format} needs a schema registry",
                advice="Give --registry URL, or --pipeline FILE with [decode.registry]; `avow up --registry` starts a "
                "local one.",
            )
        settings = self.registry.found()
        assert settings is not None
        if self.subject is None and settings.needs_record_name:
            raise ConfigError(
                f"--subject is missing: no topic says it under subject_strategy = {settings.subject_strategy}",
                advice="Give --subject NAME.",
            )
        value = self._encoder(client, self.schema, self.subject or settings.subject_of(topic), self.message)
        key = self._encoder(client, self.key_schema, f"{topic}-key", None) if self.key_schema else None
        return value, key

    def _encoder(self, client: SchemaRegistry, schema: str, subject: str, message: str | None) -> EncodeLine:
        from avow.formats.documents import encoder, plugin_that_encodes, text_of

        plugin = plugin_that_encodes(self.format)
        if schema == FROM_REGISTRY:
            registered = client.latest(subject)
            if registered.kind != plugin.schema_kind:
                raise ConfigError(
                    f"subject {subject} of {client} is {registered.kind}, and --format is {self.format}",
                    advice="Give the format of the subject's schema, or another --subject.",
                )
            text = text_of(registered, client)
        else:
            text = self._in_file(schema)
        try:
            encode = plugin.encoder(text, message)
        except ValueError as error:
            raise ConfigError(f"{text.origin}: {error}", advice=f"Give a schema of {self.format}.") from None
        if text.schema_id is None:
            text = replace(text, schema_id=self._id_of(client, plugin, subject, text))
        return encoder(text, encode)

    def _in_file(self, schema: str) -> Text:
        from avow.formats.registry.config import Text

        try:
            return Text(Path(schema).read_bytes().decode("utf-8-sig"), schema)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"--schema {schema} cannot be read: {why}", advice="Give a schema FILE, or the word registry."
            ) from None

    def _id_of(self, client: SchemaRegistry, plugin: FormatPlugin, subject: str, text: Text) -> int:
        if self.register:
            return client.register(subject, plugin.schema_kind, text.text)
        found = client.find(subject, plugin.schema_kind, text.text)
        if found is None:
            raise ConfigError(
                f"{text.origin} is not registered under the subject {subject} of {client}",
                advice="Register it with --register, or use --schema registry.",
            )
        return found.id


class _Asked(Exception):
    """Ctrl-C, while nothing but reading was going on."""


class Stop(AbstractContextManager["Stop"]):
    """Ctrl-C and SIGTERM end the reading of lines. A second one is not caught: the reader wants out."""

    def __init__(self) -> None:
        self.requested = False
        self._reading = False
        self._on_stop: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}

    def on_stop(self, callback: Callable[[], None]) -> None:
        self._on_stop = callback

    def until_requested(self, lines: Iterator[Any]) -> Iterator[Any]:
        """The lines, until it is asked for: also while one is waited for."""
        while not self.requested:
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

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _heard(self, number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.requested = True
        self._on_stop()
        if self._reading:
            self._reading = False
            raise _Asked


class ProduceView(AbstractContextManager["ProduceView"]):
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

    def __enter__(self) -> ProduceView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def progress(self, position: int, counts: object) -> None:
        now = time.monotonic()
        if self._quiet or now - self._told_at < (0.1 if self._bar else TELL_EVERY_S):
            return
        self._told_at = now
        if self._bar is not None:
            self._bar.update(self._task, completed=position, description=str(counts))
        else:
            self.event(str(counts))

    def event(self, text: str) -> None:
        if not self._quiet:
            self._console.print(f"{time.strftime('%H:%M:%S')} {plain(text)}", soft_wrap=True)


def _no_topic(topic: str, cluster: Source) -> ConfigError:
    return ConfigError(
        f"topic {topic} does not exist at {cluster.shown('brokers')}",
        advice="`avow topics` lists the topics. Create it first, with the partitions and replicas it should have.",
    )


def _explain(
    choice: Choice,
    topic: str | None,
    cluster: Source | None,
    as_json: bool,
    *,
    resumable: bool,
    wanted: Encoding | None,
) -> None:
    from avow.clients.cluster import connect, facts

    topic_facts = None
    if topic is not None and cluster is not None:
        topic_facts = facts(connect(cluster.brokers, unwrap_secrets(cluster.kafka), topic), topic)
        if topic_facts is None:
            raise _no_topic(topic, cluster)
    sentences = list(explain(choice, topic_facts))
    if resumable:
        sentences.append(
            "The file's position is committed in the transaction of its lines: after a crash, the import continues "
            "after the last committed line. A file that has changed is refused."
        )
    if wanted is not None:
        sentences.append(wanted.explain(topic or "TOPIC"))
    if as_json:
        print_json(
            {
                "guarantee": str(choice.guarantee),
                "durability": str(choice.durability),
                "settings": choice.settings(),
                "topic": asdict(topic_facts) if topic_facts else None,
                "explained": sentences,
            }
        )
        return
    for sentence in sentences:
        click.echo(f"- {sentence}" if sentence is not sentences[0] else sentence)


def _measure(
    cluster: Source, topic: str | None, records: int, record_bytes: int, out: Path | None, as_json: bool
) -> None:
    from avow.clients.chart import bars, svg
    from avow.clients.cluster import connect
    from avow.clients.measure import Load, measure

    console = Console(stderr=True, highlight=False)
    load = Load(records, record_bytes=record_bytes)
    with console.status("measuring") as status:
        measurements = measure(
            connect(cluster.brokers, unwrap_secrets(cluster.kafka)),
            load,
            topic=topic,
            event=lambda text: status.update(plain(text)),
        )
    if as_json:
        print_json([measured.as_dict() for measured in measurements])
    else:
        table = Table(
            "durability", "acks", "p50 ms", "p95 ms", "p99 ms", "max ms", "records/s", box=None, pad_edge=False
        )
        for measured in measurements:
            document = measured.as_dict()
            times = [f"{document[name]:.2f}" for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms")]
            table.add_row(str(document["durability"]), str(document["acks"]), *times, f"{document['records_per_s']:,}")
        Console(highlight=False).print(table, "", bars(measurements), sep="\n")
    if out is not None:
        out.write_text(svg(measurements, f"{records:,} records of {record_bytes:,} bytes"), encoding="utf-8")
        console.print(f"chart: {out}", markup=False)
