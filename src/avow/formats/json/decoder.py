"""Records whose value is a JSON object.

Values are read by column first, by ``native_columns`` where avow's C library is there and else by ``arrow_columns``;
what cannot be read that way is read again one by one (``document``, ``values``), and that is where a record is refused
and why. All ways agree on every record: the first ones are only faster.

Owns: which record is read which way. Must not know: the types. Its neighbours are those four and ``formats.rows``.
"""

from __future__ import annotations

from typing import Literal, Protocol

import pyarrow as pa

from avow.arrow import without
from avow.formats.base import Decoded
from avow.formats.json.arrow_columns import ArrowColumns
from avow.formats.json.document import Json, parse, write
from avow.formats.json.keys import key_reader
from avow.formats.json.native_columns import NativeColumns
from avow.formats.json.plugin import JsonConfig
from avow.formats.json.values import ReadRules, fields_reader, refuse_unknown
from avow.formats.rows import RowCollector, row_schema, where_true
from avow.formats.text import refuse_nul_within
from avow.formats.tombstones import Tombstones, key_fields
from avow.schema import Schema
from avow.settings import REST_COLUMN, PipelineConfig


class ColumnReader(Protocol):
    """Reads many values at once, by column."""

    def read(self, values: pa.Array) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The rows of the values that are beyond doubt, in order, and which values are not, ascending. None is null."""
        ...


class JsonDecoder:
    """Decodes JSON objects into the columns of one pipeline."""

    def __init__(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> None:
        decode = pipeline.decode
        assert isinstance(decode, JsonConfig)
        self._schema = row_schema(decode)
        ignore_unknown = decode.unknown_fields == "ignore"
        self._columns = column_reader(decode.columns, ignore_unknown=ignore_unknown, refuse_nul=refuse_nul)
        self._strict = StrictReader(decode.columns, decode.unknown_fields, refuse_nul=refuse_nul)
        self._tombstones = Tombstones(pipeline, key_reader(key_fields(pipeline), refuse_nul=refuse_nul))

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        values = batch.column("value").cast(pa.binary())
        rows = RowCollector(self._schema, self._strict.row)
        self._read(values.drop_null(), where_true(values.is_valid()), rows)
        return rows.decoded(self._tombstones.apply(batch.column("key"), where_true(values.is_null()).to_pylist()))

    def _read(self, values: pa.Array, at: pa.Int64Array, rows: RowCollector) -> None:
        """``at``: for each value, its row in the batch."""
        if self._columns is None or not len(values):
            rows.read_each(values, at)
            return
        read, doubtful = self._columns.read(values)
        if len(doubtful):
            rows.read_each(values.take(doubtful), at.take(doubtful))
            at = without(at, doubtful)
        if len(at):
            if len(read.schema) < len(self._schema):
                read = read.append_column(REST_COLUMN, pa.nulls(len(read), pa.string()))
            rows.add_rows(read, at)


def column_reader(columns: Schema, *, ignore_unknown: bool, refuse_nul: bool) -> ColumnReader | None:
    """The fastest there is for these columns."""
    if NativeColumns.can_read(columns):
        return NativeColumns(columns, refuse_nul=refuse_nul, ignore_unknown=ignore_unknown)
    return ArrowColumns(columns, refuse_nul=refuse_nul) if ArrowColumns.can_read(columns) else None


class StrictReader:
    """Reads one record, and has the last word on it."""

    def __init__(
        self, columns: Schema, unknown_fields: Literal["reject", "ignore", "keep"], *, refuse_nul: bool
    ) -> None:
        fields = columns.fields
        self._unknown_fields = unknown_fields
        self._refuse_nul = refuse_nul
        self._known = frozenset(field.name for field in fields)
        # A struct's unknown fields have no column to be kept in.
        rules = ReadRules(refuse_nul=refuse_nul, ignore_unknown=self._unknown_fields == "ignore")
        self._read = fields_reader(fields, rules)

    def row(self, value: bytes) -> dict[str, object]:
        """The record's row, or ``DecodeError``."""
        document = parse(value)
        if document.keys() <= self._known:
            return self._read(document)
        if self._unknown_fields == "reject":
            refuse_unknown(document, self._known)
        row = self._read(document)
        if self._unknown_fields == "keep":
            row[REST_COLUMN] = self._rest(document)
        return row

    def _rest(self, document: dict[str, Json]) -> str:
        rest = {name: value for name, value in document.items() if name not in self._known}
        if self._refuse_nul:
            refuse_nul_within(rest)
        return write(rest)
