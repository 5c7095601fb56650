"""The columns that a JSON Schema gives.

A property is a column, and ``not null`` where it is required and cannot be null. What no single column can hold is
refused by its path: several types at once, tuples, schemas without a type, schemas inside themselves.

Columns only say what is read. Whether a record is valid, ``validation`` says: keywords that narrow values down are
passed over here.

Owns: which column a schema is. Must not know: records. Its neighbour is ``document``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from avow import schema as ddl
from avow.formats.json_schema.document import Document, NoSuchReference, Place
from avow.schema import MAX_DEPTH, MAX_PRECISION, Scalar
from avow.settings.values import has_control

_INTEGERS = {"int8": Scalar.BYTE, "int16": Scalar.SHORT, "int32": Scalar.INT, "int64": Scalar.LONG}
_FLOATS = {"float32": Scalar.FLOAT, "float": Scalar.FLOAT, "float64": Scalar.DOUBLE, "double": Scalar.DOUBLE}
_TEXTS = {"date": Scalar.DATE, "date-time": Scalar.TIMESTAMP}
_CONNECT_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_WORDS = ("type", "enum", "const", "format", "contentEncoding", "title", "connect.type", "connect.parameters")
_ANNOTATIONS = frozenset({"title", "connect.type", "connect.parameters"})  # of two, that of the outer schema counts
_NUMERIC = frozenset({"integer", "number"})
_REFERENCES_MAX = 100  # one behind the other


class NoColumn(ValueError):
    """What no column can have, with its path."""

    def __init__(self, wrong: str, path: str = "") -> None:
        super().__init__(f"{path}: {wrong}" if path else wrong)
        self.wrong, self.path = wrong, path

    def inside(self, name: str) -> NoColumn:
        inner = self.path if not self.path or self.path[0] in "[{" else f".{self.path}"
        return NoColumn(self.wrong, f"{name}{inner}")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A schema with all that it refers to: ``$ref`` and ``allOf`` are gone, and what may be null is known."""

    words: Mapping[str, Any]
    properties: Mapping[str, Place] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    items: Place | None = None
    additional: Place | None = None  # of an object: what other values are; None where that is not said
    is_tuple: bool = False
    choices: tuple[_Seen, ...] = ()  # of anyOf or oneOf
    inside: frozenset[str] = frozenset()  # the references that led here

    @property
    def says_its_type(self) -> bool:
        return bool({"type", "enum", "const"} & self.words.keys() or self.properties)

    @property
    def is_null(self) -> bool:
        return self.words.get("type") in ("null", ["null"]) or self._values == [None]

    @property
    def _values(self) -> list[Any] | None:
        """The only values that there are, if it says so."""
        if "const" in self.words:
            return [self.words["const"]]
        values = self.words.get("enum")
        return values if isinstance(values, list) else None

    def types(self) -> set[str]:
        """Of all that the schema says about types, what is left; null among it."""
        said = self.words.get("type")
        types = {said} if isinstance(said, str) else set(said) if said is not None else None
        if self._values is not None:
            those = {_type_of(value) for value in self._values}
            if those & _NUMERIC and types is not None:
                those |= types & _NUMERIC  # whichever way these numbers are written
            types = those if types is None else types & those
        if types is not None:
            return types
        if self.properties or self.additional is not None:
            return {"object"}
        return {"array"} if self.items is not None or self.is_tuple else set()


def columns_of(document: Document) -> ddl.Schema:
    """The columns of a schema whose values are objects, or ``NoColumn``."""
    kind, _ = column_of(document)
    if not isinstance(kind, ddl.Struct):
        raise NoColumn(f"its values are {kind} and not objects with properties, which are the columns")
    return ddl.Schema(kind.fields)


def column_of(document: Document) -> tuple[ddl.Type, bool]:
    """The column of a schema's values as a whole, and whether they may be null."""
    try:
        place = document.place
        return _Reader(document.draft).column(place, frozenset({place.name_of("#")}), 0)
    except NoSuchReference as error:
        raise NoColumn(str(error)) from None
    except RecursionError:
        raise NoColumn("its references are nested too deep") from None


