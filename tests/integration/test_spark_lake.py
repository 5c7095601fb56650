"""Pipelines from a real topic through real Spark into lakes: guarantees, dead letters, kills, audit."""

from __future__ import annotations

import json
from collections.abc import Callable

import polars as pl
import pytest
from tests.fix_pipeline import ON_ENGINES, SCHEMA, Scenario, payment, session_spark
from tests.fix_sinks import overwrite_lake
from tests.into_lake import audited, frame, ids, sink, totals

from avow.engines.redrive import Redriven, redrive
from avow.ledger import Counts
from avow.prove.failpoints import VARIABLE
from avow.sinks.base import Selection

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("spark")]

Make = Callable[..., Scenario]
KINDS = ["delta", "iceberg"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("guarantee", "engine"), ON_ENGINES)
def test_append(scenario: Make, kind: str, guarantee: str, engine: str) -> None:
    s = scenario(partitions=3)
    values = [payment(n) for n in range(5_000)]
    values[10], values[11] = b'{"id": "ten", "account": "a"}', b""
    s.produce(values)
    path = s.file(guarantee, sink=sink(s, kind))
    s.drain(path, engine)
    good = [n for n in range(5_000) if n not in (10, 11)]
    assert ids(s, kind) == dict.fromkeys(good, 1)
    letters = frame(s, kind, "_dead_letters").sort("partition").select("partition", "offset", "reason").rows()
    assert letters == [(1, 3, "wrong-type"), (2, 3, "empty")]
    assert totals(s, path) == Counts(5_000, 4_998, 2)
    s.drain(path, engine)
    s.produce([payment(n) for n in range(5_000, 5_100)])
    s.drain(path, engine)
    assert ids(s, kind) == dict.fromkeys([*good, *range(5_000, 5_100)], 1)
    report = audited(s, path)
    assert (str(report.verdict), report.findings) == ("held", ())


@pytest.mark.parametrize("kind", KINDS)
def test_planted_anomalies_are_found(scenario: Make, kind: str) -> None:
    s = scenario(partitions=1)
    s.produce([payment(n) for n in range(100)])
    path = s.file(sink=sink(s, kind))
    s.drain(path)
    there = frame(s, kind)
    kept = there.filter(~pl.col("id").is_in([7, 8]))
    changed = kept.with_columns(pl.when(pl.col("id") == 50).then(0.5).otherwise(pl.col("amount")).alias("amount"))
    doubled = pl.concat([changed, there.filter(pl.col("id") == 20)])
    overwrite_lake(kind, s.folder, s.table, doubled)
    report = audited(s, path)
    found = {str(finding.kind): [(span.start, span.until) for span in finding.spans] for finding in report.findings}
    assert str(report.verdict) == "broken"
    assert found["lost"] == [(7, 9)]
    assert found["duplicated"] == [(20, 21)]
    assert found["corrupted"] == [(50, 51)]


@pytest.mark.parametrize("kind", KINDS)
def test_upsert_through_sql(scenario: Make, kind: str) -> None:
    s = scenario(partitions=1)
    values: list[bytes | None] = [json.dumps({"id": n % 50, "account": f"try-{n // 50}"}).encode() for n in range(200)]
    keys = [str(n % 50).encode() for n in range(200)]
    s.produce([*values, None], keys=[*keys, b"7"])
    path = s.file(
        sink=sink(s, kind, 'mode = "upsert"', 'key = ["id"]'),
        transform='sql = "SELECT *, upper(account) AS loud FROM records WHERE id <> 3"',
        batch="max_records = 70",
    )
    s.drain(path)
    found = dict(frame(s, kind).select("id", "loud").rows())
    assert found == {n: "TRY-3" for n in range(50) if n not in (3, 7)}
    assert str(audited(s, path).verdict) == "held"


@pytest.mark.parametrize("kind", KINDS)
def test_redrive(scenario: Make, kind: str) -> None:
    s = scenario(partitions=1)
    late = json.dumps({"id": 10, "account": "late", "extra": 1}).encode()
    s.produce([payment(0), late, b"{", payment(3)])
    path = s.file(sink=sink(s, kind))
    s.drain(path)
    path = s.file(sink=sink(s, kind), decode=f'format = "json"\nschema = "{SCHEMA}"\nunknown_fields = "ignore"')
    pipeline = s.load(path)
    assert redrive(pipeline, Selection(), lambda: session_spark(pipeline)) == Redriven(written=1, still_dead=1)
    assert redrive(pipeline, Selection(), lambda: session_spark(pipeline)) == Redriven(still_dead=1)
    assert ids(s, kind) == {0: 1, 3: 1, 10: 1}
    assert totals(s, path) == Counts(4, 3, 1)
    assert frame(s, kind, "_dead_letters")["offset"].to_list() == [2]
    assert str(audited(s, path).verdict) == "held"


KILLED = [
    ("at-most-once", "after-claim", "lost"),
    ("at-least-once", "after-write", "duplicated"),
    ("exactly-once", "after-claim-write", ""),
    ("exactly-once", "mid-write", ""),
]


@pytest.mark.parametrize(
    ("kind", "engine", "guarantee", "point", "expected"),
    [
        *(("delta", "consumer", *killed) for killed in KILLED),
        ("iceberg", "consumer", *KILLED[2]),
        *(pytest.param("iceberg", "consumer", *killed, marks=pytest.mark.long) for killed in KILLED if killed[2]),
        *(pytest.param(kind, "spark", *killed, marks=pytest.mark.long) for kind in KINDS for killed in KILLED),
    ],
)
def test_kill_9_between_the_acts(
    scenario: Make, kind: str, engine: str, guarantee: str, point: str, expected: str
) -> None:
    s = scenario(partitions=2)
    s.produce(payment(n) for n in range(6_000))
    path = s.file(guarantee, sink=sink(s, kind))
    done = s.run(path, "--engine", engine, **{VARIABLE: f"{point}:1:run:{s.folder}"})
    assert done.returncode == -9, done.stderr
    assert (s.folder / f"fired-{point}").exists()
    s.drain(path)
    found = ids(s, kind)
    assert bool(set(range(6_000)) - set(found)) == (expected == "lost")
    assert any(count > 1 for count in found.values()) == (expected == "duplicated")
    report = audited(s, path)
    assert str(report.verdict) == "held"
    assert {str(finding.kind) for finding in report.findings} - {"ledger-behind"} == ({expected} if expected else set())


def test_a_record_of_several_rows_goes_in_whole_or_not_at_all(scenario: Make) -> None:
    """A folder's name cannot tell an empty text from null: such a row is refused, and with it all of its record."""
    s = scenario(partitions=1)
    s.produce([payment(n) for n in range(3)])
    query = "SELECT *, IF(id = 1 AND i = 2, '', 'fits') AS word FROM records LATERAL VIEW explode(sequence(1, 3)) AS i"
    path = s.file(sink=sink(s, "delta", 'partition_by = "word"'), transform=f'sql = "{query}"')
    s.drain(path)
    assert ids(s, "delta") == {0: 3, 2: 3}
    assert totals(s, path) == Counts(3, 2, 1)
    report = audited(s, path)
    assert (str(report.verdict), report.findings) == ("held", ())
