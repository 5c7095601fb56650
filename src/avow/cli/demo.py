"""``avow demo``: a local cluster, a pipeline that is killed with kill -9, and the audit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
from confluent_kafka import KafkaError, Producer
from rich.console import Console

from avow import sinks
from avow.cli import GUARANTEES
from avow.errors import LocalError, SinkError, SourceError
from avow.guarantee import Guarantee
from avow.kafka import metadata
from avow.kafka.admin import Admin
from avow.kafka.connect import Connection
from avow.local.cluster import Cluster
from avow.plan import load_checked
from avow.prove.failpoints import VARIABLE as FAILPOINT

FOLDER = Path(".avow/demo")
TOPIC, PARTITIONS = "payments", 4
BAD_EVERY = 20_011  # a few bad records among the good
# Where the pipeline is killed, as shares of the records; the last stretch drains.
KILLS = (0.15, 0.4, 0.65)
WAIT_S = 120

PIPELINE = """\
# Made by `avow demo`. Every key: docs/PIPELINE.md
name      = "payments"
guarantee = "{guarantee}"
engine    = "{engine}"

[source]
brokers = "{brokers}"
topics  = ["payments"]

[decode]
{decode}

[sink]
{sink}

[batch]
max_records = {batch}
"""

# What a payment is, as a record. Those with a schema below have it in the local registry, under TOPIC-value.
DECODE = {
    "json": 'format = "json"\n'
    'schema = "id long not null, account string not null, amount double, at timestamp, note string"',
    "avro": 'format = "avro"\nschema = "registry"\n\n[decode.registry]\nurl = "{registry}"',
}
SCHEMAS = {
    "avro": """\
{"type": "record", "name": "Payment", "namespace": "demo", "fields": [
  {"name": "id", "type": "long"},
  {"name": "account", "type": "string"},
  {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
  {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
  {"name": "note", "type": ["null", "string"], "default": null}
]}
""",
}

# Where the rows go, and where to look at them afterwards.
SINK = {
    "postgres": 'kind  = "postgres"\nurl   = "${env:DATABASE_URL}"\ntable = "payments"',
    "delta": f'kind = "delta"\npath = "{FOLDER}/lake/payments"',
    "iceberg": f'kind    = "iceberg"\ntable   = "lake.payments"\ncatalog = {{ warehouse = "{FOLDER}/lake" }}',
    "kafka": 'kind  = "kafka"\ntopic = "payments-clean"',
}
LOOK = {
    "postgres": 'psql $DATABASE_URL -c "SELECT * FROM avow.ledger"',
    "delta": f"python -c \"import deltalake; print(deltalake.DeltaTable('{FOLDER}/lake/payments').history(5))\"",
    "iceberg": f"pyiceberg --uri sqlite:///{FOLDER}/lake/catalog.db describe lake.payments",
    "kafka": f"avow lag --pipeline {FOLDER}/payments.toml",
}

# The step after which the first kill falls: between the two acts, where the weaker guarantees show what they permit.
BETWEEN = {Guarantee.AT_MOST_ONCE: "after-claim", Guarantee.AT_LEAST_ONCE: "after-write"}


@click.command(epilog="Ends with the audit's exit code: 0 held, 1 broken, 2 unknown.")
@click.option(
    "--guarantee",
    type=GUARANTEES,
    default=str(Guarantee.EXACTLY_ONCE),
    help="at-most-once and at-least-once show the anomalies they permit.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(list(DECODE)),
    default="json",
    help="avro: with a schema registry beside the cluster.",
)
@click.option("--sink", type=click.Choice(list(SINK)), default="postgres", help="Destination of the payments.")
@click.option(
    "--engine",
    type=click.Choice(["spark", "consumer"]),
    default="spark",
    help="The consumer engine runs without a JVM.",
)
@click.option("--records", type=click.IntRange(1_000), default=200_000, help="How many payments.")
@click.option("--keep", is_flag=True, help="Leave the cluster running afterwards, to inspect it.")
def demo(guarantee: str, format_: str, sink: str, engine: str, records: int, keep: bool) -> None:
    """A pipeline is killed three times with kill -9, a broker once, and every offset is audited: about 90 seconds.

    Starts a cluster of its own in .avow/demo, produces payments (a few of them malformed) and runs them into a sink.
    Nothing needs to be set up first.
    """
    show = Show(time.monotonic())
    cluster = Cluster(FOLDER)
    if cluster.exists and any(part.process() for part in cluster.parts()):
        raise LocalError(
            f"the cluster of an earlier demo is still running in {FOLDER}",
            advice=f"Stop it with `avow down --dir {FOLDER}`, then start the demo again.",
        )
    # SIGTERM must stop the cluster, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        code = _play(Stage(cluster, Guarantee(guarantee), format_, sink, engine, records, show))
        show.next(cluster if keep else None, sink, format_)
    finally:
        if not keep and cluster.exists:
            cluster.down()
            shutil.rmtree(FOLDER, ignore_errors=True)
    raise SystemExit(code)


class Show:
    """Lines for a person, each with the time it took to get there."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._console = Console(highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._started:5.1f} s[/]  {text}")

    def rule(self, title: str) -> None:
        self._console.rule(f"[bold]{title}[/]", align="left")

    def next(self, cluster: Cluster | None, sink: str, format_: str) -> None:
        """The next commands to try: those that inspect the cluster, if it was kept."""
        if cluster is None:
            self.rule("next")
            lines = {"avow demo --keep": "leaves the cluster running, with commands to inspect it"}
            lines |= {f"avow demo --sink {kind}": "the same into another sink" for kind in SINK if kind != sink}
            lines |= {f"avow demo --format {name}": "with a schema registry" for name in SCHEMAS if name != format_}
            lines |= {f"avow demo --guarantee {word}": "shows the anomalies it permits" for word in BETWEEN}
            lines["avow plan examples/payments.toml"] = "explains a pipeline of your own, hop by hop"
            for command, description in lines.items():
                self._console.print(f"  {command:<38}{description}")
            return
        self.rule("the cluster is still running")
        for line in (
            f"export DATABASE_URL={cluster.postgres_url}",
            f"avow dashboard {FOLDER} --dir {FOLDER}",
            f"avow status --dir {FOLDER}",
            f"avow dead-letters list {FOLDER}/payments.toml",
            f"avow audit {FOLDER}/payments.toml",
            LOOK[sink],
            f"avow consume {TOPIC} --max 5 --dir {FOLDER}",
            f"kcat -b {cluster.bootstrap} -C -t {TOPIC} -c 5",
            f"avow down --dir {FOLDER}",
        ):
            self._console.print(f"  {line}")


@dataclass(frozen=True)
class Stage:
    cluster: Cluster
    guarantee: Guarantee
    format: str
    sink: str
    engine: str
    records: int
    show: Show

    @property
    def file(self) -> Path:
        return FOLDER / "payments.toml"

    @property
    def env(self) -> dict[str, str]:
        # What a killed run leaves in its temporary folder goes with the cluster's.
        temporary = FOLDER.absolute() / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        return {**os.environ, "DATABASE_URL": self.cluster.postgres_url or "", "TMPDIR": str(temporary)}

    def rows(self) -> int:
        """How many records were written, by the ledger. The sink answers even while avow does not run."""
        pipeline = load_checked(self.file, self.env)
        try:
            with sinks.driver_sink(pipeline) as store:
                return sum(state.entry.counts.written for state in store.ledger_snapshot().values())
        except SinkError:  # the first run is still making it, or a broker was killed: asked again in a moment
            return 0


def _play(stage: Stage) -> int:
    show, cluster = stage.show, stage.cluster
    show.rule(stage.guarantee)
    show.line(stage.guarantee.meaning)
    with_registry = stage.format in SCHEMAS
    cluster.up(fresh=True, registry=with_registry or None)
    others = "PostgreSQL and a schema registry" if with_registry else "PostgreSQL"
    show.line(f"up: three Kafka nodes (replication factor 3, min.insync.replicas 2), {others} in {FOLDER}")
    bad = _produce(stage)
    show.line(f"produced {stage.records:,} payments into {TOPIC}, {PARTITIONS} partitions; {bad} of them are bad")
    batch = max(200, stage.records // 12)
    stage.file.write_text(
        PIPELINE.format(
            guarantee=stage.guarantee,
            engine=stage.engine,
            brokers=cluster.bootstrap,
            decode=DECODE[stage.format].format(registry=cluster.registry_url),
            sink=SINK[stage.sink],
            batch=batch,
        )
    )
    for number, share in enumerate(KILLS):
        _run_and_kill(stage, int(stage.records * share), first=number == 0)
        if number == 1:
            cluster.part("broker-2").kill()
            show.line("[red]kill -9[/] broker-2; two of three replicas are left")
    _drain(stage)
    cluster.up()
    show.line("broker-2 is back")
    show.rule("every offset, audited")
    return subprocess.run(
        [sys.executable, "-m", "avow", "audit", str(stage.file), "--out", "-"], env=stage.env, check=False
    ).returncode


def _produce(stage: Stage) -> int:
    with Admin(Connection(stage.cluster.bootstrap)) as admin:
        admin.create_topic(TOPIC, PARTITIONS)
    producer = Producer(
        {"bootstrap.servers": stage.cluster.bootstrap, "linger.ms": 50, "enable.idempotence": True},
        logger=metadata.QUIET,
    )
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: object) -> None:
        if error is not None:
            failed.append(error)

    bad = 0
    encode = _encoder(stage)
    for number, payment in enumerate(_payments(stage.records)):
        is_bad = number % BAD_EVERY == BAD_EVERY - 1
        bad += is_bad
        value = encode(payment)[:-7] if is_bad else encode(payment)
        while True:
            try:
                producer.produce(TOPIC, value, key=b"acc-%04d" % (number % 1_000), on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    left = producer.flush(60)
    if left or failed:
        raise SourceError(f"{left + len(failed)} payments were not acknowledged")
    return bad


def _encoder(stage: Stage) -> Callable[[bytes], bytes]:
    """Makes records of payments in JSON, where the format has a schema: it is registered first."""
    if stage.format not in SCHEMAS:
        return lambda payment: payment
    from avow.formats import FORMATS
    from avow.formats.registry.config import Text
    from avow.formats.registry.frame import framed
    from avow.schema_registry import RegistrySettings, SchemaRegistry

    assert stage.cluster.registry_url
    plugin, schema = FORMATS[stage.format], SCHEMAS[stage.format]
    registry = SchemaRegistry(RegistrySettings(url=stage.cluster.registry_url))
    number = registry.register(f"{TOPIC}-value", plugin.schema_kind, schema)
    encode = plugin.encoder(Text(schema, "the demo's schema"))
    return lambda payment: framed(number, encode(json.loads(payment)))


def _payments(count: int) -> Iterator[bytes]:
    for n in range(count):
        yield (
            b'{"id":%d,"account":"acc-%04d","amount":%d.%02d,"at":"2026-01-%02dT%02d:00:00Z","note":"payment %d"}'
            % (*(n, n % 1_000, n % 977, n % 100, n % 28 + 1, n % 24, n),)
        )


def _run_and_kill(stage: Stage, target: int, *, first: bool) -> None:
    """Run until the table has ``target`` rows, then kill -9 all its processes: on Spark the driver, its JVM and its
    Python workers."""
    env = stage.env
    between = BETWEEN.get(stage.guarantee) if first else None
    if between:
        env[FAILPOINT] = f"{between}:1:run:{FOLDER.absolute()}"
    child = _start(stage, env)
    deadline = time.monotonic() + WAIT_S
    while child.poll() is None and (between or stage.rows() < target):
        if time.monotonic() > deadline:
            raise LocalError(
                f"the pipeline did not reach {target:,} rows within {WAIT_S} s", advice=f"See its log: {FOLDER}/run.log"
            )
        time.sleep(0.05)
    if between:
        acts = "the claim and before the write" if between == "after-claim" else "the write and before the claim"
        child.wait()
        stage.show.line(f"[red]kill -9[/] exactly after {acts}, at {stage.rows():,} rows")
        return
    _kill(child)
    killed = "the driver, its JVM and its workers" if stage.engine == "spark" else "the pipeline"
    stage.show.line(f"[red]kill -9[/] {killed}, at {stage.rows():,} rows")


def _start(stage: Stage, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with (FOLDER / "run.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "avow.prove.hooked", "run", str(stage.file), "--once"],
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def _drain(stage: Stage) -> None:
    child = _start(stage, stage.env)
    code = child.wait()
    if code:
        raise LocalError(f"the pipeline ended with exit code {code}", advice=f"See its log: {FOLDER}/run.log")
    stage.show.line(f"restarted and drained: {stage.rows():,} rows")
