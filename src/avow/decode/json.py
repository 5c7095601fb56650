"""Records whose value is a JSON object.

Values are read by column first (``columns``); what cannot be read that way is read again one by one (``document``,
``values``), and that is where a record is refused and why. Both ways agree on every record: the first is only faster.

Owns: which record is read which way. Must not know: the types. Its neighbours are those three and ``tombstones``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import arrow_fields, indices, no_rows
from avow.decode.columns import Columns, Unreadable
from avow.decode.document import Json, parse, write
from avow.decode.result import Dead, Decoded, Refused
from avow.decode.tombstones import Tombstones, json_key_reader, key_fields
from avow.decode.values import Rules, fields_reader, refuse_nul_within, refuse_unknown
from avow.settings import REST_COLUMN, PipelineConfig

_PIECE_ROWS_MAX = 65_536
_PIECE_BYTES_MAX = 256 << 20  # far below where Arrow's 32-bit offsets end
_PIECE_ROWS_AFTER_FAILURE = 1_024
_PIECE_FAN_OUT = 4
_PIECE_ROWS_MIN = 64  # fewer are read one by one, which is then quicker than a call of Arrow's reader
_ROWS_PER_FAILURE = 256  # with more failures than this the rest of the batch is read one by one


class JsonDecoder:
    """Decodes JSON objects into the columns of one pipeline."""

    def __init__(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> None:
        declared = pipeline.decode.columns
        self._columns = Columns(declared, refuse_nul=refuse_nul) if Columns.can_read(declared) else None
        self._judge = _Judge(pipeline, refuse_nul=refuse_nul)
        self._tombstones = Tombstones(pipeline, json_key_reader(key_fields(pipeline), refuse_nul=refuse_nul))
        rest = [pa.field(REST_COLUMN, pa.string())] if pipeline.decode.unknown_fields == "keep" else []
        self.schema = pa.schema(arrow_fields(declared) + rest)
        self.key_schema = self._tombstones.key_schema

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        values = batch.column("value").cast(pa.binary())
        reading = _Reading(self.schema, self._columns, self._judge)
        reading.read(_Piece(values.drop_null(), _where(values.is_valid())))
        settled = self._tombstones.settle(batch.column("key"), _where(values.is_null()).to_pylist())
        for row in settled.kept:
            reading.add(row, {})
        rows, kept = reading.rows()
        dead = sorted([*reading.dead, *settled.dead], key=lambda dead: dead.index)
        return Decoded(rows, kept, settled.deletes, settled.deleted, tuple(dead), settled.skipped)


class _Judge:
    """Reads one record, and has the last word on it."""

    def __init__(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> None:
        policy = pipeline.decode.unknown_fields
        fields = pipeline.decode.columns.fields
        self._policy = policy
        self._refuse_nul = refuse_nul
        self._known = frozenset(field.name for field in fields)
        # A struct's unknown fields have no column to be kept in.
        self._read = fields_reader(fields, Rules(refuse_nul=refuse_nul, ignore_unknown=policy == "ignore"))

    def row(self, value: bytes) -> dict[str, object]:
        """The record's row, or ``Refused``."""
        document = parse(value)
        if document.keys() <= self._known:
            return self._read(document)
        if self._policy == "reject":
            refuse_unknown(document, self._known)
        row = self._read(document)
        if self._policy == "keep":
            row[REST_COLUMN] = self._rest(document)
        return row

    def _rest(self, document: dict[str, Json]) -> str:
        rest = {name: value for name, value in document.items() if name not in self._known}
        if self._refuse_nul:
            refuse_nul_within(rest)
        return write(rest)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of a batch's values, none of them null."""

    values: pa.Array
    at: pa.Int64Array  # for each value: its row in the batch

    def __len__(self) -> int:
        return len(self.values)

    def slice(self, start: int, stop: int) -> _Piece:
        return _Piece(self.values.slice(start, stop - start), self.at.slice(start, stop - start))

    def cut(self, rows_max: int) -> list[_Piece]:
        return [self.slice(start, min(start + rows_max, len(self))) for start in range(0, len(self), rows_max)]

    def take(self, rows: Iterable[int]) -> _Piece:
        return self._take(indices(sorted(rows)))

    def without(self, rows: set[int]) -> _Piece:
        return self._take(self.others(rows)) if rows else self

    def others(self, rows: set[int]) -> pa.Int64Array:
        """The rows that are not among these."""
        return indices([row for row in range(len(self)) if row not in rows])

    def _take(self, rows: pa.Int64Array) -> _Piece:
        return _Piece(self.values.take(rows), self.at.take(rows))

    @staticmethod
    def of(pieces: Sequence[_Piece]) -> _Piece:
        """Pieces put together."""
        if len(pieces) == 1:
            return pieces[0]
        return _Piece(pa.concat_arrays([p.values for p in pieces]), pa.concat_arrays([p.at for p in pieces]))


