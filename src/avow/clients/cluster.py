"""What a producer asks of the cluster beside sending, and the cluster's errors as ours.

Owns: those questions. Must not know: sends. Its neighbour is ``producer``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from avow.clients.durability import TopicFacts
from avow.errors import AvowError, ConfigError, SourceError, Superseded
from avow.kafka.connect import grant, is_permanent, made, settings_at, strike, unless_refused, words

# Of one request to the cluster: long enough for a coordinator or a leader to be replaced.
PATIENCE_S = 60.0

# What a producer hears when another one has taken its transactional id.
FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})


def facts(brokers: str, given: Mapping[str, str], topic: str, timeout_s: float = PATIENCE_S) -> TopicFacts | None:
    """What decides about a topic's records beside the producer. None if there is no such topic."""
    complaints: deque[KafkaError] = deque(maxlen=100)
    admin = made(AdminClient, settings_at(brokers, given) | {"error_cb": complaints.append}, given, "kafka")
    resource = ConfigResource(ResourceType.TOPIC, topic)
    with as_ours(f"the describing of topic {topic}", given):
        # All of them: asked about one that is not there, a broker may make it.
        listed = unless_refused(admin, complaints, timeout_s + 1, lambda: admin.list_topics(timeout=timeout_s))
        found = listed.topics.get(topic)
        if found is None or not found.partitions:
            return None
        config = admin.describe_configs([resource], request_timeout=timeout_s)[resource].result(timeout_s)
    parts = found.partitions.values()
    return TopicFacts(
        topic,
        len(parts),
        min(len(part.replicas) for part in parts),
        min(len(part.isrs) for part in parts),
        int(config["min.insync.replicas"].value),
    )


def in_sync_problem(brokers: str, given: Mapping[str, str], topic: str) -> str:
    """What keeps a topic from being written with acks all; empty if nothing is known that does."""
    found = None
    with suppress(SourceError, ConfigError):
        found = facts(brokers, given, topic, timeout_s=5)
    if found is None or found.in_sync >= found.needed:
        return ""
    return (
        f"Topic {found.name} has {found.in_sync} of {found.replicas} replicas in sync, and "
        f"min.insync.replicas is {found.min_in_sync}: bring its brokers back, or lower that."
    )


@contextmanager
def as_ours(what: str, given: Mapping[str, str]) -> Iterator[None]:
    """An error of Kafka's is told as ours. ``given`` are the user's settings, of which nothing is shown."""
    try:
        yield
    except KafkaException as error:
        said = f"Kafka did not do {what}: {strike(given.values(), words(error.args[0]))}"
        if is_permanent(error.args[0]):
            raise ConfigError(
                said, advice=grant(error.args[0], "the client's settings", rights=("Write", "Describe"))
            ) from None
        if error.args[0].code() in FENCED:
            raise superseded(said) from None
        raise SourceError(said, advice="Check that the brokers answer.") from None
    except TimeoutError:
        raise SourceError(f"Kafka did not do {what} in time", advice="Check that the brokers answer.") from None


def superseded(why: str) -> AvowError:
    return Superseded(
        f"another producer of the same name has taken over. {why}",
        advice="Two that run at once need two names. What this one had not committed is gone.",
    )
