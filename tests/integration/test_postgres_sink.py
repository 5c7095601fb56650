"""What is PostgreSQL's own: rows that only the server can refuse, triggers, rights, and what the ledger remembers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import Error as DatabaseError
from pydantic import SecretStr
from tests.fix_sinks import Bench

from avow.client_cache import close_clients
from avow.clients.config import ConsumerConfig
from avow.clients.postgres_offsets import PostgresOffsets, Transaction
from avow.clients.records import Batch, Record
from avow.engines.driver import STOPS
from avow.engines.hooks import Hooks
from avow.engines.redrive import redrive
from avow.engines.task import REFUSED, decode_batch
from avow.errors import ConfigError, PositionBehind, SinkUnavailable
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.local.cluster import PortPicker
from avow.prove.pooler import Pooler
from avow.retry import poll_until
from avow.settings import PipelineConfig
from avow.sinks import dead_letters, driver_sink
from avow.sinks.base import DeadLetter, Refusal, Selection
from avow.sinks.postgres import driver as postgres_driver
from avow.sinks.postgres import session as postgres_session
from avow.sinks.postgres.config import PostgresConfig
from avow.sinks.postgres.driver import PostgresDriver, application
from avow.sinks.postgres.session import Session, cached, refused_line, with_keepalive
from avow.sinks.postgres.task import PostgresTask
from avow.testing.bench import Runner
from avow.testing.sinks import SCHEMA, TOPIC, audit_findings, batch, lenient, record

MODES = ["append", "dedupe", "upsert"]


@pytest.fixture
def b(bench: Callable[..., Bench]) -> Bench:
    return bench("postgres")


def pipeline(b: Bench, mode: str = "append", guarantee: str = "exactly-once", schema: str = SCHEMA) -> PipelineConfig:
    lines = [] if mode == "append" else [f'mode = "{mode}"', 'key = ["id"]']
    return b.pipeline(guarantee, *lines, schema=schema)


def sql(b: Bench, *statements: str) -> None:
    with psycopg.connect(b._url) as connection:
        for statement in statements:
            connection.execute(statement.replace("TABLE_", b.table).encode())


def make_trigger(b: Bench, body: str, when: str = "BEFORE INSERT", kind: str = "TRIGGER", how: str = "") -> None:
    sql(
        b,
        f"CREATE OR REPLACE FUNCTION TABLE__f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NEW; END $$",
        'DROP TRIGGER IF EXISTS guard ON "TABLE_"',
        f'CREATE {kind} guard {when} ON "TABLE_" {how} FOR EACH ROW EXECUTE FUNCTION TABLE__f()',
    )


# Rows that the server refuses

RAISED = "IF NEW.id = 5 THEN RAISE EXCEPTION 'five is not taken' USING DETAIL = 'it never was'; END IF;"
REFUSALS: dict[str, tuple[str, Callable[[Bench], object]]] = {
    "raised": ("P0001", lambda b: make_trigger(b, RAISED)),
    "raised-after": ("P0001", lambda b: make_trigger(b, RAISED, "AFTER INSERT")),
    "own-sqlstate": (
        "AV001",
        lambda b: make_trigger(b, "IF NEW.id = 5 THEN RAISE SQLSTATE 'AV001'; END IF;"),
    ),
    "of-a-trigger's-statement": (
        "42P01",
        lambda b: make_trigger(b, "IF NEW.id = 5 THEN INSERT INTO nowhere VALUES (1); END IF;"),
    ),
    "deferred": (
        "P0001",
        lambda b: make_trigger(b, RAISED, "AFTER INSERT", "CONSTRAINT TRIGGER", "DEFERRABLE INITIALLY DEFERRED"),
    ),
    "deferred-foreign-key": (
        "23503",
        lambda b: sql(
            b,
            "CREATE TABLE TABLE__known (id bigint PRIMARY KEY)",
            "INSERT INTO TABLE__known SELECT g FROM generate_series(0, 100) g WHERE g <> 5",
            'ALTER TABLE "TABLE_" ADD FOREIGN KEY (id) REFERENCES TABLE__known DEFERRABLE INITIALLY DEFERRED',
        ),
    ),
}


def put(declared: PipelineConfig, values: Sequence[bytes | None], run: int = 1) -> dict[int, Refusal]:
    """One act of a task. What was refused, by offset. (An engine then reads the records again from Kafka.)"""
    sink = PostgresTask(declared, run)
    made = batch(values, 0, 0, [None] * len(values))
    with sink.act():
        refused = {**sink.write(decode_batch(made, declared).rows).refused}
        refused |= sink.finish(OffsetRange(TOPIC, 0, 0, len(values))).refused
    assert all(isinstance(why, Refusal) for why in refused.values())
    return cast(dict[int, Refusal], refused)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_row_that_the_server_refuses_is_set_aside(b: Bench, mode: str, refusal: str) -> None:
    state, refuse = REFUSALS[refusal]
    declared = pipeline(b, mode)
    with b.run(declared):
        refuse(b)
        refused = put(declared, [record(n) for n in range(10)])
    assert b.ids() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert {offset: why.code for offset, why in refused.items()} == {5: state}
    assert f"(SQLSTATE {state})" in refused[5]


@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once", "exactly-once"])
@pytest.mark.parametrize("joined", [False, True])
def test_the_dead_letter_of_a_refused_row(bench: Callable[..., Bench], guarantee: str, joined: bool) -> None:
    b = bench("postgres", joined=joined)
    declared = pipeline(b, guarantee=guarantee)
    with b.run(declared) as run:
        REFUSALS["deferred"][1](b)
        run.deliver({0: [record(n) for n in range(10)], 1: [record(10)]})
        assert run.counts() == Counts(11, 10, 1)
        assert (run.position(0), run.position(1)) == (10, 1)
    assert b.ids() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    with dead_letters(declared) as letters:
        (one,) = letters.select(Selection(), 9)
        assert (one.offset, one.reason) == (5, f"{REFUSED}-P0001")
        assert one.detail == "five is not taken (SQLSTATE P0001). it never was"
        # Chosen by the code, or whatever the code.
        for reason, count in ((one.reason, 1), (REFUSED, 1), (f"{REFUSED}-00000", 0), ("refused", 0)):
            assert len(letters.select(Selection(reason=reason), 9)) == count


@pytest.mark.parametrize("mode", ["dedupe", "upsert"])
def test_a_key_that_no_index_entry_can_hold_is_set_aside(b: Bench, mode: str) -> None:
    declared = b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["account"]')
    large = "".join(chr(0x4E00 + (n * 7919) % 20000) for n in range(20_000))
    with b.run(declared):
        refused = put(declared, [record(0, account="a"), record(1, account=large), record(2, account="c")])
    assert {offset: why.code for offset, why in refused.items()} == {1: "54000"}
    assert b.ids() == [0, 2]


@pytest.mark.parametrize(("mode", "count"), [("append", 1_050), ("dedupe", 50), ("upsert", 50)])
def test_hundreds_of_refused_rows(b: Bench, mode: str, count: int) -> None:
    """Once a thousand ended in a RecursionError, and each was sent again with all that stood behind it."""
    declared = pipeline(b, mode)
    with b.run(declared):
        b.refuse("id % 2 = 0")
        refused = put(declared, [record(n) for n in range(2 * count)])
    assert b.ids() == [n for n in range(2 * count) if n % 2]
    assert sorted(refused) == list(range(0, 2 * count, 2))


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_only_the_row_that_is_too_wide_is_set_aside(b: Bench, mode: str) -> None:
    """The server puts a thousand rows into the table at once. Of an error there its CONTEXT names the last one read."""
    columns = [f"c{n}" for n in range(1_100)]
    declared = pipeline(b, mode, schema=", ".join(["id long not null", *(f"{column} double" for column in columns)]))
    values = [json.dumps({"id": n}).encode() for n in range(3_000)]
    values[300] = json.dumps({"id": 300} | dict.fromkeys(columns, 0.5)).encode()
    with b.run(declared):
        refused = put(declared, values)
    assert {offset: why.code for offset, why in refused.items()} == {300: "54000"}
    assert b.ids() == [n for n in range(3_000) if n != 300]


def test_the_line_in_the_context_of_an_error() -> None:
    class Said(DatabaseError):
        diag = cast(Any, SimpleNamespace(context=""))

    for context, line in (
        ("COPY t, line 17", 16),
        ("COPY t, line 17, column id", 16),
        ("COPY a, line 3, line 17, column b, line 5", 16),
        ('COPY other, line 3\nSQL statement "COPY other"\nCOPY t, line 17', 16),
        ("SQL function", None),
    ):
        Said.diag.context = context
        assert refused_line(Said()) == line


def test_what_a_refused_row_costs(b: Bench) -> None:
    """Rows are sent again no more often than the logarithm of how many are refused."""
    sent: list[int] = []
    copy = Session.copy

    def counted(self: Session, table: str, rows: Any) -> int:
        sent.append(rows.num_rows)
        return copy(self, table, rows)

    with b.run(pipeline(b)) as run, pytest.MonkeyPatch.context() as patch:
        b.refuse("id % 50 = 0")
        patch.setattr(Session, "copy", counted)
        run.deliver({0: [record(n) for n in range(5_000)]})
        assert run.counts() == Counts(5_000, 4_900, 100)
    assert sum(sent) < 10 * 5_000
    assert len(sent) < 4 * 100


@contextmanager
def user(b: Bench, *rights: str) -> Iterator[str]:
    """A user who may do what the ledger needs, and these. Gives a URL."""
    who = f"{b.table}_user"
    sql(b, f"CREATE ROLE {who} LOGIN", f"GRANT ALL ON SCHEMA avow TO {who}", f"GRANT USAGE ON SCHEMA public TO {who}")
    sql(b, f"GRANT ALL ON ALL TABLES IN SCHEMA avow TO {who}", *(f"{right} TO {who}" for right in rights))
    try:
        yield b._url.replace("postgres@", f"{who}@")
    finally:
        sql(b, f"DROP OWNED BY {who}", f"DROP ROLE {who}")


def as_user(declared: PipelineConfig, url: str) -> PipelineConfig:
    return declared.model_copy(update={"sink": declared.sink.model_copy(update={"url": SecretStr(url)})})


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_a_policy_refuses_is_a_dead_letter(b: Bench, mode: str) -> None:
    declared = pipeline(b, mode)
    with b.run(declared):
        pass
    sql(b, 'ALTER TABLE "TABLE_" ENABLE ROW LEVEL SECURITY', 'CREATE POLICY p ON "TABLE_" USING (id <> 5)')
    with user(b, 'GRANT ALL ON "TABLE_"') as url, b.run(as_user(declared, url)):
        refused = put(as_user(declared, url), [record(n) for n in range(10)], run=2)
    assert {offset: why.code for offset, why in refused.items()} == {5: "42501"}
    assert b.ids() == [0, 1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("joined", [False, True])
def test_rows_that_a_trigger_discards_stop_the_run(bench: Callable[..., Bench], mode: str, joined: bool) -> None:
    b = bench("postgres", joined=joined and mode == "append")
    declared = pipeline(b, mode)
    with b.run(declared) as run:
        make_trigger(b, "NEW.account = upper(NEW.account);")
        run.deliver({0: [record(n) for n in range(5)]})
        make_trigger(b, "IF NEW.id IN (6, 7) THEN RETURN NULL; END IF;")
        with pytest.raises(ConfigError, match=r"discarded 2 inserted rows .*BEFORE triggers: guard"):
            run.deliver({0: [record(n) for n in range(5, 10)]})
        assert (run.position(), run.counts()) == (5, Counts(5, 5))
        assert b.ids() == [0, 1, 2, 3, 4]
        assert b.rows()[0]["account"] == "ACC-0"
        sql(b, 'DROP TRIGGER guard ON "TABLE_"')
        run.deliver({0: [record(n) for n in range(5, 10)]})
    assert b.ids() == [*range(10)]


@pytest.mark.parametrize(
    "body", ["IF TG_OP = 'UPDATE' THEN RETURN NULL; END IF;", "IF TG_OP = 'DELETE' THEN RETURN NULL; END IF;"]
)
def test_updates_and_deletes_that_a_trigger_discards_stop_the_run(b: Bench, body: str) -> None:
    with b.run(pipeline(b, "upsert")) as run:
        run.deliver({0: [record(n) for n in range(4)]})
        make_trigger(b, body, "BEFORE INSERT OR UPDATE OR DELETE")
        with pytest.raises(ConfigError, match="discarded 1 inserted rows"):
            run.deliver({0: [record(1), None]}, keys={0: [b"1", b"1"] if "DELETE" in body else [b"1", b"9"]})
        assert run.position() == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_text_that_varchar_would_cut_is_a_dead_letter(b: Bench, mode: str) -> None:
    declared = pipeline(b, mode)
    sql(
        b,
        'CREATE TABLE "TABLE_" (id bigint PRIMARY KEY, account varchar(3) NOT NULL, amount double precision,'
        " tags jsonb, _kafka_topic text NOT NULL, _kafka_partition integer NOT NULL, _kafka_offset bigint NOT NULL,"
        " _kafka_timestamp timestamptz)",
    )
    texts = ["abc", "ab ", "abc ", "abcd", "äöü", "äöü "]
    with b.run(declared) as run:
        run.deliver({0: [record(n, account=text) for n, text in enumerate(texts)]})
        assert run.counts() == Counts(6, 3, 3)
    assert [row["account"] for row in b.rows()] == ["abc", "ab ", "äöü"]
    assert b.dead_letters() == [(0, n, f"{REFUSED}-22001") for n in (2, 3, 5)]


# Tables that are altered under a run


def waits_for_the_table(b: Bench) -> bool:
    waiting = f"SELECT FROM pg_locks WHERE NOT granted AND relation = '{b.table}'::regclass"
    return bool(b._query(f"SELECT EXISTS ({waiting}) AS waits")[0]["waits"])


@contextmanager
def while_the_act_waits(b: Bench, run: Runner, values: Sequence[bytes], *statements: str) -> Iterator[Future[None]]:
    """The table is altered in a transaction, for which an act waits when it is committed."""

    def deliver() -> None:
        try:
            run.deliver({0: values})
        finally:
            close_clients()  # of this thread

    with psycopg.connect(b._url) as connection, ThreadPoolExecutor(1) as pool:
        for statement in statements:
            connection.execute(statement.replace("TABLE_", b.table).encode())
        delivered = pool.submit(deliver)
        assert poll_until(lambda: waits_for_the_table(b), 20)
        connection.commit()
        yield delivered


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
@pytest.mark.parametrize("mode", MODES)
def test_a_type_that_is_changed_while_an_act_waits_stops_the_run(b: Bench, mode: str, isolation: str) -> None:
    """A double's bytes are a bigint's, of another value."""
    sql(b, f"ALTER DATABASE postgres SET default_transaction_isolation = '{isolation}'")
    try:
        with b.run(pipeline(b, mode)) as run:
            run.deliver({0: [record(0)]})
            with (
                while_the_act_waits(b, run, [record(1)], "ALTER TABLE TABLE_ ALTER amount TYPE bigint") as delivered,
                pytest.raises(ConfigError, match="now has type bigint instead of double precision"),
            ):
                delivered.result()
            assert run.position() == 1
        assert b.ids() == [0]
    finally:
        sql(b, "ALTER DATABASE postgres RESET default_transaction_isolation")


@pytest.mark.parametrize("locked", ['"TABLE_"', "avow.ledger"])
def test_a_lock_that_somebody_holds_is_no_records_fault(b: Bench, monkeypatch: pytest.MonkeyPatch, locked: str) -> None:
    """Records that cannot be written now are isolated and become dead letters only if the sink says no such thing."""
    monkeypatch.setattr(postgres_session, "LOCK_WAIT_S", 1)
    with b.run() as run, psycopg.connect(b._url) as other:
        other.execute(f"LOCK TABLE {locked}".replace("TABLE_", b.table).encode())
        with pytest.raises(SinkUnavailable, match="SQLSTATE 55P03"):
            # The position as it is known: to read the ledger would wait, too.
            run.deliver({0: [record(0)]}, starts={0: 0})
        other.rollback()
        run.deliver({0: [record(0)]})
    assert (b.ids(), b.dead_letters()) == ([0], [])


def test_a_session_that_an_administrator_ends_is_no_records_fault(b: Bench) -> None:
    """Nor is one that the server ends when it is shut down."""

    class Ending(Hooks):
        left = 1

        def reached(self, point: str, batch: int) -> None:  # noqa: ARG002
            if point == "mid-write" and self.left:
                self.left -= 1
                b._query(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE xact_start IS NOT NULL"
                    " AND application_name LIKE 'avow-%' AND pid <> pg_backend_pid()"
                )

    with b.run(hooks=Ending()) as run:
        with pytest.raises(SinkUnavailable, match="SQLSTATE 57P01"):
            run.deliver({0: [record(0)]})
        run.deliver({0: [record(0)]})
    assert (b.ids(), b.dead_letters()) == ([0], [])


@pytest.mark.parametrize("claims", [False, True])
def test_a_member_ends_only_the_session_that_holds_a_partition_of_its_own(
    b: Bench, monkeypatch: pytest.MonkeyPatch, claims: bool
) -> None:
    """Another one may write for long in other partitions. Under at-most-once its claimed records would be lost."""
    monkeypatch.setattr(postgres_driver, "PATIENCE_S", 1)
    entry = f"WHERE pipeline = '{b.name}' AND partition = "
    with b.run(member=[0]) as hanging, b.run(member=[1]) as healthy, ExitStack() as opened:
        sessions = []
        for run, partition in ((hanging, 0), (healthy, 1)):
            one = opened.enter_context(closing(psycopg.connect(b._url)))
            one.execute(f"SET LOCAL application_name = '{application(b.name, run.number)}'".encode())
            one.execute(f"SELECT FROM avow.ledger {entry}{partition} FOR UPDATE".encode())
            if claims:
                one.execute(f"UPDATE avow.ledger SET read = read {entry}{partition}".encode())
            sessions.append(one)
        time.sleep(1.1)
        with b.run(member=[0]):
            pass
        with pytest.raises(psycopg.errors.AdminShutdown):
            sessions[0].execute("SELECT 1")
        sessions[1].execute("SELECT 1")


COLUMNS = "id, account, amount, tags, _kafka_topic, _kafka_partition, _kafka_offset, _kafka_timestamp"


@pytest.mark.parametrize("rights", ["INSERT", f"INSERT ({COLUMNS})"])
def test_nothing_is_altered_while_an_act_writes(b: Bench, rights: str) -> None:
    """Not even after a row was refused, whose savepoint gives up the locks that were taken behind it."""
    tried, copy = [], Session.copy

    def altered_before(self: Session, table: str, rows: Any) -> int:
        with pytest.raises(psycopg.errors.LockNotAvailable):
            sql(b, "SET lock_timeout = '100ms'", "ALTER TABLE TABLE_ ALTER amount TYPE bigint")
        tried.append(rows.num_rows)
        return copy(self, table, rows)

    declared = pipeline(b)
    with b.run(declared):
        b.refuse("id = 2")
    with user(b, f'GRANT {rights} ON "TABLE_"') as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "copy", altered_before)
        assert list(put(as_user(declared, url), [record(n) for n in range(4)])) == [2]
    assert len(tried) > 1
    assert b.ids() == [0, 1, 3]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_table_that_is_swapped_under_a_run_stops_it(b: Bench, mode: str, waits: bool) -> None:
    swap = ["ALTER TABLE TABLE_ RENAME TO TABLE_old", "ALTER TABLE TABLE_new RENAME TO TABLE_"]
    with b.run(pipeline(b, mode)) as run:
        run.deliver({0: [record(0)], 1: [record(9, extra=1)]})
        sql(b, "CREATE TABLE TABLE_new (LIKE TABLE_ INCLUDING ALL)")
        said = f"has delivered into table {b.table}old, but sink.table is now {b.table}"
        if waits:
            with while_the_act_waits(b, run, [record(1)], *swap) as delivered, pytest.raises(ConfigError, match=said):
                delivered.result()
        else:
            sql(b, *swap)
            with pytest.raises(ConfigError, match=said):
                run.deliver({0: [record(1)]})
        assert run.position() == 1
        with pytest.raises(ConfigError, match="has delivered into table"):
            redrive(lenient(run.pipeline), Selection(), pytest.fail)
        assert b.ids() == []
        sql(b, "DROP TABLE TABLE_", "ALTER TABLE TABLE_old RENAME TO TABLE_")
        run.deliver({0: [record(1)]})
    assert b.ids() == [0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_column_that_nobody_fills_stops_the_run(b: Bench, mode: str) -> None:
    """Each record would be a dead letter."""
    with b.run(pipeline(b, mode)) as run:
        run.deliver({0: [record(0)]})
        sql(b, "ALTER TABLE TABLE_ ADD extra int NOT NULL DEFAULT 1", "ALTER TABLE TABLE_ ADD serial serial NOT NULL")
        run.deliver({0: [record(1)]})
        sql(b, "ALTER TABLE TABLE_ ALTER extra DROP DEFAULT")
        with pytest.raises(
            ConfigError, match="column 'extra' is NOT NULL without a default, but the pipeline does not"
        ):
            run.deliver({0: [record(2)]})
        assert (run.position(), run.counts()) == (2, Counts(2, 2))


# Databases whose encoding is not UTF-8


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def encoded(request: pytest.FixtureRequest, server: str, tmp_path: Path) -> Iterator[Bench]:
    name, how = f"of_{request.param.lower()}", "LOCALE_PROVIDER libc LOCALE 'C'"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING {request.param} {how}".encode())
        yield Bench("postgres", tmp_path, server.rpartition("/")[0] + f"/{name}")
        close_clients()
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_texts_in_a_database_of_another_encoding(encoded: Bench) -> None:
    log = [record(0, account="é"), record(1, account="€"), record(2, **{"€": 1})]
    b = encoded
    with b.run() as run:
        run.deliver({0: log})
    kept = [0] if "latin1" in b._url else [0, 1]
    assert b.ids() == kept
    with dead_letters(run.pipeline) as letters:
        assert [one.offset for one in letters.select(Selection(), 9)] == [n for n in range(3) if n not in kept]
        detail = letters.select(Selection(), 9)[-1].detail
    assert ("\\u20ac" if "latin1" in b._url else "€") in detail
    assert audit_findings(run.pipeline, {0: log}) == []


def exactly_once(run: Runner) -> PostgresOffsets:
    """What a plain consumer has in place of a task, with the partition 0 of this run."""
    config = ConsumerConfig.resolve("exactly-once", database=True)
    offsets = PostgresOffsets(run.pipeline, {}, config, Event(), print)
    offsets._driver.run, offsets._driver.positions = run.number, {TopicPartition(TOPIC, 0): 0}
    return offsets


def test_a_consumers_transaction_in_a_database_of_another_encoding(encoded: Bench) -> None:
    b, tp = encoded, TopicPartition(TOPIC, 0)
    with b.run() as run:
        offsets = exactly_once(run)
        given = Record(TOPIC, 0, 0, 0, None, b"x", [("€", b"")])
        with offsets.transaction(Batch(tp, 0, 1, [given])) as tx:
            tx.add_dead_letter(DeadLetter(TOPIC, 0, 0, 0, None, b"x", [("€", b"")], "unprocessable", "\0 \ud800 €"))
        offsets.close()
    with dead_letters(run.pipeline) as letters:
        (one,) = letters.select(Selection(), 9)
    assert one.headers == [("€", b"")]
    assert one.detail == "\\x00 \\ud800 " + ("\\u20ac" if "latin1" in b._url else "€")


# What the ledger remembers


def adopting(b: Bench, declared: PipelineConfig, position: int, name: str = "another") -> None:
    """A pipeline of another name, into the same table, that begins there."""
    other = declared.model_copy(update={"name": f"{b.name}-{name}"})
    with driver_sink(other) as store:
        store.prepare()
        store.prepare_table(other.decode.columns.fields, rest=False)
        store.adopt({TopicPartition(TOPIC, 0): Entry(position, "new id", store.open_run())})


@pytest.mark.parametrize("mode", MODES)
def test_a_new_name_does_not_begin_below_rows_of_its_partition(b: Bench, mode: str) -> None:
    """An upsert would take every record of the new log for an older one, and leave it out without a word."""
    declared = pipeline(b, mode)
    with b.run(declared) as run:
        run.deliver({0: [record(n) for n in range(5)]})
    with pytest.raises(ConfigError, match=f"has rows of {TOPIC}/0 up to offset 4, .* would start at offset 0") as found:
        adopting(b, declared, 0)
    assert (" SET " in found.value.advice) == (mode == "upsert")
    adopting(b, declared, 5)
    with b.run(declared):  # its own rows are in nobody's way
        pass
    if mode == "upsert":
        statement = found.value.advice[found.value.advice.index("UPDATE") :].removesuffix(".")
        sql(b, statement)
        adopting(b, declared, 0, "third")


def test_another_table_is_refused(b: Bench) -> None:
    declared = pipeline(b)

    def into(table: str) -> PipelineConfig:
        assert isinstance(declared.sink, PostgresConfig)
        update = {"table": replace(declared.sink.table, name=table)}
        return declared.model_copy(update={"sink": declared.sink.model_copy(update=update)})

    with b.run(declared) as run:
        run.deliver({0: [record(0)]})
    with pytest.raises(ConfigError, match=f"has delivered into table {b.table}, but sink.table is now {b.table}x"):
        b.run(into(f"{b.table}x"))
    with pytest.raises(psycopg.errors.UndefinedTable):
        sql(b, "SELECT FROM TABLE_x")  # and it is not made
    sql(b, "ALTER TABLE TABLE_ RENAME TO TABLE_x")
    with pytest.raises(ConfigError, match=f"has delivered into table {b.table}x, but sink.table is now {b.table}"):
        b.run(declared)
    with b.run(into(f"{b.table}x")) as run:  # the same table by another name
        run.deliver({0: [record(1)]})
    sql(b, "DROP TABLE TABLE_x", "CREATE TABLE TABLE_x (id bigint)")
    with pytest.raises(ConfigError, match=r"was dropped|does not fit this pipeline's rows"):
        b.run(into(f"{b.table}x"))
    sql(b, "DROP TABLE TABLE_x")
    with pytest.raises(ConfigError, match=f"{b.table}x was dropped, with the delivered rows") as found:
        b.run(into(f"{b.table}x"))
    accept = found.value.advice[found.value.advice.index("DELETE") :].removesuffix(".")
    sql(b, accept)
    with b.run(into(f"{b.table}x")) as run:
        assert run.position() == 2


def test_what_is_declared_otherwise_is_remarked(b: Bench) -> None:
    def remarks(declared: PipelineConfig) -> list[str]:
        with driver_sink(declared) as store:
            store.prepare()
            store.prepare_table(declared.decode.columns.fields, rest=False)
            return list(store.remarks)

    assert remarks(pipeline(b, "upsert")) == []
    assert remarks(pipeline(b, "upsert")) == []
    assert remarks(pipeline(b, "dedupe", "at-least-once")) == [
        f"guarantee is now at-least-once; in the last run of {b.name} it was exactly-once",
        f"sink.mode is now dedupe; in the last run of {b.name} it was upsert",
    ]
    assert remarks(pipeline(b, "dedupe", "at-least-once")) == []


def test_the_ledger_of_an_older_version_is_upgraded_in_place(b: Bench) -> None:
    """To the table that it finds: what came before is not known."""
    with b.run() as run:
        run.deliver({0: [record(0)]})
    sql(b, "DROP TABLE avow.pipelines, avow.columns", "UPDATE avow.version SET version = 2")
    with b.run() as run:
        assert run.position() == 1
    assert [row["table_name"] for row in b._query("SELECT * FROM avow.pipelines")] == [b.table]


def test_the_log_of_claims_is_trimmed_as_a_run_goes(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_driver, "TRIM_EVERY", 1)
    with b.run() as run:
        for n in range(4):
            run.deliver({0: [record(n)], 1: [record(n)]})
        sql(b, "UPDATE avow.claims SET claimed_at = now() - interval '31 days' WHERE partition = 0")
        run.deliver({0: [record(4)], 1: [record(4)]})
        claims = f"SELECT partition, from_offset FROM avow.claims WHERE pipeline = '{b.name}' ORDER BY 1, 2"
        kept = [(row["partition"], row["from_offset"]) for row in b._query(claims)]
        assert kept == [(0, 2), (0, 3), (0, 4), *((1, n) for n in range(5))]
        run.deliver({0: [record(5)]})
        kept = [(row["partition"], row["from_offset"]) for row in b._query(claims)]
        assert kept == [(0, 4), (0, 5), *((1, n) for n in range(5))]


def test_old_claims_do_not_outlast_some_hundred_acts(b: Bench) -> None:
    claims = (
        f"SELECT count(*) AS old FROM avow.claims WHERE pipeline = '{b.name}' AND claimed_at < now() - interval '30 d'"
    )
    with b.run() as run:
        for n in range(5):
            run.deliver({0: [record(n)], 1: [record(n)]})
        sql(b, "UPDATE avow.claims SET claimed_at = now() - interval '31 days'")
        for n in range(5, 300):
            run.deliver({0: [record(n)], 1: [record(n)]})
            if b._query(claims) == [{"old": 0}]:
                return
    pytest.fail("old claims were never trimmed")


# What never heals stops before anything runs


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_right_stops_the_start_with_the_grant(b: Bench, mode: str) -> None:
    declared = pipeline(b, mode)
    with b.run(declared):
        pass
    with user(b) as url:
        own = as_user(declared, url)
        with pytest.raises(ConfigError, match=r"lacks INSERT.* on table") as found:
            b.run(own)
        sql(b, found.value.advice)
        if mode == "append":  # a right on each column is as good
            sql(b, "REVOKE INSERT ON TABLE_ FROM TABLE__user", f"GRANT INSERT ({COLUMNS}) ON TABLE_ TO TABLE__user")
        with b.run(own) as run:
            run.deliver({0: [record(0)]})
    assert b.ids() == [0]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("CREATE VIEW TABLE_v AS SELECT * FROM TABLE_", "is a view"),
        (
            "CREATE TABLE TABLE_v (LIKE TABLE_); ALTER TABLE TABLE_v DROP amount;"
            " ALTER TABLE TABLE_v ADD amount float8 GENERATED ALWAYS AS (id * 2) STORED",
            "'amount' is a generated column",
        ),
        (
            "CREATE TABLE TABLE_v (LIKE TABLE_); ALTER TABLE TABLE_v DROP account;"
            " ALTER TABLE TABLE_v ADD account varchar[]",
            r"'account' has type character varying\[\] instead of text",
        ),
        ("CREATE UNLOGGED TABLE TABLE_v (LIKE TABLE_)", "is UNLOGGED: a crash of the server would empty it"),
        (
            "CREATE TABLE TABLE_v (LIKE TABLE_) PARTITION BY LIST (id);"
            " CREATE TABLE TABLE__1 PARTITION OF TABLE_v FOR VALUES IN (1);"
            " CREATE UNLOGGED TABLE TABLE__2 PARTITION OF TABLE_v FOR VALUES IN (2)",
            "partition t_.*_2 is UNLOGGED",
        ),
        (
            "CREATE TABLE TABLE_v (LIKE TABLE_) PARTITION BY LIST (id); CREATE FOREIGN DATA WRAPPER TABLE__w;"
            " CREATE SERVER TABLE__s FOREIGN DATA WRAPPER TABLE__w;"
            " CREATE FOREIGN TABLE TABLE__1 PARTITION OF TABLE_v FOR VALUES IN (1) SERVER TABLE__s",
            "partition t_.*_1 is a foreign table",
        ),
    ],
)
def test_what_takes_no_rows_stops_the_start(b: Bench, statement: str, problem: str) -> None:
    with b.run(pipeline(b)):
        pass
    sql(b, *statement.split(";"))
    b.name, b.table = f"{b.name}-v", f"{b.table}v"
    with pytest.raises(ConfigError, match=problem):
        b.run(pipeline(b))


def test_a_wrong_password_or_database_is_not_tried_again(b: Bench) -> None:
    with pytest.raises(ConfigError, match='database "nowhere" does not exist'):
        driver_sink(as_user(pipeline(b), b._url.rpartition("/")[0] + "/nowhere"))
    with pytest.raises(ConfigError, match='role "nobody-at-all" does not exist'):
        driver_sink(as_user(pipeline(b), b._url.replace("postgres@", "nobody-at-all:hidden@"))).prepare()


# Poolers, failovers and other people's sessions


def set_by_session(session: Session) -> list[str]:
    """What was SET, outside of any transaction."""
    rows = session._connection.execute("SELECT name FROM pg_settings WHERE source = 'session'").fetchall()
    return [row[0] for row in rows]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_set_beyond_a_transaction(b: Bench, mode: str) -> None:
    """A pooler gives the server's connection to somebody else behind each transaction."""
    declared = pipeline(b, mode)
    with b.run(declared) as run:
        assert isinstance(run.store, PostgresDriver)
        run.deliver({0: [record(0)]})
        task = cached(b._url, application(b.name, 1))
        assert set_by_session(run.store._session) == set_by_session(task) == []
        assert task.query("SHOW application_name") == [(application(b.name, 1),)]  # inside one
        assert task.query("SHOW lock_timeout") == [("1min",)]


