"""One JSON value with a JSON Schema, for people: as it is, if its schema allows it; and a document as such a value.

Owns: that. Must not know: columns, registries. Neighbours: ``document`` and ``validation``.
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache
from typing import Any

from avow.formats.base import DecodeError, Shown
from avow.formats.json.document import Json, Number, parse_any, write
from avow.formats.json_schema.document import Document
from avow.formats.json_schema.validation import refuse_invalid
from avow.formats.text import text_of

References = tuple[tuple[str, str], ...]
_KEPT = 64


def show(schema: str, references: References, value: bytes) -> Shown:
    text = text_of(value)
    document = parse_any(text)
    compiled = _compiled(schema, references)
    refuse_invalid(compiled.validator, text)
    return Shown(str(compiled.root.get("title", "")), _exact(document))


def encode(schema: str, references: References, document: object) -> bytes:
    """The value, or ``ValueError`` with where the schema does not allow it."""
    text = write(_with_digits(document))
    try:
        refuse_invalid(_compiled(schema, references).validator, text)
    except DecodeError as error:
        raise ValueError(f"{error.path}: {error.detail}" if error.path else error.detail) from None
    return text.encode()


def check(schema: str, references: References) -> None:
    """Raises ``ValueError`` for what is no schema."""
    _compiled(schema, references)


@lru_cache(_KEPT)
def _compiled(schema: str, references: References) -> Document:
    return Document(schema, references)


def _exact(value: Json) -> Any:
    """Numbers as Python has them; one with more digits than a double holds stays text."""
    if isinstance(value, Number):
        text = value.decode()
        if text.lstrip("-").isdigit():
            return int(text)
        number = float(text)
        return number if Decimal(repr(number)) == Decimal(text) else text
    if isinstance(value, dict):
        return {name: _exact(inner) for name, inner in value.items()}
    return [_exact(item) for item in value] if isinstance(value, list) else value


def _with_digits(value: object) -> Json:
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return repr(value).encode()
    if isinstance(value, dict):
        return {name: _with_digits(inner) for name, inner in value.items()}
    assert isinstance(value, list)
    return [_with_digits(item) for item in value]
