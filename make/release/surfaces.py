"""Names that users write into their files, commands and programs, read from what describes them. Pure.

A name that a released version had may only go if the changelog says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

COMMANDS = "docs/reference/cli.md"
SURFACES = (
    "crds/polyrljobs.yaml",
    "charts/polyrl/values.schema.json",
    "docs/reference/manager-api.json",
    "docs/reference/python.md",
    COMMANDS,
)
"""Fields of the manifest, values of the chart, requests and fields of the manager's HTTP API, public names of Python,
commands with their flags. All but the list of Python's names are generated from the code."""
NAMED = {"properties", "schemas", "paths"}
"""Keys of a schema whose own keys are names that somebody chose."""


def names_of(surface: str, text: str) -> set[str]:
    """As a user would write them: dotted, with `=` before one of a few values, or a command with its flag."""
    if surface == COMMANDS:
        return set(_flags(text))
    if surface.endswith(".md"):
        return set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    return set(_names(yaml.safe_load(text), ""))


def _flags(page: str) -> Iterator[str]:
    """Each command, and each of its flags after it."""
    command = "polyrl"
    for heading, option in re.findall(r"^(?:## `(polyrl [\w-]+)`|\* `(-[^`]*)`)", page, re.MULTILINE):
        command = heading or command
        yield from [heading] if heading else (f"{command} {flag}" for flag in re.findall(r"--[a-z][\w-]*", option))


def _names(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, list):
        for each in node:
            yield from _names(each, path)
    elif isinstance(node, dict):
        for key, child in node.items():
            if key == "enum" and isinstance(child, list):
                yield from (f"{path}={value}" for value in child)
            elif key not in NAMED or not isinstance(child, dict):
                yield from _names(child, path)
            else:
                yield from _of_chosen(child, path)


def _of_chosen(described: dict[str, Any], path: str) -> Iterator[str]:
    for name, child in described.items():
        full = f"{path}.{name}" if path else str(name)
        yield full
        yield from _names(child, full)


def removals(released: Mapping[str, str], now: Mapping[str, str], announced: str) -> list[str]:
    """One sentence for each name that was released, is gone, and does not stand in backticks in what is announced.

    Who announces that a whole block went announces its fields, and one sentence is enough for it.
    """
    found = []
    for surface, text in released.items():
        gone = names_of(surface, text) - names_of(surface, now.get(surface, ""))
        for name in sorted(gone):
            above = gone.intersection(_and_above(name))
            if not any(f"`{one}`" in announced for one in above) and above == {name}:
                found.append(
                    f"{surface}: {name} was released and is gone; bring it back, or write `{name}` under Removed in"
                    " CHANGELOG.md"
                )
    return found


def _and_above(name: str) -> list[str]:
    """A name and those that it lies in."""
    parts = re.split(r"(?=[. =])", name)
    return ["".join(parts[:count]) for count in range(1, len(parts) + 1)]