class _Reading:
    """The values of one batch while they are read."""

    def __init__(self, schema: pa.Schema, columns: Columns | None, judge: _Judge) -> None:
        self.dead: list[Dead] = []
        self._schema = schema
        self._columns = columns
        self._judge = judge
        self._by_column: list[tuple[pa.RecordBatch, pa.Int64Array]] = []  # one at most
        self._singly: list[dict[str, object]] = []
        self._singly_at: list[int] = []

    def read(self, piece: _Piece) -> None:
        if self._columns is None or not len(piece):
            self._read_singly(piece)
            return
        unsafe = self._columns.unsafe(piece.values)
        self._read_singly(piece.take(unsafe))
        self._read_by_column(self._columns, piece.without(unsafe))

    def add(self, row: int, values: dict[str, object]) -> None:
        """A row that was read on its own; absent columns are null."""
        self._singly.append(values)
        self._singly_at.append(row)

    def rows(self) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """All good rows in the order of the batch, and where each was."""
        if not self._singly:
            return self._by_column[0] if self._by_column else (no_rows(self._schema), indices([]))
        singly = pa.RecordBatch.from_pylist(self._singly, self._schema), indices(self._singly_at)
        parts = [*self._by_column, singly]
        rows = pa.concat_batches([rows for rows, _ in parts])
        at = pa.concat_arrays([at for _, at in parts])
        order = pc.sort_indices(at)
        return rows.take(order), at.take(order)

    def _read_singly(self, piece: _Piece) -> None:
        for row, value in zip(piece.at.to_pylist(), piece.values.to_pylist(), strict=True):
            try:
                self.add(row, self._judge.row(value))
            except Refused as refused:
                self.dead.append(Dead.of(row, refused))

    def _read_by_column(self, columns: Columns, piece: _Piece) -> None:
        parsed = list(self._parsed(columns, piece))
        if not parsed:
            return
        table = pa.concat_tables([table for _, table in parsed])
        piece = _Piece.of([piece for piece, _ in parsed])
        rows, doubtful = columns.settle(table, piece.values)
        if doubtful:
            self._read_singly(piece.take(doubtful))
            rows, piece = rows.take(piece.others(doubtful)), piece.without(doubtful)
        if len(rows.schema) < len(self._schema):
            rows = rows.append_column(REST_COLUMN, pa.nulls(len(rows), pa.string()))
        self._by_column.append((rows, piece.at))

    def _parsed(self, columns: Columns, piece: _Piece) -> Iterator[tuple[_Piece, pa.Table]]:
        """All at once; where that fails, less and less at once, until what fails is known or small."""
        failures_left = 1 + len(piece) // _ROWS_PER_FAILURE
        todo = piece.cut(_PIECE_ROWS_MAX)[::-1]  # a stack, so that pieces come out in their order
        while todo:
            piece = todo.pop()
            if not failures_left or len(piece) < _PIECE_ROWS_MIN:
                self._read_singly(piece)
            elif piece.values.nbytes > _PIECE_BYTES_MAX:
                todo += self._narrowed(columns, piece, Unreadable())[::-1]
            else:
                try:
                    yield piece, columns.parse(piece.values)
                except Unreadable as failure:
                    failures_left -= 1
                    todo += self._narrowed(columns, piece, failure)[::-1]

    def _narrowed(self, columns: Columns, piece: _Piece, failure: Unreadable) -> list[_Piece]:
        """What is left to read of a piece that failed."""
        row = failure.row
        if row is not None and row < len(piece):
            self._read_singly(piece.slice(row, row + 1))
            return [piece.slice(0, row), *piece.slice(row + 1, len(piece)).cut(_PIECE_ROWS_AFTER_FAILURE)]
        if len(piece) > _PIECE_ROWS_AFTER_FAILURE:
            return piece.cut(_PIECE_ROWS_AFTER_FAILURE)
        suspects = columns.suspects(piece.values, failure)
        if 0 < len(suspects) <= len(piece) // _PIECE_FAN_OUT:
            self._read_singly(piece.take(suspects))
            return [piece.without(suspects)]
        if len(piece) >= 2 * _PIECE_ROWS_MIN:
            return piece.cut(max(len(piece) // _PIECE_FAN_OUT, _PIECE_ROWS_MIN))
        self._read_singly(piece)
        return []


def _where(mask: pa.Array) -> pa.Int64Array:
    return pc.indices_nonzero(mask).cast(pa.int64())
