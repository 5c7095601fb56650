"""Lakes in an S3-compatible store: a real server that speaks S3, with conditional puts. No Kafka, no Spark."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.error import URLError
from urllib.request import urlopen
from uuid import uuid4

import boto3
import polars as pl
import pytest
from deltalake import DeltaTable
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.typedef import Properties
from tests.fix_sinks import Bench

from avow import sinks
from avow.errors import Superseded
from avow.kafka.log import TopicPartition
from avow.ledger import Counts
from avow.local.cluster import PortPicker
from avow.sinks.lake.maintenance import compact, orphans
from avow.sinks.lake.plugin import lake_tables
from avow.testing.sinks import TOPIC, Runner, record

pytestmark = pytest.mark.xdist_group("lake_s3")

KEYS = {"aws_access_key_id": "someone", "aws_secret_access_key": "hunter2", "region_name": "us-east-1"}


@dataclass(frozen=True)
class Store:
    """The server, with a bucket called lake."""

    address: str
    log: Path

    def requests(self) -> int:
        """How many it has answered so far."""
        return self.log.read_text().count("HTTP/1.1")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    port = PortPicker().free()
    log = (tmp_path_factory.mktemp("s3") / "log").open("wb")
    child = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urlopen(address, timeout=1).close()
                break
            except (URLError, OSError):
                assert time.monotonic() < deadline, Path(log.name).read_text()
                assert child.poll() is None, Path(log.name).read_text()
                time.sleep(0.1)
        client = cast(Any, boto3).client("s3", endpoint_url=address, **KEYS)
        client.create_bucket(Bucket="lake")
        client.close()
        yield Store(address, Path(log.name))
    finally:
        child.terminate()
        child.wait()
        log.close()


class S3Bench(Bench):
    def __init__(self, kind: str, folder: Path, address: str) -> None:
        super().__init__(kind, folder)
        self.address, self.root = address, f"s3://lake/{uuid4().hex[:8]}"
        self.spelled: Callable[[str], str] = str  # how the pipeline file has an option
        self.catalog = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": self.root,
            "s3.endpoint": address,
            "s3.access-key-id": "someone",
            "s3.secret-access-key": "hunter2",
            "s3.region": "us-east-1",
        }

    @property
    def options(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "hunter2",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def sink(self, *lines: str) -> str:
        if self.kind == "delta":
            options = ", ".join(f'{self.spelled(name)} = "{value}"' for name, value in self.options.items())
            where = f'path = "{self.root}/{self.table}"\noptions = {{ {options} }}'
        else:
            told = ", ".join(f'"{name}" = "{value}"' for name, value in self.catalog.items())
            where = f'table = "lake.{self.table}"\ncatalog = {{ {told} }}'
        return "\n".join([f'kind = "{self.kind}"', where, *lines])

    def frame(self, suffix: str = "") -> pl.DataFrame:
        if self.kind == "delta":
            return pl.read_delta(f"{self.root}/{self.table}{suffix}", storage_options=self.options)
        rows, letters = lake_tables(self.pipeline())
        table = letters if suffix else rows
        assert table.load()
        found = pl.from_arrow(table.rows())
        assert isinstance(found, pl.DataFrame)
        return found


@pytest.fixture(params=["delta", "iceberg"])
def b(request: pytest.FixtureRequest, tmp_path: Path, store: Store) -> S3Bench:
    return S3Bench(request.param, tmp_path, store.address)


def test_append_dead_letters_and_a_second_run(b: S3Bench) -> None:
    pipeline = b.pipeline()
    assert "hunter2" not in repr(pipeline)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(0), b"bad", record(2)]})
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(3)]})
        assert run.counts() == Counts(4, 3, 1)
    assert b.ids() == [0, 2, 3]
    assert b.dead_letters() == [(0, 1, "not-json")]


def test_other_spellings_of_the_settings(b: S3Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and log go to one store, whatever its settings are called and whoever gives them."""
    if b.kind == "delta":
        b.root = b.root.replace("s3:", "s3a:")
        b.spelled = lambda name: name.removeprefix("AWS_").lower()
    else:
        # As a REST catalog does it: the store's settings come with the table.
        vended = {name: value for name, value in b.catalog.items() if name.startswith("s3.")}
        vended = {name.replace("s3.", "client.", name != "s3.endpoint"): value for name, value in vended.items()}
        b.catalog = {name: value for name, value in b.catalog.items() if not name.startswith("s3.")}
        b.catalog["warehouse"] = b.root.replace("s3:", "s3a:")

        def handed_out(properties: Properties, location: str | None = None) -> FileIO:
            return load_file_io({**properties, **vended}, location)

        for module in ("pyiceberg.catalog", "pyiceberg.catalog.sql"):
            monkeypatch.setattr(f"{module}.load_file_io", handed_out)
    pipeline = b.pipeline("exactly-once", 'mode = "upsert"', 'key = ["id"]')
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(0), b"bad", record(2)]})
        run.deliver({0: [record(0, amount=0.5)]})
        assert run.counts() == Counts(4, 3, 1)
        with sinks.audit_reader(pipeline) as reading, sinks.audit_reader(pipeline, reading.snapshot) as joined:
            assert joined.row_counts() == {TopicPartition(TOPIC, 0): 2}
    assert b.ids() == [0, 2]


def test_two_drivers_race_and_one_wins(b: S3Bench) -> None:
    """Neither has fenced the other: both hold the same positions, and the store takes one commit of the two."""
    pipeline = b.pipeline()
    with b.run(pipeline, partitions=1) as first:
        twin = Runner.__new__(Runner)
        twin.__dict__.update(first.__dict__, store=sinks.driver_sink(pipeline))
        twin.store.prepare()
        twin.store.prepare_table(pipeline.decode.columns.fields, rest=False)
        mine, theirs = first.stage({0: [record(0), record(1)]}), twin.stage({0: [record(10), record(11)]})
        first.commit(*mine)
        twin.commit(*theirs)  # refused by the store, and then a replay: the position has moved past it
        assert twin.position() == 2
        with b.run(pipeline, partitions=1), pytest.raises(Superseded):
            twin.deliver({0: [record(2)]}, starts={0: 2})
    assert b.ids() == [0, 1]


def test_what_a_commit_asks_of_the_store_does_not_grow_with_the_partitions(b: S3Bench, store: Store) -> None:
    def asked(run: Runner) -> int:
        staged = run.stage({partition: [record(0)] for partition in range(run.partitions)})
        before = store.requests()
        run.commit(*staged)
        run.position()
        return store.requests() - before

    with b.run(partitions=12) as run:
        first = asked(run)
        assert max(first, asked(run)) <= 20
        if b.kind == "delta":  # somebody else's commit is read, once
            DeltaTable(f"{b.root}/{b.table}", storage_options=b.options).alter.set_table_properties(
                {"their.own": "x"}, raise_if_not_exists=False
            )
            assert asked(run) <= 60
        assert run.counts() == Counts(12 * run.batches, 12 * run.batches)


def test_upkeep(b: S3Bench) -> None:
    pipeline = b.pipeline()
    with b.run(pipeline, partitions=1) as run:
        run.stage({0: [record(0)]})  # and never committed
        run.deliver({0: [record(0)]})
        run.deliver({0: [record(1)]})
    with b.run(pipeline, partitions=1) as run:
        found = list(orphans(lake_tables(pipeline), pipeline.name))
        assert len(found) == 1
        found[0].remove()
        rows, _ = lake_tables(pipeline)
        assert compact(rows, pipeline.name, 1 << 20).files_after == 1
        run.deliver({0: [record(2)]})
    assert b.ids() == [0, 1, 2]
