"""One Delta table, as ``lake.table`` wants a table to be.

What makes a commit a compare-and-set: it is made on the handle whose numbers were judged, and the library does not try
again. So the store takes it as the very next version or refuses it, whoever came between and with whatever.

The numbers are cached beside the handle with the version that they are of, and are not read again while it stays there.
A version never changes, so they are as good as new ones. They move on without being read in one case alone: the library
has said that a commit of ours was made. It is then the next version, and nobody else's, and its numbers are those that
it was sent with. After any other answer (refused, lost, failed) they stay with their version, and whatever version is
loaded next is read from the log. A table that somebody deletes and makes anew under a running handle is refused by the
library while it has fewer versions and read anew when it has more; one with exactly as many is not noticed.

Owns: how files and ledger are stored in Delta's log. Must not know: the ledger's rules or the order of acts.
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
from avow.settings import Lineage, PipelineConfig, unwrap_secrets
from avow.sinks.base import PartitionState
from avow.sinks.delta import log, stats
from avow.sinks.delta.config import DeltaConfig
from avow.sinks.lake.files import DataFile, Location, location_of
from avow.sinks.lake.ledger_snapshot import LedgerSnapshot, entry_from, numbers_of
from avow.sinks.lake.table import (
    EVERY_OFFSET,
    CommitConflict,
    LakeTable,
    RowFilter,
    TableLayout,
    partition_problems,
    quoted,
)
from avow.sinks.lake.task import DELETED, partition_text

# What a writer can honour by adding files of whole rows. Anything else is refused by its name. The library itself adds
# variantType where it sets a property of a table that has timestampNtz.
WRITER_FEATURES = frozenset({"appendOnly", "invariants", "timestampNtz", "checkConstraints", "variantType"})
READER_FEATURES = frozenset({"timestampNtz", "vacuumProtocolCheck", "variantType"})

# In commits of ours the table is made with: without it a commit reads up to a hundred files of the log.
CHECKPOINT_EVERY = 20

_COUNTS = ("read", "written", "dead")
_NUMBERS = (*_COUNTS, "last_offset", "last_timestamp_ms", "last_crc32")  # as ``numbers_of`` gives them


class Properties(TypedDict):
    """The library's arguments of a commit."""

    commit_properties: CommitProperties
    post_commithook_properties: PostCommitHookProperties


