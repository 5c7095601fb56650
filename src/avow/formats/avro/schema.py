"""Avro schemas: from the JSON of a schema file or a registry to values, checked as the specification says.

A logical type that is not known, or that its type cannot have, is ignored, as the specification wants.

Owns: what an Avro schema may say. Must not know: columns, records' bytes. Its neighbour is ``resolution``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_LOGICAL = {
    "date": "int",
    "time-millis": "int",
    "time-micros": "long",
    "timestamp-millis": "long",
    "timestamp-micros": "long",
    "timestamp-nanos": "long",
    "local-timestamp-millis": "long",
    "local-timestamp-micros": "long",
    "local-timestamp-nanos": "long",
    "uuid": "string",
}
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_DEPTH_MAX = 100
NO_DEFAULT = ...  # nothing that JSON has


class BadSchema(ValueError):
    """Not an Avro schema, with the place in it."""


@dataclass(frozen=True, slots=True)
class Connect:
    """What Kafka Connect's converters write beside a type: what it stands for there."""

    name: str = ""  # such as io.debezium.time.Date
    type: str = ""  # where Avro has none of its own: int8, int16
    internal: str = ""  # of the records that the entries of a map become
    parameters: tuple[tuple[str, str], ...] = ()


NO_CONNECT = Connect()


@dataclass(frozen=True, slots=True)
class Primitive:
    name: str  # one of PRIMITIVES
    logical: str | None = None
    precision: int = 0  # of a decimal
    scale: int = 0
    connect: Connect = NO_CONNECT

    def __str__(self) -> str:
        return self.logical or self.name


@dataclass(frozen=True, slots=True)
class Fixed:
    fullname: str
    size: int
    logical: str | None = None
    precision: int = 0
    scale: int = 0
    aliases: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.logical or f"fixed {self.fullname}"


@dataclass(frozen=True, slots=True)
class Enum:
    fullname: str
    symbols: tuple[str, ...]
    default: str | None = None
    aliases: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"enum {self.fullname}"


@dataclass(frozen=True, slots=True)
class Array:
    items: Type

    def __str__(self) -> str:
        return f"array of {self.items}"


@dataclass(frozen=True, slots=True)
class Map:
    values: Type

    def __str__(self) -> str:
        return f"map of {self.values}"


@dataclass(frozen=True, slots=True)
class Union:
    branches: tuple[Type, ...]

    def __str__(self) -> str:
        return f"union of {', '.join(map(str, self.branches))}"


@dataclass(frozen=True, slots=True)
class RecordField:
    name: str
    type: Type
    default: Any = NO_DEFAULT  # as JSON has it
    aliases: frozenset[str] = frozenset()


@dataclass(eq=False, slots=True)
class Record:
    """Its fields are known after itself, for it may be among their types. Records are equal if they are the same."""

    fullname: str
    fields: tuple[RecordField, ...] = ()
    aliases: frozenset[str] = frozenset()
    connect: Connect = NO_CONNECT

    def __str__(self) -> str:
        return f"record {self.fullname}"


Named = Record | Enum | Fixed
Type = Primitive | Array | Map | Union | Named


def parse(text: str, references: Sequence[str] = ()) -> Type:
    """The schema of a text. ``references``: texts that define names which it uses, in any order."""
    names: dict[str, Named] = {}
    try:
        _define_all(names, list(references))
        try:
            document = json.loads(text)
        except ValueError:
            if text.strip() not in PRIMITIVES and text.strip() not in names:  # some write a bare name
                raise
            document = text.strip()
        return _Parser(names).type(document, "", 0)
    except RecursionError:
        raise BadSchema("it is nested too deeply") from None
    except BadSchema:
        raise
    except ValueError as error:
        raise BadSchema(f"not JSON: {error}") from None


def _define_all(names: dict[str, Named], texts: list[str]) -> None:
    """Adds the names that texts define, which may use those of others."""
    while texts:
        left: list[str] = []
        for text in texts:
            found = dict(names)
            try:
                _Parser(found).type(json.loads(text), "", 0)
            except BadSchema as error:
                left.append(text)
                failure = error
            else:
                names |= found
        if len(left) == len(texts):
            raise failure
        texts = left


