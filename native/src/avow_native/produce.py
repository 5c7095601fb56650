"""Arrow columns as messages of a producer, by ``produce.c``, which says how it works.

The client stays a ``confluent_kafka.Producer``, whose handle ``client`` finds. ``bind`` and ``Produce.handle`` give
None where anything is not as it was when this was written: then the caller produces in Python.

Owns: the structures shared with ``produce.c``, and that the columns are what it takes them for. Must not know: what is
sent and why, or what is done about an error.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import confluent_kafka
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from avow_native import client
from avow_native.client import Calls, Librdkafka, Signatures

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

# In the order of ``struct produce_api``.
FUNCTIONS = (
    "rd_kafka_producev",
    "rd_kafka_topic_new",
    "rd_kafka_topic_destroy",
    "rd_kafka_headers_new",
    "rd_kafka_header_add",
    "rd_kafka_headers_destroy",
)


class _Column(c.Structure):
    _fields_ = [("bitmap", c.c_void_p), ("ends", c.c_void_p), ("data", c.c_void_p), ("first", c.c_int64)]


class _Records(c.Structure):
    _fields_ = [
        ("rows", c.c_int64),
        ("keys", _Column),
        ("values", _Column),
        ("headers", _Column),
        ("header_names", _Column),
        ("header_values", _Column),
        ("timestamps", c.c_void_p),
        ("routes", c.c_void_p),
        ("topics", c.c_void_p),
        ("unkeyed", c.c_void_p),
        ("origin_name", c.c_char_p),
        ("origin", c.c_char_p),
        ("origin_rows", c.c_void_p),
    ]


_SIGNATURES: Signatures = {
    "": (c.c_int64, (c.c_void_p, c.c_void_p, c.c_int64, c.c_void_p)),
    "_setup": (c.c_int, (c.c_void_p, c.c_void_p)),
}


class Origin(NamedTuple):
    """A header that each record gets after its own: ``text`` and then the record's number."""

    name: str
    text: str
    numbers: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Records:
    """Messages as columns, a place in each."""

    topics: Sequence[str]
    unkeyed: Sequence[int]  # of each topic: the partition of records without a key
    routes: npt.NDArray[np.int32]  # which of the topics; -1: the row is passed over
    keys: pa.BinaryArray
    values: pa.BinaryArray
    headers: pa.ListArray | None  # HEADERS, names and pairs not null; None: no record has any
    timestamps_ms: npt.NDArray[np.int64]  # 0: the producer's own time
    origin: Origin | None = None


class Sent(NamedTuple):
    """How far a call got: to the end, or to the row that librdkafka has refused with this error."""

    row: int
    error: int


@cache
def bind(library: c.CDLL) -> Produce | None:
    """The library's functions; None if the client is not one that they know."""
    if (librdkafka := client.load()) is None:
        return None
    try:
        table = librdkafka.table(FUNCTIONS)
        calls = client.calls(library, "avow_produce", _SIGNATURES)
    except AttributeError:  # no such function
        return None
    sizes = (c.c_int64 * 2)(c.sizeof(table), c.sizeof(_Records))
    return Produce(librdkafka, calls) if calls["_setup"](table, sizes) == 0 else None


class Produce:
    """The functions of ``produce.c``, ready to be called."""

    def __init__(self, librdkafka: Librdkafka, calls: Calls) -> None:
        self._librdkafka, self._produce = librdkafka, calls[""]

    def handle(self, producer: confluent_kafka.Producer) -> int | None:
        """The producer's ``rd_kafka_t *``. None if it is not where it is looked for."""
        return self._librdkafka.handle(producer, client.PRODUCER)

    def produce(self, producer: confluent_kafka.Producer, records: Records, row: int = 0) -> Sent:
        """Messages of the rows from this one on, as ``Producer.produce`` makes them, but no delivery is reported."""
        if (handle := self.handle(producer)) is None:
            raise RuntimeError("the producer has no handle that can be used")
        if not 0 <= row <= len(records.routes):
            raise ValueError(f"there is no row {row}")
        structure, _kept = _structure(records)
        error = c.c_int32()
        reached = self._produce(handle, c.byref(structure), row, c.byref(error))
        return Sent(reached, error.value)


def _structure(records: Records) -> tuple[_Records, tuple[Any, ...]]:
    """What C reads, and what must outlive it."""
    rows, routes = len(records.routes), np.ascontiguousarray(records.routes, np.int32)
    stamps = np.ascontiguousarray(records.timestamps_ms, np.int64)
    topics = (c.c_char_p * len(records.topics))(*(topic.encode() for topic in records.topics))
    unkeyed = (c.c_int32 * len(records.topics))(*records.unkeyed)
    if {len(column) for column in (records.keys, records.values, stamps)} != {rows}:
        raise ValueError("columns of different lengths")
    if rows and not -1 <= routes.min() <= routes.max() < len(topics):
        raise ValueError("a route to no topic")
    structure = _Records(rows=rows, keys=_column(records.keys), values=_column(records.values))
    structure.timestamps, structure.routes = stamps.ctypes.data, routes.ctypes.data
    structure.topics, structure.unkeyed = c.addressof(topics), c.addressof(unkeyed)
    if records.headers is not None:
        _set_headers(structure, records.headers)
    numbers = None
    if records.origin is not None:
        numbers = np.ascontiguousarray(records.origin.numbers, np.int64)
        if len(numbers) != rows or (rows and numbers.min() < 0):
            raise ValueError("numbers of origins that are negative, or too few")
        structure.origin_name, structure.origin = records.origin.name.encode(), records.origin.text.encode()
        structure.origin_rows = numbers.ctypes.data
    return structure, (stamps, routes, topics, unkeyed, numbers)


def _set_headers(structure: _Records, headers: pa.ListArray) -> None:
    if headers.type != HEADERS or len(headers) != structure.rows:
        raise ValueError(f"expected {structure.rows} headers of type {HEADERS}, got {len(headers)} of {headers.type}")
    pairs = headers.values
    names, values = pairs.field("key"), pairs.field("value")
    if pairs.null_count or names.null_count:
        raise ValueError("a header that is null, or has no name")
    bitmap, ends, *_ = headers.buffers()
    structure.headers = _Column(_address(bitmap), _address(ends), None, headers.offset)
    structure.header_names, structure.header_values = _column(names, pa.string()), _column(values)


def _column(array: pa.Array, type_: pa.DataType | None = None) -> _Column:
    if array.type != (type_ or pa.binary()):
        raise ValueError(f"expected a column of {type_ or pa.binary()}, got {array.type}")
    bitmap, ends, data = array.buffers()
    return _Column(_address(bitmap), _address(ends), _address(data), array.offset)


def _address(buffer: pa.Buffer | None) -> int | None:
    return None if buffer is None else buffer.address
