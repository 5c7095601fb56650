"""Lakes in an S3-compatible store: a real server that speaks S3, with conditional puts. No Kafka, no Spark."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.error import URLError
from urllib.request import urlopen
from uuid import uuid4

import boto3
import polars as pl
import pytest
from tests.fix_sinks import Bench, Runner, record

from avow import sinks
from avow.errors import Superseded
from avow.ledger import Counts
from avow.local.cluster import PortPicker
from avow.sinks.lake.upkeep import compact, orphans

KEYS = {"aws_access_key_id": "someone", "aws_secret_access_key": "hunter2", "region_name": "us-east-1"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address; it has a bucket called lake."""
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
        yield address
    finally:
        child.terminate()
        child.wait()
        log.close()


class S3Bench(Bench):
    def __init__(self, kind: str, folder: Path, address: str) -> None:
        super().__init__(kind, folder)
        self.address, self.root = address, f"s3://lake/{uuid4().hex[:8]}"

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
            options = ", ".join(f'{name} = "{value}"' for name, value in self.options.items())
            where = f'path = "{self.root}/{self.table}"\noptions = {{ {options} }}'
        else:
            settings = {
                "type": "sql",
                "uri": f"sqlite:///{self.folder}/catalog.db",
                "warehouse": self.root,
                "s3.endpoint": self.address,
                "s3.access-key-id": "someone",
                "s3.secret-access-key": "hunter2",
                "s3.region": "us-east-1",
            }
            told = ", ".join(f'"{name}" = "{value}"' for name, value in settings.items())
            where = f'table = "lake.{self.table}"\ncatalog = {{ {told} }}'
        return "\n".join([f'kind = "{self.kind}"', where, *lines])

    def frame(self, suffix: str = "") -> pl.DataFrame:
        if self.kind == "delta":
            return pl.read_delta(f"{self.root}/{self.table}{suffix}", storage_options=self.options)
        rows, letters = sinks.lake_tables(self.pipeline())
        table = letters if suffix else rows
        assert table.load()
        found = pl.from_arrow(table.rows())
        assert isinstance(found, pl.DataFrame)
        return found


@pytest.fixture(params=["delta", "iceberg"])
def b(request: pytest.FixtureRequest, tmp_path: Path, store: str) -> S3Bench:
    return S3Bench(request.param, tmp_path, store)


def test_append_dead_letters_and_a_second_run(b: S3Bench) -> None:
    pipeline = b.pipeline()
    assert "hunter2" not in repr(pipeline)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(0), b"bad", record(2)]})
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(3)]})
        assert run.counts() == Counts(4, 3, 1)
    assert b.ids() == [0, 2, 3]
    assert b.letters() == [(0, 1, "not-json")]


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


def test_upkeep(b: S3Bench) -> None:
    pipeline = b.pipeline()
    with b.run(pipeline, partitions=1) as run:
        run.stage({0: [record(0)]})  # and never committed
        run.deliver({0: [record(0)]})
        run.deliver({0: [record(1)]})
    with b.run(pipeline, partitions=1) as run:
        found = list(orphans(sinks.lake_tables(pipeline), pipeline.name))
        assert len(found) == 1
        found[0].remove()
        rows, _ = sinks.lake_tables(pipeline)
        assert compact(rows, pipeline.name, 1 << 20).files_after == 1
        run.deliver({0: [record(2)]})
    assert b.ids() == [0, 1, 2]
