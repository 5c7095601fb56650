"""One Iceberg table, as ``lake.table`` wants a table to be.

Owns: how files, ledger and refusals look in Iceberg's metadata. Must not know: the ledger's rules or the order of acts.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, LessThanOrEqual, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.io import InputFile
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.schema import index_name_by_id
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import DataScan, StaticTable, Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import MetadataLogEntry, Snapshot, SnapshotLogEntry, ancestors_of
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import IcebergType, ListType, MapType, StructType
from sqlalchemy.exc import SQLAlchemyError

from avow.errors import ConfigError, ProtocolViolation, SinkError
from avow.settings import Iceberg, Pipeline, revealed
from avow.sinks.iceberg import merge as merging
from avow.sinks.lake import book as books
from avow.sinks.lake.book import Book
from avow.sinks.lake.files import DataFile, FileWriter, Place, s3_options
from avow.sinks.lake.table import Chosen, Conflict, Shape, expression, predicate

_OFFSET_MAX = 2**63 - 1
_FORMATS = (1, 2)

# Of a table that we make. Old metadata goes, or a thousand commits leave a thousand files of a thousand lines.
# Manifests are merged, as Spark's writer does by itself, or a commit reads and writes the names of all before it.
PROPERTIES = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
    "commit.manifest-merge.enabled": "true",
}


def _itself(value: Any, _memo: Any = None) -> Any:
    return value


# A catalog copies all metadata of a table at every commit. What there may be a thousand of is frozen, and need not be.
for _kind in (Snapshot, SnapshotLogEntry, MetadataLogEntry):
    _kind.__deepcopy__ = _itself  # type: ignore[assignment, method-assign]


# It also reads them whole before each commit. A metadata file never changes, and one that we wrote need not be read: of
# each table the newest is kept, by its folder.
_written: dict[str, tuple[str, TableMetadata]] = {}
_read_metadata = FromInputFile.table_metadata


def _metadata(file: InputFile, *more: Any) -> TableMetadata:
    location, metadata = _written.get(file.location.rpartition("/")[0], ("", None))
    return metadata if metadata is not None and location == file.location else _read_metadata(file, *more)


FromInputFile.table_metadata = staticmethod(_metadata)  # type: ignore[assignment, method-assign]


class Changes(Transaction):
    """pyiceberg's own copies all metadata each time that it is asked for it, a dozen times in a commit. It is the same
    until there is another update."""

    _seen: tuple[object, object, TableMetadata] | None = None  # for which metadata and updates, and what came of them

    @property
    def table_metadata(self) -> TableMetadata:
        seen = self._seen
        if seen is None or seen[0] is not self._table.metadata or seen[1] is not self._updates:
            seen = self._seen = (self._table.metadata, self._updates, super().table_metadata)
        return seen[2]


class IcebergFormat:
    """One table. ``pipeline`` names whose ledger in it is meant."""

    partition_in_files = True

    def __init__(
        self, catalog: Callable[[], Catalog], settings: Mapping[str, str], table: str, pipeline: str, target: int
    ) -> None:
        self._catalog, self._settings, self._name, self._pipeline = catalog, dict(settings), table, pipeline
        self._target = target  # bytes of a file
        self.shown = table
        self._table: Table | None = None

    @property
    def loaded(self) -> bool:
        return self._table is not None

    @property
    def _at(self) -> Table:
        assert self._table is not None, "not loaded"
        return self._table

    @property
    def data(self) -> Place:
        options = tuple(sorted(s3_options(self._settings).items()))
        location = self._at.location()
        return Place(f"{location if '://' in location else f'file://{location}'}/data", options)

    @property
    def version(self) -> str:
        """The metadata file: it holds the properties of its moment too."""
        return self._at.metadata_location

    def load(self, version: int | str | None = None) -> bool:
        with self._errors("cannot be read"):
            if version is not None:
                self._table = StaticTable.from_metadata(str(version), self._settings)
                return True
            try:
                self._table = self._catalog().load_table(self._name)
            except NoSuchTableError:
                return False
        return True

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """The library's errors as ours."""
        try:
            yield
        except (OSError, SQLAlchemyError, ValueError) as error:
            raise SinkError(
                f"table {self.shown} {what}: {(str(error).splitlines() or [type(error).__name__])[0][:300]}",
                advice="Check sink.catalog, its rights and its room.",
            ) from error

    # The ledger.

    @property
    def _property(self) -> str:
        return f"avow.{self._pipeline}"

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._at.properties.get(self._property, "{}"))
        return told

    def book(self) -> Book:
        told = self._told()
        return books.from_json(told["book"]) if told else Book()

    def rolled_back(self) -> str:
        number = self._told().get("number", 0)
        if not number:
            return ""
        metadata = self._at.metadata
        for snapshot in ancestors_of(self._at.current_snapshot(), metadata):
            found = self._number(snapshot)
            if found is not None:
                return "" if found >= number else f"its newest snapshot has our commit {found}, and we made {number}"
        # None of ours among what the table was: expired, or left behind.
        if any(self._number(snapshot) == number for snapshot in metadata.snapshots):
            return f"our last commit ({number}) is not among what the table was"
        return ""

    def _number(self, snapshot: Snapshot) -> int | None:
        summary = snapshot.summary
        if summary is None or summary.additional_properties.get("avow.pipeline") != self._pipeline:
            return None
        return int(summary.additional_properties["avow.number"])

    # Making and checking.

    def create(self, shape: Shape) -> bool:
        with self._errors("cannot be made"):
            catalog = self._catalog()
            catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            try:
                with catalog.create_table_transaction(self._name, shape.schema, properties=PROPERTIES) as making:
                    if shape.partition is not None:
                        with making.update_spec() as spec:
                            source = shape.by_day_of or shape.partition.name
                            by_day = shape.by_day_of is not None
                            spec.add_field(source, DayTransform() if by_day else IdentityTransform())
            except (TableAlreadyExistsError, CommitFailedException):
                self.load()
                return False
        return self.load()

    def schema(self) -> pa.Schema:
        return schema_to_pyarrow(self._at.schema(), include_field_ids=False)

    def storable(self, type_: pa.DataType) -> pa.DataType:
        """Iceberg has no whole numbers below 32 bits."""
        if pa.types.is_int8(type_) or pa.types.is_int16(type_):
            return pa.int32()
        if pa.types.is_list(type_):
            return pa.list_(self.storable(type_.value_type))
        if pa.types.is_map(type_):
            return pa.map_(type_.key_type, self.storable(type_.item_type))
        if pa.types.is_struct(type_):
            return pa.struct([one.with_type(self.storable(one.type)) for one in type_.fields])
        return type_

    def file_schema(self, wanted: pa.Schema) -> pa.Schema:
        """With the table's own field ids, by which its readers know a column."""
        return pa.schema([_with_id(one, self._at.schema().find_field(one.name)) for one in wanted])

    def refusals(self, shape: Shape, mode: str) -> list[str]:
        metadata = self._at.metadata
        found = self._renamed() if mode == "upsert" else []
        if metadata.format_version not in _FORMATS:
            found.append(f"its format is version {metadata.format_version}, and this writer knows {_FORMATS}")
        if metadata.properties.get("write.format.default", "parquet") != "parquet":
            found.append(f"write.format.default is {metadata.properties['write.format.default']}, and we write parquet")
        there = [str(field.transform) + ":" + self._source(field.source_id) for field in self._at.spec().fields]
        wanted = []
        if shape.partition is not None:
            wanted = [f"day:{shape.by_day_of}" if shape.by_day_of else f"identity:{shape.partition.name}"]
        if there != wanted:
            said = ", ".join(wanted) or "nothing"
            found.append(f"it is partitioned by {', '.join(there) or 'nothing'}, and sink.partition_by says {said}")
        return found

    def _renamed(self) -> list[str]:
        """Columns that files may have under another name, or another column's values under theirs: we read by name, and
        a file that we write anew would lose them."""
        pairs = {pair for schema in self._at.schemas().values() for pair in index_name_by_id(schema).items()}
        seen = [Counter(pair[n] for pair in pairs) for n in (0, 1)]
        return [
            f"column {name!r} was renamed, or another had its name; rewrite its files with Spark, into a new table"
            for number, name in sorted(pairs)
            if self._at.schema().find_column_name(number) == name and max(seen[0][number], seen[1][name]) > 1
        ]

    def _refuse_renamed(self) -> None:
        for why in self._renamed():
            raise SinkError(f"files of table {self.shown} cannot be written anew: {why}")

    def _source(self, number: int) -> str:
        return self._at.schema().find_column_name(number) or "?"

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        wanted = pa.schema([*self.schema(), *(field.with_nullable(True) for field in fields)])
        with self._committing(), self._at.update_schema() as update:
            update.union_by_name(wanted)
        self.load()

    # Commits.

    @contextmanager
    def _committing(self) -> Iterator[None]:
        self._prepare_commit()
        try:
            yield
        except (CommitFailedException, SQLAlchemyError) as error:
            # A locked database is one of them. Whether it was taken in after all is looked for by its name.
            raise Conflict(str(error)) from error
        location = self._at.metadata_location
        _written[location.rpartition("/")[0]] = (location, self._at.metadata)

    def _prepare_commit(self) -> None:
        """On this handle alone, until the commit is made: without the library's retries, and without the past, which
        has no part in it. The catalog applies the commit to what the table really has."""
        metadata = self._at.metadata
        newest = metadata.current_snapshot()
        changed = {
            "properties": {**metadata.properties, "commit.retry.num-retries": "0"},
            "snapshots": [newest] if newest else [],
            "snapshot_log": [],
        }
        self._at.metadata = metadata.model_copy(update=changed)

    @contextmanager
    def _transaction(self, book: Book, name: str) -> Iterator[tuple[Transaction, dict[str, str]]]:
        """A transaction with the ledger in it, and what its snapshots are to say."""
        number = self._told().get("number", 0) + 1
        said = {"avow.commit": name, "avow.pipeline": self._pipeline, "avow.number": str(number)}
        with self._committing(), Changes(self._at) as transaction:
            transaction.set_properties({self._property: json.dumps({"number": number, "book": books.to_json(book)})})
            yield transaction, said

    def commit(self, book: Book, files: Sequence[DataFile], name: str) -> None:
        self._append(book, [self._described(file) for file in files], name)

    def _append(self, book: Book, made: Sequence[IcebergFile], name: str) -> None:
        with (
            self._transaction(book, name) as (transaction, said),
            transaction.update_snapshot(snapshot_properties=said).merge_append() as append,
        ):
            for file in made:
                append.append_data_file(file)

    def _described(self, file: DataFile, partition: Record | None = None) -> IcebergFile:
        schema = self._at.schema()
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=file.metadata(),
            stats_columns=compute_statistics_plan(schema, self._at.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(schema),
        )
        value = (file.partition - date(1970, 1, 1)).days if isinstance(file.partition, date) else file.partition
        return IcebergFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{self.data.url}/{file.name}",
            file_format=FileFormat.PARQUET,
            partition=partition or (Record(value) if self._at.spec().fields else Record()),
            file_size_in_bytes=file.size,
            sort_order_id=None,
            spec_id=self._at.metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def merge(self, rows: pa.Table, key: Sequence[str], lineage: Sequence[str], book: Book, name: str) -> None:
        """By copying: a file with a row that is replaced or deleted gives way to one without it, in one snapshot."""
        self._refuse_renamed()
        schema = self._own_schema()
        writers: dict[Any, FileWriter] = {}
        gone: list[IcebergFile] = []
        known: list[pa.ChunkedArray] = []
        with self._errors("cannot be read"):
            for file in self._files(self._at.scan(row_filter=_span(rows[key[0]], key[0]))):
                there = self._read([file], schema)
                met = merging.meet(there.to_table(columns=[*key, *lineage]), rows, key, lineage)
                known.append(met.known)
                if len(met.rows):
                    gone.append(file)
                    self._write(merging.successor(there.to_table(), rows, met), schema, writers, book.run)
            self._write(merging.fresh(rows, known, schema), schema, writers, book.run)
            made = [self._described(file) for writer in writers.values() for file in writer.close()]
        if not gone:
            self._append(book, made, name)
            return
        with (
            self._transaction(book, name) as (transaction, said),
            transaction.update_snapshot(snapshot_properties=said).overwrite() as exchange,
        ):
            for file in gone:
                exchange.delete_data_file(file)
            for file in made:
                exchange.append_data_file(file)

    def _write(self, rows: pa.Table, schema: pa.Schema, writers: dict[Any, FileWriter], run: int) -> None:
        """Rows into files, each of them of one value of what the table is partitioned by."""
        for value, part in self._parts(rows):
            if value not in writers:
                writers[value] = FileWriter(self.data, schema, (self._pipeline, run), self._target, value)
            for batch in part.to_batches():
                writers[value].write(batch)

    def _parts(self, rows: pa.Table) -> Iterator[tuple[Any, pa.Table]]:
        for by in self._at.spec().fields:  # one, or none
            values = rows[self._source(by.source_id)]
            if isinstance(by.transform, DayTransform):
                values = values.cast(pa.timestamp("us")).cast(pa.date32(), safe=False)
            for value in values.unique().to_pylist():
                same = values.is_null() if value is None else pc.equal(values, pa.scalar(value, values.type))
                yield value, rows.filter(same)
            return
        if rows.num_rows:
            yield None, rows

    def remove(self, chosen: Chosen, book: Book, name: str) -> None:
        if not self.has_rows(chosen):
            self.commit(book, [], name)
            return
        with self._transaction(book, name) as (transaction, said):
            transaction.delete(predicate(chosen), said)

    def mark(self, chosen: Chosen, redrive: int | None, book: Book, name: str) -> None:
        rows = self.rows(None, chosen)
        at = rows.schema.get_field_index("redrive")
        marks = pa.array([redrive] * rows.num_rows, pa.int64())
        with self._transaction(book, name) as (transaction, said):
            transaction.delete(predicate(chosen), said)
            transaction.append(rows.set_column(at, rows.schema.field(at), marks), said)

    def landed(self, name: str) -> bool:
        newest = self._at.metadata.snapshots[-1_000:]
        return any(s.summary is not None and s.summary.additional_properties.get("avow.commit") == name for s in newest)

    # Reading. Not by pyiceberg's own reader, which gives a null list as an empty one (0.12).

    def _files(self, scan: DataScan) -> Iterator[IcebergFile]:
        for task in scan.plan_files():
            if task.delete_files:
                raise SinkError(
                    f"table {self.shown} has delete files of another writer", advice="Compact it: rewrite_data_files."
                )
            yield task.file

    def _read(self, files: Iterable[IcebergFile], schema: pa.Schema) -> ds.Dataset:
        paths = [file.file_path.removeprefix("file://").removeprefix("s3://") for file in files]
        return ds.dataset(paths, schema=schema, format="parquet", filesystem=self.data.filesystem)

    def _plain_schema(self) -> pa.Schema:
        return pa.schema([one.with_type(_small(one.type)) for one in self.schema()])

    def _own_schema(self) -> pa.Schema:
        """All of its columns, as files have them."""
        return self.file_schema(self._plain_schema())

    def _dataset(self, chosen: Chosen | None) -> ds.Dataset:
        scan = self._at.scan() if chosen is None else self._at.scan(row_filter=predicate(chosen))
        return self._read(self._files(scan), self._plain_schema())

    def keys(self, key: Sequence[str], wanted: pa.Table) -> pa.Table:
        with self._errors("cannot be read"):
            first = pc.field(key[0]).isin(wanted[key[0]].unique())
            found = self._dataset(None).to_table(columns=list(key), filter=first)
        return found.join(wanted.select(list(key)), list(key), join_type="inner") if found.num_rows else found

    def rows(self, columns: Sequence[str] | None = None, chosen: Chosen | None = None) -> pa.Table:
        with self._errors("cannot be read"):
            return self._dataset(chosen).to_table(
                columns=None if columns is None else list(columns),
                filter=None if chosen is None else expression(chosen),
            )

    def batches(self, columns: Sequence[str], chosen: Chosen | None = None) -> Iterator[pa.RecordBatch]:
        with self._errors("cannot be read"):
            yield from self._dataset(chosen).to_batches(
                columns=list(columns), filter=None if chosen is None else expression(chosen)
            )

    def spans(self, column: str) -> list[tuple[int, int]]:
        number = self._at.schema().find_field(column).field_id
        found = []
        for task in self._at.scan().plan_files():
            bounds = [(given or {}).get(number) for given in (task.file.lower_bounds, task.file.upper_bounds)]
            low, high = (None if bound is None else struct.unpack("<q", bound)[0] for bound in bounds)
            found.append((0, _OFFSET_MAX) if low is None or high is None else (low, high))
        return found

    def has_rows(self, chosen: Chosen) -> bool:
        with self._errors("cannot be read"):
            return bool(self._dataset(chosen).head(1, filter=expression(chosen)).num_rows)

    def file_count(self) -> int:
        return len(list(self._at.scan().plan_files()))

    def compact(self, pipeline: str, target: int) -> None:
        """pyiceberg has none: files are read, sorted and written anew, and exchanged in one snapshot."""
        self._refuse_renamed()
        by_partition: dict[tuple[Any, ...], list[IcebergFile]] = {}
        for file in self._files(self._at.scan()):
            if file.file_size_in_bytes < target // 2 and file.spec_id == self._at.metadata.default_spec_id:
                by_partition.setdefault(tuple(file.partition[n] for n in range(len(file.partition))), []).append(file)
        for value, files in by_partition.items():
            for group in _groups(files, target):
                self._exchange(pipeline, value, group, target)

    def _exchange(self, pipeline: str, value: tuple[Any, ...], files: Sequence[IcebergFile], target: int) -> None:
        schema = self._own_schema()
        found = self._read(files, schema).to_table()
        writer = FileWriter(self.data, schema, (pipeline, self.book().run), target)
        for batch in found.to_batches():
            writer.write(batch)
        made = [self._described(file, Record(*value)) for file in writer.close()]
        if sum(file.record_count for file in made) != sum(file.record_count for file in files):
            raise ProtocolViolation(f"compaction of {self.shown} has lost or doubled rows, and was not committed")
        with (
            self._committing(),
            Changes(self._at) as transaction,
            transaction.update_snapshot().overwrite() as exchange,
        ):
            for file in files:
                exchange.delete_data_file(file)
            for file in made:
                exchange.append_data_file(file)

    def referenced(self) -> set[str]:
        """The files of every snapshot that has not expired."""
        names = set()
        with self._errors("cannot be read"):
            for snapshot in self._at.metadata.snapshots:
                for manifest in snapshot.manifests(self._at.io):
                    for entry in manifest.fetch_manifest_entry(self._at.io, discard_deleted=False):
                        names.add(entry.data_file.file_path.rsplit("/", 1)[-1])
        return names


