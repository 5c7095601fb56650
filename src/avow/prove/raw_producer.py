"""A producer that sends what the Python client cannot: header names of any bytes, and any timestamp.

librdkafka by its C interface, through the library that the Python client has loaded. Owns: that. Must not know: what is
sent, or why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

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


class _Message(ctypes.Structure):
    """``rd_kafka_message_t``."""

    _fields_: ClassVar = [
        ("err", ctypes.c_int),
        ("topic", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_len", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    ]


_DELIVERED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Message), ctypes.c_void_p)


@dataclass(frozen=True)
class RawRecord:
    """A record as bytes."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()
    timestamp_ms: int = 1_700_000_000_000


def produce(bootstrap: str, topic: str, records: Iterable[RawRecord], partition: int = 0) -> list[int]:
    """Send them, one after another. Gives their offsets."""
    conf = ctypes.c_void_p(_lib.rd_kafka_conf_new())
    error = ctypes.create_string_buffer(512)
    # One record in a batch: timestamps so far apart do not fit into one.
    settings = {
        "bootstrap.servers": bootstrap,
        "batch.num.messages": "1",
        "message.max.bytes": "8000000",
        "enable.idempotence": "true",
    }
    for name, value in settings.items():
        if _lib.rd_kafka_conf_set(conf, name.encode(), value.encode(), error, ctypes.c_size_t(512)):
            raise ValueError(error.value.decode())
    offsets: list[int] = []

    def delivered(_client: Any, message: Any, _opaque: Any) -> None:
        if message.contents.err == 0:
            offsets.append(message.contents.offset)

    callback = _DELIVERED(delivered)  # kept until the producer is gone
    _lib.rd_kafka_conf_set_dr_msg_cb(conf, callback)
    producer = ctypes.c_void_p(_lib.rd_kafka_new(_PRODUCER, conf, error, ctypes.c_size_t(512)))
    if not producer.value:
        raise ValueError(error.value.decode())
    sent = 0
    try:
        for record in records:
            _send(producer, topic, record, partition)
            sent += 1
        _lib.rd_kafka_flush(producer, ctypes.c_int(30_000))
    finally:
        _lib.rd_kafka_destroy(producer)
    if len(offsets) < sent:
        raise TimeoutError(f"{sent - len(offsets)} of {sent} records were not taken by {topic}/{partition}")
    return offsets


def _send(producer: ctypes.c_void_p, topic: str, record: RawRecord, partition: int) -> None:
    headers = ctypes.c_void_p(_lib.rd_kafka_headers_new(ctypes.c_size_t(len(record.headers))))
    for name, value in record.headers:
        _lib.rd_kafka_header_add(headers, name, len(name), value, len(value or b""))
    parts: list[object] = [ctypes.c_int(_V_TOPIC), ctypes.c_char_p(topic.encode())]
    parts += [ctypes.c_int(_V_PARTITION), ctypes.c_int32(partition), ctypes.c_int(_V_MSGFLAGS), ctypes.c_int(_COPY)]
    for kind, data in ((_V_VALUE, record.value), (_V_KEY, record.key)):
        if data is not None:
            parts += [ctypes.c_int(kind), ctypes.c_char_p(data), ctypes.c_size_t(len(data))]
    parts += [ctypes.c_int(_V_TIMESTAMP), ctypes.c_int64(record.timestamp_ms)]
    parts += [ctypes.c_int(_V_HEADERS), headers, ctypes.c_int(_V_END)]
    if code := _lib.rd_kafka_producev(producer, *parts):
        raise ValueError(f"librdkafka does not take the record: error {code}")
