"""One record's bytes as a JSON document, strictly: what RFC 8259 calls JSON, without what it leaves open.

Refused beyond the grammar: duplicate names, escapes of lone surrogates, more than 1,000 levels, numbers of more than
1,000 digits. A byte order mark is skipped. Numbers stay as the digits they were written with.

Owns: the syntax. Must not know: the declared columns. Its neighbour is ``values``, which gives a document its types.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from avow.formats.base import DecodeError, Reason, shown
from avow.formats.text import text_of

DEPTH_MAX = 1_000  # objects and arrays inside one another, the document itself being the first
NUMBER_DIGITS_MAX = 1_000

_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]..")
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|([\[{])|([\]}])', re.DOTALL)

_A = TypeVar("_A")
_B = TypeVar("_B")


# A number stays the digits it was written with, as bytes: that tells it from a string at no cost.
Number = bytes
Json = object  # None, bool, Number, str, list or dict


def parse(value: bytes) -> dict[str, Json]:
    """The object that a record's value spells, or why it spells none."""
    if not value:
        raise DecodeError(Reason.EMPTY, "the value is empty: zero bytes")
    document = parse_any(text_of(value).removeprefix("\ufeff"))
    if not isinstance(document, dict):
        raise DecodeError(Reason.NOT_OBJECT, f"expected a JSON object, found {describe(document)}")
    return document


def parse_any(text: str) -> Json:
    """Whatever JSON value the text spells."""
    if text.count("[") + text.count("{") > DEPTH_MAX and _is_too_deep(text):
        raise DecodeError(Reason.TOO_DEEP, f"nested more than {DEPTH_MAX:,} deep")
    try:
        document = with_room((_SHORT if len(text) <= NUMBER_DIGITS_MAX else _LONG).decode, text)
    except json.JSONDecodeError as error:
        wrong = error.msg.removesuffix(" at")
        raise DecodeError(Reason.NOT_JSON, f"{wrong} at character {error.pos:,} of {len(text):,}") from None
    if "\\u" in text:
        _refuse_lone_surrogates(text)
    return document


def describe(value: Json) -> str:
    """What a JSON value is, and the beginning of it, for a detail."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Number):
        return f"the number {shown(value.decode())[1:-1]}"
    if isinstance(value, str):
        return f"the string {shown(value)}"
    return "an array" if isinstance(value, list) else "an object"


def write(value: Json) -> str:
    """A document as text again: the same names in the same order, the same digits, no spaces."""
    return with_room(_write, value)


def _write(value: Json) -> str:
    if isinstance(value, Number):
        return value.decode()
    if isinstance(value, dict):
        return "{" + ",".join([f"{_quoted(name)}:{_write(inner)}" for name, inner in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ",".join([_write(inner) for inner in value]) + "]"
    return _quoted(value)


_quoted = json.JSONEncoder(ensure_ascii=False).encode


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DecodeError(Reason.DUPLICATE_FIELD, f"the field {shown(twice)} appears twice")
    return document


def _number(token: str) -> Number:
    digits = sum(map(str.isdigit, token)) if len(token) > NUMBER_DIGITS_MAX else 0
    if digits > NUMBER_DIGITS_MAX:
        raise DecodeError(Reason.LONG_NUMBER, f"a number of {digits:,} digits; the limit is {NUMBER_DIGITS_MAX:,}")
    return token.encode()


def _constant(name: str) -> NoReturn:
    raise DecodeError(Reason.NOT_JSON, f"{name} is not JSON")


# Most documents are too short to hold a long number, and need no function call for each number.
_SHORT = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=str.encode, parse_float=str.encode, parse_constant=_constant, strict=True
)
_LONG = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_number, parse_float=_number, parse_constant=_constant, strict=True
)


def _refuse_lone_surrogates(text: str) -> None:
    # Escapes are consumed from the left, so that the one in "\\ud800" is a backslash and no surrogate.
    for match in _ESCAPE.finditer(text):
        if _SURROGATE.fullmatch(match[0]):
            raise DecodeError(Reason.LONE_SURROGATE, f"{match[0]} at character {match.start():,} is a lone surrogate")


def with_room(function: Callable[[_A], _B], argument: _A) -> _B:
    """Call a recursive function; where the interpreter's limit is met, once more with room for what is allowed."""
    try:
        return function(argument)
    except RecursionError:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(before + 3 * DEPTH_MAX)
        try:
            return function(argument)
        finally:
            sys.setrecursionlimit(before)


def _is_too_deep(text: str) -> bool:
    depth = 0
    for match in _BRACKETS.finditer(text):
        if match[1]:
            depth += 1
            if depth > DEPTH_MAX:
                return True
        elif match[2]:
            depth -= 1
    return False
