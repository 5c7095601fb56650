"""The session's cluster: what it promises to clients, and the fault handles that later tests rest on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from uuid import uuid4

import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from kafka import KafkaConsumer, KafkaProducer

from avow.errors import LocalError
from avow.kafka import metadata
from avow.local.cluster import Cluster
from avow.local.part import PartState

pytestmark = pytest.mark.cluster


def eventually(check: Callable[[], bool], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.2)


def partition_of(client: AdminClient, topic: str) -> metadata.Partition:
    """Its one. A broker learns of a topic a moment after another has made it."""
    eventually(lambda: any(p.topic == topic for p in metadata.view(client).partitions))
    return next(p for p in metadata.view(client).partitions if p.topic == topic)


def test_the_class_archive_is_really_used(cluster: Cluster) -> None:
    """An archive that does not fit is ignored by Java without a word, so a JVM with a node's command is asked."""
    process = cluster.brokers()[0].process()
    assert process is not None
    command = process.cmdline()
    again = [*command[: command.index("kafka.Kafka")], "-Xlog:class+load", "kafka.tools.StorageTool", "random-uuid"]
    loaded = subprocess.run(again, capture_output=True, text=True, check=True).stdout
    assert loaded.count("source: shared objects file (top)") > 100, command


def read_all(cluster: Cluster, topic: str, isolation: str = "read_committed") -> list[bytes]:
    """Every record of a one-partition topic, with a consumer that has no group position."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": uuid4().hex,
            "isolation.level": isolation,
            "enable.partition.eof": True,
        },
        logger=metadata.QUIET,
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        values: list[bytes] = []
        while True:
            message = consumer.poll(20)
            assert message is not None, "no answer"
            if message.error():
                return values
            values.append(message.value() or b"")
    finally:
        consumer.close()


def test_topics_are_replicated_thrice_and_need_two_in_sync(cluster: Cluster, make_topic: Callable[..., str]) -> None:
    topic = make_topic(replicas=3)
    client = metadata.admin(cluster.bootstrap)
    partition = partition_of(client, topic)
    assert sorted(partition.replicas) == [1, 2, 3]
    assert not partition.under_replicated
    (config,) = client.describe_configs([ConfigResource("TOPIC", topic)]).values()
    assert config.result()["min.insync.replicas"].value == "2"


def test_transactions_are_ready(cluster: Cluster, make_topic: Callable[..., str]) -> None:
    topic = make_topic()
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": topic}, logger=metadata.QUIET)
    producer.init_transactions(30)
    for value, commit in ((b"kept", True), (b"aborted", False)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(30)
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
    assert read_all(cluster, topic) == [b"kept"]
    assert read_all(cluster, topic, "read_uncommitted") == [b"kept", b"aborted"]


def test_a_client_that_is_not_librdkafka_can_produce_and_consume(
    cluster: Cluster, make_topic: Callable[..., str]
) -> None:
    topic, brokers = make_topic(), cluster.bootstrap.split(",")
    with closing(KafkaProducer(bootstrap_servers=brokers)) as producer:  # type: ignore[no-untyped-call]
        for value in (b"one", b"two"):
            producer.send(topic, value).get(30)  # type: ignore[no-untyped-call]
    settings = {"bootstrap_servers": brokers, "auto_offset_reset": "earliest", "consumer_timeout_ms": 60_000}
    with closing(KafkaConsumer(topic, **settings)) as consumer:  # type: ignore[no-untyped-call]
        assert [next(consumer).value for _ in range(2)] == [b"one", b"two"]


def test_status_names_every_part(cluster: Cluster) -> None:
    status = cluster.status()
    assert status.all_up
    assert [part.name for part in status.parts] == ["broker-1", "broker-2", "broker-3", "postgres"]
    assert {part.state for part in status.parts} == {PartState.UP}
    assert [part.version.partition(".")[0] for part in status.parts] == ["4", "4", "4", "18"]
    assert all(part.pid and part.disk_bytes > 0 for part in status.parts)
    assert status.controller in (1, 2, 3)


def test_a_killed_node_is_seen_down_records_stay_and_it_comes_back(
    healthy: Cluster, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    producer = Producer({"bootstrap.servers": healthy.bootstrap, "acks": "all"}, logger=metadata.QUIET)
    producer.produce(topic, b"before")
    assert producer.flush(30) == 0
    client = metadata.admin(healthy.bootstrap)
    partition = partition_of(client, topic)
    leader = f"broker-{partition.leader}"
    pid = healthy.part(leader).pid
    assert pid

    healthy.part(leader).kill()

    assert not psutil.pid_exists(pid)
    status = healthy.status()
    assert not status.all_up
    assert [part.name for part in status.parts if part.state is PartState.DOWN] == [leader]
    producer.produce(topic, b"meanwhile")
    assert producer.flush(60) == 0, "two of three in sync are enough"
    assert read_all(healthy, topic) == [b"before", b"meanwhile"]

    healthy.up()

    assert healthy.part(leader).pid not in (None, pid)
    eventually(lambda: not any(p.under_replicated for p in metadata.view(client).partitions))


def test_a_paused_node_is_fenced_and_returns(healthy: Cluster) -> None:
    node = healthy.part("broker-2")
    client = metadata.admin(",".join(b.address for b in healthy.brokers() if b.name != "broker-2"))
    node.pause()
    assert node.state.value == "paused"
    eventually(lambda: 2 not in metadata.view(client).brokers)
    node.resume()
    assert node.state.value == "up"
    eventually(lambda: 2 in metadata.view(client).brokers)


def test_acks_all_is_refused_while_only_one_replica_is_in_sync(
    healthy: Cluster, make_topic: Callable[..., str]
) -> None:
    # One replica must be the leader's own; with the other two nodes away there is no quorum either, so this
    # is asked of a topic that wants three in sync while one node is away.
    topic = make_topic(min_insync_replicas="3")
    client = metadata.admin(healthy.bootstrap)
    partition = partition_of(client, topic)
    follower = next(n for n in partition.replicas if n != partition.leader)
    healthy.part(f"broker-{follower}").kill()
    eventually(lambda: partition_of(client, topic).under_replicated)
    problems: list[object] = []
    producer = Producer(
        {"bootstrap.servers": healthy.bootstrap, "acks": "all", "message.timeout.ms": 3000}, logger=metadata.QUIET
    )
    producer.produce(topic, b"x", on_delivery=lambda error, _: problems.append(error))
    producer.flush(30)
    assert len(problems) == 1
    assert problems[0] is not None


def test_postgres_killed_loses_nothing_committed(healthy: Cluster, database: psycopg.Connection) -> None:
    database.execute("CREATE TABLE survives AS SELECT 42 AS answer")
    postgres = healthy.part("postgres")
    postgres.kill()
    assert postgres.state is PartState.DOWN
    with pytest.raises(psycopg.OperationalError):
        database.execute("SELECT 1")
    healthy.start("postgres")
    assert healthy.postgres_url
    with psycopg.connect(healthy.postgres_url) as again:
        assert again.execute("SELECT answer FROM survives").fetchall() == [(42,)]
        again.execute("DROP TABLE survives")


@pytest.mark.parametrize("name", ["postgres", "broker-3"])
def test_a_part_restarts_by_name(healthy: Cluster, name: str) -> None:
    before = healthy.part(name).pid
    healthy.restart(name)
    assert healthy.part(name).pid not in (None, before)
    assert healthy.part(name).state is PartState.UP


def test_postgres_paused_does_not_answer_until_resumed(healthy: Cluster) -> None:
    postgres = healthy.postgres()
    assert postgres
    postgres.pause()
    assert postgres.state is PartState.PAUSED
    assert postgres.version() is None
    postgres.resume()
    assert (postgres.version() or "").startswith("18")


def test_an_unknown_part_is_named_with_the_known_ones(cluster: Cluster) -> None:
    with pytest.raises(LocalError, match=r"no part named broker-9; its parts: broker-1, .* postgres"):
        cluster.part("broker-9")


def test_a_second_up_on_a_cluster_that_is_up_changes_nothing(alone: Cluster) -> None:
    before = [(part.name, part.pid, part.address) for part in alone.parts()]
    alone.up()
    assert [(part.name, part.pid, part.address) for part in alone.parts()] == before


def test_a_cluster_of_another_size_is_refused(alone: Cluster) -> None:
    with pytest.raises(LocalError, match="has 3 brokers, not 1"):
        alone.up(brokers=1)


def test_metadata_of_a_dead_address_is_an_error_within_the_time_given() -> None:
    started = time.monotonic()
    with pytest.raises(Exception, match="no broker answered within 1 s"):
        metadata.view(metadata.admin("127.0.0.1:9"), timeout_s=1)
    assert time.monotonic() - started < 30
