"""``json.c`` for Python: JSON records into a record batch of declared columns.

What a record must look like is said in ``json.c``. A record that it cannot vouch for is named, not refused.

Owns: describing columns to C, and what comes back. Must not know: avow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

_KINDS = {  # the same numbers as in json.c
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
_REFUSE_NUL, _IGNORE_UNKNOWN = 1, 2
_NO_MEMORY = -1
_NOT_AS_WRITTEN = frozenset('"\\')  # a JSON string writes these in another way


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


_ARROW_ARRAY_BYTES = 80  # of struct ArrowArray: five numbers and five pointers


class JsonReader:
    """Reads records into columns. It keeps nothing from one call to the next."""

    def __init__(
        self, library: ctypes.CDLL, columns: Sequence[Column], *, refuse_nul: bool, ignore_unknown: bool
    ) -> None:
        record = Column("", pa.struct([(column.name, column.type) for column in columns]), parts=tuple(columns))
        fields = list(_fields(record))
        self._fields = (_Field * len(fields))(*fields)
        self._rules = (_REFUSE_NUL if refuse_nul else 0) | (_IGNORE_UNKNOWN if ignore_unknown else 0)
        self._schema = pa.schema([(column.name, column.type) for column in columns])
        self._read = library.avow_json_read
        self._read.restype = ctypes.c_int64
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._read.argtypes = [pointer, number, ctypes.c_int32, pointer, number, pointer, number, pointer, pointer]

    @staticmethod
    def can_read(columns: Sequence[Column]) -> bool:
        """Whether all their types and names are known to the library."""
        try:
            return all(list(_fields(column)) for column in columns)
        except (ValueError, KeyError):
            return False

    def read(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The rows of the records that are beyond doubt, in order, and the indices of the others. No value is null."""
        if values.type != pa.binary() or values.null_count:
            raise ValueError(f"expected binary values without nulls, got {values.type} with {values.null_count} nulls")
        rows = len(values)
        _, offsets, data = values.buffers()
        doubtful = pa.allocate_buffer(8 * rows)
        array = (ctypes.c_uint64 * (_ARROW_ARRAY_BYTES // 8))()
        count = self._read(
            self._fields,
            len(self._fields),
            self._rules,
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
        batch = pa.RecordBatch._import_from_c(ctypes.addressof(array), self._schema)
        return batch, pa.Array.from_buffers(pa.int64(), count, [None, doubtful])


def _fields(column: Column) -> Iterator[_Field]:
    """A column and its parts, each before its own parts. ``ValueError`` or ``KeyError`` for what json.c cannot read."""
    name = column.name.encode()  # a name that is no text at all raises here
    if _NOT_AS_WRITTEN & set(column.name):
        raise ValueError(f"{column.name!r} stands in JSON with escapes")
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
