"""Output records into a producer's queue, all of them: where it is full, wait until there is room.

There are two ways. One record after the other through the client, or columns by avow-native, which is used where it is
loaded and knows the client. What is sent is the same. With avow-native failed deliveries are not reported, so it is
for a transaction's producer alone: there, a failed delivery makes the commit fail.

Owns: handing over, and how long that may take. Must not know: what an act is, how a row becomes a record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer

from avow import native
from avow.sinks.kafka.clients import PATIENCE_S
from avow.sinks.kafka.messages import ORIGIN, Messages

if TYPE_CHECKING:
    from avow_native.produce import Produce, Records

POLL_S = 0.01


def send_all(producer: Producer, messages: Messages, unkeyed: Mapping[str, int], *, in_transaction: bool) -> None:
    """Every message that is not refused. ``unkeyed``: of each topic the partition of records without a key. Raises
    ``KafkaException`` for one that the client does not take; those before it are in its queue."""
    sender = native_sender(producer) if in_transaction else None
    records = _records(messages, unkeyed) if sender is not None else None
    if sender is not None and records is not None:
        _send_natively(sender, producer, records)
    else:
        _send_each(producer, messages, unkeyed)
    producer.poll(0)


def native_sender(producer: Producer) -> Produce | None:
    """avow-native, if it can be used with this producer."""
    if (library := native.library()) is None:
        return None
    from avow_native.produce import bind

    sender = bind(library)
    return None if sender is None or sender.handle(producer) is None else sender


def _records(messages: Messages, unkeyed: Mapping[str, int]) -> Records | None:
    """The columns for avow-native; None for what it does not send."""
    from avow_native.produce import Origin, Records

    headers = messages.headers if messages.has_headers else None
    if messages.redriven or (
        headers is not None and (headers.values.null_count or headers.values.field("key").null_count)
    ):
        return None
    routes, origins = messages.routes.copy(), messages.origins
    routes[list(messages.refused)] = -1
    return Records(
        messages.topics,
        [unkeyed[topic] for topic in messages.topics],
        routes,
        messages.keys,
        messages.values,
        headers,
        messages.timestamps_ms,
        Origin(ORIGIN, origins.prefix, origins.offsets) if origins is not None else None,
    )


def _send_natively(sender: Produce, producer: Producer, records: Records) -> None:
    row, deadline = -1, 0.0
    while (sent := sender.produce(producer, records, max(row, 0))).error:
        if sent.error != KafkaError._QUEUE_FULL:
            why = KafkaError(sent.error).str()
            raise KafkaException(KafkaError(sent.error, f"Unable to produce message: {why}"))
        if sent.row > row:
            row, deadline = sent.row, time.monotonic() + PATIENCE_S
        elif time.monotonic() > deadline:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        producer.poll(POLL_S)


def _send_each(producer: Producer, messages: Messages, unkeyed: Mapping[str, int]) -> None:
    produce, refused, by_key = producer.produce, messages.refused, -1
    columns = zip(
        messages.topic_list(),
        messages.keys.to_pylist(),
        messages.values.to_pylist(),
        messages.header_lists(),
        messages.timestamps_ms.tolist(),
        strict=True,
    )
    for row, (topic, key, value, headers, stamp) in enumerate(columns):
        if row in refused:
            continue
        assert topic is not None
        to = by_key if key is not None else unkeyed[topic]
        try:
            produce(topic, value, key, to, headers=headers, timestamp=stamp)
        except BufferError:
            send(producer, topic, value, key, to, headers=headers, timestamp=stamp)


def send(producer: Producer, *message: object, **more: object) -> None:
    """As ``Producer.produce``, in a queue that is probably full."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        producer.poll(POLL_S)
        try:
            return producer.produce(*message, **more)  # type: ignore[arg-type]
        except BufferError:
            if time.monotonic() > deadline:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