class _Reader:
    def __init__(self, draft: int) -> None:
        self._ref_stands_alone = draft <= 7
        self._has_conditions = draft >= 7

    def column(self, place: Place, inside: frozenset[str], depth: int) -> tuple[ddl.Type, bool]:
        """A schema's column, and whether it may be null. ``inside``: the references that led here."""
        if depth > MAX_DEPTH + 1:
            raise NoColumn(f"nested more than {MAX_DEPTH} deep")
        return self._column(self._seen(place, inside), depth)

    def _column(self, seen: _Seen, depth: int) -> tuple[ddl.Type, bool]:
        if seen.choices and not seen.says_its_type:
            return self._chosen(seen, depth)
        for choice in seen.choices:
            if more := choice.properties.keys() - seen.properties.keys():
                raise NoColumn(f"{sorted(more)[0]!r} is a property only under a condition (anyOf, oneOf, if)")
        types = seen.types()
        nullable = "null" in types
        types -= {"null"}
        if types == {"integer", "number"}:
            types = {"number"}
        if not types:
            raise NoColumn("it can only be null" if nullable else "its type is not said")
        if len(types) > 1:
            raise NoColumn(f"it may be {' or '.join(sorted(types))}, and a column has one type")
        return self._of_type(types.pop(), seen, depth), nullable

    def _chosen(self, seen: _Seen, depth: int) -> tuple[ddl.Type, bool]:
        """Of anyOf or oneOf: a column, if it is one for all of them."""
        others = [choice for choice in seen.choices if not choice.is_null]
        if not others:
            raise NoColumn("it can only be null")
        outer = replace(seen, choices=())
        found = [self._column(_merged(outer, choice), depth) for choice in others]
        kinds = {str(kind): kind for kind, _ in found}
        if len(kinds) > 1:
            raise NoColumn(f"it may be {' or '.join(_short(kind) for kind in kinds)}, and a column has one type")
        return found[0][0], len(others) < len(seen.choices) or any(nullable for _, nullable in found)

    def _of_type(self, name: str, seen: _Seen, depth: int) -> ddl.Type:
        words = seen.words
        if words.get("title") == _CONNECT_DECIMAL and name in ("string", "number", "integer"):
            return _connect_decimal(name, words)
        said = str(words.get("connect.type") or words.get("format"))
        match name:
            case "boolean":
                return Scalar.BOOLEAN
            case "integer":
                return _INTEGERS.get(said, Scalar.LONG)
            case "number":
                return _FLOATS.get(said, Scalar.DOUBLE)
            case "string":
                if words.get("connect.type") == "bytes" or words.get("contentEncoding") == "base64":
                    return Scalar.BINARY
                return _TEXTS.get(str(words.get("format")), Scalar.STRING)
            case "array":
                return self._array(seen, depth)
            case _:
                return self._object(seen, depth)

    def _array(self, seen: _Seen, depth: int) -> ddl.Type:
        if seen.is_tuple:
            raise NoColumn("it is a tuple: each of its items has a schema of its own")
        if seen.items is None:
            raise NoColumn("the type of its items is not said", "[]")
        try:
            return ddl.Array(self.column(seen.items, seen.inside, depth + 1)[0])
        except NoColumn as error:
            raise error.inside("[]") from None

    def _object(self, seen: _Seen, depth: int) -> ddl.Type:
        if seen.properties:
            return ddl.Struct(tuple(self._fields(seen, depth)))
        if seen.additional is None or isinstance(seen.additional.schema, bool):
            raise NoColumn("it is an object whose properties are not said")
        try:
            return ddl.Map(self.column(seen.additional, seen.inside, depth + 1)[0])
        except NoColumn as error:
            raise error.inside("{}") from None

    def _fields(self, seen: _Seen, depth: int) -> Iterator[ddl.Field]:
        names: dict[str, str] = {}
        for name, place in seen.properties.items():
            if place.schema is False:  # it must not be there
                continue
            if not name or has_control(name):
                raise NoColumn(f"{name!r} cannot be the name of a column")
            if other := names.get(name.lower()):
                raise NoColumn(f"the properties {other!r} and {name!r} differ only by case")
            names[name.lower()] = name
            try:
                kind, nullable = self.column(place, seen.inside, depth + 1)
            except NoColumn as error:
                raise error.inside(name) from None
            yield ddl.Field(name, kind, required=name in seen.required and not nullable)
        if not names:
            raise NoColumn("it is an object whose properties must all be absent")

    def _seen(self, place: Place, inside: frozenset[str]) -> _Seen:
        schema = place.schema
        if not isinstance(schema, dict):
            raise NoColumn("its type is not said" if schema is True else "no value is valid there")
        parts = []
        if isinstance(reference := schema.get("$ref"), str):
            name = place.name_of(reference)
            if name in inside:
                raise NoColumn(f"it is inside itself ($ref {reference!r}): no column has an end like that")
            if len(inside) > _REFERENCES_MAX:
                raise NoColumn(f"more than {_REFERENCES_MAX} references behind one another")
            target = self._seen(place.referred(reference), inside | {name})
            if self._ref_stands_alone:
                return target
            parts.append(target)
        for other in ("$dynamicRef", "$recursiveRef"):
            if other in schema:
                raise NoColumn(f"it is what {other} will name, which is not known beforehand")
        parts += [self._seen(place.at(part), inside) for part in schema.get("allOf", ())]
        seen = self._own(place, schema, inside)
        for part in parts:
            seen = _merged(seen, part)
        return seen

    def _own(self, place: Place, schema: Mapping[str, Any], inside: frozenset[str]) -> _Seen:
        """What stands in the schema itself."""
        items, additional = schema.get("items"), schema.get("additionalProperties")
        choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())] if "anyOf" in schema or "oneOf" in schema else []
        if "anyOf" in schema and "oneOf" in schema and "type" not in schema:
            raise NoColumn("it has both anyOf and oneOf")
        words = ("then", "else") if self._has_conditions else ()
        conditions = [schema[word] for word in words if isinstance(schema.get(word), dict)]
        return _Seen(
            words={word: schema[word] for word in _WORDS if word in schema},
            properties={name: place.at(inner) for name, inner in schema.get("properties", {}).items()},
            required=frozenset(schema["required"]) if isinstance(schema.get("required"), list) else frozenset(),
            items=place.at(items) if isinstance(items, dict | bool) else None,
            additional=place.at(additional) if isinstance(additional, dict | bool) else None,
            is_tuple=isinstance(items, list) or "prefixItems" in schema,
            choices=tuple(self._seen(place.at(part), inside) for part in [*choices, *conditions]),
            inside=inside,
        )


