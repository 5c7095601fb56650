"""What is particular to lakes: crashes between file and commit, other writers at work, lost answers, what is refused.

No Kafka and no Spark: see ``fix_sinks``. What must survive a kill -9 runs in a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable, TableFeatures
from deltalake import Field as DeltaField
from deltalake import Schema as DeltaSchema
from deltalake.schema import PrimitiveType
from deltalake.table import TableAlterer
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException, RESTError, ServiceUnavailableError
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import update_table_metadata
from pyiceberg.types import StringType
from tests import interleaving
from tests.fix_sinks import Bench, iceberg_table, overwrite_lake

from avow import sinks
from avow.cli import main
from avow.engines import redrive as redriving_engine
from avow.engines.redrive import Redriven, redrive
from avow.engines.task import REFUSED
from avow.errors import ConfigError, SinkError, Superseded
from avow.guarantee import Act
from avow.kafka.batches import COLUMNS
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.schema import parse
from avow.sinks.base import CommittingSink, Selection
from avow.sinks.delta import log
from avow.sinks.delta import table as delta_table
from avow.sinks.iceberg import table as iceberg_format
from avow.sinks.iceberg.table import IcebergLakeTable
from avow.sinks.lake import driver, ledger_snapshot
from avow.sinks.lake import redrive as redriving
from avow.sinks.lake.files import location_of
from avow.sinks.lake.maintenance import compact, orphans
from avow.sinks.lake.plugin import lake_tables
from avow.sinks.lake.table import CommitConflict
from avow.testing import bench as bench_module
from avow.testing.sinks import EVERY, Runner, every, record

KINDS = ["delta", "iceberg"]
Make = Callable[[str], Bench]
GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]


@pytest.fixture(params=KINDS)
def b(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return bench(request.param)


def data_files(b: Bench) -> set[Path]:
    return set(b.folder.rglob("avow-*.parquet"))


# Others at work on the table. Our positions survive, and nothing is doubled or lost.


def clean_up(path: Path) -> None:
    """So that the log lets go of all versions but the newest."""
    table = DeltaTable(path)
    for told in ({"delta.logRetentionDuration": "interval 1 hours"}, {"their.own": "x"}):
        table.alter.set_table_properties(told, raise_if_not_exists=False)
    table.create_checkpoint()
    for file in path.glob("_delta_log/*"):
        os.utime(file, (time.time() - 7 * 86_400,) * 2)
    table.cleanup_metadata()
    assert [int(file.stem) for file in path.glob("_delta_log/*.json")] == [table.version()]


def others(b: Bench) -> dict[str, Callable[[], object]]:
    if b.kind == "delta":
        return {
            "optimize": lambda: DeltaTable(b.path).optimize.compact(),
            "delete": lambda: DeltaTable(b.path).delete("id = 3"),
            "add column": lambda: DeltaTable(b.path).alter.add_columns(DeltaField("theirs", PrimitiveType("string"))),
            "set property": lambda: DeltaTable(b.path).alter.set_table_properties(
                {"their.own": "x"}, raise_if_not_exists=False
            ),
            "clean-up": lambda: clean_up(b.path),
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


def test_a_change_of_no_row_on_an_old_version(b: Bench) -> None:
    """The library commits nothing then, and somebody else's commit is not taken for ours."""
    with by_key(b) as run:
        run.deliver({0: [record(0)]})
        work, staged = run.stage({0: [None]}, keys={0: [b"77"]})
        others(b)["set property"]()
        run.commit(work, staged)
        assert (run.position(), run.counts()) == (2, Counts(2, 2))
    assert b.ids() == [0]


