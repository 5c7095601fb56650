"""The columns a pipeline declares: Spark's DDL spelling, parsed into frozen values.

    id long not null, account string not null, amount decimal(12,2), tags array<string>, `order id` int

A schema prints itself back in a canonical spelling that parses to the same schema, so it can be shown,
stored and compared as text.

Owns: the types and their spelling. Must not know: JSON, Arrow, Spark or any sink; each of them maps these
types to its own. Its neighbour is ``settings``, which holds a ``Schema`` for ``decode.schema``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import NoReturn

from avow.errors import ConfigError

MAX_DEPTH = 32  # arrays, maps and structs inside one another
MAX_PRECISION = 38  # Spark's and Arrow's decimal128 end here


class Scalar(StrEnum):
    """A type without parts, by its canonical name."""

    BOOLEAN = "boolean"
    BYTE = "byte"
    SHORT = "short"
    INT = "int"
    LONG = "long"
    FLOAT = "float"
    DOUBLE = "double"
    STRING = "string"
    BINARY = "binary"
    DATE = "date"
    TIMESTAMP = "timestamp"  # an instant: the text must carry a zone
    TIMESTAMP_NTZ = "timestamp_ntz"  # a wall clock: no zone


@dataclass(frozen=True, slots=True)
class Decimal:
    precision: int
    scale: int

    def __str__(self) -> str:
        return f"decimal({self.precision},{self.scale})"


@dataclass(frozen=True, slots=True)
class Array:
    element: Type

    def __str__(self) -> str:
        return f"array<{self.element}>"


@dataclass(frozen=True, slots=True)
class Map:
    """Keys are always strings: JSON has no others."""

    value: Type

    def __str__(self) -> str:
        return f"map<string,{self.value}>"


@dataclass(frozen=True, slots=True)
class Struct:
    fields: tuple[Field, ...]

    def __str__(self) -> str:
        return f"struct<{_join(self.fields, ': ')}>"


Type = Scalar | Decimal | Array | Map | Struct


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: Type
    required: bool = False  # "not null"


@dataclass(frozen=True, slots=True)
class Schema:
    fields: tuple[Field, ...]

    def __str__(self) -> str:
        return _join(self.fields, " ")

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def parse(text: str) -> Schema:
    """The schema that ``text`` spells, or a ConfigError that names the column and what is allowed."""
    return _Parser(text).schema()


ALIASES = {
    "tinyint": Scalar.BYTE,
    "smallint": Scalar.SHORT,
    "integer": Scalar.INT,
    "bigint": Scalar.LONG,
    "real": Scalar.FLOAT,
    "timestamp_ltz": Scalar.TIMESTAMP,
}
_SCALARS = {scalar.value: scalar for scalar in Scalar} | ALIASES
_DECIMALS = {"decimal", "dec", "numeric"}
_NESTED = {"array", "map", "struct"}
ALLOWED_TYPES = (
    "boolean, byte, short, int, long, float, double, decimal(p,s), string, binary, date, timestamp, "
    "timestamp_ntz, array<T>, map<string,T>, struct<name: T, ...>"
)

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<word>[A-Za-z0-9_]+)|(?P<mark>[<>(),:]))")


def _join(fields: Iterable[Field], separator: str) -> str:
    return ", ".join(
        f"{_quote(field.name)}{separator}{field.type}{' not null' if field.required else ''}" for field in fields
    )


def _quote(name: str) -> str:
    return name if _BARE.fullmatch(name) else "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # quoted, word, mark, end
    text: str


class _Parser:
    """Recursive descent, one token ahead. Remembers which column it is in, for its errors."""

    def __init__(self, text: str) -> None:
        self._column = 0
        self._tokens = list(self._scan(text))
        self._next = 0

    def schema(self) -> Schema:
        if self._peek.kind == "end":
            raise ConfigError(
                "no column is declared", advice='Declare columns, for example "id long not null, note string".'
            )
        fields = self._fields(closing="", depth=0)
        if self._peek.kind != "end":
            self._fail(
                f"{self._seen} after its type", "Separate columns by commas; a type can be followed by `not null` only."
            )
        return Schema(fields)

    def _scan(self, text: str) -> Iterator[_Token]:
        at = 0
        while match := _TOKEN.match(text, at):
            assert match.lastgroup is not None
            yield _Token(match.lastgroup, match[match.lastgroup])
            at = match.end()
        rest = text[at:].lstrip()
        if rest:
            where = f"at character {len(text) - len(rest) + 1}"
            if rest.startswith("`"):
                raise ConfigError(f"the backtick {where} is not closed", advice="Write ` inside a name as ``.")
            raise ConfigError(
                f"{rest[0]!r} {where} is not part of a schema",
                advice="Put a name with other characters than letters, digits and _ in backticks.",
            )
        yield _Token("end", "")

    @property
    def _peek(self) -> _Token:
        return self._tokens[self._next]

    @property
    def _seen(self) -> str:
        return repr(self._peek.text) if self._peek.text else "the end"

    def _take(self) -> _Token:
        token = self._peek
        if token.kind != "end":
            self._next += 1
        return token

    def _accept(self, text: str) -> bool:
        """Take the next token if it is this word or mark; words in any case."""
        if self._peek.kind == "quoted" or self._peek.text.lower() != text:
            return False
        self._next += 1
        return True

    def _expect(self, mark: str, form: str) -> None:
        if not self._accept(mark):
            self._fail(f"{self._seen} instead of {mark!r}", f"The syntax is {form}.")

    def _fail(self, wrong: str, allowed: str) -> NoReturn:
        raise ConfigError(f"column {self._column}: {wrong}", advice=allowed)

    def _fields(self, *, closing: str, depth: int) -> tuple[Field, ...]:
        fields: list[Field] = []
        names: set[str] = set()
        while True:
            if depth == 0:
                self._column += 1
            field = self._field(depth)
            # Spark compares names without case, so two that differ only in case would be one.
            if field.name.lower() in names:
                self._fail(f"the name {field.name!r} is declared twice", "Names must differ by more than case.")
            names.add(field.name.lower())
            fields.append(field)
            if not self._accept(","):
                break
        if closing:
            self._expect(closing, "struct<name: T, name: T not null>")
        return tuple(fields)

    def _field(self, depth: int) -> Field:
        name = self._name()
        self._accept(":")
        kind = self._type(depth)
        required = self._accept("not")
        if required and not self._accept("null"):
            self._fail(f"{self._seen} after `not`", "The syntax is `not null`.")
        return Field(name, kind, required)

    def _name(self) -> str:
        token = self._take()
        if token.kind == "quoted":
            name = token.text[1:-1].replace("``", "`")
            if not name:
                self._fail("the name is empty", "A name has at least one character.")
            if any(unicodedata.category(character) == "Cc" for character in name):
                self._fail(
                    f"the name {name!r} contains a control character", "Any other character is allowed in backticks."
                )
            return name
        if token.kind != "word" or not _BARE.fullmatch(token.text):
            seen = repr(token.text) if token.text else "the end"
            self._fail(
                f"{seen} instead of a name",
                "A name consists of letters, digits and _ and does not start with a digit; put any other name in "
                "backticks.",
            )
        return token.text

    def _type(self, depth: int) -> Type:
        word = self._peek.text.lower() if self._peek.kind == "word" else ""
        if word in _SCALARS:
            self._take()
            return _SCALARS[word]
        if word in _DECIMALS:
            self._take()
            return self._decimal()
        if word in _NESTED:
            if depth == MAX_DEPTH:
                self._fail(f"nested more than {MAX_DEPTH} deep", f"Nest at most {MAX_DEPTH} arrays, maps and structs.")
            self._take()
            return self._nested(word, depth + 1)
        near = get_close_matches(word, [*_SCALARS, *_DECIMALS, *_NESTED], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        self._fail(f"{self._seen} is not a type{hint}", f"Types: {ALLOWED_TYPES}.")

    def _decimal(self) -> Decimal:
        form = "decimal(precision,scale)"
        if not self._accept("("):
            return Decimal(10, 0)  # Spark's default
        precision = self._number(form)
        scale = self._number(form) if self._accept(",") else 0
        self._expect(")", form)
        if not (1 <= precision <= MAX_PRECISION and scale <= precision):
            self._fail(
                f"decimal({precision},{scale}) is not valid",
                f"The precision is 1 to {MAX_PRECISION}, the scale at most the precision.",
            )
        return Decimal(precision, scale)

    def _number(self, form: str) -> int:
        token = self._peek
        # Three digits are enough for any precision, and keep int() away from a thousand of them.
        if token.kind != "word" or not re.fullmatch("[0-9]{1,3}", token.text):
            self._fail(f"{self._seen} instead of a number", f"The syntax is {form}.")
        return int(self._take().text)

    def _nested(self, word: str, depth: int) -> Type:
        if word == "struct":
            self._expect("<", "struct<name: T, name: T not null>")
            return Struct(self._fields(closing=">", depth=depth))
        if word == "array":
            self._expect("<", "array<T>")
            element = self._type(depth)
            self._expect(">", "array<T>")
            return Array(element)
        self._expect("<", "map<string,T>")
        self._expect("string", "map<string,T>: a key is always a string")
        self._expect(",", "map<string,T>")
        value = self._type(depth)
        self._expect(">", "map<string,T>")
        return Map(value)