def _span(values: pa.ChunkedArray, column: str) -> BooleanExpression:
    """From the least to the greatest, so that files with none of them need not be opened."""
    if not (pa.types.is_integer(values.type) or pa.types.is_string(values.type)):
        return AlwaysTrue()
    ends, term = pc.min_max(values).as_py(), Reference(column)
    least, greatest = literal(ends["min"]), literal(ends["max"])
    return And(GreaterThanOrEqual(term=term, value=least), LessThanOrEqual(term=term, value=greatest))


def _groups(files: Sequence[IcebergFile], target: int) -> Iterator[list[IcebergFile]]:
    """Files that together make one of about ``target`` bytes; never one alone."""
    group: list[IcebergFile] = []
    for file in files:
        group.append(file)
        if sum(one.file_size_in_bytes for one in group) >= target:
            yield group
            group = []
    if len(group) > 1:
        yield group


def _with_id(one: pa.Field, known: Any) -> pa.Field:
    """An Arrow field with the ids of the Iceberg field that it is written for."""
    named = {"PARQUET:field_id": str(known.field_id)}
    return pa.field(one.name, _typed(one.type, known.field_type), one.nullable, named)


def _typed(type_: pa.DataType, known: IcebergType) -> pa.DataType:
    match known:
        case ListType():
            return pa.list_(_with_id(pa.field("element", type_.value_type), known.element_field))
        case MapType():
            key = _with_id(pa.field("key", type_.key_type, nullable=False), known.key_field)
            return pa.map_(key, _with_id(pa.field("value", type_.item_type), known.value_field))
        case StructType():
            return pa.struct([_with_id(one, known.field_by_name(one.name)) for one in type_.fields])
    return type_


