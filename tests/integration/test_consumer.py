"""The consumer engine: the same pipelines without a JVM, shared by several processes, and moved between engines."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import confluent_kafka as client
import psutil
import pyarrow as pa
import pytest
from _pytest.mark import ParameterSet
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic
from tests import growing_format, into_kafka, into_lake, into_postgres
from tests.fix_cluster import positions_of
from tests.fix_pipeline import END_SESSIONS, Scenario, payment, session_spark
from tests.kafka_stage import read

from avow import native, sinks
from avow.audit.auditor import audit
from avow.engines import columns, consumer, driver, spark, task
from avow.engines.isolation import BatchPart, Isolation
from avow.engines.progress import SILENT, Observer, Progress
from avow.engines.redrive import Redriven, redrive
from avow.errors import ConfigError, NotDrained, SinkError, SourceError, Superseded, TopicRecreated
from avow.kafka import group, metadata
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import reader
from avow.ledger import OffsetRange
from avow.local.cluster import Cluster
from avow.prove.failpoints import VARIABLE
from avow.retry import poll_until
from avow.settings import PipelineConfig
from avow.sinks.base import Selection
from avow.sinks.kafka import driver as kafka_driver
from avow.sinks.kafka.entries import StoredEntry
from avow.sinks.postgres.driver import PostgresDriver

pytestmark = pytest.mark.cluster

Make = Callable[..., Scenario]
GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]
CONSUMER = ("--engine", "consumer")
NATIVE = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")


@pytest.mark.parametrize(
    ("guarantee", "natively"), [*((guarantee, True) for guarantee in GUARANTEES), ("exactly-once", False)]
)
def test_append(scenario: Make, guarantee: str, natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_is_allowed", natively)
    s = scenario(partitions=3)
    values = [payment(n) for n in range(5_000)]
    values[10] = b'{"id": "ten", "account": "a"}'
    s.produce(values)
    path = s.file(guarantee)
    s.drain(path, "consumer")
    assert s.ids() == dict.fromkeys([n for n in range(5_000) if n != 10], 1)
    assert into_postgres.dead(s) == [(1, 3, "wrong-type")]
    assert into_postgres.totals(s) == (5_000, 4_999, 1, 0)
    s.drain(path, "consumer")
    s.produce([payment(n) for n in range(5_000, 5_100)])
    s.drain(path, "consumer")
    assert s.ids() == dict.fromkeys([n for n in range(5_100) if n != 10], 1)
    assert positions_of(s.cluster, s.name) == s.positions(), "lag tools see the positions"


def test_many_partitions_in_several_transactions(scenario: Make) -> None:
    """More records than go into one, of partitions that go together; and one that has too many for that."""
    s = scenario(partitions=30)
    count, large = 60_000, 70_000
    s.produce(payment(n) for n in range(count))
    s.produce((payment(n) for n in range(count, count + large)), partition=7)
    s.drain(s.file(batch='interval = "3s"'), "consumer")
    assert s.ids() == dict.fromkeys(range(count + large), 1)
    assert into_postgres.totals(s) == (count + large, count + large, 0, 0)
    commits = s.rows("SELECT count(DISTINCT xmin::text) FROM avow.claims WHERE pipeline = %s", s.name)
    assert commits[0][0] < 20, "they did not go together"


def test_upsert_and_a_python_transform(scenario: Make) -> None:
    s = scenario(partitions=2)
    s.produce([json.dumps({"id": n % 50, "account": "a", "amount": n}).encode() for n in range(1_000)])
    lines = ('mode = "upsert"', 'key = ["id"]')
    path = s.file(sink=into_postgres.sink(s, *lines), transform='python = "tests.transforms:even_with_cents"')
    s.drain(path, "consumer")
    found = s.rows(f'SELECT id, cents FROM "{s.table}" ORDER BY id')
    assert found == [(n, (950 + n) * 100) for n in range(0, 50, 2)]


def test_a_transform_is_not_called_by_two_threads_at_once(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users write them for Spark, where each process has its own. Without one, ranges are delivered side by side."""
    calling: list[int] = []
    together = threading.Event()
    wait_s = 0.05
    real = task._decode

    def watched(*given: Any) -> Any:
        calling.append(1)
        if len(calling) > 1:
            together.set()
        together.wait(wait_s)
        try:
            return real(*given)
        finally:
            calling.pop()

    monkeypatch.setattr(task, "_decode", watched)
    monkeypatch.setattr(consumer, "LANES_MAX", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    upsert = ('mode = "upsert"', 'key = ["id"]')
    for transform, expected in (("tests.transforms:even_with_cents", False), ("", True)):
        together.clear()
        wait_s = 20.0 if expected else 0.05
        s = scenario(partitions=8)
        s.produce([json.dumps({"id": n, "account": "a", "amount": n}).encode() for n in range(2_000)])
        sections = {"transform": f'python = "{transform}"'} if transform else {}
        # What does not come at once is in the next batch, of several partitions.
        s.drain(s.file(sink=into_postgres.sink(s, *upsert), batch='interval = "500ms"', **sections), "consumer")
        assert together.is_set() == expected


def test_markers_and_aborted_records_are_claimed(scenario: Make) -> None:
    s = scenario(partitions=1)
    settings = {"bootstrap.servers": s.cluster.bootstrap, "transactional.id": uuid4().hex}
    producer = Producer(settings, logger=metadata.QUIET)
    producer.init_transactions(30)
    for n in range(6):
        producer.begin_transaction()
        producer.produce(s.topic, payment(n), partition=0)
        producer.flush(30)
        (producer.abort_transaction if n % 3 == 2 else producer.commit_transaction)(30)
    s.drain(s.file(), "consumer")
    assert s.ids() == dict.fromkeys([0, 1, 3, 4], 1)
    assert s.positions() == {0: 12}, "six records, six markers"


def placed(s: Scenario, kind: str) -> tuple[Path, Callable[[], Mapping[int, int]]]:
    """A pipeline into that sink, and how often each id is there."""
    target = f"o-{uuid4().hex[:10]}"
    lines = {"postgres": into_postgres.sink(s), "kafka": into_kafka.sink(target)}
    path = s.file(sink=lines.get(kind) or into_lake.sink(s, kind))
    if kind == "kafka":
        return path, lambda: Counter(into_kafka.ids(read(s.cluster.bootstrap, target)))
    return path, s.ids if kind == "postgres" else lambda: into_lake.ids(s, kind)


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_another_table_under_the_same_name_is_remarked(scenario: Make, kind: str) -> None:
    """A lake's ledger is in its table: what tells that the pipeline has written elsewhere is its consumer group."""
    s = scenario(partitions=2)
    s.produce([payment(n) for n in range(10)])
    said = f"consumer group {s.name} has committed offsets in 2 partitions ({s.topic}/0 at 5)"
    for table, remarks in ((s.table, 0), (s.table, 0), (f"{s.table}_renamed", 1)):
        s.table = table
        events = s.drain(s.file(sink=into_lake.sink(s, kind)), "consumer")
        assert sum(said in event for event in events) == remarks, events
        assert into_lake.ids(s, kind) == dict.fromkeys(range(10), 1)


def claimed(s: Scenario, path: Path) -> int:
    """How many records the ledger has passed, whichever sink it is in."""
    with sinks.driver_sink(s.load(path)) as store:
        return sum(held.entry.position for held in store.ledger_snapshot().values())


@contextmanager
def flowing(s: Scenario) -> Iterator[list[int]]:
    """Records come all the while: their numbers."""
    sent: list[int] = []
    enough = threading.Event()

    def flow() -> None:
        while not enough.wait(0.1):
            some = range(len(sent), len(sent) + 50)
            s.produce(map(payment, some))
            sent.extend(some)

    with ThreadPoolExecutor() as pool:
        done = pool.submit(flow)
        try:
            yield sent
        finally:
            enough.set()
        done.result()


@contextmanager
def in_this_process(pipeline: PipelineConfig, observer: Observer = SILENT) -> Iterator[Future[None]]:
    """The consumer engine until the block ends."""
    running = consumer.ConsumerRun(pipeline, observer=observer)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(running.execute)
        try:
            yield done
        finally:
            running.stop()


@contextmanager
def on_spark(s: Scenario, path: Path) -> Iterator[None]:
    """A run on the session's Spark until the block ends; then it is asked to stop, as by SIGTERM."""
    pipeline = s.load(path)
    running = spark.SparkRun(pipeline, lambda _: session_spark(pipeline))
    with ThreadPoolExecutor() as pool:
        done = pool.submit(running.execute)
        try:
            yield
        finally:
            running.stop()
        done.result(90)


@contextmanager
def as_consumer(s: Scenario, path: Path) -> Iterator[None]:
    running = s.start(path, *CONSUMER)
    yield
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0, running.communicate()[1]


KINDS = ["postgres", "kafka", "delta", "iceberg"]


def some(*quick: str) -> list[ParameterSet]:
    """Every kind of sink; all but these in `make test-all` alone."""
    return [pytest.param(kind, marks=[] if kind in quick else [pytest.mark.long]) for kind in KINDS]


@pytest.mark.parametrize("kind", some("kafka"))
def test_a_pipeline_moves_between_engines_while_records_flow(scenario: Make, kind: str) -> None:
    s = scenario(partitions=2)
    path, ids = placed(s, kind)
    with flowing(s) as sent:
        for engine in (as_consumer, on_spark, as_consumer):
            before = claimed(s, path)
            with engine(s, path):
                until(lambda: claimed(s, path) > before + 200, lambda: (engine, claimed(s, path)), 90)  # noqa: B023
    s.drain(path, "consumer")
    assert ids() == dict.fromkeys(sent, 1)


def owners(s: Scenario) -> dict[int, int]:
    """Partition -> the run that has claimed it last."""
    return dict(s.rows("SELECT partition, run FROM avow.ledger WHERE pipeline = %s", s.name))


def until(what: Callable[[], object], said: Callable[[], object] = lambda: "", timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


def test_several_share_the_partitions_one_is_thrown_out_and_one_is_killed(scenario: Make) -> None:
    """The first stands still between its two acts until the second has all partitions; woken, it is a member again."""
    s = scenario(partitions=4)
    path = s.file("at-least-once")
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        s.produce(payment(n) for n in range(sent, sent + count))
        sent += count

    def claimed() -> bool:
        return sum(s.positions().values()) == sent

    send(10_000)
    first = s.start(path, *CONSUMER, "--json", **{VARIABLE: f"after-write:2:stop:{s.folder}"})
    until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED)
    second = s.start(path, *CONSUMER, "--json")
    until(claimed, s.positions, 35)  # ten seconds, and time for a busy machine; not the client's own 45
    first.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 60
    while len(set(owners(s).values())) < 2:
        assert time.monotonic() < deadline, owners(s)
        send(100)
        time.sleep(0.2)
    s.kill(second)
    send(1_000)
    until(claimed, s.positions, 35)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=30)
    assert first.returncode == 0, err
    # From the ledger, when it claims; or a request of before its sleep has failed, and it began anew from the ledger.
    assert "superseded by run" in out or "trying again from the ledger" in out, out + err
    last = json.loads(out.splitlines()[-1])
    assert last["event"] == "stopped"
    assert datetime.fromisoformat(last["time"]).tzinfo is not None
    found = s.ids()
    assert set(found) == set(range(sent))
    assert max(found.values()) == 2, "what it had written and not claimed"