def test_the_ledger_of_a_delta_table_is_read_in_one_pass(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint, on one and behind one, it is what the driver keeps and what the library reads."""
    b = bench("delta")
    with b.run(partitions=2) as run:
        for number in range(42):
            run.deliver({0: [record(number), b"bad"], 1: [record(number)]})
            table, _ = lake_tables(run.pipeline)
            table.load()
            assert table.ledger().entries() == run.entries()
    folder, newest = location_of(str(b.path), {}).under("_delta_log"), DeltaTable(b.path)
    assert len(list(b.path.glob("_delta_log/*.checkpoint.parquet"))) == 2
    told = log.transactions(folder, newest.version())
    assert told is not None
    assert len(told) == 3 + 2 * 7, "the run, the newest run, the version, and seven of each partition"
    assert told == {app: newest.transaction_version(app) for app in told}
    assert log.transactions(folder, 3) is None, "the newest checkpoint is a later one"
    with b.run(member=[0]) as member:
        table.load()
        assert table.ledger().owners() == {TopicPartition("records", 0): member.number}
    monkeypatch.setattr(log, "transactions", lambda *_: None)
    other, _ = lake_tables(run.pipeline)
    other.load()
    assert other.ledger() == table.ledger(), "fences are among what the library is asked for"


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
    assert len(b.dead_letters()) == 1


@pytest.mark.parametrize("delivers", [False, True])
@pytest.mark.parametrize("before", ["letters", "rows"])
def test_a_member_that_wakes_up_when_another_has_its_partition(
    b: Bench, monkeypatch: pytest.MonkeyPatch, before: str, delivers: bool
) -> None:
    """It stood still before a commit. The other took back what it had buried, and may have delivered the rest as well.
    Offset 2 is good for that one, as with another schema."""
    zombie, real = b.run(member=[0, 1]), driver._apply
    zombie.deliver({1: [record(10)]})
    work, staged = zombie.stage({0: [record(0), b"bad", b"bad"], 1: [b"bad"]})
    others: list[Runner] = []

    def woken(table: Any, *more: Any) -> None:
        at = "letters" if table.shown.endswith("_dead_letters") else "rows"
        if at == before and not others:
            monkeypatch.undo()
            others.append(b.run(member=[0]))
            if delivers:
                others[0].deliver({0: [record(0), b"bad", record(2)]})
        real(table, *more)

    monkeypatch.setattr(driver, "_apply", woken)
    with pytest.raises(Superseded):
        zombie.commit(work, staged)
    (other,) = others
    if not delivers:
        other.deliver({0: [record(0), b"bad", record(2)]})
    with b.run(member=[1]) as last:
        last.deliver({1: [b"bad"]})
        other.deliver({0: [record(3)]})  # beside it
        assert (other.position(0), other.position(1), other.counts()) == (4, 2, Counts(6, 4, 2))
    assert b.ids() == [0, 2, 3, 10]
    assert [letter[:2] for letter in b.dead_letters()] == [(0, 1), (1, 1)]


def test_a_first_position_by_two_members(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both were given the partition before it had a position. The older one writes that first, and buries."""
    (older, newer), where = [b.run(member=[]) for _ in range(2)], TopicPartition("records", 0)
    for run in (older, newer):
        run.number = run.store.open_run([where])
    older.store.adopt({where: Entry(0, "id", older.number)})
    work, staged = older.stage({0: [record(0), b"bad"]})
    real = driver._apply

    def late(table: Any, *more: Any) -> None:
        if not table.shown.endswith("_dead_letters"):
            monkeypatch.undo()
            newer.store.adopt({where: Entry(0, "id", newer.number)})
        real(table, *more)

    monkeypatch.setattr(driver, "_apply", late)
    with pytest.raises(Superseded):
        older.commit(work, staged)
    assert b.dead_letters() == []
    newer.deliver({0: [record(0), b"bad"]})
    assert (b.ids(), len(b.dead_letters())) == ([0], 1)


def test_a_partition_is_adopted_while_another_member_commits(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Delta a new partition is registered by a commit of its own. Whatever others commit right behind it stays: in
    the table of rows, and in that of dead letters with its fences."""
    b, real = bench("delta"), TableAlterer.set_table_properties
    owner = b.run(member=[0])
    owner.deliver({0: [record(0), b"bad"]})
    registered: list[int] = []

    def overtaken(*arguments: Any, **more: Any) -> None:
        real(*arguments, **more)
        registered.append(len(registered))
        owner.deliver({0: [record(2 * len(registered)), b"bad"]})

    monkeypatch.setattr(TableAlterer, "set_table_properties", overtaken)
    adopting = b.run(member=[1])
    monkeypatch.undo()
    assert len(registered) == 2, "in both tables"
    owner.deliver({0: [record(6), b"bad"]})
    adopting.deliver({1: [record(10), b"bad"]})
    assert (owner.position(0), adopting.position(1), adopting.counts()) == (8, 2, Counts(10, 5, 5))
    assert b.ids() == [0, 2, 4, 6, 10]
    assert [letter[:2] for letter in b.dead_letters()] == [(0, 1), (0, 3), (0, 5), (0, 7), (1, 1)]


def test_a_table_of_an_older_avow(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one fence for all partitions, and no other."""
    if b.kind == "delta":
        numbers = delta_table.DeltaLakeTable._as_numbers
        new = ("/newest", "/owner")
        told = lambda *args: {app: n for app, n in numbers(*args).items() if not app.endswith(new)}  # noqa: E731
        monkeypatch.setattr(delta_table.DeltaLakeTable, "_as_numbers", told)
    else:
        old, to_json = ("run", "redrives", "held"), ledger_snapshot.to_json
        said = lambda book: json.dumps({name: json.loads(to_json(book))[name] for name in old})  # noqa: E731
        monkeypatch.setattr(ledger_snapshot, "to_json", said)
    with b.run() as before:
        before.deliver({0: [record(0), b"bad"], 1: [record(10)]})
        monkeypatch.undo()
        with b.run(member=[0]) as member:
            assert (member.number, member.position(), member.counts()) == (2, 2, Counts(3, 2, 1))
            member.deliver({0: [record(2)]})
            before.deliver({1: [b"bad"]})  # nobody has taken this partition from it
            with pytest.raises(Superseded, match="superseded by run 2"):
                before.deliver({0: [record(3)]})
    assert b.ids() == [0, 2, 10]
    assert [letter[:2] for letter in b.dead_letters()] == [(0, 1), (1, 1)]


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
        run.store.commit(act, staged, run.number, 0, last=act is acts[-1], on_committed=hook)


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


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("guarantee", ["at-most-once", "exactly-once"])
def test_a_record_whose_last_try_was_committed_is_not_set_aside(
    b: Bench, monkeypatch: pytest.MonkeyPatch, guarantee: str, late: bool
) -> None:
    """Its answer is lost, and the store is away for a moment. Then the record is set aside, in the same run: a row is
    no dead letter as well, which a redrive would double. ``late``: the store takes the commit when it may no longer."""
    strict, real = b.pipeline(guarantee), driver._apply
    lenient = strict.model_copy(update={"decode": wider(b).decode})
    older, _ = lake_tables(strict)
    held: list[Any] = []

    def away() -> bool:
        raise SinkError("503 Slow Down")

    def lose(table: Any, change: driver.TableChange, *more: Any) -> None:
        if change.files:
            held[:] = [change, *more]
            older.load()
            monkeypatch.setattr(table, "load", away)
        if not (late and change.files):
            real(table, change, *more)
        if change.files:
            raise SinkError("timed out")

    def arrive(table: Any, *more: Any) -> None:
        if late and table.shown.endswith("_dead_letters"):
            with suppress(CommitConflict):
                real(older, *held)
        real(table, *more)

    with b.run(strict, partitions=1) as run:
        tried, aside = (run.stage({0: [value]}) for value in (record(0), record(0, extra=1)))
        monkeypatch.setattr(driver, "_apply", lose)
        with pytest.raises(SinkError):
            run.commit(*tried)
        monkeypatch.undo()
        monkeypatch.setattr(driver, "_apply", arrive)
        run.commit(*aside)
        monkeypatch.undo()
        run.deliver({0: [record(1)]})
        assert run.position() == 2
    letters = b.dead_letters()
    redrive(lenient, Selection(), no_spark)
    lost = late and guarantee == "at-most-once"
    assert (b.ids(), len(letters)) == ([1] if lost else [0, 1], late and not lost)


def test_a_repeated_key_is_set_aside(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run in which dedupe has left it out, and could not commit: a dead letter, counted once."""
    pipeline, real = b.pipeline("exactly-once", 'mode = "dedupe"', 'key = ["id"]'), driver._apply

    def away(table: Any, change: driver.TableChange, *more: Any) -> None:
        if not table.shown.endswith("_dead_letters"):
            raise SinkError("503 Slow Down")
        real(table, change, *more)

    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(0)]})
        tried, aside = (run.stage({0: [value]}) for value in (record(0), b"bad"))
        monkeypatch.setattr(driver, "_apply", away)
        with pytest.raises(SinkError):
            run.commit(*tried)
        monkeypatch.undo()
        run.commit(*aside)
        assert run.counts() == Counts(2, 1, 1)


class ClientError(Exception):
    """Like botocore's: with no root but Python's own."""


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "not taken"])
@pytest.mark.parametrize("error", [CommitStateUnknownException, ServiceUnavailableError, RESTError, ClientError])
def test_a_catalog_that_gives_no_sound_answer(
    bench: Make, monkeypatch: pytest.MonkeyPatch, error: Callable[[str], Exception], taken: bool
) -> None:
    """As REST, Glue and others say it: each has errors of its own. Whether it was taken, the table says."""
    b = bench("iceberg")
    real = SqlCatalog.commit_table

    def failing(*given: Any) -> Any:
        if taken:
            real(*given)
        raise error("no sound answer")

    def away(*_: Any) -> Any:
        raise error("away")

    outcome: AbstractContextManager[Any] = nullcontext() if taken else pytest.raises(SinkError, match="no sound answer")
    with b.run(partitions=1) as run:
        work, staged = run.stage({0: [record(0)]})
        with monkeypatch.context() as patched, outcome:
            patched.setattr(SqlCatalog, "commit_table", failing)
            run.commit(work, staged)
        run.commit(work, staged)
        with monkeypatch.context() as patched:
            patched.setattr(SqlCatalog, "load_table", away)
            with pytest.raises(SinkError, match="away"):
                run.store.ledger_snapshot()
        assert (run.position(), run.counts()) == (1, Counts(1, 1))
    assert b.ids() == [0]


def test_a_catalog_that_is_away_may_come_back(bench: Make) -> None:
    b = bench("iceberg")
    rest = '{ type = "rest", uri = "http://127.0.0.1:1" }'
    for catalog, kind in ((rest, SinkError), ('{ type = "nope", uri = "x" }', ConfigError)):
        b.sink = lambda *_, catalog=catalog: f'kind = "iceberg"\ntable = "a.t"\ncatalog = {catalog}'  # type: ignore[method-assign]
        with sinks.driver_sink(b.pipeline()) as store, pytest.raises(kind):
            store.prepare()


# Crashes.

CRASHING = """
import os, signal, sys
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from avow.plan import load_checked
from avow.sinks.delta import log
from avow.sinks.lake import driver
from avow.testing.sinks import Runner, record
point = sys.argv[2]
run = Runner(load_checked(Path(sys.argv[1]), {}), 1)
run.deliver({0: [record(0), b"bad"]})
work, staged = run.stage({0: [record(2), b"bad", record(4)]})
real = driver._apply
def commit(table, change, name, sink):
    which = "letters" if table.shown.endswith("_dead_letters") else "rows"
    if point == f"before-{which}":
        os.kill(os.getpid(), signal.SIGKILL)
    real(table, change, name, sink)
    if point == f"after-{which}":
        os.kill(os.getpid(), signal.SIGKILL)
driver._apply = commit
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
        assert len(b.dead_letters()) == (2 if claimed else 1), "letters of a claim that never came are taken back"
        if not claimed:
            run.deliver({0: [record(2), b"bad", record(4)]})
        assert run.counts() == Counts(5, 3, 2)
    assert b.ids() == [0, 2, 4]
    assert [offset for _, offset, _ in b.dead_letters()] == [1, 3]


def test_records_that_are_good_by_then_are_not_dead_as_well(b: Bench) -> None:
    """Buried, not claimed, and good when it comes again (another schema): a row, and no letter."""
    crash(b, "exactly-once", "after-letters")
    with b.run(partitions=1) as run:
        run.deliver({0: [record(2), record(3), record(4)]})
        assert run.counts() == Counts(5, 4, 1)
    assert b.ids() == [0, 2, 3, 4]
    assert [offset for _, offset, _ in b.dead_letters()] == [1]


LOOPING = """
import sys, time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from avow.errors import AvowError
from avow.plan import load_checked
from avow.testing.sinks import Runner, record
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
    chance = random.Random(11)
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
        assert children[0].wait(90) == 0
    finally:
        for child in children:
            child.kill()
            child.wait()
    with b.run(partitions=2) as run:
        assert run.counts() == Counts(240, 216, 24)
    expected = sorted(2 * [n for n in range(120) if n % 10])
    assert b.ids() == expected
    assert len(b.dead_letters()) == len(set(b.dead_letters())) == 24


# What is refused.


def test_positions_that_are_missing_where_rows_are(b: Bench) -> None:
    with b.run(partitions=1) as run:
        run.deliver({0: [record(0), record(1)]})
    where = TopicPartition("records", 0)

    def begin(position: int, start: object = "latest") -> Runner:
        other = Bench(b.kind, b.folder)
        other.table = b.table
        pipeline = other.pipeline()
        source = pipeline.source.model_copy(update={"start": start})
        run = other.run(pipeline.model_copy(update={"source": source}), partitions=0)
        run.store.adopt({where: Entry(position, "id", run.number)})
        return run

    for position, start in [(0, "earliest"), (1, {"records": {0: 1}}), (100, "latest"), (100, {"records": {1: 100}})]:
        with pytest.raises(ConfigError, match=f"up to offset 1, but no position .* start at offset {position}"):
            begin(position, start)
    begin(100, {"records": {0: 100}}).deliver({0: [record(100)]})
    begin(101).deliver({0: [record(101)]})
    assert b.ids() == [0, 1, 100, 101]


def go_back(b: Bench, suffix: str = "") -> None:
    """Somebody takes back the last commit to a table."""
    if b.kind == "delta":
        table = DeltaTable(f"{b.path}{suffix}")
        table.restore(table.version() - 1)
    else:
        iceberg = iceberg_table(b.folder, f"{b.table}{suffix}")
        newest = iceberg.current_snapshot()
        assert newest
        assert newest.parent_snapshot_id
        iceberg.manage_snapshots().set_current_snapshot(newest.parent_snapshot_id).commit()


@pytest.mark.parametrize("suffix", ["", "_dead_letters"])
def test_a_table_that_went_back_is_refused(b: Bench, suffix: str) -> None:
    with b.run(partitions=1) as run:
        for number in range(2):
            run.deliver({0: [record(number), b"bad"]})
    go_back(b, suffix)
    for again in (lambda: b.run(partitions=1), lambda: redrive(wider(b), Selection(), no_spark)):
        with pytest.raises(ConfigError, match=f"{b.table}{suffix} was rolled back behind its positions"):
            again()


@pytest.mark.parametrize(("suffix", "looked"), [("", False), ("", True), ("_dead_letters", False)])
def test_a_table_that_goes_back_under_a_run_is_refused(b: Bench, suffix: str, looked: bool) -> None:
    with b.run(partitions=1) as run:
        for number in range(2):
            run.deliver({0: [record(number), b"bad"]})
        staged = run.stage({0: [record(2), b"bad"]})
        go_back(b, suffix)
        if looked:
            run.store.ledger_snapshot()  # the version that has gone back is at hand, and no commit on it is refused
        with pytest.raises(ConfigError, match=f"{b.table}{suffix} was rolled back behind its positions"):
            run.commit(*staged)
    with pytest.raises(ConfigError, match=f"{b.table}{suffix} was rolled back behind its positions"):
        b.run(partitions=1)


def forget(b: Bench) -> None:
    """The table's log lets go of everything before its newest version."""
    if b.kind == "delta":
        clean_up(b.path)
    else:
        iceberg_table(b.folder, b.table).delete("id = 0")
        others(b)["expire"]()


def test_a_table_that_went_back_and_whose_log_is_gone_is_refused(b: Bench) -> None:
    with b.run(partitions=1) as run:
        run.deliver({0: [record(0), record(1)]})
        run.deliver({0: [record(2)]})
        staged = run.stage({0: [record(3)]})
        go_back(b)
        forget(b)
        gone = "nor a dead letter of the last claimed record of records/0, offset 2, and its log"
        with pytest.raises(ConfigError, match=gone):
            run.commit(*staged)
    with pytest.raises(ConfigError, match=gone):
        b.run(partitions=1)
    source = b.pipeline().source.model_copy(update={"start": {"records": {0: 3}}})
    confirmed = b.pipeline().model_copy(update={"source": source})
    with b.run(confirmed, partitions=1) as run:
        run.deliver({0: [record(3)]})
    with b.run(partitions=1) as run:
        assert run.position() == 4


@pytest.mark.parametrize("last", [record(2), b"bad"], ids=["row", "dead letter"])
def test_a_table_whose_log_is_gone_is_taken_where_its_last_record_is_there(b: Bench, last: bytes) -> None:
    with b.run(partitions=1) as run:
        run.deliver({0: [record(0), record(1)]})
        run.deliver({0: [last]})
    forget(b)
    with b.run(partitions=1) as run:
        assert run.position() == 3


def test_dead_letters_that_are_gone(b: Bench) -> None:
    with b.run(partitions=1) as run:
        run.deliver({0: [record(0), b"bad"]})
    if b.kind == "delta":
        shutil.rmtree(f"{b.path}_dead_letters")
    else:
        table = iceberg_table(b.folder, f"{b.table}_dead_letters")
        table.catalog.drop_table(table.name())
    with pytest.raises(ConfigError, match="_dead_letters does not exist, so 1 dead letters that table"):
        b.run(partitions=1)
    assert lake_tables(b.pipeline())[1].create(driver.DEAD_LETTER_LAYOUT)
    with pytest.raises(ConfigError, match="_dead_letters was recreated, so 1 dead"):
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
    assert "column 'id' has type int64 instead of string" in text
    assert "column 'account' is NOT NULL, but the pipeline's column is nullable" in text
    assert "column 'note' (string) is missing" in text


def test_parts_that_must_have_a_value(b: Bench) -> None:
    """A file with a null there would break what the table says of itself."""
    told = "id long not null, tags array<string>, kept map<string, long>, deep struct<x: int, y: int not null>"
    with b.run(b.pipeline(schema=told), partitions=1):
        pass
    table, _ = lake_tables(b.pipeline(schema=told))
    table.load()
    strict = [
        pa.field("tags", pa.list_(pa.field("element", pa.string(), nullable=False))),
        pa.field("kept", pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))),
        pa.field("deep", pa.struct([pa.field(name, pa.int32(), nullable=False) for name in "xy"])),
    ]
    theirs = table.schema()
    for one in strict:
        theirs = theirs.set(theirs.get_field_index(one.name), one)
    other = Bench(b.kind, b.folder)
    if b.kind == "delta":
        DeltaTable.create(other.path, DeltaSchema.from_arrow(theirs))
    else:
        iceberg_table(b.folder, b.table).catalog.create_table(f"lake.{other.table}", theirs)
    with pytest.raises(ConfigError) as caught:
        other.run(other.pipeline(schema=told), partitions=1)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    wrong = "is NOT NULL, but the pipeline's column is nullable"
    assert lines == [f"column '{path}' {wrong}" for path in ("tags.element", "kept.value", "deep.x")]


def test_added_columns_follow_the_declared_policy(b: Bench) -> None:
    with b.run(partitions=1) as run:
        run.deliver({0: [record(0)]})
    wider = "id long not null, account string not null, amount double, tags array<string>, note string"
    with pytest.raises(ConfigError, match="column 'note' \\(string\\) is missing") as caught:
        b.run(b.pipeline(schema=wider), partitions=1)
    assert "sink.evolve" in caught.value.advice
    required = b.pipeline("exactly-once", 'evolve = "add"', schema=f"{wider} not null")
    with pytest.raises(ConfigError, match=r"column 'note' .* is missing, and cannot be added as NOT NULL") as caught:
        b.run(required, partitions=1)
    assert "set sink.evolve" not in caught.value.advice, "it is set, and cannot add a column that must have a value"
    with b.run(b.pipeline("exactly-once", 'evolve = "add"', schema=wider), partitions=1) as run:
        run.deliver({0: [record(1, note="new")]})
    assert [row["note"] for row in b.rows()] == [None, "new"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("delta.setTransactionRetentionDuration", "interval 7 days", "would expire avow's positions"),
        ("delta.constraints.positive", "id > 0", "has the constraint"),
        ("delta.enableChangeDataFeed", "true", "hangeDataFeed"),
        ("delta.checkpointPolicy", "v2", "needs the table feature v2Checkpoint"),
    ],
)
def test_what_delta_could_not_keep_is_refused_by_name(bench: Make, name: str, value: str, why: str) -> None:
    b = bench("delta")
    with b.run(partitions=1) as run:
        run.deliver({0: [record(1)]})
        staged = run.stage({0: [record(2)]})
        alter = DeltaTable(b.path).alter
        if name.startswith("delta.constraints"):
            alter.add_constraint({"positive": value})
        elif name == "delta.checkpointPolicy":
            alter.add_feature(TableFeatures.V2Checkpoint, allow_protocol_versions_increase=True)
        else:
            alter.set_table_properties({name: value}, raise_if_not_exists=False)
        with pytest.raises(ConfigError, match=why):
            run.commit(*staged)
    with pytest.raises(ConfigError, match=why):
        b.run(partitions=1)
    assert len(DeltaTable(b.path).file_uris()) == 1


