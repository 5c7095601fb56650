"""Records that were written by schemas: each is read by the steps that its own writer's schema needs.

The values of a batch are put into groups by the id before them; each group is read by column where that can be done,
and what is in doubt one by one, by the strict reader of the same schema, which has the last word.

An id that the registry does not have makes its record a dead letter. A registry that does not answer ends the attempt,
and the records are read again. A writer's schema that the reader's cannot read is nobody's record: it stops the run, or
makes dead letters, as declared.

Owns: which record is read by what. Must not know: any language. Neighbours: ``frame``, ``config``, ``formats.rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import indices, no_rows, without
from avow.errors import ColumnsChanged, ConfigError, UnknownSchema
from avow.formats.base import Decoded, DecodeError, Reason, RefusedRecord, shown
from avow.formats.json.keys import key_reader
from avow.formats.registry.config import RegistryConfig, Text
from avow.formats.registry.frame import FRAME_BYTES, UNKNOWN_ID, schema_id, schema_ids
from avow.formats.rows import RowCollector, row_schema, where_true
from avow.formats.tombstones import NullValues, ReadKey, Tombstones, key_fields
from avow.schema_registry import SchemaRegistry
from avow.settings import REST_COLUMN, PipelineConfig

NO_NULL_VALUES = NullValues(no_rows(pa.schema([])), indices([]), [], 0, ())
_CHECKED_MAX = 10_000
INCOMPATIBLE = "incompatible-schema"  # the record's schema cannot be read as the reader's


class IncompatibleSchema(ValueError):
    """Records of a writer's schema cannot be read as the reader's."""


class SchemaReader(Protocol):
    """Reads the values that one schema has written. It may be used by many tasks of a process."""

    def row(self, value: bytes, at: int) -> Mapping[str, object]:
        """One value, behind the frame that ends ``at``: its columns, or ``DecodeError``."""

    def read(self, values: pa.BinaryArray, skip: int) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """Many at once, each behind ``skip`` bytes: the rows of those beyond doubt, in order, and which are not."""

    @property
    def by_column(self) -> bool:
        """Whether there is a ``read``."""


# Of a writer's schema, None if it is the reader's own; or IncompatibleSchema.
MakeReader = Callable[[Text | None], SchemaReader]


class Readers:
    """Reads values, or keys, each by the reader of its own writer's schema."""

    def __init__(self, config: RegistryConfig, make: MakeReader, renewal: Renewal | None = None) -> None:
        self._config = config
        self._make = make
        self._renewal = renewal
        self._registry = SchemaRegistry(config.registry) if config.registry else None
        self._skip = FRAME_BYTES if config.framed else 0
        self._readers: dict[int | None, SchemaReader | DecodeError] = {}

    def read(self, values: pa.BinaryArray, at: pa.Int64Array, rows: RowCollector) -> None:
        """``at``: for each value, none of them null, its row in the batch."""
        if not len(values):
            return
        if not self._skip:
            self._read_group(self._reader(None), values, at, rows)
            return
        ids = schema_ids(values)
        groups = [int(ids[0])] if (ids == ids[0]).all() else np.unique(ids).tolist()
        for group in groups:
            reader = None if group < 0 else self._known_reader(group)
            if len(groups) == 1:
                self._read_group(reader, values, at, rows)
            else:
                mine = indices(np.flatnonzero(ids == group).tolist())
                self._read_group(reader, values.take(mine), at.take(mine), rows)

    def row(self, value: bytes) -> Mapping[str, object]:
        """One value, strictly: its columns, or ``DecodeError``."""
        if not value and not self._skip and not self._config.takes_empty:
            raise DecodeError(Reason.EMPTY, "the value is empty: zero bytes")
        return self._reader(schema_id(value) if self._skip else None).row(value, self._skip)

    def _read_group(
        self, reader: SchemaReader | None, values: pa.BinaryArray, at: pa.Int64Array, rows: RowCollector
    ) -> None:
        if reader is None or not reader.by_column:
            rows.read_each(values, at)
            return
        read, doubtful = reader.read(values, self._skip)
        if len(doubtful):
            rows.read_each(values.take(doubtful), at.take(doubtful))
            at = without(at, doubtful)
        if len(at):
            rows.add_rows(read, at)

    def _known_reader(self, schema_id: int) -> SchemaReader | None:
        """The reader of an id; None where each of its records is refused."""
        try:
            return self._reader(schema_id)
        except DecodeError:
            return None

    def _reader(self, schema_id: int | None) -> SchemaReader:
        """The reader of what a schema has written, or ``DecodeError`` if no record of it can be read."""
        if schema_id not in self._readers:
            self._readers[schema_id] = self._open(schema_id)
        reader = self._readers[schema_id]
        if isinstance(reader, Exception):
            raise reader
        return reader

    def _open(self, schema_id: int | None) -> SchemaReader | DecodeError:
        if schema_id is None:
            return self._make(None)
        assert self._registry is not None
        try:
            registered = self._registry.by_id(schema_id)
        except UnknownSchema as error:
            raise DecodeError(UNKNOWN_ID, str(error)) from None  # for now: it may be registered in a moment
        if self._renewal is not None:
            self._renewal.check(schema_id)
        try:
            if registered.kind != self._config.language:
                raise IncompatibleSchema(f"it is a schema of another language, {registered.kind}")
            return self._make(self._config.text_of(registered, self._registry))
        except IncompatibleSchema as error:
            wrong = f"schema {schema_id} cannot be read as {self._config.reader_text.origin}: {error}"
            if self._config.incompatible == "dead-letter":
                return DecodeError(INCOMPATIBLE, wrong)
            raise ConfigError(
                f"records of the topic have a schema that the pipeline cannot read: {wrong}",
                advice="Change the reader's schema so that it can read both; "
                'decode.incompatible = "dead-letter" makes such records dead letters.',
            ) from None


