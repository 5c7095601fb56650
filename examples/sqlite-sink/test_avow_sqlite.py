"""The SQLite sink keeps the contract of every sink. ``pytest examples/sqlite-sink``, installed or not."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from avow.errors import ConfigError
from avow.ledger import Counts
from avow.testing.install import installed
from avow.testing.sinks import (
    ActingSinkContract,
    KeyedSinkContract,
    SinkBench,
    SinkContract,
    audit_findings,
    record,
)


@pytest.fixture(autouse=True, scope="module")
def plugin() -> Iterator[None]:
    with installed(Path(__file__).parent):
        yield


class SqliteBench(SinkBench):
    def section(self) -> str:
        return f'kind = "sqlite"\npath = "{self.folder}/test.db"\ntable = "{self.table}"'

    def query(self, query: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self.folder / "test.db")) as database, database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute(query).fetchall()]

    def rows(self) -> list[dict[str, Any]]:
        found = self.query(f"SELECT * FROM {self.table} ORDER BY _kafka_partition, _kafka_offset")
        return [row | {"tags": json.loads(row.get("tags") or "null")} for row in found]

    def dead_letters(self) -> list[tuple[int, int, str]]:
        found = self.query('SELECT partition, "offset", reason FROM avow_dead_letters ORDER BY 1, 2')
        return [(row["partition"], row["offset"], row["reason"]) for row in found]


@pytest.fixture
def b(tmp_path: Path) -> SqliteBench:
    return SqliteBench(tmp_path)


class TestSqlite(SinkContract, ActingSinkContract, KeyedSinkContract):
    pass


class TestSqliteWithSeveralPartitionsInOneAct(SinkContract):
    @pytest.fixture
    def b(self, tmp_path: Path) -> SqliteBench:
        return SqliteBench(tmp_path, joined=True)


@pytest.mark.parametrize("joined", [False, True])
def test_what_the_table_refuses_is_a_dead_letter(tmp_path: Path, joined: bool) -> None:
    b = SqliteBench(tmp_path, joined=joined)
    pipeline, log = b.pipeline(), {0: [record(0), record(1)], 1: [record(7), record(2), record(3)]}
    with b.run(pipeline) as run:
        b.query(f"CREATE UNIQUE INDEX one ON {b.table} (account)")  # those of 0 and 7 are the same
        run.deliver({0: log[0][:1]})
        run.deliver({0: log[0][1:], 1: log[1]})
        assert run.counts() == Counts(5, 4, 1)
    assert (b.ids(), b.dead_letters()) == ([0, 1, 2, 3], [(1, 0, "refused-by-sink")])
    assert audit_findings(pipeline, log) == []


def test_a_record_of_which_one_row_is_refused_is_a_dead_letter_as_a_whole(b: SqliteBench) -> None:
    """Else a redrive would double its other rows."""
    pipeline = b.pipeline(more='[transform]\npython = "test_avow_sqlite:twice"')
    with b.run(pipeline) as run:
        b.query(f"CREATE TRIGGER no BEFORE INSERT ON {b.table} WHEN new.id = 102 BEGIN SELECT RAISE(ABORT, 'no'); END")
        run.deliver({0: [record(n) for n in range(4)]})
        assert run.counts() == Counts(4, 3, 1)
    assert b.ids() == [0, 1, 3, 100, 101, 103]


def twice(rows: pa.RecordBatch) -> pa.RecordBatch:
    """A second row for each record."""
    doubled = rows.take([row for row in range(rows.num_rows) for _ in range(2)])
    more = pa.array([100 * (row % 2) for row in range(doubled.num_rows)], pa.int64())
    return doubled.set_column(0, "id", pc.add(doubled.column("id"), more))


def test_an_audit_reads_values_that_come_late(b: SqliteBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avow_sqlite.ROWS_AT_ONCE", 2)
    log = {0: [value for n in range(4) for value in (record(n, amount=None), record(n, tags=["a"]))]}
    with b.run() as run:
        run.deliver({0: log[0][::2]})
        run.deliver({0: log[0][1::2]})
    assert audit_findings(b.pipeline(), {0: log[0][::2] + log[0][1::2]}) == []


def test_rows_that_a_trigger_ignores_stop_the_run(b: SqliteBench) -> None:
    with b.run() as run:
        b.query(f"CREATE TRIGGER no BEFORE INSERT ON {b.table} WHEN new.id = 1 BEGIN SELECT RAISE(IGNORE); END")
        with pytest.raises(ConfigError, match="discarded rows"):
            run.deliver({0: [record(n) for n in range(3)]})
        assert (run.position(), b.ids()) == (0, [])


def test_a_table_that_would_convert_values_is_refused(b: SqliteBench) -> None:
    b.query(f"CREATE TABLE {b.table} (id, account INTEGER, amount, tags)")
    with pytest.raises(ConfigError, match="declared types, which convert values: account"):
        b.run()


def test_a_table_that_lacks_a_column_is_refused(b: SqliteBench) -> None:
    with b.run():
        b.query(f"ALTER TABLE {b.table} DROP COLUMN amount")
    with pytest.raises(ConfigError, match="no column named amount"):
        b.run()
