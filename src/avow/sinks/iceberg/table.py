"""One Iceberg table, as ``lake.table`` wants a table to be.

Owns: how files and ledger are stored in Iceberg's metadata. Must not know: the ledger's rules or the order of acts.
"""

from __future__ import annotations

import json
import pickle
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
from pyiceberg.catalog import Catalog
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
from avow.retry import random_pauses
from avow.settings import Lineage, PipelineConfig, unwrap_secrets
from avow.sinks.iceberg import merge as merging
from avow.sinks.iceberg.catalog import CachedTransaction, open_catalog, without_history
from avow.sinks.iceberg.config import IcebergConfig
from avow.sinks.iceberg.field_ids import FieldIdDataset
from avow.sinks.lake import ledger_snapshot
from avow.sinks.lake.columns import changed
from avow.sinks.lake.files import DataFile, FileWriter, Location, in_s3, path_of
from avow.sinks.lake.ledger_snapshot import LedgerSnapshot
from avow.sinks.lake.table import EVERY_OFFSET, CommitConflict, LakeTable, RowFilter, TableLayout, partition_problems
from avow.sinks.lake.task import day_of, parts_by

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


class IcebergLakeTable(LakeTable):
    """One table. ``pipeline`` names whose ledger in it is meant."""

    partition_in_files = True
    _library_errors = (Exception,)  # and those of a catalog: each kind has its own, with no root in common
    _advice = "Check sink.catalog, its permissions and its free space."

    def __init__(
        self, catalog: Callable[..., Catalog], settings: Mapping[str, str], table: str, pipeline: str, target: int
    ) -> None:
        self._catalog, self._settings, self._name, self._pipeline = catalog, dict(settings), table, pipeline
        self._target = target  # bytes of a file
        self.shown = table
        self._table: Table | None = None

    @staticmethod
    def _error_text(error: Exception) -> str:
        return (str(error).splitlines() or [type(error).__name__])[0][:300]

    @property
    def _handle(self) -> Table:
        assert self._table is not None, "not loaded"
        return self._table

    @property
    def data(self) -> Location:
        """With the table's own way to its store: the catalog may have given it credentials."""
        location, io = self._handle.location(), self._handle.io
        if not in_s3(location):
            return Location(f"{f'file://{location}' if location.startswith('/') else location}/data")
        if not isinstance(io, PyArrowFileIO):
            raise ConfigError(
                f"table {self.shown} uses the FileIO {type(io).__name__}, but avow needs PyArrowFileIO",
                advice="Remove py-io-impl from sink.catalog.",
            )
        with self._errors("cannot be reached"):
            return Location(
                f"{location}/data", pickle.dumps(io.fs_by_scheme("s3", path_of(location).partition("/")[0]))
            )

    @property
    def version(self) -> str:
        """The metadata file: it holds the properties of its moment too."""
        return self._handle.metadata_location

    def load(self, pinned: str | None = None) -> bool:
        with self._errors("cannot be read"):
            if pinned is not None:
                self._table = self._static(**json.loads(pinned))
                return True
            try:
                self._table = self._catalog().load_table(self._name)
            except NoSuchTableError:
                return False
            path_of(self._handle.location())  # refused where it is in a store that we do not know
        return True

    def pinned(self) -> str:
        """The metadata itself, without the past: its file is gone a hundred commits later (``PROPERTIES``)."""
        metadata = self._handle.metadata
        refs = {name: ref for name, ref in metadata.refs.items() if name == MAIN_BRANCH}
        alone = without_history(metadata).model_copy(update={"refs": refs})
        known = self._settings | metadata.properties
        vended = {name: value for name, value in self._handle.io.properties.items() if known.get(name) != value}
        return json.dumps({"location": self.version, "metadata": alone.model_dump_json(), "vended": vended})

    def _static(self, location: str, metadata: str, vended: dict[str, str]) -> StaticTable:
        parsed = TableMetadataUtil.parse_raw(metadata)
        io = load_file_io({**self._settings, **parsed.properties, **vended}, location)
        return StaticTable((self._name,), parsed, location, io, NoopCatalog("pinned"))

    # The ledger.

    @property
    def _property(self) -> str:
        return f"avow.{self._pipeline}"

    def _stored_ledger(self) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads(self._handle.properties.get(self._property, "{}"))
        return stored

    def ledger(self) -> LedgerSnapshot:
        stored = self._stored_ledger()
        return ledger_snapshot.from_json(stored["book"]) if stored else LedgerSnapshot()

    def rolled_back(self) -> str:
        number = self._stored_ledger().get("number", 0)
        if not number:
            return ""
        metadata = self._handle.metadata
        for snapshot in ancestors_of(self._handle.current_snapshot(), metadata):
            newest = self._number(snapshot)
            if newest is not None and newest < number:
                return f"its current snapshot has avow's commit {newest}, but commit {number} was made"
            if newest is not None:
                return ""
        # None of ours among what the table was: expired, or left behind.
        if any(self._number(snapshot) == number for snapshot in metadata.snapshots):
            return f"avow's last commit ({number}) is not in the table's history"
        return ""

    def has_full_history(self) -> bool:
        number = self._stored_ledger().get("number", 0)
        past = ancestors_of(self._handle.current_snapshot(), self._handle.metadata)
        return not number or any(self._number(snapshot) is not None for snapshot in past)

    def _number(self, snapshot: Snapshot) -> int | None:
        summary = snapshot.summary
        if summary is None or summary.additional_properties.get("avow.pipeline") != self._pipeline:
            return None
        return int(summary.additional_properties["avow.number"])

    # Making and checking.

    def create(self, layout: TableLayout) -> bool:
        with self._errors("cannot be made"):
            catalog = self._catalog(make=True)
            catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            try:
                with catalog.create_table_transaction(self._name, layout.schema, properties=PROPERTIES) as making:
                    if layout.partition is not None:
                        with making.update_spec() as spec:
                            source = layout.by_day_of or layout.partition.name
                            by_day = layout.by_day_of is not None
                            spec.add_field(source, DayTransform() if by_day else IdentityTransform())
            except (TableAlreadyExistsError, CommitFailedException):
                self.load()
                return False
        return self.load()

    def schema(self) -> pa.Schema:
        return schema_to_pyarrow(self._handle.schema(), include_field_ids=False)

    def storable(self, type_: pa.DataType) -> pa.DataType:
        """Iceberg has no whole numbers below 32 bits."""
        return _changed(type_, lambda part: pa.int32() if part in (pa.int8(), pa.int16()) else part)

    def file_schema(self, wanted: pa.Schema) -> pa.Schema:
        """With the table's own field ids, by which its readers know a column."""
        return pa.schema([_with_id(field, self._handle.schema().find_field(field.name)) for field in wanted])

    def incompatibilities(self, layout: TableLayout, mode: str) -> list[str]:  # noqa: ARG002 - files are exchanged in any mode
        metadata = self._handle.metadata
        problems = []
        if metadata.format_version not in _FORMATS:
            problems.append(f"its format version is {metadata.format_version}, but avow supports {_FORMATS}")
        if metadata.properties.get("write.format.default", "parquet") != "parquet":
            problems.append(
                f"write.format.default is {metadata.properties['write.format.default']}, but avow writes parquet"
            )
        partitioned_by = [f"{field.transform}:{self._source(field.source_id)}" for field in self._handle.spec().fields]
        wanted = []
        if layout.partition is not None:
            wanted = [f"day:{layout.by_day_of}" if layout.by_day_of else f"identity:{layout.partition.name}"]
        return problems + partition_problems(partitioned_by, wanted)

    def compatibility_key(self) -> object:
        metadata = self._handle.metadata
        written_as = metadata.properties.get("write.format.default")
        return metadata.format_version, metadata.current_schema_id, metadata.default_spec_id, written_as

    def _has_renamed_columns(self) -> bool:
        """Whether files may have a column under another name, or another column's values under a name of now."""
        pairs = {pair for schema in self._handle.schemas().values() for pair in index_name_by_id(schema).items()}
        numbers, names = ({pair[n] for pair in pairs} for n in (0, 1))
        return not len(pairs) == len(numbers) == len(names)

    def _source(self, number: int) -> str:
        return self._handle.schema().find_column_name(number) or "?"

    def can_widen(self, column: str) -> bool:
        """Not one by which files are put: manifests have its values in the type of before."""
        return column not in [self._source(field.source_id) for field in self._handle.spec().fields]

    def alterations(self) -> str:
        return self._handle.properties.get(f"{self._property}/columns", "")

    def alter(self, fields: Sequence[pa.Field], alterations: str) -> None:
        wanted = changed(self.schema(), fields)
        with self._committing(), self._handle.transaction() as transaction:
            transaction.set_properties({f"{self._property}/columns": alterations})
            with transaction.update_schema() as update:
                update.union_by_name(wanted)
        self.load()

    # Commits.

    @contextmanager
    def _committing(self) -> Iterator[None]:
        # On this handle alone, until the commit is made: without the library's retries, and without the past, which
        # has no part in it. The catalog applies the commit to what the table really has.
        metadata = self._handle.metadata
        properties = {**metadata.properties, "commit.retry.num-retries": "0"}
        self._handle.metadata = without_history(metadata).model_copy(update={"properties": properties})
        try:
            yield
        except (CommitFailedException, ValidationException, SQLAlchemyError) as error:
            # A locked database is one of them. Whether it was taken in after all is looked for by its name.
            raise CommitConflict(self._error_text(error)) from error
        except AvowError:
            raise
        except Exception as error:
            # Failed, or with an unknown outcome, in the words of any catalog: it is looked for by its name too.
            raise SinkError(f"could not commit to table {self.shown}: {self._error_text(error)}") from error

    @contextmanager
    def _transaction(self, snapshot: LedgerSnapshot, name: str) -> Iterator[tuple[Transaction, dict[str, str]]]:
        """A transaction with the ledger in it, and what its snapshots are to say."""
        number = self._stored_ledger().get("number", 0) + 1
        summary = {"avow.commit": name, "avow.pipeline": self._pipeline, "avow.number": str(number)}
        with self._committing(), CachedTransaction(self._handle) as transaction:
            transaction.set_properties(
                {self._property: json.dumps({"number": number, "book": ledger_snapshot.to_json(snapshot)})}
            )
            yield transaction, summary

    def commit(self, snapshot: LedgerSnapshot, files: Sequence[DataFile], name: str) -> None:
        self._exchange(snapshot, [], [self._iceberg_file(file) for file in files], name)

    def _exchange(
        self, snapshot: LedgerSnapshot, gone: Sequence[IcebergFile], made: Sequence[IcebergFile], name: str
    ) -> None:
        """Files that go and files that come, and the ledger with them, in one snapshot."""
        with self._transaction(snapshot, name) as (transaction, summary):
            update = transaction.update_snapshot(snapshot_properties=summary)
            with update.overwrite() if gone else update.merge_append() as exchange:
                _exchange_files(exchange, gone, made)

    def _iceberg_file(self, file: DataFile, partition: Record | None = None) -> IcebergFile:
        schema = self._handle.schema()
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=file.metadata(),
            stats_columns=compute_statistics_plan(schema, self._handle.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(schema),
        )
        value = (file.partition - date(1970, 1, 1)).days if isinstance(file.partition, date) else file.partition
        return IcebergFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{self.data.url}/{file.name}",
            file_format=FileFormat.PARQUET,
            partition=partition or (Record(value) if self._handle.spec().fields else Record()),
            file_size_in_bytes=file.size,
            sort_order_id=None,
            spec_id=self._handle.metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def merge(self, rows: pa.Table, key: Sequence[str], lineage: Lineage, snapshot: LedgerSnapshot, name: str) -> None:
        """By copying: a file with a row that is replaced or deleted gives way to one without it, in one snapshot."""
        schema = self._own_schema()
        writers: dict[Any, FileWriter] = {}
        gone: list[IcebergFile] = []
        known: list[pa.ChunkedArray] = []
        with self._errors("cannot be read"):
            for file in self._files(self._handle.scan(row_filter=_span(rows[key[0]], key[0]))):
                existing = self._read([file], schema)
                compared = existing.scanner(columns=[*key, *lineage]).to_table()
                matches = merging.match_keys(compared, rows, key, lineage)
                known.append(matches.known)
                if len(matches.rows):
                    gone.append(file)
                    after = merging.successor(existing.scanner().to_table(), rows, matches)
                    self._write(after, schema, writers, snapshot.newest)
            self._write(merging.fresh(rows, known, schema), schema, writers, snapshot.newest)
            made = [self._iceberg_file(file) for writer in writers.values() for file in writer.close()]
        self._exchange(snapshot, gone, made, name)

    def _write(self, rows: pa.Table, schema: pa.Schema, writers: dict[Any, FileWriter], run: int) -> None:
        """Rows into files, each of them of one value of what the table is partitioned by."""
        for value, part in self._parts(rows):
            if value not in writers:
                writers[value] = FileWriter(self.data, schema, (self._pipeline, run), self._target, value)
            for batch in part.to_batches():
                writers[value].write(batch)

    def _parts(self, rows: pa.Table) -> Iterator[tuple[Any, pa.Table]]:
        for by in self._handle.spec().fields:  # one, or none
            values = rows[self._source(by.source_id)]
            yield from parts_by(day_of(values) if isinstance(by.transform, DayTransform) else values, rows)
            return
        if rows.num_rows:
            yield None, rows

    def remove(self, row_filter: RowFilter, snapshot: LedgerSnapshot, name: str) -> None:
        with self._errors("cannot be read"):
            found = self._scanner(None, row_filter).head(1)
        if not found.num_rows:
            self.commit(snapshot, [], name)
            return
        with self._transaction(snapshot, name) as (transaction, summary):
            transaction.delete(row_filter.predicate(), summary)

    def mark(self, row_filter: RowFilter, redrive: int | None, snapshot: LedgerSnapshot, name: str) -> None:
        rows = self.rows(None, row_filter)
        if not rows.num_rows:
            self.commit(snapshot, [], name)
            return
        at = rows.schema.get_field_index("redrive")
        marks = pa.array([redrive] * rows.num_rows, pa.int64())
        with self._transaction(snapshot, name) as (transaction, summary):
            transaction.delete(row_filter.predicate(), summary)
            transaction.append(rows.set_column(at, rows.schema.field(at), marks), summary)

    def has_commit(self, name: str) -> bool:
        newest = self._handle.metadata.snapshots[-1_000:]
        return any(s.summary is not None and s.summary.additional_properties.get("avow.commit") == name for s in newest)

    # Reading. Not by pyiceberg's own reader, which gives a null list as an empty one (0.12).

    def _files(self, scan: DataScan) -> Iterator[IcebergFile]:
        for task in scan.plan_files():
            if task.delete_files:
                raise SinkError(
                    f"table {self.shown} has delete files of another writer",
                    advice="Compact it with Spark's rewrite_data_files.",
                )
            yield task.file

    def _read(self, files: Iterable[IcebergFile], schema: pa.Schema) -> ds.Dataset | FieldIdDataset:
        paths = [path_of(file.file_path) for file in files]
        if self._has_renamed_columns():
            return FieldIdDataset(self.data.filesystem, paths, self.file_schema(schema))
        return ds.dataset(paths, schema=schema, format="parquet", filesystem=self.data.filesystem)

    def _plain_schema(self) -> pa.Schema:
        """pyiceberg has the large types of Arrow; the files, and our rows, the others."""
        small = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
        return pa.schema(
            [field.with_type(_changed(field.type, lambda part: small.get(part, part))) for field in self.schema()]
        )

    def _own_schema(self) -> pa.Schema:
        """All of its columns, as files have them."""
        return self.file_schema(self._plain_schema())

    def _dataset(self, row_filter: RowFilter | None) -> ds.Dataset | FieldIdDataset:
        scan = self._handle.scan() if row_filter is None else self._handle.scan(row_filter=row_filter.predicate())
        return self._read(self._files(scan), self._plain_schema())

    def spans(self, column: str) -> list[tuple[int, int]]:
        number = self._handle.schema().find_field(column).field_id
        spans = []
        for file in self._planned():
            bounds = [(by_id or {}).get(number) for by_id in (file.lower_bounds, file.upper_bounds)]
            low, high = (None if bound is None else struct.unpack("<q", bound)[0] for bound in bounds)
            spans.append(EVERY_OFFSET if low is None or high is None else (low, high))
        return spans

    def file_count(self) -> int:
        return len(self._planned())

    def _planned(self) -> list[IcebergFile]:
        """Every data file, whatever belongs to it."""
        with self._errors("cannot be read"):
            return [task.file for task in self._handle.scan().plan_files()]

    def compact(self, pipeline: str, target: int) -> None:
        """pyiceberg has none: files are read, sorted and written anew, and exchanged in one snapshot."""
        by_partition: dict[tuple[Any, ...], list[IcebergFile]] = {}
        for file in self._files(self._handle.scan()):
            if file.file_size_in_bytes < target // 2 and file.spec_id == self._handle.metadata.default_spec_id:
                by_partition.setdefault(tuple(file.partition[n] for n in range(len(file.partition))), []).append(file)
        for value, files in by_partition.items():
            for group in _groups(files, target):
                self._replace_files(pipeline, value, group, target)

    def _replace_files(self, pipeline: str, value: tuple[Any, ...], files: Sequence[IcebergFile], target: int) -> None:
        """Others may commit first. What is written is written: it goes in as soon as they leave room, unless they have
        changed one of these very files."""
        schema, run = self._own_schema(), self.ledger().newest
        writer = FileWriter(self.data, schema, (pipeline, run), target)
        with self._errors("cannot be read"):
            for batch in self._read(files, schema).scanner().to_table().to_batches():
                writer.write(batch)
        made = [self._iceberg_file(file, Record(*value)) for file in writer.close()]
        if sum(file.record_count for file in made) != sum(file.record_count for file in files):
            raise ProtocolViolation(f"compaction of {self.shown} would lose or duplicate rows, and was not committed")
        for pause in random_pauses(PAUSE_S, 10 * PAUSE_S, EXCHANGES_MAX + 1):
            if self.ledger().newest != run or not self._has(files):
                raise CommitConflict("files to be merged were changed, or a run started")
            try:
                with (
                    self._committing(),
                    CachedTransaction(self._handle) as transaction,
                    transaction.update_snapshot().overwrite() as exchange,
                ):
                    _exchange_files(exchange, files, made)
                return
            except CommitConflict:
                time.sleep(pause)
                self.load()
        raise SinkError(
            f"gave up after {EXCHANGES_MAX} commit conflicts on table {self.shown}",
            advice="Nothing is lost. Compact when the pipeline writes less, or raise batch.interval.",
        )

    def _has(self, files: Sequence[IcebergFile]) -> bool:
        """Whether they are all in this version: whole, and put as the table puts its files now."""
        wanted = {file.file_path for file in files}
        whole = {task.file.file_path for task in self._handle.scan().plan_files() if not task.delete_files}
        return wanted <= whole and all(file.spec_id == self._handle.metadata.default_spec_id for file in files)

    def referenced(self) -> set[str]:
        """The files of every snapshot that has not expired."""
        names = set()
        with self._errors("cannot be read"):
            for snapshot in self._handle.metadata.snapshots:
                for manifest in snapshot.manifests(self._handle.io):
                    for entry in manifest.fetch_manifest_entry(self._handle.io, discard_deleted=False):
                        names.add(entry.data_file.file_path.rsplit("/", 1)[-1])
        return names


