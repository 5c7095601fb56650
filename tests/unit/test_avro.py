"""Avro: generated schemas and values against an independent library, both readers against one another, and by hand what
libraries take and we do not."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import struct
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from avow import native
from avow.errors import ConfigError
from avow.formats.avro.encode import DoesNotFit, encode, zigzag
from avow.formats.avro.native_columns import NativeColumns
from avow.formats.avro.plugin import AvroConfig
from avow.formats.avro.reader import NOT_AVRO, SKIPPED_DEPTH_MAX, UNKNOWN_SYMBOL, WRONG_BRANCH, AvroReader
from avow.formats.avro.resolution import Incompatible, NoColumn, columns_of, resolve
from avow.formats.avro.schema import BadSchema, parse
from avow.formats.avro.show import show
from avow.formats.base import DecodeError, Reason
from avow.formats.rows import row_schema
from avow.settings import declared

NATIVE = [True] if native.library() is not None else []
MUTATED = 300  # of each example of the differential test


def record(*fields: Any, name: str = "R") -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [f if isinstance(f, dict) else {"name": f[0], "type": f[1]} for f in fields],
    }


def strict(writer: Any, reader: Any = None, *, refuse_nul: bool = True) -> AvroReader:
    wanted = parse(json.dumps(reader or writer))
    step = resolve(parse(json.dumps(writer)), wanted)
    return AvroReader(step, columns_of(wanted), is_record=True, refuse_nul=refuse_nul)


def read(writer: Any, data: bytes, reader: Any = None) -> dict[str, Any]:
    return dict(strict(writer, reader).row(data, 0))


def reason(writer: Any, data: bytes, reader: Any = None) -> str:
    with pytest.raises(DecodeError) as refused:
        read(writer, data, reader)
    return refused.value.reason


def written(schema: Any, value: Any) -> bytes:
    """By the other library."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value, strict=True)
    return out.getvalue()


# ---- generated schemas -----------------------------------------------------------------------------------------------

_MICROS = (datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC))
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


