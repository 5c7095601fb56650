"""What follows from a schema alone, once for all its records: which of them need to be validated, and which columns no
record can fill.

Every value is read into columns first, by rules of their own: types, ranges, what may be null, dates. Where these rules
let nothing through that the schema forbids, no value need be validated at all. Objects, arrays and maps are gone
through together with their columns; of a single value, the library says whether the schema covers the rule. Where only
a null in a record's text is in doubt, the records with one are asked about; else all.

What cannot be proved counts as what costs no record: it is validated, or is no mismatch.

Owns: these two answers. Must not know: records. Neighbours: ``document`` and ``readers``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jsonschema_rs
from jsonschema_rs.canonical import Containment, Satisfiability

from avow import schema as ddl
from avow.formats.json_schema.document import FAILURES, Document, NoSuchReference, Place, without_panics
from avow.schema import Scalar

_NULL: Mapping[str, Any] = {"type": "null"}
_INTEGER_BITS = {Scalar.BYTE: 8, Scalar.SHORT: 16, Scalar.INT: 32, Scalar.LONG: 64}
_RULES: Mapping[Scalar, Mapping[str, Any]] = {
    Scalar.BOOLEAN: {"type": "boolean"},
    Scalar.FLOAT: {"type": "number"},
    Scalar.DOUBLE: {"type": "number"},
    Scalar.STRING: {"type": "string"},
    Scalar.BINARY: {"type": "string", "contentEncoding": "base64"},
    Scalar.DATE: {"type": "string", "format": "date"},
    Scalar.TIMESTAMP: {"type": "string", "format": "date-time"},
    Scalar.TIMESTAMP_NTZ: {"type": "string"},
}
# Every keyword of any draft by which a value may be invalid. Others only describe.
_KEYWORDS = """
    type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern items
    additionalItems prefixItems maxItems minItems uniqueItems contains maxContains minContains maxProperties
    minProperties required properties patternProperties additionalProperties dependencies dependentRequired
    dependentSchemas propertyNames if then else allOf anyOf oneOf not format contentEncoding contentMediaType
    contentSchema unevaluatedItems unevaluatedProperties $ref $dynamicRef $recursiveRef"""
_ASSERTS = frozenset(_KEYWORDS.split())
_REFERENCES = ('"$ref"', '"$dynamicRef"', '"$recursiveRef"')
_REFERENCES_MAX = 100  # one behind the other


class Validate(Enum):
    """Which of the values that were read into columns are validated too."""

    NONE = "none"
    WITH_NULL = "with null"  # those with a null in their text
    ALL = "all"


def which(document: Document, columns: ddl.Schema, *, closed: bool) -> Validate:
    """What is to be asked about values that were read into these columns. ``closed``: none has other fields."""
    for nulls, answer in ((True, Validate.NONE), (False, Validate.WITH_NULL)):
        try:
            if _Coverage(document, nulls=nulls, closed=closed).of(document.place, ddl.Struct(columns.fields), False):
                return answer
        except NoSuchReference:
            break
    return Validate.ALL


@dataclass(frozen=True, slots=True)
class _Coverage:
    """Whether a schema allows whatever is read into a column."""

    document: Document
    nulls: bool  # where it is not declared away, a null is read too
    closed: bool  # objects have no fields but those of the column

    def of(self, place: Place, type: ddl.Type, nullable: bool, references: int = 0) -> bool:
        schema = place.schema
        if not isinstance(schema, dict):
            return schema is True
        words = _ASSERTS & schema.keys()
        if self.document.draft == 4 and "id" in schema and schema is not self.document.root:
            return False  # references in it would be relative to that
        if "$ref" in words and (len(words) == 1 or self.document.draft <= 7):
            name = schema["$ref"]
            return references < _REFERENCES_MAX and self.of(place.referred(name), type, nullable, references + 1)
        if words in ({"oneOf"}, {"anyOf"}):
            return self._null_or_other(place, next(iter(words)), type, nullable, references)
        match type:
            case ddl.Struct(fields):
                return self._object(place, words, fields, nullable)
            case ddl.Array(element):
                return self._has_parts(place, words, "array", "items", element, nullable)
            case ddl.Map(value):
                return self._has_parts(place, words, "object", "additionalProperties", value, nullable)
        rule = _rule(type)
        return _covers(self.document, schema, {"anyOf": [_NULL, rule]} if nullable else rule)

    def _null_or_other(self, place: Place, word: str, type: ddl.Type, nullable: bool, references: int) -> bool:
        """Of oneOf or anyOf, whose only keyword it is."""
        choices = place.schema[word]
        others = [choice for choice in choices if choice != _NULL]
        if len(others) != 1 or len(choices) != 2:
            return False
        other = place.at(others[0])
        # A null must not be both.
        is_null_valid = word == "anyOf" or not nullable or _refuses_null(other)
        return is_null_valid and self.of(other, type, False, references)

    def _object(self, place: Place, words: frozenset[str], fields: tuple[ddl.Field, ...], nullable: bool) -> bool:
        schema = place.schema
        if not words <= {"type", "properties", "required", "additionalProperties"}:
            return False
        names = {field.name for field in fields}
        properties: Mapping[str, Any] = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        return (
            _takes(schema, "object", nullable)
            and {*schema.get("required", ())} <= {field.name for field in fields if field.required}
            and (names <= properties.keys() or others is True)
            and (self.closed or (properties.keys() <= names and others is True))
            and all(
                self.of(place.at(properties[field.name]), field.type, self.nulls and not field.required)
                for field in fields
                if field.name in properties
            )
        )

    def _has_parts(
        self, place: Place, words: frozenset[str], name: str, word: str, part: ddl.Type, nullable: bool
    ) -> bool:
        schema = place.schema
        inner = schema.get(word, True)
        return (
            words <= {"type", word}
            and _takes(schema, name, nullable)
            and not isinstance(inner, list)
            and self.of(place.at(inner), part, self.nulls)
        )


def _refuses_null(place: Place) -> bool:
    for _ in range(_REFERENCES_MAX):
        if not isinstance(place.schema, dict):
            return False
        if "$ref" not in place.schema:
            said = place.schema.get("type", "null")
            return "null" not in ([said] if isinstance(said, str) else said)
        place = place.referred(place.schema["$ref"])
    return False


def _takes(schema: Mapping[str, Any], name: str, nullable: bool) -> bool:
    said = schema.get("type")
    types = {said} if isinstance(said, str) else {*said} if said is not None else {name, "null"}
    return name in types and (not nullable or "null" in types)


def _rule(type: ddl.Type) -> Mapping[str, Any]:
    """Of a single value, what is read into such a column."""
    if isinstance(type, ddl.Decimal):
        return {"type": ["number", "string"]}
    assert isinstance(type, Scalar)
    if type in _INTEGER_BITS:
        limit = 1 << (_INTEGER_BITS[type] - 1)
        return {"type": "integer", "minimum": -limit, "maximum": limit - 1}
    return _RULES[type]


def mismatch(document: Document, columns: ddl.Schema) -> str | None:
    """The first column that no value of a writer's schema can be read as, and why; None if there is none."""
    try:
        root = _followed(document, document.place)
        if root is None or not isinstance(root.schema, dict):
            return None
        properties = root.schema.get("properties", {})
        is_closed = root.schema.get("additionalProperties") is False and "patternProperties" not in root.schema
        for column in columns:
            there = root.at(properties.get(column.name, not is_closed))
            if not _may_write(document, there, {"not": _NULL}):
                if column.required:
                    return f"{column.name}: it is not null, and the writer's schema has no value for it"
            elif not _may_write(document, there, _readable(column.type)):
                article = "an" if str(column.type)[0] in "aeiou" else "a"
                return f"{column.name}: no value of the writer's schema is {article} {column.type}"
    except NoSuchReference:
        pass
    return None


