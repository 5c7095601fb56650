"""A real Debezium reads a real PostgreSQL under random changes, and what avow makes of it equals the source, row by
row, also where the connector and the pipelines are killed with kill -9 while they run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from tests import into_lake
from tests.fix_cluster import FOLDER
from tests.fix_pipeline import Scenario
from tests.kafka_stage import read

from avow import sinks
from avow.audit.auditor import audit
from avow.audit.judge import Verdict
from avow.engines.redrive import Redriven, redrive
from avow.errors import ConfigError
from avow.kafka.admin import Admin
from avow.ledger import NOTHING
from avow.local.cluster import Cluster, PortPicker
from avow.local.connect import Connect, avro_converters, postgres_connector
from avow.local.postgres import Postgres
from avow.retry import poll_until
from avow.sinks.base import Selection

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("debezium")]

Make = Callable[..., Scenario]

# What a target must have, as both sides are asked for it. A text large enough to stand beside its row, which updates
# leave alone: with the whole row in the log, Debezium knows it all the same.
COLUMNS = """id bigint not null, region text not null, n numeric(20,4), v numeric, f double precision, b boolean,
    t text default 'unless given', at timestamptz, ts timestamp, ts3 timestamp(3), d date, data bytea, j jsonb,
    tags text[], big text"""
SCHEMA = (
    "id long not null, region string not null, n decimal(20,4), v decimal(38,10), f double, b boolean, t string, "
    "at timestamp, ts timestamp_ntz, ts3 timestamp_ntz, d date, data binary, j string, tags array<string>, big string, "
    "__op string not null, __source_lsn long not null"
)
NAMES = ("id", "region", "n", "v", "f", "b", "t", "at", "ts", "ts3", "d", "data", "j", "tags", "big")
REGIONS = ("north", "süd", "o'west")
KEYS = 150
LAST = -1  # the id of the last row that is written


@dataclass
class Source:
    """A PostgreSQL, a worker of Connect, and one table that a connector of it reads."""

    postgres: Postgres
    connect: Connect
    prefix: str

    @property
    def topic(self) -> str:
        return f"{self.prefix}.public.{self.prefix}"

    def rows(self) -> dict[tuple[int, str], dict[str, Any]]:
        names = [f"{name}::text" if name == "j" else name for name in NAMES]
        with psycopg.connect(self.postgres.url) as connection:
            found = connection.execute(f"SELECT {', '.join(names)} FROM {self.prefix}".encode()).fetchall()
        return by_key(dict(zip(NAMES, row, strict=True)) for row in found)


def by_key(rows: Any) -> dict[tuple[int, str], dict[str, Any]]:
    """Rows by their key, of which there must be one each."""
    listed = [{name: row[name] for name in NAMES} for row in rows]
    found = {(row["id"], row["region"]): row for row in listed}
    assert len(found) == len(listed), "a key is there twice"
    return found


@pytest.fixture(scope="module")
def connect(cluster: Cluster, pytestconfig: pytest.Config, worker_id: str) -> Iterator[Connect]:
    worker = Connect(
        pytestconfig.stash[FOLDER] / f"connect-{worker_id}",
        PortPicker().free(),
        cluster.bootstrap,
        f"c-{uuid4().hex[:8]}",
    )
    worker.prepare()
    worker.start()
    worker.await_ready()
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def database(pytestconfig: pytest.Config, worker_id: str) -> Iterator[Postgres]:
    part = Postgres(pytestconfig.stash[FOLDER] / f"server-source-{worker_id}", PortPicker().free(), logical=True)
    part.prepare()
    part.start()
    assert poll_until(lambda: part.version() is not None, 60)
    yield part
    part.stop()


@pytest.fixture
def source(database: Postgres, connect: Connect, admin: Admin) -> Source:
    made = Source(database, connect, f"s{uuid4().hex[:8]}")
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {made.prefix} ({COLUMNS}, PRIMARY KEY (id, region))".encode())
        connection.execute(f"ALTER TABLE {made.prefix} REPLICA IDENTITY FULL".encode())
    admin.create_topic(made.topic, 3, 1, {})
    return made


def config(source: Source, **settings: str) -> dict[str, str]:
    """As it comes, but for nulls in columns that have a default, and truncations."""
    converter = {"": "org.apache.kafka.connect.json.JsonConverter", ".replace.null.with.default": "false"}
    both = {f"{part}.converter{name}": value for part in ("key", "value") for name, value in converter.items()}
    truncations = {"skipped.operations": "none"}  # it leaves them out otherwise
    return postgres_connector(source.postgres, source.prefix, f"public.{source.prefix}") | both | truncations | settings


class Changes(threading.Thread):
    """Random transactions, until it is told to stop; some are rolled back."""

    def __init__(self, source: Source, seed: int, *, pause_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._url, self._table = source.postgres.url, source.prefix
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self._ended = threading.Event()
        self.count = 0

    def run(self) -> None:
        with psycopg.connect(self._url) as connection:
            while not self._ended.is_set():
                self.transaction(connection)
                time.sleep(self._pause_s)

    def end(self) -> None:
        """The last change of all."""
        if self.is_alive():
            self._ended.set()
            self.join(60)
        with psycopg.connect(self._url) as connection:
            connection.execute(f"INSERT INTO {self._table} (id, region) VALUES ({LAST}, 'last')".encode())

    def transaction(self, connection: psycopg.Connection) -> None:
        for _ in range(self._chance.randint(1, 6)):
            self._change(connection)
        if self._chance.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()

    def _change(self, connection: psycopg.Connection) -> None:
        self.count += 1
        key = (self._chance.randrange(KEYS), self._chance.choice(REGIONS))
        row = self._row()
        listed, marks = ", ".join(row), ", ".join(["%s"] * len(row))
        sets = ", ".join(f"{name} = excluded.{name}" for name in row)
        match self._chance.randrange(10):
            case 0 | 1:
                self._do(connection, "DELETE FROM {} WHERE (id, region) = (%s, %s)", *key)
            case 2 | 3:  # a new key, if it is free
                other = (self._chance.randrange(KEYS), self._chance.choice(REGIONS))
                free = "NOT EXISTS (SELECT FROM {} WHERE (id, region) = (%s, %s))"
                self._do(
                    connection,
                    "UPDATE {} SET id = %s, region = %s WHERE (id, region) = (%s, %s) AND " + free,
                    *(*other, *key, *other),
                )
            case 4 | 5:
                self._do(connection, "UPDATE {} SET b = NOT b, v = v + 1 WHERE (id, region) = (%s, %s)", *key)
            case _:
                insert = f"INSERT INTO {{}} (id, region, {listed}) VALUES (%s, %s, {marks})"
                self._do(connection, f"{insert} ON CONFLICT (id, region) DO UPDATE SET {sets}", *key, *row.values())

    def _do(self, connection: psycopg.Connection, statement: str, *values: object) -> None:
        connection.execute(statement.replace("{}", self._table).encode(), values)

    def _row(self) -> dict[str, Any]:
        chance = self._chance
        row = {
            "n": chance.randrange(-(10**19), 10**19) / 10**4 if chance.random() < 0.5 else chance.randrange(10**6),
            "v": f"{chance.randrange(-(10**12), 10**12)}e{chance.randint(-10, 8)}",
            "f": chance.choice([0.1, -1e300, float("inf"), float("nan"), 1 / 3]),
            "b": chance.random() < 0.5,
            "t": chance.choice(["", "é☃\U0001f600", "\\N\t\"'\r\n", "__debezium", "1234"]),
            "at": f"2026-{chance.randint(1, 12):02}-0{chance.randint(1, 9)} 12:00:00.{chance.randrange(10**6):06}+02",
            "ts": f"{chance.choice(['0001', '1582', '2026', '9999'])}-10-05 23:59:59.{chance.randrange(10**6):06}",
            "ts3": f"2026-01-01 00:00:00.{chance.randrange(1000):03}",
            "d": chance.choice(["0001-01-01", "1970-01-01", "9999-12-31", "2024-02-29"]),
            "data": chance.randbytes(chance.randrange(20)),
            "j": json.dumps({"a": chance.random(), "b": [None, "ü"]}),
            "tags": [chance.choice(["a", "", None, "ü,}"]) for _ in range(chance.randrange(4))],
            "big": chance.randbytes(3000).hex() if chance.random() < 0.3 else "small",
        }
        return {name: None if chance.random() < 0.1 else value for name, value in row.items()}


# ---- targets ---------------------------------------------------------------------------------------------------------


@dataclass
class Target:
    """One pipeline that follows the source."""

    scenario: Scenario
    kind: str
    file: Path
    source: Source

    def start(self) -> subprocess.Popen[str]:
        return self.scenario.start(self.file, "--engine", "consumer")

    def listed(self) -> list[dict[str, Any]]:
        s = self.scenario
        if self.kind == "postgres":
            names = [f"{name}::text" if name == "j" else name for name in NAMES]
            found = s.rows(f'SELECT {", ".join(names)} FROM "{s.table}"')
            return [dict(zip(NAMES, row, strict=True)) for row in found]
        return into_lake.frame(s, self.kind).to_dicts()

    def rows(self) -> dict[tuple[int, str], dict[str, Any]]:
        return by_key(self.listed())

    def ids(self) -> set[int]:
        try:
            return {row["id"] for row in self.listed()}
        except Exception:  # noqa: BLE001 - not made yet
            return set()

    def check(self) -> None:
        """It equals the source, there is no dead letter, and the audit holds."""
        expected, found = self.source.rows(), self.rows()
        assert found.keys() == expected.keys(), f"{self.kind}: keys differ"
        for key, row in expected.items():
            assert comparable(found[key]) == comparable(row), f"{self.kind}: {key}"
        pipeline = self.scenario.load(self.file, "consumer")
        with sinks.driver_sink(pipeline) as store:
            counts = sum((entry.counts for entry in store.entries().values()), NOTHING)
        assert counts.dead == 0
        report = audit(pipeline, lambda: pytest.fail("the consumer engine needs no Spark"))
        assert report.verdict is Verdict.HELD, report


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Values that equal themselves: NaN does not."""
    return {name: "NaN" if value != value else value for name, value in row.items()}