def short(fullname: str) -> str:
    """A name without its namespace: types of two schemas match by it."""
    return fullname.rpartition(".")[2]


def placed(name: str, error: Exception) -> str:
    """What is wrong, seen from one level further out."""
    inner = str(error)
    return f"{name}{': ' if ' ' in inner.partition(':')[0] else '.'}{inner}"


class _Parser:
    def __init__(self, names: dict[str, Named]) -> None:
        self._names = names

    def type(self, node: Any, namespace: str, depth: int) -> Type:
        if depth > _DEPTH_MAX:
            raise BadSchema(f"it is nested more than {_DEPTH_MAX} deep")
        if isinstance(node, str):
            return self._named(node, namespace)
        if isinstance(node, list):
            return self._union(node, namespace, depth)
        if not isinstance(node, dict):
            raise BadSchema(f"{_shown(node)} is not a type")
        kind = node.get("type")
        if isinstance(kind, dict | list):
            return self.type(kind, namespace, depth + 1)
        if not isinstance(kind, str):
            raise BadSchema(f"{_shown(node)} has no type")
        if kind in ("record", "error"):
            return self._record(node, namespace, depth)
        if kind == "enum":
            return self._enum(node, namespace)
        if kind == "fixed":
            return self._fixed(node, namespace)
        if kind == "array":
            return Array(self._part(node, "items", namespace, depth))
        if kind == "map":
            return Map(self._part(node, "values", namespace, depth))
        if kind in PRIMITIVES:
            return _primitive(kind, node)
        return self._named(kind, namespace)

    def _part(self, node: Mapping[str, Any], key: str, namespace: str, depth: int) -> Type:
        if key not in node:
            raise BadSchema(f'an {node["type"]} has no "{key}"')
        return self.type(node[key], namespace, depth + 1)

    def _named(self, name: str, namespace: str) -> Type:
        if name in PRIMITIVES:
            return Primitive(name)
        for fullname in (name if "." in name or not namespace else f"{namespace}.{name}", name):
            if fullname in self._names:
                return self._names[fullname]
        raise BadSchema(f"the type {_shown(name)} is not defined before it is used")

    def _union(self, nodes: Sequence[Any], namespace: str, depth: int) -> Union:
        branches = tuple(self.type(node, namespace, depth + 1) for node in nodes)
        kinds: set[str] = set()
        for branch in branches:
            if isinstance(branch, Union):
                raise BadSchema("a union is directly inside a union")
            kind = branch_name(branch)
            if kind in kinds:
                raise BadSchema(f"a union has two branches of {kind}")
            kinds.add(kind)
        if not branches:
            raise BadSchema("a union has no branch")
        return Union(branches)

    def _define(self, node: Mapping[str, Any], namespace: str) -> tuple[str, frozenset[str]]:
        """The full name and the aliases of a type that is about to be defined."""
        name = node.get("name")
        if not isinstance(name, str):
            raise BadSchema(f"a {node['type']} has no name")
        own = node.get("namespace", namespace)
        if not isinstance(own, str):
            raise BadSchema(f"the namespace of {_shown(name)} is not a string")
        fullname = name if "." in name or not own else f"{own}.{name}"
        if not all(_NAME.fullmatch(part) for part in fullname.split(".")):
            raise BadSchema(f"{_shown(fullname)} is not a name")
        if fullname in self._names or fullname in PRIMITIVES:
            raise BadSchema(f"the type {fullname} is defined twice")
        return fullname, frozenset(map(short, _names_in(node, "aliases")))

    def _record(self, node: Mapping[str, Any], namespace: str, depth: int) -> Record:
        fullname, aliases = self._define(node, namespace)
        record = Record(fullname, aliases=aliases, connect=_connect(node))
        self._names[fullname] = record
        fields = node.get("fields")
        if not isinstance(fields, list):
            raise BadSchema(f"the record {fullname} has no fields")
        inner = fullname.rpartition(".")[0]
        record.fields = tuple(self._fields(fields, fullname, inner, depth))
        return record

    def _fields(self, nodes: Sequence[Any], record: str, namespace: str, depth: int) -> Iterator[RecordField]:
        names: set[str] = set()
        for node in nodes:
            if not isinstance(node, dict) or not isinstance(node.get("name"), str) or "type" not in node:
                raise BadSchema(f"a field of {record} has no name or no type")
            name = node["name"]
            if not _NAME.fullmatch(name):
                raise BadSchema(f"{_shown(name)}, a field of {record}, is not a name")
            if name in names:
                raise BadSchema(f"the record {record} has the field {name} twice")
            names.add(name)
            try:
                kind = self.type(node["type"], namespace, depth + 1)
            except BadSchema as error:
                raise BadSchema(placed(f"{short(record)}.{name}", error)) from None
            yield RecordField(name, kind, node.get("default", NO_DEFAULT), frozenset(_names_in(node, "aliases")))

    def _enum(self, node: Mapping[str, Any], namespace: str) -> Enum:
        fullname, aliases = self._define(node, namespace)
        symbols = tuple(_names_in(node, "symbols"))
        if not symbols or len(set(symbols)) < len(symbols):
            raise BadSchema(f"the enum {fullname} has no symbols, or one twice")
        default = node.get("default")
        if default is not None and default not in symbols:
            raise BadSchema(f"the default of the enum {fullname} is not one of its symbols")
        self._names[fullname] = enum = Enum(fullname, symbols, default, aliases)
        return enum

    def _fixed(self, node: Mapping[str, Any], namespace: str) -> Fixed:
        fullname, aliases = self._define(node, namespace)
        size = node.get("size")
        if type(size) is not int or not 0 <= size < 2**31:
            raise BadSchema(f"the fixed {fullname} has no size")
        logical, precision, scale = None, 0, 0
        match node.get("logicalType"):
            case "decimal" if digits := _decimal(node, digits_max=_digits_in(size)):
                logical, (precision, scale) = "decimal", digits
            case "duration" if size == 12:
                logical = "duration"
            case "uuid" if size == 16:
                logical = "uuid"
        self._names[fullname] = fixed = Fixed(fullname, size, logical, precision, scale, aliases)
        return fixed