def _merged(one: _Seen, other: _Seen) -> _Seen:
    """What holds where both do."""
    words = dict(one.words)
    for word, said in other.words.items():
        if word not in words or said == _CONNECT_DECIMAL:
            words[word] = said
        elif word in _ANNOTATIONS or words[word] == said:
            continue
        elif word == "type":
            words[word] = _common_types(words[word], said)
        elif word in ("enum", "const"):
            continue  # either is enough to say the type
        else:
            raise NoColumn(f"it says {word} {_short(words[word])!r} and {_short(said)!r} at once")
    for name in one.properties.keys() & other.properties.keys():
        if one.properties[name].schema != other.properties[name].schema:
            raise NoColumn("it is declared in two ways at once (allOf, $ref)", name)
    for mine, its in ((one.items, other.items), (one.additional, other.additional)):
        if mine and its and mine.schema != its.schema:
            raise NoColumn("what is inside it is declared in two ways at once (allOf, $ref)")
    if one.choices and other.choices and not (one.says_its_type or other.says_its_type):
        raise NoColumn("it has several anyOf or oneOf")
    return _Seen(
        words,
        {**one.properties, **other.properties},
        one.required | other.required,
        one.items or other.items,
        one.additional or other.additional,
        one.is_tuple or other.is_tuple,
        (*one.choices, *other.choices),
        one.inside | other.inside,
    )


def _common_types(one: Any, other: Any) -> list[str]:
    mine, its = ({said} if isinstance(said, str) else set(said) for said in (one, other))
    both = mine & its
    if "integer" in mine | its and "number" in mine | its:
        both |= {"integer"}
    if not both:
        raise NoColumn(f"it says type {_short(one)} and {_short(other)} at once")
    return sorted(both)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _connect_decimal(name: str, words: Mapping[str, Any]) -> ddl.Type:
    """A decimal as Kafka Connect's JSON Schema converter declares it."""
    if name == "string":
        raise NoColumn(
            "a Connect decimal in base64 has no column; set decimal.format=NUMERIC in the converter that writes it"
        )
    given = words.get("connect.parameters")
    parameters = given if isinstance(given, dict) else {}
    try:
        scale, precision = int(parameters["scale"]), int(parameters.get("connect.decimal.precision", MAX_PRECISION))
    except (KeyError, ValueError, TypeError):
        raise NoColumn("a Connect decimal without a scale among its connect.parameters") from None
    if not 0 <= scale <= precision <= MAX_PRECISION or not precision:
        raise NoColumn(f"decimal({precision},{scale}); columns have at most {MAX_PRECISION} digits, and no other scale")
    return ddl.Decimal(precision, scale)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
