"""`--set path=value`: one field changed from the command line, after reading and before checking."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from polyrl.errors import InvalidManifest
from polyrl_cli.manifests.messages import node_at, unknown_field
from polyrl_cli.manifests.yaml_source import FieldPath, ManifestSource, parse, path_text

_STEP: Final = re.compile(r"(?:^|\.)([A-Za-z_][A-Za-z0-9_]*)|\[([0-9]{1,4})\]")


def own_overrides(seed: int | None, name: str | None) -> list[str]:
    """Those that have a flag of their own, as `--set` would write them."""
    seeds = [] if seed is None else [f"spec.recipe.seed={seed}"]
    return seeds if name is None else [*seeds, f"metadata.name={name}"]


def apply_overrides(source: ManifestSource, sets: Sequence[str]) -> None:
    """Writes each override into the source's data, in order. Raises InvalidManifest with all that cannot be applied."""
    faults = [fault for text in sets if (fault := _apply(source, text)) is not None]
    if faults:
        raise InvalidManifest(faults)


def _apply(source: ManifestSource, text: str) -> str | None:
    written, equals, given = text.partition("=")
    steps = list(_STEP.finditer(written))
    if not equals or not steps or "".join(step[0] for step in steps) != written:
        return f"--set {text}: write a path and a value, as spec.rollout.maxReplicas=4"
    path: FieldPath = tuple(step[1] or int(step[2]) for step in steps)
    if node_at(path) is None:
        return f"--set {written}: {unknown_field(path)[0]}"
    try:
        value = parse(given, f"--set {written}").data
    except InvalidManifest:
        return f"--set {written}: {given!r} is not valid YAML"
    fault = _write(source.data, path, value)
    if fault is None:
        source.overridden.add(path)
    return f"--set {written}: {fault}" if fault else None


def _write(data: Any, path: FieldPath, value: Any) -> str | None:
    """Puts the value at the path, making what is missing on the way; the fault as a sentence, or None."""
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        empty: Any = [] if not last and isinstance(path[depth + 1], int) else {}
        if isinstance(key, int):
            if not isinstance(data, list) or key > len(data):
                found = f"has {len(data)} entries" if isinstance(data, list) else "is no list"
                return f"{path_text(path[:depth])} {found}"
            if key == len(data):
                data.append(empty)
        elif not isinstance(data, dict):
            return f"{path_text(path[:depth])} has no fields"
        elif data.get(key) is None:
            data[key] = empty
        if last:
            data[key] = value
        data = data[key]
    return None
