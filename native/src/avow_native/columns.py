"""``columns.h`` for Python: declared columns as C has them, and the call of a decoder that fills them.

A decoder reads the records that are beyond doubt; the others it names, and does not refuse.

Owns: describing columns to C, and what comes back. Must not know: any format, avow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

_KINDS = {  # the same numbers as in columns.h
    pa.bool_(): 0,
    pa.int8(): 1,
    pa.int16(): 2,
    pa.int32(): 3,
    pa.int64(): 4,
    pa.float32(): 5,
    pa.float64(): 6,
    pa.string(): 8,
    pa.binary(): 9,
    pa.date32(): 10,
    pa.timestamp("us", "UTC"): 11,
    pa.timestamp("us"): 12,
}
_DECIMAL, _STRING, _LIST, _MAP, _STRUCT = 7, 8, 13, 14, 15
_NO_MEMORY = -1
_ARROW_ARRAY_BYTES = 80  # of struct ArrowArray: five numbers and five pointers


@dataclass(frozen=True, slots=True)
class Column:
    """A declared column, or a part of one."""

    name: str
    type: pa.DataType
    required: bool = False  # a record where it is absent or null is doubtful
    parts: tuple[Column, ...] = ()  # the fields of a struct; the element of a list; the value of a map


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("name_length", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("required", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("scale", ctypes.c_int32),
        ("child_count", ctypes.c_int32),
    )


class Columns:
    """The columns of a record, for the calls of one decoder. It keeps nothing from one call to the next."""

    def __init__(self, columns: Sequence[Column]) -> None:
        record = Column("", pa.struct([(column.name, column.type) for column in columns]), parts=tuple(columns))
        fields = list(_fields(record))
        self.fields = (_Field * len(fields))(*fields)
        self.schema = pa.schema([(column.name, column.type) for column in columns])

    def read(self, values: pa.BinaryArray, call: Callable[..., int]) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The rows of the records that are beyond doubt, in order, and the indices of the others. No value is null.

        ``call`` is given the arguments that every decoder ends with: data, its length, offsets, rows, doubtful, out.
        """
        if values.type != pa.binary() or values.null_count:
            raise ValueError(f"expected binary values without nulls, got {values.type} with {values.null_count} nulls")
        rows = len(values)
        _, offsets, data = values.buffers()
        doubtful = pa.allocate_buffer(8 * rows)
        array = (ctypes.c_uint64 * (_ARROW_ARRAY_BYTES // 8))()
        count = call(
            data.address if data else None,
            data.size if data else 0,
            offsets.address + 4 * values.offset if rows else None,
            rows,
            doubtful.address,
            array,
        )
        if count == _NO_MEMORY:
            raise MemoryError(f"no memory to read {rows:,} records")
        if count < 0:
            raise ValueError("the offsets of the values, or the columns, make no sense")
        batch = pa.RecordBatch._import_from_c(ctypes.addressof(array), self.schema)
        return batch, pa.Array.from_buffers(pa.int64(), count, [None, doubtful])


POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
READ_ARGUMENTS: list[Any] = [POINTER, NUMBER, POINTER, NUMBER, POINTER, POINTER]  # what ``call`` is given


def can_hold(columns: Sequence[Column]) -> bool:
    """Whether all their types are known to the library."""
    try:
        return all(list(_fields(column)) for column in columns)
    except (ValueError, KeyError):
        return False


def _fields(column: Column) -> Iterator[_Field]:
    """A column and its parts, each before its own parts. ``ValueError`` or ``KeyError`` for what C has no kind for."""
    name = column.name.encode()  # a name that is no text at all raises here
    kind, parts = _kind(column.type), column.parts
    precision, scale = (column.type.precision, column.type.scale) if kind == _DECIMAL else (0, 0)
    yield _Field(name, len(name), kind, column.required, precision, scale, 1 if kind == _MAP else len(parts))
    if kind == _MAP:
        yield _Field(b"", 0, _STRUCT, 1, 0, 0, 2)
        yield _Field(b"", 0, _STRING, 1, 0, 0, 0)
    for part in parts:
        yield from _fields(part)


def _kind(type: pa.DataType) -> int:
    if pa.types.is_decimal128(type):
        return _DECIMAL
    if pa.types.is_list(type):
        return _LIST
    if pa.types.is_map(type):
        return _MAP
    return _STRUCT if pa.types.is_struct(type) else _KINDS[type]
