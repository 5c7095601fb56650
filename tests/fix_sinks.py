"""Our own sinks on a bench (``avow.testing``): what is in them is read back by readers that are not ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import psycopg
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.cimpl import NewTopic

from avow.client_cache import close_clients
from avow.kafka import metadata
from avow.local.cluster import Cluster
from avow.local.postgres import Postgres as PostgresServer
from avow.retry import poll_until
from avow.sinks.base import DriverSink
from avow.sinks.kafka.driver import KafkaDriver
from avow.testing.sinks import TOPIC, SinkBench
from tests.fix_cluster import FOLDER
from tests.kafka_stage import Read, read

if TYPE_CHECKING:
    from pyiceberg.table import Table

# Without it polars warns that it has no planner of its own.
os.environ["POLARS_ICEBERG_PLANNER"] = "pyiceberg"


def _lineage(one: Read) -> dict[str, Any]:
    """Where a record of an output topic says it came from, as a table has it."""
    topic, partition, offset = one.origin.split("/")
    return {"_kafka_topic": topic, "_kafka_partition": int(partition), "_kafka_offset": int(offset)}


def _letter(one: Read) -> dict[str, Any]:
    said = {name.removeprefix("_kafka_"): value for name, value in _lineage(one).items()}
    return said | {"reason": (dict(one.headers)["avow-reason"] or b"").decode()}


def iceberg_table(folder: Path, name: str) -> Table:
    """A table of the catalog that a pipeline has with nothing but a warehouse."""
    from pyiceberg.catalog.sql import SqlCatalog

    place = f"{folder}/warehouse"
    catalog = SqlCatalog("default", uri=f"sqlite:///{place}/catalog.db", warehouse=f"file://{place}")
    return catalog.load_table(f"lake.{name}")


def lake_frame(kind: str, folder: Path, name: str) -> pl.DataFrame:
    """A lake's table, by a reader of somebody else's."""
    if kind == "delta":
        return pl.read_delta(f"{folder}/{name}")
    return pl.scan_iceberg(iceberg_table(folder, name)).collect()


def overwrite_lake(kind: str, folder: Path, name: str, rows: pl.DataFrame) -> None:
    """Somebody else puts other rows in place of a table's."""
    if kind == "delta":
        from deltalake import DeltaTable, write_deltalake

        there = DeltaTable(f"{folder}/{name}").schema().to_arrow()
        write_deltalake(f"{folder}/{name}", rows.to_arrow().cast(pa.schema(there)), mode="overwrite")
    else:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        table = iceberg_table(folder, name)
        table.overwrite(rows.to_arrow().cast(schema_to_pyarrow(table.schema(), include_field_ids=False)))


class Bench(SinkBench):
    """One pipeline on one kind of sink, and independent eyes on what is in it."""

    def __init__(self, kind: str, folder: Path, url: str = "", *, joined: bool = False) -> None:
        """``url``: of PostgreSQL, or the brokers where Kafka is the sink."""
        super().__init__(folder, joined=joined)
        self.kind, self._url = kind, url
        self.brokers = url if kind == "kafka" else self.brokers

    def section(self) -> str:
        where = {
            "postgres": f'url = "{self._url}"\ntable = "{self.table}"',
            "delta": f'path = "{self.path}"',
            "iceberg": f'table = "lake.{self.table}"\ncatalog = {{ warehouse = "{self.folder}/warehouse" }}',
            "kafka": f'topic = "{self.table}"',
        }[self.kind]
        return f'kind = "{self.kind}"\n{where}'

    @property
    def path(self) -> Path:
        return self.folder / self.table

    def settled(self, store: DriverSink) -> None:
        if isinstance(store, KafkaDriver):
            store.stored_entries(stable=True)  # a commit is answered a moment before it shows, however slow the machine

    def rows(self) -> list[dict[str, Any]]:
        """The whole table, by a reader of somebody else's."""
        if self.kind == "postgres":
            return self._query(f'SELECT * FROM "{self.table}" ORDER BY _kafka_partition, _kafka_offset')
        if self.kind == "kafka":
            found = [json.loads(one.value or b"") | _lineage(one) for one in read(self._url, self.table)]
            return sorted(found, key=lambda row: (row["_kafka_partition"], row["_kafka_offset"]))
        return self.frame().sort("_kafka_partition", "_kafka_offset").to_dicts()

    def frame(self, suffix: str = "") -> pl.DataFrame:
        return lake_frame(self.kind, self.folder, f"{self.table}{suffix}")

    def dead_letters(self) -> list[tuple[int, int, str]]:
        if self.kind == "kafka":
            # Beside letters, which have headers, the topic says which partitions were begun.
            found = [_letter(one) for one in read(self._url, f"{self.name}.dead-letters") if one.headers]
        elif self.kind == "postgres":
            found = self._query(f"SELECT * FROM avow.dead_letters WHERE pipeline = '{self.name}'")
        else:
            found = self.frame("_dead_letters").to_dicts()
        return sorted((row["partition"], row["offset"], row["reason"]) for row in found)

    def _query(self, query: str) -> list[dict[str, Any]]:
        with psycopg.connect(self._url) as connection:
            done = connection.execute(query.encode())
            assert done.description
            return [dict(zip([c.name for c in done.description], row, strict=True)) for row in done.fetchall()]

    def refuse(self, condition: str) -> None:
        """Let the table take no row of which this is true."""
        with psycopg.connect(self._url) as connection:
            connection.execute(f'ALTER TABLE "{self.table}" ADD CHECK (NOT ({condition}))'.encode())


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config, worker_id: str) -> Iterator[str]:
    """PostgreSQL alone. Gives its URL."""
    from avow.local.cluster import PortPicker

    part = PostgresServer(pytestconfig.stash[FOLDER] / f"server-{worker_id}", PortPicker().free())
    part.folder.mkdir()
    part.prepare()
    part.start()
    try:
        assert poll_until(lambda: part.version() is not None, 30), part.log.read_text()
        yield part.url
    finally:
        close_clients()
        part.stop()


@pytest.fixture(scope="session")
def brokers(cluster: Cluster) -> str:
    """The cluster's address. The topic that records claim to be from is there: Kafka keeps positions of no other."""
    try:
        _make_topic(cluster.bootstrap, TOPIC)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another worker has made it
            raise
    return cluster.bootstrap


def _make_topic(bootstrap: str, name: str, **config: str) -> None:
    client = metadata.admin(bootstrap)
    client.create_topics([NewTopic(name, 2, 1, config=config)], operation_timeout=30)[name].result()


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Bench]:
    def make(kind: str, *, joined: bool = False) -> Bench:
        if kind == "kafka":
            url = request.getfixturevalue("brokers")
            found = Bench(kind, tmp_path, url)
            # These records have old timestamps, which the sink keeps: retention would take them at its next round.
            _make_topic(url, found.table, **{"retention.ms": "-1"})
            return found
        if kind == "postgres":
            return Bench(kind, tmp_path, request.getfixturevalue("server"), joined=joined)
        return Bench(kind, tmp_path, "")

    return make
