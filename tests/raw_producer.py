"""A producer that sends what the Python client cannot: header names of any bytes, and any timestamp.

librdkafka by its C interface, through the library that the Python client has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka import cimpl

_lib = ctypes.CDLL(cimpl.__file__)
_PRODUCER = 0
_V_END, _V_TOPIC, _V_PARTITION, _V_VALUE, _V_KEY, _V_MSGFLAGS, _V_TIMESTAMP, _V_HEADERS = 0, 1, 3, 4, 5, 7, 8, 10
_COPY = 2
for _name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
    getattr(_lib, _name).restype = ctypes.c_void_p
_lib.rd_kafka_header_add.argtypes = [
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_ssize_t,
    ctypes.c_char_p,
    ctypes.c_ssize_t,
]


@dataclass(frozen=True)
class Raw:
    """A record as bytes."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()
    timestamp_ms: int = 1_700_000_000_000


def produce(bootstrap: str, topic: str, records: Iterable[Raw], partition: int = 0) -> None:
    conf = ctypes.c_void_p(_lib.rd_kafka_conf_new())
    said = ctypes.create_string_buffer(512)
    # One record in a batch: timestamps so far apart do not fit into one.
    settings = {"bootstrap.servers": bootstrap, "batch.num.messages": "1", "message.max.bytes": "8000000"}
    for name, value in settings.items():
        assert _lib.rd_kafka_conf_set(conf, name.encode(), value.encode(), said, ctypes.c_size_t(512)) == 0, said.value
    producer = ctypes.c_void_p(_lib.rd_kafka_new(_PRODUCER, conf, said, ctypes.c_size_t(512)))
    assert producer.value, said.value
    try:
        for record in records:
            _send(producer, topic, record, partition)
        assert _lib.rd_kafka_flush(producer, ctypes.c_int(30_000)) == 0, "not all was sent"
    finally:
        _lib.rd_kafka_destroy(producer)


def _send(producer: ctypes.c_void_p, topic: str, record: Raw, partition: int) -> None:
    headers = ctypes.c_void_p(_lib.rd_kafka_headers_new(ctypes.c_size_t(len(record.headers))))
    for name, value in record.headers:
        assert _lib.rd_kafka_header_add(headers, name, len(name), value, len(value or b"")) == 0
    parts: list[object] = [ctypes.c_int(_V_TOPIC), ctypes.c_char_p(topic.encode())]
    parts += [ctypes.c_int(_V_PARTITION), ctypes.c_int32(partition), ctypes.c_int(_V_MSGFLAGS), ctypes.c_int(_COPY)]
    for kind, data in ((_V_VALUE, record.value), (_V_KEY, record.key)):
        if data is not None:
            parts += [ctypes.c_int(kind), ctypes.c_char_p(data), ctypes.c_size_t(len(data))]
    parts += [ctypes.c_int(_V_TIMESTAMP), ctypes.c_int64(record.timestamp_ms)]
    parts += [ctypes.c_int(_V_HEADERS), headers, ctypes.c_int(_V_END)]
    assert _lib.rd_kafka_producev(producer, *parts) == 0
