"""A proof's own eyes on each sink: what the sink's code has written, read back by code that shares nothing with it.

No Kafka and no Spark: see ``fix_sinks``. The oracle of a topic is tested by the cells of a proof alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from avow.guarantee import Guarantee
from avow.plan import load_checked
from avow.prove import check
from avow.prove.cells import FAULTS, Cell
from avow.prove.check import Fate, Row, Sent, compare
from avow.prove.oracles.base import Oracle
from avow.prove.scenario import oracle_class
from avow.prove.workload_spec import NumberedRecords
from avow.settings import PipelineConfig
from avow.testing.sinks import TOPIC, Runner

TABLE = "p_records"
SENT = [Sent(number, number, Fate.ACKNOWLEDGED, number % 2, number // 2) for number in range(10)]
VALUES = {partition: [check.value(one.number, one.key) for one in SENT[partition::2]] for partition in (0, 1)}


class OracleEnvironment:
    """What a table's oracle needs of a cluster."""

    bootstrap = ""

    def __init__(self, url: str) -> None:
        self.url = url

    def ends(self, topic: str) -> dict[int, int]:
        raise AssertionError(topic)

    def committed(self, group: str, topic: str) -> dict[int, tuple[int, str]]:
        raise AssertionError(group, topic)

    def drop_topic(self, name: str) -> None:
        raise AssertionError(name)


@pytest.fixture(params=["postgres", "delta", "iceberg"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def oracle(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Oracle]:
    url = ""
    if kind == "postgres":
        url = request.getfixturevalue("server")
        with psycopg.connect(url) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS avow CASCADE; DROP TABLE IF EXISTS {TABLE}".encode())
    made = oracle_class(kind)(OracleEnvironment(url), tmp_path, TOPIC, TABLE)
    yield made
    made.close()


@pytest.fixture
def start(kind: str, oracle: Oracle, tmp_path: Path) -> Callable[[], Runner]:
    """A run of the pipeline that a cell has."""

    def made() -> PipelineConfig:
        path = tmp_path / "pipeline.toml"
        cell = Cell(FAULTS["zombie"], Guarantee.EXACTLY_ONCE, kind)
        path.write_text(NumberedRecords().text(cell, TOPIC, oracle, "127.0.0.1:1", 500))
        url = oracle.cluster.url
        return load_checked(path, {"DATABASE_URL": url})

    return lambda: Runner(made())


def found(oracle: Oracle) -> dict[str, int]:
    return dict(compare(SENT, oracle.numbered_rows(), dead_letters=oracle.dead_letters()).anomalies)


def test_before_there_is_anything(oracle: Oracle) -> None:
    assert not oracle.count()
    assert (oracle.positions(), oracle.claiming_run()) == ({}, 0)


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_lake_that_cannot_be_read_for_a_moment_has_not_gone_back(
    oracle: Oracle, start: Callable[[], Runner], tmp_path: Path
) -> None:
    with start() as run:
        run.deliver(VALUES)
    before = oracle.positions()
    assert before == {0: 5, 1: 5}
    (tmp_path / "lake").rename(tmp_path / "away")
    assert oracle.positions() == before
    assert oracle.count() in (None, 10)


def test_what_was_written_is_read_back(oracle: Oracle, start: Callable[[], Runner]) -> None:
    with start() as run:
        assert oracle.positions() == {0: 0, 1: 0}
        assert (oracle.count(), oracle.numbered_rows(), oracle.dead_letters()) == (0, [], [])
        run.deliver({0: [*VALUES[0], b"bad"], 1: VALUES[1]})
        assert oracle.positions() == {0: 6, 1: 5}
        assert oracle.count() == 10
        assert oracle.dead_letters() == [(0, 5)]
        content = sorted(oracle.numbered_rows())
        assert [(row.number, row.key, row.partition, row.offset) for row in content] == [
            (one.number, one.key, one.partition, one.offset) for one in SENT
        ]
        assert sorted(oracle.origins(run.pipeline.sink.lineage)) == sorted((one.partition, one.offset) for one in SENT)
        assert found(oracle) == {}


def test_a_run_counts_when_it_has_claimed(oracle: Oracle, start: Callable[[], Runner]) -> None:
    with start() as first:
        assert oracle.claiming_run() == 0
        first.deliver({0: VALUES[0][:1]})
        assert oracle.claiming_run() == 1
        with start() as second:
            assert oracle.claiming_run() == 1, "it has taken over, and claimed nothing yet"
            second.deliver({1: VALUES[1][:1]})
            assert oracle.claiming_run() == 2


def plant(kind: str, oracle: Oracle, *, doubled: Row, lost: Row) -> None:
    """By others than us: one row twice, and one gone."""
    gone = f"n = {lost.number}"
    if kind == "postgres":
        with psycopg.connect(oracle.cluster.url) as connection:
            connection.execute(f"INSERT INTO {TABLE} SELECT * FROM {TABLE} WHERE n = {doubled.number}".encode())
            connection.execute(f"DELETE FROM {TABLE} WHERE {gone}".encode())
    elif kind == "delta":
        table = DeltaTable(oracle.sink_config()["path"])
        again = table.to_pyarrow_table(filters=[("n", "=", doubled.number)])
        write_deltalake(table, again, mode="append")
        table.delete(gone)
    else:
        place = oracle.sink_config()["catalog"]["warehouse"]
        catalog = SqlCatalog("default", uri=f"sqlite:///{place}/catalog.db", warehouse=f"file://{place}")
        rows = catalog.load_table(oracle.sink_config()["table"])
        again = rows.scan(row_filter=f"n = {doubled.number}").to_arrow()
        rows.append(pa.table(again))
        rows.delete(gone)
        catalog.close()


def test_what_others_planted_is_found(kind: str, oracle: Oracle, start: Callable[[], Runner]) -> None:
    with start() as run:
        run.deliver(VALUES)
    rows = sorted(oracle.numbered_rows())
    plant(kind, oracle, doubled=rows[3], lost=rows[8])
    assert found(oracle) == {"duplicated": 1, "lost": 1}
    assert oracle.count() == 10