def _long(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


@st.composite
def _decimal(draw: st.DrawFn, precision: int, scale: int) -> Decimal:
    units = draw(st.integers(-(10**precision) + 1, 10**precision - 1))
    return Decimal(units).scaleb(-scale, Context(prec=40))


class Names:
    """Names that no other type of a schema has."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> str:
        self.count += 1
        return f"N{self.count}"


Pair = tuple[Any, st.SearchStrategy[Any]]  # a type, and its values as the other library has them


@st.composite
def types(draw: st.DrawFn, names: Names, depth: int) -> Pair:
    kind = draw(st.sampled_from(_LEAVES + (_NESTED if depth else [])))
    match kind:
        case "decimal" | "decimal-fixed":
            precision = draw(st.integers(1, 38))
            scale = draw(st.integers(0, precision))
            schema: dict[str, Any] = {"logicalType": "decimal", "precision": precision, "scale": scale}
            if kind == "decimal":
                return {"type": "bytes", **schema}, _decimal(precision, scale)
            return {"type": "fixed", "name": names.next(), "size": 16, **schema}, _decimal(precision, scale)
        case "enum":
            symbols = draw(st.lists(st.sampled_from("ABCDEFG"), min_size=1, max_size=4, unique=True))
            return {"type": "enum", "name": names.next(), "symbols": symbols}, st.sampled_from(symbols)
        case "fixed":
            size = draw(st.integers(0, 5))
            return {"type": "fixed", "name": names.next(), "size": size}, st.binary(min_size=size, max_size=size)
        case "array":
            items, values = draw(types(names, depth - 1))
            return {"type": "array", "items": items}, st.lists(values, max_size=3)
        case "map":
            inner, values = draw(types(names, depth - 1))
            return {"type": "map", "values": inner}, st.dictionaries(TEXT, values, max_size=3)
        case "record":
            return draw(records(names, depth - 1))
        case "nullable":
            inner, values = draw(types(names, depth - 1))
            if isinstance(inner, list):
                return inner, values
            branches = ["null", inner] if draw(st.booleans()) else [inner, "null"]
            return branches, st.none() | values
    return _SIMPLE[kind]


@st.composite
def records(draw: st.DrawFn, names: Names, depth: int) -> Pair:
    fields = draw(st.lists(types(names, depth), min_size=1, max_size=4))
    schema = record(*((f"f{n}", kind) for n, (kind, _) in enumerate(fields)), name=names.next())
    return schema, st.fixed_dictionaries({f"f{n}": values for n, (_, values) in enumerate(fields)})


_SIMPLE: dict[str, Pair] = {
    "boolean": ("boolean", st.booleans()),
    "int": ("int", _long(32)),
    "long": ("long", _long(64)),
    "float": ("float", st.floats(width=32)),
    "double": ("double", st.floats()),
    "bytes": ("bytes", st.binary(max_size=6)),
    "string": ("string", TEXT),
    "date": ({"type": "int", "logicalType": "date"}, st.dates()),
    "timestamp-millis": (
        {"type": "long", "logicalType": "timestamp-millis"},
        st.integers(-62135596800000, 253402300799999).map(lambda ms: ms),
    ),
    "timestamp-micros": (
        {"type": "long", "logicalType": "timestamp-micros"},
        st.datetimes(_MICROS[0].replace(tzinfo=None), _MICROS[1].replace(tzinfo=None), timezones=st.just(UTC)),
    ),
    "local-timestamp-micros": ({"type": "long", "logicalType": "local-timestamp-micros"}, st.datetimes()),
    "time-millis": ({"type": "int", "logicalType": "time-millis"}, st.integers(0, 86_399_999)),
    "time-micros": ({"type": "long", "logicalType": "time-micros"}, st.integers(0, 86_399_999_999)),
    "uuid": ({"type": "string", "logicalType": "uuid"}, st.uuids()),
}
_LEAVES = [*_SIMPLE, "decimal", "decimal-fixed", "enum", "fixed"]
_NESTED = ["array", "map", "record", "nullable", "nullable"]


@st.composite
def examples(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    schema, values = draw(records(Names(), depth=3))
    return schema, draw(st.lists(values, min_size=1, max_size=3))


def expected(value: Any) -> Any:
    """What the other library reads, as our columns have it."""
    if isinstance(value, dict):
        return {name: expected(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [expected(inner) for inner in value]
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value


def found(value: Any, schema: Any) -> Any:
    """What we have read, as the other library would have it. Maps are pairs with us, uuids text, times numbers."""
    if isinstance(schema, list):
        return None if value is None else found(value, next(branch for branch in schema if branch != "null"))
    if value is None:
        return None
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind == "record":
        return {f["name"]: found(value[f["name"]], f["type"]) for f in schema["fields"]}
    if kind == "array":
        return [found(item, schema["items"]) for item in value]
    if kind == "map":
        return {key: found(item, schema["values"]) for key, item in value}
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value


def _plain(value: Any) -> Any:
    """Of the other library's values those that it has a class for and we have not."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if type(value).__name__ == "UUID":
        return str(value)
    if type(value).__name__ == "time":
        return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
    return value


def _times(value: Any, schema: Any) -> Any:
    """Numbers of times in microseconds: the other library has times."""
    if isinstance(schema, list):
        return None if value is None else _times(value, next(branch for branch in schema if branch != "null"))
    if value is None or isinstance(schema, str):
        return value
    if schema["type"] == "record":
        return {f["name"]: _times(value[f["name"]], f["type"]) for f in schema["fields"]}
    if schema["type"] == "array":
        return [_times(item, schema["items"]) for item in value]
    if schema["type"] == "map":
        return {key: _times(item, schema["values"]) for key, item in value.items()}
    return value * 1000 if schema.get("logicalType") == "time-millis" else value


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(examples())
def test_what_another_library_writes_is_read_as_it_reads_it(example: tuple[Any, list[Any]]) -> None:
    schema, values = example
    parsed = fastavro.parse_schema(schema)
    for value in values:
        data = written(schema, value)
        theirs = fastavro.schemaless_reader(io.BytesIO(data), parsed, None)
        ours = found(read(schema, data), schema)
        assert _times(ours, schema) == expected(_plain(theirs))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(examples(), st.integers(0, 2**32), st.booleans())
def test_both_readers_agree_on_every_record_also_on_changed_bytes(
    example: tuple[Any, list[Any]], seed: int, refuse_nul: bool
) -> None:
    for _ in NATIVE:
        schema, values = example
        good = [written(schema, value) for value in values]
        chance = random.Random(seed)
        assert_agree(schema, schema, [*good, *(_changed(chance, good) for _ in range(MUTATED))], refuse_nul=refuse_nul)


def assert_agree(writer: Any, reader: Any, records: list[bytes], *, refuse_nul: bool) -> int:
    """The C library reads exactly what the strict reader reads, or leaves it. How many it read."""
    wanted = parse(json.dumps(reader))
    columns = columns_of(wanted)
    step = resolve(parse(json.dumps(writer)), wanted)
    slow = AvroReader(step, columns, is_record=True, refuse_nul=refuse_nul)
    assert NativeColumns.can_read(columns)
    fast = NativeColumns(step, columns, refuse_nul=refuse_nul)
    skip = len(records) % 7
    values = pa.array([b"x" * skip + record for record in records], pa.binary())
    rows, doubtful = fast.read(values, skip)
    rows.validate(full=True)
    left = set(doubtful.to_pylist())
    assert len(rows) == len(records) - len(left)
    strictly = [slow.row(record, 0) for number, record in enumerate(records) if number not in left]
    assert_same(rows, pa.RecordBatch.from_pylist(strictly, rows.schema))
    return len(strictly)


def assert_same(rows: pa.RecordBatch, others: pa.RecordBatch) -> None:
    assert rows.schema == others.schema
    for ours, theirs in zip(rows.to_pylist(), others.to_pylist(), strict=True):
        assert _comparable(ours) == _comparable(theirs)


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _comparable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(inner) for inner in value]
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else struct.pack("<d", value)  # -0.0 is another one
    return value


