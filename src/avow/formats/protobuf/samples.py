"""Protobuf messages made on purpose: good and bad ones for the format's contract, and values for any reader's schema.

Owns: these records. Must not know: how they are read.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from avow.formats.base import Reason, Samples
from avow.formats.protobuf.descriptors import Kind
from avow.formats.protobuf.encode import encode, place_of
from avow.formats.protobuf.layout import Enumeration, Exact, Many, Record, Slot, Special, Value, Wrapped
from avow.formats.protobuf.plugin import ProtobufConfig, ProtobufSchema
from avow.formats.protobuf.reader import UNKNOWN_ENUM
from avow.formats.protobuf.wire import NOT_PROTOBUF, varint
from avow.formats.registry.frame import framed
from avow.settings import PipelineConfig

_TEXT = """\
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
enum Way { IN = 0; OUT = 1; }
message Payment {
  message Place { int32 x = 1; optional int32 y = 2; }
  int64 id = 1;
  string account = 2;
  bool ok = 3;
  optional double amount = 4;
  google.protobuf.Timestamp at = 5;
  Way way = 6;
  repeated sint32 steps = 7;
  map<int32, string> notes = 8;
  Place place = 9;
  oneof payer { string name = 10; uint64 number = 11; }
  bytes hash = 12;
  google.protobuf.Int64Value limit = 13;
  google.protobuf.Duration wait = 14;
  google.protobuf.Struct more = 15;
  fixed32 code = 16;
}
"""
_FULL = {
    "id": 2**63 - 1,
    "account": "é😀",
    "ok": True,
    "amount": 12.5,
    "at": "2026-01-31T12:00:00.000001+01:00",
    "way": "OUT",
    "steps": [0, -1, 2**31 - 1],
    "notes": {"-1": "a"},
    "place": {"x": -1, "y": 0},
    "number": 2**64 - 1,
    "hash": "AP8=",
    "limit": 0,
    "wait": "-1.5s",
    "more": {"a": [1, None]},
    "code": 2**32 - 1,
}
_ROW: dict[str, object] = {
    "id": 2**63 - 1,
    "account": "é😀",
    "ok": True,
    "amount": 12.5,
    "at": datetime(2026, 1, 31, 11, 0, 0, 1, tzinfo=UTC),
    "way": "OUT",
    "steps": [0, -1, 2**31 - 1],
    "notes": [("-1", "a")],
    "place": {"x": -1, "y": 0},
    "name": None,
    "number": Decimal(2**64 - 1),
    "hash": b"\x00\xff",
    "limit": 0,
    "wait": -1_500_000,
    "more": '{"a":[1,null]}',
    "code": 2**32 - 1,
}
_EMPTY: dict[str, object] = {
    **{"id": 0, "account": "", "ok": False, "amount": None, "at": None, "way": "IN", "steps": [], "notes": []},
    **{"place": None, "name": None, "number": None, "hash": b"", "limit": None, "wait": None, "more": None, "code": 0},
}


def _samples() -> Samples:
    schema = ProtobufConfig.model_validate({"format": "protobuf", "schema": _TEXT}).protobuf_schema
    full, small = encode(schema, _FULL), b"\x08\x01"
    row = {**_EMPTY, "id": 1}
    return Samples(
        decode={"format": "protobuf", "schema": _TEXT},
        good=(
            (full, _ROW),
            (small, row),
            (b"", _EMPTY),  # so a message is written in which all fields have their defaults
            (small + b"\x08\x02", {**row, "id": 2}),  # given again: the last one counts
            (b"\x52\x01a\x58\x01", {**_EMPTY, "number": Decimal(1)}),  # of a oneof, too
            (b"\x4a\x02\x08\x01\x4a\x02\x10\x02", {**_EMPTY, "place": {"x": 1, "y": 2}}),  # messages are merged
            (b"\x3a\x02\x02\x04\x38\x06", {**_EMPTY, "steps": [1, 2, 3]}),  # packed, and not
            (b"\x42\x05\x08\x01\x12\x01a\x42\x05\x08\x01\x12\x01b", {**_EMPTY, "notes": [("1", "b")]}),
            (b"\x42\x00", {**_EMPTY, "notes": [("0", "")]}),
            (small + b"\xa0\x06\x01\xa3\x06\xa0\x06\x01\xa4\x06", row),  # field 100, and as a group
            (b"\x88\x00\x81\x80\x00", row),  # written longer than needed
        ),
        bad=(
            (full[:-1], NOT_PROTOBUF),
            (full + b"\x00", NOT_PROTOBUF),  # field 0
            (b"\x00" + full, NOT_PROTOBUF),
            (b"\x08" + b"\xff" * 10 + b"\x01", NOT_PROTOBUF),  # a varint of 11 bytes
            (b"\x08" + b"\xff" * 9 + b"\x02", NOT_PROTOBUF),  # and one of 65 bits
            (b"\x12\x05abcd", NOT_PROTOBUF),  # a length beyond the end
            (b"\x3a\x01\x80", NOT_PROTOBUF),  # a packed number that is cut off
            (b"\x0e\x01", NOT_PROTOBUF),  # wire type 6
            (varint((2**29 + 1) << 3) + b"\x01", NOT_PROTOBUF),  # a field number of 30 bits
            (b"\x88\x80\x80\x80\x80\x00\x01", NOT_PROTOBUF),  # a tag of six bytes
            (b"\xa4\x06", NOT_PROTOBUF),  # the end of no group
            (b"\xa3\x06", NOT_PROTOBUF),  # a group without an end
            (b"\x0a\x01a", Reason.WRONG_TYPE),  # bytes where the id is a varint
            (b"\x10\x01", Reason.WRONG_TYPE),
            (b"\x12\x01\xff", Reason.NOT_UTF8),
            (b"\x12\x01\x00", Reason.NUL),
            (b"\x18\x02", Reason.OUT_OF_RANGE),  # a boolean
            (b"\x4a\x06\x08\x80\x80\x80\x80\x08", Reason.OUT_OF_RANGE),  # 2^31 as int32
            (b"\x2a\x02\x10\x01", Reason.OUT_OF_RANGE),  # a nanosecond
            (b"\x2a\x08\x08\x80\xcd\x9f\x8b\xb0\x0e" + b"\x10", NOT_PROTOBUF),
            (b"\x30\x02", UNKNOWN_ENUM),
            (b"\x7a\x07\x0a\x05\x0a\x01a\x12\x00", Reason.MISSING_FIELD),  # a google.protobuf.Value without one
            (b"\xa3\x06" * 101 + b"\xa4\x06" * 101, Reason.TOO_DEEP),
        ),
    )


# For any schema


def key_columns(pipeline: PipelineConfig) -> frozenset[str]:
    """The columns that ``sample_value`` can make of a key."""
    return frozenset(
        slot.name for slot in _schema(pipeline).record.slots if slot.value in _KEYS and slot.many is Many.ONE
    )


def sample_value(pipeline: PipelineConfig, number: int, key: int) -> bytes:
    """A value of the reader's schema. A key is never null: such a record is refused, whatever the pipeline does."""
    decode, schema = pipeline.decode, _schema(pipeline)
    assert isinstance(decode, ProtobufConfig)
    keys = pipeline.sink.key
    value = _message(schema.record, number)
    value |= {slot.name: _value(slot.value, key) for slot in schema.record.slots if slot.name in keys}
    data = encode(schema, value)
    return framed(decode.writer_id, place_of(schema) + data) if decode.framed else data


