"""Greedy evaluation through the same engines and the same reward function as training.

`exactMatch` is the mean of the metric `exact_match` when the reward function gives one, else the share of samples
whose reward is at least 1. Samples without a verdict are counted and named, never taken for wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from polyrl.errors import DeadlineExceeded, RunFailed
from polyrl.sample import Purpose, SamplingParams, Scored
from polyrl.status import StepValue
from polyrl.wire import GroupDropped
from polyrl_trainer.data.buffer import DrawnItem
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.generation.supply import GroupPlan, GroupSupply, StepGroups
from polyrl_trainer.loops.step_metrics import mean_metrics
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.session import Session

log = structlog.get_logger()

EXACT_MATCH: Final = "eval/exact_match"
"""The metric; a share."""
EVALUATION_DEADLINE_S: Final = 600.0
"""Longest wait for the next evaluated samples; as for training."""
SUPPLY_DEADLINE_S: Final = 30.0
"""Longest wait for news of a dropped sample once the manager has nothing more to deliver."""
MAX_TOKENS_PER_ANSWER: Final = 1 << 20
"""Most tokens of one batch of evaluated samples; they are only counted, so a frame's size, about 8 MB, is the bound."""


@dataclass(eq=False)
class Evaluator:
    """Asks every evaluation prompt once."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    rollouts: Rollouts
    supply: GroupSupply
    session: Session

    async def evaluate(self, step: int) -> dict[str, float] | None:
        """Measures the newest published version, and reports and gives the numbers of `step`; None when asked to stop
        meanwhile.

        Raises RunFailed when no sample could be scored or engines lose them again and again, DeadlineExceeded when
        nobody delivers.
        """
        state = self.session.state
        plan = GroupPlan(
            step=state.next_evaluation,
            purpose=Purpose.EVAL,
            samples_per_group=1,
            sampling=self.sampling,
            min_version=state.version,
            max_version=state.version,
            max_replaced=len(self.prompts),
        )
        state.next_evaluation += 1
        await self.rollouts.reserved_window(True)
        groups = self.supply.open(plan, _repeat_infrastructure_losses)
        await groups.submit([DrawnItem(0, index, item=prompt) for index, prompt in enumerate(self.prompts)])
        scored = await self.session.unless_stopped(self._collect(groups))
        await self.supply.close(groups)
        if scored is None:
            return None
        metrics = _metrics(scored, len(self.prompts), groups)
        exact = {StepValue.EXACT_MATCH.value: metrics[EXACT_MATCH]}
        await self.session.report(step, metrics, phase="eval", status_values=exact)
        return metrics

    async def _collect(self, groups: StepGroups) -> list[Scored]:
        scored: list[Scored] = []
        while groups.live:
            batch = await self.rollouts.next(
                groups.plan.step,
                purpose=Purpose.EVAL,
                min_samples=len(groups.live),
                max_samples=len(groups.live),
                max_tokens=MAX_TOKENS_PER_ANSWER,
                deadline_s=max(EVALUATION_DEADLINE_S, self.session.max_manager_outage_s),
            )
            groups.use([one.group for one in batch.samples])
            scored += batch.samples
            await self.rollouts.acknowledge(batch.number)
            if not batch.samples and groups.live and not await groups.change(SUPPLY_DEADLINE_S):
                raise DeadlineExceeded(f"{len(groups.live)} evaluated samples", "the manager", SUPPLY_DEADLINE_S)
        return scored


def _repeat_infrastructure_losses(dropped: GroupDropped, draw: DrawnItem[Prompt]) -> DrawnItem[Prompt] | None:
    return draw if dropped.reason.is_infrastructure else None


def _metrics(scored: Sequence[Scored], submitted: int, groups: StepGroups) -> dict[str, float]:
    if not scored:
        raise RunFailed(f"no evaluation sample could be scored: {groups.reasons()}")
    if len(scored) < submitted:
        log.warning("evaluation is incomplete", scored=len(scored), submitted=submitted, dropped=groups.reasons())
    return {
        **mean_metrics([one.metrics for one in scored], prefix="eval/"),
        EXACT_MATCH: float(np.mean([one.metrics.get("exact_match", float(one.reward >= 1)) for one in scored])),
        "eval/reward": float(np.mean([one.reward for one in scored])),
        "eval/scored": float(len(scored)),
        "eval/unscored": float(submitted - len(scored)),
    }
