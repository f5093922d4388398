"""What a group must be to be taken on: the checks that no later rule has to repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from polyrl.sample import Group

MAX_SAMPLES: Final = 4096
"""Samples of one group; four times what the manifest allows."""


def submission_fault(groups: Sequence[Group]) -> str | None:
    """The first fault as a sentence, or None."""
    for group in groups:
        fault = _group_fault(group)
        if fault is not None:
            return f"group {group.id}: {fault}"
    return None


def _group_fault(group: Group) -> str | None:
    if group.id < 0:
        return "its number must not be negative"
    if not 1 <= group.n <= MAX_SAMPLES:
        return f"n is {group.n}, not in 1 .. {MAX_SAMPLES}"
    if not group.prompt_ids or len(group.prompt_ids) % 4:
        return "the prompt must be one or more whole uint32 tokens"
    if group.sampling.max_new_tokens < 1:
        return f"max_new_tokens is {group.sampling.max_new_tokens}, less than 1"
    if not 0 <= group.min_version <= group.max_version:
        return f"versions {group.min_version} to {group.max_version} are no range of published versions"
    return None
