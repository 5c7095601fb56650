"""Records taken as they are: the columns key and value, as bytes (``raw``) or as text (``string``).

Text is UTF-8, strictly and unchanged: a byte order mark stays. Owns: decoding these two formats. Its neighbour is
``tombstones``, for records without a value.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import indices
from avow.formats.base import Decoded, DecodeError, Reason, RefusedRecord
from avow.formats.raw.plugin import RawConfig
from avow.formats.rows import row_schema, where_true
from avow.formats.text import refuse_nul as refuse_nul_in
from avow.formats.text import text_of
from avow.formats.tombstones import Tombstones, key_fields
from avow.settings import PipelineConfig


class RawDecoder:
    """Decodes keys and values of one pipeline without looking into them."""

    def __init__(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> None:
        assert isinstance(pipeline.decode, RawConfig)
        self._is_text = pipeline.decode.is_text
        self._refuse_nul = refuse_nul and self._is_text
        self._not_null = frozenset(pipeline.sink.key)
        self._key_columns = [field.name for field in key_fields(pipeline)]
        self._tombstones = Tombstones(pipeline, self._read_key)
        self._schema = row_schema(pipeline.decode)

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        keys, values = (batch.column(name).cast(pa.binary()) for name in ("key", "value"))
        nulls = self._tombstones.apply(keys, where_true(values.is_null()).to_pylist())
        at = indices(sorted([*where_true(values.is_valid()).to_pylist(), *nulls.as_rows]))
        refused = nulls.refused
        if not self._are_good(keys.take(at), values.take(at)):
            bad = list(self._refused(at, keys, values))
            refused = sorted([*refused, *bad], key=lambda record: record.index)
            at = indices(sorted(set(at.to_pylist()) - {record.index for record in bad}))
        columns = [column.take(at).cast(field.type) for column, field in zip((keys, values), self._schema, strict=True)]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return Decoded(rows, at, nulls.deletes, nulls.deletes_at, tuple(refused), nulls.skipped)

    def _are_good(self, keys: pa.Array, values: pa.Array) -> bool:
        """Whether all are, in one look at each column."""
        for name, column in (("key", keys), ("value", values)):
            if name in self._not_null and column.null_count:
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

    def _refused(self, at: pa.Int64Array, keys: pa.Array, values: pa.Array) -> Iterator[RefusedRecord]:
        pairs = zip(at.to_pylist(), keys.take(at).to_pylist(), values.take(at).to_pylist(), strict=True)
        for index, key, value in pairs:
            try:
                self._check(key, value)
            except DecodeError as error:
                yield RefusedRecord.of(index, error)

    def _check(self, key: bytes | None, value: bytes | None) -> None:
        if value == b"":
            raise DecodeError(Reason.EMPTY, "the value is empty: zero bytes")
        for name, part in (("key", key), ("value", value)):
            if part is None and name in self._not_null:
                raise DecodeError(Reason.NULL_KEY, f"the record's {name} is null, and sink.key names it")
            if part is not None and self._is_text:
                self._text(name, part)

    def _text(self, name: str, part: bytes) -> str:
        try:
            text = text_of(part)
            if self._refuse_nul:
                refuse_nul_in(text)
        except DecodeError as error:
            raise error.inside(name) from None
        return text

    def _read_key(self, key: bytes) -> dict[str, object]:
        if self._key_columns != ["key"]:
            raise DecodeError(Reason.TOMBSTONE_KEY, "sink.key names the column value, which is null in a tombstone")
        return {"key": self._text("key", key) if self._is_text else key}
