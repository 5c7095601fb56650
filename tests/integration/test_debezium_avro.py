"""Debezium's records in Avro, by a real registry: whatever is read of a record in JSON is read of the same in Avro.

The records are those of the real connector in ``debezium_records.json``, written again by fastavro under schemas as
Connect's Avro converters make them of Connect's own.
"""

from __future__ import annotations

import base64
import io
import json
import random
import struct
from datetime import date, datetime
from decimal import Context, Decimal
from typing import Any
from uuid import uuid4

import fastavro
import pyarrow as pa
import pytest
from tests.unit.test_debezium import PK2, RECORDS, ROW, TYPES, UPSERT, Record, decode, only_row, refusal, replaced
from tests.unit.test_debezium import pipeline as json_pipeline

from avow.errors import ConfigError, RegistryUnavailable
from avow.formats.debezium.plugin import DEBEZIUM
from avow.formats.registry.frame import framed
from avow.local.cluster import PortPicker
from avow.schema_registry import RegistrySettings, SchemaRegistry
from avow.settings import PipelineConfig

_CONNECT = "org.apache.kafka.connect.data."
_NAMES = {"int8": "int", "int16": "int", "int32": "int", "int64": "long"}
_LOGICAL = {f"{_CONNECT}Date": "date", f"{_CONNECT}Timestamp": "timestamp-millis", f"{_CONNECT}Time": "time-millis"}


class Converter:
    """Writes Avro as Connect's converters do, by schemas in a registry. ``meta``: with what Connect says of types
    (``connect.meta.data``)."""

    def __init__(self, url: str, *, meta: bool = True) -> None:
        self.url = url
        self._registry = SchemaRegistry(RegistrySettings(url=url))
        self._meta = meta
        self._subject = f"t{uuid4().hex[:10]}"

    def pipeline(self, schema: str = TYPES, sink: dict[str, Any] | None = None, **settings: Any) -> PipelineConfig:
        registry = {"url": self.url, "timeout": "2s"}
        return json_pipeline(schema, sink, **{"payload": "avro", "registry": registry, **settings})

    def record(self, record: Record) -> Record:
        key, value = (data and self.convert(json.loads(data, parse_float=Decimal)) for data in record)
        return key, value

    def convert(self, document: dict[str, Any]) -> bytes:
        return self.write(self.type(document["schema"], set()), _value(document["schema"], document["payload"]))

    def write(self, schema: Any, value: Any) -> bytes:
        number = self._registry.register(f"{self._subject}-{uuid4().hex[:8]}", "AVRO", json.dumps(schema))
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
        return framed(number, out.getvalue())

    def type(self, connect: dict[str, Any], known: set[str]) -> Any:
        kind, name = connect["type"], connect.get("name", "")
        said = {f"connect.{part}": connect[part] for part in ("name", "version", "parameters") if part in connect}
        if kind in ("int8", "int16"):
            said["connect.type"] = kind
        if not self._meta:
            said = {}
        node: Any
        if kind == "struct":
            name = name or "io.confluent.connect.avro.ConnectDefault"
            node = name if name in known else self._record(connect, name, known) | said
        elif kind == "array":
            node = {"type": "array", "items": self.type(connect["items"], known)} | said
        elif kind == "map":
            node = {"type": "map", "values": self.type(connect["values"], known)} | said
        elif name == f"{_CONNECT}Decimal":
            parameters = connect["parameters"]
            digits = int(parameters.get("connect.decimal.precision", 64))
            node = {"type": "bytes", "logicalType": "decimal", "scale": int(parameters["scale"]), "precision": digits}
            node |= said
        else:
            logical = {"logicalType": _LOGICAL[name]} if name in _LOGICAL else {}
            node = {"type": _NAMES.get(kind, kind), **said, **logical}
        return ["null", node] if connect.get("optional") else node

    def _record(self, connect: dict[str, Any], name: str, known: set[str]) -> dict[str, Any]:
        known.add(name)
        namespace, _, bare = name.rpartition(".")
        fields = [{"name": f["field"], "type": self.type(f, known)} for f in connect["fields"]]
        return {"type": "record", "name": bare, "namespace": namespace, "fields": fields}