@pytest.mark.parametrize("mode", ["append", "dedupe", "upsert"])
def test_another_partitioning_is_refused_under_a_run(bench: Make, mode: str) -> None:
    """Each file says by which partitioning its rows were put, and readers believe it."""
    b = bench("iceberg")
    lines = [f'mode = "{mode}"', *(['key = ["id"]'] if mode != "append" else [])]
    with b.run(b.pipeline("exactly-once", *lines), partitions=1) as run:
        run.deliver({0: [record(0)]})
        with iceberg_table(b.folder, b.table).update_spec() as spec:
            spec.add_identity("account")
        run.deliver({0: [record(1)]})  # on the version before, and put as that one says
        with pytest.raises(ConfigError, match="it is partitioned by identity:account, but"):
            run.deliver({0: [record(2)]})
    assert b.ids() == [0, 1]
    assert iceberg_table(b.folder, b.table).scan("account = 'acc-1'").to_arrow()["id"].to_pylist() == [1]


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
        compact(lake_tables(b.pipeline())[0], b.name, 1 << 20)
        others(b)["delete"]()
        run.commit(work, staged)
        run.commit(work, staged)  # a replay
        assert (run.position(), run.counts()) == (9, Counts(9, 9))
    assert {row["id"]: row["amount"] for row in b.rows()} == {0: 0, 1: 0.5, 2: 0.5, 5: 1.25, 7: 1.75}


