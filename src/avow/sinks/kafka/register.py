"""Which partitions a pipeline has begun to read, where Kafka does not forget it.

Kafka drops a group's positions when a topic is deleted, and when nobody has committed for offsets.retention.minutes. A
pipeline that found none would begin anew, and double what is in the output. So the first position of a partition is
also written into the dead-letter topic, which is compacted and never expires, in the same transaction. A partition that
stands there and has no position in the group has lost it: a run stops, by name.

The records also say whose topic it is. Letters do not, and their keys are the records' own identities: two pipelines
would overwrite each other's, and take them for their own. So a topic has one pipeline, and any other is refused.

Owns: these records. Must not know: transactions. Its neighbours are ``store``, which writes them, and ``letters``, with
whom they share the topic.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Message

from avow.errors import AvowError, ConfigError, TopicRecreated
from avow.kafka.log import TopicPartition
from avow.sinks.kafka.clients import Clients

PREFIX = "avow-began/"


@dataclass(frozen=True, slots=True)
class Began:
    topic_id: str
    start: int


def message(where: TopicPartition, began: Began, pipeline: str) -> tuple[str, bytes]:
    """Key and value."""
    said = {"topic_id": began.topic_id, "start": began.start, "pipeline": pipeline}
    return f"{PREFIX}{where}", json.dumps(said).encode()


def read(clients: Clients, topic: str) -> dict[TopicPartition, Began]:
    found = {}
    for record in clients.committed_records(topic):
        refuse_foreign(record, clients.group)
        if (one := _read(record)) is not None:
            where, said = one
            found[where] = Began(said["topic_id"], said["start"])
    return found


def refuse_foreign(record: Message, pipeline: str) -> None:
    """Stop at a record that says the topic is another pipeline's. Earlier versions did not say it."""
    found = _read(record)
    if found is None or (owner := found[1].get("pipeline", pipeline)) == pipeline:
        return
    raise ConfigError(
        f"the dead-letter topic {record.topic()} is pipeline {owner}'s, which has begun to read {found[0]}",
        advice=f"Give {pipeline} one of its own: without sink.dead_letter_topic it is {pipeline}.dead-letters.",
    )


def _read(record: Message) -> tuple[TopicPartition, dict[str, Any]] | None:
    """What one of these records says; None if it is another one."""
    key, value = record.key(), record.value()
    text = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
    if not text.startswith(PREFIX) or value is None:
        return None
    name, _, number = text.removeprefix(PREFIX).rpartition("/")
    return TopicPartition(name, int(number)), json.loads(value)


def lost(where: TopicPartition, began: Began, topic_id: str) -> AvowError:
    """Why a partition that was begun has no position."""
    if began.topic_id != topic_id:
        return TopicRecreated(
            f"topic-recreated: {where} was read as topic id {began.topic_id}, but the topic now has id {topic_id}",
            advice="It was deleted and made again, so its offsets mean other records. Give the pipeline a new name and "
            "a new output to read the new topic from its declared start.",
        )
    return ConfigError(
        f"the position of {where} is gone from the group, and the output holds what was delivered before",
        advice="Kafka forgets positions that nobody has committed for offsets.retention.minutes, and those of a group "
        "that is deleted. The output's last records carry avow-origin: with it, begin under a new name with "
        f"source.start at the offsets after them. If the output has no record of {where}, its start is {began.start}.",
    )
