"""``avow topics | groups | lag`` on a real cluster, as a person and as a machine reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition

from avow.kafka import metadata
from avow.local.cluster import Cluster

pytestmark = pytest.mark.cluster


def avow(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "avow", *arguments, "--brokers", cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "160"},
        check=False,
    )


def told(cluster: Cluster, *arguments: str) -> list[dict[str, Any]]:
    done = avow(cluster, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def commit(cluster: Cluster, group: str, topic: str, offset: int) -> None:
    client = metadata.admin(cluster.bootstrap)
    request = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, offset)])
    client.alter_consumer_group_offsets([request])[group].result()


def test_topics(cluster: Cluster, make_topic: Callable[..., str]) -> None:
    topic = make_topic(2, retention_ms="3600000")
    producer = Producer({"bootstrap.servers": cluster.bootstrap}, logger=metadata.QUIET)
    for number in range(10):
        producer.produce(topic, b"x", partition=number % 2)
    assert producer.flush(30) == 0
    assert {"name": topic, "partitions": 2} in told(cluster, "topics")
    (found,) = told(cluster, "topics", topic)
    assert (found["offsets"], found["under_replicated"], found["config"]) == (10, 0, {"retention.ms": "3600000"})
    assert [part["end"] for part in found["partitions"]] == [5, 5]
    assert all(sorted(part["in_sync"]) == [1, 2, 3] for part in found["partitions"])
    shown = avow(cluster, "topics", topic).stdout
    assert "retention.ms = 3600000" in shown
    missing = avow(cluster, "topics", "nowhere")
    assert missing.returncode == 4
    assert "nowhere is not at" in missing.stderr


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
    producer.abort_transaction(30)
    (one,) = told(cluster, "lag", group)
    assert (one["records"], one["note"]) == (0, ""), "aborted records are nobody's lag"
    assert f"{topic}/0" in avow(cluster, "lag", group).stdout


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
