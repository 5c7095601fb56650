"""Arrow record batches as PostgreSQL's binary COPY data: by ``avow-native`` where it is there, else by Arrow itself.

The format (https://www.postgresql.org/docs/current/sql-copy.html) is a header, a tuple for each row and a trailer. A
tuple is the number of its fields, and of each its length (-1: null) and its bytes, big-endian. Without avow-native each
column is made into arrays of such bytes by numpy, and Arrow joins them row by row: no Python object per value.

Both give the same bytes. What PostgreSQL's own receive functions check (encodings, NUL, ranges, lengths) is left to
them; what they could not see (a timestamp that would wrap around, or mean -infinity) is an ``EncodeError`` here.

Owns: the format. Must not know: connections, tables, what becomes of a row that cannot be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from avow import native

PART_BYTES = 1 << 20  # about as many are made at once

_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_EPOCH_US, _EPOCH_DAYS = 946_684_800_000_000, 10_957  # PostgreSQL counts from 2000
_NUMERIC_NEGATIVE = 0x4000
_GROUPS = 11  # digits of base 10000 that 128 bits can have, the lowest perhaps not whole

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]


class EncodeError(ValueError):
    """A value that PostgreSQL's type cannot hold, with what the server would have said. ``row`` counts from 0."""

    sqlstate = "22008"  # datetime_field_overflow

    def __init__(self, row: int, column: str) -> None:
        super().__init__(f"column {column!r}: date or timestamp out of range")
        self.row = row


def chunks(rows: pa.RecordBatch) -> Iterator[memoryview]:
    """All of ``rows``, with header and trailer. A chunk is there until the next is asked for."""
    library = native.library()
    if library is None:
        yield from plain_chunks(rows)
        return
    from avow_native import copy

    try:
        yield from copy.chunks(library, rows)
    except copy.OutOfRangeError as error:
        raise EncodeError(error.row, rows.schema.names[error.column]) from None


