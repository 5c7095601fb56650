"""Records taken as they are: the columns key and value, as bytes (``raw``) or as text (``string``).

Text is UTF-8, strictly and unchanged: a byte order mark stays. Owns: these two formats. Must not know: JSON. Its
neighbour is ``tombstones``, for records without a value.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import arrow_fields, indices
from avow.decode.document import text_of
from avow.decode.result import Dead, Decoded, Reason, Refused
from avow.decode.tombstones import Tombstones
from avow.decode.values import refuse_nul as refuse_nul_in
from avow.settings import PipelineConfig


class PlainDecoder:
    """Decodes keys and values of one pipeline without looking into them."""

    def __init__(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> None:
        self._is_text = pipeline.decode.format == "string"
        self._refuse_nul = refuse_nul and self._is_text
        self._names_row = frozenset(pipeline.sink.key)  # these must not be null
        self._tombstones = Tombstones(pipeline, self._read_key)
        self.schema = pa.schema(arrow_fields(pipeline.decode.columns))
        self.key_schema = self._tombstones.key_schema

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        keys, values = (batch.column(name).cast(pa.binary()) for name in ("key", "value"))
        settled = self._tombstones.settle(keys, pc.indices_nonzero(values.is_null()).to_pylist())
        rows = indices(sorted([*pc.indices_nonzero(values.is_valid()).to_pylist(), *settled.kept]))
        dead = settled.dead
        if not self._are_good(keys.take(rows), values.take(rows)):
            refused = list(self._refused(rows, keys, values))
            dead = sorted([*dead, *refused], key=lambda dead: dead.index)
            rows = indices(sorted(set(rows.to_pylist()) - {dead.index for dead in refused}))
        columns = [
            column.take(rows).cast(field.type) for column, field in zip((keys, values), self.schema, strict=True)
        ]
        good = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        return Decoded(good, rows, settled.deletes, settled.deleted, tuple(dead), settled.skipped)

    def _are_good(self, keys: pa.Array, values: pa.Array) -> bool:
        """Whether all are, in one look at each column."""
        for name, column in (("key", keys), ("value", values)):
            if name in self._names_row and column.null_count:
                return False
        if pc.min(pc.binary_length(values)).as_py() == 0:
            return False
        return not self._is_text or (self._is_text_good(keys) and self._is_text_good(values))

    def _is_text_good(self, column: pa.Array) -> bool:
        try:
            text = column.cast(pa.string())
        except pa.ArrowInvalid:
            return False
        return not (self._refuse_nul and pc.any(pc.match_substring_regex(text, r"\x00")).as_py())

    def _refused(self, rows: pa.Int64Array, keys: pa.Array, values: pa.Array) -> Iterator[Dead]:
        pairs = zip(rows.to_pylist(), keys.take(rows).to_pylist(), values.take(rows).to_pylist(), strict=True)
        for row, key, value in pairs:
            try:
                self._judge(key, value)
            except Refused as refused:
                yield Dead.of(row, refused)

    def _judge(self, key: bytes | None, value: bytes | None) -> None:
        if value == b"":
            raise Refused(Reason.EMPTY, "a value of zero bytes")
        for name, part in (("key", key), ("value", value)):
            if part is None and name in self._names_row:
                raise Refused(Reason.NULL_KEY, f"no {name}, and sink.key names it")
            if part is not None and self._is_text:
                self._text(name, part)

    def _text(self, name: str, part: bytes) -> str:
        try:
            text = text_of(part)
            if self._refuse_nul:
                refuse_nul_in(text)
        except Refused as refused:
            raise refused.inside(name) from None
        return text

    def _read_key(self, key: bytes) -> dict[str, object]:
        if self.key_schema.names != ["key"]:
            raise Refused(Reason.TOMBSTONE_KEY, "sink.key names the value, and there is none")
        return {"key": self._text("key", key) if self._is_text else key}
