"""Kafka messages as Arrow batches, by ``kafka.c``, which says how it works.

The client stays a ``confluent_kafka.Consumer``, whose handle ``client`` finds. ``bind`` and ``Kafka.handle`` give None
where anything is not as it was when this was written: then the caller reads in Python.

Owns: the structures shared with ``kafka.c``, and when memory is freed. Must not know: what is read and why.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from functools import cache
from typing import Any

import confluent_kafka
import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from avow_native import client
from avow_native.client import Calls, Librdkafka, Signatures

# In the order of ``struct kafka_api``.
FUNCTIONS = (
    "rd_kafka_queue_get_partition",
    "rd_kafka_queue_forward",
    "rd_kafka_queue_destroy",
    "rd_kafka_consume_batch_queue",
    "rd_kafka_message_destroy",
    "rd_kafka_message_errstr",
    "rd_kafka_message_timestamp",
    "rd_kafka_message_headers",
    "rd_kafka_header_get_all",
    "rd_kafka_topic_name",
    "rd_kafka_queue_get_consumer",
    "rd_kafka_queue_io_event_enable",
)
_MEMORY, _TOO_LARGE, _STRANGER = 1, 2, 3


class _Result(c.Structure):
    _fields_ = [
        ("taken", c.c_int64),
        ("bytes", c.c_int64),
        ("failed", c.c_int32),
        ("error", c.c_int32),
        ("text", c.c_char * 512),
        ("partition", c.c_int32),
    ]


_STATE = ("rows", "bytes", "position", "end", "key_nulls", "value_nulls", "header_rows", "headers", "header_nulls")


class _State(c.Structure):
    _fields_ = [(name, c.c_int64) for name in _STATE]


class _View(c.Structure):
    _fields_ = [("data", c.c_void_p), ("size", c.c_int64)]


_OFFSETS, _TIMESTAMPS, _KEYS, _VALUES, _HEADER_NAMES, _HEADER_VALUES, _HEADER_LISTS = 0, 1, 2, 5, 8, 11, 14
_Views = _View * (_HEADER_LISTS + 2)

_pointer, _text, _int, _long = c.c_void_p, c.c_char_p, c.c_int32, c.c_int64
_SIGNATURES: Signatures = {
    "setup": (c.c_int, (_pointer, _text, _pointer)),
    "is_utf8": (c.c_int, (_text,)),
    "part_new": (_pointer, (_text, _int, _long)),
    "part_free": (None, (_pointer,)),
    "part_state": (None, (_pointer, _pointer)),
    "part_views": (None, (_pointer, _pointer)),
    "waiter_open": (_pointer, (_pointer,)),
    "waiter_close": (None, (_pointer,)),
    "wait": (None, (_pointer, _int)),
    "source_open": (_pointer, (_pointer, _text, _int, _pointer)),
    "source_set_part": (None, (_pointer, _pointer)),
    "sources_take": (c.c_int, (_pointer, _int, _int, _long, _long, _int, _pointer, _pointer)),
    "source_close": (None, (_pointer,)),
}


@cache
def bind(library: c.CDLL, *, not_utf8: str) -> Kafka | None:
    """The library's functions; None if the client is not one that they know. ``not_utf8``: the name that a header gets
    whose own is not UTF-8."""
    if (librdkafka := client.load()) is None:
        return None
    try:
        table = librdkafka.table(FUNCTIONS)
        calls = client.calls(library, "avow_kafka_", _SIGNATURES)
    except AttributeError:  # no such function
        return None
    sizes = (c.c_int64 * 4)(c.sizeof(table), c.sizeof(_Result), c.sizeof(_State), c.sizeof(_Views))
    return Kafka(librdkafka, calls) if calls["setup"](table, not_utf8.encode(), sizes) == 0 else None


class Kafka:
    """The functions of ``kafka.c``, ready to be called."""

    def __init__(self, librdkafka: Librdkafka, calls: Calls) -> None:
        self._librdkafka, self.calls = librdkafka, calls

    def handle(self, consumer: confluent_kafka.Consumer) -> int | None:
        """The consumer's ``rd_kafka_t *``. None if it is closed, or not where it is looked for."""
        return self._librdkafka.handle(consumer, client.CONSUMER)

    def source(
        self, consumer: confluent_kafka.Consumer, topic: str, partition: int, waiter: Waiter | None = None
    ) -> Source:
        """What the consumer fetches of one partition, which is not assigned yet. Close it after ``unassign``. From now
        on the consumer itself gives no messages of this partition. With a waiter, that one waits for it too."""
        waiting = None if waiter is None else waiter.address
        address = self.calls["source_open"](self._open_handle(consumer), topic.encode(), partition, waiting)
        if not address:
            raise MemoryError
        return Source(self.calls, address, topic, partition)

    def waiter(self, consumer: confluent_kafka.Consumer) -> Waiter | None:
        """None where there is no such thing: on Windows, or if no file can be opened."""
        address = self.calls["waiter_open"](self._open_handle(consumer))
        return Waiter(self.calls, address) if address else None

    def sources(self, sources: Sequence[Source]) -> Sources:
        return Sources(self.calls, sources)

    def _open_handle(self, consumer: confluent_kafka.Consumer) -> int:
        if (handle := self.handle(consumer)) is None:
            raise RuntimeError("the consumer is closed")
        return handle

    def is_utf8(self, name: bytes) -> bool:
        return bool(self.calls["is_utf8"](name))