def _changed(chance: random.Random, values: list[bytes]) -> bytes:
    value = bytearray(chance.choice(values))
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(value) + 1)
        match chance.randrange(5):
            case 0 if value:
                value[at - 1] = chance.choice((0, 1, 2, 3, 4, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 1:
                del value[at : at + chance.randint(1, 3)]
            case 2:
                value[at:at] = chance.randbytes(chance.randint(1, 3))
            case 3:
                value = value[:at]
            case _:
                value[at:at] = chance.choice(values)
    return bytes(value[:4_000])


# ---- schema resolution -----------------------------------------------------------------------------------------------

WRITER = record(
    ("a", "int"),
    ("b", "string"),
    ("gone", {"type": "array", "items": record(("x", ["null", "double"]), ("y", "bytes"), name="In")}),
    ("e", {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}),
    ("u", ["null", "int", "string"]),
    ("l", "long"),
)
VALUE = {"a": 7, "b": "é", "gone": [{"x": None, "y": b"\0"}, {"x": 1.5, "y": b""}], "e": "C", "u": 5, "l": 2**53}
CENTS = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
READER = record(
    {"name": "new", "type": {"type": "array", "items": "string"}, "default": ["x", "y"]},
    {"name": "l", "type": "double"},
    {"name": "bb", "type": ["null", "bytes"], "aliases": ["b"]},
    {"name": "a", "type": "long"},
    {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "Z"], "default": "Z"}},
    {"name": "u", "type": ["null", "long", "string"]},
    {
        "name": "d",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
        "default": "\u0001\u0000",
    },
    {"name": "s", "type": ["null", record(("q", "int"), name="S")], "default": None},
    {"name": "t", "type": record({"name": "q", "type": "int", "default": 3}, name="T"), "default": {}},
)
ROW = {
    **{
        "new": ["x", "y"],
        "l": float(2**53),
        "bb": "é".encode(),
        "a": 7,
        "e": "Z",
        "u": {"member0": 5, "member1": None},
    },
    **{"d": Decimal("2.56"), "s": None, "t": {"q": 3}},
}


def test_a_record_is_read_as_the_readers_schema_wants_it() -> None:
    data = written(WRITER, VALUE)
    assert read(WRITER, data, READER) == ROW
    for _ in NATIVE:
        assert assert_agree(WRITER, READER, [data] * 3, refuse_nul=True) == 3


