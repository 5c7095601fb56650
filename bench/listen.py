"""Kafka alone: a consumer that does nothing with what it gets, and says when it got it.

Run as a process of its own by ``consumer``: ``python -m bench.listen BROKERS TOPIC``. It prints a line for each
handful: the time, and the highest offset of each partition. It fetches as the consumer engine does.
"""

from __future__ import annotations

import json
import sys
import time

from confluent_kafka import Consumer, TopicPartition

from avow.kafka.reader import FETCH, FIXED
from bench.records import PARTITIONS

TAKE = 1_000


def main(brokers: str, topic: str) -> None:
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": "bench-listen", **FETCH, **FIXED})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    highest = [-1] * PARTITIONS
    while True:
        first = consumer.poll(1)
        if first is None:
            continue
        for message in [first, *consumer.consume(TAKE, 0)]:
            if message.error() is None:
                highest[message.partition()] = message.offset()  # type: ignore[index, assignment]
        print(json.dumps([time.monotonic(), highest]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
