"""A sink for avow: a table of a SQLite database. Rows, positions and dead letters are in one file on a local disk.

One act is one transaction. SQLite has one writer at a time, so an act takes the write lock at its first write and not
before: reading and decoding keep nobody waiting. Entries that were read without the lock are compared again under it.
Columns have no declared type, so that SQLite converts nothing: times are microseconds since 1970, decimals and dates
text, nested values JSON.

    [sink]
    kind = "sqlite"
    path = "/var/lib/payments.db"
    table = "payments"
"""

from __future__ import annotations

import math
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from avow import ledger, schema
from avow.client_cache import ClientCache
from avow.errors import ConfigError, PositionMoved, ProtocolViolation, SinkError
from avow.findings import Offsets
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint, OffsetRange
from avow.prove.oracles.base import SqlOracle, quote_identifier
from avow.settings import REST_COLUMN, PipelineConfig, SinkConfig
from avow.sinks import base
from avow.sinks.auditing import Known, TableAuditReader
from avow.sinks.base import DeadLetter, Selection, Written
from avow.sinks.json import value_text
from avow.sinks.offers import TABLE_OFFERS

Partitioned = TopicPartition | OffsetRange | DeadLetter
LOCK_S = 30  # how long a writer waits for another one
ROWS_AT_ONCE = 10_000  # of an audit
ARROW = {"integer": pa.int64(), "real": pa.float64(), "text": pa.string(), "blob": pa.binary(), "null": pa.null()}
ENTRY = ", ".join(base.ENTRY_COLUMNS)
DEAD_LETTER = ", ".join(f'"{column}"' for column in base.DEAD_LETTER_COLUMNS)
MINE = "pipeline = ? AND tbl = ?"  # positions belong to the table: another one begins anew
AT = f"{MINE} AND topic = ? AND partition = ?"
SCHEMA = f"""
    CREATE TABLE IF NOT EXISTS avow_ledger (pipeline, tbl, topic, partition, start, {ENTRY},
        PRIMARY KEY (pipeline, tbl, topic, partition));
    CREATE TABLE IF NOT EXISTS avow_claims (pipeline, tbl, topic, partition, from_offset, until_offset, run, batch,
        PRIMARY KEY (pipeline, tbl, topic, partition, from_offset));
    CREATE TABLE IF NOT EXISTS avow_dead_letters (pipeline, tbl, {DEAD_LETTER}, died_at,
        PRIMARY KEY (pipeline, tbl, topic, partition, "offset"))"""


class SqliteConfig(SinkConfig):
    """[sink] with kind = "sqlite"."""

    kind: Literal["sqlite"] = Field(description='"sqlite"')
    path: str = Field(min_length=1, description="the database's file")
    table: str = Field(pattern=r"^[A-Za-z_]\w*$", description="letters, digits and _")

    @property
    def target(self) -> str:
        return f"table {self.shown('table')} in {self.shown('path')}"


class SqlitePlugin(base.SinkPlugin):
    kind = "sqlite"
    title = "SQLite"
    Config = SqliteConfig
    offers = TABLE_OFFERS
    assumes = ("The disk keeps what was synced to it, and the file is on no network file system.",)
    spans_partitions = True
    oracle = "avow_sqlite:SqliteOracle"

    def open_driver(self, pipeline: PipelineConfig) -> SqliteDriver:
        return SqliteDriver(pipeline)

    def open_task(self, pipeline: PipelineConfig, run: int, context: object) -> SqliteTask:  # noqa: ARG002
        return SqliteTask(pipeline, run)

    def open_dead_letters(self, pipeline: PipelineConfig) -> SqliteDeadLetters:
        return SqliteDeadLetters(pipeline)

    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> SqliteAuditReader:
        return SqliteAuditReader(pipeline, snapshot)

    def dead_letter_place(self, pipeline: PipelineConfig) -> str:  # noqa: ARG002
        return "avow_dead_letters"


SQLITE = SqlitePlugin()


def connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=LOCK_S, isolation_level=None, check_same_thread=False)


CONNECTIONS: ClientCache[sqlite3.Connection] = ClientCache(sqlite3.Connection.close, keep=4)


