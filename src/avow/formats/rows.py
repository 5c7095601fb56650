"""What decoders are made of: rows put together from columns and from single records, with what was refused.

``RowDecoder`` is a whole decoder, for a format that is read one record at a time. A faster one reads many records by
column and gives the doubtful ones to a ``RowCollector``, whose reader has the last word.

Owns: the order of rows, and that each record is in one place. Must not know: any format. Neighbours: ``base`` and
``tombstones``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import arrow_fields, indices, no_rows
from avow.errors import first_line
from avow.formats.base import Decoded, DecodeError, Reason, RefusedRecord, shown
from avow.formats.text import refuse_nul_within
from avow.formats.tombstones import NullValues, ReadKey, Tombstones
from avow.settings import REST_COLUMN, FormatConfig, PipelineConfig

ReadRow = Callable[[bytes], Mapping[str, object]]  # a value's columns by name, absent ones null; or DecodeError
_DOES_NOT_FIT = (TypeError, ValueError, ArithmeticError)  # Arrow's own errors are kinds of these


def row_schema(decode: FormatConfig) -> pa.Schema:
    """The columns of decoded rows."""
    rest = [pa.field(REST_COLUMN, pa.string())] if decode.keeps_unknown_fields else []
    return pa.schema(arrow_fields(decode.columns) + rest)


def where_true(mask: pa.Array) -> pa.Int64Array:
    """The indices at which a mask is true."""
    return pc.indices_nonzero(mask).cast(pa.int64())


class RowCollector:
    """The rows of one batch while it is decoded. ``read`` is for ``read_each``."""

    def __init__(self, schema: pa.Schema, read: ReadRow | None = None) -> None:
        self._schema = schema
        self._read = read
        self._parts: list[tuple[pa.RecordBatch, pa.Int64Array]] = []
        self._rows: list[Mapping[str, object]] = []
        self._rows_at: list[int] = []
        self._refused: list[RefusedRecord] = []

    def add_rows(self, rows: pa.RecordBatch, at: pa.Int64Array) -> None:
        """Rows that were read by column, and where in the batch their records are."""
        self._parts.append((rows, at))

    def read_each(self, values: pa.Array, at: pa.Int64Array) -> None:
        """Values to be read one by one, none of them null."""
        assert self._read
        for index, value in zip(at.to_pylist(), values.to_pylist(), strict=True):
            try:
                self.add(index, self._read(value))
            except DecodeError as error:
                self.refuse(index, error)

    def add(self, index: int, row: Mapping[str, object]) -> None:
        """A row that was read on its own."""
        self._rows.append(row)
        self._rows_at.append(index)

    def refuse(self, index: int, error: DecodeError) -> None:
        self._refused.append(RefusedRecord.of(index, error))

    def decoded(self, nulls: NullValues) -> Decoded:
        """All of them in the order of the batch, with what became of its null values."""
        for index in nulls.as_rows:
            self.add(index, {})
        rows, rows_at = self._in_order()
        refused = sorted([*self._refused, *nulls.refused], key=lambda record: record.index)
        return Decoded(rows, rows_at, nulls.deletes, nulls.deletes_at, tuple(refused), nulls.skipped)

    def _in_order(self) -> tuple[pa.RecordBatch, pa.Int64Array]:
        parts = [*self._parts, self._converted()] if self._rows else self._parts
        if not parts:
            return no_rows(self._schema), indices([])
        if len(parts) == 1 and not self._rows:
            return parts[0]
        rows = pa.concat_batches([rows for rows, _ in parts])
        at = pa.concat_arrays([at for _, at in parts])
        order = pc.sort_indices(at)
        return rows.take(order), at.take(order)

    def _converted(self) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The single rows as Arrow; one that does not fit the columns is refused."""
        try:
            return pa.RecordBatch.from_pylist(self._rows, self._schema), indices(self._rows_at)
        except _DOES_NOT_FIT:
            fitting, fitting_at = [no_rows(self._schema)], []
        for index, row in zip(self._rows_at, self._rows, strict=True):
            try:
                fitting.append(pa.RecordBatch.from_pylist([row], self._schema))
                fitting_at.append(index)
            except _DOES_NOT_FIT as error:
                self.refuse(index, DecodeError(Reason.WRONG_TYPE, first_line(error)))
        return pa.concat_batches(fitting), indices(fitting_at)


class RowDecoder:
    """Decodes one record at a time. ``read`` gives a value's columns, and ``read_key`` those of sink.key from a
    record's key; both raise ``DecodeError`` for what they cannot read.

    ``read`` need not check that columns declared not null are there, that names are columns, that text has no NUL where
    the sink cannot hold it, nor that values fit the columns' types: a record that fails there is refused here.
    """

    def __init__(
        self, pipeline: PipelineConfig, read: ReadRow, *, refuse_nul: bool, read_key: ReadKey | None = None
    ) -> None:
        self._schema = row_schema(pipeline.decode)
        self._names = frozenset(self._schema.names)
        self._required = [field.name for field in pipeline.decode.columns if field.required]
        self._read = read
        self._refuse_nul = refuse_nul
        self._tombstones = Tombstones(pipeline, read_key or _no_key)

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        values = batch.column("value").cast(pa.binary())
        rows = RowCollector(self._schema, self._row)
        rows.read_each(values.drop_null(), where_true(values.is_valid()))
        return rows.decoded(self._tombstones.apply(batch.column("key"), where_true(values.is_null()).to_pylist()))

    def _row(self, value: bytes) -> Mapping[str, object]:
        row = self._read(value)
        for name in row.keys() - self._names:
            raise DecodeError(Reason.UNKNOWN_FIELD, f"the field {shown(name)} is not declared")
        for name in self._required:
            if row.get(name) is None:
                raise DecodeError(Reason.MISSING_FIELD, "absent or null, but declared not null", name)
        if self._refuse_nul:
            for name, item in row.items():
                try:
                    refuse_nul_within(item)
                except DecodeError as error:
                    raise error.inside(name) from None
        return row


def _no_key(key: bytes) -> dict[str, object]:  # noqa: ARG001
    raise DecodeError(Reason.TOMBSTONE_KEY, "this format does not read keys")
