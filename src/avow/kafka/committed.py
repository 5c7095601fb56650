"""A group's committed offsets, read by a consumer of that group that never subscribes and so never joins it.

librdkafka's admin client has a request for this, and it must not be used: when the coordinator of the group has just
moved, the whole process ends with a segmentation fault (librdkafka 2.16, its issue 5040). `avow prove` found it.

Owns: that query. Must not know: what the positions mean. Its neighbours are ``admin`` and the Kafka sink.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.kafka.connect import Connection, is_permanent
from avow.retry import backoff, retry

PAUSE_S = 0.05
FIRST_TRY_S = 0.25
AT_ONCE = 16  # partitions that it is asked for side by side, each alone
# The reader looks for the new coordinator by itself, but does not ask it again.
MOVED = (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)


def reader(
    connection: Connection,
    group: str,
    error_cb: Callable[[KafkaError], object] = lambda _: None,
    *,
    stable: bool = False,
) -> client.Consumer:
    """To be closed. ``stable``: an offset that an open transaction is about to change is waited for."""
    own = {
        "group.id": group,
        "enable.auto.commit": "false",
        "isolation.level": "read_committed" if stable else "read_uncommitted",
        "error_cb": error_cb,
    }
    return connection.make_client(client.Consumer, own)


def committed(
    reader: client.Consumer, timeout_s: float, partitions: Iterable[client.TopicPartition] | None = None
) -> list[client.TopicPartition]:
    """The positions of the reader's group, in these partitions or in all there are. No item where it has none."""
    deadline = time.monotonic() + timeout_s
    tps = list(_all(reader, timeout_s) if partitions is None else partitions)
    tries = backoff(FIRST_TRY_S, timeout_s)

    def ask() -> list[client.TopicPartition]:
        wait_s = max(0.1, min(next(tries), deadline - time.monotonic()))
        offsets = reader.committed(tps, timeout=wait_s) if tps else []
        if wrong := next((tp.error for tp in offsets if tp.error is not None), None):
            raise KafkaException(wrong)
        return [tp for tp in offsets if tp.offset >= 0]

    def is_passing(error: Exception) -> bool:
        if error.args[0].code() == KafkaError._TIMED_OUT:
            _raise_refusal(reader)
        return error.args[0].code() in (KafkaError._TIMED_OUT, *MOVED) and time.monotonic() < deadline

    return retry(ask, KafkaException, backoff(PAUSE_S, PAUSE_S), retriable=is_passing)


def _raise_refusal(reader: client.Consumer) -> None:
    """Without a right to the group, the client asks for the coordinator to the end of the time-out and says why only as
    an event of the consumer."""
    event = reader.poll(0)
    if event is not None and (error := event.error()) is not None and is_permanent(error):
        raise KafkaException(error)


def settled(
    reader: client.Consumer, timeout_s: float, partitions: Iterable[client.TopicPartition]
) -> tuple[list[client.TopicPartition], list[client.TopicPartition]]:
    """As ``committed``, of a stable reader; and beside it the partitions whose position was about to change all the
    time, or for which no answer came.

    To a question about many partitions there is no answer while one of them is about to change: with several busy
    writers that is nearly always. Those that are asked for alone settle one after the other.
    """
    deadline = time.monotonic() + timeout_s
    left, results, try_s = list(partitions), [], min(FIRST_TRY_S, timeout_s)
    answer = _in_time(reader, try_s, left)
    if answer is not None:
        return answer, []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while left and time.monotonic() < deadline:
            try_s = min(try_s, deadline - time.monotonic())
            answers = pool.map(lambda result, wait_s=try_s: _in_time(reader, wait_s, [result]), left)
            answered = list(zip(left, answers, strict=True))
            results += [result for _, answer in answered for result in answer or ()]
            left = [result for result, answer in answered if answer is None]
            try_s *= 2
    return results, left


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
