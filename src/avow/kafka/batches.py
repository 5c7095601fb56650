"""Records as Arrow batches: their columns, made of whole lists of the client's messages, and headers as text.

Owns: the columns of a record as Kafka has it. Must not know: where records come from, what they mean. Its neighbours
are ``fetch``, which makes batches, and everything that takes them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import confluent_kafka as client
import numpy as np
import pyarrow as pa

from avow.errors import ProtocolViolation
from avow.kafka.headers import Headers, headers_of
from avow.ledger import OffsetRange

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
COLUMNS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", "UTC")),  # as Kafka has it: in microseconds not every one fits
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS),
    ]
)


def as_batch(wanted: OffsetRange, messages: list[client.Message]) -> pa.RecordBatch:
    """Messages of one partition as columns."""
    count = len(messages)
    places = set(zip(map(client.Message.topic, messages), map(client.Message.partition, messages), strict=True))
    if places != {(wanted.topic, wanted.partition)}:
        raise ProtocolViolation(f"records of {places} came for {wanted}")
    offsets = np.fromiter(map(client.Message.offset, messages), np.int64, count)
    stamps = np.fromiter([stamp for _, stamp in map(client.Message.timestamp, messages)], np.int64, count)
    topic = wanted.topic.encode()
    columns = [
        _binary(pa.string(), topic * count, np.full(count, len(topic))),
        _numbers(pa.int32(), np.full(count, wanted.partition, np.int32)),
        _numbers(pa.int64(), offsets),
        _numbers(pa.timestamp("ms", "UTC"), stamps),
        _binaries(list(map(client.Message.key, messages))),
        _binaries(list(map(client.Message.value, messages))),
        headers_column(list(map(headers_of, messages))),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COLUMNS)


# Columns are made from buffers: ``pa.array`` is slower, and imports pandas where it is installed, half a second for a
# worker's first task.


def _numbers(type_: pa.DataType, values: np.ndarray[Any, np.dtype[Any]]) -> pa.Array:
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])


def _binary(
    type_: pa.DataType, data: bytes, lengths: np.ndarray[Any, np.dtype[Any]], validity: pa.Buffer | None = None
) -> pa.Array:
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        raise ProtocolViolation(f"{ends[-1]} bytes of records in one batch")
    return pa.Array.from_buffers(
        type_, len(lengths), [validity, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(data)]
    )


def _binaries(values: list[bytes | None], type_: pa.DataType | None = None) -> pa.Array:
    type_ = type_ or pa.binary()
    nulls = values.count(None)
    if nulls == len(values):
        return pa.nulls(nulls, type_)
    filled: list[bytes] = [value or b"" for value in values] if nulls else values  # type: ignore[assignment]
    validity = None
    if nulls:
        bits = np.fromiter([value is not None for value in values], np.bool_, len(values))
        validity = pa.py_buffer(np.packbits(bits, bitorder="little"))
    return _binary(type_, b"".join(filled), np.fromiter(map(len, filled), np.int64, len(filled)), validity)


def headers_column(headers: Sequence[Headers | None]) -> pa.Array:
    """A column of headers; null for a record that has none."""
    if not any(headers):
        return pa.nulls(len(headers), HEADERS)
    pairs = list(chain.from_iterable(record_headers for record_headers in headers if record_headers))
    keys = _binaries([key.encode() for key, _ in pairs], pa.string())
    values = _binaries([value for _, value in pairs])
    both = pa.StructArray.from_arrays([keys, values], names=["key", "value"])
    ends = np.zeros(len(headers) + 1, np.int64)
    np.cumsum(
        np.fromiter([len(record_headers or ()) for record_headers in headers], np.int64, len(headers)), out=ends[1:]
    )
    validity = pa.py_buffer(np.packbits(np.fromiter(map(bool, headers), np.bool_, len(headers)), bitorder="little"))
    buffers = [validity, pa.py_buffer(ends.astype(np.int32))]
    return pa.Array.from_buffers(HEADERS, len(headers), buffers, children=[both])


def headers_to_text(headers: pa.Array) -> pa.Array:
    """A column of headers as JSON text, in which it goes through Spark's JVM: over a nested column Spark 4.1 recounts
    its whole batch for every row it adds."""
    if headers.null_count == len(headers):
        return pa.nulls(len(headers), pa.string())
    texts = [
        None
        if pairs is None
        else json.dumps(
            [
                {"k": pair["key"]} | ({} if pair["value"] is None else {"v": base64.b64encode(pair["value"]).decode()})
                for pair in pairs
            ]
        )
        for pairs in headers.to_pylist()
    ]
    return pa.array(texts, pa.string())


def headers_from_text(texts: pa.Array) -> pa.Array:
    """The same column back. Spark's own ``to_json`` leaves a null value out as this does."""
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), HEADERS)
    return headers_column(
        [
            [(pair["k"], base64.b64decode(pair["v"]) if "v" in pair else None) for pair in json.loads(text)]
            if text
            else None
            for text in texts.to_pylist()
        ]
    )
