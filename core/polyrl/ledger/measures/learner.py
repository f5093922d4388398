"""What the ledger knows of the learner: whether it learns now, how fast, and whether beside engines."""

from __future__ import annotations

from math import inf

import msgspec

from polyrl.ledger.measures.rests import RestSeconds


class LearnerState(msgspec.Struct):
    """What the trainer does with what it gets; its devices are those of the reserved engines."""

    busy_since: float = inf
    """Since when it learns what was delivered; inf: it waits for more, or has nothing."""
    tokens: int = 0
    """Prompt and response tokens delivered since."""
    token_s: float = 0.0
    """Seconds per token to learn; 0: not measured."""
    group_tokens: float = 0.0
    """Mean tokens of a group that was delivered."""
    held_until: float = -inf
    """Until then a batch is held back, see `scheduling.window`."""
    alone: bool = False
    """What it learns needs the devices alone; and how long engines there take to sleep and to wake."""
    rests: RestSeconds = msgspec.field(default_factory=RestSeconds)
