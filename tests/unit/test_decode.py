"""Decoding: each row of the bad-input table by name, the formats, null values, and the shape of the outcome."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Message
from tests.json_readers import READERS, reading_by

from avow.arrow import arrow_type
from avow.engines.task import from_memory, last_fingerprint
from avow.formats import decoder
from avow.formats.base import Decoded, Decoder, Reason
from avow.formats.json import arrow_columns as reading
from avow.kafka.batches import as_batch, headers_column
from avow.kafka.headers import CHECKSUM, NOT_UTF8, checksum
from avow.kafka.log import fingerprint
from avow.ledger import OffsetRange
from avow.schema import parse
from avow.settings import PipelineConfig

FLAT = "id long not null, account string not null, amount double, at timestamp, note string"
GOOD = b'{"id":17,"account":"acc-000017","amount":12.5,"at":"2026-01-01T00:00:00.000001Z","note":"n"}'
GOOD_ROW = {
    "id": 17,
    "account": "acc-000017",
    "amount": 12.5,
    "at": datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    "note": "n",
}


@pytest.fixture(params=READERS, autouse=True)
def reader(request: pytest.FixtureRequest) -> Iterator[str]:
    with reading_by(request.param):
        yield request.param


def declared(decode: dict[str, Any] | None = None, **sink: Any) -> dict[str, Any]:
    return {
        "name": "p",
        "guarantee": "exactly-once",
        "source": {"brokers": "localhost:9092", "topics": ["t"]},
        "decode": {"format": "json", "schema": FLAT} if decode is None else decode,
        "sink": {"kind": "postgres", "url": "postgresql://localhost/d", "table": "t", **sink},
    }


def pipeline(decode: dict[str, Any] | None = None, **sink: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(declared(decode, **sink))


def json(schema: str = FLAT, *, refuse_nul: bool = True, **decode: Any) -> Decoder:
    return decoder(pipeline({"format": "json", "schema": schema, **decode}), refuse_nul=refuse_nul)


def batch(values: Sequence[bytes | None], keys: Sequence[bytes | None] | None = None) -> pa.RecordBatch:
    columns = [keys if keys is not None else [None] * len(values), values]
    return pa.RecordBatch.from_arrays([pa.array(column, pa.binary()) for column in columns], ["key", "value"])


def decode(to: Decoder, values: Sequence[bytes | None], keys: Sequence[bytes | None] | None = None) -> Decoded:
    """Decode, and check what holds for every batch."""
    decoded = to.decode(batch(values, keys))
    nothing = to.decode(batch([]))
    assert decoded.rows.schema == nothing.rows.schema
    assert decoded.deletes.schema == nothing.deletes.schema
    assert len(decoded.rows) == len(decoded.rows_at)
    assert len(decoded.deletes) == len(decoded.deletes_at)
    assert len(decoded.rows) + len(decoded.deletes) + len(decoded.refused) + decoded.skipped == len(values)
    seen = [*decoded.rows_at.to_pylist(), *decoded.deletes_at.to_pylist(), *(dead.index for dead in decoded.refused)]
    assert len(set(seen)) == len(seen)
    for ascending in (
        decoded.rows_at.to_pylist(),
        decoded.deletes_at.to_pylist(),
        [dead.index for dead in decoded.refused],
    ):
        assert ascending == sorted(ascending)
    for dead in decoded.refused:
        assert isinstance(dead.reason, Reason)
        assert dead.detail.isprintable()
        assert 0 < len(dead.detail) <= 500
    return decoded


def one(to: Decoder, value: bytes | None) -> dict[str, Any] | Reason:
    """What becomes of a record, whichever way it is read: its row, or the reason it has none."""
    alone = decode(to, [value])
    among = decode(to, [value] * 70)
    first = alone.rows.to_pylist()[0] if len(alone.rows) else alone.refused[0].reason
    assert (among.rows.to_pylist() or [dead.reason for dead in among.refused]) == [first] * 70
    assert isinstance(first, dict | Reason)
    return first


def field(type: str, text: str, **options: Any) -> Any:
    """What becomes of one field, given as JSON."""
    found = one(json(f"f {type}", **options), f'{{"f":{text}}}'.encode())
    return found["f"] if isinstance(found, dict) else found


def test_a_good_record() -> None:
    assert one(json(), GOOD) == GOOD_ROW


# ---- the bad-input table -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param(GOOD[:-1], Reason.NOT_JSON, id="truncated"),
        pytest.param(GOOD[:20], Reason.NOT_JSON, id="truncated in a string"),
        pytest.param(GOOD[:-4] + b"}", Reason.NOT_JSON, id="truncated, but closed"),
        pytest.param(GOOD + b" x", Reason.NOT_JSON, id="trailing garbage"),
        pytest.param(GOOD + b"}", Reason.NOT_JSON, id="one brace too many"),
        pytest.param(b"{}{}", Reason.NOT_JSON, id="two objects"),
        pytest.param(GOOD + GOOD, Reason.NOT_JSON, id="two good objects"),
        pytest.param(GOOD + b"\n" + GOOD, Reason.NOT_JSON, id="two objects joined by a newline"),
        pytest.param(GOOD + b"null" + GOOD, Reason.NOT_JSON, id="null between objects"),
        pytest.param(b"", Reason.EMPTY, id="empty"),
        pytest.param(b"  ", Reason.NOT_JSON, id="only spaces"),
        pytest.param(b"17", Reason.NOT_OBJECT, id="a number"),
        pytest.param(b'"{}"', Reason.NOT_OBJECT, id="a string"),
        pytest.param(b"null", Reason.NOT_OBJECT, id="null as JSON"),
        pytest.param(b"[" + GOOD + b"]", Reason.NOT_OBJECT, id="an array"),
        pytest.param(GOOD.replace(b'"n"', b'"\xff"'), Reason.NOT_UTF8, id="invalid UTF-8"),
        pytest.param(GOOD.replace(b'"n"', b'"\xed\xa0\x80"'), Reason.NOT_UTF8, id="a surrogate in UTF-8"),
        pytest.param(GOOD.replace(b'"n"', b'"\xc0\x80"'), Reason.NOT_UTF8, id="an overlong NUL"),
        pytest.param(GOOD.replace(b'"n"', rb'"\ud800"'), Reason.LONE_SURROGATE, id="a lone high surrogate"),
        pytest.param(GOOD.replace(b'"n"', rb'"\uDC00\ud800"'), Reason.LONE_SURROGATE, id="surrogates in wrong order"),
        pytest.param(GOOD.replace(b'"n"', rb'"\u0000"'), Reason.NUL, id="NUL as an escape"),
        pytest.param(GOOD.replace(b'"n"', b'"\0"'), Reason.NOT_JSON, id="NUL as a byte"),
        pytest.param(GOOD + b"\0", Reason.NOT_JSON, id="NUL after the end"),
        pytest.param(GOOD.replace(b"17,", b"9223372036854775808,"), Reason.OUT_OF_RANGE, id="int64 + 1"),
        pytest.param(GOOD.replace(b"12.5", b"1e999"), Reason.OUT_OF_RANGE, id="1e999"),
        pytest.param(GOOD.replace(b"12.5", b"NaN"), Reason.NOT_JSON, id="NaN"),
        pytest.param(GOOD.replace(b"12.5", b"Infinity"), Reason.NOT_JSON, id="Infinity"),
        pytest.param(GOOD.replace(b"12.5", b"-Infinity"), Reason.NOT_JSON, id="-Infinity"),
        pytest.param(GOOD.replace(b"12.5", b"0." + b"1" * 1000), Reason.LONG_NUMBER, id="a 1,001-digit number"),
        pytest.param(GOOD.replace(b'"note"', b'"id"'), Reason.DUPLICATE_FIELD, id="duplicate keys"),
        pytest.param(GOOD.replace(b'"note"', rb'"\u0069d"'), Reason.DUPLICATE_FIELD, id="duplicate keys, one escaped"),
        pytest.param(b'{"id":17}', Reason.MISSING_FIELD, id="missing required field"),
        pytest.param(b'{"id":null,"account":"a"}', Reason.MISSING_FIELD, id="null required field"),
        pytest.param(b"{}", Reason.MISSING_FIELD, id="an empty object"),
        pytest.param(GOOD.replace(b"17,", b'"17",'), Reason.WRONG_TYPE, id="wrong type: a string for a long"),
        pytest.param(GOOD.replace(b"17,", b"true,"), Reason.WRONG_TYPE, id="wrong type: a boolean for a long"),
        pytest.param(GOOD.replace(b'"n"', b"1"), Reason.WRONG_TYPE, id="wrong type: a number for a string"),
        pytest.param(GOOD.replace(b'"n"', b'{"a":1}'), Reason.WRONG_TYPE, id="wrong type: an object for a string"),
        pytest.param(GOOD.replace(b'"note"', b'"new"'), Reason.UNKNOWN_FIELD, id="new field"),
        pytest.param(GOOD.replace(b'"id"', b'"ID"'), Reason.UNKNOWN_FIELD, id="a name in another case"),
    ],
)
def test_bad_input_is_a_dead_letter_and_the_batch_goes_on(value: bytes, reason: Reason) -> None:
    assert one(json(), value) == reason
    values = [GOOD] * 200 + [value] + [GOOD] * 200 + [value, value]
    decoded = decode(json(), values)
    assert [(dead.index, dead.reason) for dead in decoded.refused] == [(200, reason), (401, reason), (402, reason)]
    assert decoded.rows.to_pylist() == [GOOD_ROW] * 400
    assert decoded.rows_at.to_pylist() == [*range(200), *range(201, 401)]


@pytest.mark.parametrize(
    ("value", "note"),
    [
        pytest.param(b"\xef\xbb\xbf" + GOOD, "n", id="UTF-8 BOM"),
        pytest.param(b" \t\r\n" + GOOD + b"\n", "n", id="spaces around"),
        pytest.param(GOOD.replace(b",", b" ,\r\n\t").replace(b"{", b"{\n"), "n", id="pretty-printed"),
        pytest.param(GOOD.replace(b'"n"', b'"<b>\xc3\xa9\xf0\x9f\x98\x80</b>"'), "<b>é😀</b>", id="HTML and emoji"),
        pytest.param(
            GOOD.replace(b'"n"', rb'"\ud83d\ude00\u001b[31m"'), "😀\x1b[31m", id="ANSI codes, a surrogate pair"
        ),
        pytest.param(GOOD.replace(b'"n"', rb'"\\.\t\\\\\\N\n"'), "\\.\t\\\\\\N\n", id="COPY look-alikes"),
        pytest.param(GOOD.replace(b'"n"', rb'"\\u0000 \\ud800"'), r"\u0000 \ud800", id="escaped backslashes"),
        pytest.param(GOOD.replace(b'"n"', b'"}\\"{"'), '}"{', id="braces and quotes in text"),
        pytest.param(GOOD.replace(b'"n"', b'"NaN Infinity"'), "NaN Infinity", id="NaN in text"),
        pytest.param(GOOD.replace(b'"n"', b'"' + b"1" * 2000 + b'"'), "1" * 2000, id="many digits in text"),
        pytest.param(GOOD.replace(b'"n"', b'"' + b"[" * 2000 + b'"'), "[" * 2000, id="many brackets in text"),
        pytest.param(GOOD.replace(b'"n"', b"null"), None, id="null where null may be"),
        pytest.param(GOOD.replace(b',"note":"n"', b""), None, id="absent where null may be"),
        pytest.param(GOOD.replace(b'"note"', rb'"\u006eote"'), "n", id="an escaped name"),
    ],
)
def test_strange_input_is_accepted_losslessly(value: bytes, note: str | None) -> None:
    assert one(json(), value) == GOOD_ROW | {"note": note}


def test_nul_is_accepted_where_the_sink_holds_it() -> None:
    assert one(json(refuse_nul=False), GOOD.replace(b'"n"', rb'"a\u0000b"')) == GOOD_ROW | {"note": "a\0b"}


def test_a_20_mb_value() -> None:
    text = "é0 " * 6_700_000
    decoded = decode(json(), [GOOD, GOOD.replace(b'"n"', f'"{text}"'.encode()), GOOD] * 1 + [GOOD] * 70)
    assert decoded.refused == ()
    assert decoded.rows.column("note")[1].as_py() == text


@pytest.mark.parametrize("policy", ["ignore", "keep"])
@pytest.mark.parametrize(("depth", "taken"), [(1_000, True), (1_001, False), (100_000, False)])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_depth(policy: str, depth: int, taken: bool, opening: str, closing: str) -> None:
    inner = opening * (depth - 1) + "1" + closing * (depth - 1)
    found = decode(json("id long", unknown_fields=policy), [f'{{"id":1,"deep":{inner}}}'.encode()])
    if taken:
        rest = {"_rest": f'{{"deep":{inner}}}'} if policy == "keep" else {}
        assert found.rows.to_pylist() == [{"id": 1, **rest}]
    else:
        assert [dead.reason for dead in found.refused] == [Reason.TOO_DEEP]


@pytest.mark.parametrize(("digits", "taken"), [(1_000, True), (1_001, False)])
def test_number_length(digits: int, taken: bool) -> None:
    assert (field("double", "0." + "1" * (digits - 1)) == float("0." + "1" * 400)) is taken
    assert (field("double", "0" * 0 + "1" * digits) is Reason.OUT_OF_RANGE) is taken


def test_a_batch_that_is_all_bad() -> None:
    for value in (GOOD[:-1], GOOD.replace(b":", b" "), GOOD.replace(b"17,", b"17.0,")):
        assert len(decode(json(), [value] * 3_000).refused) == 3_000


def test_every_second_record_bad_in_different_ways() -> None:
    bad = [
        GOOD[:-1],
        GOOD.replace(b":", b" "),
        GOOD.replace(b"17,", b"1e2,"),
        GOOD.replace(b"T", b" "),
        GOOD + GOOD,
        b"1",
    ]
    values = [bad[n // 2 % len(bad)] if n % 2 else GOOD for n in range(2_000)]
    decoded = decode(json(), values)
    assert decoded.rows_at.to_pylist() == list(range(0, 2_000, 2))
    assert decoded.rows.to_pylist() == [GOOD_ROW] * 1_000


def test_values_that_complete_one_another_are_both_bad() -> None:
    values = [b'{"id":5,"account":"}', b'{"}'] * 100
    assert len(decode(json(), values).refused) == 200


# ---- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type", "text", "due"),
    [
        ("boolean", "true", True),
        ("boolean", '"true"', Reason.WRONG_TYPE),
        ("boolean", "1", Reason.WRONG_TYPE),
        ("byte", "-128", -128),
        ("byte", "128", Reason.OUT_OF_RANGE),
        ("short", "32768", Reason.OUT_OF_RANGE),
        ("int", "-2147483649", Reason.OUT_OF_RANGE),
        ("long", "-9223372036854775808", -(2**63)),
        ("long", "-9223372036854775809", Reason.OUT_OF_RANGE),
        ("long", "1.0", Reason.WRONG_TYPE),
        ("long", "1e2", Reason.WRONG_TYPE),
        ("long", "-0", 0),
        ("float", "0.1", 0.10000000149011612),
        ("float", "1e39", Reason.OUT_OF_RANGE),
        ("float", "1e-60", Reason.OUT_OF_RANGE),
        ("float", "1.00000017881393432617187499", 1.0000001192092896),  # would round up by way of a double
        ("double", "12", 12.0),
        ("double", "9007199254740993", Reason.OUT_OF_RANGE),
        ("double", "-9007199254740992", -(2.0**53)),
        ("double", "9007199254740993.0", 2.0**53),
        ("double", "100000000000000000000", 1e20),
        ("float", "16777217", Reason.OUT_OF_RANGE),
        ("float", "16777218", 16777218.0),
        ("array<struct<f: float>>", '[{"f":1},{"f":-123456789}]', Reason.OUT_OF_RANGE),
        ("double", "1e-400", Reason.OUT_OF_RANGE),
        ("double", "0e-400", 0.0),
        ("double", '"12"', Reason.WRONG_TYPE),
        ("decimal(5,2)", "1.5", Decimal("1.50")),
        ("decimal(5,2)", '"1.5"', Decimal("1.50")),
        ("decimal(5,2)", "1.230", Decimal("1.23")),
        ("decimal(5,2)", "1.234", Reason.OUT_OF_RANGE),
        ("decimal(5,2)", "1000", Reason.OUT_OF_RANGE),
        ("decimal(5,2)", "1e2", Decimal("100.00")),
        ("decimal(5,2)", '"1,5"', Reason.BAD_TEXT),
        ("decimal(5,2)", "true", Reason.WRONG_TYPE),
        # Arrow alone ends the process, or takes it for zero.
        ("decimal(12,2)", "1e-10000000", Reason.OUT_OF_RANGE),
        ("decimal(12,2)", '"1e-10000000"', Reason.OUT_OF_RANGE),
        ("decimal(12,2)", '"1\\u0065-10000000"', Reason.OUT_OF_RANGE),
        ("decimal(12,2)", '"\\u002b.1e\\u002D41"', Reason.OUT_OF_RANGE),
        ("decimal(12,2)", "1e-41", Reason.OUT_OF_RANGE),
        ("decimal(12,2)", '"1e-41"', Reason.OUT_OF_RANGE),
        ("decimal(38,0)", "1e-39", Reason.OUT_OF_RANGE),
        ("decimal(12,2)", "0e-10000000", Decimal("0.00")),
        ("decimal(12,2)", "0." + "0" * 29 + "1e-9", Reason.OUT_OF_RANGE),
        ("array<struct<d: decimal(12,2)>>", '[{"d":1},{"d":1e-10000000}]', Reason.OUT_OF_RANGE),
        ("map<string,decimal(12,2)>", '{"d":1e-10000000}', Reason.OUT_OF_RANGE),
        ("decimal(38,38)", "7", Reason.OUT_OF_RANGE),  # Arrow alone makes it 0.194...
        (
            "decimal(38,20)",
            "123456789012345678.12345678901234567890",
            Decimal("123456789012345678.12345678901234567890"),
        ),
        ("string", '"é"', "é"),
        ("string", "1", Reason.WRONG_TYPE),
        ("binary", '"AP8="', b"\x00\xff"),
        ("binary", '"AP8"', Reason.BAD_TEXT),
        ("binary", '"AP9="', Reason.BAD_TEXT),  # bits that nobody would have written
        ("date", '"2024-02-29"', date(2024, 2, 29)),
        ("date", '"2026-02-29"', Reason.BAD_TEXT),
        ("date", '"0000-01-01"', Reason.BAD_TEXT),
        ("date", '"2026-1-1"', Reason.BAD_TEXT),
        ("date", "20260101", Reason.WRONG_TYPE),
        ("timestamp", '"2026-01-01T00:00:00+05:30"', datetime(2025, 12, 31, 18, 30, tzinfo=UTC)),
        ("timestamp", '"2026-01-01t00:00:00z"', datetime(2026, 1, 1, tzinfo=UTC)),
        ("timestamp", '"0001-01-01T00:00:00Z"', datetime(1, 1, 1, tzinfo=UTC)),
        ("timestamp", '"9999-12-31T23:59:59.999999Z"', datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
        ("timestamp", '"0001-01-01T00:00:00+00:01"', Reason.OUT_OF_RANGE),
        ("timestamp", '"0000-12-31T23:59:59-01:00"', Reason.BAD_TEXT),
        ("timestamp", '"2026-01-01T00:00:00.1234560Z"', datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=UTC)),
        ("timestamp", '"2026-01-01T00:00:00.1234567Z"', Reason.OUT_OF_RANGE),
        ("timestamp", '"2026-01-01T00:00:00"', Reason.BAD_TEXT),
        ("timestamp", '"2026-01-01 00:00:00Z"', Reason.BAD_TEXT),
        ("timestamp", '"2026-01-01"', Reason.BAD_TEXT),
        ("timestamp", '"2026-02-30T00:00:00Z"', Reason.BAD_TEXT),
        ("timestamp", '"2026-01-01T24:00:00Z"', Reason.BAD_TEXT),
        ("timestamp", '"2026-06-30T23:59:60Z"', Reason.BAD_TEXT),
        ("timestamp", "1767225600", Reason.WRONG_TYPE),
        ("timestamp_ntz", '"2026-01-01T12:00:00.5"', datetime(2026, 1, 1, 12, 0, 0, 500_000)),
        ("timestamp_ntz", '"2026-01-01T12:00:00Z"', Reason.BAD_TEXT),
        ("array<int>", "[1,null,3]", [1, None, 3]),
        ("array<int>", '[1,"2"]', Reason.WRONG_TYPE),
        ("array<date>", '["2026-01-01","2026-01-32"]', Reason.BAD_TEXT),
        ("map<string,int>", '{"a":1,"b":null}', [("a", 1), ("b", None)]),
        ("map<string,int>", '{"a":1,"a":2}', Reason.DUPLICATE_FIELD),
        ("map<string,int>", '{"a\\u0000":1}', Reason.NUL),
        ("struct<x: int not null, y: string>", '{"x":1}', {"x": 1, "y": None}),
        ("struct<x: int not null, y: string>", '{"y":"b"}', Reason.MISSING_FIELD),
        ("struct<x: int not null, y: string>", '{"x":1,"x":2}', Reason.DUPLICATE_FIELD),
        ("struct<x: int not null, y: string>", '{"x":1,"z":2}', Reason.UNKNOWN_FIELD),
        ("struct<x: int not null, y: string>", "[1]", Reason.WRONG_TYPE),
        ("struct<x: int not null, y: string>", "null", None),
    ],
)
def test_types(type: str, text: str, due: object) -> None:
    assert field(type, text) == due


def test_arrow_types() -> None:
    schema = parse(
        "a byte, b decimal(12,2), c timestamp, d timestamp_ntz, e map<string,array<date>>, f struct<x: float>"
    )
    assert [arrow_type(field.type) for field in schema] == [
        pa.int8(),
        pa.decimal128(12, 2),
        pa.timestamp("us", tz="UTC"),
        pa.timestamp("us"),
        pa.map_(pa.string(), pa.list_(pa.date32())),
        pa.struct([("x", pa.float32())]),
    ]


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (GOOD.replace(b"17,", b'"seventeen",'), 'id: expected long (digits only), found the string "seventeen"'),
        (GOOD.replace(b"17,", b"null,"), "id: null, but declared not null"),
        (GOOD.replace(b'"note"', b'"\\u001b[31m"'), r'the field "\x1b[31m" is not declared'),
        (GOOD.replace(b'"n"', b'"n'), "Unterminated string starting at character 88 of 91"),
    ],
)
def test_details_say_what_was_found(value: bytes, detail: str) -> None:
    assert decode(json(), [value]).refused[0].detail == detail


def test_details_are_bounded_and_printable() -> None:
    name = "\\u0007" * 400
    nested = json("s struct<x: array<map<string,int>>>")
    dead = decode(nested, [f'{{"s":{{"x":[{{}},{{"{name}":"\\u202e"}}]}}}}'.encode()]).refused[0]
    assert dead.detail.startswith(r's.x[1]["\x07\x07')


# ---- unknown fields ------------------------------------------------------------------------------------------------


def test_unknown_fields_ignored() -> None:
    to = json("id long, s struct<x: int>", unknown_fields="ignore")
    assert one(to, b'{"id":1,"new":{"a":[1]},"s":{"x":1,"y":2}}') == {"id": 1, "s": {"x": 1}}
    assert one(to, b'{"id":1,"new":NaN}') == Reason.NOT_JSON
    assert one(to, b'{"id":1,"new":{"a":1,"a":2}}') == Reason.DUPLICATE_FIELD
    assert one(to, b'{"id":1,"new":1,"new":2}') == Reason.DUPLICATE_FIELD
    assert one(to, rb'{"id":1,"new":"\ud800"}') == Reason.LONE_SURROGATE
    assert one(to, rb'{"id":1,"new":"\u0000"}') == {"id": 1, "s": None}  # what is dropped need not fit the sink


def test_unknown_fields_kept() -> None:
    to = json("id long, s struct<x: int>", unknown_fields="keep")
    assert to.decode(batch([])).rows.schema.names == ["id", "s", "_rest"]
    assert one(to, b'{"id":1}') == {"id": 1, "s": None, "_rest": None}
    rest = '{"b":1.50,"a":{"n":123456789012345678901234567890e-5,"l":[true,null,"é\\n\\"/"]},"":""}'
    spaced = (
        b'{"b" : 1.50, "id":1,"a":{"n":123456789012345678901234567890e-5,"l":[ true,null,"\\u00e9\\n\\"\\/"]},"":""}'
    )
    assert one(to, spaced) == {"id": 1, "s": None, "_rest": rest}
    assert one(to, b'{"id":1,"s":{"y":2}}') == Reason.UNKNOWN_FIELD
    assert one(to, rb'{"id":1,"a":["\u0000"]}') == Reason.NUL
    assert one(to, rb'{"id":1,"a\u0000":1}') == Reason.NUL


def test_few_unknown_fields_among_many_records() -> None:
    values = [b'{"id":1,"new":2}' if n % 100 == 7 else b'{"id":1}' for n in range(1_000)]
    kept = decode(json("id long", unknown_fields="keep"), values).rows.column("_rest").to_pylist()
    assert kept == ['{"new":2}' if n % 100 == 7 else None for n in range(1_000)]


# ---- null values ---------------------------------------------------------------------------------------------------


def test_null_values_under_append() -> None:
    values = [GOOD, None, GOOD]
    decoded = decode(json(), values)
    assert [(dead.index, dead.reason) for dead in decoded.refused] == [(1, Reason.TOMBSTONE)]
    decoded = decode(json(tombstones="skip"), values)
    assert decoded.skipped == 1
    assert decoded.rows_at.to_pylist() == [0, 2]
    decoded = decode(json("id long, note string", tombstones="keep", unknown_fields="ignore"), values)
    assert decoded.rows_at.to_pylist() == [0, 1, 2]
    assert decoded.rows.to_pylist()[1] == {"id": None, "note": None}


def upsert(schema: str, *key: str, format: str = "json", refuse_nul: bool = True) -> Decoder:
    declared = {"format": format, "schema": schema} if format == "json" else {"format": format}
    return decoder(pipeline(declared, mode="upsert", key=key), refuse_nul=refuse_nul)


@pytest.mark.parametrize(
    ("type", "key", "due"),
    [
        ("long", b"17", 17),
        ("long", b'{"id":17}', 17),
        ("long", b' {"id":17,"more":[1]}', 17),
        ("long", b'"17"', None),
        ("long", b"17.0", None),
        ("long", b"", None),
        ("long", b"null", None),
        ("long", b'{"id":null}', None),
        ("long", b'{"key":17}', None),
        ("long", b"seventeen", None),
        ("long", None, None),
        ("string", b"acc-17", "acc-17"),
        ("string", b"17", "17"),
        ("string", b"", ""),
        ("string", b'{"id":"a"}', "a"),
        ("string", b'{"id":17}', None),
        ("string", b"{a}", None),
        ("string", b"\xff", None),
        ("string", b"a\0", None),
        ("date", b"2026-01-31", date(2026, 1, 31)),
        ("timestamp", b"2026-01-31T00:00:00Z", datetime(2026, 1, 31, tzinfo=UTC)),
        ("decimal(5,2)", b"1.5", Decimal("1.50")),
        ("boolean", b"true", True),
        ("boolean", b"yes", None),
    ],
)
def test_a_null_value_deletes_what_the_key_names(type: str, key: bytes | None, due: object) -> None:
    decoded = decode(upsert(f"id {type} not null, n int", "id"), [None], [key])
    if due is None:
        assert [dead.reason for dead in decoded.refused] == [Reason.TOMBSTONE_KEY]
    else:
        assert decoded.deletes.to_pylist() == [{"id": due}]
        assert decoded.deletes_at.to_pylist() == [0]


def test_a_key_of_several_columns() -> None:
    to = upsert("a long not null, b string not null, c int", "b", "a")
    good, bad = b'{"a":1,"b":"x","c":5}', b'{"a":1}'
    decoded = decode(to, [None, good, None, None], [b'{"a":2,"b":"y"}', None, bad, b"1"])
    assert decoded.deletes.to_pylist() == [{"b": "y", "a": 2}]
    assert decoded.rows_at.to_pylist() == [1]
    assert [(dead.index, dead.reason) for dead in decoded.refused] == [
        (2, Reason.TOMBSTONE_KEY),
        (3, Reason.TOMBSTONE_KEY),
    ]


def test_lineage_columns_are_not_read_from_the_key() -> None:
    assert upsert("id long not null", "_kafka_partition", "id").decode(batch([])).deletes.schema.names == ["id"]
    only_lineage = upsert("id long not null", "_kafka_partition")
    assert decode(only_lineage, [None], [b"17"]).refused[0].reason == Reason.TOMBSTONE_KEY


# ---- raw and string ------------------------------------------------------------------------------------------------


def test_raw() -> None:
    to = decoder(pipeline({"format": "raw"}), refuse_nul=True)
    decoded = decode(to, [b"\xff\0", b"{}", b"", None], [None, b"k", b"k", b"k"])
    assert decoded.rows.to_pylist() == [{"key": None, "value": b"\xff\0"}, {"key": b"k", "value": b"{}"}]
    assert [dead.reason for dead in decoded.refused] == [Reason.EMPTY, Reason.TOMBSTONE]


def test_raw_tombstones() -> None:
    kept = decode(
        decoder(pipeline({"format": "raw", "tombstones": "keep"}), refuse_nul=True), [b"v", None], [None, b"k"]
    )
    assert kept.rows.to_pylist() == [{"key": None, "value": b"v"}, {"key": b"k", "value": None}]
    decoded = decode(upsert("", "key", format="raw"), [None, b"v", b"v", None], [b"k", b"l", None, None])
    assert decoded.deletes.to_pylist() == [{"key": b"k"}]
    assert decoded.rows_at.to_pylist() == [1]
    assert [dead.reason for dead in decoded.refused] == [Reason.NULL_KEY, Reason.TOMBSTONE_KEY]
    by_value = decode(upsert("", "value", format="raw"), [None], [b"k"])
    assert by_value.refused[0].reason == Reason.TOMBSTONE_KEY
    dedupe = pipeline({"format": "raw", "tombstones": "keep"}, mode="dedupe", key=["value"])
    kept = decode(decoder(dedupe, refuse_nul=True), [None, b"v"], [b"k", None])
    assert [(dead.index, dead.reason) for dead in kept.refused] == [(0, Reason.NULL_KEY)]


def test_string() -> None:
    to = decoder(pipeline({"format": "string", "tombstones": "skip"}), refuse_nul=True)
    values = [b"\xef\xbb\xbfa", b"\xff", b"a\0", b"ok", None, b"ok"]
    decoded = decode(to, values, [None, b"k", b"k", b"\xff", b"k", b"k\0"])
    assert decoded.rows.to_pylist() == [{"key": None, "value": "\ufeffa"}]
    reasons = [(1, Reason.NOT_UTF8), (2, Reason.NUL), (3, Reason.NOT_UTF8), (5, Reason.NUL)]
    assert [(dead.index, dead.reason) for dead in decoded.refused] == reasons
    assert decoded.skipped == 1
    lake = decoder(pipeline({"format": "string"}), refuse_nul=False)
    assert decode(lake, [b"a\0"]).rows.to_pylist() == [{"key": None, "value": "a\0"}]


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["json", "raw", "string"])
def test_an_empty_batch(format: str) -> None:
    declared = {"format": format, "schema": FLAT} if format == "json" else {"format": format}
    assert len(decode(decoder(pipeline(declared), refuse_nul=True), []).rows) == 0


def test_slices_and_other_columns() -> None:
    whole = batch([b"x", None, GOOD, GOOD[:-1], GOOD] + [GOOD] * 100)
    more = whole.append_column("offset", pa.array(range(len(whole))))
    decoded = json().decode(more.slice(2, 80))
    assert decoded.rows_at.to_pylist() == [0, *range(2, 80)]
    assert [dead.index for dead in decoded.refused] == [1]


def test_more_rows_and_bytes_than_one_piece_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE_ROWS_MAX", 300)
    monkeypatch.setattr(reading, "_PIECE_BYTES_MAX", 20_000)
    values = [GOOD] * 500 + [GOOD.replace(b'"n"', b'"' + b"n" * 30_000 + b'"')] + [GOOD] * 499 + [GOOD[:-1]]
    decoded = decode(json(), values)
    assert decoded.rows_at.to_pylist() == list(range(1_000))
    assert [dead.index for dead in decoded.refused] == [1_000]


WITHOUT_PANDAS = """
import ast, sys
import pyarrow as pa
from avow import native
from avow.formats import decoder
from avow.arrow import binaries
from avow.settings import PipelineConfig

