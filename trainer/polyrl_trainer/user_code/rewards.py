"""What a sample is worth: asks the user's reward function, and the group filter beside it, in their workers.

The reward function gets a `Sample` and returns a number, or a dict with `reward` and further named numbers for the log
(`exact_match` among them feeds evaluation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.together import Alone, Judge, Together
from polyrl_trainer.user_code.verdicts import Reward, Unscored, Verdict

log = structlog.get_logger()


class CallTimedOut(Exception):
    """The call outlived its deadline and was ended."""


class Calls(Protocol):
    """Calls one function of the user's; the port behind which worker processes stand (see `pool`)."""

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> Sequence[Verdict | None]:
        """Calls the function: one result for each sample. A group filter gives one for all, None where the group may
        train. Raises CallTimedOut, and RunFailed when no worker can be had."""


@dataclass(eq=False)
class RewardFunction:
    """The user's function behind its deadline, with a count of every failure.

    >>> import asyncio
    >>> import numpy as np
    >>> from polyrl_trainer.testing.inline_calls import InlineCalls
    >>> def reward(sample):
    ...     right = sample.response == sample.metadata["answer"]
    ...     return {"reward": float(right), "exact_match": right}
    >>> tokens, mask = np.array([1, 2]), np.array([0, 1], np.float32)
    >>> sample = Sample(tokens, mask, prompt_length=1, prompt="2+2=", response="4", metadata={"answer": "4"})
    >>> asyncio.run(RewardFunction(InlineCalls(reward), timeout_s=60).score(sample))
    Reward(value=1.0, metrics={'exact_match': 1.0})
    """

    calls: Calls
    timeout_s: float
    failures: Failures = field(default_factory=lambda: Failures({}, {}))
    together: Callable[[Judge], Together] = Alone
    """Which samples go to it in one call."""
    _collected: Together = field(init=False)

    def __post_init__(self) -> None:
        self._collected = self.together(self._judge)

    async def score(self, sample: Sample, n: int = 1) -> Verdict:
        """The verdict on a sample, one of its prompt's `n`. Raises RunFailed when no worker can be had (see `pool`),
        and nothing else."""
        verdict = await self._collected.verdict(sample, n)
        if isinstance(verdict, Unscored):
            self.failures.add(sample.id, verdict)
        return verdict

    def forget(self, group: int) -> None:
        """The group is over."""
        self._collected.forget(group)

    async def _judge(self, samples: Sequence[Sample]) -> Sequence[Verdict]:
        try:
            verdicts = await self.calls.call(samples, self.timeout_s)
        except CallTimedOut:
            late = Unscored(DiscardReason.REWARD_TIMED_OUT, f"no reward within {self.timeout_s:g} s")
            return [late] * len(samples)
        return [verdict for verdict in verdicts if verdict is not None]


@dataclass(eq=False)
class Failures:
    """Failures of user code by reason, and each reason's first message, which is logged; kept in the caller's dicts."""

    counts: dict[str, int]
    first: dict[str, str]

    def add(self, sample: str, unscored: Unscored) -> None:
        """One more."""
        reason = unscored.reason.value
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if reason not in self.first:
            self.first[reason] = unscored.detail
            log.warning("sample discarded", sample=sample, reason=unscored.reason.value, detail=unscored.detail)


@dataclass(frozen=True)
class ScoredTurn:
    """A sample that has its reward, and the turn it ended with."""

    sample: Sample
    turn: int
    reward: Reward


@dataclass(eq=False)
class CustomGroupFilter:
    """`groupFilter: custom`: holds a group's rewards back until all are there, and lets the user's function decide.

    The function gets the group's samples with their rewards, and returns whether the group may train. User code runs
    beside the trainer only, so this one filter sits here; the built-in ones are the ledger's.
    """

    calls: Calls
    timeout_s: float
    samples_per_group: int
    _groups: dict[int, list[ScoredTurn]] = field(default_factory=dict)

    async def admit(self, scored: ScoredTurn) -> list[ScoredTurn] | Unscored:
        """The scores that may go out now: none until the group is whole, then all; or why the group may not train."""
        group = self._groups.setdefault(scored.sample.group, [])
        group.append(scored)
        if len(group) < self.samples_per_group:
            return []
        self.forget(scored.sample.group)
        return await self._refusal([replace(turn.sample, reward=turn.reward.value) for turn in group]) or group

    def forget(self, group: int) -> None:
        """The group is over."""
        self._groups.pop(group, None)

    async def _refusal(self, samples: list[Sample]) -> Unscored | None:
        try:
            (verdict,) = await self.calls.call(samples, self.timeout_s)
        except CallTimedOut:
            detail = f"filterFunction gave no answer within {self.timeout_s:g} s"
            return Unscored(DiscardReason.REWARD_TIMED_OUT, detail)
        assert not isinstance(verdict, Reward), "a filter gives no reward"
        if verdict is not None and verdict.reason is DiscardReason.REWARD_RAISED:
            return replace(verdict, detail=f"filterFunction: {verdict.detail}")
        return verdict
