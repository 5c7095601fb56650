"""The headers of records: how they are read, and those that avow's producer puts there.

================  ==============================================================================================
``avow-key``      the idempotency key: two records with the same one are the same message, sent twice
``avow-seq``      which send of which producer it was: ``PRODUCER/NUMBER``, numbers counting up from 0
``avow-crc32c``   CRC32C of the value, eight hexadecimal digits
================  ==============================================================================================

Kafka's header names are bytes; the client gives text, and fails for a name that is not UTF-8. Such a name reads as
``avow-name-not-utf8``, the values as they are, and ``formats`` makes the record a dead letter.

Owns: their names and spelling, reading them. Must not know: who makes or reads them. Its neighbours are
``avow.clients.producer``, ``avow.formats`` and the Kafka sink.
"""

from __future__ import annotations

import gc
from operator import methodcaller

import confluent_kafka as client
import google_crc32c

Headers = list[tuple[str, bytes | None]]

KEY = "avow-key"
SEQUENCE = "avow-seq"
CHECKSUM = "avow-crc32c"
CHECKSUM_DIGITS = 8
NOT_UTF8 = "avow-name-not-utf8"  # in place of a name that cannot be read


def checksum(value: bytes) -> bytes:
    """What the header holds for this value."""
    return b"%08x" % google_crc32c.value(value)


# Not ``message.headers()``: the interpreter's own shortcut for such a call does not look whether it failed.
_headers = methodcaller("headers")


def headers_of(message: client.Message) -> Headers:
    """A record's headers, as often as they are asked for. ``Message.headers`` fails where a name is not UTF-8."""
    try:
        return _headers(message) or []
    except (SystemError, UnicodeDecodeError):
        headers = _readable(message)
        message.set_headers(headers)  # type: ignore[arg-type]
        return headers


def _readable(message: client.Message) -> Headers:
    """What can be had of headers that the client has failed to read once.

    It (2.16) has then made its list all the same, with NULL in the place of such a name, and gives it to whoever asks
    again: whatever reads that place ends the process. The garbage collector's view of a pair passes over it.
    """
    try:
        pairs = _headers(message) or []
    except (SystemError, UnicodeDecodeError):
        pairs = []
    parts = [(pair, gc.get_referents(pair)) for pair in pairs]
    headers = [pair if len(parts_) == len(pair) else (NOT_UTF8, parts_[0]) for pair, parts_ in parts]
    return headers if NOT_UTF8 in dict(headers) else [*headers, (NOT_UTF8, None)]


def size_of(message: client.Message) -> int:
    """Bytes of a record: key, value and headers. ``len`` counts the value alone."""
    size = len(message) + len(message.key() or b"")
    for name, value in headers_of(message):
        size += len(name) + len(value or b"")
    return size
