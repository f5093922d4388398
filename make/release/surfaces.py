"""Names that users write into their files and programs, read from the schemas that describe them. Pure.

A name that a released version had may only go if the changelog says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

SURFACES = ("crds/polyrljobs.yaml", "charts/polyrl/values.schema.json", "docs/reference/manager-api.json")
"""Fields of the manifest, values of the chart, requests and fields of the manager's HTTP API."""
NAMED = {"properties", "schemas", "paths"}
"""Keys of a schema whose own keys are names that somebody chose."""


def names_of(schema: str) -> set[str]:
    """Dotted, as a user would write them."""
    return set(_names(yaml.safe_load(schema), ""))


def _names(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, list):
        for each in node:
            yield from _names(each, path)
    elif isinstance(node, dict):
        for key, child in node.items():
            if key not in NAMED or not isinstance(child, dict):
                yield from _names(child, path)
                continue
            for name, described in child.items():
                full = f"{path}.{name}" if path else str(name)
                yield full
                yield from _names(described, full)


def removals(released: Mapping[str, str], now: Mapping[str, str], announced: str) -> list[str]:
    """One sentence for each name that was released, is gone, and does not stand in backticks in what is announced."""
    return [
        f"{surface}: {name} was released and is gone; bring it back, or write `{name}` under Removed in CHANGELOG.md"
        for surface, text in released.items()
        for name in sorted(names_of(text) - names_of(now[surface]))
        if not any(f"`{part}`" in announced for part in _and_above(name))
    ]


def _and_above(name: str) -> list[str]:
    """A name and those that it lies in: who announces a block announces its fields."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