def test_a_newer_run_beside_the_group_wins(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the partition that it has fenced. The group will never say that it is not ours, and after a while we go."""
    monkeypatch.setattr(group, "FENCED_S", 5.0)
    s = scenario(partitions=2)
    pipeline = s.load(s.file(), "consumer")
    s.produce(payment(n) for n in range(10))
    with in_this_process(pipeline) as done:
        s.wait_for_rows(10)
        with sinks.driver_sink(pipeline) as store:
            store.open_run([TopicPartition(s.topic, 0)])
        s.produce(payment(n) for n in range(10, 20))
        s.wait_for_rows(15)
        with pytest.raises(Superseded):
            done.result(60)
    assert s.positions() == {0: 5, 1: 10}
    assert s.ids() == dict.fromkeys([*range(10), *range(11, 20, 2)], 1)


def test_a_newer_run_that_comes_while_we_begin(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same: we are a member all the same, until the group is asked in vain."""
    monkeypatch.setattr(group, "FENCED_S", 3.0)
    s = scenario(partitions=1)
    events: list[str] = []

    def begin(*_: Any, **__: Any) -> None:
        raise Superseded("superseded by run 7: run 6 was fenced while it was starting")

    monkeypatch.setattr(driver.RunDriver, "begin", begin)
    s.produce([payment(0)])
    with in_this_process(s.load(s.file(), "consumer"), Observer(event=events.append)) as done:
        until(lambda: any("waiting for the group to reassign" in event for event in events))
        assert not done.done()
        with pytest.raises(Superseded):
            done.result(60)
    assert s.ids() == {}


class Shaken:
    """The real client. While something is in hand that is not delivered, its partition goes, and comes back, between
    the first record of a take and the rest."""

    def __init__(self, attempt: Any) -> None:
        self._attempt = attempt
        self._client = attempt.member._client
        self.natively = attempt.member.is_native
        self.shaken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def consume(self, most: int, wait_s: float) -> Any:
        if self._attempt.member.count and not self.shaken:
            self.shaken = True
            ours = self._client.assignment()
            self._attempt.member._on_revoke(self._client, ours)
            self._attempt.member._on_assign(self._client, ours)
        return self._client.consume(most, wait_s)


@pytest.mark.parametrize("natively", [False, pytest.param(True, marks=NATIVE)])
def test_a_record_of_an_earlier_stay_is_not_taken(
    scenario: Make, monkeypatch: pytest.MonkeyPatch, natively: bool
) -> None:
    """Everything between the position and that record would be claimed unseen."""
    monkeypatch.setattr(native, "_is_allowed", natively)
    made: list[Shaken] = []

    class RunAttempt(consumer.ConsumerAttempt):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(Shaken(self))
            self.member._client = cast(Any, made[-1])

    monkeypatch.setattr(consumer, "ConsumerAttempt", RunAttempt)
    s = scenario(partitions=1)
    s.produce(payment(n) for n in range(40_000))
    s.drain(s.file(batch='interval = "1s"\nmax_records = 15_000'), "consumer")
    assert made[0].shaken
    assert made[0].natively is natively
    assert s.ids() == dict.fromkeys(range(40_000), 1)


@pytest.mark.parametrize("kind", some("postgres"))
def test_both_engines_at_once(scenario: Make, kind: str) -> None:
    """By mistake. One of them may stop for it; nothing is lost or doubled."""
    s = scenario(partitions=2)
    path, ids = placed(s, kind)
    s.produce(payment(n) for n in range(3_000))
    running = s.start(path, *CONSUMER)
    until(lambda: claimed(s, path))
    s.produce(payment(n) for n in range(3_000, 20_000))
    with suppress(Superseded):
        s.drain(path, "spark")
    assert s.run(path, *CONSUMER).returncode == 0
    running.send_signal(signal.SIGTERM)
    err = running.communicate(timeout=60)[1]
    assert running.returncode in (0, 13), err
    assert ids() == dict.fromkeys(range(20_000), 1)


@pytest.mark.parametrize(
    ("guarantee", "point"),
    [
        ("at-most-once", "after-claim"),
        ("at-least-once", "after-write"),
        ("exactly-once", "mid-write"),
        ("exactly-once", "after-claim-write"),
    ],
)
def test_kill_9(scenario: Make, guarantee: str, point: str) -> None:
    """Killed at a named point: the permitted anomaly shows, the forbidden one does not."""
    s = scenario(partitions=1)
    path = s.file(guarantee)
    s.produce(payment(n) for n in range(5_000))
    killed = s.run(path, *CONSUMER, **{VARIABLE: f"{point}:1:run:{s.folder}"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert s.run(path, *CONSUMER).returncode == 0
    found = s.ids()
    lost, doubled = set(range(5_000)) - set(found), [n for n, times in found.items() if times > 1]
    assert bool(lost) == (guarantee == "at-most-once")
    assert bool(doubled) == (guarantee == "at-least-once")


def test_all_is_told_when_nothing_more_comes(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the group, and to whoever watches; and the ledger is not read for it."""
    asked: list[float] = []

    class Spied(PostgresDriver):
        def entries(self, **given: Any) -> Any:
            asked.append(time.monotonic())
            return super().entries(**given)

    monkeypatch.setattr("avow.sinks.postgres.driver.PostgresDriver", Spied)
    s = scenario(partitions=2)
    told: list[Progress] = []
    with in_this_process(s.load(s.file(), "consumer"), Observer(progress=told.append)):
        s.produce([payment(n) for n in range(9)] + [b"bad"])
        until(lambda: told)
        begun = len(asked)
        for count in range(20, 60, 10):  # the last of these come less than a second after something was told
            s.produce(payment(n) for n in range(count, count + 10))
            s.wait_for_rows(count - 1)
        until(lambda: told[-1].counts.read == 50)
        assert (told[-1].counts.written, told[-1].counts.dead, told[-1].lag_records) == (49, 1, 0)
        assert sum(one.offsets for one in told) == 50
        until(lambda: positions_of(s.cluster, s.name) == s.positions() == {0: 25, 1: 25})
        assert len(asked) == begun


@pytest.mark.parametrize("engine", ["consumer", pytest.param("spark", marks=pytest.mark.long)])
def test_an_idle_pipeline_into_kafka_keeps_its_positions(
    scenario: Make, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Kafka forgets those that nobody writes anew."""
    s = scenario(partitions=1)
    path, _ = placed(s, "kafka")
    s.produce([payment(0)])
    s.drain(path, "consumer")
    monkeypatch.setattr(driver, "KEEPALIVE_EVERY_S", 0.5)
    monkeypatch.setattr(kafka_driver, "AGE_MAX_MS", 0)

    def kept() -> StoredEntry:
        with kafka_driver.KafkaDriver(s.load(path)) as store:
            (found,) = store.stored_entries().values()
        return found

    run = kept().entry.run
    with in_this_process(s.load(path, "consumer")) if engine == "consumer" else on_spark(s, path):
        until(lambda: kept().entry.run > run)
        begun = time.time()
        until(lambda: kept().at_ms > (begun + 3) * 1000, kept)  # by then it is idle


def test_it_stops_soon_while_kafka_is_away(scenario: Make, healthy: Cluster) -> None:
    s = scenario(partitions=2)
    running = s.start(s.file(), *CONSUMER)
    s.produce(payment(n) for n in range(100))
    s.wait_for_rows(100)
    for broker in healthy.brokers():
        broker.pause()
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0, "it took minutes"


def test_a_run_ends_when_kafka_stays_away(scenario: Make, healthy: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits for brokers without a word and without an end: with --once for ever, too."""
    monkeypatch.setattr(consumer, "SILENCE_S", 1.0)
    monkeypatch.setattr(driver, "Log", partial(Log, timeout_s=5))
    monkeypatch.setattr(driver, "ATTEMPTS_WITHOUT_PROGRESS", 0)
    s = scenario(partitions=2)
    running = consumer.ConsumerRun(s.load(s.file(), "consumer"))
    s.produce(payment(n) for n in range(100))
    with ThreadPoolExecutor() as pool:
        done = pool.submit(running.execute)
        try:
            s.wait_for_rows(100)
            time.sleep(3)  # asked in vain, it goes on while Kafka answers
            assert not done.done()
            for broker in healthy.brokers():
                broker.pause()
            with pytest.raises(SourceError, match="gave up"):
                done.result(90)
        finally:
            running.stop()


def test_a_connection_that_the_server_ends_is_tried_again(scenario: Make) -> None:
    s = scenario(partitions=1)
    path = s.file()
    s.produce(payment(n) for n in range(100))
    running = s.start(path, *CONSUMER)
    s.wait_for_rows(100)
    s.produce(payment(n) for n in range(100, 3_000))
    ended = s.rows(END_SESSIONS)
    assert ended, "a task's session and the driver's"
    s.produce(payment(n) for n in range(3_000, 4_000))
    s.wait_for_rows(4_000)
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0, running.communicate()[1]
    assert s.ids() == dict.fromkeys(range(4_000), 1)


def test_partitions_are_added(scenario: Make) -> None:
    """They are read from their first record, whatever the declared start: they are younger than the run."""
    s = scenario(partitions=1)
    source = f'brokers = "{s.cluster.bootstrap}"\ntopics_pattern = "{s.topic}.*"\nstart = "latest"'
    s.produce([payment(99)])
    running = s.start(s.file(source=source), *CONSUMER)
    deadline = time.monotonic() + 60
    while not (s.rows("SELECT to_regclass('avow.ledger') IS NOT NULL")[0][0] and s.positions()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    s.produce([payment(0)])
    s.wait_for_rows(1)
    admin = metadata.admin(s.cluster.bootstrap)
    admin.create_partitions([NewPartitions(s.topic, 2)])[s.topic].result()
    admin.create_topics([NewTopic(f"{s.topic}-more", 1, 1)])[f"{s.topic}-more"].result()
    s.produce([payment(1)], partition=1)
    producer = Producer({"bootstrap.servers": s.cluster.bootstrap}, logger=metadata.QUIET)
    producer.produce(f"{s.topic}-more", payment(2))
    assert producer.flush(30) == 0
    s.wait_for_rows(3)
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0
    assert s.ids() == {0: 1, 1: 1, 2: 1}


ENGINES = [("consumer", kind) for kind in KINDS] + [("spark", "postgres")]


@pytest.mark.parametrize(("engine", "kind"), ENGINES)
def test_partitions_that_were_added_between_runs(scenario: Make, engine: str, kind: str) -> None:
    """Nothing of them is passed over, although the pipeline starts at the latest offset."""
    s = scenario(partitions=1)
    path, ids = placed(s, kind)
    path.write_text(path.read_text().replace("[source]\n", '[source]\nstart = "latest"\n'))
    s.produce([payment(99)])
    s.drain(path, engine)
    admin = metadata.admin(s.cluster.bootstrap)
    admin.create_partitions([NewPartitions(s.topic, 2)])[s.topic].result()
    time.sleep(1)  # until every broker knows of it
    s.produce([payment(0)], partition=0)
    s.produce([payment(1), payment(2)], partition=1)
    s.drain(path, engine)
    assert ids() == {0: 1, 1: 1, 2: 1}


def remake(s: Scenario, partitions: int = 1) -> None:
    """The topic, deleted and made again."""
    admin = metadata.admin(s.cluster.bootstrap)
    admin.delete_topics([s.topic], operation_timeout=30)[s.topic].result()

    def made() -> bool:
        with suppress(KafkaException):  # the deletion is still under way
            admin.create_topics([NewTopic(s.topic, partitions, 1)], operation_timeout=30)[s.topic].result()
            return True
        return False

    until(made)


@pytest.mark.parametrize(
    ("engine", "value"),
    [
        ("consumer", payment(0)),
        ("consumer", b"of another kind"),
        pytest.param("spark", payment(0), marks=pytest.mark.long),
    ],
    ids=["consumer", "consumer-other kind", "spark"],
)
def test_a_topic_made_again_while_it_is_read_stops_it(scenario: Make, engine: str, value: bytes) -> None:
    """And outgrown: the new topic has records where the position is. That they are bad is not the reason."""
    s = scenario(partitions=1)
    pipeline = s.load(s.file("at-most-once"), engine)
    s.produce(payment(n) for n in range(10))
    running = (
        consumer.ConsumerRun(pipeline)
        if engine == "consumer"
        else spark.SparkRun(pipeline, lambda _: session_spark(pipeline))
    )
    with ThreadPoolExecutor() as pool:
        done = pool.submit(running.execute)
        try:
            s.wait_for_rows(10)
            remake(s)
            s.produce(value for _ in range(2_000))
            with pytest.raises(TopicRecreated):
                done.result(90)
        finally:
            running.stop()
    assert s.ids() == dict.fromkeys(range(10), 1)


def test_records_of_a_topic_made_again_are_not_written(scenario: Make) -> None:
    """The topic is made again between the reading of its records and their claim."""
    s = scenario(partitions=1)
    pipeline = s.load(s.file(), "consumer")
    s.produce(payment(n) for n in range(10))
    s.drain(s.file(), "consumer")
    with closing(driver.RunDriver(pipeline, Observer())) as one:
        one.prepare(columns.sink_columns(pipeline))
        one.begin()
        remake(s)
        s.produce(payment(n) for n in range(100, 150))
        where = TopicPartition(s.topic, 0)
        planned = OffsetRange(s.topic, 0, 10, 50)
        work = one._work(BatchPart({where: planned}))
        read = task.of_these_topics(reader(pipeline.source, pipeline.name).read, work, one.log)
        sink = sinks.task_sink(pipeline, one.run, work.task_context)
        with pytest.raises(TopicRecreated, match="is read as topic id"):
            task.deliver(task.decoded(read, pipeline), planned, work, sink)
    assert s.ids() == dict.fromkeys(range(10), 1)
    assert s.positions() == {0: 10}


@pytest.mark.parametrize("kind", ["postgres", "kafka"])
def test_a_topic_made_again_with_more_partitions_is_noticed_with_the_first_of_them(scenario: Make, kind: str) -> None:
    """The group assigns what is new, and what is held stays: from then on its records would be those of the new topic.
    Into Kafka the ledger goes with the topic."""
    s = scenario(partitions=1)
    path, ids = placed(s, kind)
    pipeline = s.load(path, "consumer")
    s.produce(payment(n) for n in range(10))
    s.drain(path, "consumer")
    held, new = TopicPartition(s.topic, 0), TopicPartition(s.topic, 1)
    with closing(driver.RunDriver(pipeline, Observer())) as one:
        one.prepare(columns.sink_columns(pipeline))
        one.begin([held])
        remake(s, partitions=2)
        with pytest.raises(TopicRecreated):
            one.begin([new], added=[new])
        with pytest.raises(TopicRecreated):
            task.check_topics(one._work(BatchPart({held: OffsetRange(s.topic, 0, 10, 20)})), one.log)
    if kind == "postgres":  # also for a member that has only the new one
        with closing(driver.RunDriver(pipeline, Observer())) as another, pytest.raises(TopicRecreated):
            another.begin([new], added=[new])
    assert ids() == dict.fromkeys(range(10), 1)


def test_a_topic_made_again_is_named_also_where_the_ledger_went_with_it(scenario: Make) -> None:
    """With a topic, Kafka deletes what groups have committed of it, and for the Kafka sink that is the ledger."""
    s = scenario(partitions=1)
    path = s.file(sink=into_kafka.sink(f"{s.topic}-out"))
    pipeline = s.load(path, "consumer")
    s.produce(payment(n) for n in range(10))
    s.drain(path, "consumer")
    with closing(driver.RunDriver(pipeline, Observer())) as one:
        one.prepare(columns.sink_columns(pipeline))
        one.begin()
        remake(s)
        s.produce(payment(n) for n in range(100, 150))
        until(lambda: not positions_of(s.cluster, s.name))
        planned = OffsetRange(s.topic, 0, 10, 50)

        def execute(work: task.BatchWork) -> driver.Executed:
            sink = sinks.task_sink(pipeline, one.run, work.task_context)
            task.deliver(task.decoded(reader(pipeline.source, pipeline.name).read, pipeline), planned, work, sink)
            return driver.Executed()

        isolation = Isolation((SourceError, *driver.STOPS.values()), print)
        with pytest.raises(TopicRecreated, match="is read as topic id"):
            one.deliver({TopicPartition(s.topic, 0): planned}, execute, isolation, threading.Event())
    assert into_kafka.ids(read(s.cluster.bootstrap, f"{s.topic}-out")) == list(range(10))


@pytest.mark.parametrize("engine", ["consumer", pytest.param("spark", marks=pytest.mark.long)])
def test_a_start_that_is_refused_fences_nobody(scenario: Make, engine: str) -> None:
    s = scenario(partitions=1)
    s.produce(payment(n) for n in range(10))
    s.drain(s.file(), engine)
    before = owners(s)
    s.rows("UPDATE avow.ledger SET topic_id = 'another cluster' WHERE pipeline = %s RETURNING 1", s.name)
    with pytest.raises(TopicRecreated) as refused:
        s.drain(s.file(), engine)
    assert "another cluster than" in refused.value.advice
    assert owners(s) == before


@pytest.mark.parametrize("engine", ["consumer", pytest.param("spark", marks=pytest.mark.long)])
def test_a_database_that_lost_commits_is_read_again(scenario: Make, engine: str) -> None:
    """A failover to a standby that lacked them: rows and positions are gone together."""
    s = scenario(partitions=1)
    pipeline = s.load(s.file(), engine)
    events: list[str] = []
    told = Observer(event=events.append)
    s.produce(payment(n) for n in range(100))
    running = (
        consumer.ConsumerRun(pipeline, observer=told)
        if engine == "consumer"
        else spark.SparkRun(pipeline, lambda _: session_spark(pipeline), observer=told)
    )
    with ThreadPoolExecutor() as pool:
        done = pool.submit(running.execute)
        try:
            s.wait_for_rows(100)
            s.execute(
                f'BEGIN; DELETE FROM "{s.table}" WHERE _kafka_offset >= 40;'
                f"DELETE FROM avow.claims WHERE pipeline = '{s.name}';"
                "UPDATE avow.ledger SET position = 40, last_offset = NULL, last_timestamp_ms = NULL, last_crc32 = NULL,"
                f" read = 40, written = 40 WHERE pipeline = '{s.name}'; COMMIT"
            )
            s.produce(payment(n) for n in range(100, 120))
            s.wait_for_rows(120)
        finally:
            running.stop()
        done.result(60)
    assert any("[100, 120) was planned, but the ledger's position is 40" in event for event in events), events
    assert s.ids() == dict.fromkeys(range(120), 1)


@pytest.mark.parametrize("engine", ["consumer", pytest.param("spark", marks=pytest.mark.long)])
def test_a_record_on_which_the_sink_fails_is_isolated(
    scenario: Make, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """With an error that does not say which row it is about, or that it is about a row at all."""
    monkeypatch.setattr(driver, "BACK_OFF_S", (0.1,))
    s = scenario(partitions=2)
    path = s.file()
    s.drain(path, "consumer")
    s.execute(
        f"CREATE FUNCTION fail_{s.table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.id = 13 THEN"
        " RAISE 'broken' USING ERRCODE = 'XX000'; END IF; RETURN NEW; END $$;"
        f'CREATE TRIGGER fail BEFORE INSERT ON "{s.table}" FOR EACH ROW EXECUTE FUNCTION fail_{s.table}()'
    )
    s.produce(payment(n) for n in range(100))
    events = s.drain(path, engine)
    assert s.ids() == dict.fromkeys([n for n in range(100) if n != 13], 1)
    assert into_postgres.dead(s) == [(1, 6, task.UNPROCESSABLE)]
    assert into_postgres.totals(s) == (100, 99, 1, 0)
    assert any(f"offset 6 of {s.topic}/1 could not be processed" in event for event in events), events
    if engine == "spark":
        assert str(into_lake.audited(s, path).verdict) == "held"


def test_a_record_of_which_sparks_workers_die_is_isolated(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "BACK_OFF_S", (0.1,))
    s = scenario(partitions=2)
    s.produce(payment(n) for n in range(40))
    s.drain(s.file("at-most-once", transform='python = "tests.transforms:dies_of_13"'), "spark")
    assert s.ids() == dict.fromkeys([n for n in range(40) if n != 13], 1)
    assert into_postgres.dead(s) == [(1, 6, task.UNPROCESSABLE)]


def test_one_without_a_partition_drains_too(scenario: Make) -> None:
    s = scenario(partitions=1)
    path = s.file()
    s.produce(payment(n) for n in range(1_000))
    children = [s.start(path, *CONSUMER, "--once") for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert s.ids() == dict.fromkeys(range(1_000), 1)


@pytest.mark.parametrize("records", [2, 5])
def test_a_topic_made_again_stops_it(scenario: Make, records: int) -> None:
    """Also when it has not outgrown the position, and there is nothing to drain."""
    s = scenario(partitions=1)
    path = s.file()
    s.produce([payment(n) for n in range(3)])
    s.drain(path, "consumer")
    admin = metadata.admin(s.cluster.bootstrap)
    admin.delete_topics([s.topic])[s.topic].result()
    time.sleep(1)
    admin.create_topics([NewTopic(s.topic, 1, 1)])[s.topic].result()
    s.produce([payment(n) for n in range(records)])
    with pytest.raises(TopicRecreated):
        s.drain(path, "consumer")


def test_sql_is_refused(scenario: Make) -> None:
    s = scenario()
    path = s.file(transform='sql = "SELECT * FROM records"')
    with pytest.raises(ConfigError, match=r"the consumer engine cannot run transform\.sql"):
        s.drain(path, "consumer")


def test_a_transform_that_gives_no_batch_is_refused(scenario: Make) -> None:
    s = scenario()
    path = s.file(transform='python = "builtins:len"')
    with pytest.raises(ConfigError, match="gave a int"):
        s.drain(path, "consumer")
    assert isinstance(len(pa.RecordBatch.from_pylist([])), int)


@pytest.mark.parametrize("engine", ["consumer", pytest.param("spark", marks=pytest.mark.long)])
def test_once_that_is_stopped_early_is_not_drained(scenario: Make, engine: str) -> None:
    s = scenario(partitions=1)
    s.produce(payment(n) for n in range(300))
    pipeline = s.load(s.file(batch="max_records = 100"), engine)
    # Stopped as by SIGTERM, as soon as it has begun: one batch may still come of it.
    observer = Observer(event=lambda _: running.stop())
    running: consumer.ConsumerRun | spark.SparkRun = (
        consumer.ConsumerRun(pipeline, once=True, observer=observer)
        if engine == "consumer"
        else spark.SparkRun(pipeline, lambda _: session_spark(pipeline), once=True, observer=observer)
    )
    with pytest.raises(NotDrained, match="before it had drained"):
        running.execute()
    assert len(s.ids()) < 300


def test_the_command_says_that_it_was_stopped_before_it_had_drained(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.produce(payment(n) for n in range(300))
    child = s.start(s.file(batch="max_records = 100"), "--once", *CONSUMER)
    assert child.stderr
    assert child.stderr.readline(), "it says what it does"
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 19, said
    assert "before it had drained" in said
    assert 'event="drained"' not in said


@pytest.mark.parametrize("engine", ["consumer", pytest.param("spark", marks=pytest.mark.long)])
def test_a_failure_of_the_sink_ends_the_run_as_one(
    scenario: Make, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Spark has it from a task, as text."""
    monkeypatch.setattr(driver, "ATTEMPTS_WITHOUT_PROGRESS", 1)
    s = scenario(partitions=1)
    path = s.file()
    s.produce([payment(0)])
    s.drain(path, "consumer")
    s.execute(
        f"CREATE FUNCTION {s.table}_end() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END'"
    )
    s.execute(f'CREATE TRIGGER t BEFORE INSERT ON "{s.table}" FOR EACH ROW EXECUTE FUNCTION {s.table}_end()')
    s.produce([payment(1)])
    with pytest.raises(SinkError, match=r"gave up after 2 attempts without progress: .*terminat") as ended:
        s.drain(path, engine)
    assert ended.value.exit_code == 5
    assert s.ids() == {0: 1}


@pytest.mark.parametrize("start", ["earliest", "latest", "2020-01-01T00:00:00Z"])
def test_records_that_come_while_a_start_is_planned_do_not_refuse_it(
    scenario: Make, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    s = scenario(partitions=1)
    s.produce([payment(0)])
    pipeline = s.load(s.file(source=f'brokers = "{s.cluster.bootstrap}"\ntopics = ["{s.topic}"]\nstart = "{start}"'))
    with sinks.driver_sink(pipeline) as store:
        store.prepare()
    admin = metadata.admin(s.cluster.bootstrap)
    first = client.TopicPartition(s.topic, 0, 1)

    def in_between(question: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            answer = question(*args)
            s.produce([payment(1)])
            admin.delete_records([first])[first].result(30)  # as retention would
            return answer

        return asked

    with closing(driver.RunDriver(pipeline, Observer())) as one:
        for name in ("view", "declared_start"):
            monkeypatch.setattr(one.log, name, in_between(getattr(one.log, name)))
        one.begin()
        (position,) = one.positions.values()
        assert position == 1 if start != "latest" else position >= 1


def test_a_lag_has_an_age_from_the_start(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PUBLISH_TIMEOUT_S", 60)  # lag is best-effort: a busy broker must not end the question
    s = scenario(partitions=1)
    s.produce([payment(0)])
    pipeline = s.load(s.file(), "consumer")
    with sinks.driver_sink(pipeline) as store:
        store.prepare()
    one = driver.RunDriver(pipeline, Observer())
    try:
        one.begin()
        assert one._collect(wait=True)
        records, seconds = one._lag()
        assert records == 1
        assert seconds is not None
    finally:
        one.close()


@pytest.mark.parametrize("kind", ["postgres", "delta", "iceberg"])
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_table_follows_columns_that_change_while_it_runs(
    scenario: Make, tmp_path: Path, guarantee: str, kind: str
) -> None:
    """The decoder ends the attempt; the next one begins with the columns of now, and nothing is lost or doubled."""
    s = scenario(partitions=1)
    subject = tmp_path / "subject"
    subject.write_text("id int not null")
    evolve = 'evolve = "add"'
    where = into_postgres.sink(s, evolve) if kind == "postgres" else into_lake.sink(s, kind, evolve)
    with growing_format.install(tmp_path):
        path = s.file(
            guarantee,
            decode=f'format = "growing"\nschema = "id int not null"\nsubject = "{subject}"',
            sink=where,
            dead_letters="max_share = 1.0",
        )
        pipeline = s.load(path, "consumer")

        def drain() -> list[str]:
            """A run that has begun with the first columns."""
            events: list[str] = []
            consumer.ConsumerRun(pipeline, once=True, observer=Observer(event=events.append)).execute()
            return events

        s.produce([b'{"id": 0}', b'{"id": 1, "more": 1}'])
        assert not any("columns of now" in event for event in drain())
        subject.write_text("id int not null, note string")
        s.produce([b'{"id": 2}', b'{"id": 3, "note": "x"}', b'{"id": 4, "more": 1}', b'{"id": 5, "note": "y"}'])
        events = drain()
        assert [event for event in events if "columns of now" in event] == [
            "the subject has note by now; going on from the ledger with the columns of now"
        ]
        assert len([event for event in events if "column 'note'" in event and "was added" in event]) == 1
        # What does not fit stops by name, with nothing of it claimed.
        subject.write_text("id string not null, note string, other string")
        s.produce([b'{"id": 6, "other": "z"}'])
        with pytest.raises(ConfigError, match=r"column 'id' has type (integer|int32) instead of (text|string)"):
            drain()
    if kind == "postgres":
        rows = s.rows(f'SELECT id, note FROM "{s.table}" ORDER BY id')
        totals = into_postgres.totals(s)
    else:
        rows = into_lake.frame(s, kind).select("id", "note").sort("id").rows()
        with growing_format.install(tmp_path):
            totals = astuple(into_lake.totals(s, path))
    assert rows == [(0, None), (2, None), (3, "x"), (5, "y")]
    assert totals == (6, 4, 2, 0)


def test_a_table_follows_columns_that_change_while_spark_runs(scenario: Make, tmp_path: Path) -> None:
    """A task reports it, so that Spark does not try again what only another attempt can do."""
    s = scenario(partitions=2)
    subject = tmp_path / "subject"
    subject.write_text("id int not null")
    with growing_format.install(tmp_path):
        path = s.file(
            decode=f'format = "growing"\nschema = "id int not null"\nsubject = "{subject}"',
            sink=into_postgres.sink(s, 'evolve = "add"'),
        )
        root = str(Path(__file__).parents[2])
        run = s.start(path, PYTHONPATH=os.pathsep.join([os.environ["PYTHONPATH"], root]))
        s.produce([b'{"id": 0}'])
        s.wait_for_rows(1)
        subject.write_text("id int not null, note string")
        s.produce([b'{"id": 1, "note": "x"}', b'{"id": 2}', b'{"id": 3, "note": "y"}'])
        s.wait_for_rows(4)
        run.send_signal(signal.SIGTERM)
        said = "".join(run.communicate(timeout=60))
    assert run.returncode == 0, said
    assert said.count("going on from the ledger with the columns of now") == 1
    assert s.rows(f'SELECT id, note FROM "{s.table}" ORDER BY id') == [(0, None), (1, "x"), (2, None), (3, "y")]


@pytest.mark.parametrize(
    "kind", ["postgres", *(pytest.param(lake, marks=pytest.mark.long) for lake in ("delta", "iceberg"))]
)
def test_members_with_an_older_and_a_newer_file(scenario: Make, kind: str) -> None:
    """As when they are replaced one after the other. The newer one is killed (kill -9), and the older one goes on."""
    s = scenario(partitions=2)
    wide = "id long not null, account string not null, amount double, note string"
    narrow = "id long not null, account string not null, amount double"
    if kind != "delta":  # which cannot be widened
        narrow = narrow.replace("id long", "id int").replace("double", "float")

    def file(schema: str, name: str) -> Path:
        evolve = 'evolve = "add"'
        where = into_postgres.sink(s, evolve) if kind == "postgres" else into_lake.sink(s, kind, evolve)
        decode = f'format = "json"\nschema = "{schema}"\nunknown_fields = "ignore"'
        return s.file(decode=decode, sink=where).rename(s.folder / name)

    older, newer = file(narrow, "older.toml"), file(wide, "newer.toml")

    def reached(number: int) -> bool:
        written = into_postgres.totals(s)[1] if kind == "postgres" else into_lake.totals(s, older).written
        return written == number

    def rows() -> list[tuple[Any, ...]]:
        if kind == "postgres":
            return s.rows(f"SELECT id, to_jsonb(t) ->> 'note' FROM \"{s.table}\" t ORDER BY id")
        return [(row["id"], row.get("note")) for row in into_lake.frame(s, kind).sort("id").to_dicts()]

    s.produce(payment(n) for n in range(20))
    s.drain(older)
    first = s.start(older, *CONSUMER)
    s.produce(payment(n) for n in range(20, 40))
    assert poll_until(partial(reached, 40), 60), s.kill(first)
    second = s.start(newer, *CONSUMER)
    count = 40
    while not any(note for _, note in rows()):  # until the newer one has a partition
        assert count < 2_000, s.kill(second) + s.kill(first)
        s.produce(payment(n) for n in range(count, count + 20))
        count += 20
        assert poll_until(partial(reached, count), 60), s.kill(second) + s.kill(first)
        time.sleep(0.5)
    s.kill(second)
    s.produce(payment(n) for n in range(count, count + 20))
    assert poll_until(partial(reached, count + 20), 60), s.kill(first)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 0, said
    found = rows()
    assert [number for number, _ in found] == [*range(count + 20)]
    assert {note for _, note in found} == {None, "x" * 20}
    assert all(note is None for number, note in found if number < 40 or number >= count)


@pytest.mark.parametrize("kind", ["postgres", "iceberg"])
def test_dead_letters_of_a_narrower_table_are_redriven_by_key(scenario: Make, kind: str) -> None:
    """Upsert reads the topic on for null values, whose keys are of the wider type by now; and the audit agrees."""
    s = scenario(partitions=1)

    def file(schema: str) -> Path:
        keyed = ('mode = "upsert"', 'key = ["id"]', 'evolve = "add"')
        where = into_postgres.sink(s, *keyed) if kind == "postgres" else into_lake.sink(s, kind, *keyed)
        decode = f'format = "json"\nschema = "{schema}"\nunknown_fields = "ignore"'
        return s.file(decode=decode, sink=where, dead_letters="max_share = 1.0")

    far, gone = 2**40, 2**41
    values = [
        b'{"id": 1, "x": 0.1, "note": "early"}',
        b'{"id": %d}' % far,
        b'{"id": %d}' % gone,
        b'{"id": 2, "x": 0.1}',
    ]
    s.produce(values, keys=[b""] * 4)
    s.drain(file("id int not null, x float"))
    path = file("id long not null, x double, note string")
    s.produce([None, b'{"id": 3, "x": 0.1, "note": "now"}'], keys=[b'{"id": %d}' % gone, b""])
    s.drain(path)
    pipeline = s.load(path, "consumer")
    assert redrive(pipeline, Selection(), pytest.fail) == Redriven(written=1, skipped=1)
    if kind == "postgres":
        found = s.rows(f'SELECT id, x, note FROM "{s.table}" ORDER BY id')
    else:
        found = into_lake.frame(s, kind).select("id", "x", "note").sort("id").rows()
    a_float = 0.10000000149011612
    assert found == [(1, a_float, None), (2, a_float, None), (3, 0.1, "now"), (far, None, None)]
    report = audit(pipeline, pytest.fail)
    assert (report.verdict, report.findings) == ("held", ()), report