@pytest.mark.parametrize("mode", ["upsert", "dedupe"])
def test_columns_that_were_renamed_are_the_same_columns(bench: Make, mode: str) -> None:
    """Older files have them under other names, and other columns under theirs. What is written anew keeps them."""
    b = bench("iceberg")
    lines = [f'mode = "{mode}"', 'key = ["number"]']
    old = "id long not null, spare string, deep struct<x: int, y: array<struct<z: string>>>, kept map<string, long>"
    new = "number long not null, id string, deep struct<w: int, y: array<struct<v: string>>>, kept map<string, long>"
    deep, kept = {"x": 1, "y": [{"z": "a"}, None]}, {"k": 1, "l": None}
    values = [{"id": n, "spare": f"s{n}", "deep": deep if n else None, "kept": kept if n else None} for n in range(3)]
    pipeline = b.pipeline("exactly-once", *lines[:1], 'key = ["id"]', schema=old)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [json.dumps(value).encode() for value in values]})
    with iceberg_table(b.folder, b.table).update_schema() as update:
        for name, other in (("id", "number"), ("deep.x", "w"), ("deep.y.element.z", "v")):
            update.rename_column(name, other)
    with iceberg_table(b.folder, b.table).update_schema() as update:
        update.rename_column("spare", "id")
    again = [{"number": n, "id": "again"} for n in (1, 5)]
    pipeline = b.pipeline("exactly-once", *lines, schema=new)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [json.dumps(value).encode() for value in again]})
        compact(lake_tables(pipeline)[0], b.name, 1 << 20)
        run.deliver({0: [json.dumps({"number": 0, "id": "s0"}).encode()]})
    there = {row["number"]: row for row in b.rows()}
    texts = {0: "s0", 1: "again" if mode == "upsert" else "s1", 2: "s2", 5: "again"}
    assert {number: row["id"] for number, row in there.items()} == texts
    assert b.frame().height == 4
    assert there[2]["deep"] == {"w": 1, "y": [{"v": "a"}, None]}
    assert there[2]["kept"] == kept
    assert (there[0]["deep"], there[0]["kept"]) == (None, None)


