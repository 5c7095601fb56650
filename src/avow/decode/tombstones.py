"""Records without a value: what the pipeline does with them, and which row they delete.

Under upsert a null value deletes the row that the record's *key* names: a JSON object that holds the key columns (what
else it holds is passed over), or, where the key is one column, its bare text: ``17``, ``acc-000017``,
``2026-01-31``. A key that begins with ``{`` is always read as an object. Anything else is a dead letter: a delete
that cannot be understood must not be lost.

Owns: null values and reading a key. Must not know: values. Its neighbours are ``json`` and ``plain``, which find the
null values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from avow.arrow import arrow_fields, indices, no_rows
from avow.decode.document import Json, parse, parse_any, text_of
from avow.decode.result import Dead, Reason, Refused
from avow.decode.values import Rules, fields_reader
from avow.schema import Field, Scalar
from avow.settings import PipelineConfig

Policy = Literal["delete", "dead-letter", "skip", "keep"]
KeyReader = Callable[[bytes], dict[str, object]]  # the key columns, or Refused

# What a JSON string spells stands bare in a key; the rest as in JSON.
_TEXTUAL = frozenset({Scalar.STRING, Scalar.BINARY, Scalar.DATE, Scalar.TIMESTAMP, Scalar.TIMESTAMP_NTZ})


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of the null values of a batch."""

    deletes: pa.RecordBatch
    deleted: pa.Int64Array
    dead: list[Dead]
    skipped: int
    kept: Sequence[int]  # these become rows of nulls


class Tombstones:
    """Does with null values what the pipeline declares."""

    def __init__(self, pipeline: PipelineConfig, read_key: KeyReader) -> None:
        self._policy: Policy = pipeline.tombstones
        self._read_key = read_key
        self.key_schema = pa.schema(arrow_fields(key_fields(pipeline)))

    def settle(self, keys: pa.Array, rows: Sequence[int]) -> Settled:
        """``rows`` are the rows of the batch that have no value, ascending."""
        if self._policy == "delete":
            return self._delete(keys, rows)
        dead = [Dead(row, Reason.TOMBSTONE, "no value") for row in rows] if self._policy == "dead-letter" else []
        return Settled(
            no_rows(self.key_schema),
            indices([]),
            dead,
            skipped=len(rows) if self._policy == "skip" else 0,
            kept=rows if self._policy == "keep" else (),
        )

    def _delete(self, keys: pa.Array, rows: Sequence[int]) -> Settled:
        found: list[dict[str, object]] = []
        deleted: list[int] = []
        dead: list[Dead] = []
        for row, key in zip(rows, keys.take(indices(rows)).to_pylist(), strict=True):
            try:
                found.append(self._key(key))
                deleted.append(row)
            except Refused as refused:
                dead.append(Dead.of(row, refused))
        deletes = pa.RecordBatch.from_pylist(found, self.key_schema) if found else no_rows(self.key_schema)
        return Settled(deletes, indices(deleted), dead, skipped=0, kept=())

    def _key(self, key: bytes | None) -> dict[str, object]:
        if key is None:
            raise Refused(Reason.TOMBSTONE_KEY, "no value and no key: nothing says which row to delete")
        if not self.key_schema.names:
            raise Refused(Reason.TOMBSTONE_KEY, "no column of sink.key can be read from a record's key")
        try:
            return self._read_key(key)
        except Refused as refused:
            raise Refused(Reason.TOMBSTONE_KEY, f"the record's key: {refused.detail}", refused.path) from None


def key_fields(pipeline: PipelineConfig) -> tuple[Field, ...]:
    """The columns of sink.key that a record's key must tell. Lineage columns are not among them.

    Empty if sink.key names a column that only a transform makes: no record's key can tell that one.
    """
    if pipeline.tombstones != "delete":
        return ()
    declared = {field.name: field for field in pipeline.decode.columns}
    names = [name for name in pipeline.sink.key if name not in pipeline.sink.lineage]
    if not all(name in declared for name in names):
        return ()
    return tuple(Field(name, declared[name].type, required=True) for name in names)


def json_key_reader(fields: tuple[Field, ...], *, refuse_nul: bool) -> KeyReader:
    """Reads the key of a record whose value would be JSON."""
    read = fields_reader(fields, Rules(refuse_nul=refuse_nul, ignore_unknown=True))

    def read_key(key: bytes) -> dict[str, object]:
        if key.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return read(parse(key))
        if len(fields) > 1:
            names = ", ".join(field.name for field in fields)
            raise Refused(Reason.TOMBSTONE_KEY, f"not an object with {names}")
        return read({fields[0].name: _bare(key, fields[0])})

    return read_key


def _bare(key: bytes, field: Field) -> Json:
    if field.type in _TEXTUAL:
        return text_of(key)
    return parse_any(text_of(key))