def test_both_readers_agree_on_changed_bytes_where_schemas_differ() -> None:
    for _ in NATIVE:
        chance = random.Random(18)
        good = [written(WRITER, {**VALUE, "u": u, "l": n}) for u in (None, 3, "x") for n in (0, 2**53 + 1, -(2**62))]
        took = assert_agree(WRITER, READER, [*good, *(_changed(chance, good) for _ in range(5_000))], refuse_nul=True)
        assert took > 100


@pytest.mark.parametrize(
    ("writer", "reader", "wrong"),
    [
        ("string", "long", "f: the writer has string where the reader has long"),
        ("long", "int", "f: the writer has long where the reader has int"),
        ("double", "float", "f: the writer has double where the reader has float"),
        (["null", "int"], "long", None),  # a null among them is a bad record, not a bad schema
        (["string", "boolean"], ["null", "long"], "f: no branch of the writer's"),
        ({"type": "array", "items": "string"}, {"type": "array", "items": "int"}, "f: the writer has string"),
        ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "F", "size": 3}, "F has 2 bytes"),
        (
            {"type": "fixed", "name": "F", "size": 2},
            {"type": "fixed", "name": "G", "size": 2},
            "the writer has fixed F",
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
            {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 3},
            r"the writer has decimal\(4,2\) where the reader has decimal\(4,3\)",
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
            None,
        ),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            {"type": "long", "logicalType": "local-timestamp-millis"},
            "the writer has timestamp-millis where the reader has local-timestamp-millis",
        ),
    ],
)
def test_which_schemas_can_be_read_as_which(writer: Any, reader: Any, wrong: str | None) -> None:
    if wrong is None:
        strict(record(("f", writer)), record(("f", reader)))
    else:
        with pytest.raises(Incompatible, match=wrong):
            strict(record(("f", writer)), record(("f", reader)))


def test_the_writers_unit_of_time_counts() -> None:
    """Read as microseconds, milliseconds would be another moment, without an error."""
    millis, micros = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("millis", "micros"))
    data = encode(parse('"long"'), 1_000)
    for reader in (millis, micros):
        assert read(record(("t", millis)), data, record(("t", reader)))["t"] == datetime(
            1970, 1, 1, 0, 0, 1, tzinfo=UTC
        )


def test_a_missing_field_without_a_default_is_incompatible() -> None:
    with pytest.raises(Incompatible, match=r"b: the writer has no such field, and the reader no default for it"):
        strict(record(("a", "int")), record(("a", "int"), ("b", "int")))
    with pytest.raises(Incompatible, match="its default is not valid"):
        strict(record(("a", "int")), record({"name": "b", "type": "int", "default": "x"}))


def test_what_a_reader_lacks_is_skipped_however_deep_up_to_a_bound() -> None:
    tree = record(("children", {"type": "array", "items": "Tree"}), name="Tree")
    writer, reader = record(("tree", tree), ("a", "int")), record(("a", "int"))

    def nested(depth: int) -> bytes:
        return b"\x02" * depth + b"\0" * (depth + 1) + encode(parse('"int"'), 5)

    assert read(writer, nested(3), reader) == {"a": 5}
    assert reason(writer, nested(SKIPPED_DEPTH_MAX), reader) == Reason.TOO_DEEP
    for _ in NATIVE:
        assert assert_agree(writer, reader, [nested(depth) for depth in range(16)], refuse_nul=True) == 16


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        ("boolean", b"\x02", NOT_AVRO),  # libraries take it for true
        (["null", "int"], b"\x04\x00", NOT_AVRO),
        (["null", "int"], b"\x01", NOT_AVRO),
        ("int", b"\x80\x80\x80\x80\x10", NOT_AVRO),  # 2^31
        ("int", b"\x80\x80\x80\x80\x80\x00", NOT_AVRO),  # zero in six bytes
        ("long", b"\xff" * 9 + b"\x02", NOT_AVRO),
        ("long", b"\xff" * 10, NOT_AVRO),
        ("string", b"\x01", NOT_AVRO),  # a length of -1
        ("string", b"\x04a", NOT_AVRO),
        ("string", b"\x04\xc3\x28", Reason.NOT_UTF8),
        ("string", b"\x06\xed\xa0\x80", Reason.NOT_UTF8),
        ("bytes", b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", NOT_AVRO),
        ("float", b"\0\0\0", NOT_AVRO),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 0}, b"\x02\x64", Reason.OUT_OF_RANGE),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 0}, b"\x00", NOT_AVRO),
        ({"type": "int", "logicalType": "date"}, encode(parse('"int"'), 2932897), Reason.OUT_OF_RANGE),
        ({"type": "long", "logicalType": "timestamp-nanos"}, encode(parse('"long"'), 1_001), Reason.OUT_OF_RANGE),
        ({"type": "int", "logicalType": "time-millis"}, encode(parse('"int"'), 86_400_000), Reason.OUT_OF_RANGE),
        ({"type": "string", "logicalType": "uuid"}, b"\x04ab", Reason.BAD_TEXT),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02", NOT_AVRO),
        ({"type": "array", "items": "int"}, b"\x01\x02\x04\x04\x00", NOT_AVRO),  # a block of -1 bytes too few
        ({"type": "map", "values": "int"}, b"\x04\x02a\x02\x02a\x02\x00", Reason.DUPLICATE_FIELD),
    ],
)
def test_what_libraries_take_and_we_do_not(kind: Any, data: bytes, why: str) -> None:
    schema = record(("f", kind))
    assert reason(schema, data) == why
    for _ in NATIVE:
        assert assert_agree(schema, schema, [data], refuse_nul=True) == 0


