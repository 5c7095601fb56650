"""Protobuf by hand: schemas and their columns, what is refused, other writers' schemas, frames, JSON into messages."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.fuzz_protobuf import run

from avow import native
from avow.errors import ConfigError
from avow.formats import decoder
from avow.formats.base import Decoded, DecodeError, Reason
from avow.formats.protobuf.compatibility import Incompatible, resolve
from avow.formats.protobuf.compile import compile_text, imports_of
from avow.formats.protobuf.descriptors import BadSchema
from avow.formats.protobuf.encode import DoesNotFit, encode
from avow.formats.protobuf.frame import place_bytes, read_place
from avow.formats.protobuf.layout import columns, layout
from avow.formats.protobuf.plugin import PROTOBUF, ProtobufConfig, ProtobufSchema
from avow.formats.protobuf.reader import UNKNOWN_ENUM, Rules, StrictReader
from avow.formats.protobuf.readers import OTHER_MESSAGE, schema_reader
from avow.formats.protobuf.wire import NOT_PROTOBUF, varint
from avow.formats.registry.decoder import IncompatibleSchema
from avow.formats.registry.frame import BAD_FRAME
from avow.plan import plan
from avow.settings import PipelineConfig, load
from avow.testing.formats import FormatContract

RULES = Rules(refuse_nul=True)


def proto(body: str, syntax: str = "proto3") -> str:
    known = "".join(f'import "google/protobuf/{name}.proto"; ' for name in ("timestamp", "wrappers", "struct", "empty"))
    return f'syntax = "{syntax}"; package p; {known}\n{body}'


def columns_of(body: str, message: str = "p.M", syntax: str = "proto3") -> str:
    return str(columns(layout(compile_text(proto(body, syntax)), message)))


def refused(body: str, message: str = "p.M", syntax: str = "proto3") -> str:
    with pytest.raises(BadSchema) as error:
        columns_of(body, message, syntax)
    return str(error.value)


def read(body: str, data: bytes, syntax: str = "proto3", rules: Rules = RULES) -> dict[str, Any]:
    return dict(StrictReader(layout(compile_text(proto(body, syntax)), "p.M"), rules).row(data))


def reason(body: str, data: bytes, syntax: str = "proto3", rules: Rules = RULES) -> tuple[str, str]:
    with pytest.raises(DecodeError) as error:
        read(body, data, syntax, rules)
    return error.value.reason, error.value.path


class TestWithoutTheLibrary(FormatContract):
    plugin = PROTOBUF

    @pytest.fixture(autouse=True)
    def _without(self) -> Iterator[None]:
        native.allow(False)
        yield
        native.allow(True)


# ---- columns -------------------------------------------------------------------------------------------------------


def test_the_columns_of_every_type() -> None:
    types = "double float int32 int64 uint32 uint64 sint32 sint64 fixed32 fixed64 sfixed32 sfixed64 bool string bytes"
    fields = " ".join(f"{type} {type}_ = {number};" for number, type in enumerate(types.split(), start=1))
    assert columns_of(f"message M {{ {fields} }}") == (
        "double_ double, float_ float, int32_ int, int64_ long, "
        "uint32_ long, uint64_ decimal(20,0), sint32_ int, sint64_ long, "
        "fixed32_ long, fixed64_ decimal(20,0), sfixed32_ int, sfixed64_ long, "
        "bool_ boolean, string_ string, bytes_ binary"
    )


def test_the_columns_of_what_is_not_there() -> None:
    body = """
    enum E { Z = 0; }
    message M { optional int32 a = 1; repeated E b = 2; map<int64, N> c = 3; N d = 4;
      oneof o { int32 e = 5; string f = 6; }
      google.protobuf.Timestamp g = 7; google.protobuf.UInt64Value h = 8; google.protobuf.Value i = 9;
      google.protobuf.Empty j = 10; N.Inner k = 11; }
    message N { E x = 1; message Inner {} }"""
    assert columns_of(body) == (
        "a int, b array<string>, c map<string,struct<x: string>>, "
        "d struct<x: string>, e int, f string, g timestamp, h decimal(20,0), i string, j boolean, k boolean"
    )


def test_the_columns_of_proto2_and_their_defaults() -> None:
    body = """message M { required int32 a = 1; optional int32 b = 2; optional sint64 c = 3 [default = -7];
      optional E d = 4 [default = TWO]; optional string e = 5 [default = "x"]; enum E { ONE = 1; TWO = 2; } }"""
    assert columns_of(body, syntax="proto2") == ("a int not null, b int, c long, d string, e string")
    assert read(body, b"\x08\x05", "proto2") == {"a": 5, "b": None, "c": -7, "d": "TWO", "e": "x"}
    assert reason(body, b"\x10\x05", "proto2") == (Reason.MISSING_FIELD, "a")


def test_editions() -> None:
    text = """edition = "2023"; package p; message M { int32 a = 1; int32 b = 2 [features.field_presence = IMPLICIT];
      int32 c = 3 [features.field_presence = LEGACY_REQUIRED]; }"""
    assert str(columns(layout(compile_text(text), "p.M"))) == "a int, b int, c int not null"


def test_what_no_columns_can_be_made_of_is_named() -> None:
    assert "p.M contains itself (p.M in p.N in p.M)" in refused(
        "message M { N n = 1; } message N { repeated M m = 1; }"
    )
    assert "contains itself" in refused("message M { map<string, M> m = 1; }")
    assert "the field g of p.M is a group" in refused("message M { optional group G = 1 { } }", syntax="proto2")
    assert "the fields a and A of p.M differ by case only" in refused("message M { int32 a = 1; int32 A = 2; }")
    assert refused("message A {} message B {}") == "there is no message p.M; there are: p.A, p.B"
    assert "p.M has no fields" in refused("message M {}")
    deep = " ".join(f"message N{n} {{ N{n + 1} n = 1; }}" for n in range(40))
    assert "p.M is nested more than 32 deep" in refused(
        f"message M {{ N0 n = 1; }} {deep} message N40 {{ int32 a = 1; }}"
    )
    wide = " ".join(f"message N{n} {{ {' '.join(f'N{n + 1} f{i} = {i + 1};' for i in range(10))} }}" for n in range(9))
    assert "more than 10,000 fields" in refused(f"message M {{ N0 n = 1; }} {wide} message N9 {{ int32 a = 1; }}")


def test_a_text_that_does_not_compile_is_refused_in_one_line() -> None:
    def wrong(text: str, imports: tuple[tuple[str, str], ...] = ()) -> str:
        with pytest.raises(BadSchema) as error:
            compile_text(text, imports)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert wrong('syntax = "proto3"; message M { int32 a = 1 }').startswith(
        "it does not compile: schema.proto:1:44: Expected"
    )
    assert '"Nope" is not defined' in wrong(proto("message M { Nope a = 1; }"))
    assert "it imports x/y.proto, which is neither under its folder nor" in wrong('import "x/y.proto"; message M {}')
    for name in ("../x.proto", "/etc/x.proto", "a/../../x.proto"):
        assert "which is no name of a file inside a folder" in wrong(f'import "{name}";', ((name, ""),))
    assert "it does not compile" in wrong("\0\xff")


def test_imports_are_looked_for_in_the_files_own_folder(tmp_path: Path) -> None:
    (tmp_path / "shop" / "types").mkdir(parents=True)
    (tmp_path / "shop" / "types" / "money.proto").write_text(
        'syntax = "proto3"; package t; import "more.proto"; message Money { More units = 1; }'
    )
    (tmp_path / "shop" / "more.proto").write_text('syntax = "proto3"; package t; message More { int32 a = 1; }')
    text = """syntax = "proto3"; package shop;
        import public "types/money.proto";
        import "google/protobuf/timestamp.proto";
        message Payment { t.Money price = 1; google.protobuf.Timestamp at = 2; }"""
    (tmp_path / "shop" / "payment.proto").write_text(text)
    assert [name for name, _ in imports_of(text, tmp_path / "shop")] == ["more.proto", "types/money.proto"]
    decode = {"format": "protobuf", "schema_file": str(tmp_path / "shop" / "payment.proto")}
    config = ProtobufConfig.model_validate(decode)
    assert str(config.columns) == "price struct<units: struct<a: int>>, at timestamp"


# ---- settings ------------------------------------------------------------------------------------------------------


def pipeline(text: str, key: tuple[str, ...] = (), **decode: Any) -> PipelineConfig:
    mode = {"mode": "dedupe", "key": key} if key else {}
    own = {"format": "protobuf", "schema": text, **decode}
    return PipelineConfig.model_validate(
        {
            "name": "p",
            "guarantee": "exactly-once",
            "source": {"brokers": "a:1", "topics": ["t"]},
            "decode": own,
            "sink": {"kind": "postgres", "url": "postgresql://a@b/c", "table": "t", **mode},
        }
    )


def decoded(pipeline: PipelineConfig, *values: bytes | None) -> Decoded:
    arrays = [pa.nulls(len(values), pa.binary()), pa.array(values, pa.binary())]
    return decoder(pipeline, refuse_nul=True).decode(pa.RecordBatch.from_arrays(arrays, ["key", "value"]))


ONE = 'syntax = "proto3"; package shop; message Payment { int64 id = 1; Way way = 2; enum Way { IN = 0; } }'


def test_a_file_with_protobuf(tmp_path: Path) -> None:
    (tmp_path / "payments.proto").write_text(ONE + " message Other {}")
    file = tmp_path / "p.toml"

    def problem(decode: str) -> str:
        file.write_text(
            'name = "p"\nguarantee = "exactly-once"\nsource = { brokers = "a:1", topics = ["t"] }\n'
            'sink = { kind = "postgres", url = "postgresql://a@b/c", table = "t" }\n[decode]\nformat = "protobuf"\n'
            + decode
        )
        with pytest.raises(ConfigError) as error:
            load(file, {})
        return str(error.value)

    schema_file = f'schema_file = "{tmp_path / "payments.proto"}"\n'
    assert "message is not set, and there are 2: shop.Payment, shop.Other" in problem(schema_file)
    assert "there is no message Payment; there are: shop.Payment, shop.Other" in problem(
        f'{schema_file}message = "Payment"'
    )
    assert "decode.message: " in problem(f'{schema_file}message = "a b"')
    assert "decode.unknown_enum: " in problem(f'{schema_file}message = "shop.Payment"\nunknown_enum = "drop"')
    assert "it does not compile" in problem('schema = "message"')
    file.write_text(
        'name = "p"\nguarantee = "exactly-once"\nsource = { brokers = "a:1", topics = ["t"] }\n'
        'sink = { kind = "postgres", url = "postgresql://a@b/c", table = "t" }\n[decode]\nformat = "protobuf"\n'
        f'{schema_file}message = "shop.Payment"\n'
    )
    loaded = load(file, {})
    does, *promises = plan(loaded).hops[1].does, *plan(loaded).hops[1].promises
    assert does.startswith("Read each value as the Protobuf message shop.Payment, written by the reader's own schema")
    assert "A number that an enum has not makes the record a dead letter." in promises


def test_unknown_fields_and_enums_are_what_the_pipeline_declares() -> None:
    values = (b"\x08\x01", b"\x08\x02\x18\x07", b"\x08\x03\x10\x07", b"\x10" + varint(-3))
    found = decoded(pipeline(ONE), *values)
    assert found.rows.to_pylist() == [{"id": 1, "way": "IN"}, {"id": 2, "way": "IN"}]
    assert [(record.index, record.reason) for record in found.refused] == [(2, UNKNOWN_ENUM), (3, UNKNOWN_ENUM)]
    assert found.refused[0].detail.startswith("way: 7 is no value of the enum, which has ")
    found = decoded(pipeline(ONE, unknown_fields="reject", unknown_enum="keep"), *values)
    assert found.rows.to_pylist() == [{"id": 1, "way": "IN"}, {"id": 3, "way": "7"}, {"id": 0, "way": "-3"}]
    assert [(record.index, record.reason) for record in found.refused] == [(1, Reason.UNKNOWN_FIELD)]


def test_a_key_is_never_null() -> None:
    text = 'syntax = "proto3"; message M { optional int64 id = 1; string name = 2; }'
    found = decoded(pipeline(text, ("id", "name")), b"\x12\x01a", b"\x08\x00")
    assert found.rows.to_pylist() == [{"id": 0, "name": ""}]
    assert [(record.index, record.reason) for record in found.refused] == [(0, Reason.NULL_KEY)]
    assert decoded(pipeline(text), b"\x12\x01a").rows.to_pylist() == [{"id": None, "name": "a"}]


def test_the_compiled_schema_travels_and_readers_are_kept_by_what_it_says() -> None:
    schema = pipeline(ONE).decode
    assert isinstance(schema, ProtobufConfig)
    again = pickle.loads(pickle.dumps(schema)).protobuf_schema
    assert again == schema.protobuf_schema
    assert hash(again) == hash(schema.protobuf_schema)
    assert again.record == schema.protobuf_schema.record


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type", "encoded", "value"),
    [
        ("int32", varint(-1), -1),
        ("int32", b"\xff\xff\xff\xff\x07", 2**31 - 1),
        ("int32", b"\xff\xff\xff\xff\x0f", None),  # 2^32 - 1, which libraries read as -1
        ("int32", b"\x80\x80\x80\x80\x08", None),
        ("int32", varint(-(2**31) - 1), None),
        ("uint32", b"\xff\xff\xff\xff\x0f", 2**32 - 1),
        ("uint32", b"\x80\x80\x80\x80\x10", None),
        ("uint32", varint(-1), None),
        ("sint32", b"\xff\xff\xff\xff\x0f", -(2**31)),
        ("sint32", b"\x80\x80\x80\x80\x10", None),
        ("int64", varint(-1), -1),
        ("uint64", varint(-1), Decimal(2**64 - 1)),
        ("bool", b"\x01", True),
        ("bool", b"\x02", None),
        ("bool", b"\x81\x00", True),
        ("E", b"\x01", "ONE"),
        ("E", b"\x81\x80\x80\x80\x10", None),  # 2^32 + 1
    ],
)
def test_numbers_at_their_ends(type: str, encoded: bytes, value: object) -> None:
    body = (
        f"message M {{ {type} a = 1; repeated {type} b = 2; map<string, {type}> c = 3; }} enum E {{ Z = 0; ONE = 1; }}"
    )
    entry = b"\x10" + encoded
    values = [
        b"\x08" + encoded,
        b"\x10" + encoded,
        b"\x12" + varint(len(encoded)) + encoded,
        b"\x1a" + varint(len(entry)) + entry,
    ]
    expected: list[dict[str, Any]] = [{"a": value}, {"b": [value]}, {"b": [value]}, {"c": [("", value)]}]
    found = decoded(pipeline(proto(body), message="p.M"), *values)
    if value is None:
        due = UNKNOWN_ENUM if type == "E" and encoded == b"\x02" else Reason.OUT_OF_RANGE
        assert [record.reason for record in found.refused] == [due] * 4
    else:
        rows = found.rows.to_pylist()
        assert [{name: row[name] for name in wanted} for row, wanted in zip(rows, expected, strict=True)] == expected


def test_times() -> None:
    body = "message M { google.protobuf.Timestamp t = 1; }"

    def at(seconds: int, nanos: int) -> bytes:
        inner = b"\x08" + varint(seconds) + b"\x10" + varint(nanos)
        return b"\x0a" + varint(len(inner)) + inner

    first, last = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    good = [at(-62_135_596_800, 0), at(253_402_300_799, 999_999_000), b"\x0a\x00"]
    bad = [at(-62_135_596_801, 0), at(253_402_300_800, 0), at(0, 1), at(0, -1_000), at(0, 10**9), at(2**63 - 1, 0)]
    found = decoded(pipeline(proto(body)), *good, *bad)
    assert [row["t"] for row in found.rows.to_pylist()] == [first, last, datetime(1970, 1, 1, tzinfo=UTC)]
    assert [record.reason for record in found.refused] == [Reason.OUT_OF_RANGE] * len(bad)


def test_what_kafka_connect_writes() -> None:
    """Decimals with their precision beside them, dates, times of the day, and options that say nothing of the bytes."""
    text = """syntax = "proto3"; package p; import "confluent/meta.proto"; import "confluent/type/decimal.proto";
        import "google/type/date.proto"; import "google/type/timeofday.proto";
        option (confluent.file_meta) = { doc: "x" };
        message M { option (confluent.message_meta) = { tags: ["a"] };
          confluent.type.Decimal a = 1 [(confluent.field_meta) = { doc: "d",
            params: [{ key: "precision", value: "5" }, { key: "scale", value: "2" }] }];
          confluent.type.Decimal b = 2; google.type.Date c = 3; google.type.TimeOfDay d = 4;
          confluent.type.Decimal e = 5 [(confluent.field_meta) = { params: [{ key: "precision", value: "64" }] }]; }"""
    decimal, time = (
        "struct<value: binary, precision: long, scale: int>",
        "hours: int",
    )
    config = pipeline(text)
    assert str(config.decode.columns).startswith(f"a decimal(5,2), b {decimal}, c date, d struct<{time}, ")
    assert str(config.decode.columns).endswith(f", e {decimal}")

    def message(number: int, *parts: bytes) -> bytes:
        inner = b"".join(parts)
        return varint(number << 3 | 2) + varint(len(inner)) + inner

    def exact(units: int, scale: int, size: int = 3) -> bytes:
        return message(1, message(1, units.to_bytes(size, "big", signed=True)), b"\x18" + varint(scale))

    good = [exact(-99_999, 2), exact(12, 0), exact(1_230, 3), exact(5, -1, 40), exact(0, 2**31 - 1)]
    bad = [exact(100_000, 2), exact(1_000, 0), exact(1_231, 3), exact(5, -3), message(1), exact(1, -(2**31))]
    found = decoded(config, *good, *bad)
    assert [row["a"] for row in found.rows.to_pylist()] == [Decimal(n) for n in ("-999.99", "12", "1.23", "50", "0")]
    assert [record.reason for record in found.refused] == [Reason.OUT_OF_RANGE] * len(bad)

    def day(year: int, month: int, day: int) -> bytes:
        return message(3, b"\x08" + varint(year), b"\x10" + varint(month), b"\x18" + varint(day))

    good = [day(1, 1, 1), day(1970, 1, 1), day(2024, 2, 29), day(9999, 12, 31)]
    bad = [day(2023, 2, 29), day(0, 1, 1), day(10_000, 1, 1), day(2026, 0, 1), day(2026, 4, 31), day(2026, 1, -1)]
    found = decoded(config, *good, *bad)
    days = [date(1, 1, 1), date(1970, 1, 1), date(2024, 2, 29), date(9999, 12, 31)]
    assert [row["c"] for row in found.rows.to_pylist()] == days
    assert [record.reason for record in found.refused] == [Reason.OUT_OF_RANGE] * len(bad)


def test_errors_say_where_they_are() -> None:
    body = "message M { repeated N n = 1; map<int32, bool> m = 2; } message N { oneof o { bool a = 1; string b = 2; } }"
    assert reason(body, b"\x0a\x00\x0a\x02\x08\x02") == (Reason.OUT_OF_RANGE, "n[1].a")
    assert reason(body, b"\x0a\x03\x12\x01\xff") == (Reason.NOT_UTF8, "n[0].b")
    assert reason(body, b"\x12\x02\x10\x02") == (Reason.OUT_OF_RANGE, "m.value")
    assert reason(body, b"\x12\x02\x18\x02") == (Reason.UNKNOWN_FIELD, "m")
    assert reason(body, b"\x0a\x01\x08") == (NOT_PROTOBUF, "n[0].a")
    assert reason(body, b"\x08\x01") == (Reason.WRONG_TYPE, "n[0]")


def test_json_values_are_text() -> None:
    body = "message M { google.protobuf.Value v = 1; google.protobuf.ListValue l = 2; }"
    schema = ProtobufConfig.model_validate({"format": "protobuf", "schema": proto(body)}).protobuf_schema
    for value, text in (
        ({"a": [1, 1.5, None, True, "é", {}]}, '{"a":[1,1.5,null,true,"é",{}]}'),
        (-0.0, "-0.0"),
        (2**53, "9007199254740992.0"),
        (None, "null"),
        ("\u2028", '"\u2028"'),
    ):
        data = encode(schema, {"v": value, "l": [value]})
        assert read(body, data) == {"v": text, "l": f"[{text}]"}
    assert reason(body, b"\x0a\x09\x11\x00\x00\x00\x00\x00\x00\xf0\x7f") == (Reason.OUT_OF_RANGE, "v")
    assert reason(body, b"\x0a\x03\x1a\x01\x00") == (Reason.NUL, "v.string_value")
    nested = b"\x32\x00"
    for _ in range(60):
        nested = b"\x0a" + varint(len(nested)) + nested
        nested = b"\x32" + varint(len(nested)) + nested
    assert reason(body, b"\x0a" + varint(len(nested)) + nested)[0] == Reason.TOO_DEEP


# ---- other writers' schemas ----------------------------------------------------------------------------------------


def reader_schema(body: str, syntax: str = "proto3") -> ProtobufSchema:
    text = proto(body, syntax)
    decode = {"format": "protobuf", "schema": text, "message": "p.M"}
    return ProtobufConfig.model_validate(decode).protobuf_schema


KINDS = [
    "double",
    "float",
    "int32",
    "int64",
    "uint32",
    "uint64",
    "sint32",
    "sint64",
    "fixed32",
    "fixed64",
    "sfixed32",
    "sfixed64",
    "bool",
    "string",
    "bytes",
]
EDGES: dict[str, list[Any]] = {
    "double": [0.0, -1.5],
    "float": [0.0, -1.5],
    "bool": [False, True],
    "string": ["", "é"],
    "bytes": ["", "/w=="],
    "int32": [0, 1, -1, 2**31 - 1, -(2**31)],
    "int64": [0, 1, -1, 2**63 - 1, -(2**63)],
    "uint32": [0, 1, 2**32 - 1],
    "uint64": [0, 1, 2**64 - 1],
}
for other, same in {"sint32": "int32", "sfixed32": "int32", "fixed32": "uint32"}.items():
    EDGES[other], EDGES[other.replace("32", "64")] = EDGES[same], EDGES[same.replace("32", "64")]


@pytest.mark.parametrize("wanted", KINDS)
def test_a_type_that_has_changed_is_read_as_the_same_value_or_not_at_all(wanted: str) -> None:
    """Of every pair of types: either the schemas are refused, or each value is read as itself or refused."""
    reader = reader_schema(f"message M {{ optional {wanted} a = 1; }}")
    compatible = set()
    for written in KINDS:
        writer = reader_schema(f"message M {{ optional {written} a = 1; }}")
        try:
            record = resolve(reader.record, writer.schema)
        except Incompatible:
            continue
        compatible.add(written)
        own, strict = StrictReader(writer.record, RULES), StrictReader(record, RULES)
        for value in EDGES[written]:
            data = encode(writer, {"a": value})
            try:
                found = strict.row(data)["a"]
            except DecodeError:
                continue
            expected = own.row(data)["a"]
            if isinstance(expected, str) and wanted == "bytes":
                expected = expected.encode()
            if isinstance(expected, bytes) and wanted == "string":
                expected = expected.decode()
            assert found == expected
    assert wanted in compatible
    also = {"int64": {"int32", "uint32", "bool"}, "uint64": {"uint32", "bool"}, "double": set(), "bytes": {"string"}}
    if wanted in also:
        assert compatible == {wanted, *also[wanted]}


@pytest.mark.parametrize(
    ("wanted", "written", "wrong"),
    [
        ("int32 a = 1;", "repeated int32 a = 1;", "a: a repeated field cannot be read as a single field"),
        ("repeated int32 a = 1;", "int32 a = 1;", "a: a single field cannot be read as a repeated field"),
        ("N a = 1;", "string a = 1;", "a: string cannot be read as a message"),
        ("N a = 1;", "O a = 1;", "a.x: string cannot be read as int32"),
        ("map<string, int32> a = 1;", "map<string, string> a = 1;", "a: string cannot be read as int32"),
        ("map<string, int32> a = 1;", "map<int32, int32> a = 1;", "a: int32 cannot be read as string"),
        ("google.protobuf.Timestamp a = 1;", "N a = 1;", "a: p.N cannot be read as google.protobuf.Timestamp"),
        ("google.protobuf.Int64Value a = 1;", "O a = 1;", "a: string cannot be read as int64"),
        ("E a = 1;", "string a = 1;", "a: string cannot be read as enum"),
    ],
)
def test_fields_that_cannot_be_read_are_named(wanted: str, written: str, wrong: str) -> None:
    others = "message N { int32 x = 1; } message O { string x = 1; } enum E { Z = 0; }"
    reader = reader_schema(f"message M {{ {wanted} }} {others}")
    with pytest.raises(IncompatibleSchema) as error:
        schema_reader(
            reader, proto(f"message M {{ {written} }} {others}"), (), RULES, keys=frozenset(), by_column=False
        )
    assert str(error.value) == wrong


def test_a_required_field_that_the_writer_has_not_is_named() -> None:
    reader = reader_schema("message M { required int32 a = 1; }", "proto2")
    with pytest.raises(IncompatibleSchema, match="a: it is required, and the writer's schema has no field 1"):
        schema_reader(reader, proto("message M { int32 b = 2; }"), (), RULES, keys=frozenset(), by_column=False)


@pytest.mark.parametrize("by_column", [False, *([True] if native.library() is not None else [])])
def test_renamed_new_and_vanished_fields(by_column: bool) -> None:
    reader = reader_schema("message M { int64 a = 1; optional int32 b = 2; string c = 3; optional int32 d = 4; }")
    writer = reader_schema("message M { int32 other = 1; int32 b = 2; repeated M m = 9; }".replace("M m", "string m"))
    both = schema_reader(reader, writer.text, (), RULES, keys=frozenset(), by_column=by_column)
    values = [encode(writer, {"other": -5, "b": 7, "m": ["x"]}), encode(writer, {})]
    # The writer has no presence for b: what it leaves out is 0 and not null.
    expected = [{"a": -5, "b": 7, "c": "", "d": None}, {"a": 0, "b": 0, "c": "", "d": None}]
    assert [dict(both.row(b"frame" + b"\0" + value, 5)) for value in values] == expected
    if by_column:
        rows, doubtful = both.read(pa.array([b"frame\0" + value for value in values], pa.binary()), 5)
        assert rows.to_pylist() == expected
        assert not len(doubtful)


# ---- frames --------------------------------------------------------------------------------------------------------


def test_the_place_of_a_message_is_read_as_confluents_serializers_write_it() -> None:
    for place, written in (((0,), b"\0"), ((1,), b"\x02\x02"), ((0, 1), b"\x04\x00\x02"), ((70,), b"\x02\x8c\x01")):
        assert place_bytes(place) == written
        assert read_place(b"12345" + written + b"rest", 5) == (place, 5 + len(written))
    assert read_place(b"\x02\x00", 0) == ((0,), 2)  # the long form of the first
    for bad in (b"", b"\x02", b"\x01\x00", b"\xff" * 11, b"\xd0\x0f", b"\x80"):
        with pytest.raises(DecodeError) as error:
            read_place(bad, 0)
        assert error.value.reason == BAD_FRAME


@pytest.mark.parametrize("by_column", [False, *([True] if native.library() is not None else [])])
def test_a_record_of_another_message_is_refused(by_column: bool) -> None:
    text = proto("message A { message I { int32 a = 1; } map<string, string> m = 1; } message M { int32 a = 1; }")
    decode = {"format": "protobuf", "schema": text, "message": "p.A.I"}
    schema = ProtobufConfig.model_validate(decode).protobuf_schema
    reader = schema_reader(schema, text, (), RULES, keys=frozenset(), by_column=by_column)
    assert reader.by_column is by_column

    def outcome(place: bytes) -> str:
        value = b"\0\0\0\0\1" + place + b"\x08\x01"
        if by_column:
            rows, doubtful = reader.read(pa.array([value], pa.binary()), 5)
            if not len(doubtful):
                assert rows.to_pylist() == [{"a": 1}]
                return "row"
        try:
            assert reader.row(value, 5) == {"a": 1}
        except DecodeError as error:
            return error.reason
        return "row"

    assert outcome(place_bytes((0, 0))) == "row"
    assert outcome(place_bytes((1,))) == OTHER_MESSAGE
    assert outcome(b"\0") == OTHER_MESSAGE
    assert outcome(place_bytes((7, 7))) == OTHER_MESSAGE
    assert outcome(place_bytes((0, -1 & 7))) == OTHER_MESSAGE
    assert outcome(b"\x7f") == BAD_FRAME
    without = schema_reader(
        schema, proto("message M { int32 a = 1; }"), (), RULES, keys=frozenset(), by_column=by_column
    )
    with pytest.raises(DecodeError, match=r"and this one is p\.M") as error:
        without.row(b"\0\0\0\0\2\0\x08\x01", 5)
    assert error.value.reason == OTHER_MESSAGE


# ---- JSON into messages --------------------------------------------------------------------------------------------


def test_json_that_is_no_such_message_is_refused() -> None:
    schema = reader_schema("message M { required int32 a = 1; optional bytes b = 2; }", "proto2")
    assert encode(schema, {"a": 1, "b": "AP8="}) == b"\x08\x01\x12\x02\x00\xff"
    wrong: Any
    for wrong in (
        [],
        None,
        {},
        {"a": "x"},
        {"a": 1.5},
        {"a": 2**31},
        {"a": 1, "c": 2},
        {"a": 1, "b": "?"},
        {"a": 1, "b": "A"},
    ):
        with pytest.raises(DoesNotFit):
            encode(schema, wrong)


def test_the_fast_reader_agrees_with_the_strict_one() -> None:
    if native.library() is None:
        pytest.skip(native.why_not() or "")
    counts = run(seed=1, records=40_000)  # tests.fuzz_protobuf has any number
    assert counts["taken"] > counts["records"] / 10
    assert counts["good"] < counts["records"] / 2
