"""``json.c`` for Python: JSON records into a record batch of declared columns.

What a record must look like is said in ``json.c``. A record that it cannot vouch for is named, not refused.

Owns: the rules that C is given. Must not know: avow. Its neighbour is ``columns``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from avow_native.columns import NUMBER, POINTER, READ_ARGUMENTS, Column, Columns, can_hold

__all__ = ["Column", "JsonReader"]

_REFUSE_NUL, _IGNORE_UNKNOWN = 1, 2
_NOT_AS_WRITTEN = frozenset('"\\')  # a JSON string writes these in another way


class JsonReader:
    """Reads records into columns. It keeps nothing from one call to the next."""

    def __init__(
        self, library: ctypes.CDLL, columns: Sequence[Column], *, refuse_nul: bool, ignore_unknown: bool
    ) -> None:
        self._columns = Columns(columns)
        self._rules = (_REFUSE_NUL if refuse_nul else 0) | (_IGNORE_UNKNOWN if ignore_unknown else 0)
        self._read = library.avow_json_read
        self._read.restype = ctypes.c_int64
        self._read.argtypes = [POINTER, NUMBER, ctypes.c_int32, *READ_ARGUMENTS]

    @staticmethod
    def can_read(columns: Sequence[Column]) -> bool:
        """Whether all their types and names are known to the library."""
        return can_hold(columns) and all(map(_as_written, columns))

    def read(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The rows of the records that are beyond doubt, in order, and the indices of the others. No value is null."""
        fields = self._columns.fields
        return self._columns.read(values, partial(self._read, fields, len(fields), self._rules))


def _as_written(column: Column) -> bool:
    return not _NOT_AS_WRITTEN & set(column.name) and all(map(_as_written, column.parts))
