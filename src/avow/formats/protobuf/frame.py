"""What Confluent's serializers put between a schema's id and a message: which message of the schema it is.

It is the place of the message in the .proto file, as a number of numbers and the numbers, all as zigzag varints: the
second message inside the first is ``2, 0, 1``. The first of all has a short form, a single zero.

Owns: these bytes. Must not know: registries. Neighbour: ``formats.registry.frame``, the bytes before them.
"""

from __future__ import annotations

from avow.formats.base import DecodeError
from avow.formats.protobuf.wire import read_varint, varint
from avow.formats.registry.frame import BAD_FRAME

Place = tuple[int, ...]
_DEPTH_MAX = 100


def read_place(value: bytes, at: int) -> tuple[Place, int]:
    """The place that stands here, and where the message begins."""
    try:
        count, at = _read_zigzag(value, at)
        if not 0 <= count <= _DEPTH_MAX:
            raise DecodeError(BAD_FRAME, f"the place of the message in the schema has {count:,} numbers")
        place = []
        for _ in range(count):
            number, at = _read_zigzag(value, at)
            place.append(number)
    except DecodeError as error:
        raise DecodeError(BAD_FRAME, f"no place of a message in the schema: {error.detail}") from None
    return tuple(place) or (0,), at


def place_bytes(place: Place) -> bytes:
    if place == (0,):
        return b"\0"
    return b"".join(varint(number << 1) for number in (len(place), *place))


def _read_zigzag(value: bytes, at: int) -> tuple[int, int]:
    number, at = read_varint(value, at, len(value))
    return (number >> 1) ^ -(number & 1), at