def plain_chunks(rows: pa.RecordBatch) -> Iterator[memoryview]:
    """The same without avow-native."""
    columns = [(_encoder(column.type), _storage(column)) for column in rows.columns]
    yield memoryview(_HEADER)
    step = max(1, rows.num_rows * PART_BYTES // max(1, rows.nbytes))
    for start in range(0, rows.num_rows, step):
        length = min(step, rows.num_rows - start)
        pieces: list[pa.Array] = [_fixed(np.full((length, 1), len(columns), ">i2"))]
        wrong: list[tuple[int, int]] = []
        for at, (encode, column) in enumerate(columns):
            try:
                pieces += encode(column.slice(start, length))
            except _OutOfRange as error:
                wrong.append((error.args[0], at))
        if wrong:  # the first one, as the rows are sent
            row, at = min(wrong)
            raise EncodeError(start + row, rows.schema.names[at])
        nothing = _binary(np.zeros(length + 1, np.int32), b"")
        joined = pc.binary_join_element_wise(*pieces, nothing, options=pc.JoinOptions("replace", ""))
        yield memoryview(joined.buffers()[2])
    yield memoryview(_TRAILER)


class _OutOfRange(ValueError):
    """The first row that is."""


def _storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


# Each encoder gives binary arrays whose values, joined, are the field. A null among them adds nothing.
Encoder = Callable[[pa.Array], list[pa.Array]]


def _encoder(type_: pa.DataType) -> Encoder:
    if pa.types.is_decimal128(type_) and type_.scale >= 0:
        return partial(_numeric, scale=type_.scale)
    if type_ in _ENCODERS:
        return _ENCODERS[type_]
    raise TypeError(f"no PostgreSQL type for {type_}")


def _nulls(column: pa.Array) -> list[pa.Array]:
    return [_lengths(np.full(len(column), -1))]


def _booleans(column: pa.Array) -> list[pa.Array]:
    return _fields(column, _bits(column.buffers()[1], column).reshape(-1, 1))


def _numbers(column: pa.Array, stored: str, sent: str) -> list[pa.Array]:
    return _fields(column, _values(column, stored).astype(sent).reshape(-1, 1))


def _since_2000(column: pa.Array, stored: str, sent: str, epoch: int) -> list[pa.Array]:
    values = _values(column, stored)
    # Below it numbers wrap around, and the lowest one means -infinity.
    low = values <= np.iinfo(values.dtype).min + epoch
    if low.any():
        valid = _valid(column)
        wrong = np.flatnonzero(low if valid is None else low & valid)
        if len(wrong):
            raise _OutOfRange(int(wrong[0]))
        values = np.where(low, 0, values)
    return _fields(column, (values - epoch).astype(sent).reshape(-1, 1))


def _texts(column: pa.Array, version: bytes = b"") -> list[pa.Array]:
    """``version`` stands before each."""
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data, valid = column.buffers()[2], _valid(column)
    lengths = np.diff(ends) + len(version)
    if valid is not None:
        lengths = np.where(valid, lengths, -1)
    before = np.frombuffer(version * len(column), np.uint8).reshape(len(column), -1)
    validity = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    content = [validity, pa.py_buffer(ends), pa.py_buffer(b"") if data is None else data]
    return [
        _lengths(lengths),
        *([_fixed(before, valid)] if version else []),
        pa.Array.from_buffers(pa.binary(), len(column), content),
    ]


def _numeric(column: pa.Array, scale: int) -> list[pa.Array]:
    """As numeric_recv reads it: the number of digits of base 10000, the power of the first, sign, scale, digits."""
    low, high = _values(column, "<u8", per_value=2).reshape(-1, 2).T
    negative = high >> np.uint64(63) == 1
    low, high = np.where(negative, ~low + np.uint64(1), low), np.where(negative, ~high + (low == 0), high)
    digits = _groups(low, high, scale)  # highest first
    count = digits.shape[1]
    at = np.arange(count)
    used = digits != 0
    first = np.where(used.any(1), used.argmax(1), count)
    ends = count - used[:, ::-1].argmax(1)
    lengths = np.where(first < count, ends - first, 0)
    weights = np.where(lengths == 0, 0, count - 1 - (scale + 3) // 4 - first)
    shifted = np.take_along_axis(digits, np.minimum(first[:, None] + at, count - 1), 1)
    head = [lengths, weights, np.where(negative, _NUMERIC_NEGATIVE, 0), np.full(len(column), scale)]
    words = np.column_stack([*head, shifted]).astype(">i2")
    valid = _valid(column)
    words_kept = 4 + (lengths if valid is None else np.where(valid, lengths, -4))
    data = words[np.arange(words.shape[1]) < words_kept[:, None]].tobytes()
    sizes = 2 * words_kept
    return [_lengths(sizes if valid is None else np.where(valid, sizes, -1)), _binary(_ends(sizes), data)]


def _groups(low: Words, high: Words, scale: int) -> npt.NDArray[np.int64]:
    """Numbers of 128 bits in base 10000, highest digit first. The lowest digit is cut at the decimal point."""
    mask, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    parts = [high >> word, high & mask, low >> word, low & mask]
    groups: list[npt.NDArray[np.int64]] = []
    while len(groups) < _GROUPS:
        partial_ = not groups and scale % 4 != 0
        divisor = np.uint64(10 ** (scale % 4) if partial_ else 10_000)
        rest = np.zeros_like(low)
        for number, part in enumerate(parts):
            whole = rest << word | part
            parts[number] = whole // divisor
            rest = whole - parts[number] * divisor
        groups.insert(0, (rest * np.uint64(10 ** (4 - scale % 4) if partial_ else 1)).astype(np.int64))
        while parts and not parts[0].any():
            del parts[0]
        if not parts:
            break
    return np.column_stack(groups)


def _fields(column: pa.Array, values: npt.NDArray[np.generic]) -> list[pa.Array]:
    """A matrix of one value per row, as fields."""
    valid = _valid(column)
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(column), -1)
    if valid is None:
        length = np.full((len(column), 1), raw.shape[1], ">i4").view(np.uint8)
        return [_fixed(np.hstack([length, raw]))]
    return [_lengths(np.where(valid, raw.shape[1], -1)), _fixed(raw, valid)]


def _lengths(lengths: npt.NDArray[np.integer]) -> pa.Array:
    return _fixed(lengths.astype(">i4").reshape(-1, 1))


def _fixed(values: npt.NDArray[np.generic], valid: Mask | None = None) -> pa.Array:
    """A binary array of a matrix' rows."""
    raw = np.ascontiguousarray(values).view(np.uint8)
    ends = np.arange(len(raw) + 1, dtype=np.int32) * raw.shape[1]
    return _binary(ends.astype(np.int32), raw, valid)


def _binary(ends: npt.NDArray[np.int32], data: Bytes | bytes, valid: Mask | None = None) -> pa.Array:
    validity = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, [validity, pa.py_buffer(ends), pa.py_buffer(data)])


def _ends(sizes: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _values(column: pa.Array, stored: str, per_value: int = 1) -> npt.NDArray[Any]:
    start = column.offset * per_value
    return np.frombuffer(column.buffers()[1], stored)[start : start + len(column) * per_value]


def _valid(column: pa.Array) -> Mask | None:
    return _bits(column.buffers()[0], column).astype(bool) if column.null_count else None


def _bits(buffer: pa.Buffer, column: pa.Array) -> Bytes:
    # Not to_numpy: that would import pandas, which costs a worker's first task half a second.
    first, last = column.offset // 8, (column.offset + len(column) + 7) // 8
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8)[first:last], bitorder="little")
    return bits[column.offset - first * 8 :][: len(column)]


_ENCODERS: dict[pa.DataType, Encoder] = {
    pa.null(): _nulls,
    pa.bool_(): _booleans,
    pa.int8(): partial(_numbers, stored="<i1", sent=">i2"),
    pa.int16(): partial(_numbers, stored="<i2", sent=">i2"),
    pa.int32(): partial(_numbers, stored="<i4", sent=">i4"),
    pa.int64(): partial(_numbers, stored="<i8", sent=">i8"),
    # As whole numbers: a NaN keeps its bits.
    pa.float32(): partial(_numbers, stored="<i4", sent=">i4"),
    pa.float64(): partial(_numbers, stored="<i8", sent=">i8"),
    pa.date32(): partial(_since_2000, stored="<i4", sent=">i4", epoch=_EPOCH_DAYS),
    pa.timestamp("us"): partial(_since_2000, stored="<i8", sent=">i8", epoch=_EPOCH_US),
    pa.timestamp("us", "UTC"): partial(_since_2000, stored="<i8", sent=">i8", epoch=_EPOCH_US),
    pa.string(): _texts,
    pa.binary(): _texts,
    pa.json_(): partial(_texts, version=b"\1"),
}
