"""Readers that are not ours: what they find in our tables is what was delivered, also where they leave files out.

Spark with delta-spark and with Iceberg's runtime share no code with the writers. polars reads Delta's log through the
library that writes it, and Iceberg's manifests through pyiceberg; its reader of files is its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.fix_sinks import Bench, iceberg_table

from avow.sinks.lake.maintenance import compact
from avow.sinks.lake.plugin import lake_tables
from avow.testing.sinks import EVERY, every, record

pytestmark = pytest.mark.xdist_group("lake_readers")

MANY = 25  # commits, so that Delta's log has a checkpoint, which is read in place of what came before it
DAYS = "id long not null, account string not null, amount double, at timestamp"

Rows = list[dict[str, Any]]
Read = Callable[[str, str, str], Rows]  # kind, table, which rows


def make_every(b: Bench) -> None:
    with b.run(b.pipeline(schema=EVERY), partitions=1) as run:
        run.deliver({0: [every(0), b"{}", every(2)]})
        run.deliver({0: [every(3)]})


def make_many(b: Bench) -> None:
    with b.run(partitions=1) as run:
        for number in range(MANY):
            run.deliver({0: [record(2 * number), b"bad" if number == 7 else record(2 * number + 1)]})


def make_compacted(b: Bench) -> None:
    make_many(b)
    compact(lake_tables(b.pipeline())[0], b.name, 1 << 20)
    with b.run(partitions=1) as run:
        run.deliver({0: [record(2 * MANY)]})


def make_by_day(b: Bench) -> None:
    with b.run(b.pipeline("exactly-once", 'partition_by = "day(at)"', schema=DAYS), partitions=1) as run:
        for start in (0, 10):
            days = [f"2026-01-{1 + n % 3:02}T23:30:00-01:00" if n % 4 else None for n in range(start, start + 10)]
            run.deliver({0: [record(start + n, at=day) for n, day in enumerate(days)]})


def make_upserted(b: Bench) -> None:
    pipeline = b.pipeline("exactly-once", 'mode = "upsert"', 'key = ["id"]')
    with b.run(pipeline, partitions=1) as run:
        for start in range(0, 30, 10):
            run.deliver({0: [record(n, account="not yet", amount=-1.0) for n in range(start, start + 10)]})
        for start in (0, 15):
            values = [None if n == 20 else record(n) for n in range(start, start + 15)]
            run.deliver({0: values}, keys={0: [str(n).encode() for n in range(start, start + 15)]})


TABLES = {
    "every": make_every,
    "many": make_many,
    "compacted": make_compacted,
    "by-day": make_by_day,
    "upserted": make_upserted,
}
IDS = {
    "many": [n for n in range(2 * MANY) if n != 15],
    "compacted": [n for n in range(2 * MANY + 1) if n != 15],
    "by-day": list(range(20)),
    "upserted": [n for n in range(30) if n != 20],
}
FILTERS: dict[str, Callable[[int], bool]] = {
    "": lambda _: True,
    "id = 13": lambda n: n == 13,
    "amount > 2.5 AND amount <= 4.0": lambda n: 2.5 < n / 4 <= 4,
    "account = 'acc-3'": lambda n: n % 7 == 3,
}
# Of the table with every type: true of all rows but the one of nulls, whose file is not left out.
WIDE = ["a = true", "m = 123456789.125", "k >= timestamp '9999-12-31 23:59:59.9995'", "p.r.s = 'deep'"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Bench]:
    """Every table, by kind and name."""
    found = {}
    for kind in ("delta", "iceberg"):
        for name, make in TABLES.items():
            found[kind, name] = Bench(kind, tmp_path_factory.mktemp(f"{kind}-{name}"))
            make(found[kind, name])
    return found


@pytest.fixture(scope="module")
def by_spark(made: dict[tuple[str, str], Bench], tmp_path_factory: pytest.TempPathFactory) -> Read:
    """All that is asked here, in one run of Spark."""
    asked = [(kind, name, rows) for kind, name in made for rows in (FILTERS if name != "every" else ["", *WIDE])]
    asked += [(kind, "dead letters", "") for kind in ("delta", "iceberg")]
    folder = tmp_path_factory.mktemp("spark")
    questions = []
    for kind, name, rows in asked:
        b, suffix = (made[kind, "many"], "_dead_letters") if name == "dead letters" else (made[kind, name], "")
        where = f"{b.path}{suffix}" if kind == "delta" else iceberg_table(b.folder, b.table + suffix).metadata_location
        questions.append({"kind": kind, "table": where, "rows": rows})
    file = folder / "questions.json"
    file.write_text(json.dumps(questions))
    script = Path(__file__).parents[1] / "spark_reader.py"
    done = subprocess.run([sys.executable, script, file], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]

    def read(kind: str, name: str, rows: str) -> Rows:
        with pa.ipc.open_file(folder / f"{asked.index((kind, name, rows))}.arrow") as stream:
            return as_rows(stream.read_all())

    return read


@pytest.fixture(scope="module")
def by_polars(made: dict[tuple[str, str], Bench]) -> Read:
    def read(kind: str, name: str, rows: str) -> Rows:
        b, suffix = (made[kind, "many"], "_dead_letters") if name == "dead letters" else (made[kind, name], "")
        if kind == "delta":
            frame = pl.scan_delta(f"{b.path}{suffix}")
        else:
            frame = pl.scan_iceberg(iceberg_table(b.folder, b.table + suffix))
        return as_rows((frame.filter(pl.sql_expr(rows)) if rows else frame).collect().to_arrow())

    return read


@pytest.fixture(scope="module")
def by_library(made: dict[tuple[str, str], Bench]) -> Read:
    """What people use from Python: deltalake, pyiceberg."""

    def read(kind: str, name: str, rows: str) -> Rows:
        b, suffix = (made[kind, "many"], "_dead_letters") if name == "dead letters" else (made[kind, name], "")
        if kind == "iceberg":
            found = iceberg_table(b.folder, b.table + suffix)
            return as_rows((found.scan(row_filter=rows) if rows else found.scan()).to_arrow())
        frame = pl.from_arrow(DeltaTable(f"{b.path}{suffix}").to_pyarrow_table())
        assert isinstance(frame, pl.DataFrame)
        return as_rows((frame.filter(pl.sql_expr(rows)) if rows else frame).to_arrow())

    return read


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.long), "polars", "library"])
def read(request: pytest.FixtureRequest) -> Read:
    found: Read = request.getfixturevalue(f"by_{request.param}")
    return found


def as_rows(table: pa.Table) -> Rows:
    order = "_kafka_offset" if "_kafka_offset" in table.schema.names else "offset"
    found: Rows = table.sort_by(order).to_pylist()
    return found


@pytest.mark.parametrize("rows", FILTERS)
@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_rows(read: Read, kind: str, name: str, rows: str) -> None:
    found = read(kind, name, rows)
    wanted = [n for n in IDS[name] if FILTERS[rows](n)]
    assert [row["id"] for row in found] == wanted
    assert [(row["account"], row["amount"]) for row in found] == [(f"acc-{n % 7}", n / 4) for n in wanted]
    assert {(row["_kafka_topic"], row["_kafka_partition"]) for row in found} == {("records", 0)}
    assert [row["_kafka_offset"] for row in found] == [n + (30 if name == "upserted" else 0) for n in wanted]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_dead_letters(read: Read, kind: str) -> None:
    (found,) = read(kind, "dead letters", "")
    assert (found["partition"], found["offset"], found["reason"], found["value"]) == (0, 15, "not-json", b"bad")


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_every_type(read: Read, kind: str) -> None:
    first, empty, *more = read(kind, "every", "")
    assert [row["d"] for row in (first, *more)] == [0, 2, 3]
    assert {name for name in "abcdefghijklm" if empty[name] is not None} == set()
    full = more[-1]
    assert [full[name] for name in "abcefg"] == [True, -128, 32767, 2**63 - 1, 0.5, -0.1]
    assert (full["h"], full["i"], full["j"]) == ("x\0é𝄞" * 20, b"\0\xff", date(1, 1, 1))
    assert full["k"] == datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)
    assert full["l"] == datetime(2026, 1, 31, 12, 0, 0, 1)
    assert full["m"] == Decimal("123456789.125")
    assert full["n"] == [{"x": 1, "y": ["a", None]}, None]
    pairs = [(pair["key"], pair["value"]) if isinstance(pair, dict) else pair for pair in full["o"]]
    assert dict(pairs) == {"k": 1, "l": None}
    assert full["p"] == {"q": 1.5, "r": {"s": "deep"}}


@pytest.mark.long
@pytest.mark.parametrize("rows", WIDE)
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_every_type_in_a_filter(by_spark: Read, kind: str, rows: str) -> None:
    assert [row["d"] for row in by_spark(kind, "every", rows)] == [0, 2, 3]