def _small(type_: pa.DataType) -> pa.DataType:
    """pyiceberg has the large types of Arrow; the files, and our rows, the others."""
    if pa.types.is_large_list(type_) or pa.types.is_list(type_):
        return pa.list_(pa.field("element", _small(type_.value_type)))
    if pa.types.is_large_string(type_):
        return pa.string()
    if pa.types.is_large_binary(type_):
        return pa.binary()
    if pa.types.is_map(type_):
        return pa.map_(_small(type_.key_type), _small(type_.item_type))
    if pa.types.is_struct(type_):
        return pa.struct([one.with_type(_small(one.type)) for one in type_.fields])
    return type_


def catalog_settings(sink: Iceberg) -> dict[str, str]:
    """As pyiceberg takes them. A warehouse without a catalog has its own: a SQLite file in the folder."""
    given = revealed(sink.catalog)
    if "uri" in given or "type" in given:
        return given
    folder = Path(given["warehouse"].removeprefix("file://")).absolute()
    if "://" in given["warehouse"].removeprefix("file://"):
        raise ConfigError(
            "sink.catalog: a warehouse that is not a folder needs a catalog", advice="Give its type and its uri."
        )
    folder.mkdir(parents=True, exist_ok=True)
    local = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    return given | local


def open_tables(pipeline: Pipeline) -> tuple[IcebergFormat, IcebergFormat]:
    """The table of rows, and that of dead letters beside it."""
    assert isinstance(pipeline.sink, Iceberg)
    sink, settings = pipeline.sink, catalog_settings(pipeline.sink)
    made: list[Catalog] = []

    def catalog() -> Catalog:
        if not made:
            try:
                made.append(load_catalog(settings.get("name", "default"), **settings))
            except (OSError, SQLAlchemyError, ValueError, ImportError) as error:
                raise ConfigError(
                    f"sink.catalog: {error}", advice="See pyiceberg's own settings of catalogs."
                ) from None
        return made[0]

    rows, letters = (
        IcebergFormat(catalog, settings, f"{sink.table}{suffix}", pipeline.name, sink.file_mb << 20)
        for suffix in ("", "_dead_letters")
    )
    return rows, letters
