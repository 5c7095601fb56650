"""Rows sent by binary COPY and read back by psycopg are what they were in Arrow, whichever encoder made the bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.arrow_batches import EPOCH_US, KINDS, TIMESTAMPS, Kind, array, batches
from tests.fix_sinks import Bench

from avow import native
from avow.errors import ConfigError
from avow.sinks.base import RowChanges
from avow.sinks.postgres.copy_format import EncodeError
from avow.sinks.postgres.session import Session, refused_line
from avow.sinks.postgres.task import PostgresTask
from avow.testing.sinks import record

ENCODERS = ["native", "plain"]


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "native" and native.library() is None:
        pytest.skip(f"avow-native: {native.why_not()}")
    native.allow(request.param == "native")
    yield request.param
    native.allow(True)


@pytest.fixture(scope="module")
def session(server: str, encoder: str) -> Iterator[Session]:  # noqa: ARG001
    session = Session(server, "avow-test")
    yield session
    session.close()


# Times as the server's own numbers: Python's types end at the year 9999, and extract(epoch ...) is not exact there.
READ = {
    "date": "c{} - '1970-01-01'::date",
    "timestamp": "timestamp_send(c{})",
    "timestamptz": "timestamptz_send(c{})",
    "jsonb": "c{}::text",
}


def comparable(value: Any, kind: Kind) -> Any:
    if value is not None and pa.types.is_floating(kind.arrow):
        return "nan" if value != value else struct.pack("!d", value)
    if isinstance(value, bytes) and pa.types.is_timestamp(kind.arrow):
        return int.from_bytes(value, "big", signed=True) + EPOCH_US
    if value is not None and kind.postgres == "jsonb":
        return json.loads(value)
    return str(value) if pa.types.is_decimal(kind.arrow) else value  # also the number of decimal places


def arrow_values(column: pa.Array, kind: Kind) -> list[Any]:
    if pa.types.is_temporal(kind.arrow):
        column = column.cast(pa.int32() if pa.types.is_date(kind.arrow) else pa.int64())
    return [comparable(value, kind) for value in column.to_pylist()]


def copied(session: Session, batch: pa.RecordBatch, kinds: list[Kind]) -> list[list[Any]]:
    """The columns, as the server has them."""
    columns = ", ".join(f"c{n} {kind.postgres}" for n, kind in enumerate(kinds))
    read = ", ".join(READ.get(kind.postgres, "c{}").format(n) for n, kind in enumerate(kinds))
    session.begin()
    try:
        session.run(f"CREATE TEMP TABLE copied (n serial, {columns}) ON COMMIT DROP")
        assert session.copy("copied", batch) == batch.num_rows
        rows = session.query(f"SELECT {read} FROM copied ORDER BY n")
    finally:
        session.run("ROLLBACK")
    return [[comparable(row[at], kind) for row in rows] for at, kind in enumerate(kinds)]


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("name", KINDS)
def test_a_column_of_each_type_arrives_as_it_was(session: Session, name: str, data: st.DataObject) -> None:
    batch = data.draw(batches(name))
    kind = KINDS[name]
    assert copied(session, batch, [kind]) == [arrow_values(batch.column(0), kind)]


@settings(max_examples=60)
@given(batch=batches(*KINDS))
def test_all_types_side_by_side(session: Session, batch: pa.RecordBatch) -> None:
    kinds = list(KINDS.values())
    expected = [arrow_values(column, kind) for column, kind in zip(batch.columns, kinds, strict=True)]
    assert copied(session, batch, kinds) == expected


def test_long_texts(session: Session) -> None:
    kinds = [KINDS["string"], KINDS["binary"], KINDS["jsonb"]]
    text = "é" * 500_000
    columns: list[list[Any]] = [
        [text, "", None, "x" * 70_000],
        [text.encode(), b"", None, b"\0" * 300_000],
        [f'["{text}"]'] * 4,
    ]
    batch = pa.RecordBatch.from_arrays(list(map(array, kinds, columns)), names=["c0", "c1", "c2"])
    assert copied(session, batch, kinds) == list(map(arrow_values, batch.columns, kinds))


def test_many_rows(session: Session) -> None:
    kinds = [KINDS["long"], KINDS["string"], KINDS["decimal(18,3)"]]
    numbers = range(20_000)
    columns: list[list[Any]] = [
        list(numbers),
        [None if n % 7 == 0 else f"text {n}" for n in numbers],
        [None] * len(numbers),
    ]
    batch = pa.RecordBatch.from_arrays(list(map(array, kinds, columns)), names=["c0", "c1", "c2"])
    assert copied(session, batch, kinds) == list(map(arrow_values, batch.columns, kinds))


NOT_HELD: dict[str, tuple[str, pa.Array, str]] = {
    "NUL": ("text", pa.array(["good", "", "b\0d", "good"]), "22021"),
    "not UTF-8": ("text", pa.array([b"good", b"", b"b\xffd", b"good"]).view(pa.string()), "22021"),
    "NUL in JSON": ("jsonb", pa.array(["1", None, '"\\u0000"', "1"]).cast(pa.json_()), "22P05"),
    "no JSON": ("jsonb", pa.array(["1", None, "{", "1"]).cast(pa.json_()), "22P02"),
    "4714 BC, without zone": ("timestamp", array(KINDS["timestamp_ntz"], [0, None, TIMESTAMPS[0] - 1, 0]), "22008"),
    "4714 BC": ("timestamptz", array(KINDS["timestamp"], [0, None, -(2**63) + EPOCH_US + 1, 0]), "22008"),
    "-infinity": ("timestamptz", array(KINDS["timestamp"], [0, None, -(2**63) + EPOCH_US, 0]), "22008"),
    "wraps around": ("timestamptz", array(KINDS["timestamp"], [0, None, -(2**63), 0]), "22008"),
    "date": ("date", array(KINDS["date"], [0, None, -(2**31), 0]), "22008"),
    "numeric overflow": ("numeric(5,0)", array(KINDS["decimal(38,0)"], [1, None, 10**37, 1]), "22003"),
}


@pytest.mark.parametrize("case", NOT_HELD)
def test_a_value_that_the_type_cannot_hold_is_refused_with_its_row(session: Session, case: str) -> None:
    type_, column, state = NOT_HELD[case]
    session.begin()
    session.run(f"CREATE TEMP TABLE refusing (c {type_}) ON COMMIT DROP")
    with pytest.raises((psycopg.Error, EncodeError)) as raised:
        session.copy("refusing", pa.RecordBatch.from_arrays([column], names=["c"]))
    session.run("ROLLBACK")
    assert isinstance(raised.value, psycopg.Error | EncodeError)
    assert (raised.value.sqlstate, refused_line(raised.value)) == (state, 2)
    assert session.query("SELECT 1") == [(1,)]


@pytest.fixture
def b(bench: Callable[..., Bench], encoder: str) -> Bench:  # noqa: ARG001
    return bench("postgres")


def test_a_row_that_cannot_be_encoded_is_set_aside_with_the_others_written(b: Bench) -> None:
    declared = b.pipeline()
    stamps = [0, -(2**63), 1, -(2**63) + EPOCH_US, None, TIMESTAMPS[0] - 1]
    count = len(stamps)
    rows = pa.RecordBatch.from_pydict(
        {
            "id": pa.array(range(count), pa.int64()),
            "account": ["a"] * count,
            "amount": pa.array([1.5] * count),
            "tags": pa.array([["x"]] * count),
            "_kafka_topic": ["records"] * count,
            "_kafka_partition": pa.array([0] * count, pa.int32()),
            "_kafka_offset": pa.array(range(count), pa.int64()),
            "_kafka_timestamp": array(KINDS["timestamp"], stamps),
        }
    )
    with b.run(declared):
        sink = PostgresTask(declared, 1)
        with sink.act():
            refused = sink.write(RowChanges(rows, rows.slice(0, 0))).refused
    assert b.ids() == [0, 2, 4]
    assert {row: getattr(why, "code", "") for row, why in refused.items()} == dict.fromkeys((1, 3, 5), "22008")


def test_a_column_whose_type_was_changed_stops_the_run(b: Bench) -> None:
    """A double's bytes are a bigint's, of another value."""
    with b.run() as run:
        run.deliver({0: [record(0)]})
        with psycopg.connect(b._url) as connection:
            connection.execute(f'ALTER TABLE "{b.table}" ALTER amount TYPE bigint'.encode())
        with pytest.raises(ConfigError, match="now has type bigint instead of double precision"):
            run.deliver({0: [record(1)]})
        assert run.position() == 1


def test_texts_arrive_in_a_database_of_another_encoding(server: str, encoder: str) -> None:  # noqa: ARG001
    name = "in_latin1"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name}".encode())
        connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING LATIN1 LOCALE_PROVIDER libc LOCALE 'C'".encode()
        )
    session = Session(server.rpartition("/")[0] + f"/{name}", "avow-test")
    session.begin()
    session.run("CREATE TEMP TABLE texts (c text) ON COMMIT DROP")
    session.copy("texts", pa.RecordBatch.from_pydict({"c": ["é"]}))
    assert session.query("SELECT c, octet_length(c) FROM texts") == [("é", 1)]
    with pytest.raises(psycopg.errors.UntranslatableCharacter) as raised:
        session.copy("texts", pa.RecordBatch.from_pydict({"c": ["é", "€"]}))
    assert refused_line(raised.value) == 1
    session.close()
