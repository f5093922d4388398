"""The OpenAPI 3.1 document of the HTTP API, made from the types that serve it; `python -m` this module prints it.

The document is kept in docs/reference/manager-api.json.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from polyrl.control import BODIES, HEALTH_PATH, HISTORY_PATH, METRICS_PATH, PAGE_PATH, STATUS_PATH, Problem

_QUERY = [
    {"name": name, "in": "query", "description": description, "schema": {"type": kind, "minimum": least}}
    for name, description, kind, least in (
        ("since", "Answer once `seq` is greater than this; default: at once.", "integer", -1),
        ("waitSeconds", "Answer after this long at the latest; at most 60.", "number", 0),
    )
]

_AFTER = [
    {
        "name": "after",
        "in": "query",
        "description": "Only rows and events later than this, in Unix seconds; default: all.",
        "schema": {"type": "number", "minimum": -1},
    }
]


def make_openapi() -> dict[str, Any]:
    """The whole document."""
    types = {kind for _, request, answer in BODIES.values() for kind in (request, answer) if kind} | {Problem}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    texts = {METRICS_PATH: _text("Prometheus text", "text/plain"), PAGE_PATH: _text("The run as a page", "text/html")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "PolyRL manager", "version": "1", "description": "Status and control of one run."},
        "paths": {path: _path(path) for path in BODIES} | texts,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _path(path: str) -> dict[str, Any]:
    method, request, answer = BODIES[path]
    operation: dict[str, Any] = {
        "summary": (answer.__doc__ or "").split("\n")[0],
        "responses": {"200": _json_body("The answer", answer), "default": _json_body("Refused", Problem)},
    }
    if request is not None:
        operation["requestBody"] = {"required": True} | _json_body(None, request)
    if path == STATUS_PATH:
        operation["parameters"] = _QUERY
    if path == HISTORY_PATH:
        operation["parameters"] = _AFTER
    if path == HEALTH_PATH:
        operation["security"] = []
    return {method: operation}


def _json_body(description: str | None, kind: type[Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    return {"content": content} | ({"description": description} if description else {})


def _text(summary: str, kind: str) -> dict[str, Any]:
    content = {kind: {"schema": {"type": "string"}}}
    return {"get": {"summary": summary, "responses": {"200": {"description": summary, "content": content}}}}


def main() -> None:
    """Prints the document."""
    print(json.dumps(make_openapi(), indent=2))


if __name__ == "__main__":
    main()
