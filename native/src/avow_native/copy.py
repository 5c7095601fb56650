"""Arrow record batches as PostgreSQL's binary COPY data, by ``copy.c``.

Owns: what of an Arrow array ``copy.c`` is given, and that its buffers are as long as ``copy.c`` believes. Must not
know: connections, tables, or what is done about a value that PostgreSQL cannot hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import pyarrow as pa

CHUNK_BYTES = 128 * 1024  # what psycopg gives to libpq at once, and what stays in a core's cache meanwhile

_NULL, _BOOLEAN, _INT8, _FIXED2, _FIXED4, _FIXED8, _DATE, _TIMESTAMP, _NUMERIC, _BYTES, _JSONB = range(11)
_TYPES = {
    pa.null(): _NULL,
    pa.bool_(): _BOOLEAN,
    pa.int8(): _INT8,
    pa.int16(): _FIXED2,
    pa.int32(): _FIXED4,
    pa.float32(): _FIXED4,
    pa.int64(): _FIXED8,
    pa.float64(): _FIXED8,
    pa.date32(): _DATE,
    pa.timestamp("us"): _TIMESTAMP,
    pa.timestamp("us", "UTC"): _TIMESTAMP,
    pa.string(): _BYTES,
    pa.binary(): _BYTES,
    pa.json_(): _JSONB,
}
_BITS = {_BOOLEAN: 1, _INT8: 8, _FIXED2: 16, _FIXED4: 32, _FIXED8: 64, _DATE: 32, _TIMESTAMP: 64, _NUMERIC: 128}


class OutOfRangeError(ValueError):
    """A date or a timestamp that PostgreSQL's type cannot hold."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"row {row}, column {column}: date or timestamp out of range")
        self.row, self.column = row, column


class _Column(Structure):
    _fields_ = (
        ("type", c_int32),
        ("scale", c_int32),
        ("offset", c_int64),
        ("validity", c_void_p),
        ("values", c_void_p),
        ("ends", c_void_p),
        ("size", c_int64),
    )


class _Copy(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("row", c_int64),
        ("sent", c_int64),
        ("columns", c_int32),
        ("column", c_int32),
        ("started", c_int32),
        ("ended", c_int32),
    )


def chunks(library: ctypes.CDLL, rows: pa.RecordBatch, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """All of ``rows``, with header and trailer, in parts of at most ``size`` bytes. Each is there until the next is
    asked for. Raises ``OutOfRangeError``, and ``TypeError`` for a type that has no column in a table of ours."""
    encode = library.avow_copy_encode
    encode.argtypes = (POINTER(_Copy), POINTER(_Column), c_void_p, c_int64)
    encode.restype = c_int64
    columns = (_Column * rows.num_columns)(*map(_column, rows.columns))
    copy = _Copy(rows=rows.num_rows, columns=rows.num_columns)
    out = bytearray(size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(out))
    while written := encode(byref(copy), columns, address, size):
        if written == -1:
            raise OutOfRangeError(copy.row, copy.column)
        if written < 0:
            raise ValueError(f"row {copy.row}, column {copy.column}: the column's buffers are broken ({written})")
        yield memoryview(out)[:written]


def _column(array: pa.Array) -> _Column:
    scale = 0
    if pa.types.is_decimal128(array.type) and array.type.scale >= 0:
        type_, scale = _NUMERIC, array.type.scale
    elif array.type in _TYPES:
        type_ = _TYPES[array.type]
    else:
        raise TypeError(f"no PostgreSQL type for {array.type}")
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if type_ == _NULL or not len(array):
        return _Column(type=_NULL)
    end = array.offset + len(array)
    validity, *others = array.buffers()
    if array.null_count == 0:
        validity = None
    _check(validity, end)
    if type_ in _BITS:
        (values,) = others
        _check(values, end * _BITS[type_])
        return _Column(type_, scale, array.offset, _address(validity), values.address, None, values.size)
    ends, values = others
    _check(ends, (end + 1) * 32)
    size = 0 if values is None else values.size
    return _Column(type_, scale, array.offset, _address(validity), _address(values), ends.address, size)


def _check(buffer: pa.Buffer | None, bits: int) -> None:
    if buffer is not None and buffer.size * 8 < bits:
        raise ValueError(f"an Arrow buffer of {buffer.size} bytes should have {(bits + 7) // 8}")


def _address(buffer: pa.Buffer | None) -> int | None:
    return None if buffer is None else int(buffer.address)
