"""avow-native as a producer, without a broker: what it refuses to touch, where it stops, and who hears of a failure."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from avow import native
from avow.kafka.batches import HEADERS, headers_column
from avow.kafka.metadata import QUIET
from avow.sinks.kafka import produce
from avow.sinks.kafka.messages import Messages, Origins
from avow.sinks.kafka.produce import native_sender, send_all

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")


def producer(settings: dict[str, Any] | None = None) -> Producer:
    return Producer({"bootstrap.servers": "127.0.0.1:9", **(settings or {})}, logger=QUIET)


def messages(count: int, *, value: bytes = b"v", headers: pa.Array | None = None) -> Messages:
    values = pa.array([value] * count, pa.binary())
    headers = pa.nulls(count, HEADERS) if headers is None else headers
    numbers = np.arange(count, dtype=np.int64)
    return Messages(["t"], np.zeros(count, np.int32), values, values, headers, numbers, False, Origins("i/0/", numbers))


def records(count: int, **named: Any) -> Any:
    return produce._records(messages(count, **named), {"t": 0})


def test_the_handle_is_the_producers_own() -> None:
    one, other = producer(), producer()
    sender = native_sender(one)
    assert sender is not None
    assert sender.handle(one) != sender.handle(other)
    consumer = Consumer({"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}, logger=QUIET)
    assert sender.handle(consumer) is None  # type: ignore[arg-type]
    consumer.close()
    with pytest.raises(RuntimeError, match="no handle"):
        sender.produce(consumer, records(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client.CLIENT_VERSIONS", ((3, 0), (4, 0))),
        ("client.LIBRARY_VERSIONS", (0x03000000, 0x04000000)),
        ("produce.FUNCTIONS", ("rd_kafka_no_such_function",)),
        ("produce.FUNCTIONS", ("rd_kafka_producev",)),
        ("produce._Records", ctypes.c_int64),
    ],
)
def test_what_is_not_known_is_left_to_python(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    import avow_native.produce as module

    one = producer()
    module.bind.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(f"avow_native.{name}", value)
        assert native_sender(one) is None
    module.bind.cache_clear()
    assert native_sender(one) is not None


def test_it_can_be_switched_off() -> None:
    native.allow(False)
    try:
        assert native_sender(producer()) is None
    finally:
        native.allow(True)


def test_it_stops_where_the_queue_is_full_and_goes_on_there() -> None:
    one = producer({"queue.buffering.max.messages": 10})
    sender = native_sender(one)
    assert sender is not None
    assert sender.produce(one, records(25)) == (10, KafkaError._QUEUE_FULL)
    assert sender.produce(one, records(25), 10) == (10, KafkaError._QUEUE_FULL)
    one.purge()
    one.poll(1)
    assert sender.produce(one, records(25), 10) == (20, KafkaError._QUEUE_FULL)
    one.purge()


@pytest.mark.parametrize("natively", [True, False])
def test_a_queue_that_stays_full_is_waited_for_with_patience(monkeypatch: pytest.MonkeyPatch, natively: bool) -> None:
    monkeypatch.setattr(produce, "PATIENCE_S", 0.2)
    one = producer({"queue.buffering.max.messages": 10})
    with pytest.raises(KafkaException) as error:
        send_all(one, messages(25), {"t": 0}, in_transaction=natively)
    assert error.value.args[0].code() == KafkaError._TIMED_OUT
    one.purge()


@pytest.mark.parametrize(
    ("settings", "value", "code"),
    [
        ({"transactional.id": "x"}, b"v", KafkaError._STATE),  # no transaction has begun
        ({}, bytes(2_000_000), KafkaError.MSG_SIZE_TOO_LARGE),
    ],
    ids=["state", "size"],
)
def test_what_the_client_does_not_take_fails_as_it_does_in_python(
    settings: dict[str, Any], value: bytes, code: int
) -> None:
    said = []
    for natively in (True, False):
        one = producer(settings)
        with pytest.raises(KafkaException) as error:
            send_all(one, messages(3, value=value), {"t": 0}, in_transaction=natively)
        said.append((error.value.args[0].code(), error.value.args[0].str()))
    assert said[0] == said[1]
    assert said[0][0] == code


def test_nobody_hears_of_a_failed_delivery_and_nothing_breaks() -> None:
    """The callback of confluent-kafka gets these messages too, without what it has with its own."""
    heard: list[int] = []
    one = producer({"message.timeout.ms": 200, "on_delivery": lambda error, _: heard.append(error.code())})
    sender = native_sender(one)
    assert sender is not None
    assert sender.produce(one, records(5)) == (5, 0)
    one.produce("t", b"v")
    assert one.flush(20) == 0
    assert heard == [KafkaError._MSG_TIMED_OUT]
    assert sender.produce(one, records(5)) == (5, 0)
    one.produce("t", b"v")
    one.purge()
    assert one.flush(20) == 0
    assert heard[1:] == [KafkaError._PURGE_QUEUE]


def test_what_it_does_not_send_is_left_to_python() -> None:
    pair = HEADERS.value_type
    nameless = pa.array([[{"key": None, "value": b"v"}]], HEADERS)
    null = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pa.nulls(1, pair))
    assert records(1, headers=nameless) is None
    assert records(1, headers=null) is None
    assert records(1, headers=headers_column([[("a", None)]])) is not None
    redriven = messages(1)
    redriven.redriven = True
    assert produce._records(redriven, {"t": 0}) is None


def test_columns_that_are_not_what_they_should_be_are_refused() -> None:
    one = producer()
    sender, right = native_sender(one), records(3)
    assert sender is not None
    texts = pa.array(["a", "b", "c"])
    for wrong in (
        {"keys": texts},
        {"values": right.values.slice(1)},
        {"routes": np.array([0, 1, 0], np.int32)},
        {"routes": np.array([0, -2, 0], np.int32)},
        {"timestamps_ms": right.timestamps_ms[1:]},
        {"headers": texts},
        {"headers": pa.nulls(2, HEADERS)},
        {"headers": pa.array([[{"key": None, "value": b"v"}]] * 3, HEADERS)},
        {"origin": right.origin._replace(numbers=right.timestamps_ms[1:])},
        {"origin": right.origin._replace(numbers=-right.timestamps_ms)},
    ):
        with pytest.raises(ValueError, match=r"."):
            sender.produce(one, replace(right, **wrong))
    for row in (-1, 4):
        with pytest.raises(ValueError, match="no row"):
            sender.produce(one, right, row)
    long = replace(right, origin=right.origin._replace(text="x" * 600))
    assert sender.produce(one, long) == (0, KafkaError._INVALID_ARG)
    assert sender.produce(one, replace(right, topics=["t" * 600])) == (0, KafkaError._INVALID_ARG)
    assert sender.produce(one, right, 3) == (3, 0)
