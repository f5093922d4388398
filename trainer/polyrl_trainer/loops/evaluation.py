"""Evaluation through the same engines as training, of one set of rows or several, by the recipe's reward function or a
set's own.

It measures what the reward function says: the mean reward, and the mean of each number that it names, `exact_match` if
it is among them; with several answers to a prompt also pass@k, and maj@k where it says what each answers. Samples
without a verdict are counted and named, never taken for wrong. All sets are submitted before the first is awaited, so
that one set's last long answers run beside the next set's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
from msgspec.structs import replace

from polyrl.errors import DeadlineExceeded, RunFailed
from polyrl.manifest.data import EvaluationSampling
from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import Finish, Purpose, SamplingParams, Scored
from polyrl.status import StepValue
from polyrl.wire import GroupDropped
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.data.buffer import DrawnItem
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.generation.from_wire import finish_of, scored_sample, with_unpaid_turns
from polyrl_trainer.generation.shared_devices import SharedDevices, not_shared
from polyrl_trainer.generation.stops import up_to_stop
from polyrl_trainer.generation.supply import GroupPlan, GroupSupply, StepGroups
from polyrl_trainer.loops import pass_rates
from polyrl_trainer.loops.deadline import longest_wait_s
from polyrl_trainer.loops.step_metrics import mean_metrics
from polyrl_trainer.preparation import EvaluationPrompts, spelled_stops, stop_token_ids
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.sample import ANSWER_HASH
from polyrl_trainer.session import Session
from polyrl_trainer.weights.policy_versions import PolicyVersions

log = structlog.get_logger()

PREFIX: Final = "eval/"
"""What the metrics' names begin with."""
EXACT_MATCH: Final = f"{PREFIX}{pass_rates.MATCH}"
"""The metric; a share. There if the reward function gives it."""
SUPPLY_DEADLINE_S: Final = 30.0
"""Longest wait for news of a dropped sample once the manager has nothing more to deliver."""
MAX_TOKENS_PER_ANSWER: Final = 1 << 20
"""Most tokens of one batch of evaluated samples; they are only counted, so a frame's size, about 8 MB, is the bound."""

Answered = list[tuple[Scored, Prompt]]


@dataclass(frozen=True)
class EvaluationGroups:
    """One set that is being answered."""

    rows: EvaluationPrompts
    groups: StepGroups

    @property
    def missing(self) -> int:
        """Samples."""
        return len(self.groups.live) * self.groups.plan.samples_per_group