@pytest.mark.parametrize("mode", ["upsert", "dedupe"])
def test_files_that_another_writer_has_named_in_its_way(bench: Make, mode: str) -> None:
    """As Spark's does after a compaction: file:/ and not file:///."""
    b = bench("iceberg")
    pipeline = b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["id"]')
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(0), record(1)]})
        table = iceberg_table(b.folder, b.table)
        with table.transaction() as transaction, transaction.update_snapshot().overwrite() as exchange:
            for task in list(table.scan().plan_files()):
                exchange.delete_data_file(task.file)
                theirs = Path(f"{task.file.file_path.removeprefix('file://')}.theirs.parquet")
                theirs.write_bytes(Path(task.file.file_path.removeprefix("file://")).read_bytes())
                other = deepcopy(task.file)
                other[1] = f"file:{theirs}"
                exchange.append_data_file(other)
        run.deliver({0: [record(1, amount=0.5), record(2)]})
    assert {row["id"]: row["amount"] for row in b.rows()} == {0: 0, 1: 0.5 if mode == "upsert" else 0.25, 2: 0.5}
    with sinks.audit_reader(pipeline) as reading:
        assert sum(reading.row_counts().values()) == 3


# Types, partitions, statistics.


def test_every_type_comes_back_as_it_was(b: Bench) -> None:
    pipeline = b.pipeline(schema=EVERY)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [every(7), b"{}", json.dumps({"n": []}).encode()]})
        assert run.counts() == Counts(3, 3), b.dead_letters()
    with b.run(pipeline, partitions=1):
        pass  # what was made is taken again
    full, empty, _ = b.rows()
    assert (full["b"], full["c"], full["d"], full["e"], full["f"], full["g"]) == (-128, 32767, 7, 2**63 - 1, 0.5, -0.1)
    assert (full["h"], full["i"]) == ("x\0é𝄞" * 20, b"\0\xff")
    assert (str(full["j"]), full["k"].isoformat()) == ("0001-01-01", "9999-12-31T23:59:59.999999+00:00")
    assert (full["l"].isoformat(), str(full["m"])) == ("2026-01-31T12:00:00.000001", "123456789.125")
    assert full["n"] == [{"x": 1, "y": ["a", None]}, None]
    assert full["p"] == {"q": 1.5, "r": {"s": "deep"}}
    assert {name for name in "abcdefghijklmn" if empty[name] is not None} == set()


def find(b: Bench, condition: pc.Expression, plain: str) -> list[int]:
    """The offsets of the rows that the format's own Python library gives for a filter."""
    if b.kind == "delta":
        found = DeltaTable(b.path).to_pyarrow_table(filters=condition)
    else:
        found = iceberg_table(b.folder, b.table).scan(plain).to_arrow()
    return sorted(found["_kafka_offset"].to_pylist())


def test_filters_of_others_find_values_of_every_type(b: Bench) -> None:
    """They leave out files by what the table says of these."""
    with b.run(b.pipeline(schema=EVERY), partitions=1) as run:
        run.deliver({0: [every(7), b"{}"]})
        run.deliver({0: [b"{}"]})  # nothing but nulls
        run.deliver({0: [every(8)]})
    names = [name for name in "abcdefghijklm" if b.kind == "delta" or name not in "bcm"]
    row = b.frame().filter(pl.col("_kafka_offset") == 0).to_arrow()
    for name in names:
        spelled = {"a": "true", "i": "X'00FF'"}.get(name, f"'{row[name][0]}'" if name in "hjkl" else str(row[name][0]))
        wanted = [0] if name == "d" else [0, 3]
        if b.kind == "delta" or name != "i":  # pyiceberg's filters have no bytes
            spelled = spelled.replace(" ", "T").replace("Z'", "+00:00'") if name in "kl" else spelled
            assert find(b, pc.field(name) == row[name][0], f"{name} = {spelled}") == wanted, name
        assert find(b, pc.field(name).is_null(), f"{name} IS NULL") == [1, 2], name
        assert find(b, pc.field(name).is_valid(), f"{name} IS NOT NULL") == [0, 3], name
    if b.kind == "delta":
        for name in "nop":
            assert find(b, pc.field(name).is_null(), "") == [1, 2], name
            assert find(b, pc.field(name).is_valid(), "") == [0, 3], name


def wild(rows: pa.RecordBatch) -> pa.RecordBatch:
    """A transform that makes numbers which no JSON has."""
    numbers = [math.nan, math.inf, -math.inf, -0.0, 1.5]
    made = pa.array([numbers[id_ % 5] for id_ in rows["id"].to_pylist()], pa.float64())
    return rows.set_column(rows.schema.get_field_index("amount"), "amount", made)


@pytest.mark.parametrize("mode", ["append", "dedupe", "upsert"])
def test_numbers_that_are_not_finite(b: Bench, mode: str) -> None:
    """Behind a transform. NaN is one key, and no filter on another column misses its row."""
    schema = "id long not null, account string not null, amount double not null, ok boolean"
    lines = [f'mode = "{mode}"', *(['key = ["amount"]'] if mode != "append" else [])]
    more = '[transform]\npython = "tests.integration.test_lake:wild"'
    pipeline = b.pipeline("exactly-once", *lines, schema=schema, more=more)
    with b.run(pipeline, partitions=1) as run:
        for _ in range(3):
            run.deliver({0: [record(n, ok=n > 1) for n in range(5)]})
    each = 3 if mode == "append" else 1
    assert len(b.rows()) == 5 * each
    assert len(find(b, pc.field("ok"), "ok = true")) == 3 * each
    if (b.kind, mode) == ("delta", "upsert"):
        return  # a MERGE's files and their statistics are the library's own
    for number in (1.5, 0.0):
        assert len(find(b, pc.field("amount") == number, f"amount = {number}")) == each, number
    assert len(find(b, pc.field("amount") > 1e300, f"amount > 1{300 * '0'}.0")) == each


@pytest.mark.parametrize("text", ["x" * 5_000, "\U0010ffff" * 40, "\U0010ffff" * 2_000], ids=["x", "short", "long"])
def test_texts_of_which_parquet_says_nothing(b: Bench, text: str) -> None:
    pipeline = b.pipeline("exactly-once", 'mode = "dedupe"', 'key = ["account"]')
    with b.run(pipeline, partitions=1) as run:
        for number in range(2):
            run.deliver({0: [record(number, account=text)]})
        assert run.counts() == Counts(2, 1, 0, 1)
    assert find(b, pc.field("account") == text, f"account = '{text}'") == [0]
    assert find(b, pc.field("id") == 0, "id = 0") == [0]


def test_a_key_of_which_the_log_says_nothing(bench: Make) -> None:
    """What an OPTIMIZE of the library writes has bounds that it cannot read itself: decimals of many digits."""
    b = bench("delta")
    pipeline = b.pipeline("exactly-once", 'mode = "dedupe"', 'key = ["k"]', schema="id long, k decimal(38,8) not null")
    values = [json.dumps({"id": n, "k": f"12345678901234567890123456789{n}.12345678"}).encode() for n in range(3)]
    with b.run(pipeline, partitions=1) as run:
        for number in range(2):
            run.deliver({0: [values[number]]})
        DeltaTable(b.path).optimize.compact()
        run.deliver({0: values})
        assert run.counts() == Counts(5, 3, 0, 2)
    assert b.ids() == [0, 1, 2]


