"""Debezium's records: every encoding exactly or refused by name, what becomes of each kind, and the settings.

``debezium_records.json`` has records of the real connector (3.6.2, PostgreSQL 18), one topic prefix for each way to
configure it: p1 as it comes, p2 decimals as text, p3 connect's times, p4 without schemas, p5 nanoseconds, p6 ISO text.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from avow import native
from avow.errors import ConfigError
from avow.formats.base import Decoded
from avow.formats.debezium import decoder
from avow.formats.debezium.by_column import ChangeColumns
from avow.formats.debezium.plugin import DEBEZIUM
from avow.plan import load_checked, plan
from avow.settings import PipelineConfig, load

_FILE = json.loads(Path(__file__).with_name("debezium_records.json").read_text())
Record = tuple[bytes | None, bytes | None]


def _whole(schema: int | None, payload: str | None) -> bytes | None:
    if payload is None or schema is None:
        return payload.encode() if payload else None
    return f'{{"schema":{_FILE["schemas"][schema]},"payload":{payload}}}'.encode()


RECORDS: dict[str, Record] = {
    record["name"]: (_whole(record["key_schema"], record["key"]), _whole(record["schema"], record["value"]))
    for record in _FILE["records"]
}

TYPES = (
    "id long not null, b boolean, i2 short, i4 int, i8 long, f4 float, f8 double, n decimal(38,9), n12_2 decimal(12,2),"
    "n38_10 decimal(38,10), mny decimal(12,2), tx string, vc string, ch string, `by` binary, d date, ts timestamp_ntz,"
    "ts3 timestamp_ntz, ts6 timestamp_ntz, tstz timestamp, tm long, tm3 long, tmtz string, iv long, u string, j string,"
    "jb string, x string, bt1 boolean, bt5 binary, vb binary, ia array<int>, ta array<string>,"
    "na array<decimal(10,2)>, tsa array<timestamp_ntz>, da array<date>, ua array<string>, ba array<boolean>,"
    "m string, ip string, dm int, o long, tsv string, __op string not null"
)
ROW = {
    "id": 1, "b": True, "i2": -32768, "i4": 2147483647, "i8": -9223372036854775808, "f8": 1e300,
    "n": Decimal("123456789.123456789"), "n12_2": Decimal("-1234567890.12"),
    "n38_10": Decimal("1234567890123456789012345678.0123456789"), "mny": Decimal("12.34"),
    "tx": "text é ☃", "vc": "vc", "ch": "ch   ", "by": bytes.fromhex("deadbeef00"), "d": date(2026, 1, 31),
    "ts": datetime(2026, 1, 31, 12, 34, 56, 123456), "ts3": datetime(2026, 1, 31, 12, 34, 56, 123000),
    "ts6": datetime(2026, 1, 31, 12, 34, 56, 654321),
    "tstz": datetime(2026, 1, 31, 10, 34, 56, 123456, UTC), "tm": 45_296_123_456, "tm3": 45_296_123,
    "tmtz": "10:34:56.123456Z", "iv": 37_091_106_700_000, "u": "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "j": '{"a": 1,  "b":[1.50]}', "jb": '{"a": 1, "b": [1.50]}', "x": None, "bt1": True, "bt5": b"\x16", "vb": b"\5",
    "ia": [1, 2, None], "ta": ["a", None, "c d"], "na": [Decimal("1.10"), Decimal("2.25")],
    "tsa": [datetime(2026, 1, 31, 12)], "da": [date(2026, 1, 31)],
    "ua": ["3f2504e0-4f89-11d3-9a0c-0305e82c3301"], "ba": [True, False], "m": "ok", "ip": "10.0.0.1/8", "dm": 7,
    "o": 12345, "tsv": "'a' 'cat' 'fat'", "__op": "r",
}  # fmt: skip


def pipeline(schema: str = TYPES, sink: dict[str, Any] | None = None, **decode: Any) -> PipelineConfig:
    given = {"format": "debezium", "schema": schema, "unknown_fields": "ignore", **decode}
    return PipelineConfig.model_validate(
        {
            "name": "p",
            "guarantee": "exactly-once",
            "source": {"brokers": "localhost:9092", "topics": ["t"]},
            "decode": given,
            "sink": {"kind": "postgres", "url": "postgresql://localhost/d", "table": "t", **(sink or {})},
        }
    )


def decode(config: PipelineConfig, records: Sequence[Record]) -> Decoded:
    keys, values = ([record[part] for record in records] for part in (0, 1))
    batch = pa.RecordBatch.from_arrays([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], ["key", "value"])
    decoded = DEBEZIUM.decoder(config, refuse_nul=True).decode(batch)
    assert len(decoded.rows) + len(decoded.deletes) + len(decoded.refused) + decoded.skipped == len(records)
    return decoded


def only_row(config: PipelineConfig, record: Record) -> dict[str, Any]:
    decoded = decode(config, [record])
    assert not decoded.refused, decoded.refused
    rows: list[dict[str, Any]] = decoded.rows.to_pylist()
    assert len(rows) == 1
    return rows[0]


def refusal(config: PipelineConfig, record: Record) -> tuple[str, str]:
    (refused,) = decode(config, [record]).refused
    return refused.reason, refused.detail


def without(schema: str, *names: str) -> str:
    return ",".join(c for c in _columns(schema) if c.split()[0].strip("`") not in names)


def _columns(schema: str) -> list[str]:
    """The declared columns, apart at commas that are not inside a type."""
    columns, depth = [""], 0
    for character in schema:
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(character, 0)
        if character == "," and not depth:
            columns.append("")
        else:
            columns[-1] += character
    return [column.strip() for column in columns]


def replaced(schema: str, **types: str) -> str:
    columns = {column.split()[0].strip("`"): column for column in _columns(schema)}
    return ", ".join(f"`{n}` {types[n]}" if n in types else column for n, column in columns.items())


# ---- encodings -------------------------------------------------------------------------------------------------------


def test_every_type_as_the_connector_writes_it_unconfigured() -> None:
    row = only_row(pipeline(), RECORDS["p1-1"])
    assert math.isclose(row.pop("f4"), 1.1, rel_tol=1e-7)
    assert row == ROW


@pytest.mark.parametrize(
    ("prefix", "types", "differs"),
    [
        ("p2", {"by": "string"}, {"tm3": 45_296_123_000, "iv": None, "by": "3q2+7wA="}),
        # Times of connect end at milliseconds, and decimals as doubles at their 17 digits.
        (
            "p3",
            {"by": "string", "n": "double", "n38_10": "double"},
            {
                "ts": datetime(2026, 1, 31, 12, 34, 56, 123000),
                "ts6": datetime(2026, 1, 31, 12, 34, 56, 654000),
                "tm": 45_296_123,
                "by": "deadbeef00",
                "n": 123456789.12345679,
                "n38_10": 1.2345678901234569e27,
            },
        ),
        ("p5", {}, {"tm": 45_296_123_456_000, "tm3": 45_296_123_000_000}),
        ("p6", {"tm": "string", "tm3": "string"}, {"tm": "12:34:56.123456Z", "tm3": "12:34:56.123Z"}),
    ],
)
def test_every_type_as_it_is_configured(prefix: str, types: dict[str, str], differs: dict[str, Any]) -> None:
    drop = ("iv",) if prefix == "p2" else ()  # as text
    row = only_row(pipeline(replaced(without(TYPES, *drop), **types)), RECORDS[f"{prefix}-1"])
    del row["f4"]
    assert row == {name: value for name, value in (ROW | differs).items() if name not in drop}


def test_without_a_schema_the_pipeline_declares_what_the_connector_does() -> None:
    declared: dict[str, Any] = {"decimal_handling_mode": "precise", "time_precision_mode": "microseconds"}
    record = RECORDS["p4-1"]
    declared["binary_handling_mode"] = "base64-url-safe"
    row = only_row(pipeline(**declared), record)
    del row["f4"]
    assert row == ROW | {"tm3": 45_296_123_000}
    for missing, column in (
        ("decimal_handling_mode", "n12_2"),
        ("time_precision_mode", "ts"),
        ("binary_handling_mode", "by"),
    ):
        others: dict[str, Any] = {setting: word for setting, word in declared.items() if setting != missing}
        reason, detail = refusal(pipeline(**others), record)
        assert reason == "encoding-not-declared"
        assert detail.startswith(f"{column}: ")
        assert f"decode.{missing}" in detail


def test_a_column_of_milliseconds_among_microseconds() -> None:
    record = (None, b'{"before":null,"after":{"a":1769862896123456,"b":1769862896123},"source":{},"op":"c"}')
    schema = "a timestamp_ntz, b timestamp_ntz, __op string"
    row = only_row(pipeline(schema, time_precision_mode="adaptive", millisecond_columns=["b"]), record)
    assert row["a"] == datetime(2026, 1, 31, 12, 34, 56, 123456)
    assert row["b"] == datetime(2026, 1, 31, 12, 34, 56, 123000)


@pytest.mark.parametrize(
    ("name", "schema", "reason"),
    [
        ("p1-3", "d date", "out-of-range"),  # infinity
        ("p1-3", "ts timestamp_ntz", "out-of-range"),
        ("p1-3", "tstz timestamp", "bad-text"),
        ("p1-5", "ts timestamp_ntz", "out-of-range"),  # 4713 BC
        ("p1-5", "tstz timestamp", "bad-text"),  # the year 294276
        ("p6-3", "d date", "bad-text"),
        ("p6-5", "ts timestamp_ntz", "bad-text"),
        ("p2-8", "n decimal(38,9)", "bad-text"),  # POSITIVE_INFINITY
        ("p2-3", "n decimal(38,9)", "bad-text"),  # NAN
        ("p1-1", "n decimal(38,8)", "out-of-range"),  # a digit more
        ("p1-1", "n12_2 decimal(12,1)", "out-of-range"),
        ("p1-1", "n12_2 decimal(11,2)", "out-of-range"),
        ("p5-1", "ts timestamp", "wrong-type"),
        ("p1-1", "tstz timestamp_ntz", "wrong-type"),
        ("p1-1", "i8 int", "out-of-range"),
        ("p1-1", "n12_2 string", "wrong-type"),
        ("p1-1", "`by` string", "wrong-type"),
        ("p2-1", "`by` binary", "wrong-type"),
        ("p1-1", "i4 string", "wrong-type"),
        ("p1-1", "tx int", "wrong-type"),
        ("p1-1", "f8 float", "wrong-type"),
        ("p1-1", "ia int", "wrong-type"),
        ("p1-1", "ia array<string>", "wrong-type"),
        ("p1-1", "bt1 int", "wrong-type"),
        ("p1-1", "pt struct<x: double, y: double, wkb: binary, srid: int>", "wrong-type"),
        ("p1-1", "pt string", "wrong-type"),
        ("p4-1", "pt struct<x: double, y: double>", "wrong-type"),
    ],
)
def test_what_does_not_fit_exactly_is_refused(name: str, schema: str, reason: str) -> None:
    column = schema.split()[0].strip("`")
    found, detail = refusal(pipeline(f"{schema}, __op string"), RECORDS[name])
    assert (found, detail.split(":")[0].split("[")[0]) == (reason, column), detail


def test_the_ends_of_each_type() -> None:
    row = only_row(pipeline("f4 double, f8 double, n12_2 decimal(12,2), tm long, __op string"), RECORDS["p1-3"])
    assert math.isnan(row.pop("f4"))
    assert row == {"f8": math.inf, "n12_2": 0, "tm": 86_400_000_000, "__op": "r"}
    schema = "f4 float, f8 double, n decimal(5,0), d date, ts timestamp_ntz, tstz timestamp, __op string"
    row = only_row(pipeline(schema), RECORDS["p1-4"])
    assert row == {
        "f4": 16777216.0,
        "f8": 0.1,
        "n": 0,
        "d": date(1, 1, 1),
        "ts": datetime(1, 1, 1, 0, 0, 0, 1),
        "tstz": datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
        "__op": "r",
    }
    for name in ("p1", "p2"):
        numeric = pipeline("n decimal(30,5), __op string")
        assert only_row(numeric, RECORDS[f"{name}-6"])["n"] == Decimal(10) ** 20
        assert only_row(numeric, RECORDS[f"{name}-7"])["n"] == Decimal("-0.00001")


def test_digits_of_nanoseconds_are_not_cut() -> None:
    record = (
        '{"schema":{"type":"struct","fields":[{"type":"struct","fields":[{"type":"int64","name":"%s","field":"t"}],'
        '"field":"after"}]},"payload":{"before":null,"after":{"t":%d},"op":"c"}}'
    )
    nanos = pipeline("t timestamp_ntz, __op string")
    name = "io.debezium.time.NanoTimestamp"
    row = only_row(nanos, (None, (record % (name, 1_769_862_896_123_456_000)).encode()))
    assert row["t"] == datetime(2026, 1, 31, 12, 34, 56, 123456)
    reason, _ = refusal(nanos, (None, (record % (name, 1_769_862_896_123_456_001)).encode()))
    assert reason == "out-of-range"


def test_a_map_and_a_struct() -> None:
    """hstore as a map, and a composite type; not from a real connector, whose server has neither."""
    row = b'{"h":{"a":"1","b":null},"s":{"x":1,"d":"AMg="}}'
    types = (
        b'{"type":"map","keys":{"type":"string"},"values":{"type":"string","optional":true},"field":"h"},'
        b'{"type":"struct","fields":[{"type":"int32","field":"x"},{"type":"bytes","name":'
        b'"org.apache.kafka.connect.data.Decimal","parameters":{"scale":"2"},"field":"d"}],"field":"s"}'
    )
    event = b'{"before":null,"after":%s,"op":"c"}' % row
    wrapped = b'{"schema":{"type":"struct","fields":[{"type":"struct","fields":[%s],"field":"after"}]},"payload":%s}'
    schema = "h map<string,string>, s struct<x: int, d: decimal(4,2)>, __op string"
    expected = {"h": [("a", "1"), ("b", None)], "s": {"x": 1, "d": Decimal("2.00")}, "__op": "c"}
    assert only_row(pipeline(schema), (None, wrapped % (types, event))) == expected
    assert only_row(pipeline(schema, decimal_handling_mode="precise"), (None, event)) == expected
    assert refusal(pipeline(schema), (None, event))[1].startswith("s.d: a decimal as the string ")
    reason, detail = refusal(pipeline("h map<string,int>, __op string"), (None, wrapped % (types, event)))
    assert (reason, detail.split(":")[0]) == ("wrong-type", 'h["a"]')


def test_a_value_that_the_connector_did_not_get_is_refused_in_every_form() -> None:
    forms = {
        "p1": {"t": "string", "by": "binary", "j": "string", "jb": "string", "ia": "array<int>", "ba": "array<long>",
               "ta": "array<string>", "da": "array<date>", "ua": "array<string>", "bya": "array<binary>"},
        "p2": {"n": "decimal(38,2)", "ja": "array<string>"},
    }  # fmt: skip
    for prefix, columns in forms.items():
        for column, type in columns.items():
            reason, detail = refusal(pipeline(f"`{column}` {type}, __op string"), RECORDS[f"{prefix}-unavailable"])
            assert reason == "unavailable-value", detail
            assert detail.startswith(f"{column}: ")
            assert "REPLICA IDENTITY FULL" in detail
    row = only_row(pipeline("id int, k int, __op string"), RECORDS["p1-unavailable"])
    assert row == {"id": 1, "k": 2, "__op": "u"}


# ---- what becomes of each record -------------------------------------------------------------------------------------

PK2 = "a int not null, b string not null, v int, w string"
UPSERT = {"mode": "upsert", "key": ["a", "b"]}


@pytest.mark.parametrize("prefix", ["p1", "p4"])
def test_upsert_makes_rows_and_deletes(prefix: str) -> None:
    names = ["r-1", "r-2", "d-1", "c-1", "u-2", "d-2", "c-9"]
    records = [RECORDS[f"{prefix}-pk2-{name}"] for name in names]
    records.insert(6, (records[5][0], None))  # the null value behind a delete
    decoded = decode(pipeline(PK2, UPSERT), records)
    assert not decoded.refused
    assert decoded.rows_at.to_pylist() == [0, 1, 3, 4, 7]
    assert decoded.rows.select(["a", "b", "v"]).to_pylist() == [
        {"a": 1, "b": "x", "v": 1},
        {"a": 2, "b": "y", "v": 2},
        {"a": 1, "b": "z", "v": 1},
        {"a": 2, "b": "y", "v": 9},
        {"a": 9, "b": "n", "v": 1},
    ]
    assert decoded.deletes_at.to_pylist() == [2, 5, 6]
    assert decoded.deletes.to_pylist() == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 2, "b": "y"}]


def test_append_keeps_the_log_of_changes() -> None:
    schema = f"{PK2}, __op string not null, __ts_ms timestamp, __source_lsn long, __source_table string, __ts_us long"
    records = [RECORDS[f"p1-pk2-{name}"] for name in ("r-2", "u-2", "d-2")]
    decoded = decode(pipeline(schema), [*records, (records[2][0], None)])
    assert decoded.skipped == 1
    assert decoded.rows.to_pylist()[1:] == [
        {
            "a": 2, "b": "y", "v": 9, "w": None, "__op": "u", "__source_lsn": 25596984, "__source_table": "pk2",
            "__ts_ms": datetime(2026, 11, 20, 0, 19, 47, 684000, UTC), "__ts_us": 1795133987684329,
        },
        {
            "a": 2, "b": "y", "v": None, "w": None, "__op": "d", "__source_lsn": 25597112, "__source_table": "pk2",
            "__ts_ms": datetime(2026, 11, 20, 0, 19, 47, 684000, UTC), "__ts_us": 1795133987684833,
        },
    ]  # fmt: skip


def test_a_key_of_other_columns_is_refused() -> None:
    row, delete = RECORDS["p4-pk2-c-9"], RECORDS["p4-pk2-d-2"]
    less = pipeline(PK2, {"mode": "upsert", "key": ["a"]})  # rows (1, x) and (1, z) would be one
    assert refusal(less, row) == ("key-columns", "the record's key: it has the columns a, b, and sink.key a")
    assert refusal(less, delete)[0] == "tombstone-key"
    assert refusal(pipeline(PK2, UPSERT), (None, row[1]))[0] == "null-key"
    assert refusal(pipeline(PK2, UPSERT), (None, delete[1]))[0] == "tombstone-key"
    assert refusal(pipeline(PK2, UPSERT), (b"Struct{a=9,b=n}", row[1]))[0] == "key-columns"
    assert refusal(pipeline(PK2, UPSERT), (b'{"a":"9","b":"n"}', delete[1]))[0] == "tombstone-key"


def test_a_truncation_stops_the_run_unless_declared() -> None:
    record = RECORDS["p1-pk2-t-"]
    batch = {"topic": ["t"], "partition": [2], "offset": [17], "key": [record[0]], "value": [record[1]]}
    refusing = DEBEZIUM.decoder(pipeline(PK2, UPSERT), refuse_nul=True)
    with pytest.raises(ConfigError, match=r"truncated at its source \(record t/2/17\)") as stopped:
        refusing.decode(pa.RecordBatch.from_pydict(batch))
    assert 'decode.truncate = "ignore"' in stopped.value.advice
    assert decode(pipeline(PK2, UPSERT, truncate="ignore"), [record]).skipped == 1
    nullable = PK2.replace(" not null", "")
    row = only_row(pipeline(f"{nullable}, __op string not null, __source_lsn long", truncate="keep"), record)
    assert row == dict.fromkeys("abvw") | {"__op": "t", "__source_lsn": 25712840}


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("heartbeat", RECORDS["heartbeat"]),
        ("transaction", RECORDS["transaction"]),
        ("schema-change", (None, b'{"source":{},"ts_ms":1,"databaseName":"d","ddl":"x","tableChanges":[]}')),
        ("message", (b'{"prefix":"p"}', b'{"op":"m","ts_ms":1,"source":{},"message":{"prefix":"p","content":""}}')),
    ],
)
def test_other_records_are_ignored_by_declaration(kind: str, record: Record) -> None:
    reason, detail = refusal(pipeline(), record)
    assert reason == "not-a-change"
    assert f'decode.ignore = ["{kind}"]' in detail
    assert decode(pipeline(ignore=[kind]), [record]).skipped == 1
    others = [other for other in ("heartbeat", "transaction", "schema-change", "message") if other != kind]
    assert refusal(pipeline(ignore=others), record)[0] == "not-a-change"


def test_a_schema_is_read_wherever_it_stands() -> None:
    value = RECORDS["p1-1"][1]
    assert value
    expected = only_row(pipeline(), (None, value))
    schema, payload = value[len(b'{"schema":') : -1].split(b',"payload":')
    for spelled in (
        b'{ "schema":%s,"payload":%s}' % (schema, payload),
        b'{"payload":%s, "schema": %s}\n' % (payload, schema),
        b'{"schema":%s , "payload":%s}' % (schema, payload),
    ):
        assert only_row(pipeline(), (None, spelled)) == expected
    for broken in (
        b'{"schema":%s,"payload":%s,"payload":%s}' % (schema, payload, payload),
        b'{"schema":%s,"payload":%s}}' % (schema, payload),
        b'{"schema":%s},"payload":%s}' % (schema, payload),
        b'{"schema":%s,"payload":}' % schema,
        b'{"schema":{"type":7},"payload":%s}' % payload,
        b'{"schema":%s,"payload":null}' % schema,
    ):
        assert decode(pipeline(), [(None, broken), (None, value)]).rows_at.to_pylist() == [1]


# ---- by column -------------------------------------------------------------------------------------------------------

PLAIN = ", ".join(column for column in _columns(TYPES) if "<" not in column and not column.startswith("n "))
MODES = {"decimal_handling_mode": "precise", "binary_handling_mode": "base64"}
AGREE: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
    (PLAIN, None, {"time_precision_mode": "microseconds", **MODES}),
    (
        f"{PLAIN}, __source_lsn long, __ts_us timestamp, __transaction_id string",
        None,
        {"time_precision_mode": "connect"},
    ),
    (
        replaced(PLAIN, n12_2="decimal(20,4)", f4="double", i2="int"),
        None,
        {"time_precision_mode": "nanoseconds", **MODES},
    ),
    (replaced(PLAIN, n12_2="decimal(38,6)"), None, {}),
    (PK2, UPSERT, {"unknown_fields": "reject"}),
    (f"{PK2}, __source_lsn int not null, __source_ts_ms timestamp not null", UPSERT, {}),
    (f"{PK2}, __op string not null", {"mode": "dedupe", "key": ["a"]}, {"truncate": "ignore", "ignore": ["heartbeat"]}),
]


@pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")
@pytest.mark.parametrize("number", range(len(AGREE)))
def test_by_column_is_what_the_strict_way_says(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the real records, and the same with changed bytes: rows, deletes, and why a record is refused."""
    schema, sink, settings = AGREE[number]
    config = pipeline(schema, sink, **settings)
    chance = random.Random(number)
    real = [record for record in RECORDS.values() if record[1] and b'"op":"t"' not in record[1]]
    records: list[Record] = []
    for _ in range(30):
        records += real
        records += [changed(chance, chance.choice(real)) for _ in range(60)]
    chance.shuffle(records)
    counted: list[int] = []

    class Counting(ChangeColumns):
        def read(self, records: Sequence[Record]) -> list[tuple[pa.RecordBatch, pa.Int64Array]]:
            found = super().read(records)
            counted.extend(len(at) for _, at in found)
            return found

    monkeypatch.setattr(decoder, "ChangeColumns", Counting)
    by_column = decode(config, records)
    assert sum(counted) > 20, "nothing was read by column"
    monkeypatch.setattr(ChangeColumns, "can_read", staticmethod(lambda _: False))
    strictly = decode(config, records)
    assert by_column.refused == strictly.refused
    assert by_column.skipped == strictly.skipped
    for part in ("rows", "rows_at", "deletes", "deletes_at"):
        one, other = (getattr(found, part) for found in (by_column, strictly))
        if part in ("rows", "deletes"):
            one.validate(full=True)
            assert one.schema == other.schema
        for index, (mine, wanted) in enumerate(zip(one.to_pylist(), other.to_pylist(), strict=True)):
            assert repr(mine) == repr(wanted), f"{part} {index}"


