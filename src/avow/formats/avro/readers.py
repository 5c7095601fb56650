"""The readers of one writer's schema, kept for a process: what its steps are costs more to find than a small batch.

Owns: which of them there are. Neighbours: ``reader`` and ``native_columns``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa

from avow.formats.avro.native_columns import NativeColumns
from avow.formats.avro.reader import AvroReader
from avow.formats.avro.resolution import Incompatible, resolve
from avow.formats.avro.schema import BadSchema, Record, parse
from avow.formats.registry.decoder import IncompatibleSchema

if TYPE_CHECKING:
    from avow.formats.avro.plugin import AvroSchema

_KEPT = 512  # schemas, of all pipelines of a process


class AvroSchemaReader:
    """Reads what one schema has written. See ``formats.registry.decoder.SchemaReader``."""

    def __init__(self, strict: AvroReader, columns: NativeColumns | None) -> None:
        self._strict, self._columns = strict, columns

    @property
    def by_column(self) -> bool:
        return self._columns is not None

    def row(self, value: bytes, at: int) -> Mapping[str, object]:
        return self._strict.row(value, at)

    def read(self, values: pa.BinaryArray, skip: int) -> tuple[pa.RecordBatch, pa.Int64Array]:
        assert self._columns is not None
        return self._columns.read(values, skip)


@lru_cache(maxsize=_KEPT)
def schema_reader(
    reader: AvroSchema, text: str, references: tuple[str, ...], *, refuse_nul: bool, by_column: bool
) -> AvroSchemaReader:
    """``text``: the writer's schema. ``IncompatibleSchema`` if its records cannot be read as the reader's."""
    try:
        step = resolve(parse(text, references), reader.type)
    except (BadSchema, Incompatible) as error:
        raise IncompatibleSchema(str(error)) from None
    is_record = isinstance(reader.type, Record)
    strict = AvroReader(step, reader.columns, is_record=is_record, refuse_nul=refuse_nul)
    can_read = by_column and is_record and NativeColumns.can_read(reader.columns)
    columns = NativeColumns(step, reader.columns, refuse_nul=refuse_nul) if can_read else None
    return AvroSchemaReader(strict, columns)
