"""Tables that follow the declared columns (``sink.evolve``): what is added and widened, and what stops by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from urllib.parse import urlsplit

import polars as pl
import psycopg
import pytest
from pydantic import SecretStr
from tests.fix_sinks import Bench, overwrite_lake

from avow.client_cache import close_clients
from avow.engines.redrive import Redriven, redrive
from avow.errors import ConfigError, PositionMoved, SinkUnavailable
from avow.findings import Kind
from avow.ledger import Counts
from avow.settings import PipelineConfig
from avow.sinks import driver_sink
from avow.sinks.base import Selection
from avow.sinks.lake.maintenance import compact
from avow.sinks.lake.plugin import lake_tables
from avow.sinks.postgres import session as postgres_session
from avow.sinks.postgres.session import Session
from avow.testing.sinks import SCHEMA, audit_findings, lenient, record

MODES = ["append", "dedupe", "upsert"]
ADD = 'evolve = "add"'
WIDER = f"{SCHEMA}, note string"


@pytest.fixture
def b(bench: Callable[..., Bench]) -> Bench:
    return bench("postgres")


def declared(
    b: Bench, schema: str, mode: str = "append", *lines: str, guarantee: str = "exactly-once"
) -> PipelineConfig:
    keyed = [] if mode == "append" else [f'mode = "{mode}"', 'key = ["id"]']
    return b.pipeline(guarantee, *keyed, *(lines or (ADD,)), schema=schema)


def sql(b: Bench, *statements: str) -> None:
    with psycopg.connect(b._url) as connection:
        for statement in statements:
            connection.execute(statement.replace("TABLE_", b.table).encode())


def types(b: Bench) -> dict[str, str]:
    rows = b._query(
        "SELECT attname::text AS name, format_type(atttypid, atttypmod) AS type FROM pg_attribute"
        f" WHERE attrelid = '{b.table}'::regclass AND attnum > 0 AND NOT attisdropped"
    )
    return {row["name"]: row["type"] for row in rows}


def prepare(declared: PipelineConfig, rest: bool = False) -> list[str]:
    """The start of a run. What it remarks."""
    with driver_sink(declared) as store:
        store.prepare()
        store.prepare_table(declared.decode.columns.fields, rest=rest)
        return list(store.remarks)


def refused(declared: PipelineConfig) -> tuple[list[str], str]:
    """The lines of a refusal, and what it advises."""
    with pytest.raises(ConfigError) as caught:
        prepare(declared)
    return [line.strip() for line in str(caught.value).splitlines()], caught.value.advice


# Added columns


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once", "exactly-once"])
def test_a_new_column_is_added_and_both_runs_go_on(b: Bench, mode: str, guarantee: str) -> None:
    """The older one, in partitions of its own, writes on in the columns that it knows."""
    older = declared(b, SCHEMA, mode, guarantee=guarantee)
    with b.run(older, member=[0]) as run:
        run.deliver({0: [record(0), record(1, note="early")]})
        newer = declared(b, WIDER, mode, guarantee=guarantee)
        with b.run(newer, member=[1]) as next_run:
            assert next_run.store.remarks[0] == f"table {b.table}: column 'note' (text) was added"
            run.deliver({0: [record(2), record(3, note="early")]})
            next_run.deliver({1: [record(10, note="new"), record(11)]})
            run.deliver({0: [record(4)]})
            assert (run.counts(), next_run.counts()) == (Counts(7, 5, 2), Counts(7, 5, 2))
    assert {row["id"]: row["note"] for row in b.rows()} == {0: None, 2: None, 4: None, 10: "new", 11: None}
    assert prepare(newer) == [], "once"
    if mode == "upsert":
        return  # a redrive reads the topic on for null values, and there is no Kafka here
    # The dead letters of before, of a field that was unknown then.
    assert redrive(newer, Selection(), pytest.fail) == Redriven(written=2)
    assert [row["note"] for row in b.rows() if row["id"] in (1, 3)] == ["early", "early"]
    assert b.dead_letters() == []
    if mode == "append":
        records = {
            0: [record(0), record(1, note="early"), record(2), record(3, note="early"), record(4)],
            1: [record(10, note="new"), record(11)],
        }
        assert audit_findings(newer, records) == []


def test_nothing_is_added_unless_it_is_declared(b: Bench) -> None:
    prepare(declared(b, SCHEMA))
    lines, advice = refused(declared(b, f"{WIDER}, more int not null", "append", 'evolve = "refuse"'))
    assert lines[1:] == ["column 'note' (text) is missing", "column 'more' (integer) is missing"]
    assert 'set sink.evolve = "add"' in advice
    assert "note" not in types(b)


def test_a_required_column_is_refused_and_nothing_is_altered(b: Bench) -> None:
    prepare(declared(b, SCHEMA))
    lines, advice = refused(declared(b, f"{WIDER}, more int not null"))
    assert lines[1:] == [
        "column 'more' (integer) is missing, and cannot be added as NOT NULL: the rows that are there would have no "
        "value in it"
    ]
    assert "adds columns that may be null" in advice
    assert "note" not in types(b)


def test_a_name_that_differs_in_case_is_refused(b: Bench) -> None:
    prepare(declared(b, f"{SCHEMA}, Note string"))
    lines, _ = refused(declared(b, WIDER))
    assert lines[1:] == ["column 'note' (text) is missing: the table has 'Note', which differs only in case"]


@pytest.mark.parametrize("rest", [False, True])
def test_every_type_can_be_added(b: Bench, rest: bool) -> None:
    scalars = "boolean byte short int long float double string binary date timestamp timestamp_ntz"
    wanted = [
        f"c{n} {type_}" for n, type_ in enumerate([*scalars.split(), "decimal(9,3)", "array<int>", "map<string,int>"])
    ]
    prepare(declared(b, SCHEMA))
    prepare(declared(b, ", ".join([SCHEMA, *wanted])), rest=rest)
    evolved = types(b)
    b.table += "_new"
    b.name += "-new"
    prepare(declared(b, ", ".join([SCHEMA, *wanted])), rest=rest)
    assert types(b) == evolved


def test_a_column_that_vanished_stays(b: Bench) -> None:
    with b.run(declared(b, WIDER)) as run:
        run.deliver({0: [record(0, note="kept")]})
    with b.run(lenient(declared(b, SCHEMA))) as run:
        run.deliver({0: [record(1, note="unknown now")]})
    assert [row["note"] for row in b.rows()] == ["kept", None]
    sql(b, "ALTER TABLE TABLE_ ADD must int NOT NULL DEFAULT 1")
    prepare(declared(b, SCHEMA))
    sql(b, "ALTER TABLE TABLE_ ALTER must DROP DEFAULT")
    lines, _ = refused(declared(b, SCHEMA))
    assert lines[1:] == ["column 'must' is NOT NULL without a default, but the pipeline does not write it"]


def test_an_upsert_leaves_columns_alone_that_are_not_declared(b: Bench) -> None:
    with b.run(declared(b, WIDER, "upsert")) as run:
        run.deliver({0: [record(0, note="kept")]})
    with b.run(declared(b, SCHEMA, "upsert")) as run:
        run.deliver({0: [record(0, amount=9.0)]})
    assert [(row["amount"], row["note"]) for row in b.rows()] == [(9.0, "kept")]


# Widened columns

NARROW = "id int not null, account string not null, amount float, a byte, b short, d decimal(6,2)"
WIDE = "id long not null, account string not null, amount double, a int, b long, d decimal(12,2)"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("native", [True, False])
def test_columns_are_widened_under_a_run_that_goes_on(
    b: Bench, mode: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("avow.native.library", lambda: None)
    with b.run(declared(b, NARROW, mode), member=[0]) as older:
        older.deliver({0: [record(1, a=-128, b=-32768, d=1234.56), record(2, amount=0.1), record(2**40)]})
        with b.run(declared(b, WIDE, mode), member=[1]) as newer:
            assert newer.store.remarks[0] == f"table {b.table}: column 'id' was widened from integer to bigint"
            assert len(newer.store.remarks) == 5
            older.deliver({0: [record(-3, a=127, b=None, d=-9999.99, amount=None), record(4, a=None, amount=-0.5)]})
            newer.deliver({1: [record(2**50, a=2**31 - 1, b=2**63 - 1, d=9999999999.99, amount=0.1)]})
            assert newer.counts() == Counts(6, 5, 1)
    widened = types(b)
    assert [widened[column] for column in ("id", "amount", "a", "b", "d")] == [
        "bigint",
        "double precision",
        "integer",
        "bigint",
        "numeric(12,2)",
    ]
    rows = {row["id"]: tuple(row[column] for column in ("amount", "a", "b", "d")) for row in b.rows()}
    assert rows == {
        1: (0.25, -128, -32768, Decimal("1234.56")),
        2: (0.10000000149011612, None, None, None),  # a float's value, which a double holds as it is
        -3: (None, 127, None, Decimal("-9999.99")),
        4: (-0.5, None, None, None),
        2**50: (0.1, 2**31 - 1, 2**63 - 1, Decimal("9999999999.99")),
    }
    if mode != "upsert":
        assert redrive(declared(b, WIDE, mode), Selection(), pytest.fail) == Redriven(written=1)
        assert 2**40 in b.ids()
    # An older file may run again.
    with b.run(declared(b, NARROW, mode)) as older:
        older.deliver({0: [record(77)]}, starts={0: 5})
    assert 77 in b.ids()


def test_deletes_of_an_older_run_find_widened_keys(b: Bench) -> None:
    older = declared(b, "id int not null, account string not null, amount double", "upsert")
    with b.run(older, member=[0]) as run:
        run.deliver({0: [record(1), record(2)]})
        prepare(declared(b, "id long not null, account string not null, amount double", "upsert"))
        run.deliver({0: [None]}, keys={0: [b'{"id": 1}']})
    assert b.ids() == [2]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("x int", "x string", "column 'x' has type integer instead of text"),
        ("x long", "x double", "column 'x' has type bigint instead of double precision"),
        ("x int", "x decimal(12,0)", "column 'x' has type integer instead of numeric(12,0)"),
        ("x double", "x int", "column 'x' has type double precision instead of integer"),
        ("x decimal(6,2)", "x decimal(9,3)", "column 'x' has type numeric(6,2) instead of numeric(9,3)"),
        ("x timestamp", "x timestamp_ntz", "column 'x' has type timestamp with time zone instead of timestamp without"),
        ("x string", "x array<string>", "column 'x' has type text instead of jsonb"),
    ],
)
def test_any_other_change_stops_by_name(b: Bench, before: str, after: str, line: str) -> None:
    first = "id long not null, account string not null"
    prepare(declared(b, f"{first}, {before}"))
    lines, advice = refused(declared(b, f"{first}, new int, {after}"))
    assert len(lines) == 2
    assert lines[1].startswith(line)
    assert "sink.evolve" in advice
    assert "new" not in types(b)


@pytest.mark.parametrize("older", ["x long", "x decimal(9,2)", "x double"])
def test_a_table_that_is_wider_already_is_taken(b: Bench, older: str) -> None:
    """Whose file is older is not known: it may have been another member that widened the column."""
    prepare(declared(b, f"id long not null, {older}"))
    narrow = {"x long": "x short", "x decimal(9,2)": "x decimal(6,2)", "x double": "x float"}[older]
    assert prepare(declared(b, f"id long not null, {narrow}")) == []
    if "decimal" not in older:  # a numeric has always taken fewer digits
        lines, _ = refused(declared(b, f"id long not null, {narrow}", "append", 'evolve = "refuse"'))
        assert "has type" in lines[1]


@pytest.mark.parametrize(
    ("before", "after", "rewritten"),
    [
        ("x int", "x long", True),
        ("x float", "x double", True),
        ("x decimal(6,2)", "x decimal(30,2)", False),
        ("x int", "x int, y long, z array<string>", False),
    ],
)
def test_which_changes_rewrite_the_table(b: Bench, before: str, after: str, rewritten: bool) -> None:
    """As docs/PIPELINE.md says."""
    node = f"SELECT pg_relation_filenode('{b.table}') AS node"
    with b.run(declared(b, f"id long not null, {before}")) as run:
        run.deliver({0: [b'{"id": 1, "x": 2}']})
    first = b._query(node)
    prepare(declared(b, f"id long not null, {after}"))
    assert (b._query(node) != first) is rewritten


# Whose table, and what kind


@contextmanager
def user(b: Bench, *grants: str) -> Iterator[str]:
    """A user that owns nothing. Gives its URL."""
    sql(
        b,
        'DROP ROLE IF EXISTS "TABLE__user"',
        'CREATE ROLE "TABLE__user" LOGIN',
        'GRANT USAGE, CREATE ON SCHEMA avow TO "TABLE__user"',
        'GRANT ALL ON ALL TABLES IN SCHEMA avow TO "TABLE__user"',
        *(f'{grant} TO "TABLE__user"' for grant in grants),
    )
    try:
        yield b._url.replace(f"//{urlsplit(b._url).username}@", f"//{b.table}_user@")
    finally:
        close_clients()
        sql(b, 'DROP OWNED BY "TABLE__user"', 'DROP ROLE "TABLE__user"')


def as_user(declared: PipelineConfig, url: str) -> PipelineConfig:
    return declared.model_copy(update={"sink": declared.sink.model_copy(update={"url": SecretStr(url)})})


@pytest.mark.parametrize(
    "rights",
    [
        "INSERT, UPDATE",
        "INSERT (id, account, amount, tags, _kafka_topic, _kafka_partition, _kafka_offset, _kafka_timestamp)",
    ],
)
def test_somebody_elses_table_is_not_altered(b: Bench, rights: str) -> None:
    prepare(declared(b, SCHEMA))
    newer = declared(b, WIDER)
    with user(b, f'GRANT {rights} ON "TABLE_"') as url:
        assert prepare(as_user(declared(b, SCHEMA), url)) == []
        newer = declared(b, WIDER)
        lines, advice = refused(as_user(newer, url))
        owner = urlsplit(b._url).username
        assert lines == [
            f"user {b.table}_user may not alter table {b.table}, which belongs to {owner} (SQLSTATE 42501):",
            "column 'note' (text) is missing",
        ]
        statement, _, grant = advice.partition("; Or ")
        assert grant == f'let sink.evolve do it: GRANT "{owner}" TO "{b.table}_user";'
        sql(b, statement.removeprefix(f"Let {owner} run: "))
        if rights.endswith(")"):
            lines, _ = refused(as_user(newer, url))
            assert lines == [f"user {b.table}_user lacks INSERT on table {b.table}"]
        else:
            assert prepare(as_user(newer, url)) == []


def test_a_table_in_partitions_follows_with_all_of_them(b: Bench) -> None:
    prepare(declared(b, NARROW))
    sql(
        b,
        'ALTER TABLE "TABLE_" RENAME TO "TABLE__old"',
        'CREATE TABLE "TABLE_" (LIKE "TABLE__old") PARTITION BY LIST (account)',
        'CREATE TABLE "TABLE__0" PARTITION OF "TABLE_" DEFAULT',
    )
    b.name += "-parts"
    with b.run(declared(b, NARROW)) as run:
        run.deliver({0: [record(1)]})
    with b.run(declared(b, f"{WIDE}, note string")) as run:
        run.deliver({0: [record(2**40, note="x")]})
    assert [(row["id"], row["note"]) for row in b.rows()] == [(1, None), (2**40, "x")]
    sql(b, "ALTER TABLE TABLE_ RENAME TO TABLE__all", "ALTER TABLE TABLE__0 RENAME TO TABLE_")
    b.name += "-one"
    lines, advice = refused(declared(b, f"{WIDE}, note string, other int"))
    assert lines == [
        f"table {b.table} cannot be altered as sink.evolve wants it: cannot add column to a partition (SQLSTATE 42809)"
    ]
    assert f'ALTER TABLE "{b.table}" ADD COLUMN "other" integer;' in advice


def test_a_column_that_something_else_rests_on(b: Bench) -> None:
    prepare(declared(b, NARROW))
    sql(b, "CREATE VIEW TABLE__v AS SELECT id FROM TABLE_")
    lines, _ = refused(declared(b, WIDE))
    assert "cannot alter type of a column used by a view or rule (SQLSTATE 0A000)" in lines[0]
    assert f"{b.table}_v depends on column" in lines[0]
    assert types(b)["id"] == "integer"


def test_what_is_no_table_is_refused_as_before(b: Bench) -> None:
    prepare(declared(b, SCHEMA))
    sql(b, 'CREATE VIEW "TABLE_v" AS SELECT * FROM "TABLE_"')
    b.table, b.name = f"{b.table}v", f"{b.name}-v"
    with pytest.raises(ConfigError, match="is a view"):
        prepare(declared(b, WIDER))


def test_rows_of_a_trigger_and_a_policy_go_on(b: Bench) -> None:
    prepare(declared(b, SCHEMA))
    sql(
        b,
        "CREATE FUNCTION TABLE__f() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.account = NEW.account || '!'; RETURN NEW; END $$",
        'CREATE TRIGGER t BEFORE INSERT ON "TABLE_" FOR EACH ROW EXECUTE FUNCTION TABLE__f()',
    )
    with b.run(declared(b, WIDER)) as run:
        run.deliver({0: [record(1, note="n")]})
    assert [(row["account"], row["note"]) for row in b.rows()] == [("acc-1!", "n")]


# Several at once


def test_two_newer_files_at_once_are_both_in_the_table(b: Bench) -> None:
    prepare(declared(b, NARROW))
    files = [declared(b, f"{WIDE}, {more}") for more in ("one string", "two int, both long", "three double, both long")]
    ready = threading.Barrier(6)

    def start(number: int) -> list[str]:
        ready.wait(20)
        return prepare(files[number % 3])

    with ThreadPoolExecutor(6) as pool:
        remarks = [line for lines in pool.map(start, range(6)) for line in lines]
    assert sorted(remarks) == sorted(set(remarks)), "each change was made once"
    assert len([line for line in remarks if "was added" in line]) == 4
    assert len([line for line in remarks if "was widened" in line]) == 5
    assert types(b).keys() > {"one", "two", "three", "both"}


def test_of_two_files_that_contradict_one_stops(b: Bench) -> None:
    prepare(declared(b, SCHEMA))
    prepare(declared(b, f"{SCHEMA}, x int"))
    lines, _ = refused(declared(b, f"{SCHEMA}, x string"))
    assert lines[1:] == ["column 'x' has type integer instead of text"]


def test_a_kill_between_the_change_and_the_first_claim_is_harmless(b: Bench) -> None:
    """The transaction is there or it is not; a start after it finds what the killed one has left."""
    with b.run(declared(b, SCHEMA)) as run:
        run.deliver({0: [record(0)]})
    newer = declared(b, WIDER)
    altered, run_ = Session.run, []

    class Killed(BaseException):
        pass

    def dies(self: Session, statement: str, *values: str) -> int:
        done = altered(self, statement, *values)
        if statement.startswith("ALTER TABLE"):
            run_.append(statement)
            self._connection.close()  # as the server sees a kill -9
            raise Killed
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", dies)
        with pytest.raises(Killed):
            prepare(newer)
    assert len(run_) == 1
    assert "note" not in types(b)
    assert prepare(newer) != []  # and is killed behind it
    with b.run(newer) as run:
        assert run.position() == 1
        run.deliver({0: [record(1, note="n")]})
    assert [row["note"] for row in b.rows()] == [None, "n"]


def test_a_table_that_is_in_use_is_waited_for(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_session, "LOCK_WAIT_S", 1)
    prepare(declared(b, SCHEMA))
    newer = declared(b, WIDER)
    with psycopg.connect(b._url) as reader:
        reader.execute(f'SELECT FROM "{b.table}"'.encode())
        with pytest.raises(SinkUnavailable, match="SQLSTATE 55P03"):
            prepare(newer)
    assert "note" not in types(b)
    assert len(prepare(newer)) == 1


def test_a_column_that_somebody_widens_meanwhile_is_not_narrowed(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(declared(b, "id long not null, x int"))
    run = Session.run

    def widen_first(self: Session, statement: str, *values: str) -> int:
        if statement.startswith("LOCK TABLE"):
            sql(b, 'ALTER TABLE "TABLE_" ALTER x TYPE numeric(30,5)')
        return run(self, statement, *values)

    monkeypatch.setattr(Session, "run", widen_first)
    lines, _ = refused(declared(b, "id long not null, x long"))
    assert lines[1:] == ["column 'x' has type numeric(30,5) instead of bigint"]


def test_a_redrive_before_a_run_has_added_the_column(b: Bench) -> None:
    with b.run(declared(b, SCHEMA)) as run:
        run.deliver({0: [record(0, note="n")]})
    newer = declared(b, WIDER)
    with pytest.raises(ConfigError, match=r"has no column 'note' \(text\)") as caught:
        redrive(newer, Selection(), pytest.fail)
    assert "Run the pipeline" in caught.value.advice
    prepare(newer)
    assert redrive(newer, Selection(), pytest.fail) == Redriven(written=1)


def test_a_run_that_refuses_stops_where_another_widens(b: Bench) -> None:
    """As before: only who says so follows."""
    with b.run(declared(b, NARROW, "append", 'evolve = "refuse"'), member=[0]) as run:
        run.deliver({0: [record(1)]})
        prepare(declared(b, WIDE))
        with pytest.raises(ConfigError, match="now has type bigint instead of integer"):
            run.deliver({0: [record(2)]})
        assert run.position() == 1


# Audits of rows that were written before


@pytest.fixture(params=["postgres", "delta", "iceberg"])
def any_sink(request: pytest.FixtureRequest, bench: Callable[..., Bench]) -> Bench:
    return bench(request.param)


def test_an_audit_knows_from_where_on_a_column_is_there(any_sink: Bench) -> None:
    """Of records that had the field before the table had the column. Where a row should have it, it is missed."""
    b = any_sink
    with b.run(lenient(declared(b, SCHEMA))) as run:
        run.deliver({0: [record(0, note="early", extra=[1]), record(1)], 1: [record(10, note="early")]})
    newer = lenient(declared(b, f"{WIDER}, extra array<int>"))
    with b.run(newer) as run:
        run.deliver({0: [record(2, note="now", extra=[2]), record(3)], 1: [record(11, extra=[])]})
    records = {
        0: [record(0, note="early", extra=[1]), record(1), record(2, note="now", extra=[2]), record(3)],
        1: [record(10, note="early"), record(11, extra=[])],
    }
    assert audit_findings(newer, records) == []
    assert audit_findings(lenient(declared(b, SCHEMA)), records) == []
    blank(b, "note", 2)
    (finding,) = audit_findings(newer, records)
    assert (finding.kind, finding.columns, finding.spans[0].start) == (Kind.COERCED, ("note",), 2)


def blank(b: Bench, column: str, number: int) -> None:
    """Somebody takes a value out of a row."""
    if b.kind == "postgres":
        sql(b, f'UPDATE "TABLE_" SET {column} = NULL WHERE id = {number}')
        return
    frame = b.frame()
    overwrite_lake(
        b.kind,
        b.folder,
        b.table,
        frame.with_columns(pl.when(pl.col("id") != number).then(pl.col(column)).alias(column)),
    )


@pytest.mark.parametrize("kind", ["postgres", "iceberg"])
def test_an_audit_knows_what_was_a_float(bench: Callable[..., Bench], kind: str) -> None:
    b = bench(kind)
    before = [record(n, amount=amount) for n, amount in enumerate([0.1, None, 0.5, 1e300])]
    with b.run(declared(b, LAKE_NARROW), partitions=1) as run:
        run.deliver({0: before})
    newer = declared(b, LAKE_WIDE)
    after = [record(4, amount=0.1), record(5, amount=None)]
    with b.run(newer, partitions=1) as run:
        run.deliver({0: after})
    assert b.dead_letters() == [(0, 3, "out-of-range")]
    assert redrive(newer, Selection(), pytest.fail) == Redriven(written=1)
    amounts = {row["id"]: row["amount"] for row in b.rows()}
    assert amounts == {0: 0.10000000149011612, 1: None, 2: 0.5, 3: 1e300, 4: 0.1, 5: None}
    assert audit_findings(newer, {0: [*before, *after]}) == []


# Lakes

LAKE_NARROW = "id int not null, account string not null, amount float, a byte, b short, d decimal(6,2)"
LAKE_WIDE = "id long not null, account string not null, amount double, a int, b long, d decimal(20,2)"


@pytest.fixture(params=["delta", "iceberg"])
def lake(request: pytest.FixtureRequest, bench: Callable[..., Bench]) -> Bench:
    return bench(request.param)


@pytest.fixture
def iceberg(bench: Callable[..., Bench]) -> Bench:
    return bench("iceberg")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once", "exactly-once"])
def test_a_lakes_older_run_goes_on_beside_a_new_column(lake: Bench, mode: str, guarantee: str) -> None:
    b, older = lake, declared(lake, SCHEMA, mode, guarantee=guarantee)
    with b.run(older, member=[0]) as run:
        run.deliver({0: [record(0), record(1, note="early")]})
        newer = declared(b, WIDER, mode, guarantee=guarantee)
        staged = run.stage({0: [record(2), record(3, note="early")]})
        with b.run(newer, member=[1]) as next_run:
            assert [line.partition(": ")[2] for line in next_run.store.remarks] == ["column 'note' (string) was added"]
            run.commit(*staged)
            next_run.deliver({1: [record(10, note="new"), record(11)]})
            run.deliver({0: [record(4), record(0, amount=9.0)]})
            assert run.counts() == Counts(8, 6 - (mode == "dedupe"), 2, int(mode == "dedupe"))
    assert prepare(newer) == [], "once"
    notes = {row["id"]: row["note"] for row in b.rows()}
    assert notes == {0: None, 2: None, 4: None, 10: "new", 11: None}
    if mode != "upsert":  # a redrive reads the topic on for null values, and there is no Kafka here
        assert redrive(newer, Selection(), pytest.fail) == Redriven(written=2)
        assert [row["note"] for row in b.rows() if row["id"] in (1, 3)] == ["early", "early"]
    if mode == "append":
        of_0 = [
            record(0),
            record(1, note="early"),
            record(2),
            record(3, note="early"),
            record(4),
            record(0, amount=9.0),
        ]
        assert audit_findings(newer, {0: of_0, 1: [record(10, note="new"), record(11)]}) == []


@pytest.mark.parametrize("mode", MODES)
def test_icebergs_columns_are_widened_under_a_run(iceberg: Bench, mode: str) -> None:
    b, older = iceberg, declared(iceberg, LAKE_NARROW, mode)
    with b.run(older, member=[0]) as run:
        run.deliver({0: [record(1, a=-128, b=-32768, d=1234.56), record(2, amount=0.1), record(2**40)]})
        staged = run.stage({0: [record(3)]})
        with b.run(declared(b, LAKE_WIDE, mode), member=[1]) as newer:
            said = [line.partition(": ")[2] for line in newer.store.remarks]
            assert said == [
                "column 'id' was widened from int32 to int64",
                "column 'amount' was widened from float to double",
                "column 'b' was widened from int32 to int64",
                "column 'd' was widened from decimal128(6, 2) to decimal128(20, 2)",
            ]
            newer.deliver({1: [record(2**50, a=2**31 - 1, b=2**63 - 1, d=999999999999.5, amount=0.1)]})
            with pytest.raises(PositionMoved, match="were widened since the run began"):
                run.commit(*staged)
            run.store.prepare_table(older.decode.columns.fields, rest=False)  # as the next attempt does
            run.deliver({0: [record(3, b=7, d=-9999.99), record(-4, amount=None)]})
            if mode == "upsert":
                newer.deliver({1: [record(2, amount=2.5)]})
                run.deliver({0: [None]}, keys={0: [b'{"id": 1}']})
    rows = {row["id"]: tuple(row[column] for column in ("amount", "a", "b", "d")) for row in b.rows()}
    assert rows == {
        **({} if mode == "upsert" else {1: (0.25, -128, -32768, Decimal("1234.56"))}),
        2: (2.5 if mode == "upsert" else 0.10000000149011612, None, None, None),
        3: (0.75, None, 7, Decimal("-9999.99")),
        -4: (None, None, None, None),
        2**50: (0.1, 2**31 - 1, 2**63 - 1, Decimal("999999999999.50")),
    }
    if mode != "upsert":
        assert redrive(declared(b, LAKE_WIDE, mode), Selection(), pytest.fail) == Redriven(written=1)
        assert 2**40 in b.ids()
    compact(lake_tables(older)[0], b.name, 1 << 27)
    assert (
        rows.items()
        <= {row["id"]: tuple(row[column] for column in ("amount", "a", "b", "d")) for row in b.rows()}.items()
    )
    with b.run(older) as run:  # an older file may run again
        run.deliver({0: [record(77)]})
    assert 77 in b.ids()


def test_delta_widens_nothing_and_says_why(bench: Callable[..., Bench]) -> None:
    b = bench("delta")
    prepare(declared(b, LAKE_NARROW))
    lines, advice = refused(declared(b, f"{LAKE_WIDE}, note string"))
    assert lines[1:] == [
        "column 'id' has type int32 instead of int64",
        "column 'amount' has type float instead of double",
        "column 'a' has type int8 instead of int32",
        "column 'b' has type int16 instead of int64",
        "column 'd' has type decimal128(6, 2) instead of decimal128(20, 2)",
    ]
    assert "it widens none of a Delta table, since deltalake (1.6.6) has no type widening" in advice
    assert "note" not in b.frame().columns, "nothing is added where something else does not fit"


def test_a_delta_table_that_is_wider_already_is_taken(bench: Callable[..., Bench]) -> None:
    b = bench("delta")
    prepare(declared(b, LAKE_WIDE))
    with b.run(declared(b, LAKE_NARROW)) as run:
        run.deliver({0: [record(1, d=1.5)]})
    assert [(row["id"], row["amount"], row["d"]) for row in b.rows()] == [(1, 0.25, Decimal("1.50"))]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("x int", "x string", "column 'x' has type int32 instead of string"),
        ("x long", "x double", "column 'x' has type int64 instead of double"),
        ("x decimal(6,2)", "x decimal(9,3)", "column 'x' has type decimal128(6, 2) instead of decimal128(9, 3)"),
        ("x int", "x int, more string not null", "column 'more' (string) is missing, and cannot be added as NOT NULL"),
        ("x int", "X int", "column 'X' (int32) is missing: the table has 'x', which differs only in case"),
        ("x int not null", "y int", "column 'x' is NOT NULL, but the pipeline does not write it"),
    ],
)
def test_any_other_change_of_a_lake_stops_by_name(lake: Bench, before: str, after: str, line: str) -> None:
    first = "id long not null, account string not null"
    prepare(declared(lake, f"{first}, {before}"))
    lines, _ = refused(declared(lake, f"{first}, new int, {after}"))
    assert len(lines) == 2
    assert lines[1].startswith(line)
    assert "new" not in lake.frame().columns


def test_a_column_that_partitions_a_table_is_not_widened(iceberg: Bench) -> None:
    prepare(declared(iceberg, "id int not null, x int", "append", ADD, 'partition_by = "x"'))
    lines, _ = refused(declared(iceberg, "id long not null, x long", "append", ADD, 'partition_by = "x"'))
    assert lines[1:] == ["column 'x' has type int32 instead of int64"]


def test_a_lakes_column_that_vanished_is_null(lake: Bench) -> None:
    with lake.run(declared(lake, WIDER)) as run:
        run.deliver({0: [record(0, note="kept")]})
    with lake.run(declared(lake, SCHEMA)) as run:
        run.deliver({0: [record(1)]})
    assert [row["note"] for row in lake.rows()] == ["kept", None]


def test_two_newer_files_at_once_are_both_in_a_lake(lake: Bench) -> None:
    prepare(declared(lake, SCHEMA))
    files = [
        declared(lake, f"{SCHEMA}, {more}") for more in ("one string", "two int, both long", "three int, both long")
    ]
    ready = threading.Barrier(6)

    def start(number: int) -> list[str]:
        ready.wait(20)
        return prepare(files[number % 3])

    with ThreadPoolExecutor(6) as pool:
        remarks = [line for lines in pool.map(start, range(6)) for line in lines]
    assert len(remarks) == len(set(remarks)) == 4, "each change was made once"
    assert {"one", "two", "three", "both"} <= set(lake.frame().columns)


def test_a_redrive_does_not_squeeze_values_into_a_narrower_column(lake: Bench) -> None:
    """Before a run of the newer file has widened it."""
    with lake.run(declared(lake, LAKE_NARROW), partitions=1) as run:
        run.deliver({0: [record(0), record(2**40)]})
    with pytest.raises(ConfigError, match="column 'id' has type int32 instead of int64"):
        redrive(declared(lake, LAKE_WIDE), Selection(), pytest.fail)