def changed(chance: random.Random, record: Record) -> Record:
    """Some bytes of its key or its payload cut, doubled, or replaced by what means something there."""
    key, value = record
    assert value
    if key and chance.random() < 0.2:
        return _changed(chance, key, 0), value
    begin = value.find(b'"payload":')
    for _ in range(chance.randint(1, 2)):
        value = _changed(chance, value, max(begin, 0))
    return key, value


def _changed(chance: random.Random, data: bytes, begin: int) -> bytes:
    at = chance.randrange(begin, len(data))
    other = min(len(data), at + chance.choice((0, 1, 1, 2, 8, 40)))
    pieces = (b"", b"null", b'"', b"{", b"}", b",", b"1", b"9" * 20, b"-", b"\0", b"\xff", b"\\u0000", b"NaN", b" ")
    named = (
        b'"after":null,',
        b'"op":"c",',
        b'"op":"d",',
        b',"source":{',
        b',"after":{',
        b'"\\u0061fter":1,',
        b'"x":1,',
    )
    values = (
        b'"__debezium_unavailable_value"',
        b'"AAAAAAAAAAAAAAAAAAAAAAAAAA=="',
        b'""',
        b'"2026-01-31"',
        b"9223372036854775807",
    )
    return data[:at] + chance.choice(chance.choice((pieces, named, values, (data[at:other] * 2,)))) + data[other:]


