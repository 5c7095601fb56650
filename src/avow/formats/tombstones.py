"""Records with a null value (tombstones): what the pipeline does with them, and which row they delete.

Under upsert a null value deletes the row that the record's *key* names. A key that does not say which is a dead letter:
a delete that cannot be understood must not be lost.

Owns: null values. Must not know: how a format reads a key. Its neighbours are the decoders, which find the null values
and bring a ``ReadKey``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from avow.arrow import arrow_fields, indices, no_rows
from avow.formats.base import DecodeError, Reason, RefusedRecord
from avow.schema import Field
from avow.settings import PipelineConfig

Policy = Literal["delete", "dead-letter", "skip", "keep"]
ReadKey = Callable[[bytes], Mapping[str, object]]  # the columns of ``key_fields``, or DecodeError


@dataclass(frozen=True, slots=True)
class NullValues:
    """What became of the null values of a batch. The ``_at`` array is as in ``Decoded``."""

    deletes: pa.RecordBatch
    deletes_at: pa.Int64Array
    refused: list[RefusedRecord]
    skipped: int
    as_rows: Sequence[int]  # these become rows of nulls


class Tombstones:
    """Does with null values what the pipeline declares."""

    def __init__(self, pipeline: PipelineConfig, read_key: ReadKey) -> None:
        self._policy: Policy = pipeline.tombstones
        self._read_key = read_key
        self._key_schema = pa.schema(arrow_fields(key_fields(pipeline)))

    def apply(self, keys: pa.Array, at: Sequence[int]) -> NullValues:
        """``at``: the rows of the batch that have no value, ascending."""
        if self._policy == "delete":
            return self._delete(keys, at)
        refuse = self._policy == "dead-letter"
        return NullValues(
            no_rows(self._key_schema),
            indices([]),
            refused=[RefusedRecord(index, Reason.TOMBSTONE, "null value") for index in at] if refuse else [],
            skipped=len(at) if self._policy == "skip" else 0,
            as_rows=at if self._policy == "keep" else (),
        )

    def _delete(self, keys: pa.Array, at: Sequence[int]) -> NullValues:
        deletes: list[Mapping[str, object]] = []
        deletes_at: list[int] = []
        refused: list[RefusedRecord] = []
        for index, key in zip(at, keys.take(indices(at)).to_pylist(), strict=True):
            try:
                deletes.append(self._key(key))
                deletes_at.append(index)
            except DecodeError as error:
                refused.append(RefusedRecord.of(index, error))
        rows = pa.RecordBatch.from_pylist(deletes, self._key_schema) if deletes else no_rows(self._key_schema)
        return NullValues(rows, indices(deletes_at), refused, skipped=0, as_rows=())

    def _key(self, key: bytes | None) -> Mapping[str, object]:
        if key is None:
            raise DecodeError(Reason.TOMBSTONE_KEY, "null value and null key: the row to delete is not known")
        if not self._key_schema.names:
            raise DecodeError(Reason.TOMBSTONE_KEY, "the columns of sink.key cannot be read from a record's key")
        try:
            return self._read_key(key)
        except DecodeError as error:
            raise DecodeError(Reason.TOMBSTONE_KEY, f"the record's key: {error.detail}", error.path) from None


def key_fields(pipeline: PipelineConfig) -> tuple[Field, ...]:
    """The columns of sink.key that must be read from a record's key. Lineage columns are not among them.

    Empty if sink.key names a column that only a transform makes: it cannot be read from a record's key.
    """
    if pipeline.tombstones != "delete":
        return ()
    declared = {field.name: field for field in pipeline.decode.columns}
    names = [name for name in pipeline.sink.key if name not in pipeline.sink.lineage]
    if not all(name in declared for name in names):
        return ()
    return tuple(Field(name, declared[name].type, required=True) for name in names)
