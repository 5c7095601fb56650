"""The wire format: numbers and lengths in bytes, and passing over a field that nobody asked for.

Stricter than most libraries, which take the low bits of a number that is too large. A number may be written with more
bytes than it needs, as the format allows.

Owns: bytes. Must not know: schemas. Neighbour: ``reader``.
"""

from __future__ import annotations

from typing import NoReturn

from avow.formats.base import DecodeError, Reason

VARINT, FIXED64, LENGTH, START_GROUP, END_GROUP, FIXED32 = 0, 1, 2, 3, 4, 5
WIRE_NAMES = ("a varint", "8 bytes", "a length and bytes", "a group", "the end of a group", "4 bytes")
DEPTH_MAX = 100  # messages and groups in one another, as in Google's libraries

NOT_PROTOBUF = "not-protobuf"  # the reason: truncated, a length beyond the end, an impossible tag, ...
_VARINT_BYTES_MAX = 10
_SHORT_BYTES_MAX = 5  # of a tag or a length
_FIELD_NUMBER_BITS = 29


def malformed(detail: str) -> NoReturn:
    raise DecodeError(NOT_PROTOBUF, detail)


def too_deep() -> NoReturn:
    raise DecodeError(Reason.TOO_DEEP, f"messages are nested more than {DEPTH_MAX} deep")


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of 64 bits without sign, and where it ends."""
    number = shift = 0
    for index in range(at, min(end, at + _VARINT_BYTES_MAX)):
        byte = data[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >= 1 << 64:
                malformed(f"the varint at byte {at:,} has more than 64 bits")
            return number, index + 1
        shift += 7
    if end - at < _VARINT_BYTES_MAX:
        malformed(f"the varint at byte {at:,} is cut off")
    malformed(f"the varint at byte {at:,} is longer than {_VARINT_BYTES_MAX} bytes")


def read_tag(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """The number of a field, its wire type, and where the tag ends."""
    tag, after = read_varint(data, at, end)
    number, wire = tag >> 3, tag & 7
    if number == 0:
        malformed(f"the tag at byte {at:,} has the field number 0")
    if number >> _FIELD_NUMBER_BITS or after - at > _SHORT_BYTES_MAX:
        malformed(f"the tag at byte {at:,} is too large")
    if wire >= len(WIRE_NAMES):
        malformed(f"the tag at byte {at:,} has the wire type {wire}, which does not exist")
    return number, wire, after


def read_length(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Where the bytes begin and end whose length stands here."""
    length, start = read_varint(data, at, end)
    if start - at > _SHORT_BYTES_MAX or length > end - start:
        malformed(f"the length {length:,} at byte {at:,} goes beyond the end")
    return start, start + length


def read_fixed(data: bytes, at: int, end: int, size: int) -> tuple[bytes, int]:
    if end - at < size:
        malformed(f"the {size} bytes at byte {at:,} are cut off")
    return data[at : at + size], at + size


def skip(data: bytes, at: int, end: int, number: int, wire: int, depth: int) -> int:
    """Where a field ends whose tag has been read. ``depth``: of the message that it is in."""
    match wire:
        case 0:
            return read_varint(data, at, end)[1]
        case 1:
            return read_fixed(data, at, end, 8)[1]
        case 2:
            return read_length(data, at, end)[1]
        case 5:
            return read_fixed(data, at, end, 4)[1]
        case 3:
            return _skip_group(data, at, end, number, depth + 1)
        case _:
            malformed(f"a group ends before byte {at:,} that did not begin")


def _skip_group(data: bytes, at: int, end: int, number: int, depth: int) -> int:
    if depth > DEPTH_MAX:
        too_deep()
    while at < end:
        inner, wire, at = read_tag(data, at, end)
        if wire == END_GROUP:
            if inner != number:
                malformed(f"the group {number} ends before byte {at:,} as group {inner}")
            return at
        at = skip(data, at, end, inner, wire, depth)
    malformed(f"the group {number} does not end")


def varint(number: int) -> bytes:
    """A number in as few bytes as it needs; a negative one in ten."""
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))