class Waiter:
    """Waits until there is something in one of the sources that were opened with it, or a callback to serve. It must be
    closed after them, and before its consumer."""

    def __init__(self, calls: Calls, address: int) -> None:
        self._calls, self.address = calls, address

    def wait(self, wait_s: float) -> None:
        if self.address:
            self._calls["wait"](self.address, max(0, round(wait_s * 1000)))

    def close(self) -> None:
        address, self.address = self.address, 0
        self._calls["waiter_close"](address)


class Sources:
    """Several sources, to be taken from in one call."""

    def __init__(self, calls: Calls, sources: Sequence[Source]) -> None:
        self._calls, self._sources = calls, sources
        self._addresses = (c.c_void_p * len(sources))(*(source.address for source in sources))
        self._taken = (c.c_int64 * len(sources))()
        self._first = 0
        self._result = _Result()

    def take(self, most: int, most_bytes: int, *, ignored: int = 0) -> list[int]:
        """What is at hand, from each in turn. The numbers of those that gave something. Raises a ``KafkaException`` for
        a message that is an error, unless its code is the ignored one; ``LookupError`` for a record of another
        partition; ``OverflowError`` for more bytes than a batch can have. Whatever it raises, the parts cannot be used
        after that."""
        if not self._sources:
            return []
        if not all(source.address for source in self._sources):
            raise RuntimeError("the source is closed")
        self._first = (self._first + 1) % len(self._sources)  # none is always the last
        result, count = self._result, len(self._sources)
        if self._calls["sources_take"](
            self._addresses, count, self._first, most, most_bytes, ignored, self._taken, c.byref(result)
        ):
            raise _failure(result)
        return [number for number, taken in enumerate(self._taken) if taken]


class Source:
    """Messages of one partition, on their way into a part. It must be closed before its consumer is."""

    def __init__(self, calls: Calls, address: int, topic: str, partition: int) -> None:
        self._calls, self.address = calls, address
        self._topic, self._partition = topic, partition
        self._part: Part | None = None  # kept: the library has its address

    def close(self) -> None:
        address, self.address = self.address, 0
        self._calls["source_close"](address)
        self._part = None

    def part(self, until: int) -> Part:
        """A new, empty part, which records below this offset go into from now on."""
        part = Part(self._calls, self._topic, self._partition, until)
        self._calls["source_set_part"](self._open(), part.address)
        self._part = part
        return part

    def _open(self) -> int:
        if not self.address:
            raise RuntimeError("the source is closed")
        return self.address


