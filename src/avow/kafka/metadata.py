"""Partitions, their leaders and the replicas in sync, as frozen values; and a plain client for a local cluster.

Owns: these values. Must not know: client settings. Its neighbour is ``admin``, which makes the requests of everybody
else: with retries, the user's settings and errors that say what to do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ClusterMetadata  # type: ignore[attr-defined]

from avow.errors import SourceError

# librdkafka prints every refused connection to stderr unless it is given a logger.
QUIET = logging.getLogger("avow.librdkafka")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Partition:
    topic: str
    partition: int
    leader: int  # -1: none
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def under_replicated(self) -> bool:
        return len(self.in_sync) < len(self.replicas)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as one of its brokers sees it."""

    cluster_id: str | None
    controller: int
    brokers: dict[int, str]  # the live ones: id -> address
    partitions: tuple[Partition, ...]


def admin(bootstrap: str) -> AdminClient:
    # Reconnects soon after a refused connection: librdkafka's own back-off grows to ten seconds.
    return AdminClient({"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 250}, logger=QUIET)


def view(client: AdminClient, timeout_s: float = 5) -> ClusterView:
    """One metadata request. Raises ``SourceError`` if no broker answers in time."""
    try:
        listed = client.list_topics(timeout=timeout_s)
    except KafkaException as error:
        raise SourceError(f"no broker answered within {timeout_s:g} s: {error.args[0].str()}") from error
    return as_view(listed)


def as_view(listed: ClusterMetadata) -> ClusterView:
    """The client's answer as our own values."""
    return ClusterView(
        cluster_id=listed.cluster_id,
        controller=listed.controller_id,
        brokers={broker.id: f"{broker.host}:{broker.port}" for broker in listed.brokers.values()},
        partitions=tuple(
            Partition(name, number, part.leader, tuple(part.replicas), tuple(part.isrs))
            for name, topic in sorted(listed.topics.items())
            for number, part in sorted(topic.partitions.items())
        ),
    )