declared, good, allowed = map(ast.literal_eval, sys.argv[1:])
native.allow(allowed)
values = binaries(*[good] * 100)
batch = pa.RecordBatch.from_arrays([pa.nulls(100, pa.binary()), values], ["key", "value"])
assert len(decoder(PipelineConfig.model_validate(declared), refuse_nul=True).decode(batch).rows) == 100
assert "pandas" not in sys.modules
"""


def test_good_records_need_no_pandas(reader: str) -> None:
    """It is there, for Spark's driver; importing it would cost every Spark worker a second at its start."""
    given = [declared(), GOOD, reader == "native"]
    subprocess.run([sys.executable, "-c", WITHOUT_PANDAS, *map(repr, given)], check=True)


def with_headers(values: Sequence[bytes | None], headers: Sequence[Any]) -> pa.RecordBatch:
    return batch(values).append_column("headers", headers_column(headers))


def test_a_value_that_is_not_what_its_producer_sent_is_corrupted() -> None:
    good, torn = b'{"id": 1, "text": "a"}', b"{"
    sound = [(CHECKSUM, checksum(good))]
    cases: list[tuple[bytes | None, Any, bool]] = [
        (good, sound, True),
        (good, None, True),
        (good, [("other", b"1"), (CHECKSUM, checksum(good).upper()), ("other", None)], True),
        (good, [(CHECKSUM, checksum(b"another"))], False),
        (good, [(CHECKSUM, None)], False),
        (good, [(CHECKSUM, b"not digits, at all\x1b")], False),
        (good, [(CHECKSUM, b"12345678")], False),
        (good, [*sound, (CHECKSUM, b"zzzzzzzz")], False),
        (None, sound, False),
        (torn, [(CHECKSUM, checksum(torn))], True),
        (good, sound, True),
    ]
    to = json("id long, text string", tombstones="keep")
    whole = with_headers([value for value, _, _ in cases], [headers for _, headers, _ in cases])
    for part in (whole, whole.slice(2), whole.slice(3, 1), whole.slice(9)):
        first = 2 if len(part) == 9 else 3 if len(part) == 1 else 9 if len(part) == 2 else 0
        expected = cases[first : first + len(part)]
        decoded = to.decode(part)
        dead = {one.index: one for one in decoded.refused}
        assert [n for n, d in dead.items() if d.reason == Reason.CORRUPTED] == [
            n for n, (_, _, is_sound) in enumerate(expected) if not is_sound
        ]
        assert decoded.rows_at.to_pylist() == [n for n in range(len(part)) if n not in dead]
        assert [n for n, d in dead.items() if d.reason == Reason.NOT_JSON] == [
            n for n, (value, _, _) in enumerate(expected) if value == torn
        ]
        assert list(dead) == sorted(dead)
        assert all(one.detail.isprintable() for one in dead.values())
    assert "avow-crc32c is 12345678, the value's CRC32C is" in to.decode(whole).refused[3].detail
    assert "the value is null" in to.decode(whole).refused[5].detail