def _failure(result: _Result) -> Exception:
    text = result.text.decode(errors="replace")
    if result.error:
        return KafkaException(KafkaError(result.error, text))
    if result.failed == _MEMORY:
        return MemoryError()
    if result.failed == _TOO_LARGE:
        return OverflowError("more than 2 GiB of records in one batch")
    if result.failed == _STRANGER:
        return LookupError(f"a record of {text}-{result.partition}")
    return RuntimeError("librdkafka could not take messages from its queue")


class Part:
    """The records of one partition. Arrow's buffers keep it alive, and it is freed with the last of them."""

    def __init__(self, calls: Calls, topic: str, partition: int, until: int) -> None:
        self.address = 0
        self.topic, self.partition = topic, partition
        self._calls = calls
        self._free = calls["part_free"]
        self.address = calls["part_new"](topic.encode(), partition, until) or 0
        if not self.address:
            raise MemoryError

    def __del__(self) -> None:
        if self.address:
            self._free(self.address)

    def state(self) -> _State:
        """How much there is: ``rows``, ``bytes``; ``position``: one past the last record seen, ``end``: where the
        partition was said to end, each -1 if there was none."""
        state = _State()
        self._calls["part_state"](self.address, c.byref(state))
        return state

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """All records, as columns of this schema: topic, partition, offset, timestamp, key, value, headers. Take
        nothing more into the part."""
        state, views = self.state(), _Views()
        self._calls["part_views"](self.address, views)
        rows, topic = state.rows, self.topic.encode()
        types = schema.types
        columns = [
            _topics(types[0], topic, rows),
            pa.Array.from_buffers(types[1], rows, [None, pa.py_buffer(np.full(rows, self.partition, np.int32))]),
            pa.Array.from_buffers(types[2], rows, [None, self._buffer(views[_OFFSETS])]),
            pa.Array.from_buffers(types[3], rows, [None, self._buffer(views[_TIMESTAMPS])]),
            self._binary(types[4], rows, state.key_nulls, views[_KEYS : _KEYS + 3]),
            self._binary(types[5], rows, state.value_nulls, views[_VALUES : _VALUES + 3]),
            self._headers(types[6], state, views),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _headers(self, type_: pa.DataType, state: _State, views: Any) -> pa.Array:
        if not state.header_rows:
            return pa.nulls(state.rows, type_)
        pair = type_.value_type
        names = self._binary(pair[0].type, state.headers, 0, views[_HEADER_NAMES : _HEADER_NAMES + 3])
        values = self._binary(
            pair[1].type, state.headers, state.header_nulls, views[_HEADER_VALUES : _HEADER_VALUES + 3]
        )
        both = pa.StructArray.from_arrays([names, values], fields=list(pair))
        buffers = [self._buffer(view) for view in views[_HEADER_LISTS : _HEADER_LISTS + 2]]
        return pa.Array.from_buffers(type_, state.rows, buffers, children=[both])

    def _binary(self, type_: pa.DataType, rows: int, nulls: int, views: list[_View]) -> pa.Array:
        if nulls == rows:
            return pa.nulls(rows, type_)
        bitmap, ends, data = views
        buffers = [self._buffer(bitmap) if nulls else None, self._buffer(ends), self._buffer(data)]
        return pa.Array.from_buffers(type_, rows, buffers)

    def _buffer(self, view: _View) -> pa.Buffer:
        return pa.foreign_buffer(view.data, view.size, self) if view.size else pa.py_buffer(b"")


def _topics(type_: pa.DataType, topic: bytes, rows: int) -> pa.Array:
    if rows * len(topic) > np.iinfo(np.int32).max:
        raise OverflowError(f"{rows} records in one batch")
    ends = np.arange(rows + 1, dtype=np.int32) * np.int32(len(topic))
    return pa.Array.from_buffers(type_, rows, [None, pa.py_buffer(ends), pa.py_buffer(topic * rows)])
