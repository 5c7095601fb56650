"""``avow topics | groups | lag`` on a real cluster, as a person and as a machine reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.cimpl import NewTopic
from kafka import KafkaProducer

from avow.cli import main
from avow.engines.driver import _Ends, _ends
from avow.kafka import metadata
from avow.kafka.log import Log
from avow.kafka.log import TopicPartition as LogPartition
from avow.local.cluster import Cluster
from avow.retry import poll_until
from avow.settings import Source

pytestmark = pytest.mark.cluster


def avow(cluster: Cluster, *arguments: str, **env: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "160", "AVOW_BROKERS": cluster.bootstrap, **env})
    return runner.invoke(main, arguments)


def told(cluster: Cluster, *arguments: str) -> list[dict[str, Any]]:
    done = avow(cluster, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def commit(cluster: Cluster, group: str, topic: str, offset: int) -> None:
    client = metadata.admin(cluster.bootstrap)
    request = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, offset)])
    client.alter_consumer_group_offsets([request])[group].result()


def test_topics(alone: Cluster, make_topic: Callable[..., str]) -> None:
    topic = make_topic(2, retention_ms="3600000")
    producer = Producer({"bootstrap.servers": alone.bootstrap}, logger=metadata.QUIET)
    for number in range(10):
        producer.produce(topic, b"x", partition=number % 2)
    assert producer.flush(30) == 0
    (found,) = told(alone, "topics", topic)
    sizes = [part["bytes"] for part in found["partitions"]]
    assert min(sizes) > 0
    assert found["bytes"] == sum(sizes)
    assert found["replica_bytes"] == 3 * sum(sizes), "each of three replicas has all of it"
    assert {
        **{"name": topic, "partitions": 2, "replicas": 3, "in_sync": 3, "under_replicated": 0},
        **{"under_min_in_sync": 0, "without_leader": 0, "replica_bytes": 3 * sum(sizes)},
    } in told(alone, "topics")
    assert (found["offsets"], found["under_replicated"], found["config"]) == (10, 0, {"retention.ms": "3600000"})
    assert [part["end"] for part in found["partitions"]] == [5, 5]
    assert all(sorted(part["in_sync"]) == [1, 2, 3] for part in found["partitions"])
    shown = avow(alone, "topics", topic).stdout
    assert "retention.ms = 3600000" in shown
    missing = avow(alone, "topics", "nowhere")
    assert missing.exit_code == 4
    assert "nowhere does not exist at" in missing.stderr


def test_lag_counts_neither_markers_nor_open_transactions(cluster: Cluster, make_topic: Callable[..., str]) -> None:
    topic, group = make_topic(), f"g-{uuid4().hex[:8]}"
    settings = {"bootstrap.servers": cluster.bootstrap, "transactional.id": f"lag-{topic}"}
    producer = Producer(settings, logger=metadata.QUIET)
    producer.init_transactions(30)

    def send(count: int) -> None:
        producer.begin_transaction()
        for _ in range(count):
            producer.produce(topic, b"x", timestamp=int(time.time() * 1000) - 100_000)
        producer.flush(30)

    send(5)
    producer.commit_transaction(30)
    commit(cluster, group, topic, 2)
    (one,) = told(cluster, "lag", group)
    assert (one["position"], one["stable_end"], one["records"]) == (2, 6, 4)
    assert 90 < one["seconds"] < 200
    # Past the last record there is a marker, and nothing to wait for.
    commit(cluster, group, topic, 5)
    (one,) = told(cluster, "lag", group)
    assert (one["records"], one["seconds"]) == (0, None)
    # What is not committed is not late, and said to be open.
    send(3)
    (one,) = told(cluster, "lag", group)
    assert (one["records"], one["stable_end"]) == (0, 6)
    assert "a transaction is open" in one["note"]
    shown = avow(cluster, "topics", topic).stdout
    assert f"{topic}/0: from offset 6, by transactional.id lag-{topic} (producer " in shown
    assert "open; Kafka aborts it after 60 s" in shown
    producer.abort_transaction(30)
    (one,) = told(cluster, "lag", group)
    assert (one["records"], one["note"]) == (0, ""), "aborted records are nobody's lag"
    # A run that stands there has no lag either; and a record without a timestamp has no age.
    there = LogPartition(topic, 0)
    with Log(Source(brokers=cluster.bootstrap, topics=[topic]), group) as log:
        assert _ends(log, {there: 5}) == _Ends({there: 5}, None)
        (early,) = _ends(log, {there: 2}).ends.values()
        assert early > 5
    timeless: Any = KafkaProducer(bootstrap_servers=cluster.bootstrap.split(","))  # type: ignore[no-untyped-call]
    timeless.send(topic, b"x", timestamp_ms=-1).get(60)
    timeless.close()
    (one,) = told(cluster, "lag", group)
    assert (one["records"] > 0, one["seconds"]) == (True, None)
    assert "the oldest unread record has no timestamp" in one["note"]
    with Log(Source(brokers=cluster.bootstrap, topics=[topic]), group) as log:
        waiting = _ends(log, {there: 5})
    assert (waiting.ends[there] > 5, waiting.oldest) == (True, None)
    assert f"{topic}/0" in avow(cluster, "lag", group).stdout
    missing = avow(cluster, "lag", f"{group}-typo")
    assert missing.exit_code == 4
    assert f"consumer group {group}-typo does not exist" in missing.stderr
    assert avow(cluster, "groups", f"{group}-typo").exit_code == 4


def test_groups(cluster: Cluster, make_topic: Callable[..., str]) -> None:
    topic, group = make_topic(), f"g-{uuid4().hex[:8]}"
    consumer = Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": group, "client.id": "reader-1"}, logger=metadata.QUIET
    )
    consumer.subscribe([topic])
    deadline = time.monotonic() + 30
    while not consumer.assignment() and time.monotonic() < deadline:
        consumer.poll(0.2)
    (found,) = told(cluster, "groups", group)
    assert found["state"] == "stable"
    assert [(member["client_id"], member["partitions"]) for member in found["members"]] == [
        ("reader-1", [f"{topic}/0"])
    ]
    assert "reader-1 at 127.0.0.1" in avow(cluster, "groups", group).stdout
    consumer.close()
    commit(cluster, group, topic, 0)
    assert group in {one["name"] for one in told(cluster, "groups")}
    (found,) = told(cluster, "groups", group)
    assert [lag["position"] for lag in found["positions"]] == [0]


def test_what_has_no_leader_does_not_hide_the_rest(healthy: Cluster) -> None:
    topic, group = f"t-{uuid4().hex[:12]}", f"g-{uuid4().hex[:8]}"
    client = metadata.admin(healthy.bootstrap)
    placed = NewTopic(topic, 2, replica_assignment=[[1], [3]], config={"min.insync.replicas": "2"})
    client.create_topics([placed], operation_timeout=30)[topic].result()
    producer = Producer({"bootstrap.servers": healthy.bootstrap, "acks": 1}, logger=metadata.QUIET)
    for partition in range(2):
        producer.produce(topic, b"x", partition=partition)
    assert producer.flush(30) == 0
    positions = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, n, 0) for n in range(2)])
    client.alter_consumer_group_offsets([positions])[group].result()
    healthy.part("broker-3").kill()
    deadline = time.monotonic() + 60
    while all(one.leader >= 0 for one in metadata.view(client).partitions if one.topic == topic):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (found,) = told(healthy, "topics", topic)
    assert [(part["leader"] < 0, part["earliest"], part["end"]) for part in found["partitions"]] == [
        (False, 0, 1),
        (True, None, None),
    ]
    assert (found["offsets"], found["under_min_in_sync"], found["min_in_sync"]) == (1, 2, 2)
    assert "fewer replicas in sync than min.insync.replicas = 2" in avow(healthy, "topics", topic).stdout
    (listed,) = (one for one in told(healthy, "topics") if one["name"] == topic)
    assert (listed["replicas"], listed["under_min_in_sync"], listed["without_leader"]) == (1, 2, 1)
    # The broker may have been the group's coordinator: the next one does not know the group before it has loaded it.
    assert poll_until(lambda: avow(healthy, "groups", group).exit_code == 0, 60)
    led, unled = told(healthy, "lag", group)
    assert (led["records"], led["stable_end"]) == (1, 1)
    assert (unled["position"], unled["records"], unled["stable_end"], unled["note"]) == (
        0,
        None,
        None,
        "the partition has no leader",
    )
    assert f"{topic}/1" in avow(healthy, "groups", group).stdout


def test_which_cluster(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        f'name = "p"\nguarantee = "exactly-once"\n[source]\nbrokers = "{cluster.bootstrap}"\ntopics = ["t"]\n'
        '[decode]\nformat = "raw"\n[sink]\nkind = "kafka"\ntopic = "o"\n'
    )
    # What the environment says is for when no option does.
    given = avow(cluster, "topics", "--pipeline", str(file), AVOW_BROKERS="nowhere:1")
    assert given.exit_code == 0, given.stderr
    both = avow(cluster, "topics", "--pipeline", str(file), "--brokers", "nowhere:1")
    assert (both.exit_code, "mutually exclusive" in both.stderr) == (2, True)
    # A client setting of its own, beside a pipeline's or without one.
    for wrong in (["--kafka", "no.such=1"], ["--pipeline", str(file), "--kafka", "no.such=1"]):
        refused = avow(cluster, "topics", *wrong)
        assert (refused.exit_code, "no.such" in refused.stderr) == (2, True), refused.stderr
    malformed = avow(cluster, "topics", "--brokers", "nowhere")
    assert (malformed.exit_code, "is not host:port" in malformed.stderr) == (2, True)