def _value(connect: dict[str, Any], value: Any) -> Any:
    """A value of Connect's JSON as fastavro takes it."""
    if value is None:
        return None
    match connect["type"]:
        case "struct":
            return {f["field"]: _value(f, value.get(f["field"])) for f in connect["fields"]}
        case "array":
            return [_value(connect["items"], item) for item in value]
        case "map":
            return {name: _value(connect["values"], item) for name, item in value.items()}
        case "bytes":
            return base64.b64decode(value) if isinstance(value, str) else _unscaled(connect, Decimal(value))
        case "float" | "double":
            return float(value)
    return value


def _unscaled(connect: dict[str, Any], value: Decimal) -> bytes:
    """A decimal that stands as a number in JSON."""
    return int(value.scaleb(int(connect["parameters"]["scale"]), Context(prec=100))).to_bytes(32, "big", signed=True)


@pytest.fixture
def avro(schema_registry: str) -> Converter:
    return Converter(schema_registry)


WITH_SCHEMA = {name: r for name, r in RECORDS.items() if r[1] is not None and r[1].startswith(b'{"schema":{')}
TYPES_OF = {
    "p1": TYPES,
    "p2": replaced(TYPES, by="string", iv="string"),
    "p3": replaced(TYPES, by="string", n="double", n38_10="double"),
    "p5": TYPES,
    "p6": replaced(TYPES, tm="string", tm3="string"),
}


def test_every_type_is_what_it_is_in_json(avro: Converter) -> None:
    rows = 0
    for prefix, types in TYPES_OF.items():
        names = [name for name in WITH_SCHEMA if name.startswith(f"{prefix}-") and "pk2" not in name]
        assert names
        expected = decode(json_pipeline(types), [RECORDS[name] for name in names])
        found = decode(avro.pipeline(types), [avro.record(RECORDS[name]) for name in names])
        assert repr(found.rows.to_pylist()) == repr(expected.rows.to_pylist())
        assert found.rows_at == expected.rows_at
        assert [(r.index, r.reason) for r in found.refused] == [(r.index, r.reason) for r in expected.refused]
        rows += len(found.rows)
    assert rows >= len(TYPES_OF)
    row = only_row(avro.pipeline(), avro.record(RECORDS["p1-1"]))
    assert row.pop("f4") == pytest.approx(1.1, rel=1e-7)
    assert row == ROW
    # As JSON has it, it is the double that is next to the text "1.1", and here the number that PostgreSQL holds.
    f4 = only_row(avro.pipeline("f4 double, __op string"), avro.record(RECORDS["p1-1"]))["f4"]
    assert f4 == struct.unpack("<f", struct.pack("<f", 1.1))[0]


def test_a_column_declared_as_any_type_is_read_or_refused_as_in_json(avro: Converter) -> None:
    records = {name: (RECORDS[name], avro.record(RECORDS[name])) for name in ("p1-1", "p2-1", "p3-1", "p6-1")}
    declared = "boolean short int long float double decimal(38,9) decimal(12,2) string binary date timestamp_ntz"
    declared += " timestamp array<int> array<string> array<double> map<string,int> struct<scale:int>"
    columns = [*(name if name != "by" else "`by`" for name in ROW if not name.startswith("__")), "pt", "vec"]
    for name, (in_json, in_avro) in records.items():
        for type in declared.split(" "):
            for column in columns:
                schema = f"{column} {type}, __op string"
                expected, found = decode(json_pipeline(schema), [in_json]), decode(avro.pipeline(schema), [in_avro])
                why = [(r.reason, r.detail) for r in (*expected.refused, *found.refused)]
                assert [r.reason for r in found.refused] == [r.reason for r in expected.refused], (name, schema, why)
                assert repr(found.rows.to_pylist()) == repr(expected.rows.to_pylist()), (name, schema)


