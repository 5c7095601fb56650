"""Topics as people ask about them: leaders, replicas in sync, what is configured, how much there is.

Each question is asked through an open ``Log``: a command opens one, a dashboard keeps some.

Owns: these answers. Must not know: pipelines, sinks. Neighbours: ``metadata`` (replicas) and ``log`` (offsets).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError
from confluent_kafka.admin import ConfigResource, ConfigSource, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from avow.kafka.brokers import Disk
from avow.kafka.log import Log, TopicPartition, answers
from avow.kafka.metadata import Partition


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition, with its offsets."""

    partition: int
    leader: int  # -1: none
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    earliest: int | None  # None, as the next two: it has no leader, and nobody else says it
    stable_end: int | None  # a reader of committed records gets so far
    end: int | None
    bytes: int | None = None  # its leader's log, on disk; None: not known

    @property
    def open_offsets(self) -> int:
        """Offsets behind the beginning of a transaction that is still open."""
        return 0 if self.end is None or self.stable_end is None else self.end - self.stable_end


@dataclass(frozen=True, slots=True)
class TopicView:
    """One topic."""

    name: str
    topic_id: str
    partitions: tuple[PartitionView, ...]
    config: dict[str, str] | None  # what is set for this topic; the rest is the brokers' default. None: not permitted
    min_in_sync: int | None  # min.insync.replicas: with fewer, a write that wants all of them is refused
    replica_bytes: int | None = None  # of all replicas; None: not known

    @property
    def bytes(self) -> int | None:
        """Of the leaders' logs."""
        known = [one.bytes for one in self.partitions if one.bytes is not None]
        return sum(known) if len(known) == len(self.partitions) else None

    @property
    def offsets(self) -> int:
        """How many offsets its log has, as far as it is known. Markers of transactions and compacted records are among
        them."""
        return sum(one.end - (one.earliest or 0) for one in self.partitions if one.end is not None)

    @property
    def under_replicated(self) -> int:
        return sum(len(one.in_sync) < len(one.replicas) for one in self.partitions)

    @property
    def under_min_in_sync(self) -> int | None:
        if self.min_in_sync is None:
            return None
        return sum(len(one.in_sync) < self.min_in_sync for one in self.partitions)


def names(log: Log, *, internal: bool = False) -> dict[str, list[Partition]]:
    """Every topic -> its partitions. Kafka's own begin with two underscores."""
    found: dict[str, list[Partition]] = defaultdict(list)
    for partition in log.cluster().partitions:
        if internal or not partition.topic.startswith("__"):
            found[partition.topic].append(partition)
    return dict(sorted(found.items()))


def describe(log: Log, topics: Iterable[str], disks: Mapping[int, Disk] | None = None) -> list[TopicView]:
    """These topics, with what is on the brokers' disks if that is given; a ``SourceError`` names one that is not
    there."""
    wanted = sorted(set(topics))
    ids = log.partitions_of(wanted)
    there = {TopicPartition(one.topic, one.partition): one for one in log.cluster().partitions}
    # A question about a partition without a leader has no answer, and would take the others' with it.
    led = [where for where in ids if there[where].leader >= 0]
    offsets, stable = log.offsets(led), log.stable_ends(led)
    told = _configured(log, wanted)
    return [
        TopicView(
            topic,
            next(topic_id for where, topic_id in ids.items() if where.topic == topic),
            tuple(
                _partition(there[where], offsets.get(where), stable.get(where), disks or {})
                for where in ids
                if where.topic == topic
            ),
            _set(told.get(topic)),
            _min_in_sync(told[topic]) if topic in told else None,
            bytes_of([one for one in there.values() if one.topic == topic], disks) if disks is not None else None,
        )
        for topic in wanted
    ]


def _partition(
    one: Partition, offsets: tuple[int, int] | None, stable: int | None, disks: Mapping[int, Disk]
) -> PartitionView:
    earliest, end = offsets or (None, None)
    if end is not None and stable is not None:
        end = max(end, stable)  # they are asked one after the other
    return PartitionView(
        one.partition, one.leader, one.replicas, one.in_sync, earliest, stable, end, size_of(one, disks)
    )


def size_of(partition: Partition, disks: Mapping[int, Disk]) -> int | None:
    """Of its leader's log."""
    disk = disks.get(partition.leader)
    return None if disk is None else disk.sizes.get(TopicPartition(partition.topic, partition.partition))


def bytes_of(partitions: Iterable[Partition], disks: Mapping[int, Disk]) -> int | None:
    """Of all their replicas whose brokers have said it; None if no broker has."""
    if all(disk.used_bytes is None for disk in disks.values()):
        return None
    where = {TopicPartition(one.topic, one.partition) for one in partitions}
    return sum(disk.sizes.get(one, 0) for disk in disks.values() for one in where)


def config(log: Log, topic: str) -> dict[str, str] | None:
    """What is set for the topic itself; None where the user may not describe it."""
    return _set(_configured(log, [topic]).get(topic))


def min_in_sync(log: Log, topics: Iterable[str]) -> dict[str, int]:
    """min.insync.replicas of each that the user may describe, be it set or the brokers' default."""
    return {topic: _min_in_sync(entries) for topic, entries in _configured(log, topics).items()}


def _configured(log: Log, topics: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Without those whose configuration the user may not describe: that takes a right of its own."""
    resources = {topic: ConfigResource(ResourceType.TOPIC, topic) for topic in topics}
    if not resources:
        return {}
    told = log.ask(
        "for the configuration of topics",
        lambda timeout_s: answers(
            log.admin.describe_configs(list(resources.values()), request_timeout=timeout_s),
            timeout_s,
            absent=KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ),
    )
    return {topic: told[resource] for topic, resource in resources.items() if told[resource] is not None}


def _set(entries: Mapping[str, Any] | None) -> dict[str, str] | None:
    if entries is None:
        return None
    return {
        name: entry.value
        for name, entry in sorted(entries.items())
        if entry.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value and not entry.is_sensitive
    }


def _min_in_sync(entries: Mapping[str, Any]) -> int:
    return int(entries["min.insync.replicas"].value)


def create(log: Log, name: str, partitions: int, replicas: int | None, config: dict[str, str]) -> None:
    """Make a topic that is not there. Without ``replicas`` the brokers' default is taken."""
    topic = NewTopic(name, partitions, -1 if replicas is None else replicas, config=config)
    log.ask(
        f"to make topic {name}",
        # It may be there from a try whose answer was late.
        lambda timeout_s: answers(
            log.admin.create_topics([topic], operation_timeout=timeout_s, request_timeout=timeout_s),
            timeout_s,
            absent=KafkaError.TOPIC_ALREADY_EXISTS,
        ),
    )


def delete(log: Log, name: str) -> None:
    """Delete a topic that is there, with all that is in it."""
    log.ask(
        f"to delete topic {name}",
        lambda timeout_s: answers(
            log.admin.delete_topics([name], operation_timeout=timeout_s, request_timeout=timeout_s),
            timeout_s,
            absent=KafkaError.UNKNOWN_TOPIC_OR_PART,
        ),
    )
