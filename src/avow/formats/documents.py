"""Records for people: what the values behind a schema's id say, by the schema that wrote them.

There is no pipeline here, no reader's schema and no columns: whatever any format with schemas has written is read by
the plugin whose language the registry names. A pipeline may still refuse what is shown, where its sink holds less.

Owns: the way from a value to its document, and from a document to a value. Must not know: any language, who looks.
Neighbours: ``formats.registry``, ``schema_registry``, and the plugins' ``show`` and ``encoder``.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from avow.errors import ConfigError, UnknownSchema
from avow.formats.base import DecodeError, Encode, FormatPlugin, printable
from avow.formats.json.document import Json, Number
from avow.formats.registry.config import Text
from avow.formats.registry.frame import FRAME_BYTES, UNKNOWN_ID, framed
from avow.plugins import FORMATS
from avow.schema_registry import Registered, RegistrySettings, SchemaRegistry
from avow.settings import PipelineConfig

BAD_SCHEMA = "bad-schema"  # the registry has the id, and we cannot read the schema
OTHER_LANGUAGE = "other-language"  # a schema of a language that no format has
_DETAIL_MAX = 300


@dataclass(frozen=True, slots=True)
class Document:
    """A value, read."""

    schema_id: int
    format: str
    type_name: str
    content: object


@dataclass(frozen=True, slots=True)
class Undecoded:
    """A value that begins like one with a schema, and why it cannot be read."""

    schema_id: int
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class Documents:
    """Reads the framed values of one registry. It may be used by any thread."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self.registry = registry

    def read(self, data: bytes | None) -> Document | Undecoded | None:
        """None: nothing before the value names a schema. A registry that does not answer, or refuses, is raised."""
        schema_id = framed_id(data)
        if data is None or schema_id is None:
            return None
        try:
            registered = self.registry.by_id(schema_id)
            if (plugin := plugin_of_kind(registered.kind)) is None:
                return Undecoded(schema_id, OTHER_LANGUAGE, f"the schema is {registered.kind}, which no format reads")
            seen = plugin.show(text_of(registered, self.registry), data, FRAME_BYTES)
        except UnknownSchema as error:
            return Undecoded(schema_id, UNKNOWN_ID, str(error))
        except DecodeError as error:
            path = f"{error.path}: " if error.path else ""
            return Undecoded(schema_id, error.reason, printable(path + error.detail, _DETAIL_MAX))
        except ValueError as error:
            return Undecoded(schema_id, BAD_SCHEMA, printable(str(error), _DETAIL_MAX))
        return Document(schema_id, plugin.format, seen.type_name, seen.document)


def framed_id(data: bytes | None) -> int | None:
    """The id before a value; None: it does not begin like one with a schema."""
    if data is None or len(data) < FRAME_BYTES or data[0]:
        return None
    return int.from_bytes(data[1:FRAME_BYTES], "big")


def named(name: str, data: bytes | None, read: Document | Undecoded | None = None) -> dict[str, Any]:
    """A key or a value in a line of JSON: its document, or text; under another name, as base64, if it is no text.
    Beside it, where it has a schema, the id, and why it could not be read."""
    if isinstance(read, Document):
        return {name: read.content, f"{name}_schema_id": read.schema_id}
    try:
        line = {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        line = {f"{name}_base64": base64.b64encode(data or b"").decode()}
    if read is None:
        return line
    return {**line, f"{name}_schema_id": read.schema_id, f"{name}_error": str(read)}


@cache
def plugin_of_kind(kind: str) -> FormatPlugin | None:
    """The format whose schemas a registry calls so."""
    return next((plugin for plugin in FORMATS.values() if plugin.schema_kind == kind), None)


def plugin_that_encodes(name: str) -> FormatPlugin:
    """A format whose schemas registries keep."""
    plugin: FormatPlugin | None = FORMATS.get(name)
    if plugin is None or not plugin.schema_kind:
        known = ", ".join(sorted(name for name, plugin in FORMATS.items() if plugin.schema_kind))
        wrong = "is not known" if plugin is None else "has no schemas in a registry"
        raise ConfigError(f"format {name} {wrong}", advice=f"Formats with schemas: {known}.")
    return plugin


def text_of(registered: Registered, registry: SchemaRegistry) -> Text:
    where = f"subject {registered.subject}, version {registered.version}" if registered.subject else "schema"
    references = registry.references(registered) if registered.references else {}
    return Text(registered.text, f"{where} (id {registered.id})", references, registered.id)


def registry_of(pipeline: PipelineConfig) -> RegistrySettings | None:
    """Where the schemas of a pipeline's records are, if it says so."""
    settings = getattr(pipeline.decode, "registry", None)  # whatever the format
    return settings if isinstance(settings, RegistrySettings) else None


def encoder(schema: Text, encode: Encode) -> Callable[[Json], bytes]:
    """Makes framed values of strictly parsed JSON. What does not fit raises ``ValueError``."""
    assert schema.schema_id is not None
    schema_id = schema.schema_id
    return lambda document: framed(schema_id, encode(plain(document)))


class _Digits(float):
    """A number whose ``repr`` is what was written: decimals are made of that, and lose nothing."""

    def __new__(cls, text: str) -> _Digits:
        made = super().__new__(cls, text)
        made._text = text
        return made

    _text: str

    def __repr__(self) -> str:
        return self._text


def plain(value: Json) -> object:
    """A strictly parsed document as encoders take it. ``ValueError`` for a number that no type holds."""
    if isinstance(value, Number):
        text = value.decode()
        if text.lstrip("-").isdigit():
            return int(text)
        number = _Digits(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError(f"the number {printable(text, 60)} is beyond what a double holds")
        return number
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value
