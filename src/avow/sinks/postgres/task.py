"""One Spark task's side of the PostgreSQL sink: rows, dead letters and claim, in transactions of one connection.

Owns: how rows get into the table in each mode. Must not know: which act comes first (``engines.task`` asks for them in
the guarantee's order) or where records come from.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from adbc_driver_manager import Error as DatabaseError

from avow.errors import ProtocolViolation
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint, OffsetRange
from avow.settings import REST_COLUMN, Pipeline, Postgres
from avow.sinks.base import DeadLetter, Move, Rows, Selection, Written, refuse_whole
from avow.sinks.postgres import session, store, tables
from avow.sinks.postgres.letters import select
from avow.sinks.postgres.session import name

DELETED = "avow deleted"  # marks a tombstone in the staging table; no payload column is called so


class PostgresTask:
    """The sink as one task sees it. ``begin`` opens an act, which is one transaction."""

    def __init__(self, pipeline: Pipeline, run: int) -> None:
        assert isinstance(pipeline.sink, Postgres)
        self._pipeline = pipeline
        self._sink = pipeline.sink
        self._run = run
        self._url = pipeline.sink.url.get_secret_value()
        self._session = session.cached(self._url, store.application(pipeline.name, run))
        self._staged = False

    @contextmanager
    def act(self) -> Iterator[None]:
        """One atomic act of the sink. A connection that broke is not used again."""
        try:
            try:
                self._session.run("BEGIN")
            except DatabaseError:
                # The cached connection died while nobody used it. Nothing was sent, so nothing can be doubled.
                session.forget(self._url)
                self._session = session.cached(self._url, store.application(self._pipeline.name, self._run))
                self._session.run("BEGIN")
            self._staged = False
            yield
            self._session.run("COMMIT")
        except BaseException:
            # Also after a lost answer: the outcome is read from the ledger by whoever comes next.
            session.forget(self._url)
            raise

    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:
        return store.read_entries(self._session, self._pipeline.name, partitions, lock=lock)

    def claim(self, moves: Sequence[Move], batch: int) -> None:
        store.write_claims(self._session, self._pipeline.name, moves, batch)

    def tally(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:
        store.write_tally(self._session, self._pipeline.name, done, counts, last)

    def write(self, rows: Rows) -> Written:
        """Put rows into the table (append), or aside until ``finish`` (dedupe, upsert)."""
        if self._sink.mode != "append":
            return self._stage(rows)
        batch = self._encoded(rows.rows)
        refused: dict[int, str] = {}
        if self._pipeline.transform is None:  # then every row is a record
            self._copy(batch, 0, refused)
        else:
            self._copy_records(batch, refused)
        return Written(refused=refused)

    def _copy_records(self, batch: pa.RecordBatch, refused: dict[int, str]) -> None:
        """As ``_copy``, where a record may have several rows: of one that has a bad row none goes in."""
        offsets = batch.column(self._sink.lineage[2]).to_pylist()
        while True:
            kept = [row for row in range(batch.num_rows) if row not in refused]
            self._session.run("SAVEPOINT records")
            bad: dict[int, str] = {}
            self._copy(batch.take(pa.array(kept, pa.int64())) if refused else batch, 0, bad)
            whole = refuse_whole({kept[row]: why for row, why in bad.items()}, offsets)
            refused |= whole
            if len(whole) == len(bad):
                self._session.run("RELEASE SAVEPOINT records")
                return
            self._session.run("ROLLBACK TO SAVEPOINT records")

    def _encoded(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        encoded = tables.encode(rows)
        at = encoded.schema.get_field_index(REST_COLUMN)
        if at >= 0:
            encoded = encoded.set_column(at, REST_COLUMN, tables.json_text(encoded.column(at)))
        return encoded

    def _copy(self, batch: pa.RecordBatch, first: int, refused: dict[int, str]) -> None:
        """COPY a batch; a row that the server refuses is set aside, the others go in. ``first`` is its row number."""
        if not batch.num_rows:
            return
        try:
            with self._session.savepoint():
                table = self._sink.table
                taken = self._session.copy(table.name, batch, schema=table.schema)
        except DatabaseError as error:
            if not session.refused(error):
                raise
            if batch.num_rows == 1:
                refused[first] = session.message(error)
                return
            line = session.refused_line(error)
            if line is not None and line < batch.num_rows:
                refused[first + line] = session.message(error)
                self._copy(batch.slice(0, line), first, refused)
                self._copy(batch.slice(line + 1), first + line + 1, refused)
            else:
                half = batch.num_rows // 2
                self._copy(batch.slice(0, half), first, refused)
                self._copy(batch.slice(half), first + half, refused)
            return
        if taken != batch.num_rows:
            raise ProtocolViolation(f"COPY took {taken} of {batch.num_rows} rows")

    # dedupe and upsert: stage everything, then apply it at once in the order of keys, so that two tasks with the same
    # keys wait for each other and do not deadlock.

    @property
    def _stage_name(self) -> str:
        return f"avow stage {self._run}"

    def _stage(self, rows: Rows) -> Written:
        if not self._staged:
            self._make_stage(rows.rows.schema.names)
        batch = self._encoded(rows.rows)
        batch = batch.append_column(DELETED, pa.repeat(False, batch.num_rows))
        refused: dict[int, str] = {}
        self._copy_to_stage(batch, 0, refused)
        if refused and self._pipeline.transform is not None:
            offset = self._sink.lineage[2]
            refused = refuse_whole(refused, batch.column(offset).to_pylist())
            bad = ", ".join({str(batch.column(offset)[row].as_py()) for row in refused})
            self._session.run(f"DELETE FROM {name(self._stage_name)} WHERE {name(offset)} IN ({bad})")
        if rows.deletes.num_rows:
            deletes = self._encoded(rows.deletes)
            deletes = deletes.append_column(DELETED, pa.repeat(True, deletes.num_rows))
            self._copy_to_stage(deletes, 0, {})
        return Written(refused=refused)

    def _make_stage(self, columns: list[str]) -> None:
        listed = ", ".join(map(name, columns))
        self._session.run(
            f"CREATE TEMP TABLE {name(self._stage_name)} ON COMMIT DROP AS"
            f" SELECT {listed}, false AS {name(DELETED)} FROM {tables.full_name(self._sink.table)} WITH NO DATA"
        )
        self._columns = columns
        self._staged = True

    def _copy_to_stage(self, batch: pa.RecordBatch, first: int, refused: dict[int, str]) -> None:
        try:
            with self._session.savepoint():
                taken = self._session.copy(self._stage_name, batch, temporary=True)
        except DatabaseError as error:
            line = session.refused_line(error)
            if not session.refused(error) or line is None:
                raise
            refused[first + line] = session.message(error)
            if line:
                self._copy_to_stage(batch.slice(0, line), first, refused)
            if line + 1 < batch.num_rows:
                self._copy_to_stage(batch.slice(line + 1), first + line + 1, refused)
            return
        if taken != batch.num_rows:
            raise ProtocolViolation(f"COPY took {taken} of {batch.num_rows} rows")

    def finish(self, done: OffsetRange) -> Written:
        """Apply what was staged. Gives what the table refused, by offset, and how many records were left out."""
        if not self._staged:
            return Written()
        refused: dict[int, str] = {}
        skipped = self._apply(done.start, done.until, refused)
        return Written(refused=refused, skipped=skipped)

    def _apply(self, start: int, until: int, refused: dict[int, str]) -> int:
        """Apply the staged offsets in [start, until), setting aside records that the table refuses."""
        try:
            with self._session.savepoint():
                return self._upsert(start, until) if self._sink.mode == "upsert" else self._dedupe(start, until)
        except DatabaseError as error:
            if not session.refused(error):
                raise
            offsets = self._staged_offsets(start, until)
            if len(offsets) == 1:
                refused[offsets[0]] = session.message(error)
                return 0
            middle = offsets[len(offsets) // 2]
            return self._apply(start, middle, refused) + self._apply(middle, until, refused)

    def _staged_offsets(self, start: int, until: int) -> list[int]:
        offset = name(self._sink.lineage[2])
        rows = self._session.query(
            f"SELECT DISTINCT {offset} FROM {name(self._stage_name)}"
            f" WHERE {offset} >= {start} AND {offset} < {until} ORDER BY 1"
        )
        return [row[0] for row in rows]

    def _picked(self, start: int, until: int, order: str, extra: str = "") -> str:
        """One staged row per key of [start, until): the first or the last, in the order of keys."""
        keys, offset = ", ".join(map(name, self._sink.key)), name(self._sink.lineage[2])
        return (
            f"SELECT * FROM (SELECT DISTINCT ON ({keys}) * FROM {name(self._stage_name)}"
            f" WHERE {offset} >= {start} AND {offset} < {until} ORDER BY {keys}, {offset} {order}) picked{extra}"
        )

    def _dedupe(self, start: int, until: int) -> int:
        listed, keys = ", ".join(map(name, self._columns)), ", ".join(map(name, self._sink.key))
        offset = name(self._sink.lineage[2])
        rows = self._session.query(
            f"WITH taken AS (INSERT INTO {tables.full_name(self._sink.table)} ({listed})"
            f" SELECT {listed} FROM ({self._picked(start, until, 'ASC')}) p ORDER BY {keys}"
            f" ON CONFLICT ({keys}) DO NOTHING RETURNING {offset})"
            f" SELECT (SELECT count(DISTINCT {offset}) FROM {name(self._stage_name)}"
            f" WHERE {offset} >= {start} AND {offset} < {until}) - (SELECT count(DISTINCT {offset}) FROM taken)"
        )
        return int(rows[0][0])

    def _upsert(self, start: int, until: int) -> int:
        table, keys = tables.full_name(self._sink.table), self._sink.key
        listed, key_list = ", ".join(map(name, self._columns)), ", ".join(map(name, keys))
        latest = self._picked(start, until, "DESC", f" WHERE {name(DELETED)}")
        same = " AND ".join(f"t.{name(key)} = d.{name(key)}" for key in keys)
        self._session.run(f"DELETE FROM {table} t USING ({latest}) d WHERE {same} AND {self._later('t', 'd')}")
        latest = self._picked(start, until, "DESC", f" WHERE NOT {name(DELETED)}")
        sets = ", ".join(f"{name(c)} = excluded.{name(c)}" for c in self._columns if c not in keys)
        self._session.run(
            f"INSERT INTO {table} AS t ({listed}) SELECT {listed} FROM ({latest}) p ORDER BY {key_list}"
            f" ON CONFLICT ({key_list}) DO UPDATE SET {sets} WHERE {self._later('t', 'excluded')}"
        )
        return 0

    def _later(self, old: str, new: str) -> str:
        """The offset guard: within a partition only a later record changes a row, so a replay changes nothing."""
        topic, partition, offset, _ = map(name, self._sink.lineage)
        return (
            f"(({old}.{topic}, {old}.{partition}) IS DISTINCT FROM ({new}.{topic}, {new}.{partition})"
            f" OR {old}.{offset} < {new}.{offset})"
        )

    def bury(self, letters: list[DeadLetter]) -> None:
        """Keep dead letters, in the act that is open. One that is there already is the same record: it stays."""
        if not letters:
            return
        rows = pa.RecordBatch.from_pydict(
            {
                "topic": pa.array([letter.topic for letter in letters], pa.string()),
                "partition": pa.array([letter.partition for letter in letters], pa.int32()),
                "offset": pa.array([letter.offset for letter in letters], pa.int64()),
                "timestamp_ms": pa.array([letter.timestamp_ms for letter in letters], pa.int64()),
                "key": pa.array([letter.key for letter in letters], pa.binary()),
                "value": pa.array([letter.value for letter in letters], pa.binary()),
                "headers": pa.array([headers_json(letter.headers) for letter in letters], pa.string()),
                "reason": pa.array([letter.reason for letter in letters], pa.string()),
                "detail": pa.array([letter.detail.replace("\0", "\\x00") for letter in letters], pa.string()),
            }
        )
        self._session.run_many(
            'INSERT INTO avow.dead_letters (pipeline, topic, partition, "offset", timestamp_ms, key, value, headers,'
            f" reason, detail, run) VALUES ({session.literal(self._pipeline.name)}, $1, $2, $3, $4, $5, $6,"
            f" $7::text::json, $8, $9, {self._run}) ON CONFLICT DO NOTHING",
            rows,
        )

    def unbury(self, letters: list[DeadLetter], written: int, skipped: int) -> None:
        """Take dead letters that were delivered after all out of the graveyard, in the act that is open."""
        topic, partition = letters[0].topic, letters[0].partition
        offsets = ", ".join(str(letter.offset) for letter in letters)
        name_ = self._pipeline.name
        gone = self._session.query(
            f"DELETE FROM avow.dead_letters WHERE pipeline = $1 AND topic = $2 AND partition = {partition}"
            f' AND "offset" IN ({offsets}) RETURNING "offset"',
            name_,
            topic,
        )
        if len(gone) != len(letters) or len(letters) != written + skipped:
            raise ProtocolViolation(f"{len(gone)} dead letters of {topic}/{partition} were there, not {len(letters)}")
        self._session.run(
            f"UPDATE avow.ledger SET dead = dead - {len(letters)}, written = written + {written},"
            f" skipped = skipped + {skipped} WHERE pipeline = $1 AND topic = $2 AND partition = {partition}",
            name_,
            topic,
        )

    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Chosen dead letters, held until the act ends."""
        return select(self._session, self._pipeline.name, selection, limit, lock=True)


def headers_json(headers: list[tuple[str, bytes | None]]) -> str:
    """Headers as JSON pairs. Their values are any bytes, so they are base64; ASCII, so that any key can be kept."""
    return json.dumps([[key, None if value is None else base64.b64encode(value).decode()] for key, value in headers])
