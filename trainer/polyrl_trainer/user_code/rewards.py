"""What a sample is worth: calls the user's reward function, and the group filter beside it, and reads what they give.

The reward function gets a `Sample` and returns a number, or a dict with `reward` and further named numbers for the log
(`exact_match` among them feeds evaluation). Anything else is `Unscored` with its typed reason, and never becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog

from polyrl import wire
from polyrl.errors import RunFailed
from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample
from polyrl_trainer.sample_log.texts import MAX_NAME_CHARS, readable
from polyrl_trainer.user_code.calls import CallTimedOut, UserCalls
from polyrl_trainer.user_code.frames import describe

log = structlog.get_logger()


@dataclass(frozen=True)
class Reward:
    """A finite number, and named finite numbers beside it."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Unscored:
    """No reward can be had, and why."""

    reason: DiscardReason
    detail: str


Verdict = Reward | Unscored


@dataclass(eq=False)
class RewardFunction:
    """The user's function behind its deadline, with a count of every failure.

    >>> import asyncio
    >>> def reward(sample):
    ...     right = sample.response == sample.metadata["answer"]
    ...     return {"reward": float(right), "exact_match": right}
    >>> tokens, mask = np.array([1, 2]), np.array([0, 1], np.float32)
    >>> sample = Sample(tokens, mask, prompt_length=1, prompt="2+2=", response="4", metadata={"answer": "4"})
    >>> async def main():
    ...     return await RewardFunction(reward, UserCalls(max_concurrency=8), timeout_s=60).score(sample)
    >>> asyncio.run(main())
    Reward(value=1.0, metrics={'exact_match': 1.0})
    """

    function: Callable[[Sample], Any]
    calls: UserCalls
    timeout_s: float
    failures: Failures = field(default_factory=lambda: Failures({}, {}))

    async def score(self, sample: Sample) -> Verdict:
        """Raises RunFailed when too many calls hang (see `calls`), and nothing else."""
        try:
            returned = await self.calls.call(self.function, sample, timeout=self.timeout_s)
            verdict = read_reward(returned, getattr(self.function, "__name__", "the reward"))
        except CallTimedOut:
            verdict = Unscored(DiscardReason.REWARD_TIMED_OUT, f"no reward within {self.timeout_s:g} s")
        except RunFailed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever user code raises discards its sample
            verdict = Unscored(DiscardReason.REWARD_RAISED, describe(error))
        if isinstance(verdict, Unscored):
            self.failures.add(sample.id, verdict)
        return verdict


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


def read_reward(result: object, function: str = "the reward") -> Verdict:
    """A number or a dict with `reward`; anything else is REWARD_INVALID."""
    named = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in named:
        names = readable(str(sorted(map(str, named))), MAX_NAME_CHARS)
        return Unscored(DiscardReason.REWARD_INVALID, f"the dict has no `reward`, only {names}")
    numbers: dict[str, float] = {}
    for name, value in named.items():
        if not isinstance(name, str) or not name.strip() or not _has_utf8(name):
            shown = readable(ascii(name), MAX_NAME_CHARS)
            detail = f"{function} names a number {shown}; a name is text that is not empty and has a form in UTF-8"
            return Unscored(DiscardReason.REWARD_INVALID, detail)
        number = _finite(value)
        if number is None:
            shown = readable(name, MAX_NAME_CHARS)
            return Unscored(DiscardReason.REWARD_INVALID, f"`{shown}` must be a finite number, got {value!r:.80}")
        numbers[name] = number
    value = numbers.pop("reward")
    excess = wire.excess_of_metrics(numbers)
    if excess:
        return Unscored(DiscardReason.REWARD_INVALID, f"the numbers that {function} names beside `reward` {excess}")
    return Reward(value, numbers)


def _has_utf8(text: str) -> bool:
    """False with half a surrogate pair, which Python allows and no file or wire does."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _finite(value: object) -> float | None:
    """Python's, numpy's and torch's numbers alike; None for what is none."""
    if not isinstance(value, bool | int | float | np.number | np.bool_) and callable(getattr(value, "item", None)):
        try:
            value = value.item()  # type: ignore[attr-defined] # A zero-dimensional tensor or array.
        except (ValueError, RuntimeError, TypeError):
            return None
    if not isinstance(value, bool | int | float | np.number | np.bool_) or isinstance(value, np.complexfloating):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class ScoredTurn:
    """A sample that has its reward, and the turn it ended with."""

    sample: Sample
    turn: int
    reward: Reward


@dataclass(eq=False)
class CustomGroupFilter:
    """`groupFilter: custom`: holds a group's rewards back until all are there, and lets the user's function decide.

    The function gets the group's samples with their rewards, and returns whether the group may train. User code runs in
    the trainer only, so this one filter sits here; the built-in ones are the ledger's.
    """

    function: Callable[[list[Sample]], Any]
    calls: UserCalls
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
        refusal = await self._refusal([replace(turn.sample, reward=turn.reward.value) for turn in group])
        return refusal or group

    def forget(self, group: int) -> None:
        """The group is over."""
        self._groups.pop(group, None)

    async def _refusal(self, samples: list[Sample]) -> Unscored | None:
        try:
            wanted = await self.calls.call(self.function, samples, timeout=self.timeout_s)
        except CallTimedOut:
            detail = f"filterFunction gave no answer within {self.timeout_s:g} s"
            return Unscored(DiscardReason.REWARD_TIMED_OUT, detail)
        except RunFailed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever user code raises discards its group
            return Unscored(DiscardReason.REWARD_RAISED, f"filterFunction: {describe(error)}")
        if not isinstance(wanted, bool):
            detail = f"filterFunction must return True or False, got {wanted!r:.80}"
            return Unscored(DiscardReason.REWARD_INVALID, detail)
        return None if wanted else Unscored(DiscardReason.FILTERED, "filterFunction returned False")
