"""Topics as people ask about them: leaders, replicas in sync, what is configured, how much there is.

Owns: these answers. Must not know: pipelines, sinks. Neighbours: ``metadata`` (replicas) and ``log`` (offsets).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource, ConfigSource, ResourceType  # type: ignore[attr-defined]

from avow.errors import SourceError
from avow.kafka.log import Log, TopicPartition
from avow.kafka.metadata import Partition
from avow.settings import Source

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition, with its offsets."""

    partition: int
    leader: int  # -1: none
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    earliest: int
    stable_end: int  # a reader of committed records gets so far
    end: int

    @property
    def open_offsets(self) -> int:
        """Offsets behind the beginning of a transaction that is still open."""
        return self.end - self.stable_end


@dataclass(frozen=True, slots=True)
class TopicView:
    """One topic."""

    name: str
    topic_id: str
    partitions: tuple[PartitionView, ...]
    config: dict[str, str]  # what is set for this topic; the rest is the brokers' default

    @property
    def offsets(self) -> int:
        """How many offsets its log has. Markers of transactions and compacted records are among them."""
        return sum(one.end - one.earliest for one in self.partitions)

    @property
    def under_replicated(self) -> int:
        return sum(len(one.in_sync) < len(one.replicas) for one in self.partitions)


def names(source: Source, *, internal: bool = False) -> dict[str, list[Partition]]:
    """Every topic -> its partitions. Kafka's own begin with two underscores."""
    found: dict[str, list[Partition]] = defaultdict(list)
    with Log(source, "avow") as log:
        for partition in log.cluster().partitions:
            if internal or not partition.topic.startswith("__"):
                found[partition.topic].append(partition)
    return dict(sorted(found.items()))


def describe(source: Source, topics: Iterable[str]) -> list[TopicView]:
    """These topics; a ``SourceError`` names one that is not there."""
    wanted = source.model_copy(update={"topics": tuple(sorted(set(topics))), "topics_pattern": None})
    with Log(wanted, "avow") as log:
        ids = log.partitions()
        offsets, stable = log.offsets(ids), log.stable_ends(ids)
        there = {TopicPartition(one.topic, one.partition): one for one in log.cluster().partitions}
        config = _config(log, wanted.topics)
    return [
        TopicView(
            topic,
            next(topic_id for where, topic_id in ids.items() if where.topic == topic),
            tuple(
                PartitionView(
                    where.partition,
                    there[where].leader,
                    there[where].replicas,
                    there[where].in_sync,
                    offsets[where][0],
                    stable[where],
                    max(offsets[where][1], stable[where]),  # they are asked one after the other
                )
                for where in ids
                if where.topic == topic
            ),
            config[topic],
        )
        for topic in wanted.topics
    ]


def _config(log: Log, topics: Iterable[str]) -> dict[str, dict[str, str]]:
    """What is set for the topics themselves."""
    resources = {topic: ConfigResource(ResourceType.TOPIC, topic) for topic in topics}
    try:
        asked = log.admin.describe_configs(list(resources.values()), request_timeout=TIMEOUT_S)
        return {
            topic: {
                name: entry.value
                for name, entry in sorted(asked[resource].result(TIMEOUT_S).items())
                if entry.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value and not entry.is_sensitive
            }
            for topic, resource in resources.items()
        }
    except KafkaException as error:
        raise SourceError(f"the topics' configuration cannot be had: {error.args[0].str()}") from None
