"""One Iceberg table, as ``lake.table`` wants a table to be.

Owns: how files, ledger and refusals look in Iceberg's metadata. Must not know: the ledger's rules or the order of acts.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    NotInstalledError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, LessThanOrEqual, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.io import load_file_io
from pyiceberg.io.pyarrow import (
    PyArrowFileIO,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.schema import index_name_by_id
from pyiceberg.table import DataScan, StaticTable, Table, Transaction
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot, ancestors_of
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import IcebergType, ListType, MapType, StructType
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from avow.errors import AvowError, ConfigError, ProtocolViolation, SinkError
from avow.settings import PipelineConfig, revealed
from avow.sinks.iceberg import merge as merging
from avow.sinks.iceberg.config import IcebergConfig
from avow.sinks.iceberg.metadata import Changes, remember, without_past
from avow.sinks.iceberg.reading import ById
from avow.sinks.lake import book as books
from avow.sinks.lake.book import Book
from avow.sinks.lake.files import DataFile, FileWriter, Place, in_s3, path_of
from avow.sinks.lake.table import Chosen, Conflict, Shape, among, expression, predicate, same_keys

_OFFSET_MAX = 2**63 - 1
_FORMATS = (1, 2)
EXCHANGES_MAX = 40  # attempts to bring in what is merged, while others commit first
PAUSE_S = 0.02

# Of a table that we make. Old metadata goes, or a thousand commits leave a thousand files of a thousand lines.
# Manifests are merged, as Spark's writer does by itself, or a commit reads and writes the names of all before it.
PROPERTIES = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
    "commit.manifest-merge.enabled": "true",
}


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
        """With the table's own way to its store: the catalog may have given it credentials."""
        location, io = self._at.location(), self._at.io
        if not in_s3(location):
            return Place(f"{f'file://{location}' if location.startswith('/') else location}/data")
        if not isinstance(io, PyArrowFileIO):
            raise ConfigError(
                f"table {self.shown} is read and written with {type(io).__name__}",
                advice="Leave py-io-impl out of sink.catalog: files are written with pyarrow.",
            )
        with self._errors("cannot be reached"):
            return Place(f"{location}/data", pickle.dumps(io.fs_by_scheme("s3", path_of(location).partition("/")[0])))

    @property
    def version(self) -> str:
        """The metadata file: it holds the properties of its moment too."""
        return self._at.metadata_location

    def load(self, pinned: str | None = None) -> bool:
        with self._errors("cannot be read"):
            if pinned is not None:
                self._table = self._static(**json.loads(pinned))
                return True
            try:
                self._table = self._catalog().load_table(self._name)
            except NoSuchTableError:
                return False
            path_of(self._at.location())  # refused where it is in a store that we do not know
        return True

    def pinned(self) -> str:
        """The metadata itself, without the past: its file is gone a hundred commits later (``PROPERTIES``)."""
        metadata = self._at.metadata
        refs = {name: ref for name, ref in metadata.refs.items() if name == MAIN_BRANCH}
        alone = metadata.model_copy(update={**without_past(metadata), "refs": refs})
        known = self._settings | metadata.properties
        vended = {name: value for name, value in self._at.io.properties.items() if known.get(name) != value}
        return json.dumps({"location": self.version, "metadata": alone.model_dump_json(), "vended": vended})

    def _static(self, location: str, metadata: str, vended: dict[str, str]) -> StaticTable:
        found = TableMetadataUtil.parse_raw(metadata)
        io = load_file_io({**self._settings, **found.properties, **vended}, location)
        return StaticTable((self._name,), found, location, io, NoopCatalog("pinned"))

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """The library's errors as ours, and those of a catalog: each kind has its own, with no root in common."""
        try:
            yield
        except (AvowError, Conflict):
            raise
        except Exception as error:
            raise SinkError(
                f"table {self.shown} {what}: {_words(error)}", advice="Check sink.catalog, its rights and its room."
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

    def past_is_known(self) -> bool:
        number = self._told().get("number", 0)
        past = ancestors_of(self._at.current_snapshot(), self._at.metadata)
        return not number or any(self._number(snapshot) is not None for snapshot in past)

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

    def refusals(self, shape: Shape, mode: str) -> list[str]:  # noqa: ARG002 - files are exchanged in any mode
        metadata = self._at.metadata
        found = []
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

    def basis(self) -> object:
        found = self._at.metadata
        written_as = found.properties.get("write.format.default")
        return found.format_version, found.current_schema_id, found.default_spec_id, written_as

    def _renamed(self) -> bool:
        """Whether files may have a column under another name, or another column's values under a name of now."""
        pairs = {pair for schema in self._at.schemas().values() for pair in index_name_by_id(schema).items()}
        numbers, names = ({pair[n] for pair in pairs} for n in (0, 1))
        return not len(pairs) == len(numbers) == len(names)

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
        except (CommitFailedException, ValidationException, SQLAlchemyError) as error:
            # A locked database is one of them. Whether it was taken in after all is looked for by its name.
            raise Conflict(_words(error)) from error
        except AvowError:
            raise
        except Exception as error:
            # Failed, or with an unknown outcome, in the words of any catalog: it is looked for by its name too.
            raise SinkError(f"table {self.shown} did not take a commit: {_words(error)}") from error
        remember(self._at)

    def _prepare_commit(self) -> None:
        """On this handle alone, until the commit is made: without the library's retries, and without the past, which
        has no part in it. The catalog applies the commit to what the table really has."""
        metadata = self._at.metadata
        properties = {**metadata.properties, "commit.retry.num-retries": "0"}
        self._at.metadata = metadata.model_copy(update={"properties": properties, **without_past(metadata)})

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
                    self._write(merging.successor(there.to_table(), rows, met), schema, writers, book.newest)
            self._write(merging.fresh(rows, known, schema), schema, writers, book.newest)
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
        if not self._has_rows(chosen):
            self.commit(book, [], name)
            return
        with self._transaction(book, name) as (transaction, said):
            transaction.delete(predicate(chosen), said)

    def mark(self, chosen: Chosen, redrive: int | None, book: Book, name: str) -> None:
        rows = self.rows(None, chosen)
        if not rows.num_rows:
            self.commit(book, [], name)
            return
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

    def _read(self, files: Iterable[IcebergFile], schema: pa.Schema) -> ds.Dataset | ById:
        paths = [path_of(file.file_path) for file in files]
        if self._renamed():
            return ById(self.data.filesystem, paths, self.file_schema(schema))
        return ds.dataset(paths, schema=schema, format="parquet", filesystem=self.data.filesystem)

    def _plain_schema(self) -> pa.Schema:
        return pa.schema([one.with_type(_small(one.type)) for one in self.schema()])

    def _own_schema(self) -> pa.Schema:
        """All of its columns, as files have them."""
        return self.file_schema(self._plain_schema())

    def _dataset(self, chosen: Chosen | None) -> ds.Dataset | ById:
        scan = self._at.scan() if chosen is None else self._at.scan(row_filter=predicate(chosen))
        return self._read(self._files(scan), self._plain_schema())

    def keys(self, key: Sequence[str], wanted: pa.Table) -> pa.Table:
        with self._errors("cannot be read"):
            first = among(key[0], wanted[key[0]].unique())
            found = self._dataset(None).to_table(columns=list(key), filter=first)
        return same_keys(found, wanted, key)

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
        for file in self._planned():
            bounds = [(given or {}).get(number) for given in (file.lower_bounds, file.upper_bounds)]
            low, high = (None if bound is None else struct.unpack("<q", bound)[0] for bound in bounds)
            found.append((0, _OFFSET_MAX) if low is None or high is None else (low, high))
        return found

    def _has_rows(self, chosen: Chosen) -> bool:
        with self._errors("cannot be read"):
            return bool(self._dataset(chosen).head(1, filter=expression(chosen)).num_rows)

    def file_count(self) -> int:
        return len(self._planned())

    def _planned(self) -> list[IcebergFile]:
        """Every data file, whatever belongs to it."""
        with self._errors("cannot be read"):
            return [task.file for task in self._at.scan().plan_files()]

    def compact(self, pipeline: str, target: int) -> None:
        """pyiceberg has none: files are read, sorted and written anew, and exchanged in one snapshot."""
        by_partition: dict[tuple[Any, ...], list[IcebergFile]] = {}
        for file in self._files(self._at.scan()):
            if file.file_size_in_bytes < target // 2 and file.spec_id == self._at.metadata.default_spec_id:
                by_partition.setdefault(tuple(file.partition[n] for n in range(len(file.partition))), []).append(file)
        for value, files in by_partition.items():
            for group in _groups(files, target):
                self._exchange(pipeline, value, group, target)

    def _exchange(self, pipeline: str, value: tuple[Any, ...], files: Sequence[IcebergFile], target: int) -> None:
        """Others may commit first. What is written is written: it goes in as soon as they leave room, unless they have
        changed one of these very files."""
        schema, run = self._own_schema(), self.book().newest
        writer = FileWriter(self.data, schema, (pipeline, run), target)
        with self._errors("cannot be read"):
            for batch in self._read(files, schema).to_table().to_batches():
                writer.write(batch)
        made = [self._described(file, Record(*value)) for file in writer.close()]
        if sum(file.record_count for file in made) != sum(file.record_count for file in files):
            raise ProtocolViolation(f"compaction of {self.shown} has lost or doubled rows, and was not committed")
        for attempt in range(EXCHANGES_MAX):
            if self.book().newest != run or not self._has(files):
                raise Conflict("files that were to be merged have been changed, or a run has begun")
            try:
                with (
                    self._committing(),
                    Changes(self._at) as transaction,
                    transaction.update_snapshot().overwrite() as exchange,
                ):
                    for file in files:
                        exchange.delete_data_file(file)
                    for file in made:
                        exchange.append_data_file(file)
                return
            except Conflict:
                time.sleep(PAUSE_S * random.random() * min(attempt + 1, 10))
                self.load()
        raise SinkError(
            f"others changed table {self.shown} {EXCHANGES_MAX} times before us",
            advice="Nothing is lost. Compact when less is written, or raise batch.interval.",
        )

    def _has(self, files: Sequence[IcebergFile]) -> bool:
        """Whether they are all in this version: whole, and put as the table puts its files now."""
        wanted = {file.file_path for file in files}
        whole = {task.file.file_path for task in self._at.scan().plan_files() if not task.delete_files}
        return wanted <= whole and all(file.spec_id == self._at.metadata.default_spec_id for file in files)

    def referenced(self) -> set[str]:
        """The files of every snapshot that has not expired."""
        names = set()
        with self._errors("cannot be read"):
            for snapshot in self._at.metadata.snapshots:
                for manifest in snapshot.manifests(self._at.io):
                    for entry in manifest.fetch_manifest_entry(self._at.io, discard_deleted=False):
                        names.add(entry.data_file.file_path.rsplit("/", 1)[-1])
        return names


def _words(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


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


def catalog_settings(sink: IcebergConfig) -> dict[str, str]:
    """As pyiceberg takes them. A warehouse without a catalog has its own: a SQLite file in the folder."""
    given = revealed(sink.catalog)
    if "uri" in given or "type" in given:
        return given
    if in_s3(given["warehouse"]):
        raise ConfigError(
            "sink.catalog: a warehouse that is not a folder needs a catalog", advice="Give its type and its uri."
        )
    folder = Path(path_of(given["warehouse"])).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    local = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    return given | local


def open_tables(pipeline: PipelineConfig) -> tuple[IcebergFormat, IcebergFormat]:
    """The table of rows, and that of dead letters beside it."""
    assert isinstance(pipeline.sink, IcebergConfig)
    sink, settings = pipeline.sink, catalog_settings(pipeline.sink)
    made: list[Catalog] = []

    def catalog() -> Catalog:
        if not made:
            try:
                made.append(load_catalog(settings.get("name", "default"), **settings))
            except (ArgumentError, ValueError, ImportError, NotInstalledError) as error:
                raise ConfigError(
                    f"sink.catalog: {error}", advice="See pyiceberg's own settings of catalogs."
                ) from None
        return made[0]

    rows, letters = (
        IcebergFormat(catalog, settings, f"{sink.table}{suffix}", pipeline.name, sink.file_mb << 20)
        for suffix in ("", "_dead_letters")
    )
    return rows, letters
