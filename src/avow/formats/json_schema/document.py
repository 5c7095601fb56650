"""JSON Schemas as they are written: from the text of a schema file or a registry to values that can be walked.

Drafts 4, 6, 7, 2019-09 and 2020-12. A schema that does not say its draft is one of draft 7, as for Confluent's clients.
Nothing is ever fetched: what a schema refers to is in itself, or among its references in the registry.

Owns: reading a schema, drafts, ``$ref``. Must not know: columns, records. Neighbours: ``columns`` and ``validation``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urldefrag, urljoin

import jsonschema_rs

from avow.errors import first_line

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DRAFTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}
_BASE = "http://schema.invalid/"  # what relative names are relative to; never asked for


# What the library raises. Whatever a schema or a record is, nothing else may come of it.
FAILURES = (ValueError, TypeError, ArithmeticError, RecursionError, jsonschema_rs.ReferencingError)


@contextmanager
def without_panics() -> Iterator[None]:
    """A panic of the library is an error like others: it is no reason to end the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library failed: {first_line(error)}") from None


class BadSchema(ValueError):
    """Not a JSON Schema."""


class NoSuchReference(ValueError):
    """A ``$ref`` to something that is not there."""


@dataclass(frozen=True, slots=True)
class Place:
    """A schema inside a document, and what its references are relative to."""

    schema: Any
    resolver: jsonschema_rs.Resolver

    def at(self, schema: Any) -> Place:
        """A schema inside this one."""
        if isinstance(schema, dict) and isinstance(name := schema.get("$id"), str) and not name.startswith("#"):
            named = self.referred(name)  # references in it are relative to its own name
            return named if named.schema == schema else Place(schema, self.resolver)
        return Place(schema, self.resolver)

    def referred(self, reference: str) -> Place:
        try:
            found = self.resolver.lookup(reference)
        except jsonschema_rs.ReferencingError as error:
            raise NoSuchReference(f"$ref {reference!r} is not known: {first_line(error).replace(_BASE, '')}") from None
        return Place(found.contents, found.resolver)

    def name_of(self, reference: str) -> str:
        """A reference, whole."""
        return urljoin(self.resolver.base_uri, reference)


class Document:
    """One schema with its references, checked against its draft's own schema."""

    def __init__(self, text: str, references: Iterable[tuple[str, str]] = ()) -> None:
        root = _parsed(text)
        if not isinstance(root, dict):
            raise BadSchema("it is not a JSON object, which a schema with columns is")
        self.schema_uri, self.draft = _draft(root)
        self.root: dict[str, Any] = {**root, "$schema": self.schema_uri}
        identity = root.get("id" if self.draft == 4 else "$id", "")
        self._uri = urldefrag(urljoin(_BASE, identity if isinstance(identity, str) else "")).url
        resources = {self._uri: self.root}
        for name, other_text in references:
            try:
                other = _parsed(other_text)
            except BadSchema as error:
                raise BadSchema(f"its reference {name}: {error}") from None
            if isinstance(other, dict):
                other = {"$schema": self.schema_uri, **other}
            resources[urldefrag(urljoin(self._uri, name)).url] = other
        try:
            with without_panics():
                self._registry = jsonschema_rs.Registry(list(resources.items()))
                self.validator = jsonschema_rs.validator_for(self.root, **self._options)
        except FAILURES as error:
            raise BadSchema(_why(error)) from None

    @property
    def place(self) -> Place:
        return Place(self.root, self._registry.resolver(self._uri))

    @property
    def _options(self) -> Mapping[str, Any]:
        return {"registry": self._registry, "base_uri": self._uri, "offline": True}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise BadSchema("it is nested too deep") from None
    except ValueError as error:
        raise BadSchema(f"it is not JSON: {error}") from None


def _draft(root: Mapping[str, Any]) -> tuple[str, int]:
    uri = root.get("$schema", DRAFT_7)
    draft = _DRAFTS.get(uri.partition("://")[2].removesuffix("#")) if isinstance(uri, str) else None
    if draft is None:
        raise BadSchema(f"$schema is {uri!r}; drafts 4, 6, 7, 2019-09 and 2020-12 are known")
    return uri, draft


def _why(error: Exception) -> str:
    path = getattr(error, "instance_path", None)
    at = f" (at {'/'.join(map(str, path))})" if path else ""
    return f"it is not a valid schema: {first_line(error).replace(_BASE, '')}{at}"
