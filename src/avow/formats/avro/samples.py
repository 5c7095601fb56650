"""Avro records made on purpose: good and bad ones for the format's contract, and values for any reader's schema.

Owns: these records. Must not know: how they are read.
"""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from avow.formats.avro.encode import encode
from avow.formats.avro.plugin import AvroConfig
from avow.formats.avro.reader import NOT_AVRO
from avow.formats.avro.schema import Array, Enum, Fixed, Map, Primitive, Record, Type, Union, parse
from avow.formats.base import Reason, Samples
from avow.formats.registry.frame import framed
from avow.schema import Scalar
from avow.settings import PipelineConfig

_PLACE = {"type": "record", "name": "Place", "fields": [{"name": "x", "type": "int"}]}
_SCHEMA = {
    "type": "record",
    "name": "Payment",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "account", "type": "string"},
        {"name": "ok", "type": "boolean"},
        {"name": "amount", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}]},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["IN", "OUT"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "notes", "type": {"type": "map", "values": ["null", "string"]}},
        {"name": "place", "type": ["null", _PLACE]},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
        {"name": "rate", "type": ["null", "double"]},
    ],
}
_FULL = {
    "id": 2**63 - 1,
    "account": "é😀",
    "ok": True,
    "amount": "-1.20",
    "at": "2026-01-31T12:00:00.000001+01:00",
    "day": "2024-02-29",
    "kind": "OUT",
    "tags": ["x", ""],
    "notes": {"a": None, "b": "c"},
    "place": {"x": -1},
    "hash": "AP8=",
    "rate": 12.5,
}
_EMPTY = {
    **_FULL,
    **{"id": -1, "account": "", "ok": False, "amount": None, "day": None, "kind": "IN", "tags": [], "notes": {}},
    **{"place": None, "rate": None},
}
_ROW: dict[str, object] = {
    "id": 2**63 - 1,
    "account": "é😀",
    "ok": True,
    "amount": Decimal("-1.20"),
    "at": datetime(2026, 1, 31, 11, 0, 0, 1, tzinfo=UTC),
    "day": date(2024, 2, 29),
    "kind": "OUT",
    "tags": ["x", ""],
    "notes": [("a", None), ("b", "c")],
    "place": {"x": -1},
    "hash": b"\x00\xff",
    "rate": 12.5,
}
_EMPTY_ROW = {
    **_ROW,
    **{"id": -1, "account": "", "ok": False, "amount": None, "day": None, "kind": "IN", "tags": [], "notes": []},
    **{"place": None, "rate": None},
}


def _samples() -> Samples:
    schema = parse(json.dumps(_SCHEMA))
    full, empty = encode(schema, _FULL), encode(schema, _EMPTY)
    # The empty one: id, account, ok, amount, at (8 bytes), day, kind, tags, notes, place, hash (2), rate.
    assert empty[:4] == b"\x01\x00\x00\x00"
    end = empty[4:]
    at_size = len(end) - 8
    at, rest = end[:at_size], end[at_size:]
    head = b"\x01\x00\x00"
    return Samples(
        decode={"format": "avro", "schema": json.dumps(_SCHEMA)},
        good=(
            (full, _ROW),
            (empty, _EMPTY_ROW),
            # The same array in two blocks, of which one says its size.
            (
                head + b"\x00" + at + b"\x00\x00" + b"\x01\x04\x02x\x02\x00\x00" + rest[3:],
                {**_EMPTY_ROW, "tags": ["x", ""]},
            ),
        ),
        bad=(
            (b"", Reason.EMPTY),
            (full[:-1], NOT_AVRO),
            (full + b"\x00", NOT_AVRO),
            (b"\x00" + full, NOT_AVRO),
            (b"\x01\x00\x07\x00" + end, NOT_AVRO),  # a boolean byte
            (head + b"\x04" + end, NOT_AVRO),  # a branch of two
            (head + b"\x03" + end, NOT_AVRO),
            (b"\xff" * 10 + b"\x01" + empty[1:], NOT_AVRO),  # a number of 11 bytes
            (b"\x01\x02\xff\x00\x00" + end, Reason.NOT_UTF8),
            (b"\x01\x02\x00\x00\x00" + end, Reason.NUL),
            (head + b"\x02\x0c" + (10**12).to_bytes(6, "big") + end, Reason.OUT_OF_RANGE),  # 13 digits
            (head + b"\x02\x00" + end, NOT_AVRO),  # a decimal of no bytes
            (head + b"\x00" + b"\xff" * 9 + b"\x01" + rest, Reason.OUT_OF_RANGE),  # a moment before the year 1
            (head + b"\x00" + at + b"\x00\x04" + rest[2:], NOT_AVRO),  # a symbol of two
            (head + b"\x00" + at + rest[:3] + b"\x04\x02a\x00\x02a\x00\x00" + rest[4:], Reason.DUPLICATE_FIELD),
            (head + b"\x00" + at + b"\x00\x00" + b"\x01\x06\x02x\x00" + rest[3:], NOT_AVRO),  # a block's size
        ),
    )


