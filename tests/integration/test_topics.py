"""A table for each topic: made and filled by itself, each topic exactly once, and a bad one stops alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import polars as pl
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from tests.fix_pipeline import SCHEMA, Scenario, payment, session_spark
from tests.fix_sinks import iceberg_table, lake_frame

from avow import Pipeline, Receipt, sinks
from avow.audit.auditor import audit
from avow.audit.judge import Verdict
from avow.audit.report import AuditReport
from avow.dashboard.watch import Watch
from avow.engines import consumer, driver
from avow.engines.consumer import ConsumerRun
from avow.engines.driver import EngineRun
from avow.engines.progress import Observer
from avow.engines.redrive import redrive
from avow.engines.spark import SparkRun
from avow.errors import (
    ConfigError,
    SinkError,
    SourceError,
    TooManyDeadLetters,
    TopicRecreated,
    TopicsStopped,
    UnknownSubject,
)
from avow.formats.avro.encode import encode
from avow.formats.avro.schema import parse
from avow.formats.registry.frame import framed
from avow.kafka import metadata
from avow.kafka.admin import Admin
from avow.kafka.log import TopicPartition
from avow.ledger import NOTHING
from avow.plan import plan
from avow.prove.failpoints import VARIABLE
from avow.retry import poll_until
from avow.schema_registry import RegistrySettings, SchemaRegistry
from avow.sinks.base import Selection

pytestmark = pytest.mark.cluster

Make = Callable[..., Scenario]
KINDS = ["postgres", "delta", "iceberg"]
BOTH = [
    ("postgres", "consumer"),
    ("delta", "consumer"),
    ("iceberg", "consumer"),
    ("postgres", "spark"),
    pytest.param("delta", "spark", marks=pytest.mark.long),
]
MOST = ["postgres", "delta", pytest.param("iceberg", marks=pytest.mark.long)]


@dataclass
class Tables:
    """A pipeline with a table for each topic. Topics have names with a dot and a dash after a prefix of their own."""

    s: Scenario
    admin: Admin
    kind: str
    engine: str
    prefix: str

    def topic(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def make(self, *names: str, partitions: int = 2) -> None:
        for name in names:
            self.admin.create_topic(self.topic(name), partitions, 1, {})
            self.admin.end_offsets(TopicPartition(self.topic(name), number) for number in range(partitions))

    def produce(self, name: str, ids: range, partitions: int = 2, values: Callable[[int], bytes] = payment) -> None:
        producer = Producer({"bootstrap.servers": self.s.cluster.bootstrap, "linger.ms": 20}, logger=metadata.QUIET)
        for number in ids:
            producer.produce(self.topic(name), values(number), partition=number % partitions)
            producer.poll(0)
        assert producer.flush(60) == 0

    def table(self, name: str) -> str:
        return f"{self.prefix}_{name}".replace("-", "_").replace(".", "_")

    def sink(self, *lines: str) -> str:
        where = {
            "postgres": 'url = "${env:DATABASE_URL}"\ntable = "public.{topic}"',
            "delta": f'path = "{self.s.folder}/{{topic}}"',
            "iceberg": f'table = "lake.{{topic}}"\ncatalog = {{ warehouse = "{self.s.folder}/warehouse" }}',
        }[self.kind]
        return "\n".join([f'kind = "{self.kind}"', where, *lines])

    def file(self, *lines: str, topics: tuple[str, ...] = (), guarantee: str = "exactly-once", **sections: str) -> Path:
        """Of the topics that are named, or else of all with the prefix."""
        named = json.dumps([self.topic(name) for name in topics])
        pattern = f'topics_pattern = "{self.prefix}\\\\..*"'
        brokers = f'brokers = "{self.s.cluster.bootstrap}"\n'
        source = brokers + (f"topics = {named}" if topics else pattern)
        return self.s.file(guarantee, **{"source": source, "sink": self.sink(*lines), **sections})

    def drain(self, path: Path) -> list[str]:
        return self.s.drain(path, self.engine)

    def ids(self, name: str) -> Counter[int]:
        if self.kind == "postgres":
            return Counter(row[0] for row in self.s.rows(f'SELECT id FROM "{self.table(name)}"'))
        return Counter(self.frame(name)["id"].to_list())

    def frame(self, name: str, suffix: str = "") -> pl.DataFrame:
        return lake_frame(self.kind, self.s.folder, self.table(name) + suffix)

    def commits(self, name: str) -> int:
        """How many have brought rows into the table."""
        if self.kind == "postgres":
            found = self.s.rows(f'SELECT count(DISTINCT xmin::text) FROM "{self.table(name)}"')
            return int(found[0][0])
        if self.kind == "delta":
            table = f"{self.s.folder}/{self.table(name)}"
            log = sorted(Path(table, "_delta_log").glob("*.json"))
            return sum('"add":' in file.read_text() for file in log)
        snapshots = iceberg_table(self.s.folder, self.table(name)).snapshots()
        return sum(int(one.summary["added-records"] or 0) > 0 if one.summary else False for one in snapshots)

    def audit(self, path: Path) -> AuditReport:
        pipeline = self.s.load(path, self.engine)
        return audit(pipeline, lambda: session_spark(pipeline))


@pytest.fixture
def tables(scenario: Make, admin: Admin) -> Callable[[str, str], Tables]:
    return lambda kind, engine: Tables(scenario(), admin, kind, engine, f"T{uuid4().hex[:8]}")


MakeTables = Callable[[str, str], Tables]


@pytest.mark.parametrize(("kind", "engine"), BOTH)
def test_a_table_for_each_topic_and_a_commit_for_each_table(
    tables: MakeTables, kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "GATHER_S_EACH", 0.2)  # else a first batch has what comes first
    t = tables(kind, engine)
    names = ["orders.eu-1", "orders.us-1", "Payments", "x", "empty"]
    t.make(*names)
    for number, name in enumerate(names[:-1]):
        t.produce(name, range(1_000 * number, 1_000 * number + 100))
    path = t.file()
    t.drain(path)
    for number, name in enumerate(names[:-1]):
        assert t.ids(name) == dict.fromkeys(range(1_000 * number, 1_000 * number + 100), 1)
        assert t.commits(name) == 1
    assert t.ids("empty") == {}
    t.produce("x", range(3_100, 3_200))
    t.drain(path)
    assert t.ids("x") == dict.fromkeys(range(3_000, 3_200), 1)
    assert (t.commits("x"), t.commits("Payments")) == (2, 1)
    with sinks.driver_sink(t.s.load(path, engine)) as store:
        counts = sum((state.entry.counts for state in store.ledger_snapshot().values()), NOTHING)
    assert (counts.read, counts.written) == (500, 500)


def bad(number: int) -> bytes:
    return json.dumps({"id": f"no {number}"}).encode()


def incompatible(t: Tables, name: str) -> None:
    """A table of that name is there, and it is another one."""
    if t.kind == "postgres":
        t.s.execute(f'CREATE TABLE "{t.table(name)}" (id text)')
    elif t.kind == "delta":
        write_deltalake(f"{t.s.folder}/{t.table(name)}", pl.DataFrame({"id": ["x"]}).to_arrow())
    else:
        place = f"{t.s.folder}/warehouse"
        Path(place).mkdir(exist_ok=True)
        catalog = SqlCatalog("default", uri=f"sqlite:///{place}/catalog.db", warehouse=f"file://{place}")
        catalog.create_namespace_if_not_exists("lake")
        catalog.create_table(f"lake.{t.table(name)}", pa.schema([("id", pa.string())]))


@pytest.mark.parametrize(("kind", "engine"), BOTH)
def test_what_is_wrong_with_one_topic_stops_that_topic_alone(tables: MakeTables, kind: str, engine: str) -> None:
    t = tables(kind, engine)
    t.make("good", "more", "other-table", "bad-records", "same.name", "same-name")
    for name in ("good", "more", "other-table", "same.name", "same-name"):
        t.produce(name, range(100))
    t.produce("bad-records", range(100), values=bad)
    incompatible(t, "other-table")
    path = t.file(dead_letters="max_share = 0.0")
    with pytest.raises(TopicsStopped) as raised:
        t.drain(path)
    stopped = {topic.removeprefix(f"{t.prefix}."): error for topic, error in raised.value.stopped.items()}
    assert {name: type(error) for name, error in stopped.items()} == {
        "other-table": ConfigError,
        "bad-records": TooManyDeadLetters,
        "same.name": ConfigError,
        "same-name": ConfigError,
    }
    assert f"would be that of topic {t.topic('same-name')} too" in str(stopped["same.name"])
    for name in ("good", "more"):
        assert t.ids(name) == dict.fromkeys(range(100), 1)
    # What is fixed goes on, and what was done stays done.
    t.produce("good", range(100, 200))
    with pytest.raises(TopicsStopped, match="3 topics stopped") as raised:
        t.drain(t.file(dead_letters="max_share = 1.0"))
    assert t.ids("good") == dict.fromkeys(range(200), 1)
    pipeline = t.s.load(path, engine)
    with sinks.dead_letters(pipeline) as letters:
        assert [(reason, count) for reason, count, _ in letters.by_reason(Selection())] == [("wrong-type", 100)]
        assert {one.topic for one in letters.select(Selection(), 1_000)} == {t.topic("bad-records")}
        assert letters.select(Selection(topic=t.topic("good")), 10) == []
    report = t.audit(path)
    assert report.verdict is Verdict.UNKNOWN
    assert t.topic("same.name") in report.sentence
    assert report.findings == ()
    # One of the two has a pipeline of its own: the rest is whole.
    named = t.file(topics=("good", "more", "bad-records"), dead_letters="max_share = 1.0")
    t.drain(named)
    report = t.audit(named)
    assert report.verdict is Verdict.HELD, report.sentence
    assert (report.counts.read, report.counts.written, report.counts.dead) == (400, 300, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_two_topics_keeps_the_table(tables: MakeTables, kind: str) -> None:
    t = tables(kind, "consumer")
    t.make("a.b")
    t.produce("a.b", range(10))
    path = t.file()
    t.drain(path)
    t.make("a-b", "A-b")
    t.produce("a-b", range(10, 20))
    t.produce("a.b", range(20, 30))
    with pytest.raises(TopicsStopped) as raised:
        t.drain(path)
    assert set(raised.value.stopped) == {t.topic("a-b"), t.topic("A-b")}
    assert t.ids("a.b") == dict.fromkeys([*range(10), *range(20, 30)], 1)


def test_one_that_fails_stops_all_where_that_is_declared(tables: MakeTables) -> None:
    t = tables("postgres", "consumer")
    t.make("good", "other")
    t.produce("good", range(10))
    t.produce("other", range(10))
    incompatible(t, "other")
    with pytest.raises(ConfigError, match="does not fit"):
        t.drain(t.file('on_topic_failure = "stop-all"'))


@pytest.mark.parametrize("kind", KINDS)
def test_redriven_into_the_table_of_its_topic(tables: MakeTables, kind: str) -> None:
    t = tables(kind, "consumer")
    t.make("one", "two")
    for name in ("one", "two"):
        t.produce(name, range(20))
        t.produce(name, range(20, 30), values=lambda n: json.dumps({"id": n, "account": "a", "more": 1}).encode())
    t.drain(t.file())
    assert t.ids("one") == dict.fromkeys(range(20), 1)
    path = t.file(decode=f'format = "json"\nschema = "{SCHEMA}"\nunknown_fields = "ignore"')
    pipeline = t.s.load(path, "consumer")
    with sinks.dead_letters(pipeline) as letters:
        assert [(reason, count) for reason, count, _ in letters.by_reason(Selection())] == [("unknown-field", 20)]
        partitions = [TopicPartition(t.topic("two"), number) for number in range(2)]
        assert letters.partitions(Selection(topic=t.topic("two"))) == partitions
    done = redrive(pipeline, Selection(topic=t.topic("one")), lambda: session_spark(pipeline))
    assert (done.written, done.still_dead) == (10, 0)
    assert t.ids("one") == dict.fromkeys(range(30), 1)
    assert t.ids("two") == dict.fromkeys(range(20), 1)
    redrive(pipeline, Selection(), lambda: session_spark(pipeline))
    assert t.ids("two") == dict.fromkeys(range(30), 1)
    report = t.audit(path)
    assert report.verdict is Verdict.HELD, report.sentence


@contextmanager
def running(t: Tables, path: Path) -> Iterator[Future[None]]:
    """A run until the block ends."""
    pipeline = t.s.load(path, t.engine)
    if t.engine == "consumer":
        run: EngineRun = ConsumerRun(pipeline, observer=Observer(event=print))
    else:
        run = SparkRun(pipeline, lambda _: session_spark(pipeline), observer=Observer(event=print))
    with ThreadPoolExecutor() as pool:
        done = pool.submit(run.execute)
        try:
            yield done
        finally:
            run.stop()


def there(t: Tables, name: str) -> Counter[int]:
    try:
        return t.ids(name)
    except Exception:  # noqa: BLE001 - there is no table yet
        return Counter()


@pytest.mark.parametrize(("kind", "engine"), BOTH)
def test_topics_that_come_while_it_runs(tables: MakeTables, kind: str, engine: str) -> None:
    t = tables(kind, engine)
    t.make("first")
    t.produce("first", range(10))
    with running(t, t.file()) as run:
        assert poll_until(lambda: run.done() or len(there(t, "first")) == 10, 60)
        t.make("second", "First")  # to many a store that is the name of the first
        t.produce("second", range(50))
        t.produce("First", range(50))
        assert poll_until(lambda: run.done() or len(there(t, "second")) == 50, 60)
        t.produce("first", range(10, 20))
        t.produce("second", range(50, 60))
        assert poll_until(lambda: run.done() or len(there(t, "first")) + len(there(t, "second")) == 80, 60)
    with pytest.raises(TopicsStopped, match=f"would be that of topic {t.topic('first')}"):
        run.result(60)
    assert t.ids("second") == dict.fromkeys(range(60), 1)
    assert t.ids("first") == dict.fromkeys(range(20), 1)


def test_a_topic_that_fails_while_others_are_delivered(tables: MakeTables) -> None:
    """Stopped in the middle: the others go on, and what comes to it later is not read."""
    t = tables("postgres", "consumer")
    t.make("good", "bad")
    t.produce("good", range(10))
    t.produce("bad", range(10))
    with running(t, t.file(dead_letters="max_share = 0.0")) as run:
        assert poll_until(lambda: run.done() or len(there(t, "good")) + len(there(t, "bad")) == 20, 60)
        t.s.execute(f'ALTER TABLE "{t.table("bad")}" RENAME COLUMN note TO notes')
        t.produce("bad", range(10, 20))
        t.produce("good", range(10, 20))
        assert poll_until(lambda: run.done() or len(there(t, "good")) == 20, 60)
        t.produce("bad", range(20, 30))
        t.produce("good", range(20, 30))
        assert poll_until(lambda: run.done() or len(there(t, "good")) == 30, 60)
    with pytest.raises(TopicsStopped, match="note"):
        run.result(60)
    assert t.ids("bad") == dict.fromkeys(range(10), 1)
    t.s.execute(f'ALTER TABLE "{t.table("bad")}" RENAME COLUMN notes TO note')
    path = t.file()
    t.drain(path)
    assert t.ids("bad") == dict.fromkeys(range(30), 1)
    assert t.audit(path).verdict is Verdict.HELD


@pytest.mark.parametrize("engine", ["consumer", "spark"])
def test_a_topic_that_is_not_there_or_is_another_one(tables: MakeTables, engine: str) -> None:
    t = tables("delta", engine)
    t.make("good", "again")
    t.produce("good", range(10))
    t.produce("again", range(10))
    t.drain(t.file(topics=("good", "again")))
    t.admin.delete_topic(t.topic("again"))
    assert poll_until(lambda: t.admin.describe_topics([t.topic("again")])[t.topic("again")] is None, 30)
    t.make("again")
    t.produce("good", range(10, 20))
    with pytest.raises(TopicsStopped) as raised:
        t.drain(t.file(topics=("good", "again", "missing")))
    assert {name: type(error) for name, error in raised.value.stopped.items()} == {
        t.topic("again"): TopicRecreated,
        t.topic("missing"): SourceError,
    }
    assert t.ids("good") == dict.fromkeys(range(20), 1)


@pytest.mark.parametrize(("kind", "engine"), BOTH)
def test_killed_and_started_again(tables: MakeTables, kind: str, engine: str) -> None:
    """Of a batch over three topics, some tables have it and some do not."""
    t = tables(kind, engine)
    names = ("one", "two", "three")
    t.make(*names)
    path = t.file(batch="max_records = 300")
    for name in names:
        t.produce(name, range(500))
    options = ("--engine", engine)
    killed = t.s.run(path, *options, **{VARIABLE: f"after-claim-write:1:run:{t.s.folder}"})
    assert killed.returncode != 0, killed.stderr
    assert any(len(there(t, name)) < 500 for name in names)
    again = t.s.run(path, *options)
    assert again.returncode == 0, again.stderr
    incompatible(t, "later")
    t.make("later")
    bad_one = t.s.run(path, *options)
    assert (bad_one.returncode, bad_one.stderr.count(t.topic("later")) > 0) == (TopicsStopped.exit_code, True)
    path = t.file(topics=names)
    for name in names:
        assert t.ids(name) == dict.fromkeys(range(500), 1)
    report = t.audit(path)
    assert report.verdict is Verdict.HELD, report.sentence
    assert report.counts.written == 1_500


@pytest.mark.parametrize("kind", MOST)
def test_fifty_topics_in_one_batch(tables: MakeTables, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "GATHER_S_EACH", 0.1)
    t = tables(kind, "consumer")
    names = [f"t{number}" for number in range(50)]
    t.make(*names, partitions=1)
    for name in names:
        t.produce(name, range(20), partitions=1)
    t.drain(t.file())
    assert {name: t.commits(name) for name in names} == dict.fromkeys(names, 1)
    assert all(t.ids(name) == dict.fromkeys(range(20), 1) for name in names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("guarantee", "mode"), [("at-most-once", "append"), ("at-least-once", "dedupe"), ("exactly-once", "upsert")]
)
def test_other_guarantees_and_modes(tables: MakeTables, kind: str, guarantee: str, mode: str) -> None:
    t = tables(kind, "consumer")
    t.make("one", "two")
    lines = [] if mode == "append" else [f'mode = "{mode}"', 'key = ["id"]']
    for name in ("one", "two"):
        t.produce(name, range(100))
        if lines:
            t.produce(name, range(50))
    path = t.file(*lines, guarantee=guarantee)
    t.drain(path)
    t.drain(path)
    for name in ("one", "two"):
        assert t.ids(name) == dict.fromkeys(range(100), 1)
    report = t.audit(path)
    assert report.verdict is Verdict.HELD, report.sentence


@pytest.mark.parametrize("kind", ["postgres", "delta"])
def test_a_query_on_spark(tables: MakeTables, kind: str) -> None:
    t = tables(kind, "spark")
    t.make("one", "two")
    for name in ("one", "two"):
        t.produce(name, range(100))
    path = t.file(transform='sql = "SELECT * FROM records WHERE id < 50"')
    t.drain(path)
    for name in ("one", "two"):
        assert t.ids(name) == dict.fromkeys(range(50), 1)
    report = t.audit(path)
    assert report.verdict is Verdict.HELD, report.sentence


def test_positions_of_one_table_go_on_in_tables_for_each(tables: MakeTables) -> None:
    """A topic whose table stays the same goes on; rows of another would be split between two tables."""
    t = tables("postgres", "consumer")
    t.make("one", "two")
    t.produce("one", range(10))
    single = f'kind = "postgres"\nurl = "${{env:DATABASE_URL}}"\ntable = "{t.table("one")}"'
    t.drain(t.file(topics=("one",), sink=single))
    t.produce("one", range(10, 20))
    t.produce("two", range(10))
    t.drain(t.file(topics=("one", "two")))
    assert t.ids("one") == dict.fromkeys(range(20), 1)
    assert t.ids("two") == dict.fromkeys(range(10), 1)
    with pytest.raises(ConfigError, match="split between two tables"):
        t.drain(t.file(topics=("one", "two"), sink=single))


@pytest.mark.parametrize("kind", MOST)
def test_processes_share_the_topics(tables: MakeTables, kind: str) -> None:
    """One of two is killed, and the other takes over its partitions: of some tables all, of others one."""
    t = tables(kind, "consumer")
    names = ("one", "two", "three")
    t.make(*names)
    path = t.file()
    for name in names:
        t.produce(name, range(1_000))
    first, second = (t.s.start(path, "--engine", "consumer") for _ in range(2))
    assert poll_until(lambda: all(len(there(t, name)) == 1_000 for name in names), 60)
    for name in names:
        t.produce(name, range(1_000, 2_000))
    assert poll_until(lambda: any(len(there(t, name)) > 1_000 for name in names), 60)
    t.s.kill(first)
    for name in names:
        t.produce(name, range(2_000, 2_500))
    assert poll_until(lambda: all(len(there(t, name)) == 2_500 for name in names), 90), second.poll()
    second.terminate()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    for name in names:
        assert t.ids(name) == dict.fromkeys(range(2_500), 1)
    assert t.audit(path).verdict is Verdict.HELD


@pytest.mark.parametrize("engine", ["consumer", "spark"])
def test_a_table_that_keeps_failing_stops_its_topic(
    tables: MakeTables, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name: the database says of this table that it is out of space."""
    monkeypatch.setattr(driver, "ATTEMPTS_WITHOUT_PROGRESS", 2)
    monkeypatch.setattr(driver, "BACK_OFF_S", (0.1,))
    t = tables("postgres", engine)
    t.make("good", "full")
    t.produce("good", range(10))
    t.produce("full", range(10))
    path = t.file()
    t.drain(path)
    t.s.execute(
        f'CREATE FUNCTION "{t.prefix}"() RETURNS trigger LANGUAGE plpgsql AS'
        " $$ BEGIN RAISE EXCEPTION 'no space' USING ERRCODE = '53100'; END $$"
    )
    t.s.execute(
        f'CREATE TRIGGER full_disk BEFORE INSERT ON "{t.table("full")}" FOR EACH ROW EXECUTE FUNCTION "{t.prefix}"()'
    )
    t.produce("good", range(10, 20))
    t.produce("full", range(10, 20))
    with pytest.raises(TopicsStopped, match="1 topic stopped") as raised:
        t.drain(path)
    assert "gave up after 3 attempts" in str(raised.value.stopped[t.topic("full")])
    assert t.ids("good") == dict.fromkeys(range(20), 1)
    t.produce("good", range(20, 30))
    with pytest.raises(SinkError, match="gave up after 3 attempts"):
        t.drain(t.file('on_topic_failure = "stop-all"'))
    t.s.execute(f'DROP TRIGGER full_disk ON "{t.table("full")}"')
    t.drain(path)
    assert t.ids("full") == dict.fromkeys(range(20), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_about_the_whole(tables: MakeTables, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary of a run, the dashboard's sample, receipts; and a lake's maintenance."""
    t = tables(kind, "consumer")
    t.make("one", "two")
    for name in ("one", "two"):
        t.produce(name, range(30))
        t.produce(name, range(2), values=bad)
    monkeypatch.setenv("DATABASE_URL", t.s.url)
    path = t.file()
    pipeline = Pipeline.load(path)
    summary = pipeline.run(once=True, engine="consumer")
    assert (summary.read, summary.written, summary.dead) == (64, 60, 4)
    assert len(summary.positions) == 4
    with closing(Watch([path])) as watch:
        watch.sample_now()
        (watched,) = watch.pipelines()
    assert watched.failure is None
    assert watched.sample is not None
    assert (watched.sample.counts.written, watched.sample.lag) == (60, 0)
    with pipeline.receipts() as receipts:
        written, dead = (receipts.look(Receipt(t.topic("two"), 0, offset)).state for offset in (0, 15))
    assert (written, dead) == ("written", "dead-lettered")
    assert [count.count for count in pipeline.dead_letters().counts()] == [4]
    assert pipeline.dead_letters().get(t.topic("two"), 0, 15) is not None
    if kind != "postgres":
        assert pipeline.orphans() == []
        assert pipeline.compact().files_after >= 2


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_each_table_gets_new_columns_by_itself(tables: MakeTables, kind: str) -> None:
    t = tables(kind, "consumer")
    t.make("one", "two")
    t.produce("one", range(10))
    t.produce("two", range(10))
    t.drain(t.file())
    t.make("three")
    t.produce("three", range(10), values=with_more)
    t.produce("two", range(10, 20), values=with_more)
    wider = f'format = "json"\nschema = "{SCHEMA}, more long"'
    with pytest.raises(TopicsStopped, match="2 topics stopped"):
        t.drain(t.file(decode=wider))
    path = t.file('evolve = "add"', decode=wider)
    t.drain(path)
    for name, expected in (("one", [None] * 10), ("two", [None] * 10 + [1] * 10), ("three", [1] * 10)):
        assert t.frame(name).sort("id")["more"].to_list() == expected
    assert t.audit(path).verdict is Verdict.HELD


def with_more(number: int) -> bytes:
    return json.dumps({"id": number, "account": "a", "more": 1}).encode()


def registered(t: Tables, url: str, name: str, *fields: object) -> Callable[[Mapping[str, Any]], bytes]:
    """Registers a new version of a topic's schema, and writes values by it."""
    text = json.dumps({"type": "record", "name": "Row", "fields": fields})
    number = SchemaRegistry(RegistrySettings(url=url)).register(f"{t.topic(name)}-value", "AVRO", text)
    type_ = parse(text)
    return lambda value: framed(number, encode(type_, value))


@pytest.mark.parametrize(("kind", "engine"), [("postgres", "consumer"), ("delta", "consumer"), ("postgres", "spark")])
def test_columns_of_each_topics_own_schema(tables: MakeTables, kind: str, engine: str, schema_registry: str) -> None:
    """Each table has the columns of its topic's subject, gets those of a new version by itself, and a topic without a
    subject stops alone."""
    t = tables(kind, engine)
    t.make("people", "places", "no-subject")
    id_, note = {"name": "id", "type": "long"}, {"name": "note", "type": ["null", "string"], "default": None}
    person = registered(t, schema_registry, "people", id_, {"name": "name", "type": "string"})
    place = registered(t, schema_registry, "places", id_, {"name": "lat", "type": "double"})
    t.produce("people", range(20), values=lambda n: person({"id": n, "name": f"n{n}"}))
    t.produce("places", range(20), values=lambda n: place({"id": n, "lat": n / 2}))
    t.produce("no-subject", range(20))
    decode = f'format = "avro"\nschema = "registry"\n[decode.registry]\nurl = "{schema_registry}"\ntimeout = "2s"'
    path = t.file('evolve = "add"', decode=decode)
    with pytest.raises(TopicsStopped, match="1 topic stopped") as raised:
        t.drain(path)
    assert isinstance(raised.value.stopped[t.topic("no-subject")], UnknownSubject)
    assert values_of(t, "people", "name") == [f"n{n}" for n in range(20)]
    assert values_of(t, "places", "lat") == [n / 2 for n in range(20)]
    path = t.file('evolve = "add"', topics=("people", "places"), decode=decode)
    with running(t, path) as run:
        t.produce("places", range(20, 30), values=lambda n: place({"id": n, "lat": n / 2}))
        assert poll_until(lambda: run.done() or len(there(t, "places")) == 30, 60)
        noted = registered(t, schema_registry, "places", id_, {"name": "lat", "type": "double"}, note)
        t.produce("places", range(30, 40), values=lambda n: noted({"id": n, "lat": n / 2, "note": "new"}))
        t.produce("people", range(20, 30), values=lambda n: person({"id": n, "name": f"n{n}"}))
        assert poll_until(lambda: run.done() or len(there(t, "places")) + len(there(t, "people")) == 70, 60)
    run.result(60)
    assert values_of(t, "places", "note") == [None] * 30 + ["new"] * 10
    assert values_of(t, "people", "name") == [f"n{n}" for n in range(30)]
    report = t.audit(path)
    assert report.verdict is Verdict.HELD, report.sentence
    assert "own schema" in str(plan(t.s.load(path)))


def values_of(t: Tables, name: str, column: str) -> list[object]:
    if t.kind == "postgres":
        return [row[0] for row in t.s.rows(f'SELECT "{column}" FROM "{t.table(name)}" ORDER BY id')]
    return t.frame(name).sort("id")[column].to_list()
