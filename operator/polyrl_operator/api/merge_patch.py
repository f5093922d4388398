"""The JSON merge patch (RFC 7386) that turns one value into another. Refuses to hold: which values (see `worker`)."""

from __future__ import annotations

from typing import Any


def merge_patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What to send so that `old` becomes `new`; empty when they are the same. `new` may hold no null."""
    patch: dict[str, Any] = {key: None for key in old.keys() - new.keys()}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif isinstance(value, dict) and isinstance(old[key], dict):
            inner = merge_patch(old[key], value)
            if inner:
                patch[key] = inner
        elif value != old[key]:
            patch[key] = value
    return patch