class DeltaLakeTable(LakeTable):
    """One table. ``pipeline`` names whose ledger in it is meant."""

    partition_in_files = False
    never_widens = "it widens none of a Delta table, since deltalake (1.6.6) has no type widening"
    _library_errors = (DeltaError, pa.ArrowException, OSError, ValueError)
    _advice = "Check sink.path, its permissions and its free space, and sink.options."

    def __init__(self, location: Location, options: Mapping[str, str], pipeline: str, *, shown: str) -> None:
        self._location, self._options, self._pipeline = location, dict(options), pipeline
        self.shown = shown
        self._table: DeltaTable | None = None
        self._tried_on = -1  # the version on which the last commit was tried
        self._known: tuple[int, Mapping[str, int]] = (-1, {})  # a version, and the numbers of ours in it
        self._sent: Mapping[str, int] = {}  # the numbers as they are once the last commit that was tried is in

    @property
    def data(self) -> Location:
        return self._location

    @staticmethod
    def _error_text(error: Exception) -> str:
        """On one line and without its colours: the cause stands at the end."""
        plain = re.sub(r"\x1b\[\d*m|↳", " ", str(error))
        return " ".join(plain.split())[:400] or type(error).__name__

    @property
    def _handle(self) -> DeltaTable:
        assert self._table is not None, "not loaded"
        return self._table

    @property
    def version(self) -> int:
        return self._handle.version()

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
        return self._location.url if self._options else self._location.url.removeprefix("file://")

    # The ledger.

    def _app(self, *more: str) -> str:
        return "/".join(("avow", self._pipeline, *more))

    def _of(self, tp: TopicPartition, *more: str) -> str:
        return self._app(tp.topic, str(tp.partition), *more)

    def _numbers(self) -> Mapping[str, int]:
        """Those of the version that is loaded."""
        if self._known[0] != self.version:
            with self._errors("cannot be read"):
                numbers = log.transactions(self._location.under("_delta_log"), self.version)
                if numbers is None:
                    versions = {app: self._handle.transaction_version(app) for app in self._apps()}
                    numbers = {app: number for app, number in versions.items() if number is not None}
            self._known = (self.version, numbers)
        return self._known[1]

    def _apps(self) -> list[str]:
        """The names of all numbers that there can be."""
        each = [(), ("owner",), *((name,) for name in _NUMBERS)]
        names = [self._of(tp, *name) for tp in self._registered() for name in each]
        return [self._app(), *map(self._app, ("redrives", "newest", "version")), *names]

    def _registered(self) -> dict[TopicPartition, tuple[str, int]]:
        """Which partitions there are: topic id and start."""
        text = self._handle.metadata().configuration.get(f"avow.{self._pipeline}")
        return {TopicPartition(topic, number): (id_, start) for topic, number, id_, start in json.loads(text or "[]")}

    def ledger(self) -> LedgerSnapshot:
        numbers = self._numbers()
        run = numbers.get(self._app(), 0)
        state = {}
        for tp, (topic_id, start) in self._registered().items():
            position = numbers.get(self._of(tp))
            if position is None:
                continue  # a crash before its first position: it is adopted again
            names = _NUMBERS if self._of(tp, "last_offset") in numbers else _COUNTS
            known = [numbers.get(self._of(tp, name), 0) for name in names]
            owner = numbers.get(self._of(tp, "owner"), 0)
            state[tp] = PartitionState(entry_from(position, topic_id, max(run, owner), known), start)
        newest = numbers.get(self._app("newest"), 0)
        return LedgerSnapshot(run, numbers.get(self._app("redrives"), 0), state, max(run, newest))

    def _as_numbers(self, snapshot: LedgerSnapshot) -> dict[str, int]:
        numbers = {
            self._app(): snapshot.run,
            self._app("redrives"): snapshot.redrives,
            self._app("newest"): snapshot.newest,
        }
        numbers |= {self._of(tp, "owner"): owner for tp, owner in snapshot.owners().items()}
        for tp, state in snapshot.partitions.items():
            numbers[self._of(tp)] = state.entry.position
            stored = zip(_NUMBERS, numbers_of(state.entry), strict=False)
            numbers |= {self._of(tp, name): number for name, number in stored}
        return numbers

    def _properties(self, snapshot: LedgerSnapshot, name: str) -> Properties:
        """With the numbers that differ from those of the version that is loaded."""
        self._tried_on = self.version
        before, after = self._as_numbers(self.ledger()), self._as_numbers(snapshot)
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

    def _register(self, snapshot: LedgerSnapshot) -> None:
        known = self._registered()
        wanted = {tp: (state.entry.topic_id, state.start) for tp, state in snapshot.partitions.items()}
        if wanted.items() <= known.items():
            return
        lines = [[tp.topic, tp.partition, *start] for tp, start in sorted({**known, **wanted}.items())]
        self._set_property(f"avow.{self._pipeline}", json.dumps(lines))

    def _set_property(self, name: str, value: str) -> None:
        judged = self.version
        with self._committing():
            self._handle.alter.set_table_properties(
                {name: value}, raise_if_not_exists=False, commit_properties=CommitProperties(max_commit_retries=0)
            )
        self._update()
        if self.version != judged + 1:
            # The ledger was read before these: a commit on top of them would undo what they changed.
            raise CommitConflict(f"another commit followed version {judged} while a property was set")

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """A commit, with the library's errors as ours."""
        try:
            yield
        except CommitFailedError as error:
            raise CommitConflict(self._error_text(error)) from error
        except self._library_errors as error:
            if self._is_expired():
                raise CommitConflict(f"the log of version {self.version} was cleaned up") from error
            raise SinkError(f"could not commit to table {self.shown}: {self._error_text(error)}") from error

    def _is_expired(self) -> bool:
        """Whether the log no longer has the version that is loaded: the library makes no commit on it then."""
        log = self._location.under("_delta_log")
        with self._errors("cannot be read"):
            commit: pa.fs.FileInfo = log.filesystem.get_file_info(f"{log.root}/{self.version:020}.json")
        return not commit.is_file

    def _update(self) -> None:
        with self._errors("cannot be read"):
            self._handle.update_incremental()

    def _made(self) -> None:
        """A commit with numbers was made, on the version on which it was tried: it is the next one."""
        self._known = (self._tried_on + 1, self._sent)
        self._update()

    @contextmanager
    def _changing(self, snapshot: LedgerSnapshot, name: str) -> Iterator[Properties]:
        """A change of rows. Where no row was meant the library commits nothing, and the ledger has still to move."""
        with self._committing():
            yield self._properties(snapshot, name)
        if self.version == self._tried_on:
            self.commit(snapshot, [], name)
        else:
            self._made()

    # Making and checking.

    def create(self, layout: TableLayout) -> bool:
        schema = layout.schema
        if layout.partition is not None and layout.partition.name not in schema.names:
            schema = schema.append(layout.partition)
        with self._errors("cannot be made"):
            try:
                self._table = DeltaTable.create(
                    self._uri,
                    DeltaSchema.from_arrow(schema),
                    partition_by=[layout.partition.name] if layout.partition is not None else None,
                    configuration={"delta.checkpointInterval": str(CHECKPOINT_EVERY)},
                    storage_options=self._options,
                )
            except DeltaError:
                if not self.load():
                    raise
                return False
        return True

    def schema(self) -> pa.Schema:
        return pa.schema(self._handle.schema().to_arrow())

    def incompatibilities(self, layout: TableLayout, mode: str) -> list[str]:
        metadata, protocol = self._handle.metadata(), self._handle.protocol()
        configuration = metadata.configuration
        problems = []
        if "delta.setTransactionRetentionDuration" in configuration:
            problems.append("delta.setTransactionRetentionDuration is set, so Delta would expire avow's positions")
        constraints = [name for name in configuration if name.startswith("delta.constraints.")]
        problems += [f"it has the constraint {name}, which avow does not check" for name in constraints]
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            problems.append("delta.columnMapping.mode is set, which avow does not support")
        if mode == "upsert" and configuration.get("delta.appendOnly", "false") == "true":
            problems.append("delta.appendOnly is set, but upsert changes rows")
        unknown = {*(protocol.writer_features or ())} - WRITER_FEATURES
        unknown |= {*(protocol.reader_features or ())} - READER_FEATURES
        problems += [f"it needs the table feature {name}, which avow does not support" for name in sorted(unknown)]
        # Whether the table declares its features by a version number alone.
        by_number = protocol.min_writer_version not in (1, 2, 7) and protocol.writer_features is None
        if by_number and configuration.get("delta.enableChangeDataFeed", "false") == "true":
            problems.append("delta.enableChangeDataFeed is set, and avow writes no change data for merges")
        for field in self._handle.schema().fields:
            for name in ("delta.generationExpression", "delta.invariants", "delta.identity.start"):
                if name in (field.metadata or {}):
                    problems.append(f"column {field.name!r} has {name}, which avow does not support")
        wanted = [layout.partition.name] if layout.partition is not None else []
        return problems + partition_problems(metadata.partition_columns, wanted)

    def compatibility_key(self) -> object:
        metadata, protocol = self._handle.metadata(), self._handle.protocol()
        settings = {name: value for name, value in metadata.configuration.items() if not name.startswith("avow.")}
        features = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
        return (
            protocol.min_writer_version,
            features,
            settings,
            metadata.partition_columns,
            self._handle.schema().to_json(),
        )

    def _since(self) -> tuple[int, list[dict[str, Any]]]:
        """Our last commit, and what the log still has of those after it."""
        ours = self._numbers().get(self._app("version"), self.version)
        if ours >= self.version:
            return self.version, []
        with self._errors("cannot be read"):
            return ours, [commit for commit in self._handle.history(self.version - ours) if commit["version"] > ours]

    def rolled_back(self) -> str:
        ours, since = self._since()
        for commit in since:
            if commit.get("operation") == "RESTORE":
                return f"version {commit['version']} is a RESTORE after avow's last commit (version {ours})"
        return ""

    def has_full_history(self) -> bool:
        ours, since = self._since()
        return len(since) == self.version - ours

    def alterations(self) -> str:
        return self._handle.metadata().configuration.get(f"avow.{self._pipeline}/columns", "")

    def alter(self, fields: Sequence[pa.Field], alterations: str) -> None:
        self._set_property(f"avow.{self._pipeline}/columns", alterations)
        schema = DeltaSchema.from_arrow(pa.schema([field.with_nullable(True) for field in fields]))
        with self._committing():
            self._handle.alter.add_columns(
                [DeltaField(field.name, field.type, nullable=True) for field in schema.fields],
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        self._update()

    # Commits.

    def commit(self, snapshot: LedgerSnapshot, files: Sequence[DataFile], name: str) -> None:
        self._register(snapshot)
        now = int(time.time() * 1000)
        by = next(iter(self._handle.metadata().partition_columns), None)
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
            self._handle.create_write_transaction(
                adds,
                "append",
                self._handle.schema(),
                partition_by=None if by is None else [by],
                **self._properties(snapshot, name),
            )
        self._made()

    def merge(self, rows: pa.Table, key: Sequence[str], lineage: Lineage, snapshot: LedgerSnapshot, name: str) -> None:
        self._register(snapshot)
        topic, partition, offset, _ = map(quoted, lineage)
        later = f"t.{topic} <> s.{topic} OR t.{partition} <> s.{partition} OR t.{offset} < s.{offset}"
        deleted = f"s.{quoted(DELETED)}"
        columns = {quoted(column): f"s.{quoted(column)}" for column in rows.schema.names if column != DELETED}
        with self._changing(snapshot, name) as properties:
            self._handle.merge(
                rows,
                " AND ".join(f"t.{quoted(column)} = s.{quoted(column)}" for column in key),
                source_alias="s",
                target_alias="t",
                **properties,
            ).when_matched_delete(f"{deleted} AND ({later})").when_matched_update(
                columns, f"NOT {deleted} AND ({later})"
            ).when_not_matched_insert(columns, f"NOT {deleted}").execute()

    def remove(self, row_filter: RowFilter, snapshot: LedgerSnapshot, name: str) -> None:
        with self._changing(snapshot, name) as properties:
            self._handle.delete(row_filter.predicate(), **properties)

    def mark(self, row_filter: RowFilter, redrive: int | None, snapshot: LedgerSnapshot, name: str) -> None:
        with self._changing(snapshot, name) as properties:
            self._handle.update(
                {"redrive": "NULL" if redrive is None else str(redrive)},
                predicate=row_filter.predicate(),
                **properties,
            )

    def has_commit(self, name: str) -> bool:
        since = self.version - self._tried_on
        with self._errors("cannot be read"):
            return since > 0 and any(commit.get("avow") == name for commit in self._handle.history(since))

    # Reading.

    def _dataset(self, row_filter: RowFilter | None) -> ds.Dataset:
        return self._files(row_filter.predicate() if row_filter else None)

    def _dataset_with(self, column: str, values: pa.ChunkedArray) -> ds.Dataset:
        return self._files(_span(column, values))

    def _files(self, condition: str | None) -> ds.Dataset:
        """Its files, or those in which rows may be of which the condition is true.

        Not by the library's own dataset: it takes a column of which the log has no least and greatest value for null,
        and leaves its rows out, also in files that its own OPTIMIZE has written.
        """
        dataset = self._handle.to_pyarrow_dataset(file_pruning_predicate=condition)
        by = self._handle.metadata().partition_columns
        fragments = []
        for file in dataset.get_fragments():
            put = ds.get_partition_keys(file.partition_expression)
            same = [pc.field(name).is_null() if put[name] is None else pc.field(name) == put[name] for name in by]
            whole = reduce(and_, same, pc.scalar(True))
            fragments.append(dataset.format.make_fragment(file.path, dataset.filesystem, partition_expression=whole))
        return ds.FileSystemDataset(fragments, dataset.schema, dataset.format, dataset.filesystem)

    def spans(self, column: str) -> list[tuple[int, int]]:
        with self._errors("cannot be read"):
            actions = pa.table(self._handle.get_add_actions(flatten=True))
        least, greatest = (f"{which}.{column}" for which in ("min", "max"))
        if least not in actions.schema.names:
            return [EVERY_OFFSET] * min(actions.num_rows, 1)
        pairs = zip(actions[least].to_pylist(), actions[greatest].to_pylist(), strict=True)
        return [EVERY_OFFSET if low is None or high is None else (low, high) for low, high in pairs]

    def file_count(self) -> int:
        with self._errors("cannot be read"):
            return len(self._handle.file_uris())

    def compact(self, pipeline: str, target: int) -> None:  # noqa: ARG002 - its names are the library's
        with self._committing():
            self._handle.optimize.compact(target_size=target)
        self._update()

    def referenced(self) -> set[str]:
        """The files of this version, and those removed since: readers of older versions may still open them."""
        with self._errors("cannot be read"):
            names = {
                str(path).rsplit("/", 1)[-1] for path in pa.table(self._handle.get_add_actions())["path"].to_pylist()
            }
            log = self._location.under("_delta_log")
            for info in log.listed():
                if info.path.endswith(".json"):
                    with log.filesystem.open_input_stream(info.path) as stream:
                        for line in stream.read().splitlines():
                            if line.startswith((b'{"remove"', b'{"add"')):
                                (action,) = json.loads(line).values()
                                names.add(action["path"].rsplit("/", 1)[-1])
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


def open_tables(pipeline: PipelineConfig) -> tuple[DeltaLakeTable, DeltaLakeTable]:
    """The table of rows, and that of dead letters beside it."""
    assert isinstance(pipeline.sink, DeltaConfig)
    options = unwrap_secrets(pipeline.sink.options)
    location = location_of(pipeline.sink.path, options)
    dead_letters = Location(f"{location.url}_dead_letters", location.store)
    table_options = options if location.store else {}
    shown = str(pipeline.sink.shown("path"))
    return (
        DeltaLakeTable(location, table_options, pipeline.name, shown=shown),
        DeltaLakeTable(dead_letters, table_options, pipeline.name, shown=f"{shown}_dead_letters"),
    )
