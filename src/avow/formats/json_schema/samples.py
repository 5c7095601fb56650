"""JSON records with a schema, made on purpose: for the format's contract, and values for a reader's schema.

Owns: these records. Must not know: how they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from avow.errors import ConfigError
from avow.formats.base import DecodeError, Reason, Samples
from avow.formats.json.samples import sample
from avow.formats.json_schema.document import Document
from avow.formats.json_schema.plugin import JsonSchema, JsonSchemaConfig
from avow.formats.json_schema.validation import SCHEMA_VIOLATION, refuse_invalid
from avow.formats.registry.frame import framed
from avow.schema import Field, Scalar
from avow.settings import PipelineConfig

_AMOUNT = {
    "title": "org.apache.kafka.connect.data.Decimal",
    "type": "number",
    "connect.type": "bytes",
    "connect.parameters": {"scale": "2", "connect.decimal.precision": "12"},
}
_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Payment",
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "account", "kind"],
    "properties": {
        "id": {"type": "integer", "minimum": -9},
        "account": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["IN", "OUT"]},
        "ok": {"type": ["null", "boolean"]},
        "amount": {"oneOf": [{"type": "null"}, _AMOUNT]},
        "rate": {"type": "number"},
        "at": {"type": "string", "format": "date-time"},
        "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "data": {"type": "string", "contentEncoding": "base64"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "notes": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "place": {"$ref": "#/definitions/Place"},
    },
    "definitions": {"Place": {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}},
}
_LEAST: dict[str, object] = {"id": -9, "account": "", "kind": "IN"}
_ABSENT: dict[str, object] = dict.fromkeys(
    ("ok", "amount", "rate", "at", "day", "data", "tags", "notes", "place"), None
)
_HEAD = b'{"id":1,"account":"a","kind":"IN"'

SAMPLES = Samples(
    decode={"format": "json-schema", "schema": json.dumps(_SCHEMA)},
    good=(
        (b'{"id":-9,"account":"","kind":"IN"}', {**_LEAST, **_ABSENT}),
        (
            b'\xef\xbb\xbf {"kind": "OUT", "account": "\\u00e9\\ud83d\\ude00","id":9223372036854775807, "ok": null}\n',
            {**_ABSENT, "id": 2**63 - 1, "account": "é😀", "kind": "OUT"},
        ),
        (
            b'{"id":1,"account":"null","kind":"IN","ok":true,"amount":-1.20,"rate":12.5,'
            b'"at":"2026-01-31T12:00:00.000001+01:00","day":"2024-02-29","data":"AP8=","tags":["x",""],'
            b'"notes":{"a":null,"b":"c"},"place":{"x":-1,"y":[1]}}',
            {
                "id": 1,
                "account": "null",
                "kind": "IN",
                "ok": True,
                "amount": Decimal("-1.20"),
                "rate": 12.5,
                "at": datetime(2026, 1, 31, 11, 0, 0, 1, tzinfo=UTC),
                "day": date(2024, 2, 29),
                "data": b"\x00\xff",
                "tags": ["x", ""],
                "notes": [("a", None), ("b", "c")],
                "place": {"x": -1},
            },
        ),
    ),
    bad=(
        (b"", Reason.EMPTY),
        (_HEAD, Reason.NOT_JSON),
        (_HEAD + b"}{}", Reason.NOT_JSON),
        (b"[" + _HEAD + b"}]", Reason.NOT_OBJECT),
        (b"null", Reason.NOT_OBJECT),
        (_HEAD + b',"rate":NaN}', Reason.NOT_JSON),
        (_HEAD.replace(b'"a"', b'"\xff"') + b"}", Reason.NOT_UTF8),
        (_HEAD.replace(b'"a"', rb'"\u0000"') + b"}", Reason.NUL),
        (_HEAD + b',"id":1}', Reason.DUPLICATE_FIELD),
        (b'{"id":1,"kind":"IN"}', Reason.MISSING_FIELD),
        (b'{"id":"1","account":"a","kind":"IN"}', Reason.WRONG_TYPE),
        (b'{"id":1.0,"account":"a","kind":"IN"}', Reason.WRONG_TYPE),
        (_HEAD.replace(b"1", b"9223372036854775808") + b"}", Reason.OUT_OF_RANGE),
        (_HEAD + b',"amount":0.005}', Reason.OUT_OF_RANGE),
        (_HEAD + b',"amount":"1.20"}', SCHEMA_VIOLATION),  # a decimal could be text, but this one is a number
        (_HEAD + b',"day":"2026-02-29"}', Reason.BAD_TEXT),
        (_HEAD + b',"new":1}', SCHEMA_VIOLATION),
        (_HEAD + b',"rate":null}', SCHEMA_VIOLATION),
        (_HEAD.replace(b"1", b"-10") + b"}", SCHEMA_VIOLATION),
        (_HEAD.replace(b'"a"', b'"123456789"') + b"}", SCHEMA_VIOLATION),
        (_HEAD.replace(b"IN", b"BY") + b"}", SCHEMA_VIOLATION),
        (_HEAD + b',"tags":["x","y","z"]}', SCHEMA_VIOLATION),
        (_HEAD + b',"tags":[null]}', SCHEMA_VIOLATION),
        (_HEAD + b',"place":{"y":1}}', Reason.MISSING_FIELD),
    ),
)


# For any schema


def key_columns(pipeline: PipelineConfig) -> frozenset[str]:
    """The columns that ``sample_value`` can make of a key."""
    columns = pipeline.decode.columns
    return frozenset(column.name for column in columns if column.type in (Scalar.LONG, Scalar.STRING))


def sample_value(pipeline: PipelineConfig, number: int, key: int) -> bytes:
    """A value of the reader's schema. What cannot be made is said: a record that is not valid would prove nothing."""
    decode = pipeline.decode
    assert isinstance(decode, JsonSchemaConfig)
    reader = decode.reader
    assert isinstance(reader, JsonSchema)
    document = Document(reader.text, reader.references)
    properties = document.root.get("properties", {})
    value = {}
    for column in reader.columns:
        is_key = column.name in pipeline.sink.key
        made = _sample(column, properties.get(column.name), key if is_key else number, never_null=is_key)
        if made is not None:  # absent is what any schema with an optional property takes
            value[column.name] = made
    text = json.dumps(value, ensure_ascii=False)
    try:
        refuse_invalid(document.validator, text)
    except DecodeError as error:
        raise ConfigError(
            f"decode.schema: avow prove cannot make records of it: {error.path}: {error.detail}",
            advice="Run avow prove without a pipeline file, or with a schema that says less.",
        ) from None
    data = text.encode()
    return framed(decode.writer_id, data) if decode.framed else data


def _sample(column: Field, schema: Any, number: int, *, never_null: bool) -> Any:
    said: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
    if "const" in said:
        return said["const"]
    if choices := [choice for choice in said.get("enum", ()) if choice is not None]:
        return choices[number % len(choices)]
    return sample(Field(column.name, column.type, required=column.required or never_null), number)
