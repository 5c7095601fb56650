"""Pipelines as a user has them: a file, records in real topics, ``avow run`` as a subprocess, and independent readers.

The readers here (psycopg and a plain consumer) share no code with the sinks or the audit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from avow.engines import consumer
from avow.engines.progress import Observer
from avow.engines.spark import SparkRun
from avow.kafka import metadata
from avow.local import spark
from avow.local.cluster import Cluster
from avow.plan import load_checked
from avow.settings import PipelineConfig

# Every session of others: idle, ours have no name, so that none stays on a pooler's connection.
END_SESSIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
)
# Each guarantee on one engine; on the other one in `make test-all` alone.
ON_ENGINES = [
    ("at-most-once", "consumer"),
    ("at-least-once", "consumer"),
    ("exactly-once", "spark"),
    pytest.param("at-most-once", "spark", marks=pytest.mark.long),
    pytest.param("at-least-once", "spark", marks=pytest.mark.long),
    pytest.param("exactly-once", "consumer", marks=pytest.mark.long),
]
SCHEMA = "id long not null, account string not null, amount double, note string"


def payment(number: int) -> bytes:
    return json.dumps({"id": number, "account": f"acc-{number % 97}", "amount": number / 4, "note": "x" * 20}).encode()


@dataclass
class Scenario:
    """One pipeline with its topic and table."""

    cluster: Cluster
    folder: Path
    topic: str
    name: str
    table: str
    partitions: int
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def file(self, guarantee: str = "exactly-once", **sections: str) -> Path:
        """The pipeline file. ``sections`` adds lines to a section, or replaces one that is there."""
        lines = {
            "source": f'brokers = "{self.cluster.bootstrap}"\ntopics = ["{self.topic}"]',
            "decode": f'format = "json"\nschema = "{SCHEMA}"',
            "sink": f'kind = "postgres"\nurl = "${{env:DATABASE_URL}}"\ntable = "{self.table}"',
            "batch": "max_records = 2000",
            "dead_letters": "max_share = 0.5",
            "spark": 'master = "local[2,4]"',
        } | sections
        text = f'name = "{self.name}"\nguarantee = "{guarantee}"\n'
        text += "".join(f"[{section}]\n{body}\n" for section, body in lines.items())
        path = self.folder / "pipeline.toml"
        path.write_text(text)
        return path

    def fitted(self, text: str) -> str:
        """An example of ours with this scenario's broker, topic and table in it."""
        names = {"localhost:9092": self.cluster.bootstrap, 'name="payments"': f'name="{self.name}"'}
        names |= {
            '"topics": ["payments"]': f'"topics": ["{self.topic}"]',
            '"table": "payments"': f'"table": "{self.table}"',
        }
        for shown, ours in names.items():
            assert shown in text or "avow.Pipeline(" not in text, shown
            text = text.replace(shown, ours)
        return text

    def produce(
        self, values: Iterable[bytes | None], *, keys: Sequence[bytes] | None = None, partition: int | None = None
    ) -> None:
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap, "linger.ms": 20}, logger=metadata.QUIET)
        for number, value in enumerate(values):
            where = number % self.partitions if partition is None else partition
            while True:
                try:
                    producer.produce(self.topic, value, key=keys[number] if keys else None, partition=where)
                    break
                except BufferError:
                    producer.poll(0.1)
        assert producer.flush(60) == 0

    def start(self, path: Path, *options: str, **env: str) -> subprocess.Popen[str]:
        """``avow run`` in a session of its own, so that it can be killed with all it started."""
        child = subprocess.Popen(
            [sys.executable, "-m", "avow.prove.hooked", "run", str(path), *options],  # with the hooks that env names
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Killed runs leave things in their temporary folder; pytest's own is cleared by pytest.
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "DATABASE_URL": self.url, "TMPDIR": str(self.folder), **env},
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def run(self, path: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        """``avow run --once`` to its end."""
        child = self.start(path, "--once", *options, **env)
        out, err = child.communicate(timeout=180)
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    def load(self, path: Path, engine: str | None = None) -> PipelineConfig:
        return load_checked(path, {"DATABASE_URL": self.url}, engine=engine)

    def drain(self, path: Path, engine: str | None = None) -> list[str]:
        """Run to the end in this process: on the session's Spark where that is said, or where the pipeline has a query
        in SQL; else without a JVM, which takes a fraction of the time. Gives the events told."""
        engine = engine or ("spark" if self.load(path).by_sql else "consumer")
        pipeline = self.load(path, engine)
        events: list[str] = []
        observer = Observer(event=events.append)
        if engine == "consumer":
            consumer.ConsumerRun(pipeline, once=True, observer=observer).execute()
        else:
            SparkRun(pipeline, lambda _: session_spark(pipeline), once=True, observer=observer).execute()
        return events

    @property
    def url(self) -> str:
        url = self.cluster.postgres_url
        assert url
        return url

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(query, values).fetchall()

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement)

    def ids(self) -> Counter[int]:
        """How often each id is in the table."""
        return Counter(row[0] for row in self.rows(f'SELECT id FROM "{self.table}"'))

    def positions(self) -> dict[int, int]:
        found = self.rows("SELECT partition, position FROM avow.ledger WHERE pipeline = %s", self.name)
        return dict(found)

    def wait_for_rows(self, count: int, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            there = self.rows("SELECT to_regclass(%s) IS NOT NULL", self.table)[0][0]
            if there and self.rows(f'SELECT count(*) FROM "{self.table}"')[0][0] >= count:
                return
            assert time.monotonic() < deadline, f"fewer than {count} rows after {timeout_s} s. {self._reports()}"
            time.sleep(0.05)

    def _reports(self) -> str:
        """What the runs of this test have printed, with where their threads stand and the ledger. They are killed for
        it."""
        ledger = self.rows("SELECT * FROM avow.ledger WHERE pipeline = %s", self.name)
        running = [child for child in self.children if child.stderr and not child.stderr.closed]
        codes = [child.poll() for child in running]
        for child in running:
            child.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
            with suppress(subprocess.TimeoutExpired):
                child.wait(5)
        reports = [f"exit code {code}, {self.kill(child)}" for code, child in zip(codes, running, strict=True)]
        return "\n".join([f"ledger: {ledger}", *reports])

    def kill(self, child: subprocess.Popen[str]) -> str:
        """kill -9 of the driver, its JVM and its Python workers. What it has written to stderr."""
        with suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        return child.communicate()[1]


_sparks: list[SparkSession] = []


def session_spark(pipeline: PipelineConfig) -> SparkSession:
    """One Spark for the whole test session."""
    if not _sparks:
        _sparks.append(spark.session(pipeline, short=True))
    return _sparks[0]


@pytest.fixture(scope="session", autouse=True)
def _end_spark() -> Iterator[None]:
    yield
    for started in _sparks:
        started.stop()


@pytest.fixture
def scenario(cluster: Cluster, tmp_path: Path, make_topic: Callable[..., str]) -> Iterator[Callable[..., Scenario]]:
    """Makes scenarios; whatever their runs left behind is ended."""
    made: list[Scenario] = []

    def make(partitions: int = 2, **config: str) -> Scenario:
        name = f"p-{uuid4().hex[:10]}"
        folder = tmp_path / name
        folder.mkdir()
        topic = make_topic(partitions, **config)
        found = Scenario(cluster, folder, topic, name, f"t_{uuid4().hex[:10]}", partitions)
        made.append(found)
        return found

    yield make
    for one in made:
        for child in one.children:
            if child.poll() is None:
                one.kill(child)
            for stream in (child.stdout, child.stderr):
                if stream:
                    stream.close()
