"""JSON records made on purpose: good and bad ones for the format's contract, and values for any declared columns.

Owns: these records. Must not know: how they are read.
"""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime
from decimal import Decimal as Exact
from typing import Any

from avow.formats.base import Reason, Samples
from avow.schema import Array, Decimal, Field, Map, Scalar, Struct, Type
from avow.settings import PipelineConfig

_ABSENT: dict[str, object] = dict.fromkeys(("amount", "price", "at", "day", "data", "tags", "place"))

SAMPLES = Samples(
    decode={
        "format": "json",
        "schema": "id long not null, account string not null, amount double, price decimal(12,2), at timestamp, "
        "day date, data binary, tags array<string>, place struct<x: int not null, y: string>",
    },
    good=(
        (b'{"id":1,"account":"a"}', {"id": 1, "account": "a", **_ABSENT}),
        (b'\xef\xbb\xbf {"account": "\\u00e9\\ud83d\\ude00", "id": -9}\n', {"id": -9, "account": "é😀", **_ABSENT}),
        (
            b'{"id":9223372036854775807,"account":"","amount":12.5,"price":"1.20","at":"2026-01-31T12:00:00.000001+01:00",'
            b'"day":"2024-02-29","data":"AP8=","tags":["x",null],"place":{"x":1,"y":null}}',
            {
                "id": 9223372036854775807,
                "account": "",
                "amount": 12.5,
                "price": Exact("1.20"),
                "at": datetime(2026, 1, 31, 11, 0, 0, 1, tzinfo=UTC),
                "day": date(2024, 2, 29),
                "data": b"\x00\xff",
                "tags": ["x", None],
                "place": {"x": 1, "y": None},
            },
        ),
    ),
    bad=(
        (b"", Reason.EMPTY),
        (b'{"id":1,"account":"a"', Reason.NOT_JSON),
        (b'{"id":1,"account":"a"}{}', Reason.NOT_JSON),
        (b'{"id":1,"account":"a","amount":NaN}', Reason.NOT_JSON),
        (b"[1]", Reason.NOT_OBJECT),
        (b'{"id":1,"account":"\xff"}', Reason.NOT_UTF8),
        (rb'{"id":1,"account":"\ud800"}', Reason.LONE_SURROGATE),
        (rb'{"id":1,"account":"\u0000"}', Reason.NUL),
        (b"[" * 1_001, Reason.TOO_DEEP),
        (b'{"id":1,"account":"a","amount":' + b"9" * 1_001 + b"}", Reason.LONG_NUMBER),
        (b'{"id":1,"account":"a","id":1}', Reason.DUPLICATE_FIELD),
        (b'{"id":1,"account":"a","new":1}', Reason.UNKNOWN_FIELD),
        (b'{"id":null,"account":"a"}', Reason.MISSING_FIELD),
        (b'{"id":"1","account":"a"}', Reason.WRONG_TYPE),
        (b'{"id":1,"account":"a","price":0.005}', Reason.OUT_OF_RANGE),
        (b'{"id":1,"account":"a","day":"2026-02-29"}', Reason.BAD_TEXT),
    ),
)


def sample_value(pipeline: PipelineConfig, number: int, key: int) -> bytes:
    """A value for the declared columns. A key is never null: such a record is refused, whatever the pipeline does."""
    keys = pipeline.sink.key
    fields = pipeline.decode.columns
    document = {f.name: _sample(f.type, key) if f.name in keys else sample(f, number) for f in fields}
    return json.dumps(document, ensure_ascii=False).encode()


def sample(field: Field, number: int) -> Any:
    """A value for a column. Where it may be null, it sometimes is."""
    return None if not field.required and number % 5 == 4 else _sample(field.type, number)


def _sample(kind: Type, number: int) -> Any:
    day, second = number % 28 + 1, number % 60
    match kind:
        case Scalar.BOOLEAN:
            return number % 2 == 0
        case Scalar.BYTE:
            return number % 100
        case Scalar.SHORT:
            return number % 30_000
        case Scalar.INT | Scalar.LONG:
            return number
        case Scalar.FLOAT | Scalar.DOUBLE:
            return number % 4_096 / 4
        case Scalar.STRING:
            return f"text {number}"
        case Scalar.BINARY:
            return base64.b64encode(b"bytes %d" % number).decode()
        case Scalar.DATE:
            return f"2026-01-{day:02d}"
        case Scalar.TIMESTAMP:
            return f"2026-01-{day:02d}T12:00:{second:02d}Z"
        case Scalar.TIMESTAMP_NTZ:
            return f"2026-01-{day:02d}T12:00:{second:02d}"
        case Decimal(precision, scale):
            return number % 10 ** min(precision - scale, 9)
        case Array(element):
            return [_sample(element, number)]
        case Map(value):
            return {"a": _sample(value, number)}
        case Struct(fields):
            return {field.name: sample(field, number) for field in fields}