def _followed(document: Document, place: Place) -> Place | None:
    """Where a schema that is only a reference leads to; None if it has no end."""
    for _ in range(_REFERENCES_MAX):
        schema = place.schema
        if not isinstance(schema, dict) or "$ref" not in schema:
            return place
        if len(schema) > 1 and document.draft > 7:
            return place
        place = place.referred(schema["$ref"])
    return None


def _may_write(document: Document, place: Place, rule: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether the schema may have a value of this form."""
    followed = _followed(document, place)
    if followed is None or depth > _REFERENCES_MAX:
        return True
    place, schema = followed, followed.schema
    if not isinstance(schema, dict):
        return schema is not False
    for word in {"anyOf", "oneOf"} & schema.keys():
        if not any(_may_write(document, place.at(choice), rule, depth + 1) for choice in schema[word]):
            return False
    if _refers(schema):  # these say enough
        schema = {word: schema[word] for word in ("type", "enum", "const") if word in schema}
    try:
        with without_panics():
            both = _canonical(document, schema).intersect(_canonical(document, rule))
            return both.satisfiability() != Satisfiability.NO
    except FAILURES:
        return True


def _refers(schema: Mapping[str, Any]) -> bool:
    """Whether there is a reference in it: taken out of its document, it would lead elsewhere, or have no end."""
    text = json.dumps(schema)
    return any(word in text for word in _REFERENCES)


def _readable(type: ddl.Type, *, nullable: bool = False) -> Mapping[str, Any]:
    """All that can be read as this type, as a schema."""
    schema: Mapping[str, Any]
    match type:
        case ddl.Struct(fields):
            properties = {field.name: _readable(field.type, nullable=not field.required) for field in fields}
            required = [field.name for field in fields if field.required]
            schema = {"type": "object", "properties": properties, **({"required": required} if required else {})}
        case ddl.Array(element):
            schema = {"type": "array", "items": _readable(element, nullable=True)}
        case ddl.Map(value):
            schema = {"type": "object", "additionalProperties": _readable(value, nullable=True)}
        case _:
            schema = _rule(type)
    return {"anyOf": [_NULL, schema]} if nullable else schema


def _covers(document: Document, schema: Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    if _refers(schema):
        return False
    try:
        with without_panics():
            return _canonical(document, schema).covers(_canonical(document, rule)) == Containment.YES
    except FAILURES:
        return False


def _canonical(document: Document, schema: Mapping[str, Any]) -> jsonschema_rs.CanonicalSchema:
    return jsonschema_rs.canonicalize({"$schema": document.schema_uri, **schema}, offline=True)
