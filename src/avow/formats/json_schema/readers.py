"""The readers of one writer's schema, kept for a process. The columns are the reader's; what is valid, the writer says.

Values are read by column where that can be done, as ``formats.json`` does, and the rows that need it are validated;
what is in doubt is read again, strictly, and validated whatever it is.

Owns: both ways for JSON with a schema. Neighbours: ``formats.json``, which reads JSON, ``proofs`` and
``validation``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import counted, indices, without
from avow.formats.base import DecodeError, Reason
from avow.formats.json.decoder import ColumnReader, StrictReader, column_reader
from avow.formats.json.document import Json, parse_any
from avow.formats.json.values import ReadRules, fields_reader
from avow.formats.json_schema.document import BadSchema, Document
from avow.formats.json_schema.proofs import Validate, mismatch, which
from avow.formats.json_schema.validation import invalid, refuse_invalid
from avow.formats.registry.decoder import IncompatibleSchema
from avow.formats.rows import where_true
from avow.formats.text import text_of
from avow.schema import Schema
from avow.settings import REST_COLUMN

if TYPE_CHECKING:
    from avow.formats.json_schema.plugin import JsonSchema, UnknownFields

_KEPT = 512  # schemas, of all pipelines of a process
_BYTES_MAX = 2**31 - 1  # of a value. Where no end is given, binary_slice fails on large arrays (pyarrow 26)
_NULL = "null"

Read = Callable[[bytes], Mapping[str, object]]


class JsonSchemaReader:
    """Reads what one schema has written. See ``formats.registry.decoder.SchemaReader``."""

    def __init__(
        self, document: Document, strict: Read, columns: ColumnReader | None, ask: Validate, *, rest: bool
    ) -> None:
        self._validator = document.validator
        self._strict, self._columns = strict, columns
        self._ask, self._rest = ask, rest

    @property
    def by_column(self) -> bool:
        return self._columns is not None

    def row(self, value: bytes, at: int) -> Mapping[str, object]:
        data = value[at:]
        row = self._strict(data)
        refuse_invalid(self._validator, data.decode("utf-8-sig"))
        return row

    def read(self, values: pa.BinaryArray, skip: int) -> tuple[pa.RecordBatch, pa.Int64Array]:
        assert self._columns is not None
        if skip:
            values = pc.binary_slice(values, skip, _BYTES_MAX)
        rows, doubtful = self._columns.read(values)
        if self._rest:
            rows = rows.append_column(REST_COLUMN, pa.nulls(len(rows), pa.string()))
        if self._ask is Validate.NONE or not len(rows):
            return rows, doubtful
        at = without(counted(len(values)), doubtful) if len(doubtful) else counted(len(values))
        read = values.take(at) if len(doubtful) else values
        if (bad := self._invalid(read, rows)) is None:
            return rows, doubtful
        good = without(counted(len(rows)), bad)
        return rows.take(good), without(counted(len(values)), at.take(good))

    def _invalid(self, values: pa.BinaryArray, rows: pa.RecordBatch) -> pa.Int64Array | None:
        """Which of the values are not valid, or in doubt. ``rows``: what they were read as."""
        if self._ask is Validate.ALL:
            found = invalid(self._validator, values.to_pylist())
            return indices(found) if found else None
        if not any(map(_has_null, rows.columns)):
            return None
        # An absent field is null too. This finds the others, and as a regular expression four times as quickly.
        asked = where_true(pc.match_substring_regex(values, _NULL))
        found = invalid(self._validator, values.take(asked).to_pylist()) if len(asked) else []
        return asked.take(indices(found)) if found else None


def _has_null(column: pa.Array) -> bool:
    """Whether there is a null in it, at any depth."""
    if column.null_count:
        return True
    type = column.type
    if pa.types.is_struct(type):
        return any(map(_has_null, column.flatten()))
    if pa.types.is_map(type):
        return _has_null(column.items)
    return pa.types.is_list(type) and _has_null(column.values)


@lru_cache(maxsize=_KEPT)
def schema_reader(
    reader: JsonSchema,
    text: str,
    references: tuple[tuple[str, str], ...],
    unknown_fields: UnknownFields,
    *,
    refuse_nul: bool,
    native: bool,  # noqa: ARG001 - whether avow's C library is used: else another reader is
) -> JsonSchemaReader:
    """``text``: the writer's schema. ``IncompatibleSchema`` if its records cannot be read as the reader's."""
    try:
        document = Document(text, references)
    except BadSchema as error:
        raise IncompatibleSchema(str(error)) from None
    if not reader.is_object:
        return JsonSchemaReader(
            document, _single(reader.columns, refuse_nul=refuse_nul), None, Validate.ALL, rest=False
        )
    columns = reader.columns
    if (text, references) != (reader.text, reader.references) and (wrong := mismatch(document, columns)):
        raise IncompatibleSchema(wrong)
    strict = StrictReader(columns, unknown_fields, refuse_nul=refuse_nul)
    ignore = unknown_fields == "ignore"
    ask = which(document, columns, closed=not ignore)
    if ask is Validate.ALL and ignore and (closed := which(document, columns, closed=True)) is not Validate.ALL:
        # The schema allows no other fields: reading by column refuses them, and nothing else is to be asked.
        ask, ignore = closed, False
    by_column = column_reader(columns, ignore_unknown=ignore, refuse_nul=refuse_nul)
    return JsonSchemaReader(document, strict.row, by_column, ask, rest=unknown_fields == "keep")


def _single(columns: Schema, *, refuse_nul: bool) -> Read:
    """Reads a value that is no object, as a key may be, into its one column."""
    (column,) = columns.fields
    read = fields_reader((column,), ReadRules(refuse_nul=refuse_nul, ignore_unknown=True))

    def row(value: bytes) -> Mapping[str, object]:
        if not value:
            raise DecodeError(Reason.EMPTY, "the value is empty: zero bytes")
        document: Json = parse_any(text_of(value).removeprefix("\ufeff"))
        return read({column.name: document})

    return row