def test_items_without_bytes_have_a_bound() -> None:
    """A few bytes can say that a million million of them follow."""
    writer, reader = record(("f", {"type": "array", "items": "null"}), ("a", "int")), record(("a", "int"))
    assert read(writer, encode(parse('"long"'), 900) + b"\0\2", reader) == {"a": 1}
    many = encode(parse('"long"'), 2**40) + b"\0\2"
    assert reason(writer, many, reader) == Reason.OUT_OF_RANGE
    for _ in NATIVE:
        assert assert_agree(writer, reader, [many], refuse_nul=True) == 0


def test_bytes_behind_a_record_are_refused() -> None:
    assert reason(record(("f", "int")), b"\x02\x00") == NOT_AVRO


def test_a_number_that_a_float_does_not_hold_is_refused() -> None:
    for reader, good, bad in (("double", 2**53 + 2, 2**53 + 1), ("float", 2**24 + 2, 2**24 + 1)):
        data = {number: encode(parse('"long"'), number) for number in (good, bad)}
        writer, wanted = record(("f", "long")), record(("f", reader))
        assert read(writer, data[good], wanted) == {"f": float(good)}
        assert reason(writer, data[bad], wanted) == Reason.OUT_OF_RANGE


def test_a_branch_or_symbol_that_the_reader_lacks_is_a_bad_record() -> None:
    writer = record(("f", ["null", "int"]))
    assert reason(writer, b"\x00", record(("f", "long"))) == WRONG_BRANCH
    enums = [{"type": "enum", "name": "E", "symbols": symbols} for symbols in (["A", "B"], ["A"])]
    assert reason(record(("f", enums[0])), b"\x02", record(("f", enums[1]))) == UNKNOWN_SYMBOL


def test_a_detail_names_the_field() -> None:
    schema = record(("a", {"type": "array", "items": record(("b", {"type": "map", "values": "boolean"}), name="In")}))
    with pytest.raises(DecodeError) as refused:
        read(schema, b"\x04\x00\x02\x02k\x07\x00\x00")
    assert refused.value.path == 'a[1].b["k"]'