def _schema(pipeline: PipelineConfig) -> ProtobufSchema:
    assert isinstance(pipeline.decode, ProtobufConfig)
    return pipeline.decode.protobuf_schema


def _message(record: Record, number: int) -> dict[str, Any]:
    oneofs: dict[str, list[Slot]] = {}
    for slot in record.slots:
        oneofs.setdefault(slot.oneof or slot.name, []).append(slot)
    chosen = [slots[number % len(slots)] for slots in oneofs.values()]
    # Where a field may be null, it sometimes is.
    return {slot.name: _field(slot, number) for slot in chosen if slot.required or number % 5 != 4}


def _field(slot: Slot, number: int) -> Any:
    value = _value(slot.value, number)
    if slot.many is Many.LIST:
        return [value]
    key = "true" if slot.key is Kind.BOOL else "1"
    return {key: value} if slot.many is Many.MAP else value


def _value(value: Value, number: int) -> Any:
    day, second = number % 28 + 1, number % 60
    match value:
        case Enumeration(names):
            return list(names.values())[number % len(names)]
        case Record():
            return _message(value, number)
        case Wrapped(kind):
            return _value(kind, number)
        case Special.TIMESTAMP:
            return f"2026-01-{day:02d}T12:00:{second:02d}Z"
        case Exact():
            return {"value": "AQ==", "scale": value.scale}
        case Special.DATE:
            return {"year": 2026, "month": 1, "day": day}
        case Special.DURATION:
            return f"{second}s"
        case Special.JSON_ARRAY:
            return [number]
        case Special.JSON_OBJECT | Special.JSON_VALUE:
            return {"number": number}
        case Special.EMPTY:
            return {}
        case Kind.BOOL:
            return number % 2 == 0
        case Kind.DOUBLE | Kind.FLOAT:
            return number % 4_096 / 4
        case Kind.STRING:
            return f"text {number}"
        case Kind.BYTES:
            return "Ynl0ZXM="
    return number % 2**31


_KEYS = {kind for kind in Kind if kind not in (Kind.BOOL, Kind.BYTES, Kind.DOUBLE, Kind.FLOAT, Kind.ENUM, Kind.MESSAGE)}
SAMPLES = _samples()
