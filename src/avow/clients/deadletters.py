"""Records that a plain consumer's handler could not handle, in a topic: the form is that of the Kafka sink's letters.

Owns: sending them, and that the topic is there. Must not know: why. Neighbours: ``sinks.kafka.letters`` (the form) and
``consumer``, which lets a position pass a record only when its letter is acknowledged by all replicas in sync.
"""

from __future__ import annotations

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from avow.clients.member import Record
from avow.errors import ConfigError, first_line
from avow.kafka.connect import flushed, made, settings_of
from avow.kafka.log import Log
from avow.settings import PipelineConfig, revealed
from avow.sinks.base import DeadLetter
from avow.sinks.kafka import letters
from avow.sinks.kafka.clients import MESSAGE_BYTES_MAX, as_ours
from avow.sinks.kafka.config import dead_letter_topic

PATIENCE_S = 60.0
DETAIL_MAX = 2_000  # letters
REASON = "handler-failed"


def letter(record: Record, error: BaseException) -> DeadLetter:
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
        said = first_line(error)
    except Exception as unspeakable:  # noqa: BLE001 - it is the handler's own
        said = f"its text cannot be had: {type(unspeakable).__name__}"
    return f"{type(error).__name__}: {said}".encode(errors="backslashreplace").decode()


class LetterBox:
    """The dead-letter topic of one group."""

    def __init__(self, pipeline: PipelineConfig, log: Log) -> None:
        self.topic = dead_letter_topic(pipeline)
        given = revealed(pipeline.source.kafka)
        own = {"enable.idempotence": True, "acks": "all", "message.max.bytes": MESSAGE_BYTES_MAX, "linger.ms": 0}
        self._producer = made(client.Producer, settings_of(pipeline.source) | own, given)
        # Compacted, and as large as the largest record that can come: a letter stays.
        config = {"cleanup.policy": "compact", "max.message.bytes": str(MESSAGE_BYTES_MAX)}
        self._bytes_max = MESSAGE_BYTES_MAX
        with as_ours(f"the making of topic {self.topic}"):
            there = log.admin.list_topics(timeout=PATIENCE_S).topics
            if self.topic in there:
                self._bytes_max = min(MESSAGE_BYTES_MAX, self._takes(log))
                return
            sources = [there[name] for name in pipeline.source.topics if name in there]
            # As many replicas as the records themselves have: a letter is no less dear.
            replicas = max((len(one.replicas) for source in sources for one in source.partitions.values()), default=-1)
            asked = log.admin.create_topics([NewTopic(self.topic, 1, replicas, config=config)], operation_timeout=30)
            try:
                asked[self.topic].result(PATIENCE_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # somebody else was quicker
                    raise

    def _takes(self, log: Log) -> int:
        resource = ConfigResource(ResourceType.TOPIC, self.topic)
        asked = log.admin.describe_configs([resource], request_timeout=PATIENCE_S)
        found = int(str(asked[resource].result(PATIENCE_S)["max.message.bytes"].value))
        if found < letters.LEAST_BYTES:
            raise ConfigError(
                f"dead_letters: topic {self.topic} has max.message.bytes = {found}: not even a shortened letter fits",
                advice=f"Raise it to {letters.LEAST_BYTES:,} or more, or name another topic.",
            )
        return found

    def send(self, dead: DeadLetter) -> None:
        """Ends when it is kept."""
        try:
            self._send(dead, self._bytes_max)
        except _TooLarge:
            # Somebody has lowered what the topic takes, or compression made it larger.
            self._send(dead, letters.LEAST_BYTES)

    def _send(self, dead: DeadLetter, bytes_max: int) -> None:
        failed: list[KafkaError | None] = []
        value, headers = letters.message(dead, bytes_max)
        with as_ours(f"the keeping of a dead letter in {self.topic}"):
            self._producer.produce(
                self.topic, value, letters.key(dead), headers=headers, on_delivery=lambda error, _: failed.append(error)
            )
            flushed(self._producer, PATIENCE_S)
            if not failed:
                raise TimeoutError
            if (
                failed[0] is not None
                and failed[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
                and bytes_max > letters.LEAST_BYTES
            ):
                raise _TooLarge
            if failed[0] is not None:
                raise KafkaException(failed[0])


class _TooLarge(Exception):
    """The topic does not take it."""
