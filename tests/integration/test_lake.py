"""What is particular to lakes: crashes between file and commit, other writers at work, lost answers, what is refused.

No Kafka and no Spark: see ``fix_sinks``. What must survive a kill -9 runs in a process of its own.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from deltalake import Field as DeltaField
from deltalake.schema import PrimitiveType
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import update_table_metadata
from pyiceberg.types import StringType
from tests.fix_sinks import Bench, Runner, iceberg_table, overwrite_lake, record

from avow import sinks
from avow.engines.redrive import Redriven, redrive
from avow.errors import ConfigError, SinkError, Superseded
from avow.guarantee import Act
from avow.ledger import Counts
from avow.sinks.base import CommittingSink, Selection
from avow.sinks.lake import driver
from avow.sinks.lake import redrive as redriving
from avow.sinks.lake.upkeep import compact, orphans

KINDS = ["delta", "iceberg"]
Make = Callable[[str], Bench]
GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]


@pytest.fixture(params=KINDS)
def b(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return bench(request.param)


def data_files(b: Bench) -> set[Path]:
    return set(b.folder.rglob("avow-*.parquet"))


# Others at work on the table. Our positions survive, and nothing is doubled or lost.


def clean_up(table: DeltaTable) -> None:
    table.create_checkpoint()
    table.cleanup_metadata()


def others(b: Bench) -> dict[str, Callable[[], object]]:
    if b.kind == "delta":
        return {
            "optimize": lambda: DeltaTable(b.path).optimize.compact(),
            "delete": lambda: DeltaTable(b.path).delete("id = 3"),
            "add column": lambda: DeltaTable(b.path).alter.add_columns(DeltaField("theirs", PrimitiveType("string"))),
            "set property": lambda: DeltaTable(b.path).alter.set_table_properties(
                {"their.own": "x"}, raise_if_not_exists=False
            ),
            "clean-up": lambda: clean_up(DeltaTable(b.path)),
            "vacuum": lambda: DeltaTable(b.path).vacuum(0, dry_run=False, enforce_retention_duration=False),
        }
    table = iceberg_table(b.folder, b.table)

    def expire() -> None:
        newest = table.current_snapshot()
        assert newest
        old = [s.snapshot_id for s in table.metadata.snapshots if s.snapshot_id != newest.snapshot_id]
        table.maintenance.expire_snapshots().by_ids(old).commit()

    def add_column() -> None:
        with table.update_schema() as update:
            update.add_column("theirs", StringType())

    def set_property() -> None:
        with table.transaction() as transaction:
            transaction.set_properties({"their.own": "x"})

    return {
        "delete": lambda: table.delete("id = 3"),
        "add column": add_column,
        "set property": set_property,
        "expire": expire,
    }


@pytest.mark.parametrize(
    ("kind", "what"),
    [("delta", what) for what in ("optimize", "delete", "add column", "set property", "clean-up", "vacuum")]
    + [("iceberg", what) for what in ("delete", "add column", "set property", "expire")],
)
def test_others_between_two_batches_and_before_a_commit(bench: Make, kind: str, what: str) -> None:
    b = bench(kind)
    with b.run(partitions=1) as run:
        for number in range(4):
            run.deliver({0: [record(number)]})
        work, staged = run.stage({0: [record(4)]})
        others(b)[what]()  # behind the back of our handle
        run.commit(work, staged)
        others(b).get("delete" if what == "vacuum" else "set property", lambda: None)()
        run.deliver({0: [record(5)]})
        assert (run.position(), run.counts()) == (6, Counts(6, 6))
    with b.run(partitions=1) as run:
        assert run.position() == 6
        run.deliver({0: [record(6)]})
    gone = {3} if what in ("delete", "vacuum") else set()
    assert b.ids() == [n for n in range(7) if n not in gone]


def test_the_same_range_by_two_drivers(b: Bench) -> None:
    """Both have staged it from the same position. One wins; the other is told."""
    with b.run(partitions=1) as first:
        work, staged = first.stage({0: [record(0), b"bad"]})
        with b.run(partitions=1) as second:
            later = second.stage({0: [record(0), b"bad"]})
            second.commit(*later)
        with pytest.raises(Superseded):
            first.commit(work, staged)
    assert b.ids() == [0]
    assert len(b.letters()) == 1


# Lost answers.


def lost(run: Runner, guarantee: str, which: Act) -> None:
    """Deliver two records, losing the answer to one of the commits; as the engine does, start again after a failure."""
    steps = {"at-most-once": [Act.CLAIM, Act.WRITE], "at-least-once": [Act.WRITE, Act.CLAIM]}.get(guarantee)
    acts = [frozenset({act}) for act in steps] if steps else [frozenset({Act.WRITE, Act.CLAIM})]
    assert isinstance(run.store, CommittingSink)
    _, staged = run.stage({0: [record(0), record(1)]})

    def answered() -> None:
        raise OSError("the answer is lost")

    for act in acts:
        hook = answered if which in act else lambda: None
        run.store.commit(act, staged, run.number, 0, last=act is acts[-1], answered=hook)


@pytest.mark.parametrize("which", [Act.CLAIM, Act.WRITE])
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_lost_answer(b: Bench, guarantee: str, which: Act) -> None:
    pipeline = b.pipeline(guarantee)
    failed = guarantee != "exactly-once" and which is Act.WRITE
    outcome: AbstractContextManager[Any] = pytest.raises(SinkError, match="was lost") if failed else nullcontext()
    with b.run(pipeline, partitions=1) as run, outcome:
        lost(run, guarantee, which)
    with b.run(pipeline, partitions=1) as run:
        if run.position() == 0:
            run.deliver({0: [record(0), record(1)]})
        assert run.position() == 2
    # A write alone is not looked for: at-least-once writes again, at-most-once does not.
    assert b.ids() == ([0, 0, 1, 1] if guarantee == "at-least-once" and failed else [0, 1])


# Crashes.

CRASHING = """
import os, signal, sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from avow.plan import load_checked
from avow.sinks.lake import driver
from tests.fix_sinks import Runner, record
point = sys.argv[2]
run = Runner(load_checked(Path(sys.argv[1]), {}), 1)
run.deliver({0: [record(0), b"bad"]})
work, staged = run.stage({0: [record(2), b"bad", record(4)]})
real = driver._commit
def commit(table, change, name, sink):
    which = "letters" if table.shown.endswith("_dead_letters") else "rows"
    if point == f"before-{which}":
        os.kill(os.getpid(), signal.SIGKILL)
    real(table, change, name, sink)
    if point == f"after-{which}":
        os.kill(os.getpid(), signal.SIGKILL)