# ---- schemas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ("{", "not JSON"),
        ('"in"', 'the type "in" is not defined'),
        ('{"type": "record", "name": "R"}', "the record R has no fields"),
        ('{"type": "record", "name": "R", "fields": [{"name": "a"}]}', "a field of R has no name or no type"),
        (json.dumps(record(("a", "int"), ("a", "int"))), "has the field a twice"),
        (json.dumps(record(("a-b", "int"))), "is not a name"),
        (json.dumps(record(("a", ["int", "int"]))), "R.a: a union has two branches of int"),
        (json.dumps(record(("a", ["int", ["null"]]))), "a union is directly inside a union"),
        (json.dumps(record(("a", []))), "a union has no branch"),
        (json.dumps(record(("a", {"type": "enum", "name": "E", "symbols": ["A", "A"]}))), "or one twice"),
        (json.dumps(record(("a", {"type": "fixed", "name": "F"}))), "has no size"),
        (json.dumps(record(("a", record(name="R")))), "the type R is defined twice"),
        ("[" * 2_000 + "]" * 2_000, "nested"),
        (json.dumps(record(("a", "Missing"))), "R.a: the type"),
    ],
)
def test_a_schema_that_is_none(schema: str, wrong: str) -> None:
    with pytest.raises(BadSchema, match=wrong):
        parse(schema)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ({"type": "fixed", "name": "F", "size": 12, "logicalType": "duration"}, "f: a duration"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 39}, "f: a decimal of 39 digits"),
        ("null", "f: it can only be null"),
        (record(name="In"), "f: the record In has no fields"),
        (["null"], "f: it can only be null"),
        ({"type": "array", "items": "R"}, "f: the record R is inside itself"),
        (record(("A", "int"), ("a", "int"), name="In"), "f: the fields A and a of the record In differ only by case"),
    ],
)
def test_a_type_that_no_column_can_have(field: Any, wrong: str) -> None:
    with pytest.raises(NoColumn, match=wrong):
        columns_of(parse(json.dumps(record(("f", field)))))


def test_the_columns_of_a_schema() -> None:
    kinds: dict[str, Any] = {name: schema for name, (schema, _) in _SIMPLE.items()}
    kinds["union"] = ["string", "null", {"type": "array", "items": "int"}]
    schema = parse(json.dumps(record(*((name.replace("-", "_"), kind) for name, kind in kinds.items()))))
    assert str(columns_of(schema)) == (
        "boolean boolean not null, int int not null, long long not null, float float not null, "
        "double double not null, bytes binary not null, string string not null, date date not null, "
        "timestamp_millis timestamp not null, timestamp_micros timestamp not null, "
        "local_timestamp_micros timestamp_ntz not null, time_millis int not null, time_micros long not null, "
        "uuid string not null, union struct<member0: string, member1: array<int>>"
    )


def test_names_of_other_schemas_are_found_in_any_order() -> None:
    use = json.dumps(record(("a", "x.A")))
    a = json.dumps({**record(("b", "x.B")), "name": "x.A"})
    b = json.dumps({"type": "enum", "name": "x.B", "symbols": ["S"]})
    for order in ([a, b], [b, a]):
        assert str(columns_of(parse(use, order))) == "a struct<b: string not null> not null"
    with pytest.raises(BadSchema, match="is not defined"):
        parse(use, [a])


# ---- writing ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(examples())
def test_what_we_write_the_other_library_reads(example: tuple[Any, list[Any]]) -> None:
    schema, values = example
    for value in values:
        data = written(schema, value)
        document = _as_json(found(read(schema, data), schema), schema)
        again = encode(parse(json.dumps(schema)), json.loads(json.dumps(document)))
        assert _comparable(read(schema, again)) == _comparable(read(schema, data))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(examples())
def test_what_is_shown_can_be_written_again(example: tuple[Any, list[Any]]) -> None:
    schema, values = example
    type = parse(json.dumps(schema))
    for value in values:
        data = written(schema, value)
        document = json.loads(json.dumps(show(type, data, 0), allow_nan=False))
        assert _comparable(read(schema, encode(type, document))) == _comparable(read(schema, data))