# ---- settings --------------------------------------------------------------------------------------------------------

FILE = """\
name = "p"
guarantee = "exactly-once"
source = { brokers = "a:1", topics = ["t"] }
[sink]
kind = "postgres"
url = "postgresql://a@b/c"
table = "t"
SINK
[decode]
format = "debezium"
DECODE
"""


@pytest.mark.parametrize(
    ("decode", "sink", "message"),
    [
        (
            'schema = "id long"',
            "",
            "decode.schema: append keeps every change as a row, and no column says which are deletes; "
            'the column "__op string not null", or mode = "upsert"',
        ),
        (
            'schema = "id long not null, __source_lsn long not null"',
            'mode = "upsert"\nkey = ["id", "__source_lsn"]',
            "sink.key[1]: '__source_lsn' is not a column of the table",
        ),
        ('schema = "id long not null, __op int"', "", "decode.schema: __op is of the envelope and cannot be int"),
        ('schema = "id long, __op string"\npayload = "xml"', "", "decode.payload: "),
        (
            'schema = "id long, __op string"\npayload = "avro"',
            "",
            "decode.payload: 'avro' needs a registry, which has the schemas of the records; "
            "a table [decode.registry] with its url",
        ),
        (
            'schema = "id long, __op string"\n[decode.registry]\nurl = "http://localhost:8081"',
            "",
            'decode.registry: is not used: with payload = "json" each record brings its own schema, or none; '
            'payload = "avro", or no table [decode.registry]',
        ),
        (
            'schema = "id long not null, __op string"\ntruncate = "keep"',
            "",
            "decode.truncate: a truncation becomes a row of nulls, but decode.schema declares a column as not null",
        ),
        (
            'schema = "id long, __op string"\nmillisecond_columns = ["id"]',
            "",
            "decode.millisecond_columns[0]: 'id' is not a column declared as timestamp_ntz",
        ),
        ('schema = "id long, __op string"\nignore = ["heart"]', "", "decode.ignore[0]: "),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(decode: str, sink: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(FILE.replace("DECODE", decode).replace("SINK", sink))
    with pytest.raises(ConfigError) as refused:
        load(file, {})
    assert message in str(refused.value)


def test_the_example_is_a_pipeline_that_can_run() -> None:
    example = Path(__file__).parents[2] / "examples/debezium.toml"
    hop = plan(load_checked(example, {"DATABASE_URL": "postgresql://a@b/c"})).hops[1]
    assert hop.does.startswith("Read each value as a change event of Debezium")
    assert "A truncation of the source's table stops the run." in hop.promises


def test_a_log_without_duplicates_has_the_position_in_the_source_as_its_key() -> None:
    sink = {"mode": "dedupe", "key": ["a", "b", "__source_lsn"]}
    config = pipeline(f"{PK2}, __op string not null, __source_lsn long not null", sink)
    records = [RECORDS[f"p4-pk2-{name}"] for name in ("r-2", "u-2", "d-2")]
    assert decode(config, records).rows.column("__source_lsn").to_pylist() == [25592120, 25596984, 25597112]
