"""A reader of committed records that follows an output topic from its beginning, while faults go on.

In the end it must have seen what a fresh reader finds, each record once and in its order: then it never saw one of a
transaction that was aborted, and missed none. Whether these are the right records is checked by ``check``.

Owns: that reader, and this comparison. Must not know: pipelines, faults, verdicts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from confluent_kafka import Consumer, KafkaException, TopicPartition

from avow.guarantee import Anomaly
from avow.kafka import metadata
from avow.retry import poll_until

Place = tuple[int, int]  # partition and offset, in the output
POLL_S = 0.2


class LiveReader:
    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "prove-follower",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                # Never reset to the beginning: a new leader may not know its end offset yet, so the fetch is retried.
                "auto.offset.reset": "error",
                "reconnect.backoff.max.ms": 500,
            },
            logger=metadata.QUIET,
        )
        self._seen: list[Place] = []
        self._next: dict[int, int] = {}  # partition -> the offset after the last that was seen
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not (self._next or self._ending.is_set()):
                self._begin()
            while not self._ending.is_set():
                self._step()
        finally:
            self._consumer.close()

    def _begin(self) -> None:
        """The topic is made by the pipeline, some time after its start."""
        with suppress(KafkaException):
            topic = self._consumer.list_topics(timeout=5).topics.get(self._topic)
            if topic is not None and topic.partitions:
                self._next = dict.fromkeys(topic.partitions, 0)
                self._assign()
                return
        self._ending.wait(POLL_S)

    def _assign(self) -> None:
        self._consumer.assign([TopicPartition(self._topic, number, at) for number, at in self._next.items()])

    def _step(self) -> None:
        denied = False
        for message in self._consumer.consume(1_000, POLL_S):
            partition, offset, error = message.partition(), message.offset(), message.error()
            if error is not None:
                denied |= not error.retriable()
                continue
            assert partition is not None
            assert offset is not None
            self._seen.append((partition, offset))
            self._next[partition] = offset + 1
        if denied:  # after the last of them, or what came behind it would come again
            self._ending.wait(POLL_S)
            self._assign()

    def anomalies(self, committed: Iterable[Place], patience_s: float) -> dict[str, int]:
        """What it saw otherwise than a fresh reader, which found ``committed``. The last of it may still be coming."""
        expected = set(committed)
        poll_until(lambda: expected <= set(self._seen) or not self._thread.is_alive(), patience_s, every_s=POLL_S)
        return compare(list(self._seen), expected)


def compare(seen: list[Place], expected: set[Place]) -> dict[str, int]:
    """Anomaly -> records."""
    copies = Counter(seen)
    highest: dict[int, int] = {}
    late = 0
    for partition, offset in seen:
        late += offset < highest.get(partition, -1)
        highest[partition] = max(offset, highest.get(partition, -1))
    anomalies = {
        Anomaly.LOST: len(expected - copies.keys()),
        Anomaly.DUPLICATED: sum(count > 1 for count in copies.values()),
        Anomaly.ABORTED_READ: len(copies.keys() - expected),
        Anomaly.REORDERED: late,
    }
    return {str(anomaly): count for anomaly, count in anomalies.items() if count}
