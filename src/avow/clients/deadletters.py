"""Dead letters of a plain consumer, in a topic: messages have the format of the Kafka sink's dead letters.

Owns: sending them, and creating the topic. Must not know: why. Neighbours: ``sinks.kafka.dead_letters`` (the format)
and ``consumer``, which moves a position past a record only when its dead letter is acknowledged by all in-sync
replicas.
"""

from __future__ import annotations

from dataclasses import replace

import confluent_kafka as client
from confluent_kafka import KafkaError

from avow.clients.records import Record
from avow.errors import ConfigError, SinkError, first_line
from avow.kafka.admin import Admin
from avow.kafka.connect import Connection, flushed
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter
from avow.sinks.kafka import dead_letters
from avow.sinks.kafka.clients import MESSAGE_BYTES_MAX
from avow.sinks.kafka.config import dead_letter_topic

PATIENCE_S = 60.0
DETAIL_MAX = 2_000  # characters
REASON = "handler-failed"


def dead_letter_of(record: Record, error: BaseException) -> DeadLetter:
    """What is kept of a record, and of the error: its kind and its first line."""
    detail = text_of(error)[:DETAIL_MAX]
    return DeadLetter(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp_ms,
        record.key,
        record.value,
        list(record.headers),
        REASON,
        detail,
    )


def text_of(error: BaseException) -> str:
    """The error's kind and its first line, as text that can be sent and stored, whatever the handler has raised."""
    try:
        message = first_line(error)
    except Exception as unspeakable:  # noqa: BLE001 - it is the handler's own
        message = f"its message cannot be read: {type(unspeakable).__name__}"
    return f"{type(error).__name__}: {message}".encode(errors="backslashreplace").decode()


class DeadLetterTopic:
    """The dead-letter topic of one group."""

    def __init__(self, pipeline: PipelineConfig, connection: Connection) -> None:
        self.topic = dead_letter_topic(pipeline)
        rights = ("Create", "Write", "Describe", "DescribeConfigs")
        self._connection = replace(connection, error=SinkError, topics=[self.topic], rights=rights)
        own = {"enable.idempotence": True, "acks": "all", "message.max.bytes": MESSAGE_BYTES_MAX, "linger.ms": 0}
        self._producer = self._connection.make_client(client.Producer, own)
        self._bytes_max = MESSAGE_BYTES_MAX
        # Compacted, and as large as the largest record that can come: a dead letter stays.
        config = {"cleanup.policy": "compact", "max.message.bytes": str(MESSAGE_BYTES_MAX)}
        with Admin(self._connection, timeout_s=PATIENCE_S) as admin:
            partitions = admin.cluster().partitions
            # As many replicas as the source topics have: a dead letter must be as durable as its record.
            sources = (partition for partition in partitions if partition.topic in pipeline.source.topics)
            replicas = max((len(partition.replicas) for partition in sources), default=-1)
            exists = any(partition.topic == self.topic for partition in partitions)
            if exists or not admin.create_topic(self.topic, 1, replicas, config):
                self._bytes_max = min(MESSAGE_BYTES_MAX, self._max_message_bytes(admin))

    def _max_message_bytes(self, admin: Admin) -> int:
        config = admin.topic_configs([self.topic]).get(self.topic)
        if config is None:
            denied = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
            raise self._connection.translate(f"describe the configuration of topic {self.topic}", denied)
        limit = int(str(config["max.message.bytes"].value))
        if limit < dead_letters.LEAST_BYTES:
            raise ConfigError(
                f"dead_letters: topic {self.topic} has max.message.bytes = {limit}, too small even for a shortened "
                "dead letter",
                advice=f"Raise it to {dead_letters.LEAST_BYTES:,} or more, or name another topic.",
            )
        return limit

    def send(self, dead: DeadLetter) -> None:
        """Returns when all replicas in sync have it."""
        error = self._send(dead, self._bytes_max)
        if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            # The topic's max.message.bytes was lowered, or compression made the message larger.
            error = self._send(dead, dead_letters.LEAST_BYTES)
        if error is not None:
            raise self._connection.translate(f"write a dead letter to {self.topic}", error)

    def _send(self, dead: DeadLetter, bytes_max: int) -> KafkaError | None:
        outcome: list[KafkaError | None] = []
        value, headers = dead_letters.message(dead, bytes_max)
        with self._connection.translate_errors(f"write a dead letter to {self.topic}"):
            self._producer.produce(
                self.topic,
                value,
                dead_letters.key(dead),
                headers=headers,
                on_delivery=lambda error, _: outcome.append(error),
            )
            flushed(self._producer, PATIENCE_S)
        return outcome[0] if outcome else KafkaError(KafkaError._TIMED_OUT)