def _exchange_files(exchange: Any, gone: Iterable[IcebergFile], made: Iterable[IcebergFile]) -> None:
    for file in gone:
        exchange.delete_data_file(file)
    for file in made:
        exchange.append_data_file(file)


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


def _with_id(field: pa.Field, known: Any) -> pa.Field:
    """An Arrow field with the ids of the Iceberg field that it is written for."""
    named = {"PARQUET:field_id": str(known.field_id)}
    return pa.field(field.name, _typed(field.type, known.field_type), field.nullable, named)


def _typed(type_: pa.DataType, known: IcebergType) -> pa.DataType:
    match known:
        case ListType():
            return pa.list_(_with_id(pa.field("element", type_.value_type), known.element_field))
        case MapType():
            key = _with_id(pa.field("key", type_.key_type, nullable=False), known.key_field)
            return pa.map_(key, _with_id(pa.field("value", type_.item_type), known.value_field))
        case StructType():
            return pa.struct([_with_id(field, known.field_by_name(field.name)) for field in type_.fields])
    return type_


def _changed(type_: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type in which each part that has no parts itself is changed. A list is not a large one."""
    if pa.types.is_large_list(type_) or pa.types.is_list(type_):
        return pa.list_(pa.field(type_.value_field.name, _changed(type_.value_type, change)))
    if pa.types.is_map(type_):
        return pa.map_(_changed(type_.key_type, change), _changed(type_.item_type, change))
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_changed(field.type, change)) for field in type_.fields])
    return change(type_)


def catalog_settings(sink: IcebergConfig) -> dict[str, str]:
    """As pyiceberg takes them. A warehouse without a catalog has its own: a SQLite file in the folder."""
    settings = unwrap_secrets(sink.catalog)
    if "uri" in settings or "type" in settings:
        return settings
    if in_s3(settings["warehouse"]):
        raise ConfigError(
            "sink.catalog: a warehouse that is not a local folder needs a catalog",
            advice="Set type and uri of the catalog.",
        )
    folder = Path(path_of(settings["warehouse"])).absolute()
    local = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    return settings | local


def open_tables(pipeline: PipelineConfig) -> tuple[IcebergLakeTable, IcebergLakeTable]:
    """The table of rows, and that of dead letters beside it."""
    assert isinstance(pipeline.sink, IcebergConfig)
    sink, settings = pipeline.sink, catalog_settings(pipeline.sink)
    made: list[Catalog] = []
    own = Path(settings["uri"].removeprefix("sqlite:///")) if "uri" not in sink.catalog and "uri" in settings else None

    def catalog(*, make: bool = False) -> Catalog:
        if own is not None and not own.exists():
            if not make:  # reading creates no file
                raise NoSuchTableError(f"there is no catalog {own}")
            own.parent.mkdir(parents=True, exist_ok=True)
        if not made:
            try:
                made.append(open_catalog(settings))
            except (ArgumentError, ValueError, ImportError, NotInstalledError) as error:
                raise ConfigError(f"sink.catalog: {error}", advice="See pyiceberg's catalog settings.") from None
        return made[0]

    rows, dead_letters = (
        IcebergLakeTable(catalog, settings, f"{sink.table}{suffix}", pipeline.name, sink.file_mb << 20)
        for suffix in ("", "_dead_letters")
    )
    return rows, dead_letters
