"""Many JSON records at once, by Arrow's own reader, and the search for those on which it fails.

Arrow's reader fails as a whole, and does not always say where. So all values are given to it at once, and where that
fails, less and less, until what fails is known or small. What fails, and what is in doubt, is named.

Owns: what is given to Arrow's reader together. Must not know: why a record is refused. Its neighbours are ``decoder``,
which calls it, and ``columns``, which reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from avow.arrow import counted, indices, no_rows, without
from avow.formats.json.columns import Columns, Unreadable
from avow.schema import Schema

_PIECE_ROWS_MAX = 65_536
_PIECE_BYTES_MAX = 256 << 20  # far below where Arrow's 32-bit offsets end
_PIECE_ROWS_AFTER_FAILURE = 1_024
_PIECE_FAN_OUT = 4
_PIECE_ROWS_MIN = 64  # fewer are read one by one, which is then quicker than a call of Arrow's reader
_ROWS_PER_FAILURE = 256  # with more failures than this the rest of the batch is read one by one


class ArrowColumns:
    """Reads values into the columns of one schema. See ``decoder.ColumnReader``."""

    def __init__(self, schema: Schema, *, refuse_nul: bool) -> None:
        self._columns = Columns(schema, refuse_nul=refuse_nul)

    @staticmethod
    def can_read(schema: Schema) -> bool:
        return Columns.can_read(schema)

    def read(self, values: pa.Array) -> tuple[pa.RecordBatch, pa.Int64Array]:
        every = counted(len(values))
        parsed = list(self._parsed(_Piece(values, every).without(self._columns.unsafe(values))))
        if not parsed:
            return no_rows(self._columns.schema), every
        table = pa.concat_tables([table for _, table in parsed])
        piece = _Piece.of([piece for piece, _ in parsed])
        rows, doubtful = self._columns.convert(table, piece.values)
        if doubtful:
            rows, piece = rows.take(piece.others(doubtful)), piece.without(doubtful)
        return rows, without(every, piece.at)

    def _parsed(self, piece: _Piece) -> Iterator[tuple[_Piece, pa.Table]]:
        """All at once; where that fails, less and less at once, until what fails is known or small."""
        failures_left = 1 + len(piece) // _ROWS_PER_FAILURE
        todo = piece.cut(_PIECE_ROWS_MAX)[::-1]  # a stack, so that pieces come out in their order
        while todo:
            piece = todo.pop()
            if not failures_left or len(piece) < _PIECE_ROWS_MIN:
                continue
            if piece.values.nbytes > _PIECE_BYTES_MAX:
                todo += self._narrowed(piece, Unreadable())[::-1]
            else:
                try:
                    yield piece, self._columns.parse(piece.values)
                except Unreadable as failure:
                    failures_left -= 1
                    todo += self._narrowed(piece, failure)[::-1]

    def _narrowed(self, piece: _Piece, failure: Unreadable) -> list[_Piece]:
        """What is left to read of a piece that failed."""
        row = failure.row
        if row is not None and row < len(piece):
            return [piece.slice(0, row), *piece.slice(row + 1, len(piece)).cut(_PIECE_ROWS_AFTER_FAILURE)]
        if len(piece) > _PIECE_ROWS_AFTER_FAILURE:
            return piece.cut(_PIECE_ROWS_AFTER_FAILURE)
        suspects = self._columns.suspects(piece.values, failure)
        if 0 < len(suspects) <= len(piece) // _PIECE_FAN_OUT:
            return [piece.without(suspects)]
        if len(piece) >= 2 * _PIECE_ROWS_MIN:
            return piece.cut(max(len(piece) // _PIECE_FAN_OUT, _PIECE_ROWS_MIN))
        return []


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of the values."""

    values: pa.Array
    at: pa.Int64Array  # for each of them: which one it is

    def __len__(self) -> int:
        return len(self.values)

    def slice(self, start: int, stop: int) -> _Piece:
        return _Piece(self.values.slice(start, stop - start), self.at.slice(start, stop - start))

    def cut(self, rows_max: int) -> list[_Piece]:
        return [self.slice(start, min(start + rows_max, len(self))) for start in range(0, len(self), rows_max)]

    def without(self, rows: set[int]) -> _Piece:
        if not rows:
            return self
        others = self.others(rows)
        return _Piece(self.values.take(others), self.at.take(others))

    def others(self, rows: set[int]) -> pa.Int64Array:
        """The rows that are not among these."""
        return indices([row for row in range(len(self)) if row not in rows])

    @staticmethod
    def of(pieces: Sequence[_Piece]) -> _Piece:
        """Pieces put together."""
        if len(pieces) == 1:
            return pieces[0]
        return _Piece(pa.concat_arrays([p.values for p in pieces]), pa.concat_arrays([p.at for p in pieces]))
