"""Plain consumers on the real cluster: killed, stopped and added in mid-batch, under each guarantee, both ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic
from tests.consuming import TABLE, consumer_of, handled, in_order, judged
from tests.fix_cluster import positions_of
from tests.fix_sinks import Bench
from tests.kafka_stage import read

from avow import Consumer, Record, Transaction
from avow.errors import ConfigError, HandlerFailed, RetentionLoss, TopicRecreated
from avow.kafka import metadata
from avow.ledger import Entry, OffsetRange
from avow.local.cluster import Cluster, PortPicker
from avow.prove.proxy import Proxy
from avow.sinks.postgres.config import PostgresConfig

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
QUICK = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "500"}  # the least that a broker allows by default


@dataclass
class Group:
    """One group over one topic, its processes, and what they have handled."""

    cluster: Cluster
    folder: Path
    topic: str
    partitions: int
    name: str = field(default_factory=lambda: f"g-{uuid4().hex[:10]}")
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def lines(self) -> Path:
        return self.folder / "lines"

    def produce(self, count: int, *, twice: bool = False, timestamp_ms: int = 0) -> None:
        """So many in each partition. ``twice``: each message is sent again, with its key, to the next partition."""
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap, "linger.ms": 20}, logger=metadata.QUIET)
        for number in range(count * self.partitions):
            headers: list[tuple[str, str | bytes | None]] = [("avow-key", f"m-{number // 2 if twice else number}")]
            producer.produce(
                self.topic, str(number), None, number % self.partitions, headers=headers, timestamp=timestamp_ms
            )
        assert producer.flush(60) == 0

    def consumer(self, guarantee: str, **given: Any) -> Consumer:
        return consumer_of(self.cluster.bootstrap, self.topic, self.name, guarantee, **given)

    def start(self, guarantee: str, **given: Any) -> subprocess.Popen[str]:
        number = len(self.children)
        said = (self.folder / f"events-{number}").open("w")
        options = {
            "brokers": self.cluster.bootstrap,
            "topics": [self.topic],
            "group": self.name,
            "guarantee": guarantee,
            "lines": str(self.lines),
            "config": QUICK,
            **given,
        }
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.consuming", json.dumps(options)], cwd=ROOT, stderr=said, text=True
        )
        said.close()
        self.children.append(child)
        return child

    def events(self, child: subprocess.Popen[str]) -> str:
        return (self.folder / f"events-{self.children.index(child)}").read_text()

    def committed(self) -> dict[int, int]:
        return positions_of(self.cluster, self.name)

    def end(self, *children: subprocess.Popen[str]) -> None:
        """As a person ends them: politely."""
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            assert child.wait(60) == 0, self.events(child)


@pytest.fixture
def group(cluster: Cluster, tmp_path: Path, make_topic: Callable[..., str]) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(partitions: int = 1, **config: str) -> Group:
        made.append(Group(cluster, tmp_path, make_topic(partitions, **config), partitions))
        return made[-1]

    yield make
    for child in (child for one in made for child in one.children):
        if child.poll() is None:
            child.kill()
            child.wait()


def until(what: Callable[[], object], said: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + 90
    while not what():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


def stopped(child: subprocess.Popen[str]) -> bool:
    assert child.poll() is None, "it has ended"
    return psutil.Process(child.pid).status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize(
    ("guarantee", "given"),
    [
        ("at-least-once", {"strategy": "cooperative-sticky", "commit": "async"}),
        pytest.param("at-least-once", {"strategy": "range,roundrobin", "commit": "sync"}, marks=pytest.mark.long),
        pytest.param("at-most-once", {"strategy": "cooperative-sticky", "per": "record"}, marks=pytest.mark.long),
        ("at-most-once", {"strategy": "range,roundrobin", "per": "record"}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["strategy"],
)
def test_killed_stopped_and_added(group: Callable[..., Group], guarantee: str, given: dict[str, str]) -> None:
    """One dies in mid-batch, one is stopped in it until others have done all, one is added."""
    g = group(partitions=4)
    g.produce(150)
    most = guarantee == "at-most-once"
    common = {**given, "max_records": 50, "pace_s": 0.005}
    dying = g.start(guarantee, **common, harm="die-before" if most else "die-after", at=70)
    zombie = g.start(guarantee, **common, harm="stop-after", at=70)
    until(lambda: dying.poll() is not None and stopped(zombie), lambda: g.events(zombie))
    assert dying.returncode == -signal.SIGKILL, g.events(dying)
    added = g.start(guarantee, **common)
    ends = dict.fromkeys(range(4), 150)
    until(lambda: g.committed() == ends, lambda: (g.committed(), g.events(added)))
    before = g.events(zombie).count("reading")
    zombie.send_signal(signal.SIGCONT)
    until(lambda: g.events(zombie).count("reading") > before, lambda: g.events(zombie))
    g.end(zombie, added)
    assert g.committed() == ends, "nobody has moved it back"
    lost, doubled = judged(g.lines, {(partition, offset) for partition in range(4) for offset in range(150)})
    assert bool(lost) == most, "the permitted anomaly is there, the forbidden one is not"
    assert bool(doubled) == (not most)
    assert in_order(g.lines)


@pytest.mark.parametrize("canary", [False, True])
def test_at_least_once_loses_nothing_and_a_canary_is_caught(group: Callable[..., Group], canary: bool) -> None:
    """The same crash and the same check; the canary says at-least-once, and commits before it handles."""
    g = group()
    g.produce(100)
    given: dict[str, Any] = {"max_records": 20, "once": True, "canary": canary, "commit_interval_s": 0.0}
    killed = g.start("at-least-once", **given, harm="die-before", at=30)
    assert killed.wait(60) == -signal.SIGKILL
    assert g.start("at-least-once", **given).wait(60) == 0
    lost, _ = judged(g.lines, {(0, offset) for offset in range(100)})
    assert bool(lost) == canary


def test_exactly_once_into_postgres(group: Callable[..., Group], database: psycopg.Connection) -> None:
    """Killed again and again, one stopped inside its transaction, every message sent twice."""
    g = group(partitions=4)
    g.produce(200, twice=True)
    table = f"t_{uuid4().hex[:10]}"
    database.execute(TABLE.format(table))
    given = {"database": g.cluster.postgres_url, "table": table, "max_records": 40, "pace_s": 0.002}

    def rows() -> int:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0])

    zombie = g.start("exactly-once", **given, harm="stop-before", at=50)
    until(lambda: stopped(zombie), lambda: g.events(zombie))
    for harm, at in (("die-after", 33), ("die-before", 77)):
        dying = g.start("exactly-once", **given, harm=harm, at=at)
        assert dying.wait(90) == -signal.SIGKILL, g.events(dying)
    last = g.start("exactly-once", **given)
    until(lambda: rows() == 800, lambda: (rows(), g.events(last)))
    before = g.events(zombie)
    zombie.send_signal(signal.SIGCONT)
    until(lambda: g.events(zombie) != before, lambda: g.events(zombie))
    g.end(zombie, last)
    found = database.execute(f"SELECT partition, number FROM {table} ORDER BY 1, 2").fetchall()
    assert found == [(partition, offset) for partition in range(4) for offset in range(200)]
    once = database.execute(f"SELECT count(*) FROM {table} WHERE once").fetchone()
    assert once == (400,), "each message was seen a first time once"
    ledger = database.execute(
        "SELECT count(*), sum(position), sum(read), sum(written), sum(skipped) FROM avow.ledger WHERE pipeline = %s",
        (g.name,),
    ).fetchone()
    assert ledger == (4, 800, 800, 400, 400)
    assert judged(g.lines, set(found))[1], "what a transaction took back was really done, and undone"
    assert g.committed() == dict.fromkeys(range(4), 200), "lag tools see the positions"


@pytest.mark.parametrize("per", ["record", "batch"])
@pytest.mark.parametrize("commit", ["auto", "sync", "async"])
def test_the_position_stops_at_the_record_that_fails(group: Callable[..., Group], per: str, commit: str) -> None:
    g = group()
    g.produce(10)
    seen: list[int] = []

    def handler(record: Record) -> None:
        seen.append(record.offset)
        if record.offset == 5:
            raise ValueError("no")

    with g.consumer("at-least-once", limit=3) as consumer:
        assert consumer.run(lambda record: seen.append(record.offset)).handled == 3
    assert g.committed() == {0: 3}
    seen.clear()
    given: dict[str, Any] = {"per": per, "commit": commit, "retries": 2, "back_off_s": 0.01}
    with g.consumer("at-least-once", **given) as consumer, pytest.raises(HandlerFailed, match="3 times: ValueError"):
        consumer.run(handler)
    assert g.committed() == {0: 5}, "never 6"
    assert seen == [3, 4, 5, 5, 5]
    with g.consumer("at-least-once", **given, once=True, dead_letters=True) as consumer:
        totals = consumer.run(handler)
    assert (totals.handled, totals.dead, totals.retried) == (4, 1, 2)
    assert g.committed() == {0: 10}
    (letter,) = read(g.cluster.bootstrap, f"{g.name}.dead-letters")
    headers = dict(letter.headers[:4])
    assert letter.value == b"5"
    assert headers["avow-origin"] == f"{g.topic}/0/5".encode()
    assert headers["avow-reason"] == b"handler-failed"
    assert headers["avow-detail"] == b"ValueError: no"


def test_a_dead_letter_has_as_many_replicas_as_the_records(group: Callable[..., Group]) -> None:
    g = group()
    g.topic = f"t-{uuid4().hex[:12]}"
    admin = metadata.admin(g.cluster.bootstrap)
    admin.create_topics([NewTopic(g.topic, 1, 2)], operation_timeout=30)[g.topic].result()
    g.produce(1)

    def handler(_: Record) -> None:
        raise ValueError("no")

    with g.consumer("at-least-once", once=True, dead_letters=True) as consumer:
        assert consumer.run(handler).dead == 1
    letters = f"{g.name}.dead-letters"
    (made,) = admin.list_topics(letters, timeout=30).topics[letters].partitions.values()
    assert len(made.replicas) == 2


def test_a_dead_letter_that_is_too_large_for_its_topic_is_shortened(group: Callable[..., Group]) -> None:
    """Also one whose error is no text."""
    g = group()
    admin = metadata.admin(g.cluster.bootstrap)
    letters = f"{g.name}.dead-letters"
    config = {"cleanup.policy": "compact", "max.message.bytes": "20000"}
    admin.create_topics([NewTopic(letters, 1, 1, config=config)], operation_timeout=30)[letters].result()
    producer = Producer({"bootstrap.servers": g.cluster.bootstrap}, logger=metadata.QUIET)
    producer.produce(g.topic, os.urandom(100_000), None, 0)
    producer.produce(g.topic, b"small", None, 0)
    assert producer.flush(30) == 0

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    def handler(record: Record) -> None:
        raise ValueError("\udcff") if record.offset else Unspeakable

    with g.consumer("at-least-once", once=True, retries=0, dead_letters=True) as consumer:
        assert consumer.run(handler).dead == 2
    assert g.committed() == {0: 2}
    short, small = read(g.cluster.bootstrap, letters)
    assert dict(short.headers)["avow-shortened"] == b"100000"
    assert (dict(short.headers)["avow-detail"] or b"").startswith(b"Unspeakable")
    assert (small.value, dict(small.headers)["avow-detail"]) == (b"small", b"ValueError: \\udcff")
    # Somebody lowers what it takes while a consumer runs.
    change = ConfigEntry("max.message.bytes", "17000", incremental_operation=AlterConfigOpType.SET)
    wanted = ConfigResource(ResourceType.TOPIC, letters, incremental_configs=[change])

    def lowering(_: Record) -> None:
        admin.incremental_alter_configs([wanted])[wanted].result(30)
        time.sleep(1)
        raise ValueError("no")

    producer.produce(g.topic, os.urandom(18_500), None, 0)
    assert producer.flush(30) == 0
    with g.consumer("at-least-once", once=True, retries=0, dead_letters=True) as consumer:
        assert consumer.run(lowering).dead == 1
    assert dict(read(g.cluster.bootstrap, letters)[-1].headers)["avow-shortened"] == b"18500"


def test_a_stop_between_two_tries_loses_nothing_that_was_claimed(group: Callable[..., Group]) -> None:
    g = group()
    g.produce(10)
    seen: list[int] = []

    def handler(record: Record) -> None:
        seen.append(record.offset)
        if seen == [0, 1, 2]:
            consumer.stop()
            raise ValueError("not now")

    with g.consumer("at-most-once", retries=1, back_off_s=0.2) as consumer:
        assert consumer.run(handler).handled == 10
    assert seen == [0, 1, 2, 2, *range(3, 10)]


@pytest.mark.parametrize("back_off_ms", ["500", "6000"], ids=["while it is empty", "when it has more"])
def test_a_topic_that_is_made_again_while_it_is_consumed_is_a_named_stop(
    group: Callable[..., Group], back_off_ms: str
) -> None:
    """The consumer would read on at its old position, in another log."""
    g = group()
    g.produce(10)
    seen: list[bytes | None] = []
    admin = metadata.admin(g.cluster.bootstrap)

    def handler(record: Record, _: Transaction) -> None:
        seen.append(record.value)
        if len(seen) == 10:
            admin.delete_topics([g.topic], operation_timeout=30)[g.topic].result()
            time.sleep(1)
            admin.create_topics([NewTopic(g.topic, 1, 1)], operation_timeout=30)[g.topic].result()
            time.sleep(1)
            g.produce(30)

    # Until the client asks again, the new log is shorter than its position, or longer.
    kafka = {"topic.metadata.refresh.interval.ms": "60000", "fetch.error.backoff.ms": back_off_ms}
    with g.consumer("exactly-once", database=g.cluster.postgres_url, config=kafka) as consumer:
        enough = threading.Timer(60, consumer.stop)
        enough.start()
        with pytest.raises(TopicRecreated, match=f"{g.topic}/0 was claimed up to offset 10 as topic id"):
            consumer.run(handler)
        enough.cancel()
    assert len(seen) == 10


KEYS: list[bytes | str] = [
    b"\xff",
    b"\\xff",
    "\\xff0",
    b"\xff0",
    b"\0",
    b"\\x00",
    b"\x01ff",
    b"\x01",
    b"a",
    "b",
    b"k" * 5_000,
    b"k" * 5_001,
]


def test_idempotency_keys_are_told_apart_whatever_their_bytes(bench: Callable[..., Bench]) -> None:
    b = bench("postgres")
    pipeline = b.pipeline()
    assert isinstance(pipeline.sink, PostgresConfig)
    with b.run(pipeline), psycopg.connect(pipeline.sink.url.get_secret_value()) as connection:
        tx = Transaction(b.name, 1, 0, connection, Entry(0, "id", 1), OffsetRange("t", 0, 0, 1), ())
        # As the version before has left them, which could not tell some from others.
        for text in ("\\xfe", "plain"):
            connection.execute("INSERT INTO avow.keys (pipeline, key) VALUES (%s, %s)", (b.name, text))
        assert [tx.first_time(key) for key in KEYS] == [True] * len(KEYS)
        assert [tx.first_time(key) for key in KEYS] == [False] * len(KEYS)
        assert [tx.first_time(key) for key in (b"\xfe", "plain", b"plain")] == [False] * 3


def end_backend(database: psycopg.Connection, connection: psycopg.Connection) -> int:
    pid = connection.info.backend_pid
    database.execute("SELECT pg_terminate_backend(%s)", (pid,))
    return pid


def test_exactly_once_failures_and_transactions(group: Callable[..., Group], database: psycopg.Connection) -> None:
    g = group()
    g.produce(10)
    table = f"t_{uuid4().hex[:10]}"
    database.execute(TABLE.format(table))
    given: dict[str, Any] = {"database": g.cluster.postgres_url, "retries": 1, "back_off_s": 0.01, "once": True}

    def numbers() -> list[int]:
        return [row[0] for row in database.execute(f"SELECT number FROM {table} ORDER BY 1").fetchall()]

    def position() -> int:
        asked = "SELECT position FROM avow.ledger WHERE pipeline = %s"
        return int(database.execute(asked, (g.name,)).fetchall()[0][0])

    def handler(record: Record, tx: Transaction) -> None:
        tx.connection.execute(f"INSERT INTO {table} VALUES (0, %s, true)", (record.offset,))
        if record.offset == 5:
            raise ValueError("no")

    with g.consumer("exactly-once", **given) as consumer, pytest.raises(HandlerFailed):
        consumer.run(handler)
    assert (numbers(), position()) == ([0, 1, 2, 3, 4], 5), "one batch, and the position is at what failed"
    with g.consumer("exactly-once", **given, dead_letters=True, limit=2) as consumer:
        totals = consumer.run(handler)
    assert (totals.handled, totals.dead, position()) == (1, 1, 7)
    dead = database.execute(
        'SELECT "offset", value, reason, detail FROM avow.dead_letters WHERE pipeline = %s', (g.name,)
    )
    assert dead.fetchall() == [(5, b"5", "handler-failed", "ValueError: no")]
    with g.consumer("exactly-once", **given) as consumer:
        with pytest.raises(psycopg.errors.DivisionByZero), consumer.transaction() as tx:
            tx.connection.execute(f"INSERT INTO {table} VALUES (0, -1, true); SELECT 1 / 0")
        # Its connection alone is ended: between two blocks, and inside one.
        end_backend(database, tx.connection)
        with pytest.raises(psycopg.OperationalError), consumer.transaction():
            pass
        with pytest.raises(psycopg.OperationalError), consumer.transaction() as tx:
            tx.connection.execute(f"INSERT INTO {table} VALUES (0, {end_backend(database, tx.connection)}, true)")
        assert position() == 7
        while not consumer.ended:
            with consumer.transaction() as tx:
                for record in tx.records:
                    tx.connection.execute(f"INSERT INTO {table} VALUES (0, %s, true)", (record.offset,))
    assert (numbers(), position()) == ([0, 1, 2, 3, 4, 6, 7, 8, 9], 10), "nothing of what was rolled back"
    with (
        g.consumer("exactly-once", **given) as consumer,
        pytest.raises(ConfigError, match="cannot iterate over records"),
    ):
        next(iter(consumer))


def test_exactly_once_waits_for_its_database(group: Callable[..., Group], database: psycopg.Connection) -> None:
    """It goes away in the middle of a transaction, and does not let anybody in for a while."""
    g = group(partitions=2)
    g.produce(10)
    table = f"t_{uuid4().hex[:10]}"
    database.execute(TABLE.format(table))
    server = g.cluster.postgres()
    assert server is not None
    proxy = Proxy(PortPicker().free(), server.port).start()
    events: list[str] = []

    def handler(record: Record, tx: Transaction) -> None:
        if record.offset == 5 and not events:
            proxy.cut()
        tx.connection.execute(f"INSERT INTO {table} VALUES (%s, %s, true)", (record.partition, record.offset))

    def heard(event: str) -> None:
        if "failed" in event:
            events.append(event)
        if "could not connect to PostgreSQL" in event:
            proxy.heal()

    url = str(g.cluster.postgres_url).replace(f":{server.port}/", f":{proxy.port}/")
    try:
        with g.consumer("exactly-once", database=url, once=True, per="record", on_event=heard) as consumer:
            assert consumer.run(handler).handled == 20
    finally:
        proxy.stop()
    assert any("could not connect to PostgreSQL" in event for event in events), events
    found = database.execute(f"SELECT partition, number FROM {table} ORDER BY 1, 2").fetchall()
    assert found == [(partition, offset) for partition in range(2) for offset in range(10)]


def test_loops_and_starts(group: Callable[..., Group]) -> None:
    g = group()
    now = datetime.now(UTC)
    g.produce(5, timestamp_ms=int((now - timedelta(hours=2)).timestamp() * 1000))
    g.produce(5, timestamp_ms=int((now - timedelta(minutes=1)).timestamp() * 1000))
    with g.consumer("at-least-once", auto_offset_reset=now - timedelta(hours=1), per="record") as consumer:
        for record in consumer:
            if record.offset == 7:
                break  # it is not handled
        again = iter(consumer)
        assert [next(again).offset, next(again).offset] == [7, 8]
    assert g.committed() == {0: 8}, "5 and 6, then 7; 8 was in hand"
    with g.consumer("at-least-once", once=True) as consumer:
        assert [record.offset for batch in consumer.batches() for record in batch] == [8, 9]
    assert g.committed() == {0: 10}

    g.name += "-latest"
    with g.consumer("at-least-once", auto_offset_reset="latest", once=True) as consumer:
        assert list(consumer) == []
    g.produce(1)
    with g.consumer("at-least-once", auto_offset_reset="latest", once=True) as consumer:
        assert [record.offset for record in consumer] == [10], "where it first was: nothing between is lost"

    with g.consumer("at-most-once", auto_offset_reset="latest", limit=1) as consumer:
        g.produce(3)
        records = iter(consumer)
        assert next(records).offset == 11
        assert g.committed() == {0: 12}, "before it is handled"
        records.close()
    assert g.committed() == {0: 12}, "in hand when the loop was left: lost, and never given again"

    tried: list[int] = []

    def fails(record: Record) -> None:
        tried.append(record.offset)
        raise ValueError("perhaps it is done")

    with g.consumer("at-most-once", per="record") as consumer, pytest.raises(HandlerFailed, match="failed: ValueError"):
        consumer.run(fails)
    assert (tried, g.committed()) == ([12], {0: 13}), "a second try could do its work twice"


@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_partitions_that_were_added_between_two_starts(group: Callable[..., Group], guarantee: str) -> None:
    """Offsets in the group, or in PostgreSQL: nothing of a new partition is passed over."""
    g = group()
    given: dict[str, Any] = {"auto_offset_reset": "latest", "once": True}
    given |= {"database": g.cluster.postgres_url} if guarantee == "exactly-once" else {}
    found: list[tuple[int, int]] = []

    def alone(record: Record) -> None:
        found.append((record.partition, record.offset))

    def within(record: Record, _: Transaction) -> None:
        alone(record)

    handler = within if guarantee == "exactly-once" else alone
    g.produce(1)
    with g.consumer(guarantee, **given) as consumer:
        consumer.run(handler)
    admin = metadata.admin(g.cluster.bootstrap)
    admin.create_partitions([NewPartitions(g.topic, 2)])[g.topic].result()
    time.sleep(1)  # until every broker knows of it
    g.partitions = 2
    g.produce(2)
    with g.consumer(guarantee, **given) as consumer:
        consumer.run(handler)
    assert sorted(found) == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_retention_is_a_named_stop(group: Callable[..., Group]) -> None:
    g = group()
    g.produce(10)
    with g.consumer("at-least-once", limit=2) as consumer:
        list(consumer)
    admin = metadata.admin(g.cluster.bootstrap)
    for answer in admin.delete_records([TopicPartition(g.topic, 0, 5)]).values():
        answer.result(30)
    with g.consumer("at-least-once", once=True) as consumer, pytest.raises(RetentionLoss, match=r"\[2, 5\)"):
        list(consumer)
    with g.consumer("at-least-once", once=True, on_data_loss="skip") as consumer:
        assert [record.offset for record in consumer] == [5, 6, 7, 8, 9]


def avow_consume(g: Group, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "avow", "consume", g.topic, "--brokers", g.cluster.bootstrap, "--group", g.name]
    child = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    g.children.append(child)
    return child


def test_the_command(group: Callable[..., Group]) -> None:
    g = group()
    g.produce(10)
    out, err = (first := avow_consume(g, "--max", "4")).communicate(timeout=60)
    assert first.returncode == 0, err
    assert [json.loads(line)["offset"] for line in out.splitlines()] == [0, 1, 2, 3]
    assert json.loads(out.splitlines()[0])["headers"] == [["avow-key", "m-0"]]
    assert "handled 4" in err
    assert g.committed() == {0: 4}

    running = avow_consume(g, "--json", "--commit", "sync")
    assert running.stdout
    assert [json.loads(running.stdout.readline())["offset"] for _ in range(6)] == [4, 5, 6, 7, 8, 9]
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert json.loads(err.splitlines()[-1]) == {"handled": 6, "dead_letters": 0, "retried": 0}
    assert g.committed() == {0: 10}

    g.produce(3)
    early = avow_consume(g, "--once", "--per", "record", "--handler", "tests.consuming:ask_to_stop")
    _, err = early.communicate(timeout=60)
    assert early.returncode == 19, err
    assert g.committed() == {0: 11}

    failing = avow_consume(g, "--handler", "builtins:int", "--retries", "0", "--once")
    _, err = failing.communicate(timeout=60)
    assert failing.returncode == 18, err
    assert "TypeError" in err
    assert g.committed() == {0: 11}
    wrong = avow_consume(g, "--handler", "tests.consuming:nothing")
    _, err = wrong.communicate(timeout=60)
    assert wrong.returncode == 2
    assert "tests.consuming:nothing" in err
    assert handled(g.lines) == []
