"""avow-native's Kafka part without a broker: what it refuses to touch, and which header names are text."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from avow import native
from avow.kafka.fetch import native_queues
from avow.kafka.headers import NOT_UTF8
from avow.kafka.metadata import QUIET

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    with closing(Consumer(SETTINGS, logger=QUIET)) as consumer:
        yield consumer


@pytest.fixture
def kafka() -> Any:
    from avow_native.kafka import bind

    library = native.library()
    assert library is not None
    kafka = bind(library, not_utf8=NOT_UTF8)
    assert kafka is not None
    return kafka


def test_the_handle_is_the_consumers_own(kafka: Any, consumer: Consumer) -> None:
    with closing(Consumer(SETTINGS, logger=QUIET)) as other:
        assert kafka.handle(consumer)
        assert kafka.handle(consumer) != kafka.handle(other)
    assert kafka.handle(other) is None, "it is closed"


def test_a_handle_that_is_somebody_elses_is_refused(kafka: Any, consumer: Consumer) -> None:
    """As if the object had changed: its first member is the handle of another consumer, or a Python object."""
    import avow_native.client as module

    with closing(Consumer(SETTINGS, logger=QUIET)) as other, pytest.MonkeyPatch.context() as patch:
        theirs = kafka.handle(other)
        patch.setattr(module, "_slot", lambda asked: theirs if asked is consumer else None)
        assert kafka.handle(consumer) is None
        patch.setattr(module, "_slot", lambda asked: id(QUIET) if asked is consumer else None)
        assert kafka.handle(consumer) is None
        patch.setattr(module, "_slot", lambda _asked: theirs)
        assert kafka.handle(other) is None, "an object that was never initialized has one too"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client.CLIENT_VERSIONS", ((3, 0), (4, 0))),
        ("client.LIBRARY_VERSIONS", (0x03000000, 0x04000000)),
        ("kafka.FUNCTIONS", ("rd_kafka_no_such_function",)),
        ("kafka.FUNCTIONS", ("rd_kafka_queue_destroy",)),
        ("kafka._Result", ctypes.c_int64),
    ],
)
def test_what_is_not_known_is_left_to_python(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    import avow_native.kafka as module

    module.bind.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(f"avow_native.{name}", value)
        assert native_queues(consumer) is None
    module.bind.cache_clear()
    assert native_queues(consumer) is not None


def test_it_can_be_switched_off(consumer: Consumer) -> None:
    native.allow(False)
    try:
        assert native_queues(consumer) is None
    finally:
        native.allow(True)


def test_a_closed_source_says_so(kafka: Any, consumer: Consumer) -> None:
    source = kafka.source(consumer, "t", 0)
    part = source.part(10)
    consumer.assign([TopicPartition("t", 0, 0)])
    sources = kafka.sources([source])
    assert sources.take(10, 1_000) == []
    consumer.unassign()
    source.close()
    with pytest.raises(RuntimeError, match="closed"):
        sources.take(10, 1_000)
    assert part.state().rows == 0


def test_a_closed_consumer_has_no_source(kafka: Any) -> None:
    consumer = Consumer(SETTINGS, logger=QUIET)
    consumer.close()
    with pytest.raises(RuntimeError, match="closed"):
        kafka.source(consumer, "t", 0)


# Bytes that begin, continue and end characters, and those at the borders of what is allowed.
BORDERS = b"a\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf\xe0\xed\xef\xf0\xf4\xf5\xff"
NAMES = st.lists(st.sampled_from(list(BORDERS)), max_size=8)


@given(st.one_of(NAMES.map(bytes), st.binary(max_size=12), st.text(max_size=8).map(lambda text: text.encode("utf-8"))))
def test_names_are_text_where_python_reads_them(name: bytes) -> None:
    from avow_native.kafka import bind

    library = native.library()
    assert library is not None
    kafka = bind(library, not_utf8=NOT_UTF8)
    assert kafka is not None
    name = name.replace(b"\0", b"")  # the client ends a name there
    try:
        name.decode()
        readable = True
    except UnicodeDecodeError:
        readable = False
    assert kafka.is_utf8(name) == readable
