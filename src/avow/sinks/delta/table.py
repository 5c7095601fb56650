"""One Delta table, as ``lake.table`` wants a table to be.

What makes a commit a compare-and-set: it is made on the handle whose numbers were judged, and the library does not try
again. So the store takes it as the very next version or refuses it, whoever came between and with whatever.

The numbers are kept beside the handle with the version that they are of, and are not read again while it stays there. A
version never changes, so they are as good as new ones. They move on without being read in one case alone: the library
has said that a commit of ours was made. It is then the next version, and nobody else's, and its numbers are those that
it was sent with. After any other answer (refused, lost, failed) they stay with their version, and whatever version is
loaded next is read from the log. A table that somebody deletes and makes anew under a running handle is refused by the
library while it has fewer versions and read anew when it has more; one with exactly as many is not told apart.

Owns: how files, ledger and refusals look in Delta's log. Must not know: the ledger's rules or the order of acts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake import Field as DeltaField
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, PostCommitHookProperties, RemoveAction

from avow.errors import SinkError
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint
from avow.settings import PipelineConfig, revealed
from avow.sinks.base import Held
from avow.sinks.delta import log, stats
from avow.sinks.delta.config import DeltaConfig
from avow.sinks.lake.book import Book
from avow.sinks.lake.files import DataFile, Place, place
from avow.sinks.lake.staging import DELETED, partition_text
from avow.sinks.lake.table import Chosen, Conflict, Shape, among, expression, predicate, quoted, same_keys

# What a writer can honour by adding files of whole rows. Anything else is refused by its name. The library itself adds
# variantType where it sets a property of a table that has timestampNtz.
WRITER_FEATURES = frozenset({"appendOnly", "invariants", "timestampNtz", "checkConstraints", "variantType"})
READER_FEATURES = frozenset({"timestampNtz", "vacuumProtocolCheck", "variantType"})

# In commits of ours the table is made with: without it a commit reads up to a hundred files of the log.
CHECKPOINT_EVERY = 20

_OFFSET_MAX = 2**63 - 1
_LIBRARY = (DeltaError, pa.ArrowException, OSError, ValueError)  # what the library and Arrow raise
_NUMBERS = ("read", "written", "dead", "last_offset", "last_timestamp_ms", "last_crc32")


class Properties(TypedDict):
    """What the library is told of a commit."""

    commit_properties: CommitProperties
    post_commithook_properties: PostCommitHookProperties


class DeltaFormat:
    """One table. ``pipeline`` names whose ledger in it is meant."""

    def __init__(self, where: Place, options: Mapping[str, str], pipeline: str, *, shown: str) -> None:
        self._place, self._options, self._pipeline = where, dict(options), pipeline
        self.shown = shown
        self._table: DeltaTable | None = None
        self._tried_on = -1  # the version on which the last commit was tried
        self._known: tuple[int, Mapping[str, int]] = (-1, {})  # a version, and the numbers of ours in it
        self._sent: Mapping[str, int] = {}  # the numbers as they are once the last commit that was tried is in

    @property
    def data(self) -> Place:
        return self._place

    @property
    def partition_in_files(self) -> bool:
        return False

    @property
    def loaded(self) -> bool:
        return self._table is not None

    @property
    def _at(self) -> DeltaTable:
        assert self._table is not None, "not loaded"
        return self._table

    @property
    def version(self) -> int:
        return self._at.version()

    def load(self, pinned: str | None = None) -> bool:
        with self._errors("cannot be read"):
            if self._table is None or pinned is not None:
                version, numbers = json.loads(pinned) if pinned is not None else (None, {})
                try:
                    self._table = DeltaTable(self._uri, version, self._options)
                except TableNotFoundError:
                    return False
                self._known = (-1 if version is None else version, numbers)
            else:
                self._table.update_incremental()
        return True

    def pinned(self) -> str:
        return json.dumps([self.version, self._numbers()])

    @property
    def _uri(self) -> str:
        return self._place.url if self._options else self._place.url.removeprefix("file://")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """The library's errors as ours."""
        try:
            yield
        except _LIBRARY as error:
            raise SinkError(
                f"table {self.shown} {what}: {_words(error)}",
                advice="Check sink.path, its rights and its room, and sink.options.",
            ) from error

    # The ledger.

    def _app(self, *more: str) -> str:
        return "/".join(("avow", self._pipeline, *more))

    def _of(self, where: TopicPartition, *more: str) -> str:
        return self._app(where.topic, str(where.partition), *more)

    def _numbers(self) -> Mapping[str, int]:
        """Those of the version that is loaded."""
        if self._known[0] != self.version:
            with self._errors("cannot be read"):
                found = log.transactions(self._place.under("_delta_log"), self.version)
                if found is None:
                    told = {app: self._at.transaction_version(app) for app in self._apps()}
                    found = {app: number for app, number in told.items() if number is not None}
            self._known = (self.version, found)
        return self._known[1]

    def _apps(self) -> list[str]:
        """The names of all numbers that there can be."""
        each = [(), ("owner",), *((name,) for name in _NUMBERS)]
        names = [self._of(where, *name) for where in self._registered() for name in each]
        return [self._app(), *map(self._app, ("redrives", "newest", "version")), *names]

    def _registered(self) -> dict[TopicPartition, tuple[str, int]]:
        """Which partitions there are: topic id and start."""
        text = self._at.metadata().configuration.get(f"avow.{self._pipeline}")
        return {TopicPartition(topic, number): (id_, start) for topic, number, id_, start in json.loads(text or "[]")}

    def book(self) -> Book:
        numbers = self._numbers()
        run = numbers.get(self._app(), 0)
        held = {}
        for where, (topic_id, start) in self._registered().items():
            position = numbers.get(self._of(where))
            if position is None:
                continue  # a crash before its first position: it is adopted again
            read, written, dead, *last = (numbers.get(self._of(where, name), 0) for name in _NUMBERS)
            fingerprint = Fingerprint(*last) if self._of(where, "last_offset") in numbers else None
            counts = Counts(read, written, dead, read - written - dead)
            owner = numbers.get(self._of(where, "owner"), 0)
            held[where] = Held(Entry(position, topic_id, max(run, owner), counts, fingerprint), start)
        newest = numbers.get(self._app("newest"), 0)
        return Book(run, numbers.get(self._app("redrives"), 0), held, max(run, newest))

    def _as_numbers(self, book: Book) -> dict[str, int]:
        numbers = {self._app(): book.run, self._app("redrives"): book.redrives, self._app("newest"): book.newest}
        numbers |= {self._of(where, "owner"): owner for where, owner in book.owners().items()}
        for where, held in book.held.items():
            counts, last = held.entry.counts, held.entry.last
            numbers[self._of(where)] = held.entry.position
            values = [counts.read, counts.written, counts.dead]
            values += [last.offset, last.timestamp_ms, last.crc32] if last else []
            numbers |= {self._of(where, name): value for name, value in zip(_NUMBERS, values, strict=False)}
        return numbers

    def _properties(self, book: Book, name: str) -> Properties:
        """With the numbers that differ from those of the version that is loaded."""
        self._tried_on = self.version
        before, after = self._as_numbers(self.book()), self._as_numbers(book)
        changed = {app: number for app, number in after.items() if before.get(app) != number}
        # The version that this commit will be, since it is made on this one or not at all.
        changed[self._app("version")] = self.version + 1
        self._sent = {**self._numbers(), **changed}
        transactions = [Transaction(app, number) for app, number in changed.items()]
        # To clean up its log the library lists all of it. The table's own rule is asked when a checkpoint is due.
        due = (self.version + 2) % CHECKPOINT_EVERY == 0
        return {
            "commit_properties": CommitProperties({"avow": name}, max_commit_retries=0, app_transactions=transactions),
            "post_commithook_properties": PostCommitHookProperties(cleanup_expired_logs=None if due else False),
        }

    def _register(self, book: Book) -> None:
        known = self._registered()
        wanted = {where: (held.entry.topic_id, held.start) for where, held in book.held.items()}
        if wanted.items() <= known.items():
            return
        judged = self.version
        lines = [[where.topic, where.partition, *told] for where, told in sorted({**known, **wanted}.items())]
        with self._committing():
            self._at.alter.set_table_properties(
                {f"avow.{self._pipeline}": json.dumps(lines)},
                raise_if_not_exists=False,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        self._update()
        if self.version != judged + 1:
            # The book was judged before these: a commit on top of them would take back what they brought.
            raise Conflict(f"others have committed since version {judged}, behind the registering of partitions")

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """A commit: what the library says of it, in our words."""
        try:
            yield
        except CommitFailedError as error:
            raise Conflict(_words(error)) from error
        except _LIBRARY as error:
            if self._is_forgotten():
                raise Conflict(f"the log of version {self.version} was cleaned up") from error
            raise SinkError(f"table {self.shown} did not take a commit: {_words(error)}") from error

    def _is_forgotten(self) -> bool:
        """Whether the log has let go of the version that is loaded: the library makes no commit on it then."""
        log = self._place.under("_delta_log")
        with self._errors("cannot be read"):
            found: pa.fs.FileInfo = log.filesystem.get_file_info(f"{log.root}/{self.version:020}.json")
        return not found.is_file

    def _update(self) -> None:
        with self._errors("cannot be read"):
            self._at.update_incremental()

    def _made(self) -> None:
        """A commit with numbers was made, on the version on which it was tried: it is the next one."""
        self._known = (self._tried_on + 1, self._sent)
        self._update()

    @contextmanager
    def _changing(self, book: Book, name: str) -> Iterator[Properties]:
        """A change of rows. Where no row was meant the library commits nothing, and the ledger has still to move."""
        with self._committing():
            yield self._properties(book, name)
        if self.version == self._tried_on:
            self.commit(book, [], name)
        else:
            self._made()

    # Making and checking.

    def create(self, shape: Shape) -> bool:
        schema = shape.schema
        if shape.partition is not None and shape.partition.name not in schema.names:
            schema = schema.append(shape.partition)
        with self._errors("cannot be made"):
            try:
                self._table = DeltaTable.create(
                    self._uri,
                    DeltaSchema.from_arrow(schema),
                    partition_by=[shape.partition.name] if shape.partition is not None else None,
                    configuration={"delta.checkpointInterval": str(CHECKPOINT_EVERY)},
                    storage_options=self._options,
                )
            except DeltaError:
                if not self.load():
                    raise
                return False
        return True

    def schema(self) -> pa.Schema:
        return pa.schema(self._at.schema().to_arrow())

    def storable(self, type_: pa.DataType) -> pa.DataType:
        return type_

    def file_schema(self, wanted: pa.Schema) -> pa.Schema:
        return wanted

    def refusals(self, shape: Shape, mode: str) -> list[str]:
        metadata, protocol = self._at.metadata(), self._at.protocol()
        configuration = metadata.configuration
        found = []
        if "delta.setTransactionRetentionDuration" in configuration:
            found.append("delta.setTransactionRetentionDuration is set, by which Delta would forget our positions")
        constraints = [name for name in configuration if name.startswith("delta.constraints.")]
        found += [f"{name} is a constraint that files from outside could break" for name in constraints]
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            found.append("delta.columnMapping.mode gives its columns other names in the files")
        if mode == "upsert" and configuration.get("delta.appendOnly", "false") == "true":
            found.append("delta.appendOnly is set, and upsert changes rows")
        unknown = {*(protocol.writer_features or ())} - WRITER_FEATURES
        unknown |= {*(protocol.reader_features or ())} - READER_FEATURES
        found += [f"it needs the feature {name}, which this writer cannot honour" for name in sorted(unknown)]
        if protocol.min_writer_version not in (1, 2, 7) and protocol.writer_features is None:
            found += self._old_features(configuration)
        for field in self._at.schema().fields:
            for name in ("delta.generationExpression", "delta.invariants", "delta.identity.start"):
                if name in (field.metadata or {}):
                    found.append(f"column {field.name!r} has {name}, which files from outside could break")
        wanted = [shape.partition.name] if shape.partition is not None else []
        if list(metadata.partition_columns) != wanted:
            there = ", ".join(metadata.partition_columns) or "nothing"
            found.append(f"it is partitioned by {there}, and sink.partition_by says {', '.join(wanted) or 'nothing'}")
        return found

    def _old_features(self, configuration: Mapping[str, str]) -> list[str]:
        """Of a table that tells its features by a number alone."""
        if configuration.get("delta.enableChangeDataFeed", "false") == "true":
            return ["delta.enableChangeDataFeed is set, and its readers would miss what is merged"]
        return []

    def basis(self) -> object:
        metadata, protocol = self._at.metadata(), self._at.protocol()
        settings = {name: said for name, said in metadata.configuration.items() if not name.startswith("avow.")}
        features = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
        return protocol.min_writer_version, features, settings, metadata.partition_columns, self._at.schema().to_json()

    def _since(self) -> tuple[int, list[dict[str, Any]]]:
        """Our last commit, and what the log still has of those after it."""
        ours = self._numbers().get(self._app("version"), self.version)
        if ours >= self.version:
            return self.version, []
        with self._errors("cannot be read"):
            return ours, [commit for commit in self._at.history(self.version - ours) if commit["version"] > ours]

    def rolled_back(self) -> str:
        ours, since = self._since()
        for commit in since:
            if commit.get("operation") == "RESTORE":
                return f"version {commit['version']} is a RESTORE, made after our last commit (version {ours})"
        return ""

    def past_is_known(self) -> bool:
        ours, since = self._since()
        return len(since) == self.version - ours

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        schema = DeltaSchema.from_arrow(pa.schema([field.with_nullable(True) for field in fields]))
        with self._committing():
            self._at.alter.add_columns(
                [DeltaField(field.name, field.type, nullable=True) for field in schema.fields],
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        self._update()

    # Commits.

    def commit(self, book: Book, files: Sequence[DataFile], name: str) -> None:
        self._register(book)
        now = int(time.time() * 1000)
        by = next(iter(self._at.metadata().partition_columns), None)
        adds: list[AddAction | RemoveAction] = [
            AddAction(
                file.name,  # as it is: the log's own spelling is the library's
                file.size,
                {} if by is None else {by: None if file.partition is None else partition_text(file.partition)},
                now,
                True,
                stats.as_json(file.metadata(), bounded=file.bounded),
            )
            for file in files
        ]
        with self._committing():
            self._at.create_write_transaction(
                adds,
                "append",
                self._at.schema(),
                partition_by=None if by is None else [by],
                **self._properties(book, name),
            )
        self._made()

    def merge(self, rows: pa.Table, key: Sequence[str], lineage: Sequence[str], book: Book, name: str) -> None:
        self._register(book)
        topic, partition, offset, _ = map(quoted, lineage)
        later = f"t.{topic} <> s.{topic} OR t.{partition} <> s.{partition} OR t.{offset} < s.{offset}"
        deleted = f"s.{quoted(DELETED)}"
        columns = {quoted(column): f"s.{quoted(column)}" for column in rows.schema.names if column != DELETED}
        with self._changing(book, name) as properties:
            self._at.merge(
                rows,
                " AND ".join(f"t.{quoted(column)} = s.{quoted(column)}" for column in key),
                source_alias="s",
                target_alias="t",
                **properties,
            ).when_matched_delete(f"{deleted} AND ({later})").when_matched_update(
                columns, f"NOT {deleted} AND ({later})"
            ).when_not_matched_insert(columns, f"NOT {deleted}").execute()

    def remove(self, chosen: Chosen, book: Book, name: str) -> None:
        with self._changing(book, name) as properties:
            self._at.delete(predicate(chosen), **properties)

    def mark(self, chosen: Chosen, redrive: int | None, book: Book, name: str) -> None:
        with self._changing(book, name) as properties:
            self._at.update(
                {"redrive": "NULL" if redrive is None else str(redrive)},
                predicate=predicate(chosen),
                **properties,
            )

    def landed(self, name: str) -> bool:
        since = self.version - self._tried_on
        with self._errors("cannot be read"):
            return since > 0 and any(commit.get("avow") == name for commit in self._at.history(since))

    # Reading.

    def keys(self, key: Sequence[str], wanted: pa.Table) -> pa.Table:
        first = wanted[key[0]].unique()
        with self._errors("cannot be read"):
            found = self._dataset(_span(key[0], first)).to_table(columns=list(key), filter=among(key[0], first))
        return same_keys(found, wanted, key)

    def _dataset(self, files: str | None) -> ds.Dataset:
        """Its files, or those in which rows may be of which the condition ``files`` is true.

        Not by the library's own dataset: it takes a column of which the log has no least and greatest value for null,
        and leaves its rows out, also in files that its own OPTIMIZE has written.
        """
        found = self._at.to_pyarrow_dataset(file_pruning_predicate=files)
        by = self._at.metadata().partition_columns
        fragments = []
        for file in found.get_fragments():
            put = ds.get_partition_keys(file.partition_expression)
            same = [pc.field(name).is_null() if put[name] is None else pc.field(name) == put[name] for name in by]
            whole = reduce(and_, same, pc.scalar(True))
            fragments.append(found.format.make_fragment(file.path, found.filesystem, partition_expression=whole))
        return ds.FileSystemDataset(fragments, found.schema, found.format, found.filesystem)

    def rows(self, columns: Sequence[str] | None = None, chosen: Chosen | None = None) -> pa.Table:
        with self._errors("cannot be read"):
            return self._dataset(predicate(chosen) if chosen else None).to_table(
                columns=None if columns is None else list(columns),
                filter=None if chosen is None else expression(chosen),
            )

    def batches(self, columns: Sequence[str], chosen: Chosen | None = None) -> Iterator[pa.RecordBatch]:
        with self._errors("cannot be read"):
            yield from self._dataset(predicate(chosen) if chosen else None).to_batches(
                columns=list(columns), filter=None if chosen is None else expression(chosen)
            )

    def spans(self, column: str) -> list[tuple[int, int]]:
        with self._errors("cannot be read"):
            told = pa.table(self._at.get_add_actions(flatten=True))
        least, greatest = (f"{which}.{column}" for which in ("min", "max"))
        if least not in told.schema.names:
            return [(0, _OFFSET_MAX)] * min(told.num_rows, 1)
        pairs = zip(told[least].to_pylist(), told[greatest].to_pylist(), strict=True)
        return [(0, _OFFSET_MAX) if low is None or high is None else (low, high) for low, high in pairs]

    def file_count(self) -> int:
        with self._errors("cannot be read"):
            return len(self._at.file_uris())

    def compact(self, pipeline: str, target: int) -> None:  # noqa: ARG002 - its names are the library's
        with self._committing():
            self._at.optimize.compact(target_size=target)
        self._update()

    def referenced(self) -> set[str]:
        """The files of this version, and those removed since: readers of older versions may still open them."""
        with self._errors("cannot be read"):
            names = {str(path).rsplit("/", 1)[-1] for path in pa.table(self._at.get_add_actions())["path"].to_pylist()}
            log = self._place.under("_delta_log")
            for info in log.listed():
                if info.path.endswith(".json"):
                    with log.filesystem.open_input_stream(info.path) as stream:
                        for line in stream.read().splitlines():
                            if line.startswith((b'{"remove"', b'{"add"')):
                                (told,) = json.loads(line).values()
                                names.add(told["path"].rsplit("/", 1)[-1])
        return names


def _span(column: str, values: pa.ChunkedArray) -> str | None:
    """From the least to the greatest, so that files with none of them need not be opened. What a log says of other
    types than these may be rounded."""
    ends = pc.min_max(values).as_py()
    if pa.types.is_integer(values.type):
        return f"{quoted(column)} >= {ends['min']} AND {quoted(column)} <= {ends['max']}"
    high = stats.above(ends["max"]) if pa.types.is_string(values.type) else None
    if high is None:
        return None
    least, greatest = (text.replace("'", "''") for text in (stats.below(ends["min"]), high))
    return f"{quoted(column)} >= '{least}' AND {quoted(column)} <= '{greatest}'"


def _words(error: BaseException) -> str:
    """What the library said, on one line and without its colours: the cause stands at the end."""
    plain = re.sub(r"\x1b\[\d*m|↳", " ", str(error))
    return " ".join(plain.split())[:400] or type(error).__name__


def open_tables(pipeline: PipelineConfig) -> tuple[DeltaFormat, DeltaFormat]:
    """The table of rows, and that of dead letters beside it."""
    assert isinstance(pipeline.sink, DeltaConfig)
    options = revealed(pipeline.sink.options)
    where = place(pipeline.sink.path, options)
    graves = Place(f"{where.url}_dead_letters", where.store)
    given = options if where.store else {}
    shown = str(pipeline.sink.shown("path"))
    return (
        DeltaFormat(where, given, pipeline.name, shown=shown),
        DeltaFormat(graves, given, pipeline.name, shown=f"{shown}_dead_letters"),
    )
