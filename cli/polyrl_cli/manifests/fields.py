"""Which fields exist, and which one a misspelt path probably means. Holds no list: the schema knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from polyrl.manifest.schema.crd import OPEN, Schema, manifest_schema
from polyrl_cli.manifests.yaml_source import FieldPath, path_text

CLOSE_ENOUGH: Final = 0.6
"""difflib's own default; lower suggests fields that nobody meant."""

MAX_LISTED: Final = 12
"""Names listed when nothing is close; more is no help."""


def node_at(path: FieldPath) -> Schema | None:
    """Schema of the field, {} inside an open object, None when there is no such field."""
    node = manifest_schema()
    for key in path:
        child = node.get("items") if isinstance(key, int) else node.get("properties", {}).get(key)
        if child is None:
            return {} if OPEN in node or node == {} else None
        node = child
    return node


def unknown_field(path: FieldPath) -> tuple[str, FieldPath | None]:
    """Sentence for a field that does not exist, and the field that was probably meant."""
    meant = _meant(path)
    if meant is not None:
        said = str(meant[-1]) if meant[:-1] == path[:-1] else path_text(meant)
        return f"unknown field; did you mean {said}?", meant
    siblings = sorted((node_at(path[:-1]) or {}).get("properties", {}))
    listed = ", ".join(siblings[:MAX_LISTED]) + (", ..." if len(siblings) > MAX_LISTED else "")
    return (f"unknown field; known here: {listed}" if siblings else "unknown field; nothing stands below this"), None


def _meant(path: FieldPath) -> FieldPath | None:
    parent, name = path[:-1], str(path[-1])
    siblings = (node_at(parent) or {}).get("properties", {})
    plain = {key.lower(): key for key in siblings}
    close = difflib.get_close_matches(name.lower().replace("_", ""), plain, n=1, cutoff=CLOSE_ENOUGH)
    if close:
        return (*parent, plain[close[0]])
    elsewhere = [known for known in _all_fields(manifest_schema(), ()) if known[-1] == name and known[0] != "status"]
    # The one nearest to the top is the one people mean; two at the same depth are a guess.
    nearest = [known for known in elsewhere if len(known) == min(map(len, elsewhere))]
    return nearest[0] if len(nearest) == 1 else None


def _all_fields(node: Schema, path: FieldPath) -> Iterator[FieldPath]:
    for name, child in node.get("properties", {}).items():
        yield (*path, name)
        yield from _all_fields(child, (*path, name))