driver._commit = commit
run.commit(work, staged)
"""


def crash(b: Bench, guarantee: str, point: str) -> None:
    b.pipeline(guarantee)
    done = subprocess.run(
        [sys.executable, "-c", CRASHING, str(b.folder / f"{b.name}.toml"), point],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -9, done.stderr


@pytest.mark.parametrize("point", ["before-letters", "after-letters", "before-rows", "after-rows"])
def test_kill_9_around_every_commit(b: Bench, point: str) -> None:
    crash(b, "exactly-once", point)
    with b.run(partitions=1) as run:
        claimed = point == "after-rows"
        assert run.position() == (5 if claimed else 2)
        assert len(b.letters()) == (2 if claimed else 1), "letters of a claim that never came are taken back"
        if not claimed:
            run.deliver({0: [record(2), b"bad", record(4)]})
        assert run.counts() == Counts(5, 3, 2)
    assert b.ids() == [0, 2, 4]
    assert [offset for _, offset, _ in b.letters()] == [1, 3]


def test_records_that_are_good_by_then_are_not_dead_as_well(b: Bench) -> None:
    """Buried, not claimed, and good when it comes again (another schema): a row, and no letter."""
    crash(b, "exactly-once", "after-letters")
    with b.run(partitions=1) as run:
        run.deliver({0: [record(2), record(3), record(4)]})
        assert run.counts() == Counts(5, 4, 1)
    assert b.ids() == [0, 2, 3, 4]
    assert [offset for _, offset, _ in b.letters()] == [1]


LOOPING = """
import sys, time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from avow.errors import AvowError
from avow.plan import load_checked
from tests.fix_sinks import Runner, record
pipeline = load_checked(Path(sys.argv[1]), {})
while True:
    try:
        with Runner(pipeline, 2) as run:
            print("run", run.number, flush=True)
            while True:
                at = {p: run.position(p) for p in (0, 1)}
                if min(at.values()) >= 120:
                    sys.exit(0)
                todo = {p: range(start, start + 5) for p, start in at.items() if start < 120}
                run.deliver({p: [record(n) if n % 10 else b"bad" for n in span] for p, span in todo.items()})
    except AvowError as error:
        print(type(error).__name__, str(error)[:200], flush=True)
        time.sleep(0.2)
