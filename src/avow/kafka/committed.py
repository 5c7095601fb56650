"""What a group has committed, asked as a consumer of its name that never subscribes: the group sees no member.

librdkafka's admin client has a request for this, and it must not be used: when the coordinator of the group has just
moved, the whole process ends with a segmentation fault (librdkafka 2.16, its issue 5040). `avow prove` died of it.

Owns: that question. Must not know: what the positions mean. Its neighbours are ``log``, ``groups`` and the Kafka sink.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.kafka.connect import made

PAUSE_S = 0.05
FIRST_TRY_S = 0.25  # of a stable reader
AT_ONCE = 16  # partitions that it is asked for side by side, each alone
# The reader looks for the new coordinator by itself, but does not ask it again.
MOVED = (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)


def reader(
    settings: Mapping[str, Any],
    group: str,
    given: Mapping[str, str] = MappingProxyType({}),
    *,
    stable: bool = False,
    key: str = "source.kafka",
) -> client.Consumer:
    """To be closed. ``given`` and ``key`` as ``connect.made`` has them. ``stable``: a position that an open transaction
    is about to change is waited for."""
    own = {
        "group.id": group,
        "enable.auto.commit": "false",
        "isolation.level": "read_committed" if stable else "read_uncommitted",
    }
    return made(client.Consumer, {**settings, **own}, given, key)


def committed(
    reader: client.Consumer, timeout_s: float, partitions: Iterable[client.TopicPartition] | None = None
) -> list[client.TopicPartition]:
    """The positions of the reader's group, in these partitions or in all there are. No item where it has none."""
    deadline = time.monotonic() + timeout_s
    asked = list(_all(reader, timeout_s) if partitions is None else partitions)
    while True:
        try:
            found = reader.committed(asked, timeout=max(0.1, deadline - time.monotonic())) if asked else []
            for one in found:
                if one.error is not None:
                    raise KafkaException(one.error)
        except KafkaException as error:
            if error.args[0].code() not in MOVED or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
        else:
            return [one for one in found if one.offset >= 0]


def settled(
    reader: client.Consumer, timeout_s: float, partitions: Iterable[client.TopicPartition]
) -> tuple[list[client.TopicPartition], list[client.TopicPartition]]:
    """As ``committed``, of a stable reader; and beside it the partitions whose position was about to change all the
    time, or of which nobody has said anything.

    To a question about many partitions there is no answer while one of them is about to change: with several busy
    writers that is nearly always. Those that are asked for alone settle one after the other.
    """
    deadline = time.monotonic() + timeout_s
    left, found, try_s = list(partitions), [], min(FIRST_TRY_S, timeout_s)
    answer = _in_time(reader, try_s, left)
    if answer is not None:
        return answer, []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while left and time.monotonic() < deadline:
            try_s = min(try_s, deadline - time.monotonic())
            answers = pool.map(lambda one, wait_s=try_s: _in_time(reader, wait_s, [one]), left)
            told = list(zip(left, answers, strict=True))
            found += [one for _, answer in told for one in answer or ()]
            left = [one for one, answer in told if answer is None]
            try_s *= 2
    return found, left


def _in_time(
    reader: client.Consumer, timeout_s: float, partitions: list[client.TopicPartition]
) -> list[client.TopicPartition] | None:
    try:
        return committed(reader, timeout_s, partitions)
    except KafkaException as error:
        if error.args[0].code() not in (KafkaError._TIMED_OUT, *MOVED):
            raise
        return None


def _all(reader: client.Consumer, timeout_s: float) -> list[client.TopicPartition]:
    topics = reader.list_topics(timeout=timeout_s).topics
    return [client.TopicPartition(name, number) for name, topic in topics.items() for number in topic.partitions]
