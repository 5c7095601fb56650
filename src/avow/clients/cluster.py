"""A producer's queries to the cluster, and the cluster's errors translated into avow's.

Owns: those queries. Must not know: sends. Its neighbour is ``producer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from confluent_kafka import KafkaError, KafkaException

from avow.clients.durability import TopicFacts
from avow.errors import AvowError, ConfigError, SourceError, Superseded
from avow.kafka.admin import Admin
from avow.kafka.connect import Connection, words

# Of one request to the cluster: long enough for a coordinator or a leader to be replaced.
PATIENCE_S = 60.0

# Errors of a producer whose transactional id another producer has taken.
FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})


def connect(bootstrap_servers: str, config: Mapping[str, str], topic: str = "TOPIC") -> Connection:
    """A producer's."""
    return Connection(bootstrap_servers, config, key="config", topics=[topic], rights=("Write", "Describe"))


def facts(connection: Connection, topic: str, timeout_s: float = PATIENCE_S) -> TopicFacts | None:
    """The topic's replicas and min.insync.replicas. None if the topic does not exist."""
    with Admin(connection, timeout_s=timeout_s) as admin:
        # All of them: asked about one that does not exist, a broker may create it.
        partitions = [partition for partition in admin.cluster().partitions if partition.topic == topic]
        if not partitions:
            return None
        config = admin.topic_configs([topic]).get(topic)
    if config is None:
        denied = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        raise replace(connection, rights=["DescribeConfigs"]).translate(f"describe topic {topic}", denied)
    return TopicFacts(
        topic,
        len(partitions),
        min(len(partition.replicas) for partition in partitions),
        min(len(partition.in_sync) for partition in partitions),
        int(str(config["min.insync.replicas"].value)),
    )


def in_sync_problem(connection: Connection, topic: str) -> str:
    """Why a topic cannot be written with acks=all; empty if no reason is known."""
    problem = None
    with suppress(SourceError, ConfigError):
        problem = facts(connection, topic, timeout_s=5)
    if problem is None or problem.in_sync >= problem.needed:
        return ""
    return (
        f"Topic {problem.name} has {problem.in_sync} of {problem.replicas} replicas in sync, and "
        f"min.insync.replicas is {problem.min_in_sync}: restart the missing brokers, or lower min.insync.replicas."
    )


@contextmanager
def translate_errors(connection: Connection, action: str) -> Iterator[None]:
    """As the connection does; a producer that was fenced is superseded."""
    with connection.translate_errors(action):
        try:
            yield
        except KafkaException as error:
            if error.args[0].code() in FENCED:
                raise superseded(f"This one could not {action}: {connection.redact(words(error.args[0]))}") from None
            raise


def superseded(why: str) -> AvowError:
    return Superseded(
        f"another producer with the same transactional.id has taken over. {why}",
        advice="Give each concurrent producer its own transactional.id or import name. This one's open transaction "
        "was aborted.",
    )
