"""Many JSON records at once, by avow's own C library: strict by itself, and several times faster than Arrow's reader.

Owns: the declared columns as the library wants them. Must not know: why a record is refused, and how JSON is read.
Its neighbours are ``decoder``, which chooses it where the library is there, and ``avow_native.json``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from avow import native
from avow.arrow import arrow_type
from avow.schema import Array, Field, Map, Schema, Struct, Type

if TYPE_CHECKING:
    from avow_native.json import Column


class NativeColumns:
    """Reads values into the columns of one schema. See ``decoder.ColumnReader``."""

    def __init__(self, schema: Schema, *, refuse_nul: bool, ignore_unknown: bool) -> None:
        from avow_native.json import JsonReader

        library = native.library()
        assert library is not None
        self._reader = JsonReader(library, columns(schema), refuse_nul=refuse_nul, ignore_unknown=ignore_unknown)

    @staticmethod
    def can_read(schema: Schema) -> bool:
        """Whether the library is there, and knows these types and names."""
        if native.library() is None:
            return False
        from avow_native.json import JsonReader

        return JsonReader.can_read(columns(schema))

    def read(self, values: pa.Array) -> tuple[pa.RecordBatch, pa.Int64Array]:
        return self._reader.read(values)


def columns(schema: Schema) -> list[Column]:
    """The declared columns as the library wants them, whatever is read into them."""
    return [_column(field) for field in schema]


def _column(field: Field) -> Column:
    from avow_native.json import Column

    return Column(field.name, arrow_type(field.type), field.required, tuple(map(_column, _parts(field.type))))


def _parts(type: Type) -> tuple[Field, ...]:
    if isinstance(type, Array):
        return (Field("", type.element),)
    if isinstance(type, Map):
        return (Field("", type.value),)
    return type.fields if isinstance(type, Struct) else ()
