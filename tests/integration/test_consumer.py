"""The consumer engine: the same pipelines without a JVM, shared by several processes, and moved between engines."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from uuid import uuid4

import pyarrow as pa
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic
from tests.fix_pipeline import SCHEMA, Scenario, payment
from tests.integration import test_spark_kafka as kafka_tests
from tests.integration import test_spark_lake as lake_tests
from tests.integration import test_spark_postgres as postgres_tests
from tests.kafka_stage import read

from avow.engines.failpoints import VARIABLE
from avow.errors import ConfigError, TopicRecreated
from avow.kafka import metadata

pytestmark = pytest.mark.cluster

Make = Callable[..., Scenario]
GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]
CONSUMER = ("--engine", "consumer")


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_append(scenario: Make, guarantee: str) -> None:
    s = scenario(partitions=3)
    values = [payment(n) for n in range(5_000)]
    values[10] = b'{"id": "ten", "account": "a"}'
    s.produce(values)
    path = s.file(guarantee)
    s.drain(path, "consumer")
    assert s.ids() == dict.fromkeys([n for n in range(5_000) if n != 10], 1)
    assert postgres_tests.dead(s) == [(1, 3, "wrong-type")]
    assert postgres_tests.totals(s) == (5_000, 4_999, 1, 0)
    s.drain(path, "consumer")
    s.produce([payment(n) for n in range(5_000, 5_100)])
    s.drain(path, "consumer")
    assert s.ids() == dict.fromkeys([n for n in range(5_100) if n != 10], 1)
    admin = metadata.admin(s.cluster.bootstrap)
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(s.name)])
    told = {one.partition: one.offset for one in asked[s.name].result().topic_partitions}
    assert told == s.positions(), "lag tools see the positions"


def test_upsert_and_a_python_transform(scenario: Make) -> None:
    s = scenario(partitions=2)
    s.produce([json.dumps({"id": n % 50, "account": "a", "amount": n}).encode() for n in range(1_000)])
    lines = ('mode = "upsert"', 'key = ["id"]')
    path = s.file(sink=postgres_tests.sink(s, *lines), transform='python = "tests.transforms:even_with_cents"')
    s.drain(path, "consumer")
    found = s.rows(f'SELECT id, cents FROM "{s.table}" ORDER BY id')
    assert found == [(n, (950 + n) * 100) for n in range(0, 50, 2)]


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


@pytest.mark.parametrize("kind", ["postgres", "kafka", "delta", "iceberg"])
def test_a_pipeline_moves_between_engines(scenario: Make, kind: str) -> None:
    s = scenario(partitions=2)
    target = f"o-{uuid4().hex[:10]}"
    lines = {"postgres": postgres_tests.sink(s), "kafka": kafka_tests.sink(target)}
    path = s.file(sink=lines.get(kind) or lake_tests.sink(s, kind), decode=f'format = "json"\nschema = "{SCHEMA}"')
    for number, engine in enumerate(["consumer", "spark", "consumer"]):
        s.produce(payment(n) for n in range(number * 1_000, number * 1_000 + 1_000))
        s.drain(path, engine)
    if kind == "kafka":
        found = Counter(kafka_tests.ids(read(s.cluster.bootstrap, target)))
    else:
        found = s.ids() if kind == "postgres" else lake_tests.ids(s, kind)
    assert found == dict.fromkeys(range(3_000), 1)


def owners(s: Scenario) -> dict[int, int]:
    """Partition -> the run that has claimed it last."""
    return dict(s.rows("SELECT partition, run FROM avow.ledger WHERE pipeline = %s", s.name))


def test_several_share_the_partitions_and_one_is_killed(scenario: Make) -> None:
    s = scenario(partitions=4)
    path = s.file()
    s.produce(payment(n) for n in range(1_000))
    first, second = (s.start(path, *CONSUMER, "--json") for _ in range(2))
    s.wait_for_rows(1_000)
    sent = 1_000
    deadline = time.monotonic() + 60
    while len(set(owners(s).values())) < 2:
        assert time.monotonic() < deadline, owners(s)
        s.produce(payment(n) for n in range(sent, sent + 100))
        sent += 100
        time.sleep(0.2)
    s.kill(second)
    s.produce(payment(n) for n in range(sent, sent + 1_000))
    s.wait_for_rows(sent + 1_000)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=30)
    assert first.returncode == 0, err
    assert json.loads(out.splitlines()[-1]) == {"event": "stopped"}
    assert s.ids() == dict.fromkeys(range(sent + 1_000), 1)


def test_both_engines_at_once(scenario: Make) -> None:
    """By mistake. One of them may stop for it; nothing is lost or doubled."""
    s = scenario(partitions=2)
    path = s.file()
    s.produce(payment(n) for n in range(3_000))
    running = s.start(path, *CONSUMER)
    s.wait_for_rows(1)
    s.produce(payment(n) for n in range(3_000, 20_000))
    s.drain(path, "spark")
    assert s.run(path, *CONSUMER).returncode == 0
    running.send_signal(signal.SIGTERM)
    err = running.communicate(timeout=30)[1]
    assert running.returncode in (0, 13), err
    assert s.ids() == dict.fromkeys(range(20_000), 1)


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


def test_a_connection_that_the_server_ends_is_tried_again(scenario: Make) -> None:
    s = scenario(partitions=1)
    path = s.file()
    s.produce(payment(n) for n in range(100))
    running = s.start(path, *CONSUMER)
    s.wait_for_rows(100)
    s.produce(payment(n) for n in range(100, 3_000))
    ended = s.rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'avow-%%'")
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
    admin.create_topics([NewTopic(f"{s.topic}-more", 1)])[f"{s.topic}-more"].result()
    s.produce([payment(1)], partition=1)
    producer = Producer({"bootstrap.servers": s.cluster.bootstrap}, logger=metadata.QUIET)
    producer.produce(f"{s.topic}-more", payment(2))
    assert producer.flush(30) == 0
    s.wait_for_rows(3)
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0
    assert s.ids() == {0: 1, 1: 1, 2: 1}


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
    admin.create_topics([NewTopic(s.topic, 1)])[s.topic].result()
    s.produce([payment(n) for n in range(records)])
    with pytest.raises(TopicRecreated):
        s.drain(path, "consumer")


def test_sql_is_refused(scenario: Make) -> None:
    s = scenario()
    path = s.file(transform='sql = "SELECT * FROM records"')
    with pytest.raises(ConfigError, match="the consumer has no SQL"):
        s.drain(path, "consumer")


def test_a_transform_that_gives_no_batch_is_refused(scenario: Make) -> None:
    s = scenario()
    path = s.file(transform='python = "builtins:len"')
    with pytest.raises(ConfigError, match="gave a int"):
        s.drain(path, "consumer")
    assert isinstance(len(pa.RecordBatch.from_pylist([])), int)