def branch_name(type: Type) -> str:
    """What names a branch in its union: of a kind there can be only one."""
    if isinstance(type, Primitive):
        return type.name
    if isinstance(type, Record | Enum | Fixed):
        return type.fullname
    return builtin_name(type)


def builtin_name(type: Array | Map | Union) -> str:
    return {Array: "array", Map: "map", Union: "union"}[type.__class__]


def _primitive(name: str, node: Mapping[str, Any]) -> Primitive:
    logical = node.get("logicalType")
    if name == "bytes" and logical == "decimal" and (digits := _decimal(node, digits_max=None)):
        return Primitive(name, "decimal", *digits, connect=_connect(node))
    known = isinstance(logical, str) and _LOGICAL.get(logical) == name
    return Primitive(name, logical if known else None, connect=_connect(node))


def _decimal(node: Mapping[str, Any], *, digits_max: int | None) -> tuple[int, int] | None:
    precision, scale = node.get("precision"), node.get("scale", 0)
    if type(precision) is not int or type(scale) is not int or precision < 1 or not 0 <= scale <= precision:
        return None
    return (precision, scale) if digits_max is None or precision <= digits_max else None


def _digits_in(size: int) -> int:
    """The decimal digits that so many bytes hold, whatever they are."""
    return len(str((1 << (8 * min(size, 64) - 1)) - 1)) - 1 if size else 0


def _connect(node: Mapping[str, Any]) -> Connect:
    name, type, internal = (node.get(f"connect.{key}") for key in ("name", "type", "internal.type"))
    parameters = node.get("connect.parameters")
    texts = parameters.items() if isinstance(parameters, dict) else ()
    return Connect(
        name if isinstance(name, str) else "",
        type if isinstance(type, str) else "",
        internal if isinstance(internal, str) else "",
        tuple((key, text) for key, text in texts if isinstance(text, str)),
    )


def _names_in(node: Mapping[str, Any], key: str) -> list[str]:
    names = node.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadSchema(f'"{key}" is not a list of names')
    return names


def _shown(node: Any) -> str:
    text = json.dumps(node)
    return text if len(text) <= 60 else f"{text[:60]}…"