def test_the_url_has_keepalives_unless_it_says_otherwise(b: Bench) -> None:
    assert with_keepalive("postgresql://h/d") == (
        "postgresql://h/d?keepalives_idle=30&keepalives_interval=10&keepalives_count=3&tcp_user_timeout=60000"
        "&client_encoding=UTF8"
    )
    own = "postgresql://h/d?keepalives_idle=5&tcp_user_timeout=1000"
    assert with_keepalive(own) == f"{own}&keepalives_interval=10&keepalives_count=3&client_encoding=UTF8"
    with psycopg.connect(with_keepalive(f"{b._url}?client_encoding=LATIN1")) as connection:
        assert connection.info.encoding == "utf-8"


def test_a_statement_of_a_bounded_session_ends_in_time(b: Bench) -> None:
    session = Session(b._url, "avow-test", 0.3)
    with pytest.raises(DatabaseError, match="statement timeout"):
        session.query("SELECT pg_sleep(60)")
    assert session.query("SELECT 1") == [(1,)]
    session.close()


@pytest.fixture(params=["own", *(["pgbouncer"] if shutil.which("pgbouncer") else [])])
def pooled(b: Bench, request: pytest.FixtureRequest) -> Iterator[str]:
    """A URL through a pooler in transaction mode, with a single connection to the server for everybody: one of our own
    and, where it is installed, PgBouncer."""
    at = urlsplit(b._url)
    port = PortPicker().free()
    url = b._url.replace(f":{at.port}/", f":{port}/")
    if request.param == "own":
        assert at.port is not None
        pooler = Pooler(port, at.port).start()
        yield url
        pooler.stop()
        assert pooler.servers < pooler.clients < pooler.transactions
        return
    folder = Path(tempfile.mkdtemp(prefix="avow-test-"))  # that another user can read
    folder.chmod(0o755)
    (folder / "users").write_text('"postgres" ""\n')
    (folder / "ini").write_text(
        f"[databases]\n* = host={at.hostname} port={at.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {folder}/users\n"
        "pool_mode = transaction\ndefault_pool_size = 1\n"
    )
    arguments = ["-u", "nobody"] if os.getuid() == 0 else []
    child = subprocess.Popen(["pgbouncer", *arguments, folder / "ini"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                psycopg.connect(url, prepare_threshold=None).close()
                break
            except psycopg.OperationalError:
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield url
    finally:
        child.terminate()
        child.wait(20)
        shutil.rmtree(folder)


def test_behind_a_pooler_nothing_of_ours_stays_on_its_connections(b: Bench, pooled: str) -> None:
    declared = as_user(pipeline(b, "upsert"), pooled)
    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as other, b.run(declared) as run:
        for n in range(5):
            run.deliver({0: [record(n), None], 1: [record(10 + n)]}, keys={0: [b"1", b"1"]})
            found = other.execute(
                "SELECT name FROM pg_settings WHERE source = 'session' AND name <> 'application_name'"
            )
            assert found.fetchall() == []
            shown = other.execute("SHOW application_name").fetchone()
            assert shown is not None
            assert "avow" not in shown[0]
        with b.run(declared) as newer:  # and nobody else's connection is ended by the next run
            newer.deliver({0: [record(5)]})
        assert other.execute("SELECT 1").fetchone() == (1,)
        with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as careless:
            careless.execute("SET work_mem = '5MB'")
        assert other.execute("SHOW work_mem").fetchone() == ("5MB",), "what is set on a connection, others find there"
    assert b.ids() == [0, 2, 3, 4, 5, *range(10, 15)]


def test_only_sessions_that_are_ours_and_in_the_way_are_ended(b: Bench) -> None:
    declared = pipeline(b)
    with b.run(declared):
        pass
    ours = application(b.name, 1)
    sql_ = "SELECT FROM avow.ledger FOR UPDATE"
    with (
        psycopg.connect(b._url, application_name=ours) as zombie,
        psycopg.connect(b._url, application_name=ours, autocommit=True) as idle,
        psycopg.connect(b._url, application_name=ours) as elsewhere,
        psycopg.connect(b._url, application_name=f"{ours}x") as named_alike,
        psycopg.connect(b._url.rpartition("/")[0] + "/template1", application_name=ours) as other_database,
    ):
        zombie.execute(sql_)
        elsewhere.execute("SELECT 1")
        named_alike.execute("SELECT count(*) FROM avow.ledger")
        other_database.execute("SELECT 1")
        with b.run(declared) as run:
            assert run.number == 2
        for connection in (idle, elsewhere, named_alike, other_database):
            connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError):
            zombie.execute("SELECT 1")


def test_claims_that_a_failover_has_lost_are_made_again(b: Bench) -> None:
    """A standby is promoted that lacks the last commits: the ledger and the rows are both as they were before."""
    with b.run() as run:
        run.deliver({0: [record(n) for n in range(5)]})
        run.deliver({0: [record(n) for n in range(5, 10)]})
        back = (
            f"UPDATE avow.ledger SET position = 5, read = 5, written = 5 WHERE pipeline = '{b.name}' AND partition = 0"
        )
        claims = f"DELETE FROM avow.claims WHERE pipeline = '{b.name}' AND from_offset >= 5"
        sql(b, "DELETE FROM TABLE_ WHERE _kafka_offset >= 5", back, claims)
        with pytest.raises(PositionBehind, match="would skip 5 offsets") as found:
            run.deliver({0: [record(10)]}, starts={0: 10})
        assert not isinstance(found.value, tuple(STOPS.values())), "another attempt is made"
    with b.run() as run:
        run.deliver({0: [record(n) for n in range(run.position(), 11)]})
    assert b.ids() == [*range(11)]


def test_idempotency_keys_that_are_alike_but_not_the_same(b: Bench) -> None:
    with b.run():
        pass
    keys: list[bytes | str] = [b"\xff", b"\\xff", "\\xff\\", b"\\\\xff", b"\0", "\\x00", "ÿ", b"\xc3\xbf\xff"]
    with psycopg.connect(b._url) as connection:
        tx = Transaction(b.name, 1, 0, connection, Entry(0, "id", 1), OffsetRange(TOPIC, 0, 0, 0), [])
        assert [tx.first_time(key) for key in keys] == [True] * len(keys)
        assert [tx.first_time(key) for key in keys] == [False] * len(keys)
        assert not tx.first_time("ÿ".encode())


def test_a_repeat_that_was_not_handled_is_not_counted(b: Bench) -> None:
    """Its handler failed after ``first_time``, and the consumer stops there."""
    records = [Record(TOPIC, 0, offset, 0, None, b"x", []) for offset in range(3)]
    with b.run() as run:
        offsets = exactly_once(run)
        with offsets.transaction(Batch(TopicPartition(TOPIC, 0), 0, 3, records)) as tx:
            for one in records:
                tx.at(one)
                tx.first_time("the same")
            tx.end_at(2)
        offsets.close()
        assert (run.position(), run.counts()) == (2, Counts(2, 1, 0, 1))