@dataclass(eq=False)
class Evaluator:
    """Asks the prompts of every set."""

    sets: Sequence[EvaluationPrompts]
    recipe: RecipeSpec
    tokenizer: Tokenizer
    rollouts: Rollouts
    supply: GroupSupply
    session: Session

    async def evaluate_if_due(
        self, every: int, versions: PolicyVersions, backend: TrainingBackend, *, learns_on: SharedDevices | None = None
    ) -> None:
        """After each `every` steps of a stage (0: never), but not at its end, which is evaluated anyway. `learns_on` as
        of `evaluate`."""
        state = self.session.state
        is_due = bool(every) and state.step % every == 0 and not state.stage_done and not self.session.stop.is_set()
        if is_due:
            await versions.ensure_published(backend)
            await self.evaluate(state.step, learns_on=learns_on)

    async def make_up(
        self, every: int, versions: PolicyVersions, backend: TrainingBackend, *, learns_on: SharedDevices | None = None
    ) -> None:
        """Where a run goes on: the evaluation that was due after its newest step, if that step is the last that this
        run's folder knows. It follows the step's checkpoint, and whoever began it ended before it had its numbers."""
        state = self.session.state
        if self.session.metrics.newest == (state.stage.value, state.step) and not state.trained_groups:
            await self.evaluate_if_due(every, versions, backend, learns_on=learns_on)

    async def evaluate(self, step: int, *, learns_on: SharedDevices | None = None) -> dict[str, float] | None:
        """Measures the newest published version, and reports and gives the numbers of `step`; None when asked to stop
        meanwhile. `learns_on`: devices on which rows of a file are learned next, so that engines there are to sleep
        with the last answer where there is no room; None where more is generated next, or nothing is learned.

        Raises RunFailed when no sample of a set could be scored or engines lose them again and again, DeadlineExceeded
        when nobody delivers.
        """
        asked = [await self._submit(rows) for rows in self.sets]
        metrics: dict[str, float] = {}
        everything: Answered = []
        for one in asked:
            devices = learns_on if learns_on is not None and one is asked[-1] else not_shared()
            answered = await self.session.unless_stopped(self._collect(one, devices))
            if answered is None:
                break
            metrics |= self._measure(one, [scored for scored, _ in answered])
            everything += answered
        for one in asked:
            await self.supply.close(one.groups)
        if answered is None:
            return None
        self._record(everything)
        exact = {StepValue.EXACT_MATCH.value: metrics[EXACT_MATCH]} if EXACT_MATCH in metrics else {}
        await self.session.report(step, metrics, phase="eval", status_values=exact)
        return metrics

    async def _submit(self, rows: EvaluationPrompts) -> EvaluationGroups:
        state = self.session.state
        plan = GroupPlan(
            step=state.next_evaluation,
            purpose=Purpose.EVAL,
            samples_per_group=rows.sampling.samples_per_prompt,
            sampling=evaluation_sampling(rows.sampling, self.recipe, self.tokenizer),
            min_version=state.version,
            max_version=state.version,
            max_replaced=len(rows.prompts),
        )
        state.next_evaluation += 1
        groups = self.supply.open(plan, _repeat_infrastructure_losses)
        await groups.submit([DrawnItem(0, index, item=prompt) for index, prompt in enumerate(rows.prompts)])
        await self.supply.give_up_adopted(plan)
        return EvaluationGroups(rows, groups)

    async def _collect(self, asked: EvaluationGroups, devices: SharedDevices) -> Answered:
        answered: Answered = []
        groups = asked.groups
        plan = groups.plan
        own = [one.reward for one in self.recipe.evaluation.sets if one.name == asked.rows.name]
        judge_s = max((reward.timeout_seconds for reward in own if reward is not None), default=0)
        speed, longest = self.session.sequence_tokens_per_s, plan.sampling.max_new_tokens
        awaited_s = longest_wait_s(self.recipe, speed, longest, judge_s=judge_s)
        while groups.live:
            # A group at a time at least: all of a set may take far longer than the one answer that is awaited. The last
            # one is awaited by itself where engines are to sleep with it: before, they have others to generate.
            alone = devices.needs_alone()
            is_last = asked.missing <= plan.samples_per_group
            pull = self.rollouts.next(
                plan.step,
                purpose=Purpose.EVAL,
                min_samples=plan.samples_per_group,
                max_samples=asked.missing - (plan.samples_per_group if alone and not is_last else 0),
                max_tokens=MAX_TOKENS_PER_ANSWER,
                deadline_s=max(awaited_s, self.session.max_manager_outage_s),
                alone=alone and is_last,
            )
            batch = await devices.watched(pull)
            answered += [(self._stopped(one), groups.prompt_of(one.group)) for one in batch.samples]
            groups.use(list(dict.fromkeys(one.group for one in batch.samples)))
            await self.rollouts.acknowledge(batch.number)
            if not batch.samples and groups.live and not await groups.change(SUPPLY_DEADLINE_S):
                raise DeadlineExceeded(f"{asked.missing} evaluated samples", "the manager", SUPPLY_DEADLINE_S)
        return answered

    def _stopped(self, one: Scored) -> Scored:
        return replace(one, response=up_to_stop(one.response, self.recipe.sampling.stop, self.tokenizer))

    def _measure(self, asked: EvaluationGroups, scored: Sequence[Scored]) -> dict[str, float]:
        submitted = len(asked.rows.prompts) * asked.groups.plan.samples_per_group
        reasons, name = asked.groups.reasons(), asked.rows.name
        if not scored:
            raise RunFailed(f"no evaluation sample{f' of set {name}' if name else ''} could be scored: {reasons}")
        if len(scored) < submitted:
            log.warning("evaluation is incomplete", set=name, scored=len(scored), submitted=submitted, dropped=reasons)
        votes: dict[int, list[pass_rates.Vote]] = {}
        for one in sorted(scored, key=lambda one: one.index):
            passed = pass_rates.has_passed(one, asked.rows.pass_reward)
            votes.setdefault(one.group, []).append((passed, one.metrics.get(ANSWER_HASH)))
        prefix = f"{PREFIX}{name}/" if name else PREFIX
        groups = list(votes.values())
        rates = pass_rates.pass_rates([[passed for passed, _ in group] for group in groups])
        rates |= pass_rates.majority_rates(groups)
        matched = pass_rates.matches(scored)
        return {
            **mean_metrics([with_unpaid_turns(one) for one in scored], prefix=prefix),
            **({f"{prefix}{pass_rates.MATCH}": float(np.mean(matched))} if matched else {}),
            f"{prefix}reward": float(np.mean([one.reward for one in scored])),
            **{f"{prefix}{rate}": value for rate, value in rates.items()},
            f"{prefix}clip_ratio": float(np.mean([finish_of(one) is Finish.LENGTH for one in scored])),
            f"{prefix}scored": float(len(scored)),
            f"{prefix}unscored": float(submitted - len(scored)),
        }

    def _record(self, answered: Iterable[tuple[Scored, Prompt]]) -> None:
        if self.session.keeps(Purpose.EVAL):
            answered = sorted(answered, key=lambda pair: (pair[0].group, pair[0].index))
            samples = [scored_sample(one, prompt, self.tokenizer) for one, prompt in answered]
            self.session.record(Purpose.EVAL, samples, [one for one, _ in answered])


def _repeat_infrastructure_losses(dropped: GroupDropped, draw: DrawnItem[Prompt]) -> DrawnItem[Prompt] | None:
    return draw if dropped.reason.is_infrastructure else None


def evaluation_sampling(sampling: EvaluationSampling, recipe: RecipeSpec, tokenizer: Tokenizer) -> SamplingParams:
    """How a set's prompts are answered."""
    default = 0.0 if sampling.samples_per_prompt == 1 else 1.0
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens or recipe.sampling.max_new_tokens,
        temperature=default if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=stop_token_ids(recipe, tokenizer),
        stop=spelled_stops(recipe),
    )