@pytest.mark.parametrize("unit", ["ms", "us"])
def test_a_timestamp_that_no_sink_holds_is_a_dead_letter(unit: str) -> None:
    fit, beyond = [-1, 0, 253_402_300_799_999], [-2, 253_402_300_800_000, 2**52]
    beyond += [1_700_000_000_000_000_000, 2**63 - 1] if unit == "ms" else []
    stamps = pa.array([stamp * (1 if unit == "ms" else 1000) for stamp in [*fit, *beyond]], pa.int64())
    one = batch([GOOD] * len(stamps)).append_column("timestamp", stamps.cast(pa.timestamp(unit, "UTC")))
    found = json().decode(one)
    assert found.rows_at.to_pylist() == [0, 1, 2]
    assert [(dead.index, dead.reason) for dead in found.refused] == [
        (row, Reason.TIMESTAMP) for row in range(3, len(stamps))
    ]
    assert str(beyond[1]) in found.refused[1].detail


def test_a_header_whose_name_is_not_utf8_makes_a_dead_letter() -> None:
    headers = headers_column([[("a", b"1")], None, [(NOT_UTF8, b"1"), (NOT_UTF8, None)], []])
    found = json().decode(batch([GOOD] * 4).append_column("headers", headers))
    assert found.rows_at.to_pylist() == [0, 1, 3]
    assert [(dead.index, dead.reason) for dead in found.refused] == [(2, Reason.HEADER_NAME)]


