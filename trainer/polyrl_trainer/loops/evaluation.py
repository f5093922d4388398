"""Greedy evaluation through the same engines and the same reward function as training.

It measures what the reward function says: the mean reward, and the mean of each number that it names, `exact_match` if
it is among them. Samples without a verdict are counted and named, never taken for wrong.
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
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.generation.from_wire import to_sample
from polyrl_trainer.generation.supply import GroupPlan, GroupSupply, StepGroups
from polyrl_trainer.loops.step_metrics import mean_metrics
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.session import Session

log = structlog.get_logger()

PREFIX: Final = "eval/"
"""Of the metrics' names."""
EXACT_MATCH: Final = f"{PREFIX}exact_match"
"""The metric; a share. There if the reward function gives it."""
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
    tokenizer: Tokenizer
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
        groups = self.supply.open(plan, _repeat_infrastructure_losses)
        await groups.submit([DrawnItem(0, index, item=prompt) for index, prompt in enumerate(self.prompts)])
        answered = await self.session.unless_stopped(self._collect(groups))
        await self.supply.close(groups)
        if answered is None:
            return None
        self._record(answered)
        scored = [one for one, _ in answered]
        metrics = _metrics(scored, len(self.prompts), groups)
        exact = {StepValue.EXACT_MATCH.value: metrics[EXACT_MATCH]} if EXACT_MATCH in metrics else {}
        await self.session.report(step, metrics, phase="eval", status_values=exact)
        return metrics

    def _record(self, answered: Sequence[tuple[Scored, Prompt]]) -> None:
        if self.session.keeps(Purpose.EVAL):
            answered = sorted(answered, key=lambda pair: pair[0].group)
            samples = [
                to_sample(one.group, one.index, one.response, prompt, self.tokenizer, one.reward)
                for one, prompt in answered
            ]
            self.session.record(Purpose.EVAL, samples, [one for one, _ in answered])

    async def _collect(self, groups: StepGroups) -> list[tuple[Scored, Prompt]]:
        answered: list[tuple[Scored, Prompt]] = []
        while groups.live:
            batch = await self.rollouts.next(
                groups.plan.step,
                purpose=Purpose.EVAL,
                min_samples=len(groups.live),
                max_samples=len(groups.live),
                max_tokens=MAX_TOKENS_PER_ANSWER,
                deadline_s=max(EVALUATION_DEADLINE_S, self.session.max_manager_outage_s),
            )
            answered += [(one, groups.prompt_of(one.group)) for one in batch.samples]
            groups.use([one.group for one in batch.samples])
            await self.rollouts.acknowledge(batch.number)
            if not batch.samples and groups.live and not await groups.change(SUPPLY_DEADLINE_S):
                raise DeadlineExceeded(f"{len(groups.live)} evaluated samples", "the manager", SUPPLY_DEADLINE_S)
        return answered


def _repeat_infrastructure_losses(dropped: GroupDropped, draw: DrawnItem[Prompt]) -> DrawnItem[Prompt] | None:
    return draw if dropped.reason.is_infrastructure else None


def _metrics(scored: Sequence[Scored], submitted: int, groups: StepGroups) -> dict[str, float]:
    if not scored:
        raise RunFailed(f"no evaluation sample could be scored: {groups.reasons()}")
    if len(scored) < submitted:
        log.warning("evaluation is incomplete", scored=len(scored), submitted=submitted, dropped=groups.reasons())
    return {
        **mean_metrics([one.metrics for one in scored], prefix=PREFIX),
        "eval/reward": float(np.mean([one.reward for one in scored])),
        "eval/scored": float(len(scored)),
        "eval/unscored": float(submitted - len(scored)),
    }