def test_a_value_that_the_connector_did_not_get_is_refused_in_every_form(avro: Converter) -> None:
    forms = {
        "p1": {"t": "string", "by": "binary", "j": "string", "jb": "string", "ia": "array<int>", "ba": "array<long>",
               "ta": "array<string>", "da": "array<date>", "ua": "array<string>", "bya": "array<binary>"},
        "p2": {"n": "decimal(38,2)", "ja": "array<string>"},
    }  # fmt: skip
    for prefix, columns in forms.items():
        record = avro.record(RECORDS[f"{prefix}-unavailable"])
        for column, type in columns.items():
            reason, detail = refusal(avro.pipeline(f"`{column}` {type}, __op string"), record)
            assert (reason, detail.partition(":")[0]) == ("unavailable-value", column)


def test_rows_deletes_and_null_values_under_upsert(avro: Converter) -> None:
    names = ["r-1", "r-2", "d-1", "c-1", "u-2", "d-2", "c-9"]
    records = [avro.record(RECORDS[f"p1-pk2-{name}"]) for name in names]
    records.insert(6, (records[5][0], None))
    decoded = decode(avro.pipeline(PK2, UPSERT), records)
    assert not decoded.refused
    assert decoded.rows_at.to_pylist() == [0, 1, 3, 4, 7]
    assert decoded.deletes_at.to_pylist() == [2, 5, 6]
    assert decoded.deletes.to_pylist() == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 2, "b": "y"}]
    row, delete = records[7], records[5]
    less = avro.pipeline(PK2, {"mode": "upsert", "key": ["a"]})
    assert refusal(less, row) == ("key-columns", "the record's key: it has the columns a, b, and sink.key a")
    assert refusal(less, delete)[0] == "tombstone-key"
    assert refusal(avro.pipeline(PK2, UPSERT), (None, row[1]))[0] == "null-key"
    assert refusal(avro.pipeline(PK2, UPSERT), (b"Struct{a=9,b=n}", row[1]))[0] == "key-columns"
    assert refusal(avro.pipeline(PK2, UPSERT), (avro.write("int", 9), row[1]))[0] == "key-columns"
    with pytest.raises(ConfigError, match="truncated at its source"):
        decode(avro.pipeline(PK2, UPSERT), [avro.record(RECORDS["p1-pk2-t-"])])


def test_the_log_of_changes_and_its_envelope(avro: Converter) -> None:
    schema = f"{PK2}, __op string not null, __ts_ms timestamp, __source_lsn long, __source_table string, __ts_us long"
    records = [RECORDS[f"p1-pk2-{name}"] for name in ("r-2", "u-2", "d-2")]
    expected = decode(json_pipeline(schema), [*records, (records[2][0], None)])
    found = decode(avro.pipeline(schema), [*map(avro.record, records), (records[2][0], None)])
    assert found.skipped == expected.skipped == 1
    assert found.rows == expected.rows
    beat = {"type": "record", "name": "Heartbeat", "fields": [{"name": "ts_ms", "type": "long"}]}
    beating = (None, avro.write(beat, {"ts_ms": 1}))
    assert refusal(avro.pipeline(), beating)[0] == "not-a-change"
    assert decode(avro.pipeline(ignore=["heartbeat"]), [beating]).skipped == 1


