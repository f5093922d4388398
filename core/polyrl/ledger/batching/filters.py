"""Which complete groups may train. `custom` passes everything here: the trainer decides it, and says so through Reject.

Refuses to hold: what happens to a group that fails (see `trainer`).
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrl.manifest.recipe import GroupFilter


def passes(group_filter: str, rewards: Sequence[float]) -> bool:
    """Whether a training group with these rewards passes. Dynamic sampling is DAPO's (Yu et al. 2025)."""
    if group_filter == GroupFilter.ANY_SUCCESS:
        return any(reward > 0 for reward in rewards)
    if group_filter == GroupFilter.NONZERO_SPREAD:
        return min(rewards) != max(rewards)
    return True
