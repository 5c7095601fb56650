"""Who leads what, and which replicas are in sync: one metadata request, as frozen values."""

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


@dataclass(frozen=True, slots=True)
class Partition:
    topic: str
    partition: int
    leader: int  # -1: none
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]

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
    # Looks again soon after a refused connection: librdkafka's own back-off grows to ten seconds.
    return AdminClient({"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 250}, logger=QUIET)


def view(client: AdminClient, timeout_s: float = 5) -> ClusterView:
    """Ask for everything at once. Raises ``SourceError`` if no broker answers in time."""
    try:
        told = client.list_topics(timeout=timeout_s)
    except KafkaException as error:
        raise SourceError(f"no broker answered within {timeout_s:g} s: {error.args[0].str()}") from error
    return as_view(told)


def as_view(told: ClusterMetadata) -> ClusterView:
    """The client's answer as our own values."""
    return ClusterView(
        cluster_id=told.cluster_id,
        controller=told.controller_id,
        brokers={broker.id: f"{broker.host}:{broker.port}" for broker in told.brokers.values()},
        partitions=tuple(
            Partition(name, number, part.leader, tuple(part.replicas), tuple(part.isrs))
            for name, topic in sorted(told.topics.items())
            for number, part in sorted(topic.partitions.items())
        ),
    )