def far(rows: pa.RecordBatch) -> pa.RecordBatch:
    """A transform that makes days and times which no table can hold."""
    days = pa.array([-719_163, 2_932_897, 0, 2_932_896], pa.int32()).cast(pa.date32())
    times = pa.array([0, 0, 253_402_300_800_000_000, 253_402_300_799_999_999], pa.int64()).cast(pa.timestamp("us"))
    made = {"day": days, "at": times}
    columns = [made.get(name, rows[name]) for name in rows.schema.names]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def test_days_and_times_beyond_year_9999(b: Bench) -> None:
    """Of a transform's columns. None stops the path; each is refused with its column."""
    schema = "id long not null, account string not null, amount double, day date, at timestamp_ntz"
    pipeline = b.pipeline("exactly-once", schema=schema, more='[transform]\npython = "tests.integration.test_lake:far"')
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(n) for n in range(4)]})
        assert run.counts() == Counts(4, 1, 3)
    ((id_, day, at),) = b.frame().select("id", "day", "at").rows()
    assert (id_, str(day), str(at)) == (3, "9999-12-31", "9999-12-31 23:59:59.999999")
    with sinks.dead_letters(pipeline) as letters:
        found = [one.detail for one in letters.select(Selection(), 10)]
    assert found == [f"column {name!r} is outside the years 1 to 9999" for name in ("day", "day", "at")]


def test_a_record_of_any_timestamp(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written exactly, or a dead letter that is kept, listed, and in no redrive's way."""
    unit = {"ms": 1, "us": 1_000}[COLUMNS.field("timestamp").type.unit]
    stamps = [-1, 0, 253_402_300_799_999, 253_402_300_800_000, (2**63 - 1) // unit]
    real = bench_module.batch

    def stamped(values: Any, partition: int, start: int, keys: Any) -> pa.RecordBatch:
        made = real(values, partition, start, keys)
        wanted = [stamps[offset % 5] * unit for offset in range(start, start + len(values))]
        return made.set_column(3, "timestamp", pa.array(wanted, pa.int64()).cast(COLUMNS.field("timestamp").type))

    monkeypatch.setattr(bench_module, "batch", stamped)
    with b.run(partitions=1) as run:
        run.deliver({0: [record(n) for n in range(5)]})
        run.deliver({0: [record(n, more=1) for n in range(5, 10)]})
        assert run.counts() == Counts(10, 3, 7)
    written = {row["_kafka_offset"]: row["_kafka_timestamp"] for row in b.rows()}
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert written == {offset: epoch + timedelta(milliseconds=stamps[offset]) for offset in range(3)}
    with sinks.dead_letters(b.pipeline()) as letters:
        found = letters.select(Selection(), 10)
    assert [(one.offset, one.timestamp_ms) for one in found] == [(n, stamps[n % 5]) for n in (3, 4, 5, 6, 7, 8, 9)]
    assert redrive(wider(b), Selection(), no_spark) == Redriven(written=3, still_dead=4)
    assert b.ids() == [0, 1, 2, 5, 6, 7]


def test_a_partition_text_that_no_folder_can_have_as_its_name(bench: Make) -> None:
    for mode in ("append", "upsert"):
        b = bench("delta")
        lines = [f'mode = "{mode}"', 'partition_by = "account"', *(['key = ["id"]'] if mode == "upsert" else [])]
        texts = ["x" * 247, "x" * 248, "\u00e9" * 42, None, "\u00e9" * 41]
        with b.run(b.pipeline("exactly-once", *lines, schema="id long not null, account string"), partitions=1) as run:
            run.deliver({0: [json.dumps({"id": n, "account": text}).encode() for n, text in enumerate(texts)]})
            assert run.counts() == Counts(5, 3, 2)
        assert {row["id"]: row["account"] for row in b.rows()} == {n: texts[n] for n in (0, 3, 4)}
        assert [(offset, reason) for _, offset, reason in b.dead_letters()] == [(1, REFUSED), (2, REFUSED)]


def test_a_partition_that_the_library_could_not_read(bench: Make) -> None:
    """One file under a negative decimal, and deltalake gives no row of the whole table."""
    b = bench("delta")
    lines = ['mode = "dedupe"', 'key = ["id"]', 'partition_by = "k"']
    pipeline = b.pipeline("exactly-once", *lines, schema="id long not null, k decimal(12,2)")
    values = [json.dumps({"id": n, "k": k}).encode() for n, k in enumerate(["1.50", "-3.25", None, "0.00"])]
    with b.run(pipeline, partitions=1) as run:
        for _ in range(2):
            run.deliver({0: values})
        assert run.counts() == Counts(8, 3, 2, 3)
    assert DeltaTable(b.path).to_pyarrow_table().num_rows == 3


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


@pytest.mark.parametrize(
    ("by", "wrong"),
    [
        ("day(at)", "adds a column at_day, and a column of that name is declared"),
        ("day(id)", "'id' is not a timestamp"),
        ("at", "'at' has too many values"),
        ("tags", "'tags' is nested"),
        ("gone", "'gone' is not a column"),
    ],
)
def test_what_a_transform_gives_is_asked_whether_it_can_be_partitioned(b: Bench, by: str, wrong: str) -> None:
    pipeline = b.pipeline("exactly-once", f'partition_by = "{by}"', more='[transform]\npython = "somebodys:own"')
    fields = parse("id long, at timestamp, At_Day string, tags array<string>").fields
    with sinks.driver_sink(pipeline) as store, pytest.raises(ConfigError, match=re.escape(wrong)):
        store.prepare_table(fields, rest=False)


def test_an_empty_text_cannot_name_a_folder(bench: Make) -> None:
    """Delta reads it as null: a value would be changed in silence."""
    b = bench("delta")
    with b.run(b.pipeline("exactly-once", 'partition_by = "account"'), partitions=1) as run:
        run.deliver({0: [json.dumps({"id": 1, "account": ""}).encode(), record(2)]})
    assert b.ids() == [2]
    assert b.dead_letters() == [(0, 0, "refused-by-sink")]


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
    assert list(orphans(lake_tables(pipeline), pipeline.name)) == [], "the run may still be in progress"
    with b.run(pipeline, partitions=1) as run:
        staged = run.stage({0: [record(2), b"bad", record(4)]})
        found = list(orphans(lake_tables(pipeline), pipeline.name))
        assert [(one.run, "_dead_letters" in one.path) for one in found] == [(1, False)]
        for one in found:
            one.remove()
        run.commit(*staged)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: [record(5)]})
    assert list(orphans(lake_tables(pipeline), pipeline.name)) == []
    assert b.ids() == [0, 2, 4, 5]
    assert (others / "part-0-theirs.parquet").exists()


def test_orphans_of_members_that_were_fenced(b: Bench) -> None:
    def found() -> list[int]:
        return sorted(one.run for one in orphans(lake_tables(b.pipeline()), b.name))

    first, second = b.run(member=[0]), b.run(member=[1])
    first.stage({0: [record(0)]})  # and never committed
    staged = second.stage({1: [record(10)]})
    assert found() == [], "both may be in the middle of a batch"
    third = b.run(member=[0])
    assert found() == [first.number]
    second.commit(*staged)
    second.stage({1: [record(11)]})
    before = second.number
    second.begin([TopicPartition("records", 2)], shared=True)  # an older batch of its own is given up too
    assert found() == [first.number, before]
    for one in orphans(lake_tables(b.pipeline()), b.name):
        one.remove()
    second.deliver({1: [record(11)], 2: [record(20)]})
    third.deliver({0: [record(0)]})
    assert (b.ids(), found()) == ([0, 10, 11, 20], [])


