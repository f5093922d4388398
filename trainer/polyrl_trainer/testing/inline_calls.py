"""User code called in the test's own process, without a deadline, where what is tested is not the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.frames import describe
from polyrl_trainer.user_code.rewards import CallTimedOut
from polyrl_trainer.user_code.verdicts import Unscored, Verdict, read_admission, read_reward


@dataclass(frozen=True)
class InlineCalls:
    """A function that raises CallTimedOut stands for one that hangs."""

    function: Callable[..., Any]
    whole_groups: bool = False

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> Sequence[Verdict | None]:
        """See `rewards.Calls`."""
        try:
            if self.whole_groups:
                return [read_admission(self.function(list(samples)))]
            name = getattr(self.function, "__name__", "the reward")
            return [read_reward(self.function(sample), name) for sample in samples]
        except CallTimedOut:
            raise
        except Exception as error:  # noqa: BLE001 - whatever user code raises discards its sample
            raised = Unscored(DiscardReason.REWARD_RAISED, describe(error))
            return [raised] * (1 if self.whole_groups else len(samples))