def target(
    scenario: Make, kind: str, source: Source, decode: str = "", keys: str = 'mode = "upsert"\nkey = ["id", "region"]'
) -> Target:
    s = scenario(1)
    where = f'kind = "postgres"\nurl = "${{env:DATABASE_URL}}"\ntable = "{s.table}"'
    sink = where if kind == "postgres" else into_lake.sink(s, kind)
    file = s.file(
        source=f'brokers = "{s.cluster.bootstrap}"\ntopics = ["{source.topic}"]',
        decode=f'format = "debezium"\nschema = "{SCHEMA}"\n{decode}',
        sink=f"{sink}\n{keys}",
        batch='interval = "200ms"',
        dead_letters="max_share = 0.0",
    )
    return Target(s, kind, file, source)


@contextmanager
def running(targets: list[Target]) -> Iterator[list[subprocess.Popen[str]]]:
    children = [each.start() for each in targets]
    try:
        yield children
    finally:
        for each, child in zip(targets, children, strict=True):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
                try:
                    child.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    each.scenario.kill(child)


def settle(targets: list[Target], children: list[subprocess.Popen[str]], timeout_s: float) -> None:
    """Wait until the last change is everywhere. The connector gives changes in their order: none is behind it."""
    for each, child in zip(targets, children, strict=True):
        poll_until(lambda each=each, child=child: LAST in each.ids() or child.poll() is not None, timeout_s)  # type: ignore[misc]
        assert LAST in each.ids(), f"{each.kind}: {child.poll()} {each.scenario.kill(child)}"


