"""Topics as people ask about them: leaders, replicas in sync, what is configured, how much there is.

Each question is asked through an open ``Log``: a command opens one, a dashboard keeps some.

Owns: these answers. Must not know: pipelines, sinks. Neighbours: ``metadata`` (replicas) and ``log`` (offsets).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka.admin import ConfigSource  # type: ignore[attr-defined]

from avow.kafka.brokers import Disk
from avow.kafka.log import Log
from avow.kafka.metadata import Partition


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition, with its offsets."""

    partition: int
    leader: int  # -1: none
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    earliest: int | None  # None, as the next two: not known without a leader
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
        known = [partition.bytes for partition in self.partitions if partition.bytes is not None]
        return sum(known) if len(known) == len(self.partitions) else None

    @property
    def offsets(self) -> int:
        """How many offsets its log has, as far as it is known. Markers of transactions and compacted records are among
        them."""
        return sum(
            partition.end - (partition.earliest or 0) for partition in self.partitions if partition.end is not None
        )

    @property
    def under_replicated(self) -> int:
        return sum(len(partition.in_sync) < len(partition.replicas) for partition in self.partitions)

    @property
    def under_min_in_sync(self) -> int | None:
        if self.min_in_sync is None:
            return None
        return sum(len(partition.in_sync) < self.min_in_sync for partition in self.partitions)


def names(log: Log, *, internal: bool = False) -> dict[str, list[Partition]]:
    """Every topic -> its partitions. Kafka's own begin with two underscores."""
    by_topic: dict[str, list[Partition]] = defaultdict(list)
    for partition in log.cluster().partitions:
        if internal or not partition.topic.startswith("__"):
            by_topic[partition.topic].append(partition)
    return dict(sorted(by_topic.items()))


def describe(log: Log, topics: Iterable[str], disks: Mapping[int, Disk] | None = None) -> list[TopicView]:
    """These topics, with what is on the brokers' disks if that is given; a ``SourceError`` names one that is not
    there."""
    wanted = sorted(set(topics))
    ids = log.partitions_of(wanted)
    partitions = {partition.tp: partition for partition in log.cluster().partitions}
    # A question about a partition without a leader has no answer, and would take the others' with it.
    led = [tp for tp in ids if partitions[tp].leader >= 0]
    offsets, stable = log.offsets(led), log.stable_ends(led)
    configs = log.admin.topic_configs(wanted)

    def view(topic: str) -> TopicView:
        tps = [tp for tp in ids if tp.topic == topic]
        replicas = [partition for partition in partitions.values() if partition.topic == topic]
        return TopicView(
            topic,
            ids[tps[0]],
            tuple(_partition(partitions[tp], offsets.get(tp), stable.get(tp), disks or {}) for tp in tps),
            _set(configs.get(topic)),
            _min_in_sync(configs[topic]) if topic in configs else None,
            None if disks is None else bytes_of(replicas, disks),
        )

    return [view(topic) for topic in wanted]


def _partition(
    partition: Partition, offsets: tuple[int, int] | None, stable: int | None, disks: Mapping[int, Disk]
) -> PartitionView:
    earliest, end = offsets or (None, None)
    if end is not None and stable is not None:
        end = max(end, stable)  # they are asked one after the other
    leader, size = partition.leader, size_of(partition, disks)
    return PartitionView(
        partition.partition, leader, partition.replicas, partition.in_sync, earliest, stable, end, size
    )


def size_of(partition: Partition, disks: Mapping[int, Disk]) -> int | None:
    """Of its leader's log."""
    disk = disks.get(partition.leader)
    return None if disk is None else disk.sizes.get(partition.tp)


def bytes_of(partitions: Iterable[Partition], disks: Mapping[int, Disk]) -> int | None:
    """Of all replicas on brokers that answered; None if no broker did."""
    if all(disk.used_bytes is None for disk in disks.values()):
        return None
    tps = {partition.tp for partition in partitions}
    return sum(disk.sizes.get(tp, 0) for disk in disks.values() for tp in tps)


def config(log: Log, topic: str) -> dict[str, str] | None:
    """What is set for the topic itself; None where the user may not describe it."""
    return _set(log.admin.topic_configs([topic]).get(topic))


def min_in_sync(log: Log, topics: Iterable[str]) -> dict[str, int]:
    """min.insync.replicas of each that the user may describe, be it set or the brokers' default."""
    return {topic: _min_in_sync(entries) for topic, entries in log.admin.topic_configs(topics).items()}


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