SAMPLES = _samples()


# For any schema


def key_columns(pipeline: PipelineConfig) -> frozenset[str]:
    """The columns that ``sample_value`` can make of a key."""
    columns = pipeline.decode.columns
    return frozenset(column.name for column in columns if column.type in (Scalar.LONG, Scalar.STRING))


def sample_value(pipeline: PipelineConfig, number: int, key: int) -> bytes:
    """A value of the reader's schema. A key is never null: such a record is refused, whatever the pipeline does."""
    decode = pipeline.decode
    assert isinstance(decode, AvroConfig)
    type = decode.avro_type
    keys = pipeline.sink.key
    value = {f.name: _sample(f.type, key if f.name in keys else number, f.name in keys) for f in type.fields}
    data = encode(type, value)
    return framed(decode.writer_id, data) if decode.framed else data


def _sample(type: Type, number: int, never_null: bool = False) -> Any:
    match type:
        case Union(branches):
            # Where it may be null, it sometimes is.
            others = [branch for branch in branches if not (isinstance(branch, Primitive) and branch.name == "null")]
            is_null = len(others) < len(branches) and number % 5 == 4 and not never_null
            return None if is_null or not others else _sample(others[0], number)
        case Record(fields=fields):
            return {field.name: _sample(field.type, number) for field in fields}
        case Array(items):
            return [_sample(items, number)]
        case Map(values):
            return {"a": _sample(values, number)}
        case Enum(_, symbols):
            return symbols[number % len(symbols)]
        case Fixed(logical="uuid"):
            return f"00000000-0000-0000-0000-{number:012d}"
        case Primitive(logical="decimal") | Fixed(logical="decimal"):
            return number % 10 ** min(type.precision - type.scale, 9)
        case Fixed(size=size):
            return b64encode(struct.pack(">Q", number).rjust(size, b"\0")[-size:] if size else b"").decode()
    return _primitive(type, number)


def _primitive(type: Primitive, number: int) -> Any:
    match type.logical or type.name:
        case "boolean":
            return number % 2 == 0
        case "float" | "double":
            return number % 4_096 / 4
        case "string":
            return f"text {number}"
        case "uuid":
            return f"00000000-0000-0000-0000-{number:012d}"
        case "bytes":
            return b64encode(b"bytes %d" % number).decode()
        case "date":
            return (date(2026, 1, 1) + timedelta(days=number % 28)).isoformat()
        case "time-millis" | "time-micros":
            return number % 60_000
        case logical if logical.startswith(("timestamp-", "local-timestamp-")):
            zone = "" if logical.startswith("local-") else "Z"
            return f"2026-01-{number % 28 + 1:02d}T12:00:{number % 60:02d}{zone}"
        case "null":
            return None
    return number % 2**31
