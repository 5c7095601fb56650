"""JSON with a JSON Schema: columns, what is valid, and that reading by column and one by one is the same.

``jsonschema``, another library, says what is valid: a record that it refuses must never become a row.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.json_readers import READERS, reading_by

from avow import native
from avow.errors import ConfigError
from avow.formats.base import Decoded, DecodeError
from avow.formats.json_schema import readers
from avow.formats.json_schema.columns import NoColumn, columns_of
from avow.formats.json_schema.document import BadSchema, Document
from avow.formats.json_schema.plugin import JSON_SCHEMA, JsonSchema, JsonSchemaConfig, UnknownFields
from avow.formats.json_schema.proofs import Validate, mismatch, which
from avow.formats.json_schema.readers import JsonSchemaReader, schema_reader
from avow.formats.registry.decoder import IncompatibleSchema
from avow.schema import Scalar
from avow.settings import PipelineConfig

DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
CONNECT_DECIMAL = "org.apache.kafka.connect.data.Decimal"


def of(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, **more}
    return {**schema, "required": list(required)} if required else schema


def columns(schema: Any, references: Mapping[str, Any] | None = None) -> str:
    others = tuple((name, json.dumps(other)) for name, other in (references or {}).items())
    return str(columns_of(Document(json.dumps(schema), others)))


def reader_of(schema: Any) -> JsonSchema:
    text = json.dumps(schema)
    return JsonSchema(text, (), columns_of(Document(text)), is_object=True)


def opened(
    reader: Any, writer: Any = None, unknown_fields: UnknownFields = "ignore", *, refuse_nul: bool = True
) -> JsonSchemaReader:
    compiled = reader_of(reader)
    written = compiled.text if writer is None else json.dumps(writer)
    is_native = native.library() is not None
    return schema_reader(compiled, written, (), unknown_fields, refuse_nul=refuse_nul, native=is_native)


def row(reader: Any, value: Any, writer: Any = None, unknown_fields: UnknownFields = "ignore") -> Mapping[str, object]:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return opened(reader, writer, unknown_fields).row(data, 0)


def refusal(reader: Any, value: Any, writer: Any = None, unknown_fields: UnknownFields = "ignore") -> tuple[str, str]:
    """The reason, and the path."""
    with pytest.raises(DecodeError) as refused:
        row(reader, value, writer, unknown_fields)
    return refused.value.reason, refused.value.path


# ---- columns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("property_", "column"),
    [
        ({"type": "integer"}, "long"),
        ({"type": "integer", "connect.type": "int8"}, "byte"),
        ({"type": "integer", "connect.type": "int16"}, "short"),
        ({"type": "integer", "format": "int32"}, "int"),
        ({"type": "integer", "format": "int64"}, "long"),
        ({"type": "number"}, "double"),
        ({"type": "number", "connect.type": "float32"}, "float"),
        ({"type": ["integer", "number"]}, "double"),
        ({"type": "boolean"}, "boolean"),
        ({"type": "string", "format": "uuid"}, "string"),
        ({"type": "string", "format": "date"}, "date"),
        ({"type": "string", "format": "date-time"}, "timestamp"),
        ({"type": "string", "contentEncoding": "base64"}, "binary"),
        ({"type": "string", "connect.type": "bytes"}, "binary"),
        ({"type": ["string", "null"]}, "string"),
        ({"enum": ["a", "b"]}, "string"),
        ({"enum": [1, 2]}, "long"),
        ({"type": "number", "enum": [1, 2]}, "double"),
        ({"type": ["string", "null"], "enum": ["a", None]}, "string"),
        ({"const": "a"}, "string"),
        ({"oneOf": [{"type": "null"}, {"type": "integer", "connect.type": "int32"}], "connect.index": 3}, "int"),
        ({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "string", "format": "ipv4"}]}, "string"),
        ({"type": "string", "anyOf": [{"maxLength": 3}, {"pattern": "^x"}]}, "string"),
        ({"type": "array", "items": {"type": ["null", "string"]}}, "array<string>"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "map<string,long>"),
        (of({"a b": {"type": "integer"}, "c": {"type": "string"}}, "c"), "struct<`a b`: long, c: string not null>"),
        ({"$ref": "#/definitions/money"}, "struct<cents: long>"),
        ({"allOf": [{"$ref": "#/definitions/money"}, of({"unit": {"type": "string"}}, "unit")]},
         "struct<cents: long, unit: string not null>"),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["number", "null"]}]}, "long"),
        ({"type": "number", "title": CONNECT_DECIMAL, "connect.parameters": {"scale": "2"}}, "decimal(38,2)"),
    ],
)  # fmt: skip
def test_the_column_of_a_schema(property_: Any, column: str) -> None:
    definitions = {"money": of({"cents": {"type": "integer"}})}
    assert columns(of({"x": property_}, definitions=definitions)) == f"x {column}"


def test_what_is_required_and_cannot_be_null_is_not_null() -> None:
    optional = {"oneOf": [{"type": "null"}, {"type": "string"}]}
    schema = of(
        {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}, "c": optional, "d": False}, "a", "b", "c"
    )
    assert columns(schema) == "a long not null, b long, c string"
    assert columns({"properties": {"a": {"type": "integer"}}}) == "a long"  # no type: what has properties is an object
    assert columns({"oneOf": [{"type": "null"}, of({"a": {"type": "integer"}})]}) == "a long"


@pytest.mark.parametrize(
    ("property_", "wrong"),
    [
        ({}, "x: its type is not said"),
        (True, "x: its type is not said"),
        ({"type": "null"}, "x: it can only be null"),
        ({"type": ["string", "integer"]}, "x: it may be integer or string, and a column has one type"),
        ({"enum": ["a", 1]}, "x: it may be integer or string, and a column has one type"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]},
         "x: it may be string or long, and a column has one type"),
        ({"type": "array"}, "x[]: the type of its items is not said"),
        ({"type": "array", "items": [{"type": "string"}]},
         "x: it is a tuple: each of its items has a schema of its own"),
        ({"type": "array", "items": {"type": "array", "items": {}}}, "x[][]: its type is not said"),
        ({"type": "object"}, "x: it is an object whose properties are not said"),
        ({"type": "object", "additionalProperties": False}, "x: it is an object whose properties are not said"),
        ({"type": "object", "additionalProperties": {}}, "x{}: its type is not said"),
        (of({"a": {"type": "string"}, "A": {"type": "string"}}), "x: the properties 'a' and 'A' differ only by case"),
        (of({"": {"type": "string"}}), "x: '' cannot be the name of a column"),
        ({"$ref": "#"}, "x: it is inside itself ($ref '#'): no column has an end like that"),
        (of({"next": {"$ref": "#/properties/x"}}),
         "x.next.next: it is inside itself ($ref '#/properties/x'): no column has an end like that"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "x: it says type string and integer at once"),
        ({"allOf": [of({"a": {"type": "string"}}), of({"a": {"type": "integer"}})]},
         "x.a: it is declared in two ways at once (allOf, $ref)"),
        (of({"a": {"type": "string"}}, oneOf=[{"required": ["a"]}, of({"b": {"type": "string"}})]),
         "x: 'b' is a property only under a condition (anyOf, oneOf, if)"),
        ({"type": "string", "title": CONNECT_DECIMAL, "connect.parameters": {"scale": "2"}},
         "x: a Connect decimal in base64 has no column; set decimal.format=NUMERIC in the converter that writes it"),
        ({"type": "number", "title": CONNECT_DECIMAL}, "x: a Connect decimal without a scale"),
        ({"type": "number", "title": CONNECT_DECIMAL, "connect.parameters": {"scale": "40"}}, "x: decimal(38,40)"),
    ],
)  # fmt: skip
def test_what_no_column_can_hold_is_refused_by_its_path(property_: Any, wrong: str) -> None:
    with pytest.raises(NoColumn) as refused:
        columns(of({"x": property_}))
    assert str(refused.value).startswith(wrong)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is nested too deep"),
        ("[]", "it is not a JSON object"),
        ('{"type": "strin"}', r"it is not a valid schema: .*\(at type\)"),
        ('{"properties": {"a": {"pattern": "("}}}', "it is not a valid schema"),
        ('{"$schema": "http://example.com/own"}', "drafts 4, 6, 7, 2019-09 and 2020-12 are known"),
        ('{"$ref": "other.json"}', "it is not a valid schema: Resource 'other.json'"),
        ('{"$ref": "#/definitions/none"}', "it is not a valid schema: Pointer"),
    ],
)
def test_what_is_no_schema(text: str, wrong: str) -> None:
    with pytest.raises(BadSchema, match=wrong):
        Document(text)


def test_a_schema_of_arrays_or_text_has_no_columns() -> None:
    with pytest.raises(NoColumn, match=r"its values are array<long> and not objects"):
        columns({"type": "array", "items": {"type": "integer"}})


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_draft(draft: int) -> None:
    where = "$defs" if draft >= 2019 else "definitions"
    schema = {
        "$schema": DRAFTS[draft],
        **of({"a": {"$ref": f"#/{where}/n"}, "b": {"type": "integer"}}, "a"),
        where: {"n": {"type": "integer", "maximum": 5}},
    }
    assert columns(schema) == "a long not null, b long"
    assert row(schema, {"a": 5}) == {"a": 5, "b": None}
    assert refusal(schema, {"a": 6}) == ("schema-violation", "a")


def test_of_a_reference_and_what_stands_beside_it_the_draft_says_what_counts() -> None:
    schema = of({"a": {"$ref": "#/definitions/n", "type": "string"}}, definitions={"n": {"type": "integer"}})
    assert columns(schema) == "a long"
    with pytest.raises(NoColumn, match="a: it says type string and integer at once"):
        columns({"$schema": DRAFTS[2020], **schema})


def test_references_to_other_schemas_of_the_registry() -> None:
    place = of({"x": {"$ref": "#/definitions/n"}}, definitions={"n": {"type": "integer"}})
    schema = of({"at": {"$ref": "place.json"}, "n": {"$ref": "place.json#/definitions/n"}})
    assert columns(schema, {"place.json": place}) == "at struct<x: long>, n long"
    named = {"$id": "http://example.com/v/payment.json", **schema}
    assert columns(named, {"place.json": place}) == "at struct<x: long>, n long"
    assert columns(of({"p": {"$ref": "http://example.com/p"}}), {"http://example.com/p": place}) == "p struct<x: long>"


# ---- what is valid --------------------------------------------------------------------------------------------------

NUMBER = of({"n": {"type": "integer"}})


@pytest.mark.parametrize(
    ("schema", "value", "path", "keyword"),
    [
        (of({"a": {"type": "array", "items": {"type": "integer", "minimum": 3}}}), {"a": [5, 1]}, "a[1]", "minimum"),
        (of({"a": of({"b": {"type": "string", "pattern": "^x"}})}), {"a": {"b": "y"}}, "a.b", "pattern"),
        (of({"a": {"enum": ["x"]}}), {"a": "y"}, "a", "enum"),
        (of({"a": {"type": "integer"}}), {"a": None}, "a", "type"),
        (of({"a": {"type": ["integer", "null"]}}, "a"), {}, "", "required"),
        (of({"a": {"type": "integer"}}, additionalProperties=False), {"b": 1}, "", "additionalProperties"),
        (of({"a": {"type": "string", "format": "email"}}), {"a": "x"}, "a", "format"),
        (of({"a": {"type": "number", "multipleOf": 0.01}}), {"a": 1.005}, "a", "multipleOf"),
        (of({"a": {"type": "integer"}}, minProperties=1), {}, "", "minProperties"),
    ],
)
def test_a_value_that_the_schema_does_not_allow_is_refused_with_path_and_keyword(
    schema: Any, value: Any, path: str, keyword: str
) -> None:
    with pytest.raises(DecodeError, match=rf"\({keyword}\)") as refused:
        row(schema, value)
    assert (refused.value.reason, refused.value.path) == ("schema-violation", path)


@pytest.mark.parametrize(
    ("schema", "open_", "closed"),
    [
        (of({"a": {"type": ["integer", "null"]}}), Validate.NONE, Validate.NONE),
        (of({"a": {"type": "integer"}}, "a"), Validate.NONE, Validate.NONE),
        (of({"a": {"type": "integer"}}), Validate.WITH_NULL, Validate.WITH_NULL),
        (of({"a": {"type": "array", "items": {"type": "string"}}}, "a"), Validate.WITH_NULL, Validate.WITH_NULL),
        (of({"a": {"type": "object", "additionalProperties": {"type": "number"}}}, "a"), Validate.WITH_NULL,
         Validate.WITH_NULL),
        (of({"a": {"type": "array", "items": {"type": ["null", "string"]}}}, "a"), Validate.NONE, Validate.NONE),
        (of({"a": {"type": "integer"}}, additionalProperties=False), Validate.ALL, Validate.WITH_NULL),
        (of({"a": {"type": "integer", "minimum": 0}}), Validate.ALL, Validate.ALL),
        (of({"a": {"type": ["integer", "null"]}}, "a"), Validate.ALL, Validate.ALL),
        (of({"a": {"type": "string", "format": "date-time"}}, "a"), Validate.NONE, Validate.NONE),
        (of({"a": {"type": "string", "format": "email"}}, "a"), Validate.ALL, Validate.ALL),
        (of({"a": {"oneOf": [{"type": "null"}, of({"b": {"type": "number"}}, "b")]}}), Validate.NONE, Validate.NONE),
        (of({"a": {"$ref": "#/definitions/n"}}, "a", definitions={"n": {"type": "integer"}}), Validate.NONE,
         Validate.NONE),
        # Null is both, and so neither.
        (of({"a": {"oneOf": [{"type": "null"}, {"type": ["null", "string"]}]}}), Validate.WITH_NULL,
         Validate.WITH_NULL),
        (of({"a": {"anyOf": [{"type": "null"}, {"type": ["null", "string"]}]}}), Validate.NONE, Validate.NONE),
        (of({"a": {"type": "string"}}, "a", patternProperties={"^x": {}}), Validate.ALL, Validate.ALL),
        (of({"a": {"allOf": [{"$ref": "#/definitions/n"}]}}, "a", definitions={"n": {"type": "integer"}}),
         Validate.ALL, Validate.ALL),
    ],
)  # fmt: skip
def test_which_values_need_to_be_validated(schema: Any, open_: Validate, closed: Validate) -> None:
    document = Document(json.dumps(schema))
    assert which(document, columns_of(document), closed=False) is open_
    assert which(document, columns_of(document), closed=True) is closed


def test_a_wide_schema_is_gone_through_in_no_time() -> None:
    parts = [{"type": "integer"}, {"type": ["null", "string"]}, {"oneOf": [{"type": "null"}, {"type": "number"}]}]
    inner = {"type": "array", "items": of({f"i{n}": parts[n % 3] for n in range(20)}, additionalProperties=False)}
    wide = of({f"c{n}": inner if n % 10 == 0 else parts[n % 3] for n in range(300)}, additionalProperties=False)
    document = Document(json.dumps(wide))
    started = time.monotonic()
    assert which(document, columns_of(document), closed=True) is Validate.WITH_NULL
    assert mismatch(document, columns_of(document)) is None
    assert time.monotonic() - started < 20


def test_fields_without_a_column() -> None:
    value = {"n": 1, "more": [1, {"deep": None}]}
    assert row(NUMBER, value) == {"n": 1}
    assert refusal(NUMBER, value, unknown_fields="reject") == ("unknown-field", "")
    assert row(NUMBER, value, unknown_fields="keep") == {"n": 1, "_rest": '{"more":[1,{"deep":null}]}'}
    closed = {**NUMBER, "additionalProperties": False}
    assert refusal(closed, value) == ("schema-violation", "")
    assert refusal(closed, value, unknown_fields="keep") == ("schema-violation", "")


def test_the_columns_are_the_readers_and_what_is_valid_says_the_writer() -> None:
    old = {**of({"n": {"type": "integer", "maximum": 9}}), "additionalProperties": False}
    new = {**of({"n": {"type": "integer", "maximum": 99}, "note": {"type": "string"}}), "additionalProperties": False}
    assert row(old, {"n": 50, "note": "x"}, new) == {"n": 50}
    assert refusal(old, {"n": 50, "note": 1}, new) == ("schema-violation", "note")
    assert row(new, {"n": 9}, old) == {"n": 9, "note": None}
    assert refusal(new, {"n": 50}, old) == ("schema-violation", "n")


@pytest.mark.parametrize(
    ("writer", "wrong"),
    [
        (of({"n": {"type": "string"}}), "n: no value of the writer's schema is a long"),
        (of({"n": {"type": ["null", "boolean"]}}), "n: no value of the writer's schema is a long"),
        (of({"n": {"enum": ["a"]}}), "n: no value of the writer's schema is a long"),
        (of({"n": False}), None),
        (of({"m": {"type": "integer"}}), None),
        (of({"m": {"type": "integer"}}, additionalProperties=False), None),
        (of({"n": {"type": ["string", "integer"]}}), None),
        (of({"n": {"type": "number"}}), None),
    ],
)
def test_a_writers_schema_of_another_type_cannot_be_read(writer: Any, wrong: str | None) -> None:
    document = Document(json.dumps(writer))
    assert mismatch(document, columns_of(Document(json.dumps(NUMBER)))) == wrong
    if wrong:
        with pytest.raises(IncompatibleSchema, match=wrong):
            opened(NUMBER, writer)


def test_a_writers_schema_without_a_required_column_cannot_be_read() -> None:
    closed = of({"m": {"type": "integer"}}, additionalProperties=False)
    with pytest.raises(IncompatibleSchema, match="n: it is not null, and the writer's schema has no value for it"):
        opened(of({"n": {"type": "integer"}}, "n"), closed)
    with pytest.raises(IncompatibleSchema, match="it is not a valid schema"):
        opened(NUMBER, {"type": "x"})


def test_a_writers_schema_may_be_inside_itself_where_it_has_no_column() -> None:
    tree = {"properties": {"next": {"$ref": "#/definitions/tree"}, "x": {"type": "integer"}}, "type": "object"}
    writer = of({"n": {"type": "integer"}, "tree": {"$ref": "#/definitions/tree"}}, definitions={"tree": tree})
    assert row(NUMBER, {"n": 1, "tree": {"next": {"next": {"x": 1}}}}, writer) == {"n": 1}
    assert refusal(NUMBER, {"n": 1, "tree": {"next": {"x": "1"}}}, writer) == ("schema-violation", "tree.next.x")
    # One that once ended the process: nothing that refers to something is given to the library's set operations.
    endless = {"if": {"unevaluatedProperties": False, "oneOf": [{"$ref": "#/definitions/a"}]}, "multipleOf": 1}
    writer = {"$schema": DRAFTS[2019], **of({"n": {"$ref": "#/definitions/a"}}), "definitions": {"a": endless}}
    assert row(NUMBER, {"n": 1}, writer) == {"n": 1}
    for loop in ({"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"anyOf": [{"$ref": "#"}, {"type": "object"}]}):
        assert row(NUMBER, {"n": 1}, loop) == {"n": 1}
    assert refusal(NUMBER, {"n": 1}, {"not": {"$ref": "#"}})[0] == "schema-violation"


def test_values_that_a_parser_may_stumble_over_are_refused_or_read_but_never_raise() -> None:
    schema = of({"n": {"type": "integer", "minimum": 0}})
    deep = b'{"n":1,"x":' + b"[" * 998 + b"]" * 998 + b"}"
    assert row(schema, deep) == {"n": 1}
    assert refusal(schema, deep.replace(b"[]", b"[[[]]]"))[0] in ("too-deep", "not-json")
    long = b'{"n":1,"x":' + b"9" * 1_000 + b"}"
    assert row(schema, long) == {"n": 1}
    assert refusal(schema, long.replace(b"99}", b"999}"))[0] == "long-number"
    assert row(schema, b'{"n":1,"x":1e999}') == {"n": 1}
    fast = opened(schema)
    values = [deep, long, b'{"n":1,"x":1e999}', b'{"n":-1}', b'{"n":2}', b'\xef\xbb\xbf{"n":3}']
    rows, doubtful = fast.read(pa.array(values, pa.binary()), 0)
    assert not {0, 1, 2, 4} & set(doubtful.to_pylist()) or len(rows) + len(doubtful) == len(values)
    assert 3 in doubtful.to_pylist()


# ---- both ways are the same ------------------------------------------------------------------------------------------

Example = tuple[dict[str, Any], dict[str, Any], list[bytes]]  # the reader's and the writer's schema, and values


@st.composite
def leaves(draw: st.DrawFn) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    """A schema without parts, and values for it: mostly good ones."""
    match draw(st.integers(0, 8)):
        case 0:
            return {"type": "integer"}, st.integers(-(2**63) - 1, 2**63)
        case 1:
            return {"type": "integer", "minimum": 0, "multipleOf": 2}, st.integers(-2, 9)
        case 2:
            return {"type": "number"}, st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9)
        case 3:
            return {"type": "boolean"}, st.booleans()
        case 4:
            return {"type": "string"}, st.text(max_size=5)
        case 5:
            return {"type": "string", "maxLength": 3}, st.text(max_size=4) | st.just("null")
        case 6:
            return {"enum": ["a", "b", None]}, st.sampled_from(["a", "b", None, "c"])
        case 7:
            days = st.dates(date(1, 1, 2), date(9999, 12, 30)).map(str) | st.just("2026-02-30")
            return {"type": "string", "format": "date"}, days
        case _:
            kind = {"type": "number", "title": CONNECT_DECIMAL, "connect.parameters": {"scale": "1"}}
            return kind, st.sampled_from([1, 1.5, 0.25, "1.5"])


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    kind = draw(st.integers(0, 5)) if depth else 0
    if kind == 3:
        inner, values = draw(schemas(depth - 1))
        return {"type": "array", "items": inner, **draw(st.sampled_from([{}, {"maxItems": 2}]))}, st.lists(
            values | st.none() if draw(st.booleans()) else values, max_size=3
        )
    if kind == 4:
        inner, values = draw(schemas(depth - 1))
        return {"type": "object", "additionalProperties": inner}, st.dictionaries(
            st.sampled_from(["k", "null", "é"]), values | st.none() if draw(st.booleans()) else values
        )
    if kind == 5:
        return draw(objects(depth - 1))
    schema, values = draw(leaves())
    if draw(st.booleans()):
        return schema, values
    if draw(st.booleans()) and isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}, values | st.none()
    return {
        draw(st.sampled_from(["oneOf", "anyOf"])): [{"type": "null"}, {"allOf": [schema, {"not": {"type": "null"}}]}]
    }, values | st.none()


@st.composite
def objects(draw: st.DrawFn, depth: int = 2) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    names = draw(st.lists(st.sampled_from(["a", "b", "c d", "null", "é"]), min_size=1, max_size=4, unique=True))
    parts = {name: draw(schemas(depth)) for name in names}
    required = [name for name in names if draw(st.booleans())]
    schema: dict[str, Any] = {"type": "object", "properties": {name: part[0] for name, part in parts.items()}}
    if required:
        schema["required"] = required
    schema |= draw(
        st.sampled_from([{}, {}, {"additionalProperties": False}, {"additionalProperties": {"type": "string"}}])
    )
    fields = {name: values if draw(st.integers(0, 4)) else values | st.none() for name, (_, values) in parts.items()}
    there = {name: values for name, values in fields.items() if name in required}
    others = {name: values for name, values in fields.items() if name not in there}
    if draw(st.integers(0, 3)) == 0:
        others["more"] = st.sampled_from(["x", 1, None])
    return schema, st.fixed_dictionaries(there, optional=others)


@st.composite
def referring(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, some of its properties by reference."""
    definitions: dict[str, Any] = {}
    properties = dict(schema["properties"])
    for number, (name, inner) in enumerate(schema["properties"].items()):
        if draw(st.integers(0, 3)) == 0:
            definitions[f"d{number}"] = inner
            properties[name] = {"$ref": f"#/definitions/d{number}"}
    return {**schema, "properties": properties, "definitions": definitions} if definitions else schema