def test_timestamps_are_read_as_they_are() -> None:
    stamps = [-1, 0, 253_402_300_800_000, 1_700_000_000_000_000_000, 2**63 - 1]
    messages = [
        Message(topic="t", partition=0, offset=n, value=b"v", key=b"k", timestamp=(1, stamp))
        for n, stamp in enumerate(stamps)
    ]
    found = as_batch(OffsetRange("t", 0, 0, 5), messages)
    assert found.column("timestamp").cast(pa.int64()).to_pylist() == stamps
    for n, stamp in enumerate(stamps):
        assert last_fingerprint(found.slice(0, n + 1)) == fingerprint(n, stamp, b"k", b"v")


@pytest.mark.parametrize("part", ["key", "headers"])
def test_batches_are_bounded_by_keys_and_headers_too(part: str) -> None:
    large = bytes(1 << 20)
    more: dict[str, Any] = {"key": large} if part == "key" else {"headers": [("h", large)]}
    messages = [Message(topic="t", partition=0, offset=n, timestamp=(1, 0), **more) for n in range(40)]
    found = list(from_memory(as_batch(OffsetRange("t", 0, 0, 40), messages))(OffsetRange("t", 0, 0, 40)))
    assert sum(part.num_rows for part in found) == 40
    assert max(part.num_rows for part in found) <= 16


def test_a_corrupted_delete_deletes_nothing() -> None:
    to = upsert("id long not null, text string", "id")
    values, headers = [None, b'{"id":2}', None], [[(CHECKSUM, b"00000000")], None, None]
    keyed = batch(values, [b"1", b"2", b"3"]).append_column("headers", headers_column(headers))  # type: ignore[arg-type]
    decoded = to.decode(keyed)
    assert decoded.deletes_at.to_pylist() == [2]
    assert decoded.deletes.to_pylist() == [{"id": 3}]
    assert decoded.rows_at.to_pylist() == [1]
    assert [(dead.index, dead.reason) for dead in decoded.refused] == [(0, Reason.CORRUPTED)]


def test_the_checksum_is_the_published_one() -> None:
    assert checksum(b"123456789") == b"e3069283"
    assert checksum(b"") == b"00000000"
