"""Start records: which partitions a pipeline has begun to read, where Kafka does not expire it.

Kafka drops a group's positions when a topic is deleted, and when nobody has committed for offsets.retention.minutes. A
pipeline that found none would begin anew, and double what is in the output. So the first position of a partition is
also written into the dead-letter topic, which is compacted and never expires, in the same transaction. A partition that
stands there and has no position in the group has lost it: a run stops, by name.

The records also say whose topic it is. Dead letters do not, and their keys are the records' own identities: two
pipelines would overwrite each other's, and take them for their own. So a topic has one
pipeline, and any other is refused.

Owns: these records. Must not know: transactions. Its neighbours are ``driver``, which writes them, and
``dead_letters``, which are in the same topic.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Message

from avow.errors import AvowError, ConfigError, TopicRecreated
from avow.kafka.log import TopicPartition
from avow.sinks.kafka.clients import KafkaClients

PREFIX = "avow-began/"


@dataclass(frozen=True, slots=True)
class StartRecord:
    topic_id: str
    start: int


def message(tp: TopicPartition, start: StartRecord, pipeline: str) -> tuple[str, bytes]:
    """Key and value."""
    value = {"topic_id": start.topic_id, "start": start.start, "pipeline": pipeline}
    return f"{PREFIX}{tp}", json.dumps(value).encode()


def read(clients: KafkaClients, topic: str) -> dict[TopicPartition, StartRecord]:
    started = {}
    for record in clients.committed_records(topic):
        refuse_foreign(record, clients.group)
        if (parsed := _read(record)) is not None:
            tp, value = parsed
            started[tp] = StartRecord(value["topic_id"], value["start"])
    return started


def refuse_foreign(record: Message, pipeline: str) -> None:
    """Stop at a record that says the topic is another pipeline's. Earlier versions did not say it."""
    parsed = _read(record)
    if parsed is None or (owner := parsed[1].get("pipeline", pipeline)) == pipeline:
        return
    raise ConfigError(
        f"the dead-letter topic {record.topic()} belongs to pipeline {owner}, which reads {parsed[0]}",
        advice=f"Give {pipeline} its own dead-letter topic: without sink.dead_letter_topic it is "
        f"{pipeline}.dead-letters.",
    )


def _read(record: Message) -> tuple[TopicPartition, dict[str, Any]] | None:
    """What one of these records says; None if it is another one."""
    key, value = record.key(), record.value()
    text = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
    if not text.startswith(PREFIX) or value is None:
        return None
    name, _, number = text.removeprefix(PREFIX).rpartition("/")
    return TopicPartition(name, int(number)), json.loads(value)


def lost(tp: TopicPartition, start: StartRecord, topic_id: str) -> AvowError:
    """Why a partition that was begun has no position."""
    if start.topic_id != topic_id:
        return TopicRecreated(
            f"topic-recreated: {tp} was read as topic id {start.topic_id}, but the topic now has id {topic_id}",
            advice="The topic was deleted and recreated, so its offsets mean other records. Give the pipeline a new "
            "name and a new output to read the new topic from its declared start.",
        )
    return ConfigError(
        f"the position of {tp} is gone from the consumer group, but the output has records delivered before",
        advice="Kafka deletes positions that were not committed for offsets.retention.minutes, and those of a deleted "
        "group. Read avow-origin of the output's last records, and start under a new name with "
        f"source.start at the offsets after them. If the output has no record of {tp}, its start is {start.start}.",
    )