class Database:
    """What every side of the sink has in common."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        assert isinstance(pipeline.sink, SqliteConfig)
        self._pipeline, self._sink = pipeline, pipeline.sink
        self._mine = (pipeline.name, self._sink.table)
        self._table = quote_identifier(self._sink.table)
        with self._errors():
            self._db = self._open(self._sink.path)

    def _open(self, path: str) -> sqlite3.Connection:
        return connect(path if Path(path).exists() else ":memory:")  # who only looks makes no file

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise SinkError(f"SQLite database {self._sink.shown('path')}: {error}") from error

    def _query(self, query: str, *values: Any) -> list[Any]:
        with self._errors():
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table: avow_" in str(error):
                    return []  # it has never run
                raise

    def _at(self, tp: Partitioned) -> tuple[str, str, str, int]:
        return (*self._mine, tp.topic, tp.partition)

    def _insert(self, table: str, *values: Any) -> None:
        self._db.execute(f"INSERT INTO {table} VALUES ({_marks(values)}) ON CONFLICT DO NOTHING", values)

    def ledger_snapshot(self) -> dict[TopicPartition, base.PartitionState]:
        found = self._query(f"SELECT topic, partition, start, {ENTRY} FROM avow_ledger WHERE {MINE}", *self._mine)
        return {TopicPartition(*row[:2]): base.PartitionState(base.entry_of(row[3:]), row[2]) for row in found}

    def _dead_letters(self, selection: Selection, columns: str, more: str) -> list[Any]:
        condition, values = MINE, list[Any](self._mine)
        for column, compared, value in selection.conditions():
            condition += f" AND {quote_identifier(column)} {compared} ?"
            values.append(value.timestamp() if isinstance(value, datetime) else value)
        return self._query(f"SELECT {columns} FROM avow_dead_letters WHERE {condition} {more}", *values)

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        found = self._dead_letters(selection, DEAD_LETTER, f"ORDER BY 1, 2, 3 LIMIT {limit}")
        return [base.dead_letter_of(row) for row in found]


class SqliteDriver(Database, base.DriverSink):
    def prepare(self) -> None:
        self.close()
        with self._errors():
            self._db = connect(self._sink.path)
            self._db.execute("PRAGMA journal_mode = WAL")  # the file remembers it: readers do not wait for the writer
            self._db.executescript(SCHEMA)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def prepare_table(self, fields: tuple[schema.Field, ...], *, rest: bool) -> bool:
        columns = [*(field.name for field in fields), *([REST_COLUMN] if rest else []), *self._sink.lineage]
        key = f", PRIMARY KEY ({_listed(self._sink.key)})" if self._sink.key else ""
        with self._transaction():
            made = not self._query("SELECT 1 FROM sqlite_master WHERE name = ?", self._sink.table)
            if made:
                self._db.execute(f"CREATE TABLE {self._table} ({_listed(columns)}{key})")
            typed = "SELECT name FROM pragma_table_info(?) WHERE type <> ''"
            if found := {name for (name,) in self._query(typed, self._sink.table)} & {*columns}:
                raise ConfigError(
                    f"{self._sink.target} has declared types, which convert values: {', '.join(sorted(found))}",
                    advice="Declare these columns without a type, or name a new table.",
                )
            try:
                self._db.execute(f"EXPLAIN {_insert_into(self._sink, columns)}", columns)
            except sqlite3.OperationalError as error:
                raise ConfigError(
                    f"{self._sink.target} does not fit this pipeline's rows: {error}",
                    advice="Add the missing columns, or a unique index on exactly sink.key, or name a new table.",
                ) from error
        return made

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        with self._transaction():
            entries = self.entries()
            run = ledger.next_run(entries.values())
            for tp in entries if partitions is None else entries.keys() & set(partitions):
                fenced = ledger.fence(entries[tp], run)
                self._db.execute(f"UPDATE avow_ledger SET run = ? WHERE {AT}", (fenced.run, *self._at(tp)))
        return run

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        topic, partition, offset, _ = map(quote_identifier, self._sink.lineage)
        query = f"SELECT max({offset}) FROM {self._table} WHERE {topic} = ? AND {partition} = ?"
        with self._transaction():
            for tp in entries.keys() - self.ledger_snapshot().keys():
                first = entries[tp]
                ((greatest,),) = self._query(query, tp.topic, tp.partition)
                if greatest is not None and greatest >= first.position:
                    raise ConfigError(
                        f"{self._sink.target} has rows of {tp} up to offset {greatest}, but pipeline "
                        f"{self._pipeline.name} has no position there and would start at {first.position}",
                        advice="Name a new table, remove the rows, or declare an offset behind them in source.start.",
                    )
                self._insert("avow_ledger", *self._at(tp), first.position, *base.entry_values(first))


class SqliteTask(Database, base.TaskSink):
    def __init__(self, pipeline: PipelineConfig, run: int) -> None:
        super().__init__(pipeline)
        self._run = run

    def _open(self, path: str) -> sqlite3.Connection:
        return CONNECTIONS.get(path, lambda: connect(path))

    @contextmanager
    def act(self) -> Iterator[None]:
        self._expected: dict[TopicPartition, Entry] = {}
        self._repeated = 0  # records whose keys were there already
        with self._errors(), self._db:  # commits, or rolls back
            yield

    def _lock(self) -> None:
        if self._db.in_transaction:
            return
        self._db.execute("BEGIN IMMEDIATE")
        for tp, before in self._expected.items():
            now = self._entry(tp)
            if now != before:
                ledger.check_fence(now, self._run or now.run)
                raise PositionMoved(f"{tp} was at {before.position} when the act began, and is at {now.position}")

    def _entry(self, tp: Partitioned) -> Entry:
        found = self._query(f"SELECT {ENTRY} FROM avow_ledger WHERE {AT}", *self._at(tp))
        if not found:
            raise ProtocolViolation(f"the ledger has no position of {tp}, which a run writes before it reads")
        return base.entry_of(found[0])

    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:
        found = {tp: self._entry(tp) for tp in partitions}
        self._expected |= found if lock else {}
        return list(found.values())

    def write(self, rows: base.RowChanges) -> Written:
        self._lock()
        insert, refused = _insert_into(self._sink, rows.rows.schema.names), dict[int, str]()
        of_record = list(zip(*(rows.rows.column(name).to_pylist() for name in self._sink.lineage[:3]), strict=True))
        for _, numbered in groupby(enumerate(_tuples(rows.rows)), lambda row: of_record[row[0]]):
            record = list(numbered)
            self._db.execute("SAVEPOINT record")
            try:
                taken = sum(self._db.execute(insert, [*map(_stored, *row)]).rowcount for _, row in record)
                if self._sink.mode == "append" and taken != len(record):
                    raise ConfigError(
                        f"{self._sink.target} discarded rows without an error: it has a trigger that ignores"
                    )
                self._repeated += self._sink.mode == "dedupe" and not taken
            except (sqlite3.IntegrityError, sqlite3.DataError, ValueError) as error:
                self._db.execute("ROLLBACK TO record")  # with all of its rows, or a redrive would double some
                refused |= dict.fromkeys((number for number, _ in record), base.Refusal(str(error)))
            self._db.execute("RELEASE record")
        if rows.deletes.num_rows:
            chosen = rows.deletes.select([*self._sink.key, *self._sink.lineage[:3]])
            self._db.executemany(_delete_from(self._sink), [[*map(_stored, *row)] for row in _tuples(chosen)])
        return Written(refused=refused)

    def finish(self, done: OffsetRange) -> Written:  # noqa: ARG002
        return Written(skipped=self._repeated)

    def add_dead_letters(self, dead_letters: list[DeadLetter]) -> None:
        self._lock()
        for one in dead_letters:
            values = base.dead_letter_values(one).values()
            self._insert("avow_dead_letters", *self._mine, *values, datetime.now(UTC).timestamp())

    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        self._lock()
        return self.select(selection, limit)

    def remove_dead_letters(self, dead_letters: list[DeadLetter], written: int, skipped: int) -> None:
        delete = f'DELETE FROM avow_dead_letters WHERE {AT} AND "offset" = ?'
        self._db.executemany(delete, [(*self._at(one), one.offset) for one in dead_letters])
        entry = self._entry(dead_letters[0])
        self._store(dead_letters[0], replace(entry, counts=ledger.redriven(entry.counts, written, skipped)))

    def claim(self, updates: Sequence[base.LedgerUpdate], batch: int) -> None:
        self._lock()
        for update in updates:
            done = update.done
            self._insert("avow_claims", *self._at(done), done.start, done.until, update.after.run, batch)
            self._store(done, update.after)

    def add_counts(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:
        self._lock()
        self._store(done, ledger.tallied(self._entry(done), counts, last))

    def _store(self, tp: Partitioned, entry: Entry) -> None:
        update = f"UPDATE avow_ledger SET ({ENTRY}) = ({_marks(base.ENTRY_COLUMNS)}) WHERE {AT}"
        self._db.execute(update, (*base.entry_values(entry), *self._at(tp)))


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(quote_identifier, names))


def _insert_into(sink: SqliteConfig, columns: Sequence[str]) -> str:
    insert = f"INSERT INTO {quote_identifier(sink.table)} AS t ({_listed(columns)}) VALUES ({_marks(columns)})"
    if sink.mode == "append":
        return insert
    changes = ", ".join(f"{quote_identifier(name)} = excluded.{quote_identifier(name)}" for name in columns)
    topic, partition, offset, _ = map(quote_identifier, sink.lineage)
    # The offset guard: within a partition only a later record changes a row, so a replay changes nothing.
    later = (
        f"(t.{topic}, t.{partition}) IS NOT (excluded.{topic}, excluded.{partition}) OR t.{offset} < excluded.{offset}"
    )
    update = f"UPDATE SET {changes} WHERE {later}"
    return f"{insert} ON CONFLICT ({_listed(sink.key)}) DO {'NOTHING' if sink.mode == 'dedupe' else update}"


def _delete_from(sink: SqliteConfig) -> str:
    topic, partition, offset, _ = map(quote_identifier, sink.lineage)
    same = " AND ".join(f"{quote_identifier(name)} = ?" for name in sink.key)
    later = f"(({topic}, {partition}) IS NOT (?, ?) OR {offset} < ?)"
    return f"DELETE FROM {quote_identifier(sink.table)} WHERE {same} AND {later}"


def _tuples(rows: pa.RecordBatch) -> Iterator[tuple[tuple[Any, ...], list[pa.DataType]]]:
    """Each row, with the types of its columns."""
    columns = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in rows.columns]
    types = [column.type for column in columns]
    return ((row, types) for row in zip(*(column.to_pylist() for column in columns), strict=True))


def _stored(value: Any, type_: pa.DataType) -> Any:
    """A value as SQLite stores it exactly."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("SQLite has no NaN")
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    if pa.types.is_nested(type_):
        return value_text(value, type_)
    return f"{value:f}" if isinstance(value, Decimal) else value.isoformat()