@st.composite
def examples(draw: st.DrawFn) -> Example:
    reader, values = draw(objects())
    reader = draw(referring(reader))
    reader = {"$schema": DRAFTS[draw(st.sampled_from([7, 7, 2019, 2020]))], **reader}
    writer = reader
    if draw(st.integers(0, 2)) == 0:
        writer, values = draw(objects())
    documents = draw(st.lists(values, min_size=1, max_size=12))
    dump: Callable[[Any], str] = lambda value: json.dumps(value, ensure_ascii=draw(st.booleans()))  # noqa: E731
    return reader, writer, [dump(document).encode() for document in documents]


def changed(chance: random.Random, values: list[bytes]) -> bytes:
    value = chance.choice(values)
    start, end = sorted(chance.randrange(len(value) + 1) for _ in range(2))
    parts = (b"", b"null", b"\xff", b" ", b"1", b'"', value[start:end] * 2)
    return value[:start] + chance.choice(parts) + value[chance.choice((start, end)) :]


def assert_agree(example: Example, unknown_fields: UnknownFields = "ignore", *, skip: int = 5) -> tuple[int, int]:
    """Returns how many values were read, and how many of them by column."""
    reader, writer, values = example
    opened_ = opened(reader, writer, unknown_fields)
    schema = {"$schema": DRAFTS[7], **writer}
    oracle = jsonschema.validators.validator_for(schema)(schema)
    framed = [b"\0\0\0\0\1"[:skip] + value for value in values]
    strictly: list[Mapping[str, object] | None] = []
    for value in framed:
        try:
            strictly.append(opened_.row(value, skip))
        except DecodeError:
            strictly.append(None)
    for value, mine in zip(values, strictly, strict=True):
        if mine is not None:
            assert oracle.is_valid(json.loads(value.decode("utf-8-sig"))), value
    if not opened_.by_column:
        return sum(mine is not None for mine in strictly), 0
    rows, doubtful = opened_.read(pa.array([b"", *framed], pa.binary())[1:], skip)
    rows.validate(full=True)
    unsure = set(doubtful.to_pylist())
    assert len(rows) + len(unsure) == len(values)
    beyond_doubt = [mine for index, mine in enumerate(strictly) if index not in unsure]
    assert None not in beyond_doubt, [
        value for i, value in enumerate(values) if i not in unsure and strictly[i] is None
    ]
    names = [column.name for column in reader_of(reader).columns]
    expected = pa.RecordBatch.from_pylist(beyond_doubt, rows.schema) if beyond_doubt else rows
    assert rows.select(names).equals(expected.select(names)), (rows.to_pylist(), beyond_doubt)
    return sum(mine is not None for mine in strictly), len(rows)


QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@pytest.mark.parametrize("way", READERS)
@pytest.mark.parametrize("unknown_fields", ["ignore", "reject", "keep"])
@QUICK
@given(case=examples(), seed=st.integers(0, 2**32))
@example(case=(NUMBER, NUMBER, [b'{"n":1}', b'{"n":null}', b'{"x":null}', b"{}", b'{"n":1,"x":null}']), seed=0)
def test_both_readers_agree_and_no_row_is_invalid(
    way: str, unknown_fields: UnknownFields, case: Example, seed: int
) -> None:
    reader, writer, values = case
    chance = random.Random(seed)
    with reading_by(way):
        try:
            assert_agree(case, unknown_fields)
        except IncompatibleSchema:
            return
        assert_agree((reader, writer, [changed(chance, values) for _ in range(20)]), unknown_fields)


def test_valid_values_are_taken() -> None:
    """Else the test above might hold for a reader that refuses everything."""
    schema = of({"a": {"type": "integer", "minimum": 0}, "b": {"type": ["string", "null"], "maxLength": 3}}, "a")
    values = [json.dumps({"a": n, **({"b": "x" if n % 3 else None} if n % 2 else {})}).encode() for n in range(400)]
    for limit in (schema, {**schema, "additionalProperties": False}, of(schema["properties"], "a")):
        assert assert_agree((limit, limit, values)) == (400, 400)
    open_ = of({"a": {"type": "integer"}, "b": {"type": ["string", "null"]}}, "a")
    assert assert_agree((open_, open_, values)) == (400, 400)
    bad = [b'{"a":-1}' if n in (0, 70, 399) else value for n, value in enumerate(values)]
    assert assert_agree((schema, schema, bad)) == (397, 397)


