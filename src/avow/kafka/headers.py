"""The headers that avow's producer puts on records, for whoever reads them.

================  ==============================================================================================
``avow-key``      the idempotency key: two records with the same one are the same message, sent twice
``avow-seq``      which send of which producer it was: ``PRODUCER/NUMBER``, numbers counting up from 0
``avow-crc32c``   CRC32C of the value, eight hexadecimal digits
================  ==============================================================================================

Owns: their names and spelling. Must not know: who makes or reads them. Its neighbours are ``avow.clients.producer``,
``avow.decode.checksum`` and the Kafka sink.
"""

from __future__ import annotations

import google_crc32c

KEY = "avow-key"
SEQUENCE = "avow-seq"
CHECKSUM = "avow-crc32c"
CHECKSUM_DIGITS = 8


def checksum(value: bytes) -> bytes:
    """What the header holds for this value."""
    return b"%08x" % google_crc32c.value(value)