def change(avro: Converter, *fields: tuple[str, Any, Any]) -> Record:
    """An insert of a row of such columns: name, type and value."""
    row = {"type": "record", "name": "Value", "fields": [{"name": name, "type": type} for name, type, _ in fields]}
    nullable = ["null", row]
    envelope = {
        "type": "record",
        "name": "Envelope",
        "fields": [
            {"name": "before", "type": nullable, "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "op", "type": "string"},
        ],
    }
    value = {"before": None, "after": {name: value for name, _, value in fields}, "op": "c"}
    return None, avro.write(envelope, value)


def named(type: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": type, "connect.version": 1, "connect.name": name, **more}


def test_what_types_stand_for_by_connect_or_by_avro(avro: Converter) -> None:
    record = change(
        avro,
        ("i1", {"type": "int", "connect.type": "int8"}, -128),
        ("d", named("int", f"{_CONNECT}Date", logicalType="date"), 20484),
        ("ms", named("long", f"{_CONNECT}Timestamp", logicalType="timestamp-millis"), 1769862896123),
        ("ns", named("long", "io.debezium.time.NanoTimestamp"), 1769862896123456000),
        ("ld", {"type": "int", "logicalType": "date"}, 20484),
        ("lts", {"type": "long", "logicalType": "timestamp-micros"}, 1769862896123456),
        ("ln", {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}, b"\x04\xd2"),
        (
            "lf",
            {"type": "fixed", "name": "F", "size": 3, "logicalType": "decimal", "precision": 6, "scale": 2},
            b"\0\4\xd2",
        ),
        ("u", {"type": "string", "logicalType": "uuid"}, "3f2504e0-4f89-11d3-9a0c-0305e82c3301"),
        ("e", {"type": "enum", "name": "Mood", "symbols": ["sad", "ok"]}, "ok"),
        ("h", {"type": "map", "values": ["null", "string"]}, {"a": "1", "b": None}),
        ("x", "double", float("nan")),
    )
    schema = (
        "i1 byte, d date, ms timestamp_ntz, ns timestamp_ntz, ld date, lts timestamp_ntz, ln decimal(6,2), "
        "lf decimal(6,2), u string, e string, h map<string,string>, x double, __op string"
    )
    row = only_row(avro.pipeline(schema), record)
    assert repr(row.pop("x")) == "nan"
    noon = datetime(2026, 1, 31, 12, 34, 56, 123456)
    assert row == {
        "i1": -128, "d": date(2026, 1, 31), "ms": noon.replace(microsecond=123000), "ns": noon, "ld": date(2026, 1, 31),
        "lts": noon, "ln": Decimal("12.34"), "lf": Decimal("12.34"), "u": "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
        "e": "ok", "h": [("a", "1"), ("b", None)], "__op": "c",
    }  # fmt: skip


ENTRY = {"type": "record", "name": "MapEntry", "namespace": "io.confluent.connect.avro", "fields": [
    {"name": "key", "type": "int"}, {"name": "value", "type": "double"}]}  # fmt: skip


@pytest.mark.parametrize(
    ("type", "value", "declared", "detail"),
    [
        ({"type": "array", "items": ENTRY}, [{"key": 1, "value": 2.0}], "map<string,double>", "no strings"),
        ({"type": "array", "items": {**ENTRY, "name": "Other", "connect.internal.type": "MapEntry"}},
         [{"key": 1, "value": 2.0}], "array<struct<key: int, value: double>>", "no strings"),
        (["null", "int", "string"], 7, "int", "union of null, int, string"),
        ("long", 1769862896123, "timestamp_ntz", 'has "int64"'),
        (named("long", "io.debezium.time.MicroTimestamp"), 1, "timestamp", "timestamp_ntz"),
        (named("bytes", "io.debezium.data.Bits"), b"\5", "string", "Bits"),
        ("string", "a\0b", "string", "NUL"),
        ("int", 40000, "short", "does not fit into short"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(avro: Converter, type: Any, value: Any, declared: str, detail: str) -> None:
    record = change(avro, ("id", "int", 1), ("c", type, value))
    reason, found = refusal(avro.pipeline(f"id int, c {declared}, __op string"), record)
    assert found.startswith("c: "), (reason, found)
    assert detail in found
    assert only_row(avro.pipeline("id int, __op string"), record) == {"id": 1, "__op": "c"}


def test_damaged_bytes_are_a_dead_letter_and_nothing_else(avro: Converter) -> None:
    whole = avro.record(RECORDS["p1-1"])[1]
    row = avro.record(RECORDS["p1-pk2-c-9"])
    assert whole
    assert row[0]
    assert row[1]
    made = DEBEZIUM.decoder(avro.pipeline(), refuse_nul=True)
    upsert = DEBEZIUM.decoder(avro.pipeline(PK2, UPSERT), refuse_nul=True)
    chance = random.Random(18)

    def damaged(data: bytes) -> bytes:
        broken = bytearray(data)
        match chance.randrange(3):
            case 0:
                return data[: chance.randrange(5, len(data))]
            case 1:
                broken[chance.randrange(5, len(data))] = chance.randrange(256)
            case _:
                at = chance.randrange(5, len(data))
                broken[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        return bytes(broken)

    values = [damaged(whole) for _ in range(2000)]
    batch = pa.record_batch({"key": pa.nulls(len(values), pa.binary()), "value": pa.array(values, pa.binary())})
    decoded = made.decode(batch)
    assert len(decoded.rows) + len(decoded.refused) + decoded.skipped == len(values)
    assert len(decoded.refused) > 500
    pairs = [(damaged(row[0]), damaged(row[1])) for _ in range(2000)]
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    decoded = upsert.decode(
        pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
    )
    assert len(decoded.rows) + len(decoded.deletes) + len(decoded.refused) == len(pairs)


def test_frames_trailing_bytes_and_schemas_that_are_none_of_ours(avro: Converter) -> None:
    good = change(avro, ("id", "int", 1))[1]
    assert good
    recursive = {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]}
    registry = SchemaRegistry(RegistrySettings(url=avro.url))
    other = registry.register(
        f"t{uuid4().hex[:8]}", "JSON", '{"$schema":"http://json-schema.org/draft-07/schema#","type":"object"}'
    )
    inner = {"type": "record", "name": "R0", "fields": [{"name": "f", "type": "int"}]}
    chain = [
        inner,
        *({**inner, "name": f"R{n}", "fields": [{"name": "f", "type": f"R{n - 1}"}]} for n in range(1, 1500)),
    ]
    fields = [{"name": f"g{n}", "type": ["null", record]} for n, record in enumerate(chain)]
    deep = registry.register(f"t{uuid4().hex[:8]}", "AVRO", json.dumps({**inner, "name": "Deep", "fields": fields}))
    records = {
        framed(deep, b"\0" * 1499 + b"\2\0"): "too-deep",
        b"": "empty",
        b"\1" + good[1:]: "bad-frame",
        b"\0\0": "bad-frame",
        b"\0" + (2**31 - 2).to_bytes(4, "big") + good[5:]: "unknown-schema-id",
        good + b"\0": "not-avro",
        good[:-1]: "not-avro",
        avro.write("string", "x"): "not-object",
        avro.write(["null", "int"], None): "not-object",
        avro.write(recursive, {"r": None}): "incompatible-schema",
        framed(other, b"{}"): "incompatible-schema",
    }
    decoded = decode(avro.pipeline("id int, __op string"), [*((None, value) for value in records), (None, good)])
    assert [r.reason for r in decoded.refused] == list(records.values())
    assert decoded.rows.to_pylist() == [{"id": 1, "__op": "c"}]


def test_a_registry_that_is_away_is_nobodys_record(avro: Converter) -> None:
    record = change(avro, ("id", "int", 1))
    registry = {"url": f"http://127.0.0.1:{PortPicker().free()}", "timeout": "1s"}
    with pytest.raises(RegistryUnavailable):
        decode(avro.pipeline("id int, __op string", registry=registry), [record])
    with pytest.raises(RegistryUnavailable):  # a key
        decode(
            avro.pipeline("id int not null", {"mode": "upsert", "key": ["id"]}, registry=registry), [(record[1], None)]
        )