@pytest.mark.parametrize("schemas", [True, False], ids=["with schemas", "without schemas"])
def test_a_table_follows_its_source(source: Source, scenario: Make, *, schemas: bool) -> None:
    changes = Changes(source, seed=18)
    with psycopg.connect(source.postgres.url) as connection:
        for _ in range(40):  # these are in the snapshot
            changes.transaction(connection)
    settings = {} if schemas else {f"{part}.converter.schemas.enable": "false" for part in ("key", "value")}
    declared = (
        'decimal_handling_mode = "precise"\ntime_precision_mode = "adaptive"\nbinary_handling_mode = "bytes"\n'
        'millisecond_columns = ["ts3"]'
    )
    source.connect.put(source.prefix, config(source, **settings))
    source.connect.await_running(source.prefix)
    follows = target(scenario, "postgres", source, "" if schemas else declared)
    with psycopg.connect(source.postgres.url) as connection:
        for _ in range(150):
            changes.transaction(connection)
    changes.end()
    with running([follows]) as children:
        settle([follows], children, 60)
    follows.scenario.drain(follows.file)
    follows.check()
    assert len(follows.rows()) > KEYS // 2
    with psycopg.connect(source.postgres.url) as connection:
        connection.execute(f"TRUNCATE {source.prefix}".encode())
    assert poll_until(lambda: stops_at_truncation(follows), 60)
    assert follows.rows(), "nothing was truncated behind the stop"


def test_a_table_follows_its_source_in_avro(source: Source, scenario: Make, schema_registry: str) -> None:
    """By Apicurio's converter and registry, with ids as Confluent's API has them."""
    changes = Changes(source, seed=18)
    with psycopg.connect(source.postgres.url) as connection:
        # This converter puts the default where a null is, and knows no other way.
        connection.execute(f"ALTER TABLE {source.prefix} ALTER t DROP DEFAULT".encode())
        for _ in range(40):  # these are in the snapshot
            changes.transaction(connection)
    source.connect.put(source.prefix, config(source, **avro_converters(schema_registry)))
    source.connect.await_running(source.prefix)
    follows = target(scenario, "postgres", source, f'payload = "avro"\n[decode.registry]\nurl = "{schema_registry}"')
    with psycopg.connect(source.postgres.url) as connection:
        for _ in range(150):
            changes.transaction(connection)
    changes.end()
    with running([follows]) as children:
        settle([follows], children, 60)
    follows.scenario.drain(follows.file)
    follows.check()
    assert len(follows.rows()) > KEYS // 2
    values = [one.value for one in read(follows.scenario.cluster.bootstrap, source.topic) if one.value]
    assert all(value[:1] == b"\0" for value in values)