class SqliteDeadLetters(Database, base.DeadLetterReader):
    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        found = self._dead_letters(selection, "reason, count(*), max(died_at)", "GROUP BY 1 ORDER BY 2 DESC")
        return [(reason, count, datetime.fromtimestamp(last, UTC)) for reason, count, last in found]

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        return [
            TopicPartition(*row) for row in self._dead_letters(selection, "DISTINCT topic, partition", "ORDER BY 1, 2")
        ]


class SqliteAuditReader(Database, TableAuditReader):
    """An audit's view: of a copy of the file, so that other processes can read the same moment."""

    _sink: SqliteConfig

    def __init__(self, pipeline: PipelineConfig, snapshot: str | None) -> None:
        super().__init__(pipeline)
        self._folder = tempfile.TemporaryDirectory(prefix="avow-audit-")
        self.snapshot = snapshot or f"{self._folder.name}/snapshot.db"
        if not snapshot:
            self._query("VACUUM INTO ?", self.snapshot)
        super().close()
        self._db = connect(self.snapshot)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    def known(self) -> dict[TopicPartition, Known]:
        query = f"SELECT from_offset, until_offset FROM avow_claims WHERE {AT} ORDER BY 1"
        found = {}
        for tp, held in self.ledger_snapshot().items():
            claims = np.array(self._query(query, *self._at(tp)), np.int64).reshape(-1, 2)
            found[tp] = Known(held.entry, held.start, claims[:, 0], claims[:, 1])
        return found

    def dead_letters(self, tp: TopicPartition) -> Offsets:
        chosen = Selection(topic=tp.topic, partition=tp.partition)
        return np.array([row[0] for row in self._dead_letters(chosen, '"offset"', "ORDER BY 1")], np.int64)

    def row_counts(self) -> dict[TopicPartition, int]:
        found = self._query(f"SELECT {_listed(self._sink.lineage[:2])}, count(*) FROM {self._table} GROUP BY 1, 2")
        return {TopicPartition(*row[:2]): row[2] for row in found}

    def rows(self, tp: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:
        topic, partition, offset, _ = map(quote_identifier, self._sink.lineage)
        found, at = f"FROM {self._table} WHERE {topic} = ? AND {partition} = ?", (tp.topic, tp.partition)
        ((*types,),) = self._query(
            f"SELECT {', '.join(f'typeof(max({quote_identifier(one)}))' for one in columns)} {found}", *at
        )
        fields = pa.schema([(name, ARROW[type_]) for name, type_ in zip(columns, types, strict=True)])
        ordered = f"SELECT {_listed(columns)} {found} AND {offset} >= ? ORDER BY {offset}"
        with self._errors():
            cursor = self._db.execute(ordered, (*at, start))
            while rows := cursor.fetchmany(ROWS_AT_ONCE):
                values = zip(columns, zip(*rows, strict=True), strict=True)
                yield pa.RecordBatch.from_pydict(dict(values), schema=fields)


class SqliteOracle(SqlOracle):
    """For ``avow prove``: what is in the file, read without any of the above."""

    prefix = "avow_"

    def sink_config(self) -> dict[str, Any]:
        return {"path": f"{self.folder}/proof.db", "table": self.table}

    def query(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.folder}/proof.db?mode=rw", uri=True)) as database:
            return database.execute(query).fetchall()

    def try_query(self, query: str) -> list[tuple[Any, ...]] | None:
        try:
            return self.query(query)
        except sqlite3.OperationalError:
            return []
