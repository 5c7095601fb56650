"""The JSON API as an OpenAPI document, made from the list of pages and the types of their questions and answers.

Owns: the document. Must not know: any page in particular.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from typing import Any

from avow.dashboard.pages import PAGES, Page

REF = "#/components/schemas/{model}"
PROBLEM = {
    "type": "object",
    "properties": {"problem": {"type": "string"}, "advice": {"type": "string"}},
    "required": ["problem", "advice"],
}


@cache
def document() -> dict[str, Any]:
    schemas: dict[str, Any] = {"Problem": PROBLEM}
    paths = {f"/api{page.path}": {"get": _operation(page, schemas)} for page in PAGES}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "avow dashboard",
            "version": version("avow"),
            "description": "The data of every page, as JSON. Read-only: changes are made on the pages.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(page: Page, schemas: dict[str, Any]) -> dict[str, Any]:
    answer = page.adapter.json_schema(mode="serialization", ref_template=REF)
    schemas |= answer.pop("$defs", {})
    name = answer.get("title", page.answer.__name__)
    if answer.get("type") == "object":
        schemas[name] = answer
        answer = {"$ref": REF.format(model=name)}
    problem = {"content": {"application/json": {"schema": {"$ref": REF.format(model="Problem")}}}}
    return {
        "operationId": page.answer.__name__,
        "summary": (page.answer.__doc__ or "").strip().replace("``", ""),
        "parameters": _parameters(page, schemas),
        "responses": {
            "200": {"description": "the answer", "content": {"application/json": {"schema": answer}}},
            "400": {"description": "invalid request", **problem},
            "401": {"description": "the token is missing", **problem},
            "404": {"description": "not found", **problem},
            "409": {"description": "the request conflicts with the current state", **problem},
            "502": {"description": "Kafka or the sink failed", **problem},
            "504": {"description": "timed out", **problem},
        },
    }


def _parameters(page: Page, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    schema_of_all = page.params.model_json_schema(ref_template=REF)
    schemas |= schema_of_all.pop("$defs", {})
    in_path = set(re.findall(r"{(\w+)", page.path))
    return [
        {
            "name": name,
            "in": "path" if name in in_path else "query",
            "required": name in in_path or name in schema_of_all.get("required", ()),
            "description": schema.pop("description", ""),
            "schema": {key: value for key, value in schema.items() if key != "title"},
        }
        for name, schema in schema_of_all.get("properties", {}).items()
    ]
