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
            "description": "What the pages show, as JSON. Reading only: changes are made on the pages.",
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
            "400": {"description": "the question is not a good one", **problem},
            "401": {"description": "the token is missing", **problem},
            "404": {"description": "there is no such thing", **problem},
            "409": {"description": "what is asked for cannot be", **problem},
            "502": {"description": "Kafka or the sink did not answer as it should", **problem},
            "504": {"description": "it took too long", **problem},
        },
    }


def _parameters(page: Page, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    asked = page.ask.model_json_schema(ref_template=REF)
    schemas |= asked.pop("$defs", {})
    in_path = set(re.findall(r"{(\w+)", page.path))
    return [
        {
            "name": name,
            "in": "path" if name in in_path else "query",
            "required": name in in_path or name in asked.get("required", ()),
            "description": schema.pop("description", ""),
            "schema": {key: value for key, value in schema.items() if key != "title"},
        }
        for name, schema in asked.get("properties", {}).items()
    ]