@pytest.mark.parametrize("canary", ["no validation", "nulls unseen", "closed forgotten"])
def test_canaries(canary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that asks too little is caught by the comparison."""
    nullable = of({"n": {"type": "integer"}})
    schema = {
        "no validation": of({"n": {"type": "integer", "minimum": 3}}),
        "nulls unseen": nullable,
        "closed forgotten": {**nullable, "additionalProperties": False},
    }[canary]
    values = [b'{"n":%d}' % n for n in range(100)] + [b'{"n":null}', b'{"m":1}']
    assert_agree((schema, schema, values))
    schema_reader.cache_clear()
    monkeypatch.setattr(readers, "which", lambda *_, **__: Validate.NONE)
    try:
        with pytest.raises(AssertionError):
            assert_agree((schema, schema, values))
    finally:
        schema_reader.cache_clear()


# ---- the whole decoder, and its settings -----------------------------------------------------------------------------


def pipeline(schema: Any = None, sink: dict[str, Any] | None = None, **decode: Any) -> PipelineConfig:
    text = {"schema": json.dumps(schema)} if schema is not None else {}
    return PipelineConfig.model_validate(
        {
            "name": "p",
            "guarantee": "exactly-once",
            "source": {"brokers": "localhost:9092", "topics": ["t"]},
            "decode": {"format": "json-schema", **text, **decode},
            "sink": {"kind": "postgres", "url": "postgresql://localhost/d", "table": "t", **(sink or {})},
        }
    )


def decoded(config: PipelineConfig, *records: tuple[bytes | None, bytes | None]) -> Decoded:
    columns_ = [pa.array([record[n] for record in records], pa.binary()) for n in range(2)]
    batch = pa.RecordBatch.from_arrays(columns_, ["key", "value"])
    return JSON_SCHEMA.decoder(config, refuse_nul=True).decode(batch)


def test_a_schema_in_a_file_without_a_registry(tmp_path: Path) -> None:
    file = tmp_path / "payment.json"
    file.write_text(json.dumps(of({"n": {"type": "integer", "minimum": 1}}, "n")))
    out = decoded(pipeline(schema_file=str(file)), (None, b'{"n":1}'), (None, b'{"n":0}'), (None, b'{"n":2}'))
    assert out.rows.to_pylist() == [{"n": 1}, {"n": 2}]
    assert [(r.index, r.reason) for r in out.refused] == [(1, "schema-violation")]
    assert out.refused[0].detail == "n: 0 is less than the minimum of 1 (minimum)"


def test_what_has_no_column_is_kept_beside_the_rows() -> None:
    out = decoded(pipeline(NUMBER, unknown_fields="keep"), (None, b'{"n":1}'), (None, b'{"x":"y","n":2}'))
    assert out.rows.to_pylist() == [{"n": 1, "_rest": None}, {"n": 2, "_rest": '{"x":"y"}'}]


def test_keys_have_schemas_too() -> None:
    key = {"schema": json.dumps({"type": "string", "maxLength": 3}), "column": "account"}
    config = pipeline(NUMBER, {"mode": "upsert", "key": ["account"]}, key=key)
    assert str(config.decode.columns) == "account string not null, n long"
    out = decoded(
        config,
        (b'"a"', b'{"n":1}'),
        (b'"b"', None),
        (b'"long"', None),
        (b"null", None),
        (None, b'{"n":1}'),
        (b"", None),
    )
    assert out.rows.to_pylist() == [{"account": "a", "n": 1}]
    assert out.deletes.to_pylist() == [{"account": "b"}]
    reasons = [(r.index, r.reason) for r in out.refused]
    assert reasons == [(2, "tombstone-key"), (3, "tombstone-key"), (4, "null-key"), (5, "tombstone-key")]
    composite = {"schema": json.dumps(of({"id": {"type": "integer"}, "region": {"type": "string"}}, "id", "region"))}
    config = pipeline(NUMBER, {"mode": "upsert", "key": ["region", "id"]}, key=composite)
    out = decoded(config, (b'{"id":1,"region":"eu"}', b'{"n":1}'), (b'{"id":2,"region":"eu","x":1}', None))
    assert out.rows.to_pylist() == [{"id": 1, "region": "eu", "n": 1}]
    assert out.deletes.to_pylist() == [{"region": "eu", "id": 2}]


@pytest.mark.parametrize(
    ("decode", "wrong"),
    [
        ({"schema": '{"type": "x"}'}, r"decode.schema: it is not a valid schema: .*; a schema of json-schema"),
        ({"schema": '{"properties": {"a": {}}}'}, r"decode.schema: a: its type is not said"),
        ({"schema": "registry"}, r"decode.schema: needs a registry"),
        ({"schema": json.dumps(NUMBER), "unknown_fields": "drop"}, r"decode.unknown_fields: .*ignore"),
        ({"schema": json.dumps(NUMBER), "key": {"schema": '{"type": ["null", "string"]}'}}, "may be null names no row"),
    ],
)
def test_settings_that_make_no_sense(decode: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    from avow.settings import load

    lines = ['name = "p"', 'guarantee = "exactly-once"', 'source = { brokers = "a:1", topics = ["t"] }']
    lines += ['sink = { kind = "postgres", url = "postgresql://a@b/c", table = "t" }', "[decode]"]
    own = {"format": "json-schema", **{name: said for name, said in decode.items() if name != "key"}}
    lines += [f"{name} = {json.dumps(said)}" for name, said in own.items()]
    if "key" in decode:
        lines += ["[decode.key]", *(f"{name} = {json.dumps(said)}" for name, said in decode["key"].items())]
    file = tmp_path / "p.toml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=wrong):
        load(file, {})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("avow.formats.json_schema.")]:
        if module.rpartition(".")[2] in ("document", "columns"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)
    with pytest.raises(Exception, match="jsonschema_rs is not installed") as missing:
        pipeline(NUMBER)
    assert "avow[json-schema]" in str(getattr(missing.value, "advice", ""))


def test_sample_values_for_a_proof_are_valid_or_it_is_said_why_not() -> None:
    schema = of({"id": {"type": "integer"}, "kind": {"enum": ["IN", "OUT"]}, "note": {"type": "string"}}, "id", "kind")
    config = pipeline(schema, {"mode": "upsert", "key": ["id"]})
    values = [JSON_SCHEMA.sample_value(config, n, n % 7) for n in range(50)]
    out = decoded(config, *((None, value) for value in values))
    assert [r["id"] for r in out.rows.to_pylist()] == [n % 7 for n in range(50)]
    assert out.refused == ()
    with pytest.raises(ConfigError, match=r"cannot make records of it: a: .*\(pattern\)"):
        JSON_SCHEMA.sample_value(pipeline(of({"a": {"type": "string", "pattern": "^#"}}, "a")), 1, 1)


def test_a_decimal_is_exact() -> None:
    kind = {"type": "number", "title": CONNECT_DECIMAL, "connect.parameters": {"scale": "2"}}
    assert row(of({"x": kind}), b'{"x":12345678901234567890123.45}') == {"x": Decimal("12345678901234567890123.45")}
    assert isinstance(JSON_SCHEMA.Config, type)
    assert issubclass(JSON_SCHEMA.Config, JsonSchemaConfig)
    assert columns_of(Document(json.dumps(NUMBER))).fields[0].type is Scalar.LONG
