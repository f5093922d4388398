"""The manifest's reference page, written from the models: every field with its type, default and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from polyrl.manifest.base import CLUSTER_ONLY_KEY
from polyrl.manifest.rules.between_fields import RULES
from polyrl.manifest.rules.transitions import TRANSITIONS
from polyrl.manifest.schema.crd import OPEN, Schema, manifest_schema

_OPENING: Final = """# Manifest reference

Every field of `PolyRLJob` (`polyrl.dev/v1alpha1`), written from the models by `polyrl crd --docs`; do not edit it by
hand. A field may be left out unless it is required; a key without a value counts as left out. Fields marked *cluster*
mean nothing to a local run, which says so once.
"""

_UNBOUNDED: Final = 2**31 - 1
"""Bounds from here on say only that a number is absurd; the page leaves them out."""


def manifest_page() -> str:
    """The page as Markdown."""
    properties = manifest_schema()["properties"]
    sections = [_OPENING, _envelope()]
    for name in ("spec", "status"):
        sections += _sections(name, properties[name])
    return "\n".join([*sections, _rules()])


def _envelope() -> str:
    named = (
        "`metadata.name` | text | required | "
        + manifest_schema()["properties"]["metadata"]["properties"]["name"]["description"]
    )
    return f"| field | type | default | meaning |\n|---|---|---|---|\n| {named} |\n"


def _sections(path: str, node: Schema) -> Iterator[str]:
    rows = [_row(name, path, child, name in node.get("required", ())) for name, child in node["properties"].items()]
    table = "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])
    more = "\nFurther fields are kept.\n" if OPEN in node else ""
    yield f"## {path}\n\n{node.get('description', '')}\n\n{table}\n{more}"
    for name, child in node["properties"].items():
        inner = child.get("items", child)
        if "properties" in inner:
            yield from _sections(_below(path, name, child), inner)


def _below(path: str, name: str, node: Schema) -> str:
    return f"{path}.{name}" + ("[]" if node["type"] == "array" else "")


def _row(name: str, path: str, node: Schema, required: bool) -> str:
    default = "required" if required else _default(node)
    scope = "*cluster* " if node.get(CLUSTER_ONLY_KEY) else ""
    inner = node.get("items", node)
    anchor = _below(path, name, node).lower().replace(".", "").replace("[]", "")
    link = f"[`{name}`](#{anchor})" if "properties" in inner else f"`{name}`"
    meaning = node.get("description", "").replace("|", "\\|").replace("<", "&lt;")
    return f"| {link} | {_type(node)} | {default} | {scope}{meaning} |"


def _default(node: Schema) -> str:
    if "default" not in node or isinstance(node["default"], dict):
        return ""
    return f"`{json.dumps(node['default'])}`"


def _type(node: Schema) -> str:
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    if node["type"] == "array":
        return f"list of {_type(node['items'])}{_bounds(node, 'minItems', 'maxItems')}"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "object"}
    return words[node["type"]] + _bounds(node, "minimum", "maximum")


def _bounds(node: Schema, low: str, high: str) -> str:
    least, most = node.get(low), node.get(high)
    above = "> " if node.get("exclusiveMinimum") else "≥ "
    below = "< " if node.get("exclusiveMaximum") else "≤ "
    bounds = [f"{above}{_number(least)}"] if least is not None and least > -_UNBOUNDED else []
    bounds += [f"{below}{_number(most)}"] if most is not None and most < _UNBOUNDED else []
    return f" ({', '.join(bounds)})" if bounds else ""


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rules() -> str:
    holds = "\n".join(f"| `spec.{rule.path}` | {rule.static_message('`')} |" for rule in RULES)
    changes = "\n".join(f"| `spec.{change.path}` | {change.message} |" for change in TRANSITIONS)
    return (
        "## Rules between fields\n\nChecked by `polyrl validate` and by the API server, from one list.\n\n"
        f"| refused at | because |\n|---|---|\n{holds}\n\n"
        "## Changes that a stored job refuses\n\n"
        f"| field | rule |\n|---|---|\n{changes}\n"
    )