# Of this process: writers' schemas that came after the reader's, and told of no other columns. By both ids.
_checked: set[tuple[str, int | None, int]] = set()


class Renewal:
    """Looks for other columns, where the table follows the newest version of a subject (``sink.evolve``)."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._pipeline = pipeline

    @staticmethod
    def of(pipeline: PipelineConfig) -> Renewal | None:
        config = pipeline.decode
        assert isinstance(config, RegistryConfig)
        evolves = getattr(pipeline.sink, "evolve", None) == "add"
        return Renewal(pipeline) if config.follows and evolves else None

    def check(self, schema_id: int) -> None:
        """Raise ``ColumnsChanged`` if the newest version of the subject, which a new writer's schema may be, has other
        columns than the reader's."""
        config = self._pipeline.decode
        assert isinstance(config, RegistryConfig)
        assert config.registry is not None
        reader = config.reader_text.schema_id
        key = (config.registry.url, reader, schema_id)
        if schema_id == reader or key in _checked:
            return
        newest = config.for_source(self._pipeline.source)
        if newest.columns != config.columns:
            raise ColumnsChanged(f"{newest.reader_text.origin} has other columns than {config.reader_text.origin}")
        if len(_checked) >= _CHECKED_MAX:
            _checked.clear()
        _checked.add(key)


class RegistryDecoder:
    """Decodes the records of one pipeline. ``make_key``: with [decode.key]."""

    def __init__(
        self, pipeline: PipelineConfig, make: MakeReader, make_key: MakeReader | None = None, *, refuse_nul: bool
    ) -> None:
        config = pipeline.decode
        assert isinstance(config, RegistryConfig)
        whole = row_schema(config)
        own = {REST_COLUMN, *(column.name for column in config.reader.columns)}
        self._schema = pa.schema([field for field in whole if field.name in own])
        self._key_schema = pa.schema([field for field in whole if field.name not in own])
        self._values = Readers(config, make, Renewal.of(pipeline))
        self._keys = Readers(config, make_key) if make_key else None
        self._tombstones = Tombstones(pipeline, self._key_reader(pipeline, refuse_nul=refuse_nul))

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        values, keys = (batch.column(name).cast(pa.binary()) for name in ("value", "key"))
        at = where_true(values.is_valid())
        rows = RowCollector(self._schema, self._values.row)
        if len(self._key_schema):
            key_rows, key_rows_at, refused = self._key_columns(keys, at)
            self._values.read(values.take(key_rows_at), key_rows_at, rows)
        else:
            self._values.read(values.drop_null(), at, rows)
        decoded = rows.decoded(self._tombstones.apply(keys, where_true(values.is_null()).to_pylist()))
        return _beside(key_rows, key_rows_at, refused, decoded) if len(self._key_schema) else decoded

    def _key_columns(
        self, keys: pa.BinaryArray, at: pa.Int64Array
    ) -> tuple[pa.RecordBatch, pa.Int64Array, tuple[RefusedRecord, ...]]:
        """The columns that only keys have, of the records that have a good one."""
        assert self._keys is not None
        keys = keys.take(at)
        nulls = [
            RefusedRecord(index, Reason.NULL_KEY, "the record has no key, and the key has columns of its own")
            for index in at.filter(keys.is_null()).to_pylist()
        ]
        collector = RowCollector(self._key_schema, lambda key: self._own_columns(self._key_row(key)))
        collector.read_each(keys.drop_null(), at.filter(keys.is_valid()))
        decoded = collector.decoded(NO_NULL_VALUES)
        return decoded.rows, decoded.rows_at, (*nulls, *decoded.refused)

    def _own_columns(self, row: Mapping[str, object]) -> Mapping[str, object]:
        return {name: row[name] for name in self._key_schema.names}

    def _key_row(self, key: bytes) -> Mapping[str, object]:
        assert self._keys is not None
        try:
            return self._keys.row(key)
        except DecodeError as error:
            raise error.inside("key") from None

    def _key_reader(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> ReadKey:
        fields = key_fields(pipeline)
        if self._keys is None:
            return key_reader(fields, refuse_nul=refuse_nul)
        keys, names = self._keys, [field.name for field in fields]

        def read_key(key: bytes) -> Mapping[str, object]:
            row = keys.row(key)
            for name in names:
                if row.get(name) is None:
                    raise DecodeError(Reason.TOMBSTONE_KEY, f"the key has no column {shown(name)}")
            return {name: row[name] for name in names}

        return read_key


def _beside(
    keys: pa.RecordBatch, keys_at: pa.Int64Array, refused: tuple[RefusedRecord, ...], decoded: Decoded
) -> Decoded:
    """The rows with the columns of their keys before them."""
    mine = keys.take(pc.index_in(decoded.rows_at, keys_at))
    schema = pa.schema([*keys.schema, *decoded.rows.schema])
    rows = pa.RecordBatch.from_arrays([*mine.columns, *decoded.rows.columns], schema=schema)
    every = tuple(sorted([*refused, *decoded.refused], key=lambda record: record.index))
    return replace(decoded, rows=rows, refused=every)
