"""Files of an Iceberg table whose columns were renamed: read by the ids of fields, as Iceberg's own readers do.

A name may mean another column in an older file. Where no name ever did, files are read by name, which Arrow does by
itself and faster.

Owns: that mapping, in Arrow. Must not know: tables, commits. Its neighbour is ``table``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq

from avow.errors import SinkError

_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True)
class FieldIdDataset:
    """In the place of Arrow's ``Dataset``, as far as one is asked."""

    filesystem: pa.fs.FileSystem
    paths: Sequence[str]
    schema: pa.Schema  # with the table's ids

    def scanner(self, columns: list[str] | None = None, filter: pc.Expression | None = None) -> ds.Scanner:
        made = pa.RecordBatchReader.from_batches(self.schema, self._batches())
        return ds.Scanner.from_batches(made, columns=columns, filter=filter)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        wanted = pa.struct(list(self.schema))
        for path in self.paths:
            with self.filesystem.open_input_file(path) as stream:
                file = pq.ParquetFile(stream)
                existing = pa.field("", pa.struct(list(file.schema_arrow)))
                for group in range(file.num_row_groups):
                    rows = file.read_row_group(group).combine_chunks().to_struct_array().combine_chunks()
                    yield pa.RecordBatch.from_struct_array(_fitted(rows, existing, wanted)).cast(self.schema)


def _fitted(values: pa.Array, existing: pa.Field, wanted: pa.DataType) -> pa.Array:
    """Values of a file's field in the type of the table's, part by part of the same id."""
    if pa.types.is_struct(wanted):
        by_id = {_id(field): (field, part) for field, part in zip(existing.type.fields, values.flatten(), strict=True)}
        parts = [
            _fitted(by_id[_id(field)][1], by_id[_id(field)][0], field.type)
            if _id(field) in by_id
            else pa.nulls(len(values), field.type)
            for field in wanted.fields
        ]
        return pa.StructArray.from_arrays(parts, fields=_nullable(wanted.fields), mask=values.is_null())
    if pa.types.is_list(wanted):
        items = _fitted(values.values, existing.type.value_field, wanted.value_type)
        offsets = values.offsets.cast(pa.int32())  # of a large list, as some writers have it
        return pa.ListArray.from_arrays(offsets, items, mask=values.is_null()).cast(wanted)
    if pa.types.is_map(wanted):
        keys = _fitted(values.keys, existing.type.key_field, wanted.key_type)
        items = _fitted(values.items, existing.type.item_field, wanted.item_type)
        return pa.MapArray.from_arrays(values.offsets, keys, items, mask=values.is_null()).cast(wanted)
    return values.cast(wanted)


def _nullable(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """The flags of the schema are for files, and hold for whole rows only."""
    return [field.with_nullable(True) for field in fields]


def _id(field: pa.Field) -> bytes:
    number: bytes | None = (field.metadata or {}).get(_ID)
    if number is None:
        raise SinkError(
            f"column {field.name!r} of a file has no field id, and columns of its table were renamed",
            advice="Rewrite the table's files with Spark: rewrite_data_files.",
        )
    return number
