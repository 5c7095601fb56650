"""The declared types as Arrow types, and small arrays made without ``pa.array``.

Where pandas is installed, ``pa.array``, ``pa.scalar`` and Python values given to compute functions import it, to see
whether they were given one of its objects. That is a second at the start of every Spark worker, for nothing: reading
good records avoids them.

Owns: the mapping of types. Must not know: any format. Its neighbour is ``avow.schema``, whose types it maps.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa

from avow.schema import Array, Decimal, Field, Map, Scalar, Type

_SCALARS: dict[Scalar, pa.DataType] = {
    Scalar.BOOLEAN: pa.bool_(),
    Scalar.BYTE: pa.int8(),
    Scalar.SHORT: pa.int16(),
    Scalar.INT: pa.int32(),
    Scalar.LONG: pa.int64(),
    Scalar.FLOAT: pa.float32(),
    Scalar.DOUBLE: pa.float64(),
    Scalar.STRING: pa.string(),
    Scalar.BINARY: pa.binary(),
    Scalar.DATE: pa.date32(),
    Scalar.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    Scalar.TIMESTAMP_NTZ: pa.timestamp("us"),
}


def arrow_type(type: Type) -> pa.DataType:
    """A declared type in Arrow. Nested types stay nested; a sink that has none turns them into its own."""
    if isinstance(type, Scalar):
        return _SCALARS[type]
    if isinstance(type, Decimal):
        return pa.decimal128(type.precision, type.scale)
    if isinstance(type, Array):
        return pa.list_(arrow_type(type.element))
    if isinstance(type, Map):
        return pa.map_(pa.string(), arrow_type(type.value))
    return pa.struct(arrow_fields(type.fields))


def arrow_fields(fields: Iterable[Field]) -> list[pa.Field]:
    """All nullable: ``not null`` is checked by the decoder, and Arrow wants a child of a null struct to be null."""
    return [pa.field(field.name, arrow_type(field.type)) for field in fields]


def indices(rows: Sequence[int]) -> pa.Int64Array:
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(array("q", rows))])


def without(numbers: pa.Int64Array, rows: pa.Int64Array) -> pa.Int64Array:
    """The numbers that do not stand at these rows."""
    return _indices(np.delete(_numbers(numbers), _numbers(rows)))


def counted(rows: int) -> pa.Int64Array:
    """All the indices of so many rows."""
    return _indices(np.arange(rows, dtype=np.int64))


def _indices(numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Int64Array:
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def _numbers(array: pa.Int64Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Without ``to_numpy``, which imports pandas too."""
    if not len(array):
        return np.empty(0, np.int64)
    return np.frombuffer(array.buffers()[1], np.int64, len(array), 8 * array.offset)


def binaries(*values: bytes) -> pa.BinaryArray:
    ends = pa.py_buffer(array("i", accumulate(map(len, values), initial=0)))
    return pa.Array.from_buffers(pa.binary(), len(values), [None, ends, pa.py_buffer(b"".join(values))])


def no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