def test_compaction_keeps_rows_and_positions_under_a_run(b: Bench) -> None:
    pipeline = b.pipeline()
    with b.run(pipeline, partitions=2) as run:
        for number in range(6):
            run.deliver({0: [record(number), b"bad"], 1: [record(100 + number, tags=None), b"bad"]})
        work, staged = run.stage({0: [record(6)]})
        rows, _ = lake_tables(pipeline)
        done = compact(rows, pipeline.name, 1 << 20)
        assert (done.files_before, done.files_after) == (12, 1)
        run.commit(work, staged)
        run.deliver({0: [record(7)]})
        assert run.counts() == Counts(26, 14, 12)
    assert b.ids() == [*range(8), *range(100, 106)]
    with b.run(pipeline) as run:
        assert run.position() == 14


def avow(b: Bench, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["lake", arguments[0], str(b.folder / f"{b.name}.toml"), *arguments[1:]])


def test_the_commands(b: Bench) -> None:
    b.pipeline()
    assert avow(b, "clean").output == "no orphaned files\n"
    missing = avow(b, "compact")
    assert (missing.exit_code, "does not exist" in missing.output) == (2, True), missing.output
    with b.run(partitions=1) as run:
        run.stage({0: [record(0)]})  # and never committed
        for number in range(3):
            run.deliver({0: [record(number), b"bad"]})
        assert avow(b, "clean").output == "no orphaned files\n", "the run may still be in progress"
    with b.run(partitions=1) as run:
        listed = avow(b, "clean")
        assert (listed.exit_code, listed.output.splitlines()[-1][:7]) == (0, "1 files"), listed.output
        (file,) = json.loads(avow(b, "clean", "--json").output)["files"]
        assert (file["run"], Path(file["path"]).stat().st_size) == (1, file["bytes"])
        assert json.loads(avow(b, "clean", "--remove", "--json").output) == {"removed": True, "files": [file]}
        assert not Path(file["path"]).exists()
        assert avow(b, "clean", "--remove").output == "0 files, 0 bytes removed\n"
        assert avow(b, "compact").output == "3 files compacted into 1\n"
        assert json.loads(avow(b, "compact", "--json").output) == {"files_before": 1, "files_after": 1}
        run.deliver({0: [record(3)]})
    assert (b.ids(), len(b.dead_letters())) == ([0, 1, 2, 3], 3)


def committing_first(monkeypatch: pytest.MonkeyPatch, first: Iterator[Callable[[], None]]) -> None:
    """Something is committed right before each exchange of files that a compaction commits."""
    real = IcebergLakeTable._has

    def has(table: IcebergLakeTable, files: Any) -> bool:
        found = real(table, files)
        next(first, lambda: None)()
        return found

    monkeypatch.setattr(IcebergLakeTable, "_has", has)


