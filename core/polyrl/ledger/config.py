"""What a run may choose about its ledger; every number with its unit and its reason."""

from __future__ import annotations

from typing import Final

import msgspec

ENGINES_OWN: Final = 8
"""Tokens of a context that engines may keep for themselves, as SGLang does."""


class LedgerConfig(msgspec.Struct, frozen=True):
    """Constant for a run epoch."""

    run_epoch: int
    """Peers that greet with another one are fenced."""
    journal: str = ""
    """Names the journal that keeps this ledger: trainers learn by it that an earlier one is lost."""
    lease_s: float = 3.0
    """Silence after which an engine gets no new work, and loses what would gain by it: three missed heartbeats, so one
    may be lost or late."""
    lost_s: float = 15.0
    """Silence after which it is gone, and all that it ran is moved: most stalls of a network are over by then."""
    return_s: float = 10.0
    """Silence after our own restart that is an engine's first: agents dial anew every two seconds at the slowest."""
    beat_s: float = 1.0
    """Longest silence of a healthy agent."""
    delta_s: float = 0.03
    """How long agents gather tokens: ten frames of a 300 tokens/s stream, and no one sees the delay."""
    progress_deadline_s: float = 30.0
    """No token for that long moves the sample: above the prefill of a 32k prompt on a busy engine."""
    group_filter: str = "none"
    """A `manifest.parts.algorithm.GroupFilter` value; `custom` is decided by the trainer, through Reject."""
    max_rejections: int = 3
    """Engines that must call a sample impossible before it is believed: one broken engine must not decide."""
    refusal_deadline_s: float = 300.0
    """Where fewer may serve it, how long after the first refusal theirs are believed: another engine has come."""
    turn_resend_s: float = 10.0
    """First repetition of an unanswered TurnDone; doubles each time. Rewards mostly take less."""
    turn_resend_max_s: float = 60.0
    """Longest pause between repetitions."""
    verdict_deadline_s: float = 3600.0
    """Longest wait for a verdict of a trainer that lives; then the group is discarded as rewardTimedOut. Far above any
    reward's own timeout: a custom filter holds verdicts back until the slowest sibling is done."""
    kept_tokens: int = 32_000_000
    """Acknowledged tokens that are kept for a trainer that may go back to its checkpoint: a quarter of a gigabyte.
    Above it the oldest batches are released early, and would have to be generated again."""
    backlog_tokens: int = 64_000_000
    """Finished training tokens that may wait for the trainer before later steps stop generating: half a gigabyte."""
    gap_resend_s: float = 1.0
    """Pause before the same gap is asked for again: several round trips."""
    suspect_s: float = 1.0
    """First pause of an engine that failed; doubles with each failure in a row."""
    suspect_max_s: float = 60.0
    """Longest such pause: a replaced device should not wait longer to prove itself."""
    weights_retry_s: float = 5.0
    """Pause before a version is announced again to an engine that could not load it."""
    max_running: int = 65_536
    """Most that an engine gets at once, whatever it says that it can take; `rollout.engine.maxRunning`."""
    max_context: int = 16_777_216
    """Longest that an engine's context counts for, whatever it says; `rollout.engine.maxContext`."""

    def allowed_context(self, positions: int) -> int:
        """Tokens that every engine of the run must be able to hold: what the manifest asks for and a model of so many
        positions has, less what an engine keeps for itself; 0 while the model is not known."""
        return max(0, min(self.max_context, positions - ENGINES_OWN))

    @property
    def gone_s(self) -> float:
        """`lost_s`, and never less than a lease."""
        return max(self.lease_s, self.lost_s)
