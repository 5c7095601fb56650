"""Sinks without an engine: records made here, and not read from Kafka, go through the real decoder and the real acts.

A ``Bench`` is one pipeline on one sink. ``Runner`` is what a driver and its tasks do, batch by batch. What is in the
sink is read back by readers that are not ours.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import polars as pl
import psycopg
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.cimpl import NewTopic

from avow import sinks
from avow.engines.hooks import NO_HOOKS, Hooks
from avow.engines.task import Report, Work, commit_staged, decoded, deliver, deliver_joined
from avow.kafka import metadata
from avow.kafka.log import TopicPartition
from avow.kafka.reader import HEADERS
from avow.ledger import Counts, Entry, OffsetRange
from avow.local.cluster import Cluster
from avow.local.postgres import Postgres as PostgresServer
from avow.plan import load_checked
from avow.settings import PipelineConfig
from avow.sinks.base import CommittingSink, StagingSink
from avow.sinks.kafka.store import Store as KafkaStore
from tests.kafka_stage import Read, read

if TYPE_CHECKING:
    from pyiceberg.table import Table

# Without it polars warns that it has no planner of its own.
os.environ["POLARS_ICEBERG_PLANNER"] = "pyiceberg"

TOPIC = "records"
SCHEMA = "id long not null, account string not null, amount double, tags array<string>"
# A schema with every type.
EVERY = (
    "a boolean, b byte, c short, d int, e long, f float, g double, h string, i binary, j date, k timestamp,"
    " l timestamp_ntz, m decimal(12,3), n array<struct<x: int, y: array<string>>>, o map<string,long>,"
    " p struct<q: double, r: struct<s: string>>"
)
Records = Mapping[int, Sequence[bytes | None]]  # partition -> values from the range's first offset on


def record(number: int, **more: Any) -> bytes:
    return json.dumps({"id": number, "account": f"acc-{number % 7}", "amount": number / 4, **more}).encode()


def every(number: int) -> bytes:
    return json.dumps(
        {
            **{"a": True, "b": -128, "c": 32767, "d": number, "e": 2**63 - 1, "f": 0.5, "g": -0.1, "h": "x\0é𝄞" * 20},
            **{"i": "AP8=", "j": "0001-01-01", "k": "9999-12-31T23:59:59.999999Z", "l": "2026-01-31T12:00:00.000001"},
            **{"m": 123456789.125, "n": [{"x": 1, "y": ["a", None]}, None], "o": {"k": 1, "l": None}},
            "p": {"q": 1.5, "r": {"s": "deep"}},
        }
    ).encode()


def batch(values: Sequence[bytes | None], partition: int, start: int, keys: Sequence[bytes | None]) -> pa.RecordBatch:
    """Records as an engine hands them to a task."""
    count = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([TOPIC] * count, pa.string()),
            "partition": pa.array([partition] * count, pa.int32()),
            "offset": pa.array(range(start, start + count), pa.int64()),
            "timestamp": pa.array([1_700_000_000_000 + n for n in range(start, start + count)]).cast(
                pa.timestamp("ms", "UTC")
            ),
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.nulls(count, HEADERS),
        }
    )


def within(made: pa.RecordBatch, todo: OffsetRange) -> Iterator[pa.RecordBatch]:
    """Those of the records that are still to be read, as a reader gives them."""
    first = made.column("offset")[0].as_py() if made.num_rows else todo.start
    if todo.start < first + made.num_rows:
        yield made.slice(todo.start - first, len(todo))


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


class Bench:
    """One pipeline on one kind of sink, and independent eyes on what is in it."""

    def __init__(self, kind: str, folder: Path, url: str = "", *, joined: bool = False) -> None:
        """``url``: of PostgreSQL, or the brokers where Kafka is the sink. ``joined``: as its runs have it."""
        self.kind, self.folder, self._url, self.joined = kind, folder, url, joined
        self.name = f"p-{uuid4().hex[:8]}"
        self.table = f"t_{uuid4().hex[:8]}"
        folder.mkdir(parents=True, exist_ok=True)

    def sink(self, *lines: str) -> str:
        where = {
            "postgres": f'url = "{self._url}"\ntable = "{self.table}"',
            "delta": f'path = "{self.path}"',
            "iceberg": f'table = "lake.{self.table}"\ncatalog = {{ warehouse = "{self.folder}/warehouse" }}',
            "kafka": f'topic = "{self.table}"',
        }[self.kind]
        return "\n".join([f'kind = "{self.kind}"', where, *lines])

    @property
    def path(self) -> Path:
        return self.folder / self.table

    def pipeline(
        self, guarantee: str = "exactly-once", *lines: str, schema: str = SCHEMA, more: str = ""
    ) -> PipelineConfig:
        file = self.folder / f"{self.name}.toml"
        file.write_text(
            f'name = "{self.name}"\nguarantee = "{guarantee}"\n'
            f'[source]\nbrokers = "{self._url if self.kind == "kafka" else "localhost:1"}"\ntopics = ["{TOPIC}"]\n'
            f'[decode]\nformat = "json"\nschema = "{schema}"\n[dead_letters]\nmax_share = 1.0\n'
            f"[sink]\n{self.sink(*lines)}\n{more}\n"
        )
        return load_checked(file, {})

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

    def letters(self) -> list[tuple[int, int, str]]:
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

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows())

    def run(self, pipeline: PipelineConfig | None = None, partitions: int = 2, **more: Any) -> Runner:
        return Runner(pipeline or self.pipeline(), partitions, joined=self.joined, **more)


@dataclass
class Runner(AbstractContextManager["Runner"]):
    """One run: what the driver does, without an engine. Tasks run here too, one after the other."""

    pipeline: PipelineConfig
    partitions: int = 2
    number: int = 0
    batches: int = 0
    reports: list[Report] = field(default_factory=list)
    joined: bool = False  # all partitions of a batch in the same acts
    member: Sequence[int] | None = None  # of those who share the partitions: which it is given
    hooks: Hooks = NO_HOOKS

    def __post_init__(self) -> None:
        self.store = sinks.driver_sink(self.pipeline)
        self.store.prepare()
        self.store.prepare_table(self.pipeline.decode.columns.fields, rest=False)
        given = [TopicPartition(TOPIC, n) for n in (range(self.partitions) if self.member is None else self.member)]
        self.begin(given, shared=self.member is not None)

    def begin(self, given: Sequence[TopicPartition], *, shared: bool) -> None:
        self.number = self.store.open_run(given if shared else None)
        self.store.adopt({where: Entry(0, "id", self.number) for where in given})

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def close_now(self) -> None:
        self.store.close()

    def entries(self) -> dict[TopicPartition, Entry]:
        if isinstance(self.store, KafkaStore):
            self.store.kept(stable=True)  # a commit is answered a moment before it shows, however slow the machine
        return self.store.entries()

    def position(self, partition: int = 0) -> int:
        return self.entries()[TopicPartition(TOPIC, partition)].position

    def counts(self) -> Counts:
        return sum((entry.counts for entry in self.entries().values()), Counts())

    def stage(
        self,
        records: Records,
        *,
        starts: Mapping[int, int] | None = None,
        keys: Mapping[int, Sequence[bytes | None]] | None = None,
    ) -> tuple[Work, list[object]]:
        """The tasks of a batch: all of it where tasks act, or what the driver still has to commit."""
        at = {partition: (starts or {}).get(partition, -1) for partition in records}
        at = {partition: self.position(partition) if start < 0 else start for partition, start in at.items()}
        ranges = {
            TopicPartition(TOPIC, p): OffsetRange(TOPIC, p, at[p], at[p] + len(values)) for p, values in records.items()
        }
        context = self.store.task_context()
        work = Work(self.pipeline, self.number, self.batches, ranges, context, hooks=self.hooks)
        self.batches += 1
        made = {
            one: batch(values, one.partition, one.start, (keys or {}).get(one.partition, [None] * len(values)))
            for one, values in zip(ranges.values(), records.values(), strict=True)
        }
        if self.joined:
            sink = sinks.task_sink(self.pipeline, self.number, work.brief)
            assert not isinstance(sink, StagingSink)
            deliver_joined({one: some if some.num_rows else None for one, some in made.items()}, work, sink)
            return work, []
        staged = []
        for planned, some in made.items():
            sink = sinks.task_sink(self.pipeline, self.number, work.brief)
            report = deliver(decoded(partial(within, some), self.pipeline), planned, work, sink)
            self.reports.append(report)
            staged += [report.staged] if report.staged is not None else []
        return work, staged

    def commit(self, work: Work, staged: list[object]) -> None:
        if staged:
            assert isinstance(self.store, CommittingSink)
            commit_staged(staged, work, self.store)

    def deliver(self, records: Records, **more: Any) -> None:
        self.commit(*self.stage(records, **more))


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """PostgreSQL alone. Gives its URL."""
    from avow.local.cluster import PortPicker

    # Not in pytest's own folder: the next pytest that starts on this machine closes that to all other users, and as
    # root this server is one of them.
    with tempfile.TemporaryDirectory(prefix="avow-test-") as folder:
        part = PostgresServer(Path(folder, "postgres"), PortPicker().free())
        part.folder.mkdir()
        part.prepare()
        part.start()
        try:
            deadline = time.monotonic() + 30
            while part.version() is None:
                assert time.monotonic() < deadline, part.log.read_text()
                time.sleep(0.05)
            yield part.url
        finally:
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
    client.create_topics([NewTopic(name, 2, config=config)], operation_timeout=30)[name].result()


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
