"""One Spark task's side of the PostgreSQL sink: rows, dead letters and claim, in transactions of one connection.

Owns: how rows get into the table in each mode. Must not know: which act comes first (``engines.task`` asks for them in
the guarantee's order) or where records come from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Error as DatabaseError

from avow.arrow import indices
from avow.errors import ConfigError, ProtocolViolation, SinkUnavailable
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint, OffsetRange
from avow.settings import REST_COLUMN, PipelineConfig
from avow.sinks.base import (
    DEAD_LETTER_COLUMNS,
    DeadLetter,
    LedgerUpdate,
    Refusal,
    RowChanges,
    Selection,
    TaskSink,
    Written,
    dead_letter_values,
    refuse_whole,
)
from avow.sinks.postgres import driver, session, tables
from avow.sinks.postgres.config import PostgresConfig
from avow.sinks.postgres.copy_format import EncodeError
from avow.sinks.postgres.dead_letters import select
from avow.sinks.postgres.session import name

# Columns of the staging table; no payload column is called so.
DELETED = "avow deleted"  # marks a tombstone (dedupe, upsert)
ROW = "avow row"  # its number in what was to be written (append)


class PostgresTask(TaskSink):
    """The sink as one task sees it. ``begin`` opens an act, which is one transaction."""

    def __init__(self, pipeline: PipelineConfig, run: int) -> None:
        assert isinstance(pipeline.sink, PostgresConfig)
        self._pipeline = pipeline
        self._sink = pipeline.sink
        self._run = run
        self._url = pipeline.sink.url.get_secret_value()
        self._session = session.cached(self._url, driver.application(pipeline.name, run))
        self._staged = False
        self._traits: tables.TableTraits | None = None

    @contextmanager
    def act(self) -> Iterator[None]:
        """One atomic act of the sink. A connection that broke is not used again."""
        try:
            try:
                self._session.begin()
            except DatabaseError:
                # The cached connection died while nobody used it. Nothing was sent, so nothing can be doubled.
                session.forget(self._url)
                self._session = session.cached(self._url, driver.application(self._pipeline.name, self._run))
                self._session.begin()
            self._staged, self._traits = False, None
            yield
            self._session.commit()
        except BaseException as error:
            # Also after a lost answer: the next attempt reads the outcome from the ledger.
            session.forget(self._url)
            if isinstance(error, DatabaseError) and session.unavailable(error):
                what = f"could not write to PostgreSQL: {session.message(error)}"
                raise SinkUnavailable(what, advice="Check the server's log, its disk, and who holds locks.") from error
            raise

    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:
        return driver.read_entries(self._session, self._pipeline.name, partitions, lock=lock)

    def claim(self, updates: Sequence[LedgerUpdate], batch: int) -> None:
        driver.write_claims(self._session, self._pipeline.name, updates, batch)

    def add_counts(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:
        driver.write_counts(self._session, self._pipeline.name, done, counts, last)

    def write(self, rows: RowChanges) -> Written:
        """Put rows into the table (append), or aside until ``finish`` (dedupe, upsert)."""
        if self._traits is None:  # once in each act: the table may be altered between two
            tables.lock(self._session, self._sink.table)
            self._traits = tables.traits(self._session, self._sink.table)
            driver.check_table(self._session, self._pipeline, self._traits.oid)
            tables.check_required(rows.rows.schema, self._sink.table, self._traits)
        traits = self._traits
        if not self._staged and (self._sink.mode != "append" or traits.row_security):
            self._make_stage(rows.rows.schema.names)
        if self._sink.mode != "append":
            return self._stage(rows, traits)
        batch = self._encoded(rows.rows, traits)
        refused = _too_long(batch, traits)
        if self._pipeline.transform is None:  # then every row is a record
            self._append(batch, refused, traits)
        else:
            self._append_records(batch, refused, traits)
        return Written(refused=refused)

    def _append_records(self, batch: pa.RecordBatch, refused: dict[int, str], traits: tables.TableTraits) -> None:
        """As ``_append``, where a record may have several rows: of one that has a bad row none goes in."""
        offsets = batch.column(self._sink.lineage.offset).to_pylist()
        refused |= refuse_whole(refused, offsets)
        while True:
            self._session.run("SAVEPOINT records")
            newly_refused = dict(refused)
            self._append(batch, newly_refused, traits)
            whole = refuse_whole(newly_refused, offsets)
            refused |= whole
            if len(whole) == len(newly_refused):
                self._session.run("RELEASE SAVEPOINT records")
                return
            self._session.run("ROLLBACK TO SAVEPOINT records")

    def _encoded(self, rows: pa.RecordBatch, traits: tables.TableTraits) -> pa.RecordBatch:
        encoded = tables.encode(rows)
        at = encoded.schema.get_field_index(REST_COLUMN)
        if at >= 0:
            encoded = encoded.set_column(at, REST_COLUMN, tables.json_text(encoded.column(at)))
        if self._sink.evolve == "add":
            encoded = tables.widened(encoded, traits)
        tables.check_types(encoded.schema, self._sink.table, traits)
        return encoded

    def _append(self, batch: pa.RecordBatch, refused: dict[int, str], traits: tables.TableTraits) -> None:
        """Put rows into the table but those in ``refused``; what the server refuses is added to these."""
        table = tables.full_name(self._sink.table)
        if not traits.row_security:
            self._copy(batch, refused, table, traits)
            return
        # COPY does not go where policies apply.
        numbered = batch.append_column(ROW, pa.array(range(batch.num_rows), pa.int64()))
        self._copy(numbered, refused, self._stage_table, traits)
        listed, row = ", ".join(map(name, self._columns)), name(ROW)

        def insert(rows: Sequence[int]) -> int:
            taken = self._session.run(
                f"INSERT INTO {table} ({listed}) OVERRIDING SYSTEM VALUE SELECT {listed}"
                f" FROM {self._stage_table} WHERE {row} BETWEEN {rows[0]} AND {rows[-1]} ORDER BY {row}"
            )
            self._check_taken(taken, len(rows), traits)
            return taken

        self._isolate(_others(batch.num_rows, refused), insert, refused)
        self._session.run(f"TRUNCATE {self._stage_table}")

    def _copy(self, batch: pa.RecordBatch, refused: dict[int, str], table: str, traits: tables.TableTraits) -> None:
        def copy(rows: Sequence[int]) -> int:
            whole = rows[-1] - rows[0] + 1 == len(rows)
            part = batch.slice(rows[0], len(rows)) if whole else batch.take(indices(rows))
            taken = self._session.copy(table, part)
            self._check_taken(taken, len(rows), traits)
            return taken

        self._isolate(_others(batch.num_rows, refused), copy, refused)

    def _isolate(self, numbers: Sequence[int], put: Callable[[Sequence[int]], int], refused: dict[int, str]) -> int:
        """Put these in, and set aside what the server refuses. Where it does not say which one that was, halves are
        tried. Where it does, that one alone, and halves of the rest: what stands behind a refused one is then sent
        again no more often than the logarithm of how many are refused. None is refused in company: rows go into the
        table by the thousand, and an error there names the last that was read. The sum of what ``put`` gives."""
        total, todo = 0, [numbers]
        while todo:
            part = todo.pop()
            if not part:
                continue
            try:
                with self._session.savepoint():
                    done = put(part)
                total += done
            except (DatabaseError, EncodeError) as error:
                if not self._refuses(error):
                    raise
                line = session.refused_line(error)
                if len(part) == 1:
                    refused[part[0]] = session.refusal(error)
                elif line is not None and line < len(part):
                    rest = part[line + 1 :]
                    todo += [rest[len(rest) // 2 :], rest[: len(rest) // 2], part[line : line + 1], part[:line]]
                else:
                    todo += [part[len(part) // 2 :], part[: len(part) // 2]]
        return total

    def _refuses(self, error: session.Failure) -> bool:
        """Whether it is about what is in a row. A policy's refusal of a row has the code of a missing right."""
        assert self._traits is not None
        return session.refused(error) or (error.sqlstate == "42501" and self._traits.row_security)

    def _check_taken(self, taken: int, count: int, traits: tables.TableTraits) -> None:
        """Stop if the server took fewer rows than it was given."""
        if taken != count:
            raise self._discarded(count - taken, traits)

    def _discarded(self, count: int, traits: tables.TableTraits) -> ConfigError:
        return ConfigError(
            f"table {self._sink.table} discarded {count} inserted rows without an error"
            + (f" (BEFORE triggers: {traits.triggers})" if traits.triggers else ""),
            advice="Nothing of this batch was written. Let the trigger RAISE EXCEPTION, which makes the record a dead "
            "letter, filter records by a transform, or drop the trigger.",
        )

    # dedupe and upsert: stage everything, then apply it at once in the order of keys, so that two tasks with the same
    # keys wait for each other and do not deadlock.

    @property
    def _stage_table(self) -> str:
        return f"pg_temp.{name(f'avow stage {self._run}')}"

    def _stage(self, rows: RowChanges, traits: tables.TableTraits) -> Written:
        batch = self._encoded(rows.rows, traits)
        refused = _too_long(batch, traits)
        batch = batch.append_column(DELETED, pa.repeat(False, batch.num_rows))
        self._copy(batch, refused, self._stage_table, traits)
        if refused and self._pipeline.transform is not None:
            offset = self._sink.lineage.offset
            refused = refuse_whole(refused, batch.column(offset).to_pylist())
            bad = ", ".join({str(batch.column(offset)[row].as_py()) for row in refused})
            self._session.run(f"DELETE FROM {self._stage_table} WHERE {name(offset)} IN ({bad})")
        if rows.deletes.num_rows:
            deletes = self._encoded(rows.deletes, traits)
            # A key that no column can hold is in no row: there is nothing to delete.
            impossible = _too_long(deletes, traits)
            deletes = deletes.append_column(DELETED, pa.repeat(True, deletes.num_rows))
            self._copy(deletes, impossible, self._stage_table, traits)
            self._deletes = True
        return Written(refused=refused)

    def _make_stage(self, columns: list[str]) -> None:
        listed = ", ".join(map(name, columns))
        extra = f"0::bigint AS {name(ROW)}" if self._sink.mode == "append" else f"false AS {name(DELETED)}"
        self._session.run(
            f"CREATE TEMP TABLE {self._stage_table} ON COMMIT DROP AS"
            f" SELECT {listed}, {extra} FROM {tables.full_name(self._sink.table)} WITH NO DATA"
        )
        if self._sink.mode == "append":  # so that a part that is tried again is found without reading all the others
            self._session.run(f"CREATE INDEX ON {self._stage_table} ({name(ROW)})")
        self._columns = columns
        self._staged, self._deletes = True, False

    def finish(self, done: OffsetRange) -> Written:
        """Apply what was staged. Gives what the table refused, by offset, and how many records were left out."""
        if not self._staged or self._sink.mode == "append":
            return Written()
        refused: dict[int, str] = {}
        return Written(refused=refused, skipped=self._apply(done, refused))

    def _apply(self, done: OffsetRange, refused: dict[int, str]) -> int:
        """Apply what is staged, setting aside records that the table refuses. How many were left out."""
        apply = self._upsert if self._sink.mode == "upsert" else self._dedupe
        try:
            with self._session.savepoint():
                return apply(done.start, done.until)
        except DatabaseError as error:
            if not self._refuses(error):
                raise
        # Parts are found by an index from here on, or each would read all that is staged.
        offset, stage = name(self._sink.lineage.offset), self._stage_table
        self._session.run(f"CREATE INDEX ON {stage} ({offset})")
        offsets = self._session.query(f"SELECT DISTINCT {offset} FROM {stage} ORDER BY 1")
        return self._isolate([row[0] for row in offsets], lambda part: apply(part[0], part[-1] + 1), refused)

    def _picked(self, start: int, until: int, order: str, extra: str = "") -> str:
        """One staged row per key of [start, until): the first or the last, in the order of keys."""
        keys, offset = ", ".join(map(name, self._sink.key)), name(self._sink.lineage.offset)
        return (
            f"SELECT * FROM (SELECT DISTINCT ON ({keys}) * FROM {self._stage_table}"
            f" WHERE {offset} >= {start} AND {offset} < {until} ORDER BY {keys}, {offset} {order}) picked{extra}"
        )

    def _dedupe(self, start: int, until: int) -> int:
        listed, keys = ", ".join(map(name, self._columns)), ", ".join(map(name, self._sink.key))
        offset = name(self._sink.lineage.offset)
        rows = self._session.query(
            f"WITH taken AS (INSERT INTO {tables.full_name(self._sink.table)} ({listed})"
            f" SELECT {listed} FROM ({self._picked(start, until, 'ASC')}) p ORDER BY {keys}"
            f" ON CONFLICT ({keys}) DO NOTHING RETURNING {offset})"
            f" SELECT (SELECT count(DISTINCT {offset}) FROM {self._stage_table}"
            f" WHERE {offset} >= {start} AND {offset} < {until}) - (SELECT count(DISTINCT {offset}) FROM taken)"
        )
        self._check_discarded(f"({self._picked(start, until, 'ASC')}) p WHERE NOT EXISTS ({self._with_key('p')})")
        return int(rows[0][0])

    def _upsert(self, start: int, until: int) -> int:
        table, keys = tables.full_name(self._sink.table), self._sink.key
        listed, key_list = ", ".join(map(name, self._columns)), ", ".join(map(name, keys))
        deleted = self._picked(start, until, "DESC", f" WHERE {name(DELETED)}")
        if self._deletes:
            # DELETE takes rows in no order of its own, so all are locked before, in the order of keys.
            every = self._picked(start, until, "DESC")
            order = ", ".join(f"t.{name(key)}" for key in keys)
            self._session.query(
                f"SELECT count(*) FROM (SELECT 1 FROM {table} t JOIN ({every}) d ON {self._same('t', 'd')}"
                f" ORDER BY {order} FOR UPDATE OF t) locked"
            )
            self._session.run(
                f"DELETE FROM {table} t USING ({deleted}) d WHERE {self._same('t', 'd')} AND {self._later('t', 'd')}"
            )
        latest = self._picked(start, until, "DESC", f" WHERE NOT {name(DELETED)}")
        sets = ", ".join(f"{name(c)} = excluded.{name(c)}" for c in self._columns if c not in keys)
        self._session.run(
            f"INSERT INTO {table} AS t ({listed}) SELECT {listed} FROM ({latest}) p ORDER BY {key_list}"
            f" ON CONFLICT ({key_list}) DO UPDATE SET {sets} WHERE {self._later('t', 'excluded')}"
        )
        self._check_discarded(
            f"({latest}) p WHERE NOT EXISTS ({self._with_key('p')})"
            f" OR EXISTS ({self._with_key('p')} AND {self._later('t', 'p')})"
        )
        self._check_discarded(f"({deleted}) p WHERE EXISTS ({self._with_key('p')} AND {self._later('t', 'p')})")
        return 0

    def _check_discarded(self, missing: str) -> None:
        """Stop if rows were discarded without an error, which only triggers and row security can do."""
        assert self._traits is not None
        if self._traits.may_discard and (count := self._session.query(f"SELECT count(*) FROM {missing}")[0][0]):
            raise self._discarded(count, self._traits)

    def _same(self, first: str, second: str) -> str:
        return " AND ".join(f"{first}.{name(key)} = {second}.{name(key)}" for key in self._sink.key)

    def _with_key(self, staged: str) -> str:
        return f"SELECT FROM {tables.full_name(self._sink.table)} t WHERE {self._same('t', staged)}"

    def _later(self, old: str, new: str) -> str:
        """The offset guard: within a partition only a later record changes a row, so a replay changes nothing."""
        topic, partition, offset, _ = map(name, self._sink.lineage)
        return (
            f"(({old}.{topic}, {old}.{partition}) IS DISTINCT FROM ({new}.{topic}, {new}.{partition})"
            f" OR {old}.{offset} < {new}.{offset})"
        )

    def add_dead_letters(self, dead_letters: list[DeadLetter]) -> None:
        """Store dead letters, in the act that is open. One that is there already is the same record: it stays."""
        if not dead_letters:
            return
        values = [dead_letter_values(dead_letter) for dead_letter in dead_letters]
        for row in values:
            row["detail"] = self._session.storable(row["detail"])
        self._session.run_many(
            'INSERT INTO avow.dead_letters (pipeline, topic, partition, "offset", timestamp_ms, key, value, headers,'
            f" reason, detail, run) VALUES ({session.literal(self._pipeline.name)}, $1, $2, $3, $4, $5, $6,"
            f" $7::text::json, $8, $9, {self._run}) ON CONFLICT DO NOTHING",
            [[row[column] for column in DEAD_LETTER_COLUMNS] for row in values],
        )

    def remove_dead_letters(self, dead_letters: list[DeadLetter], written: int, skipped: int) -> None:
        """Remove dead letters that were delivered after all, in the act that is open."""
        topic, partition = dead_letters[0].topic, dead_letters[0].partition
        offsets = ", ".join(str(dead_letter.offset) for dead_letter in dead_letters)
        name_ = self._pipeline.name
        gone = self._session.query(
            f"DELETE FROM avow.dead_letters WHERE pipeline = $1 AND topic = $2 AND partition = {partition}"
            f' AND "offset" IN ({offsets}) RETURNING "offset"',
            name_,
            topic,
        )
        if len(gone) != len(dead_letters) or len(dead_letters) != written + skipped:
            raise ProtocolViolation(
                f"{len(gone)} dead letters of {topic}/{partition} were removed instead of {len(dead_letters)}"
            )
        counted = f"least(dead, {len(dead_letters)})"  # as ledger.redriven has it
        self._session.run(
            f"UPDATE avow.ledger SET read = read + {len(dead_letters)} - {counted}, dead = dead - {counted},"
            f" written = written + {written}, skipped = skipped + {skipped}"
            f" WHERE pipeline = $1 AND topic = $2 AND partition = {partition}",
            name_,
            topic,
        )

    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Selected dead letters, locked until the act ends."""
        return select(self._session, self._pipeline.name, selection, limit, lock=True)


def _others(count: int, refused: Collection[int]) -> Sequence[int]:
    """The rows that are not refused yet."""
    return [row for row in range(count) if row not in refused] if refused else range(count)


def _too_long(batch: pa.RecordBatch, traits: tables.TableTraits) -> dict[int, str]:
    """Rows with a text that a varchar(n) would refuse, or cut without a word, if what is too much are spaces."""
    refused: dict[int, str] = {}
    for column, length in traits.lengths.items():
        at = batch.schema.get_field_index(column)
        if at < 0:
            continue
        for row in pc.indices_nonzero(pc.greater(pc.utf8_length(batch.column(at)), length)).to_pylist():
            why = f"column {column!r}: value too long for type character varying({length}) (SQLSTATE 22001)"
            refused.setdefault(row, Refusal(why, "22001"))
    return refused
