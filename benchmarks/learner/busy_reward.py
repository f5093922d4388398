"""A reward that computes: what a verifier, a parser or a sandbox does to a core."""

from __future__ import annotations

import time
from typing import Any, Final

CPU_S: Final = 0.1
"""Of one call."""


def score(sample: Any) -> float:
    """Takes its time from the core, not from the clock."""
    ends = time.process_time() + CPU_S
    while time.process_time() < ends:
        sum(range(1000))
    return 1.0