@pytest.mark.parametrize(
    ("schema", "data", "document"),
    [
        ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, bytes([1, 0, 0, 0] * 3), None),
        ({"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 3}, b"\x04\xfb\x2e", "-1.234"),
        ({"type": "long", "logicalType": "timestamp-nanos"}, zigzag(1_001), "1970-01-01T00:00:00.000001001Z"),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, zigzag(-1), "1969-12-31T23:59:59.999999"),
        ({"type": "long", "logicalType": "time-micros"}, zigzag(86_399_999_999), "23:59:59.999999"),
        ("float", struct.pack("<f", 0.1), 0.1),
        ("double", struct.pack("<d", math.nan), "NaN"),
        ("double", struct.pack("<d", -math.inf), "-Infinity"),
        (["null", "string", "long"], b"\x04\x0a", 5),
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_has_no_column_is_shown_too_and_written_again(schema: Any, data: bytes, document: Any) -> None:
    type = parse(json.dumps(schema))
    found = show(type, data, 0)
    assert found == (document if document is not None else {"months": 1, "days": 1, "milliseconds": 1})
    assert encode(type, found) == data


def test_what_the_calendar_has_no_place_for_is_shown_as_a_number() -> None:
    for logical, number in (("date", 2**31 - 1), ("date", -(2**31)), ("time-millis", 86_400_000)):
        assert show(parse(json.dumps({"type": "int", "logicalType": logical})), zigzag(number), 0) == number
    for unit in ("millis", "micros"):
        at = parse(json.dumps({"type": "long", "logicalType": f"timestamp-{unit}"}))
        assert show(at, zigzag(2**63 - 1), 0) == 2**63 - 1


def test_a_type_inside_itself_is_shown_to_a_depth() -> None:
    inner = parse(json.dumps(record(("next", ["null", "R"]))))
    assert show(inner, b"\x02\x02\0", 0) == {"next": {"next": {"next": None}}}
    with pytest.raises(DecodeError, match="nested more than"):
        show(inner, b"\x02" * 5_000 + b"\0", 0)


@pytest.mark.parametrize("data", [b"", b"\x02\x02", b"\x07", b"\x02\0\0", b"\xff" * 12])
def test_what_no_writer_has_written_is_not_shown(data: bytes) -> None:
    with pytest.raises(DecodeError) as refused:
        show(parse(json.dumps(record(("next", ["null", "R"])))), data, 0)
    assert refused.value.reason == NOT_AVRO


@pytest.mark.parametrize(
    ("text", "units"), [("00:00:00.000000001", 1), ("00:00:00.0000000010", 1), ("00:00:00.0000000011", None)]
)
def test_no_digit_of_a_fraction_is_dropped(text: str, units: int | None) -> None:
    type = parse(json.dumps({"type": "long", "logicalType": "local-timestamp-nanos"}))
    if units is None:
        with pytest.raises(DoesNotFit):
            encode(type, f"1970-01-01T{text}")
    else:
        assert encode(type, f"1970-01-01T{text}") == zigzag(units)


def _as_json(value: Any, schema: Any) -> Any:
    """A value as people write it in JSON."""
    if isinstance(schema, list):
        return None if value is None else _as_json(value, next(branch for branch in schema if branch != "null"))
    if value is None:
        return None
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind == "record":
        return {f["name"]: _as_json(value[f["name"]], f["type"]) for f in schema["fields"]}
    if kind == "array":
        return [_as_json(item, schema["items"]) for item in value]
    if kind == "map":
        return {key: _as_json(item, schema["values"]) for key, item in value.items()}
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case Decimal():
            return str(value)
        case datetime() | date():
            return value.isoformat()
    return value


@pytest.mark.parametrize(
    ("kind", "value", "wrong"),
    [
        ("int", 2**31, "f: expected an int, found 2147483648"),
        ("int", True, "f: expected an int, found True"),
        ("string", 5, "f: expected a string"),
        ("double", "x", "f: expected a double"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 1},
            "1.25",
            "expected a decimal of 3 digits",
        ),
        ({"type": "int", "logicalType": "date"}, "2026-02-30", "expected an date"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "2026-01-01T00:00:00", "expected a timestamp-millis"),
        (["null", "int"], "x", "f: expected an int"),
        (record(("a", "int"), name="In"), {"b": 1}, "f: record In has no field 'b'"),
        (record(("a", "int"), name="In"), {}, "f.a: the field is missing, and has no default"),
    ],
)
def test_what_cannot_be_written_is_named(kind: Any, value: Any, wrong: str) -> None:
    with pytest.raises(DoesNotFit, match=wrong):
        encode(parse(json.dumps(record(("f", kind)))), {"f": value})


# ---- settings --------------------------------------------------------------------------------------------------------


def pipeline(decode: dict[str, Any], **sink: Any) -> Any:
    return declared(
        {
            "name": "p",
            "guarantee": "exactly-once",
            "source": {"brokers": "a:1", "topics": ["t"]},
            "decode": {"format": "avro", **decode},
            "sink": {"kind": "postgres", "url": "postgresql://a@b/c", "table": "t", **sink},
        }
    )


REGISTRY = {"url": "http://127.0.0.1:1"}
SCHEMA = json.dumps(record(("id", "long"), ("note", ["null", "string"])))


@pytest.mark.parametrize(
    ("decode", "wrong"),
    [
        ({}, "decode.schema: is missing"),
        ({"schema": SCHEMA, "schema_file": "x"}, "decode.schema: is set together with schema_file"),
        ({"schema": "{"}, "decode.schema: not JSON"),
        ({"schema": '"int"'}, "decode.schema: the schema is a int and not a record"),
        ({"schema_file": "/none.avsc"}, "decode.schema_file: cannot be read: No such file"),
        ({"schema": "registry"}, "decode.schema: needs a registry"),
        ({"schema": SCHEMA, "frame": "confluent"}, "decode.frame: needs a registry"),
        ({"schema": SCHEMA, "version": 1}, "decode.version: is set, but the schema is declared here"),
        ({"schema": SCHEMA, "key": {"schema": "registry"}}, "decode.key.schema: needs a registry"),
        ({"schema": SCHEMA, "key": {"schema": '["null", "int"]'}}, "decode.key.schema: a key that may be null"),
        ({"schema": SCHEMA, "tombstones": "keep"}, "decode.tombstones: a null value becomes a row of nulls"),
        (
            {"schema": "registry", "registry": {**REGISTRY, "subject_strategy": "record"}},
            "decode.registry.subject: is missing",
        ),
    ],
)
def test_settings_that_make_no_sense(decode: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pipeline(decode)
    assert wrong in str(refused.value)


def test_a_schema_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "payment.avsc"
    path.write_text(SCHEMA)
    config = pipeline({"schema_file": str(path)}, mode="upsert", key=["id"]).decode
    assert isinstance(config, AvroConfig)
    assert str(config.columns) == "id long not null, note string"
    assert row_schema(config).names == ["id", "note"]
    assert not config.framed


# ---- a check that cannot fail is none --------------------------------------------------------------------------------

CANARIES = {
    "a branch too many": ("number >= node->part_count) return NULL;", "number > node->part_count) return NULL;"),
    "bytes behind a record": ("record, 0) == end;", "record, 0) != NULL;"),
    "a boolean byte": ("|| *at > 1) return NULL;", ") return NULL;"),
    "a decimal beyond its precision": (
        ">= power_of_ten(column->field->precision)) return false;",
        "< 0) return false;",
    ),
    "a key twice": ("if (has_key(keys, first, entries->length)) return NULL;", ""),
    "a block's size": ("if (behind != NULL && at != behind) return NULL;", ""),
}
KINDS = record(
    ("b", "boolean"),
    ("n", ["null", "int"]),
    ("d", {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 1}),
    ("m", {"type": "map", "values": "int"}),
    ("a", {"type": "array", "items": "string"}),
)


def _kinds() -> Iterator[bytes]:
    for n in range(8):
        note = {
            "b": n % 2 == 0,
            "n": None if n % 3 == 0 else n,
            "d": Decimal(n) / 10,
            "m": {"a": n},
            "a": ["x"] * (n % 3),
        }
        yield written(KINDS, note)
    yield b"\x00\x00\x02\x01\x00\x01\x04\x02x\x00"


@pytest.mark.parametrize("canary", CANARIES)
def test_canaries(canary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong in a copy of avro.c is found."""
    for _ in NATIVE:
        import ctypes

        from avow_native import build

        right, wrong = CANARIES[canary]
        for file in [*build.sources(), *build.PACKAGE.glob("*.h")]:
            text = file.read_text()
            assert file.name != "avro.c" or text.count(right) == 1
            (tmp_path / file.name).write_text(text.replace(right, wrong) if file.name == "avro.c" else text)
        monkeypatch.setattr(build, "PACKAGE", tmp_path)
        library = ctypes.CDLL(str(build.build(folder=tmp_path, flags=["-O0"]).path))
        monkeypatch.setattr(native, "library", lambda library=library: library)
        good = list(_kinds())
        chance = random.Random(1)
        with pytest.raises((AssertionError, DecodeError, pa.ArrowInvalid)):
            assert_agree(KINDS, KINDS, [*good, *(_changed(chance, good) for _ in range(60_000))], refuse_nul=True)