def stops_at_truncation(follows: Target) -> bool:
    """Whether a run stops by name: the event may take a moment."""
    try:
        follows.scenario.drain(follows.file)
    except ConfigError as error:
        return "the table was truncated at its source" in str(error)
    return False


@pytest.mark.parametrize("kind", ["postgres", "delta"])
def test_redrive_does_not_bring_back_what_an_event_deleted_later(scenario: Make, kind: str) -> None:
    """Without null values behind deletes, as a connector can be set up."""
    s = scenario(1)
    where = f'kind = "postgres"\nurl = "${{env:DATABASE_URL}}"\ntable = "{s.table}"'
    sink = f'{where if kind == "postgres" else into_lake.sink(s, kind)}\nmode = "upsert"\nkey = ["id"]'
    decode = 'format = "debezium"\nschema = "id long not null, note string"'

    def event(op: str, number: int, **more: str) -> bytes:
        row = {"id": number, "note": "a", **more}
        return json.dumps(
            {"before": row if op == "d" else None, "after": None if op == "d" else row, "op": op}
        ).encode()

    values = [event("c", n, new="not declared") for n in (1, 2, 3)]
    values += [event("d", 1), event("c", 3, note="later"), event("d", 4), event("c", 4, new="not declared")]
    s.produce(values, keys=[json.dumps({"id": n}).encode() for n in (1, 2, 3, 1, 3, 4, 4)])
    s.drain(s.file(sink=sink, decode=decode), "consumer")
    pipeline = s.load(s.file(sink=sink, decode=f'{decode}\nunknown_fields = "ignore"'), "consumer")
    done = redrive(pipeline, Selection(), lambda: pytest.fail("there is no query"))
    assert done == Redriven(written=3, skipped=1)
    rows = (
        s.rows(f'SELECT id, note FROM "{s.table}"')
        if kind == "postgres"
        else into_lake.frame(s, kind).select("id", "note").rows()
    )
    assert dict(rows) == {2: "a", 3: "later", 4: "a"}


ROUNDS = 12
FAULTS_APART_S = (0.5, 3.0)


@pytest.mark.long
def test_kill_9_of_the_connector_and_of_the_pipelines(source: Source, scenario: Make) -> None:
    """Into each kind of sink, and into a log of the changes without the connector's duplicates."""
    log = target(scenario, "postgres", source, keys='mode = "dedupe"\nkey = ["id", "region", "__source_lsn"]')
    targets = [*(target(scenario, kind, source) for kind in ("postgres", "delta", "iceberg")), log]
    chance = random.Random(18)
    changes = Changes(source, seed=chance.randrange(1000), pause_s=0.002)
    connect, killed = source.connect, dict.fromkeys(["connector", *(each.kind for each in targets)], 0)
    connect.put(source.prefix, config(source))
    connect.await_running(source.prefix)
    changes.start()
    with running(targets) as children:
        assert poll_until(lambda: all(each.ids() for each in targets), 90)
        for round_ in range(ROUNDS):
            time.sleep(chance.uniform(*FAULTS_APART_S))
            if round_ % 3 == 0:
                connect.kill()
                connect.start()
                connect.await_ready()
                killed["connector"] += 1
            else:
                number = chance.randrange(len(targets))
                assert children[number].poll() is None, targets[number].scenario.kill(children[number])
                targets[number].scenario.kill(children[number])
                children[number] = targets[number].start()
                killed[targets[number].kind] += 1
        changes.end()
        settle(targets, children, 120)
    for each in targets:
        each.scenario.drain(each.file)
    for each in targets[:3]:
        each.check()
    check_log(log)
    events = [json.loads(one.value) for one in read(log.scenario.cluster.bootstrap, source.topic) if one.value]
    distinct = log.scenario.rows(f'SELECT count(*) FROM "{log.scenario.table}"')[0][0]
    assert len(events) > distinct, "the connector was never killed with events that it had to send again"
    print(f"{changes.count} statements, {len(events)} events, {distinct} changes, {len(source.rows())} rows; {killed}")


def check_log(log: Target) -> None:
    """The last change of each key says what the source has."""
    names = ", ".join([*(f"{name}::text" if name == "j" else name for name in NAMES), "__op"])
    query = (
        f'SELECT DISTINCT ON (id, region) {names} FROM "{log.scenario.table}" ORDER BY id, region, __source_lsn DESC'
    )
    found = [dict(zip((*NAMES, "__op"), row, strict=True)) for row in log.scenario.rows(query)]
    there = by_key(row for row in found if row["__op"] != "d")
    expected = log.source.rows()
    assert there.keys() == expected.keys()
    assert all(comparable(there[key]) == comparable(row) for key, row in expected.items())