"""


def test_three_drivers_killed_at_random(b: Bench) -> None:
    """Each fences the others again and again, and dies in whatever it does. Exact afterwards."""
    b.pipeline()
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    command = [sys.executable, "-c", LOOPING, str(b.folder / f"{b.name}.toml")]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)

    b.run(partitions=2).close_now()
    children = [start() for _ in range(3)]
    try:
        for _ in range(6):
            time.sleep(chance.uniform(0.5, 2.0))
            victim = chance.randrange(3)
            children[victim].kill()
            children[victim].wait()
            children[victim] = start()
        for child in children[1:]:
            child.kill()
            child.wait()
        assert children[0].wait(90) == 0, f"seed {seed}"
    finally:
        for child in children:
            child.kill()
            child.wait()
    with b.run(partitions=2) as run:
        assert run.counts() == Counts(240, 216, 24), f"seed {seed}"
    expected = sorted(2 * [n for n in range(120) if n % 10])
    assert b.ids() == expected, f"seed {seed}"
    assert len(b.letters()) == len(set(b.letters())) == 24


# What is refused.


def test_positions_that_are_missing_where_rows_are(b: Bench) -> None:
    with b.run(partitions=1) as run:
        run.deliver({0: [record(0), record(1)]})
    other = Bench(b.kind, b.folder)
    other.table = b.table
    with pytest.raises(ConfigError, match="has rows of records/0 from offset 0 on, and no position"):
        other.run(partitions=1)


def test_a_table_that_went_back_is_refused(b: Bench) -> None:
    with b.run(partitions=1) as run:
        for number in range(3):
            run.deliver({0: [record(number)]})
    if b.kind == "delta":
        table = DeltaTable(b.path)
        table.restore(table.version() - 1)
    else:
        iceberg = iceberg_table(b.folder, b.table)
        newest = iceberg.current_snapshot()
        assert newest
        assert newest.parent_snapshot_id
        iceberg.manage_snapshots().set_current_snapshot(newest.parent_snapshot_id).commit()
    with pytest.raises(ConfigError, match="went back behind its positions"):
        b.run(partitions=1)


def test_a_table_that_does_not_fit_is_refused_with_every_difference(b: Bench) -> None:
    with b.run(partitions=1):
        pass
    other = Bench(b.kind, b.folder)
    other.table = b.table
    wanted = "id string not null, account string, amount double, note string, tags array<string>"
    with pytest.raises(ConfigError) as caught:
        other.run(other.pipeline(schema=wanted), partitions=1)
    text = str(caught.value)
    assert "column 'id' is int64, and string is needed" in text
    assert "column 'account' must have a value, and the pipeline's may be null" in text
    assert "column 'note' (string) is missing" in text


def test_added_columns_follow_the_declared_policy(b: Bench) -> None:
    with b.run(partitions=1) as run:
        run.deliver({0: [record(0)]})
    wider = "id long not null, account string not null, amount double, tags array<string>, note string"
    with pytest.raises(ConfigError, match="column 'note' \\(string\\) is missing"):
        b.run(b.pipeline(schema=wider), partitions=1)
    with b.run(b.pipeline("exactly-once", 'evolve = "add"', schema=wider), partitions=1) as run:
        run.deliver({0: [record(1, note="new")]})
    assert [row["note"] for row in b.rows()] == [None, "new"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("delta.setTransactionRetentionDuration", "interval 7 days", "would forget our positions"),
        ("delta.constraints.positive", "id > 0", "is a constraint"),
        ("delta.enableChangeDataFeed", "true", "hangeDataFeed"),
    ],
)
def test_what_delta_could_not_keep_is_refused_by_name(bench: Make, name: str, value: str, why: str) -> None:
    b = bench("delta")
    with b.run(partitions=1):
        pass
    alter = DeltaTable(b.path).alter
    if name.startswith("delta.constraints"):
        alter.add_constraint({"positive": value})
    else:
        alter.set_table_properties({name: value}, raise_if_not_exists=False)
    with pytest.raises(ConfigError, match=why):
        b.run(partitions=1)


# By key.


def by_key(b: Bench, *lines: str) -> Runner:
    return b.run(b.pipeline("exactly-once", 'mode = "upsert"', 'key = ["id"]', *lines), partitions=1)


def test_upsert_moves_a_row_to_the_partition_of_its_new_value(b: Bench) -> None:
    with by_key(b, 'partition_by = "account"') as run:
        run.deliver({0: [record(n, account="old") for n in range(6)]})
        run.deliver({0: [record(1, account="new"), record(9, account="new"), None]}, keys={0: [b"1", b"9", b"3"]})
        run.deliver({0: [record(9, account="old"), record(1, account="newest")]})
    accounts = {row["id"]: row["account"] for row in b.rows()}
    assert accounts == {0: "old", 1: "newest", 2: "old", 4: "old", 5: "old", 9: "old"}
    assert b.frame().filter(pl.col("account") == "old").height == 5, "readers leave other partitions out"
    assert b.ids() == sorted(accounts)


def test_upsert_leaves_what_others_have_added(b: Bench) -> None:
    with by_key(b) as run:
        run.deliver({0: [record(n) for n in range(4)]})
        others(b)["add column"]()
        overwrite_lake(b.kind, b.folder, b.table, b.frame().with_columns(theirs=pl.col("account") + "!"))
        run.deliver({0: [record(2, amount=0.5), record(8)]})
    assert {row["id"]: (row["amount"], row["theirs"]) for row in b.rows()} == {
        **{n: (n / 4, f"acc-{n}!") for n in (0, 1, 3)},
        2: (0.5, "acc-2!"),
        8: (2, None),
    }


def test_upsert_when_others_commit_first(b: Bench) -> None:
    with by_key(b) as run:
        for start in (0, 3):
            run.deliver({0: [record(n) for n in range(start, start + 3)]})
        work, staged = run.stage({0: [record(1, amount=0.5), None, record(7)]}, keys={0: [b"1", b"4", b"7"]})
        compact(sinks.lake_tables(b.pipeline())[0], b.name, 1 << 20)
        others(b)["delete"]()
        run.commit(work, staged)
        run.commit(work, staged)  # a replay
        assert (run.position(), run.counts()) == (9, Counts(9, 9))
    assert {row["id"]: row["amount"] for row in b.rows()} == {0: 0, 1: 0.5, 2: 0.5, 5: 1.25, 7: 1.75}


def test_a_renamed_column_is_not_written_anew(bench: Make) -> None:
    """Older files have it under its old name, and it would be null afterwards."""
    b = bench("iceberg")
    with by_key(b) as run:
        others(b)["add column"]()
        run.deliver({0: [record(0)]})
        with iceberg_table(b.folder, b.table).update_schema() as update:
            update.rename_column("theirs", "whose")
        run.deliver({0: [record(0, amount=0.5)]})  # on the version before, and by its names
        with pytest.raises(SinkError, match="column 'whose' was renamed"):
            run.deliver({0: [record(0, amount=0.75)]})
    with pytest.raises(ConfigError, match="column 'whose' was renamed"):
        by_key(b)
    with pytest.raises(SinkError, match="column 'whose' was renamed"):
        compact(sinks.lake_tables(b.pipeline())[0], b.name, 1 << 20)
    assert b.rows()[0]["amount"] == 0.5


# Types, partitions, statistics.

EVERY = (
    "a boolean, b byte, c short, d int, e long, f float, g double, h string, i binary, j date, k timestamp,"
    " l timestamp_ntz, m decimal(12,3), n array<struct<x: int, y: array<string>>>, o map<string,long>,"
    " p struct<q: double, r: struct<s: string>>"
)


def every(number: int) -> bytes:
    return json.dumps(
        {
            **{"a": True, "b": -128, "c": 32767, "d": number, "e": 2**63 - 1, "f": 0.5, "g": -0.1, "h": "x\0é𝄞" * 20},
            **{"i": "AP8=", "j": "0001-01-01", "k": "9999-12-31T23:59:59.999999Z", "l": "2026-01-31T12:00:00.000001"},
            **{"m": 123456789.125, "n": [{"x": 1, "y": ["a", None]}, None], "o": {"k": 1, "l": None}},
            "p": {"q": 1.5, "r": {"s": "deep"}},
        }
    ).encode()


def test_every_type_comes_back_as_it_was(b: Bench) -> None:
    pipeline = b.pipeline(schema=EVERY)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [every(7), b"{}", json.dumps({"n": []}).encode()]})
        assert run.counts() == Counts(3, 3), b.letters()
    full, empty, _ = b.rows()
    assert (full["b"], full["c"], full["d"], full["e"], full["f"], full["g"]) == (-128, 32767, 7, 2**63 - 1, 0.5, -0.1)
    assert (full["h"], full["i"]) == ("x\0é𝄞" * 20, b"\0\xff")
    assert (str(full["j"]), full["k"].isoformat()) == ("0001-01-01", "9999-12-31T23:59:59.999999+00:00")
    assert (full["l"].isoformat(), str(full["m"])) == ("2026-01-31T12:00:00.000001", "123456789.125")
    assert full["n"] == [{"x": 1, "y": ["a", None]}, None]
    assert full["p"] == {"q": 1.5, "r": {"s": "deep"}}
    assert {name for name in "abcdefghijklmn" if empty[name] is not None} == set()


@pytest.mark.parametrize("by", ["account", "day(at)", "_kafka_partition"])
def test_partitioning(b: Bench, by: str) -> None:
    schema = "id long not null, account string, at timestamp"
    pipeline = b.pipeline("exactly-once", f'partition_by = "{by}"', schema=schema)
    values = [
        json.dumps({"id": n, "account": f"a/{n % 2}", "at": f"2026-01-0{1 + n % 3}T23:30:00-01:00"}).encode()
        for n in range(12)
    ]
    with b.run(pipeline) as run:
        run.deliver({0: [*values, b'{"id": 12}'], 1: values})
    assert b.ids() == sorted([*range(12), *range(12), 12])
    frame = b.frame()
    assert frame.filter(pl.col("account") == "a/1").height == 12
    if b.kind == "delta" and by == "day(at)":
        days = {str(day) for day in frame["at_day"].to_list()}
        assert days == {"2026-01-02", "2026-01-03", "2026-01-04", "None"}
    assert len(data_files(b)) == {"account": 5, "day(at)": 7, "_kafka_partition": 2}[by]


def test_an_empty_text_cannot_name_a_folder(bench: Make) -> None:
    """Delta reads it as null: a value would be changed in silence."""
    b = bench("delta")
    with b.run(b.pipeline("exactly-once", 'partition_by = "account"'), partitions=1) as run:
        run.deliver({0: [json.dumps({"id": 1, "account": ""}).encode(), record(2)]})
    assert b.ids() == [2]
    assert b.letters() == [(0, 0, "refused-by-sink")]


def test_statistics_let_readers_leave_files_out_and_never_rows(bench: Make) -> None:
    b = bench("delta")
    schema = "id long, h string, at timestamp, x double"
    texts = ["", "a" * 40, "a" * 40 + "b", "\U0010ffff" * 40, "zz"]
    with b.run(b.pipeline(schema=schema), partitions=1) as run:
        for number, text in enumerate(texts):
            at = f"2026-01-01T00:00:00.{number:03d}00{number}Z"
            run.deliver({0: [json.dumps({"id": number, "h": text, "at": at, "x": number / 3}).encode()]})
    for number, text in enumerate(texts):
        found = pl.scan_delta(str(b.path)).filter(pl.col("h") == text).collect()
        assert found["id"].to_list() == [number]
        found = pl.scan_delta(str(b.path)).filter(pl.col("x") == number / 3).collect()
        assert found["id"].to_list() == [number]
    everything = DeltaTable(b.path).to_pyarrow_table()
    for row in everything.to_pylist():
        same = DeltaTable(b.path).to_pyarrow_table(filters=[("at", "=", row["at"])])
        assert same["id"].to_pylist() == [row["id"]]


# Upkeep.


def test_orphans_of_fenced_runs_are_found_and_nothing_else(b: Bench) -> None:
    crash(b, "exactly-once", "before-rows")
    pipeline = b.pipeline()
    others = b.folder / "warehouse/lake" / b.table / "data" if b.kind == "iceberg" else b.path
    (others / "part-0-theirs.parquet").write_bytes(b"not ours")
    assert list(orphans(sinks.lake_tables(pipeline), pipeline.name)) == [], "the run may still be in progress"
    with b.run(pipeline, partitions=1) as run:
        staged = run.stage({0: [record(2), b"bad", record(4)]})
        found = list(orphans(sinks.lake_tables(pipeline), pipeline.name))
        assert [(one.run, "_dead_letters" in one.path) for one in found] == [(1, False)]
        for one in found:
            one.remove()
        run.commit(*staged)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(5)]})
    assert list(orphans(sinks.lake_tables(pipeline), pipeline.name)) == []
    assert b.ids() == [0, 2, 4, 5]
    assert (others / "part-0-theirs.parquet").exists()


def test_compaction_keeps_rows_and_positions_under_a_run(b: Bench) -> None:
    pipeline = b.pipeline()
    with b.run(pipeline, partitions=2) as run:
        for number in range(6):
            run.deliver({0: [record(number), b"bad"], 1: [record(100 + number, tags=None), b"bad"]})
        work, staged = run.stage({0: [record(6)]})
        rows, _ = sinks.lake_tables(pipeline)
        done = compact(rows, pipeline.name, 1 << 20)
        assert (done.files_before, done.files_after) == (12, 1)
        run.commit(work, staged)
        run.deliver({0: [record(7)]})
        assert run.counts() == Counts(26, 14, 12)
    assert b.ids() == [*range(8), *range(100, 106)]
    with b.run(pipeline) as run:
        assert run.position() == 14


# Many commits.


def test_a_commit_leaves_alone_what_came_before(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyiceberg copies all snapshots whenever it is asked for metadata: with a thousand, for seconds."""
    b = bench("iceberg")
    copied = []

    def counted(base: TableMetadata, *more: Any, **named: Any) -> TableMetadata:
        copied.append(len(base.snapshots))
        return update_table_metadata(base, *more, **named)

    with b.run(partitions=1) as run:
        for number in range(3):
            run.deliver({0: [record(number)]})
        monkeypatch.setattr("pyiceberg.table.update_table_metadata", counted)
        run.deliver({0: [record(3)]})
    assert copied == [1, 1]
    table = iceberg_table(b.folder, b.table)
    assert len(table.metadata.snapshots) == 6, "a fence, an adoption and four batches"
    newest = table.current_snapshot()
    assert newest
    assert deepcopy(newest) is newest


