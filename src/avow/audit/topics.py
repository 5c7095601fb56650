"""Whether a topic lets records go: under compaction, a row without a record proves nothing.

Owns: that question. Must not know: the sink. Its neighbour is ``avow.kafka.log``, which asks Kafka all else.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from avow.errors import SourceError
from avow.kafka.metadata import QUIET
from avow.settings import Source, revealed

TIMEOUT_S = 15


def compacted(source: Source, topics: Iterable[str]) -> frozenset[str]:
    """Of these topics, those that are compacted."""
    settings: dict[str, str | int | float | bool] = {**revealed(source.kafka), "bootstrap.servers": source.brokers}
    client = AdminClient(settings, logger=QUIET)
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in sorted(set(topics))]
    if not resources:
        return frozenset()
    asked = client.describe_configs(resources, request_timeout=TIMEOUT_S)
    try:
        answers = {resource.name: future.result(TIMEOUT_S + 1) for resource, future in asked.items()}
    except (KafkaException, TimeoutError) as error:
        raise SourceError(
            f"Kafka does not say whether the topics are compacted: {error}",
            advice="Give the pipeline's user the right to describe the configuration of its topics.",
        ) from error
    return frozenset(topic for topic, config in answers.items() if "compact" in config["cleanup.policy"].value)