def test_compaction_while_a_run_commits_all_the_time(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench("iceberg")
    with b.run(partitions=1) as run:
        for number in range(4):
            run.deliver({0: [record(number)]})
        committing_first(monkeypatch, (partial(run.deliver, {0: [record(n)]}) for n in range(4, 9)))
        done = compact(lake_tables(b.pipeline())[0], b.name, 1 << 20)
        assert (done.files_before, done.files_after) == (4, 6)
        assert len(data_files(b)) == 10, "what was merged was written once"
        monkeypatch.setattr(iceberg_format, "EXCHANGES_MAX", 3)
        committing_first(monkeypatch, (partial(run.deliver, {0: [record(n)]}) for n in range(9, 99)))
        with pytest.raises(SinkError, match="after 3 commit conflicts") as caught:
            compact(lake_tables(b.pipeline())[0], b.name, 1 << 20)
        assert "batch.interval" in caught.value.advice
    assert b.ids() == list(range(12))


def test_compaction_of_files_that_a_run_changes_meanwhile(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench("iceberg")
    with by_key(b) as run:
        for number in range(4):
            run.deliver({0: [record(number)]})
        committing_first(monkeypatch, iter([lambda: run.deliver({0: [record(2, amount=0.5)]})]))
        compact(lake_tables(b.pipeline())[0], b.name, 1 << 20)
        run.deliver({0: [record(3, amount=0.5)]})
    assert {row["id"]: row["amount"] for row in b.rows()} == {0: 0, 1: 0.25, 2: 0.5, 3: 0.5}
    assert len(b.rows()) == 4


def test_a_run_begins_and_files_are_cleaned_during_a_compaction(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compaction has written belongs to nothing then, and must not be named by its commit."""
    b = bench("iceberg")
    with b.run(partitions=1) as run:
        for number in range(4):
            run.deliver({0: [record(number)]})

    def clean() -> None:
        b.run(partitions=1).close_now()
        for one in orphans(lake_tables(b.pipeline()), b.name):
            one.remove()

    committing_first(monkeypatch, iter([clean]))
    assert compact(lake_tables(b.pipeline())[0], b.name, 1 << 20).files_after == 1
    assert b.ids() == list(range(4))


# Many commits.


def test_a_commit_leaves_alone_what_came_before(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyiceberg copies all snapshots whenever it is asked for metadata: with a thousand, for seconds."""
    b = bench("iceberg")
    copied = []

    def counted(base: TableMetadata, *more: Any, **named: Any) -> TableMetadata:
        copied.append(len(base.snapshots))
        return update_table_metadata(base, *more, **named)

    with b.run(partitions=1) as run:
        with iceberg_table(b.folder, b.table).transaction() as transaction:
            transaction.set_properties({"their.own": '{"snapshots":[]}'})
        for number in range(3):
            run.deliver({0: [record(number)]})
        with monkeypatch.context() as patched:
            patched.setattr("pyiceberg.table.update_table_metadata", counted)
            run.deliver({0: [record(3)]})
    assert copied == [1, 1]
    table = iceberg_table(b.folder, b.table)
    assert len(table.metadata.snapshots) == 6, "a fence, an adoption and four batches"
    there = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
    assert there == json.loads(table.metadata.model_dump_json())


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


def test_a_redrive_reads_the_values_of_what_it_redrives_alone(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with b.run() as run:
        for start in (0, 4):
            run.deliver({0: [record(n, more=1) for n in range(start, start + 4)], 1: [b"bad", record(9, more=1)]})
    kind = delta_table.DeltaLakeTable if b.kind == "delta" else IcebergLakeTable
    real, read = kind.rows, []

    def rows(table: Any, columns: Any = None, chosen: Any = None) -> pa.Table:
        found = real(table, columns, chosen)
        if "value" in found.schema.names:
            read.append((found["partition"].to_pylist(), sorted(found["offset"].to_pylist())))
        return found

    monkeypatch.setattr(kind, "rows", rows)
    monkeypatch.setattr(redriving_engine, "AT_ONCE", 2)
    chosen = Selection(reason="unknown-field", from_offset=1, until_offset=6)
    assert redrive(wider(b), chosen, no_spark) == Redriven(written=7)
    if b.kind == "delta":  # Iceberg reads the rows that it marks
        assert read == [([0, 0], [n, n + 1]) for n in (1, 3)] + [([0], [5]), ([1, 1], [1, 3])]
    else:
        assert max(len(offsets) for _, offsets in read) == 2
    with sinks.dead_letters(wider(b)) as letters:
        assert [(one.partition, one.offset) for one in letters.select(Selection(), 3)] == [(0, 0), (0, 6), (0, 7)]
        assert [one.value for one in letters.select(Selection(partition=1), 9)] == [b"bad", b"bad"]


@pytest.mark.parametrize("dies_after", [0, 1, 2, 3])
def test_an_interrupted_redrive_is_settled(b: Bench, monkeypatch: pytest.MonkeyPatch, dies_after: int) -> None:
    """In three commits: it may end before or after each of them, and nothing is doubled or lost."""
    buried(b)
    done = 0
    real = driver.commit_with_retry

    def counted(*arguments: Any, **more: Any) -> None:
        nonlocal done
        if done == dies_after:
            raise KeyboardInterrupt
        done += 1
        real(*arguments, **more)

    monkeypatch.setattr(redriving, "commit_with_retry", counted)
    if dies_after < 3:
        with pytest.raises(KeyboardInterrupt):
            redrive(wider(b), Selection(), no_spark)
    monkeypatch.undo()
    again = redrive(wider(b), Selection(), no_spark)
    assert again == (Redriven(still_dead=1) if dies_after == 2 else Redriven(written=2, still_dead=1))
    assert redrive(wider(b), Selection(), no_spark) == Redriven(still_dead=1)
    assert b.ids() == [0, 1, 3]
    assert [offset for _, offset, _ in b.dead_letters()] == [2]
    with b.run(partitions=1) as run:
        assert run.counts() == Counts(4, 3, 1)
        run.deliver({0: [record(4)]})
    assert b.ids() == [0, 1, 3, 4]


@pytest.mark.parametrize("marked", [False, True])
def test_two_redrives_at_once(b: Bench, monkeypatch: pytest.MonkeyPatch, marked: bool) -> None:
    """Another one delivers other letters before the first commit of this one, or between its first and second: this
    one is refused, and what it wanted stays."""
    buried(b)
    real, commits = driver.commit_with_retry, 0

    def overtaken(*arguments: Any, **more: Any) -> None:
        nonlocal commits
        commits += 1
        if commits == 1 + marked:
            monkeypatch.undo()
            assert redrive(wider(b), Selection(until_offset=2), no_spark) == Redriven(written=1)
        real(*arguments, **more)

    monkeypatch.setattr(redriving, "commit_with_retry", overtaken)
    with pytest.raises(SinkError, match="another redrive committed first"):
        redrive(wider(b), Selection(from_offset=3), no_spark)
    with sinks.dead_letters(b.pipeline()) as letters:
        assert [letter.offset for letter in letters.select(Selection(), 10)] == [2, 3]
    assert redrive(wider(b), Selection(), no_spark) == Redriven(written=1, still_dead=1)
    assert b.ids() == [0, 1, 3]
    assert [offset for _, offset, _ in b.dead_letters()] == [2]
    with b.run(partitions=1) as run:
        assert run.counts() == Counts(4, 3, 1)


@pytest.mark.parametrize("mode", ["dedupe", "upsert"])
def test_a_run_claims_the_key_of_a_dead_letter_during_a_redrive(
    b: Bench, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """It brings the key from another partition, or deletes it, before the redrive has committed: that looks again."""
    strict = b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["id"]')
    lenient = strict.model_copy(update={"decode": wider(b).decode})
    real, read = driver.commit_with_retry, []

    class Topic(interleaving.Topic):
        def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
            read.append((wanted.start, wanted.until))
            log = bench_module.batch([record(7, extra=1), record(1), None], 0, 0, [None, None, b"7"])
            yield log.slice(wanted.start, len(wanted))

    with b.run(strict) as run:
        run.deliver({0: [record(7, extra=1), record(1)]})

        def overtaken(*arguments: Any, **more: Any) -> None:
            monkeypatch.setattr(redriving, "commit_with_retry", real)
            run.deliver({1: [record(7)]} if mode == "dedupe" else {0: [None]}, keys={0: [b"7"]})
            real(*arguments, **more)

        monkeypatch.setattr(redriving, "commit_with_retry", overtaken)
        for name in ("Log", "Reader"):
            monkeypatch.setattr(redriving_engine, name, Topic)
        assert redrive(lenient, Selection(), no_spark) == Redriven(skipped=1)
        run.store.ledger_snapshot()
        assert run.counts() == Counts(3, 2, 0, 1)
    assert b.ids() == ([1, 7] if mode == "dedupe" else [1])
    assert b.dead_letters() == []
    assert read == ([] if mode == "dedupe" else [(1, 2), (2, 3)]), "each record once"


@pytest.mark.parametrize("guarantee", ["at-most-once", "exactly-once"])
def test_a_redrive_between_a_crash_and_the_restart(b: Bench, monkeypatch: pytest.MonkeyPatch, guarantee: str) -> None:
    """The crash is between the commit of dead letters and that of rows. Dead letters that no claim has followed are
    neither listed nor redriven: their records are read again. Under at-most-once they are claimed and not counted, and
    are redriven once a later batch was counted."""
    strict = b.pipeline(guarantee)
    lenient = strict.model_copy(update={"decode": wider(b).decode})
    real = driver._apply

    def crashing(table: Any, change: driver.TableChange, *more: Any) -> None:
        if change.files and not table.shown.endswith("_dead_letters"):
            raise KeyboardInterrupt
        real(table, change, *more)

    first = b.run(strict, partitions=1)
    first.deliver({0: [record(0), record(1, extra=1)]})
    monkeypatch.setattr(driver, "_apply", crashing)
    with pytest.raises(KeyboardInterrupt):
        first.deliver({0: [record(2), record(3, extra=1)]})
    monkeypatch.undo()
    assert [offset for _, offset, _ in b.dead_letters()] == [1, 3]
    claimed = guarantee == "at-most-once"
    with sinks.dead_letters(strict) as letters:
        expected = [1, 3] if claimed else [1]
        assert [found.offset for found in letters.select(Selection(), 10)] == expected
        assert [found.offset for found in letters.previews(Selection(), 10)] == expected
    assert redrive(lenient, Selection(), no_spark) == Redriven(written=1)
    with b.run(strict, partitions=1) as run:
        assert run.position() == (4 if claimed else 2)
        run.deliver({0: [record(4)] if claimed else [record(2), record(3, extra=1), record(4)]})
        assert redrive(lenient, Selection(), no_spark) == Redriven(written=1)
        run.store.ledger_snapshot()
        assert run.counts() == (Counts(4, 4) if claimed else Counts(5, 5))
    assert b.ids() == ([0, 1, 3, 4] if claimed else [0, 1, 2, 3, 4])
    assert b.dead_letters() == []


@pytest.mark.parametrize("mode", ["append", "dedupe", "upsert"])
def test_a_run_begins_and_files_are_cleaned_during_a_redrive(
    b: Bench, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    lines = [f'mode = "{mode}"', *(['key = ["id"]'] if mode != "append" else [])]
    strict = b.pipeline("exactly-once", *lines)
    lenient = strict.model_copy(update={"decode": strict.decode.model_copy(update={"unknown_fields": "ignore"})})
    with b.run(strict, partitions=1) as run:
        run.deliver({0: [record(0), record(1, extra=1)]})
    real = driver.commit_with_retry

    def cleaned(*arguments: Any, **more: Any) -> None:
        """Before the first of its commits: its files are there."""
        monkeypatch.undo()
        b.run(strict, partitions=1).close_now()
        for one in orphans(lake_tables(strict), b.name):
            one.remove()
        real(*arguments, **more)

    monkeypatch.setattr(redriving, "commit_with_retry", cleaned)
    with pytest.raises(SinkError, match="fenced: run 2 started"):
        redrive(lenient, Selection(), no_spark)
    assert b.ids() == [0]
    assert redrive(lenient, Selection(), no_spark) == Redriven(written=1)
    assert (b.ids(), b.dead_letters()) == ([0, 1], [])