def test_manifests_are_merged(bench: Make) -> None:
    b = bench("iceberg")
    with b.run(partitions=1) as run:
        with iceberg_table(b.folder, b.table).transaction() as transaction:
            transaction.set_properties({"commit.manifest.min-count-to-merge": "5"})
        for number in range(13):
            run.deliver({0: [record(number)]})
        assert run.position() == 13
    newest = iceberg_table(b.folder, b.table).current_snapshot()
    assert newest
    assert len(newest.manifests(iceberg_table(b.folder, b.table).io)) <= 5
    assert b.ids() == list(range(13))


# Redrive.


def buried(b: Bench) -> None:
    with b.run(partitions=1) as run:
        run.deliver({0: [record(0), record(1, extra=1), b"{", record(3, extra=2)]})
        assert run.counts() == Counts(4, 1, 3)


def no_spark() -> Any:
    raise AssertionError("no Spark is needed")


def wider(b: Bench) -> Any:
    return b.pipeline(more="").model_copy(
        update={"decode": b.pipeline().decode.model_copy(update={"unknown_fields": "ignore"})}
    )


@pytest.mark.parametrize("dies_after", [0, 1, 2, 3])
def test_an_interrupted_redrive_is_settled(b: Bench, monkeypatch: pytest.MonkeyPatch, dies_after: int) -> None:
    """In three commits: it may end before or after each of them, and nothing is doubled or lost."""
    buried(b)
    done = 0
    real = driver.committed

    def counted(*arguments: Any, **more: Any) -> None:
        nonlocal done
        if done == dies_after:
            raise KeyboardInterrupt
        done += 1
        real(*arguments, **more)

    monkeypatch.setattr(redriving, "committed", counted)
    if dies_after < 3:
        with pytest.raises(KeyboardInterrupt):
            redrive(wider(b), Selection(), no_spark)
    monkeypatch.undo()
    again = redrive(wider(b), Selection(), no_spark)
    assert again == (Redriven(still_dead=1) if dies_after == 2 else Redriven(written=2, still_dead=1))
    assert redrive(wider(b), Selection(), no_spark) == Redriven(still_dead=1)
    assert b.ids() == [0, 1, 3]
    assert [offset for _, offset, _ in b.letters()] == [2]
    with b.run(partitions=1) as run:
        assert run.counts() == Counts(4, 3, 1)
        run.deliver({0: [record(4)]})
    assert b.ids() == [0, 1, 3, 4]
