"""Confluent's frame: a zero byte and four bytes of a schema's id, before each value that a serializer has written.

Owns: finding the ids, of one value and of many. Must not know: registries, any language.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from avow.formats.base import DecodeError, Reason, shown

FRAME_BYTES = 5
BAD_FRAME = "bad-frame"  # a value that does not begin with a schema's id
UNKNOWN_ID = "unknown-schema-id"  # an id that the registry does not have

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


def schema_id(value: bytes) -> int:
    """The id before a value, or ``DecodeError``."""
    if not value:
        raise DecodeError(Reason.EMPTY, "the value is empty: zero bytes")
    if value[0] != 0:
        raise DecodeError(BAD_FRAME, f"it begins with byte 0x{value[0]:02x}: no schema id, which stands behind a zero")
    if len(value) < FRAME_BYTES:
        raise DecodeError(BAD_FRAME, f"{len(value)} bytes are too few for a schema id: {shown(value.hex())}")
    return int.from_bytes(value[1:FRAME_BYTES], "big")


def framed(schema_id: int, data: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + data


def schema_ids(values: pa.BinaryArray) -> Ids:
    """The id before each value, none of them null; -1 where there is no frame."""
    count = len(values)
    if not count:
        return np.empty(0, np.int64)
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32, count + 1, 4 * values.offset).astype(np.int64)
    starts = ends[:-1]
    # Whatever the lengths are, only bytes of the buffer are looked at.
    size = data.size if data else 0
    if size < FRAME_BYTES:
        return np.full(count, -1, np.int64)
    octets = np.frombuffer(data, np.uint8)
    at = np.minimum(starts, size - FRAME_BYTES)
    ids = octets[at + 1].astype(np.int64)
    for place in range(2, FRAME_BYTES):
        ids <<= 8
        ids |= octets[at + place]
    good = (ends[1:] - starts >= FRAME_BYTES) & (octets[at] == 0)
    return ids if good.all() else np.where(good, ids, -1)
