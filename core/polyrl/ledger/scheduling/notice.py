"""How much of a notice an engine generates in: the end of it belongs to the last tokens and the goodbye.

Known to both sides: the ledger plans what can be finished by it, the agent stops by it.
"""

from __future__ import annotations

from typing import Final

RESERVE_S: Final = 2.0
"""The end of a drain in which the agent no longer generates: last tokens and goodbye travel."""

RESERVE_SHARE: Final = 0.25
"""The same for a short notice, as a share of it."""


def reserve_of(notice_s: float) -> float:
    """Seconds of a notice in which the agent no longer generates."""
    return min(RESERVE_S, RESERVE_SHARE * max(0.0, notice_s))
