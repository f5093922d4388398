"""`groupFilter: custom`: holds a group's rewards back until all are there, and lets the user's function decide.

The function gets the group's samples with their rewards, and returns whether the group may train. User code runs in
the trainer only, so this one filter sits here; the built-in ones are the ledger's.
Refuses to hold: threads (see `user_calls`). Read next: `loop_host`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from polyrl.errors import RunFailed
from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.calls import CallTimedOut, UserCalls
from polyrl_trainer.user_code.rewards import Reward, Unscored


@dataclass(frozen=True)
class ScoredTurn:
    """A sample that has its reward, and the turn it ended with."""

    sample: Sample
    turn: int
    reward: Reward


@dataclass
class _Group:
    judged: list[ScoredTurn] = field(default_factory=list)


class CustomGroupFilter:
    """One per run."""

    def __init__(
        self, function: Callable[[list[Sample]], Any], calls: UserCalls, timeout_s: float, samples_per_group: int
    ) -> None:
        self._function = function
        self._calls = calls
        self._timeout_s = timeout_s
        self._samples_per_group = samples_per_group
        self._groups: dict[int, _Group] = {}

    async def judge(self, judged: ScoredTurn) -> list[ScoredTurn] | Unscored:
        """The scores that may go out now: none until the group is whole, then all; or why the group may not train."""
        group = self._groups.setdefault(judged.sample.group, _Group())
        group.judged.append(judged)
        if len(group.judged) < self._samples_per_group:
            return []
        self.forget(judged.sample.group)
        refusal = await self._ask([replace(one.sample, reward=one.reward.value) for one in group.judged])
        return refusal or group.judged

    def forget(self, group: int) -> None:
        """The group is over."""
        self._groups.pop(group, None)

    async def _ask(self, samples: list[Sample]) -> Unscored | None:
        try:
            wanted = await self._calls.call(self._function, samples, timeout=self._timeout_s)
        except CallTimedOut:
            return Unscored(
                DiscardReason.REWARD_TIMED_OUT, f"filterFunction gave no answer within {self._timeout_s:g} s"
            )
        except RunFailed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever user code raises discards its group
            return Unscored(DiscardReason.REWARD_RAISED, f"filterFunction: {type(error).__name__}: {error}")
        if not isinstance(wanted, bool):
            return Unscored(
                DiscardReason.REWARD_INVALID, f"filterFunction must return True or False, got {wanted!r:.80}"
            )
        return None if wanted else Unscored(DiscardReason.FILTERED, "filterFunction said no")
