"""The driver's side of the PostgreSQL sink: schema ``avow``, its versions, runs and positions.

Owns: the SQL of schema ``avow`` and its versions. The rules are ``ledger``'s; here they are only stored.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from avow import ledger
from avow.errors import ConfigError, PositionMoved, ProtocolViolation, SinkError
from avow.guarantee import Guarantee
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint, OffsetRange
from avow.schema import Field
from avow.settings import PipelineConfig
from avow.sinks.base import (
    ENTRY_COLUMNS,
    GIVEN_UP_BATCH,
    Claim,
    Claimed,
    DriverSink,
    LedgerUpdate,
    PartitionState,
    entry_of,
)
from avow.sinks.postgres import tables
from avow.sinks.postgres.config import PostgresConfig
from avow.sinks.postgres.session import Queries, Session, as_sink_error, literal, name

# Each is run once, in order, in one transaction with the version it makes. Never edit one that has been released.
MIGRATIONS = (
    """
    CREATE TABLE avow.runs (
        pipeline text NOT NULL, run bigint NOT NULL, guarantee text NOT NULL, engine text NOT NULL,
        started_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (pipeline, run));
    CREATE TABLE avow.ledger (
        pipeline text NOT NULL, topic text NOT NULL, partition integer NOT NULL,
        position bigint NOT NULL, start bigint NOT NULL, topic_id text NOT NULL, run bigint NOT NULL,
        read bigint NOT NULL, written bigint NOT NULL, dead bigint NOT NULL, skipped bigint NOT NULL,
        last_offset bigint, last_timestamp_ms bigint, last_crc32 bigint,
        updated_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (pipeline, topic, partition),
        CHECK (read = written + dead + skipped));
    CREATE TABLE avow.claims (
        pipeline text NOT NULL, topic text NOT NULL, partition integer NOT NULL,
        from_offset bigint NOT NULL, until_offset bigint NOT NULL, run bigint NOT NULL, batch bigint NOT NULL,
        read bigint NOT NULL, written bigint NOT NULL, dead bigint NOT NULL, skipped bigint NOT NULL,
        claimed_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (pipeline, topic, partition, from_offset));
    CREATE TABLE avow.dead_letters (
        pipeline text NOT NULL, topic text NOT NULL, partition integer NOT NULL, "offset" bigint NOT NULL,
        timestamp_ms bigint NOT NULL, key bytea, value bytea, headers json NOT NULL,
        reason text NOT NULL, detail text NOT NULL, run bigint NOT NULL,
        died_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (pipeline, topic, partition, "offset"));
    """,
    # Idempotency keys that a plain consumer's handler has seen.
    """
    CREATE TABLE avow.keys (
        pipeline text NOT NULL, key text NOT NULL, seen_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (pipeline, key));
    """,
    # What each pipeline delivers into, and how it was last declared.
    """
    CREATE TABLE avow.pipelines (
        pipeline text PRIMARY KEY, table_oid bigint NOT NULL, table_name text NOT NULL, declared json NOT NULL);
    """,
    # Columns that were added, or had another type before, and up to where rows were written by then.
    """
    CREATE TABLE avow.columns (
        pipeline text NOT NULL, name text NOT NULL, before text NOT NULL, topic text NOT NULL,
        partition integer NOT NULL, until_offset bigint NOT NULL,
        PRIMARY KEY (pipeline, name, before, topic, partition));
    """,
)
CLAIMS_KEPT = "30 days"
TRIM_EVERY = 32  # acts, about: to look for old claims costs more than to store new ones
PATIENCE_S = 5  # wait for a session that still holds a partition of ours

_ENTRY = ", ".join(ENTRY_COLUMNS)
_OF_PARTITION = "pipeline = $1 AND topic = $2 AND partition = "


def read_entries(session: Queries, pipeline: str, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:
    """Entries of partitions; with ``lock``, locked until the transaction ends, in one order for everybody."""
    rows = session.query(
        f"SELECT topic, partition, {_ENTRY} FROM avow.ledger WHERE pipeline = $1"
        f" AND (topic, partition) IN ({_listed(partitions)}) ORDER BY topic, partition{' FOR UPDATE' if lock else ''}",
        pipeline,
    )
    entries = {TopicPartition(topic, partition): entry_of(rest) for topic, partition, *rest in rows}
    for tp in partitions:
        if tp not in entries:
            raise ProtocolViolation(
                f"the ledger has no position of {tp.topic}/{tp.partition}, which a run writes before it reads"
            )
    return [entries[tp] for tp in partitions]


_LAST = ("last_offset", "last_timestamp_ms", "last_crc32")
_MOVED = (
    *("topic", "partition", "before", "until", "run", "read", "written", "dead", "skipped"),
    *_LAST,
    *("since", "new_read", "new_written", "new_dead", "new_skipped"),
)


def write_claims(session: Queries, pipeline: str, updates: Sequence[LedgerUpdate], batch: int) -> None:
    """Store claims that ``ledger.claim`` has made. The entries must have been read with ``lock``."""
    # Without a new record, the fingerprint of the last one stays.
    lasts = ", ".join(f"{column} = coalesce(m.{column}::bigint, l.{column})" for column in _LAST)
    moved = session.run(
        f"WITH m ({', '.join(_MOVED)}) AS (VALUES {', '.join(map(_moved, updates))}), moved AS ("
        "UPDATE avow.ledger l SET position = m.until, run = m.run, updated_at = now(),"
        f" read = m.read, written = m.written, dead = m.dead, skipped = m.skipped, {lasts}"
        " FROM m WHERE l.pipeline = $1 AND l.topic = m.topic AND l.partition = m.partition AND l.position = m.before"
        " RETURNING m.*)"
        " INSERT INTO avow.claims (pipeline, topic, partition, from_offset, until_offset, run, batch,"
        " read, written, dead, skipped) SELECT $1, topic, partition, since, until, run,"
        f" {batch}, new_read, new_written, new_dead, new_skipped FROM moved",
        pipeline,
    )
    if moved != len(updates):
        wanted = ", ".join(f"{update.done} from {update.before.position}" for update in updates)
        raise PositionMoved(f"cannot claim {wanted}: {len(updates) - moved} of these positions have changed")
    # Not by the batch's number alone: where partitions take turns, some might never have their claims trimmed.
    partitions = [TopicPartition(update.done.topic, update.done.partition) for update in updates]
    if zlib.crc32(f"{partitions[0]} {batch}".encode()) % TRIM_EVERY == 0:
        _trim_claims(session, pipeline, partitions)


def _trim_claims(session: Queries, pipeline: str, partitions: Sequence[TopicPartition]) -> None:
    """Twice as many of the oldest claims as have come since the last time: a run of months keeps the log within its
    bound."""
    session.run(
        f"DELETE FROM avow.claims c USING (VALUES {_listed(partitions)}) AS p (topic, partition) WHERE c.pipeline = $1"
        " AND c.topic = p.topic AND c.partition = p.partition AND c.from_offset IN (SELECT o.from_offset FROM"
        " avow.claims o WHERE o.pipeline = $1 AND o.topic = p.topic AND o.partition = p.partition"
        f" ORDER BY o.from_offset LIMIT {2 * TRIM_EVERY}) AND c.claimed_at < now() - interval '{CLAIMS_KEPT}'",
        pipeline,
    )


def _moved(update: LedgerUpdate) -> str:
    """One line of ``_MOVED``."""
    before, after, done, last = update.before, update.after, update.done, update.after.last
    counts, new = after.counts, _difference(after.counts, before.counts)
    numbers = [
        *(done.partition, before.position, after.position, after.run),
        *(counts.read, counts.written, counts.dead, counts.skipped),
        *((last.offset, last.timestamp_ms, last.crc32) if last else ("NULL", "NULL", "NULL")),
        *(done.start, new.read, new.written, new.dead, new.skipped),
    ]
    return f"({literal(done.topic)}, {', '.join(map(str, numbers))})"


def write_counts(session: Session, pipeline: str, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:
    """Add what became of records that were claimed before they were written (at-most-once)."""
    added = (
        f"read = read + {counts.read}, written = written + {counts.written},"
        f" dead = dead + {counts.dead}, skipped = skipped + {counts.skipped}"
    )
    matching = f"WHERE {_OF_PARTITION}{done.partition}"
    session.run(f"UPDATE avow.ledger SET {added}{_last(last)} {matching}", pipeline, done.topic)
    session.run(f"UPDATE avow.claims SET {added} {matching} AND from_offset = {done.start}", pipeline, done.topic)


def _listed(partitions: Collection[TopicPartition]) -> str:
    return ", ".join(f"({literal(tp.topic)}, {tp.partition})" for tp in sorted(partitions))


def _difference(after: Counts, before: Counts) -> Counts:
    return Counts(
        after.read - before.read,
        after.written - before.written,
        after.dead - before.dead,
        after.skipped - before.skipped,
    )


def _last(last: Fingerprint | None) -> str:
    """The part of an UPDATE that stores the last record's fingerprint, as ``ledger.tallied`` has it: without one, or
    where a later one is there, the old one stays."""
    if last is None:
        return ""
    values = zip(_LAST, (last.offset, last.timestamp_ms, last.crc32), strict=True)
    is_later = f"last_offset > {last.offset}"
    return "".join(f", {column} = CASE WHEN {is_later} THEN {column} ELSE {value} END" for column, value in values)


def _table_key(pipeline: PipelineConfig) -> str:
    """Under which a table is in ``avow.pipelines``: one for each topic where each has a table of its own. No pipeline's
    name has a slash."""
    return pipeline.name if pipeline.topic is None else f"{pipeline.name}/{pipeline.topic}"


def check_table(session: Session, pipeline: PipelineConfig, oid: int) -> None:
    """Refuse another table than the one that the positions are of: it may have taken its name since the start."""
    others = session.query(
        "SELECT table_name, (SELECT oid::regclass::text FROM pg_class WHERE oid = table_oid) FROM avow.pipelines"
        f" WHERE pipeline = $1 AND table_oid <> {oid}",
        _table_key(pipeline),
    )
    if others:
        raise _other_table(pipeline, _table_key(pipeline), *others[0])


def _other_table(pipeline: PipelineConfig, key: str, known: str, now_called: str | None) -> ConfigError:
    assert isinstance(pipeline.sink, PostgresConfig)
    name, table = key, pipeline.sink.table
    accept = (
        f"If {table} has its rows (a restored backup, a rebuilt table), confirm that with DELETE FROM "
        f"avow.pipelines WHERE pipeline = {literal(name)}."
    )
    if now_called is None:
        return ConfigError(
            f"pipeline {name} delivered into another table {table}: {known} was dropped, with the delivered rows",
            advice=f"Restore it, or give the pipeline a new name to fill {table} from source.start. {accept}",
        )
    return ConfigError(
        f"pipeline {name} has delivered into table {now_called}, but sink.table is now {table}: its rows would be "
        "split between two tables",
        advice=f"Set sink.table to {now_called}; or rename that table to {table}; or give the "
        f"pipeline a new name to fill {table} from source.start. {accept}",
    )


def application(pipeline: str, run: int) -> str:
    """The name of our sessions on the server. It is cut at 63 bytes, so the pipeline is a hash."""
    return f"{_application_prefix(pipeline)}{run}"


def _application_prefix(pipeline: str) -> str:
    return f"avow-{hashlib.sha256(pipeline.encode()).hexdigest()[:16]}-"


class PostgresDriver(DriverSink):
    """What the driver asks of the sink, by one connection."""

    remarks: list[str]

    def __init__(self, pipeline: PipelineConfig, session: Session | None = None) -> None:
        assert isinstance(pipeline.sink, PostgresConfig)
        self._pipeline = pipeline
        self._sink = pipeline.sink
        self._url = pipeline.sink.url.get_secret_value()
        self._session = session or Session(self._url, "avow-driver", pipeline.sink.timeout_s)
        self._has_table = False  # a plain consumer has none
        self.remarks = []

    def close(self) -> None:
        self._session.close()

    def open_topic(self, part: PipelineConfig) -> DriverSink:
        """By the same connection: the ledger is one for all topics."""
        return PostgresDriver(part, self._session)

    def prepare(self) -> None:
        """Make or upgrade schema ``avow``."""
        with self._alone("cannot prepare schema avow"):
            self._migrate()

    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        """Make, alter or check the target table. True if it was made."""
        with self._alone("cannot prepare the table"):
            done = tables.make_or_check(self._session, self._sink, tables.columns(fields, self._sink, rest=rest))
            self.remarks = [f"table {self._sink.table}: {change.shown}" for change in done.changes]
            self._remember_table()
            self._remember_changes(done.changes)
        self._has_table = True
        return done.made

    def _remember_table(self) -> None:
        """Refuse another table than the one that the positions are of; remark what else is declared otherwise."""
        session, pipeline, sink, key = self._session, self._pipeline, self._sink, _table_key(self._pipeline)
        ((oid,),) = session.query("SELECT to_regclass($1)::oid::bigint", tables.full_name(sink.table))
        declared = {
            "guarantee": str(pipeline.guarantee),
            "sink.mode": sink.mode,
            "sink.key": ", ".join(sink.key),
            "source.topics": ", ".join(pipeline.source.topics or ()) or str(pipeline.source.topics_pattern),
        }
        known = session.query(
            "SELECT table_oid, table_name, declared::text, (SELECT oid::regclass::text FROM pg_class"
            " WHERE oid = table_oid) FROM avow.pipelines WHERE pipeline = $1",
            key,
        )
        begun = {tp.topic for tp in self.entries()}
        if known:
            ((known_oid, known_name, text, now_called),) = known
            if known_oid != oid and (begun if pipeline.topic is None else pipeline.topic in begun):
                raise _other_table(pipeline, key, known_name, now_called)
            before = json.loads(text)
            self.remarks += [
                f"{key} is now {value or 'none'}; in the last run of {pipeline.name} it was {before[key] or 'none'}"
                for key, value in declared.items()
                if key in before and before[key] != value
            ]
        if pipeline.topic is None or not known:
            self._refuse_tables_before(oid, begun)
        session.run(
            f"INSERT INTO avow.pipelines VALUES ($1, {oid}, $2, $3) ON CONFLICT (pipeline) DO UPDATE SET"
            " table_oid = excluded.table_oid, table_name = excluded.table_name, declared = excluded.declared",
            key,
            str(sink.table),
            json.dumps(declared),
        )

    def _remember_changes(self, changes: Sequence[tables.Change]) -> None:
        """For audits: up to where rows were written without a column, or with a float's values in it, by whatever
        pipeline into this table."""
        for change in changes:
            if change.before not in ("", "real"):
                continue  # a row of before has the same value in the wider type
            self._session.run(
                "INSERT INTO avow.columns SELECT l.pipeline, $1, $2, l.topic, l.partition, l.position"
                " FROM avow.ledger l JOIN avow.pipelines p ON p.pipeline IN (l.pipeline, l.pipeline || '/' || l.topic)"
                " WHERE p.table_oid = to_regclass($3)::oid AND (p.pipeline <> l.pipeline OR NOT EXISTS (SELECT FROM"
                " avow.pipelines own WHERE own.pipeline = l.pipeline || '/' || l.topic))"
                " ON CONFLICT (pipeline, name, before, topic, partition)"
                " DO UPDATE SET until_offset = excluded.until_offset",
                change.column.name,
                change.before,
                tables.full_name(self._sink.table),
            )

    def _refuse_tables_before(self, oid: int, begun: Collection[str]) -> None:
        """Where the pipeline had one table for all topics before and has one for each now, or the other way round:
        refuse another table than the one that a topic's positions are of."""
        pipeline = self._pipeline
        condition = "starts_with(pipeline, $1 || '/')" if pipeline.topic is None else "pipeline = $1"
        for key, known_name, now_called in self._session.query(
            "SELECT pipeline, table_name, (SELECT oid::regclass::text FROM pg_class WHERE oid = table_oid)"
            f" FROM avow.pipelines WHERE {condition} AND table_oid <> {oid}",
            pipeline.name,
        ):
            if (pipeline.topic or key.partition("/")[2]) in begun:
                raise _other_table(pipeline, key, known_name, now_called)

    @contextmanager
    def _alone(self, problem: str) -> Iterator[None]:
        """Two drivers that start at once must not both make something."""
        with as_sink_error(problem), self._session.transaction():
            self._session.run("SELECT pg_advisory_xact_lock(hashtextextended('avow', 0))")
            yield

    def _migrate(self) -> None:
        session = self._session
        # Asked before: even with IF NOT EXISTS they need the right to create.
        if session.query("SELECT to_regclass('avow.version') IS NULL")[0] == (True,):
            session.run("CREATE SCHEMA IF NOT EXISTS avow")
            session.run("CREATE TABLE avow.version (version integer NOT NULL)")
        version = session.query("SELECT coalesce(max(version), 0) FROM avow.version")[0][0]
        if version > len(MIGRATIONS):
            raise SinkError(
                f"schema avow has version {version}, but this version of avow supports only {len(MIGRATIONS)}",
                advice="A newer version of avow has migrated the schema. Use that version or a newer one.",
            )
        for number, migration in enumerate(MIGRATIONS[version:], version + 1):
            for statement in filter(str.strip, migration.split(";")):
                session.run(statement)
            session.run("DELETE FROM avow.version")
            session.run(f"INSERT INTO avow.version VALUES ({number})")

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Begin a run: take its number, fence the older ones, and end what is left of them on the server."""
        run = self._new_number()
        if partitions is None:
            # Before the fence: a stopped zombie may sit on a row's lock in mid-COPY, where no time-out of the server
            # reaches it. Ending its session is what frees the row.
            self._end_older_sessions(run)
            self._fence(run, None)
            return run
        try:
            self._fence(run, partitions)
        except SinkError:
            if not partitions:
                raise
            # Others run beside, each in partitions of its own: only who does not get on in one of ours is in the way.
            self._end_older_sessions(
                run,
                f" AND xact_start < now() - interval '{PATIENCE_S} s' AND backend_xid IN (SELECT xmax FROM avow.ledger"
                f" WHERE pipeline = $2 AND (topic, partition) IN ({_listed(partitions)}))",
            )
            self._fence(run, partitions)
        return run

    def _new_number(self) -> int:
        pipeline = self._pipeline
        with as_sink_error("cannot start a run"), self._session.transaction():
            self._session.run("LOCK TABLE avow.runs IN EXCLUSIVE MODE")
            known = self._session.query(
                "SELECT coalesce(max(run), 0) FROM avow.runs WHERE pipeline = $1", pipeline.name
            )
            run = max(ledger.next_run(self.entries().values()), int(known[0][0]) + 1)
            self._session.run(
                f"INSERT INTO avow.runs (pipeline, run, guarantee, engine) VALUES ($1, {run}, $2, $3)",
                pipeline.name,
                str(pipeline.guarantee),
                pipeline.engine,
            )
        return run

    def _fence(self, run: int, partitions: Collection[TopicPartition] | None) -> None:
        with as_sink_error("cannot fence older runs"), self._session.transaction():
            if partitions is not None:
                self._session.run(f"SET LOCAL lock_timeout = '{PATIENCE_S}s'")
            for tp, entry in self.entries(lock=True, only=partitions).items():
                fenced = ledger.fence(entry, run)
                self._session.run(
                    f"UPDATE avow.ledger SET run = {fenced.run} WHERE {_OF_PARTITION}{tp.partition}",
                    self._pipeline.name,
                    tp.topic,
                )

    def _end_older_sessions(self, run: int, which: str = "") -> None:
        """Those that are certainly ours, and in somebody's way: named after an older run of this pipeline, by a
        transaction that is open now, in this database, and that has the ledger's table locked."""
        prefix = _application_prefix(self._pipeline.name)
        self._session.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity a WHERE datname = current_database()"
            " AND usename = current_user AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
            " AND CASE WHEN application_name ~ ('^' || $1 || '[0-9]{1,18}$')"
            f" THEN substr(application_name, {len(prefix) + 1})::bigint < {run} END"
            " AND EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.relation = 'avow.ledger'::regclass"
            f" AND l.database = a.datid){which}",
            prefix,
            self._pipeline.name,
        )

    def entries(
        self, *, lock: bool = False, only: Collection[TopicPartition] | None = None
    ) -> dict[TopicPartition, Entry]:
        """Every position of the pipeline, in one order so that two who lock cannot deadlock."""
        condition = "" if only is None else f" AND (topic, partition) IN ({_listed(only)})" if only else " AND false"
        with as_sink_error("cannot read the ledger"):
            rows = self._session.query(
                f"SELECT topic, partition, {_ENTRY} FROM avow.ledger WHERE pipeline = $1{condition}"
                f" ORDER BY topic, partition{' FOR UPDATE' if lock else ''}",
                self._pipeline.name,
            )
        return {TopicPartition(row[0], row[1]): entry_of(row[2:]) for row in rows}

    def _exists(self) -> bool:
        return self._session.query("SELECT to_regclass('avow.ledger') IS NOT NULL")[0] == (True,)

    def ledger_snapshot(self) -> dict[TopicPartition, PartitionState]:
        with as_sink_error("cannot read the ledger"):
            if not self._exists():
                return {}
            rows = self._session.query(
                f"SELECT topic, partition, start, {_ENTRY} FROM avow.ledger WHERE pipeline = $1", self._pipeline.name
            )
        return {TopicPartition(row[0], row[1]): PartitionState(entry_of(row[3:]), row[2]) for row in rows}

    def claims_of(self, tp: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:
        """From the log of claims, which is kept for a while (``CLAIMS_KEPT``)."""
        if not offsets:
            return {}
        wanted = ", ".join(f"({offset})" for offset in sorted(offsets))
        with as_sink_error("cannot read the claims"):
            rows = self._session.query(
                "SELECT wanted.number, c.from_offset, c.until_offset, c.read, c.written, c.dead, c.skipped, c.batch,"
                f" r.guarantee FROM (VALUES {wanted}) AS wanted (number) CROSS JOIN LATERAL (SELECT * FROM avow.claims"
                f" WHERE {_OF_PARTITION}{tp.partition} AND from_offset <= wanted.number"
                " ORDER BY from_offset DESC LIMIT 1) c JOIN avow.runs r ON r.pipeline = c.pipeline AND r.run = c.run"
                " WHERE c.until_offset > wanted.number",
                self._pipeline.name,
                tp.topic,
            )
        return {
            row[0]: Claimed(
                OffsetRange(tp.topic, tp.partition, row[1], row[2]),
                Counts(*row[3:7]),
                Guarantee(row[8]),
                given_up=row[7] == GIVEN_UP_BATCH,
            )
            for row in rows
        }

    def claims(self, limit: int) -> list[Claim]:
        with as_sink_error("cannot read the claims"):
            if not self._exists():
                return []
            # By partition: the log's key has the offset last, so that this reads no more than it gives.
            rows = self._session.query(
                "SELECT c.topic, c.partition, c.from_offset, c.until_offset, c.run, c.batch, c.read, c.written, c.dead,"
                " c.skipped, c.claimed_at FROM avow.ledger AS l, LATERAL (SELECT * FROM avow.claims AS c"
                " WHERE c.pipeline = l.pipeline AND c.topic = l.topic AND c.partition = l.partition"
                f" ORDER BY c.from_offset DESC LIMIT {limit}) AS c WHERE l.pipeline = $1 ORDER BY c.claimed_at DESC",
                self._pipeline.name,
            )
        return [
            Claim(topic, partition, start, until, run, batch, Counts(read, written, dead, skipped), at)
            for topic, partition, start, until, run, batch, read, written, dead, skipped, at in rows
        ]

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        """Write first positions, before anything is read from them. One that is there already stays."""
        with as_sink_error("cannot write first positions"), self._session.transaction():
            self._refuse_rows_of(entries)
            for tp, entry in entries.items():
                self._session.run(
                    "INSERT INTO avow.ledger (pipeline, topic, partition, position, start, topic_id, run, read,"
                    f" written, dead, skipped) VALUES ($1, $2, {tp.partition}, {entry.position}, {entry.position},"
                    f" $3, {entry.run}, 0, 0, 0, 0) ON CONFLICT DO NOTHING",
                    self._pipeline.name,
                    tp.topic,
                    entry.topic_id,
                )

    def _refuse_rows_of(self, entries: Mapping[TopicPartition, Entry]) -> None:
        """Rows at or behind a first position. They are of another log of that name, or another pipeline's: upsert would
        take each new record for an older one, and leave it out; append would make rows that nobody can tell apart."""
        known = self.entries(only=entries)
        fresh = {tp: entry.position for tp, entry in entries.items() if tp not in known}
        table = tables.full_name(self._sink.table)
        if not fresh or not self._has_table:
            return
        topic, partition, offset, _ = map(name, self._sink.lineage)
        rows = self._session.query(
            f"SELECT {topic}, {partition}, max({offset}) FROM {table}"
            f" WHERE ({topic}, {partition}) IN ({_listed(fresh)}) GROUP BY 1, 2"
        )
        for in_topic, number, greatest in rows:
            if greatest < fresh[TopicPartition(in_topic, number)]:
                continue
            advice = (
                "Another pipeline wrote these rows, or they come from an earlier topic of that name or from a "
                "truncated "
                "one. Name a new table, delete the rows, or declare an offset after them in source.start."
            )
            if self._sink.mode == "upsert":
                advice += (
                    f" Or mark them as older than every record: UPDATE {table} SET {offset} = -1 WHERE {topic} = "
                    f"{literal(in_topic)} AND {partition} = {number}."
                )
            raise ConfigError(
                f"table {self._sink.table} has rows of {in_topic}/{number} up to offset {greatest}, but pipeline "
                f"{self._pipeline.name} has no position there and would start at offset "
                f"{fresh[TopicPartition(in_topic, number)]}",
                advice=advice,
            )

    def claim(self, done: OffsetRange, run: int, batch: int, counts: Counts = ledger.NOTHING) -> None:
        """Claim a range that no task will claim: it holds no visible record, or is given up to retention."""
        with as_sink_error(f"cannot claim {done}"), self._session.transaction():
            name = self._pipeline.name
            (entry,) = read_entries(self._session, name, [TopicPartition(done.topic, done.partition)], lock=True)
            todo = ledger.judge(entry.position, done)
            if todo:
                after = ledger.claim(entry, todo, run, counts)
                write_claims(self._session, name, [LedgerUpdate(entry, after, todo)], batch)
