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

    def give_back(self, tokens: int, *, has_more: bool) -> None:
        """A batch of so many tokens is not learned; where it has no other one, nothing is, and nothing is measured."""
        self.tokens = max(0, self.tokens - tokens)
        if not has_more:
            self.busy_since, self.tokens, self.alone = inf, 0, False
