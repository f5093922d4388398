"""Reinforcement learning, one step after the other.

    submit promptsPerStep groups (and over-sampled ones), and those of maxStaleness later steps ─> copy the weights
        version v is hashed and announced, engines load it              (all the while)
        engines generate, user code scores                              (all the while)
        pull ─> complete groups ─> advantages ─> forward-backward       (as soon as minMicroBatchSamples are scored)
        ... until exactly a mini-batch is learned ─> one optimizer step ─> acknowledge
        (oldLogProbs recompute: pull and score until the step is whole, then mini-batches that a seed draws; with
        advantage gae the critic says first what it expected, and learns from each mini-batch beside the policy)
        (updateEpochs above 1: again over the step's samples, in other mini-batches)
    surplus goes on and trains in the next step (maxStaleness 0: is cancelled, and its prompts go back to the buffer)
    metrics, checkpoint, evaluation

Invariant I3: each mini-batch holds exactly miniBatchPrompts complete groups, whatever the arrival order, and one that a
seed draws as many samples; a batch that is not whole groups of this step, each for the first time, is a ProtocolError.
A step that is left (the run was asked to stop) before its first optimizer step leaves no trace: the state is that of
the step's start. Later the state holds what is learned, and the next process learns the mini-batches that are left, of
the prompts that are left. The learner waits for at most one thing at a time, and each wait has a deadline that names
who is awaited.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from polyrl.errors import DeadlineExceeded, ProtocolError
from polyrl.manifest.parts.algorithm import OldLogProbs
from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import Purpose, SamplingParams, Scored
from polyrl.status import StepValue
from polyrl.wire import Batch, engine_shares
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.backends.policy import ReferenceScores, with_reference
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.generation.from_wire import scored_sample, with_unpaid_turns
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.generation.shared_devices import SharedDevices, not_shared
from polyrl_trainer.generation.steps_ahead import StepsAhead
from polyrl_trainer.generation.stops import unexplained_stops, up_to_stop
from polyrl_trainer.generation.supply import GroupSupply
from polyrl_trainer.generation.training_groups import TrainingGroups
from polyrl_trainer.loops.critic import Critic
from polyrl_trainer.loops.deadline import longest_wait_s
from polyrl_trainer.loops.evaluation import Evaluator
from polyrl_trainer.loops.mini_batches import (
    draw_mini_batches,
    groups_per_mini_batch,
    mini_batches_left,
    with_old_log_probs,
)
from polyrl_trainer.loops.step_metrics import StepClock, separate_movement, step_metrics
from polyrl_trainer.losses import averages, learns_entropy, merge, normalizer, policy_loss
from polyrl_trainer.losses.by_engine import Drawers, with_engine_sums
from polyrl_trainer.losses.critic import value_metrics
from polyrl_trainer.losses.overlong import of_whole_step, shaped_advantages
from polyrl_trainer.losses.own import NOTHING_OWN, OwnAlgorithm
from polyrl_trainer.preparation import spelled_stops, stop_token_ids
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.sample import Sample
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainingStage
from polyrl_trainer.weights.policy_versions import PolicyVersions


async def run_rl_training(parts: RlParts, recipe: RecipeSpec, session: Session) -> bool:
    """Trains until `algorithm.steps` are done, from where `session.state` stands. True when done, False when stopped.

    Raises RunFailed when a step cannot be filled, DeadlineExceeded when nobody delivers.
    """
    session.enter(TrainingStage.RL, parts.prompts)
    state, algorithm = session.state, recipe.algorithm
    first = state.step + 1
    sampling = training_sampling(recipe, parts.tokenizer)
    ahead = StepsAhead(recipe, parts.supply, prompts=parts.prompts, sampling=sampling)
    every, evaluator = recipe.evaluation.every_steps, parts.evaluator
    if evaluator is not None:
        await evaluator.make_up(every, parts.versions, parts.backend)
    while state.step < algorithm.steps and not session.stop.is_set():
        before = state.copy()
        unsteady = state.step + 1 == first
        step = RlStep(parts, recipe, session, state.step + 1, ahead=ahead, unsteady=unsteady)
        if not await step.run():
            if session.state.trained_groups == before.trained_groups:
                session.state = before
            await asyncio.wrap_future(parts.backend.discard_gradients())
            await session.save(parts.backend)
            return False
        await session.end_step(parts.backend, algorithm.steps)
        if evaluator is not None:
            await evaluator.evaluate_if_due(every, parts.versions, parts.backend)
    await session.leave(parts.backend, algorithm.steps)
    return state.step >= algorithm.steps


LEAST_GENERATE_S: Final = 1e-3
"""No sequence is there sooner."""
SUPPLY_DEADLINE_S: Final = 30.0
"""Longest wait for news of a dropped group once the manager has nothing more to deliver."""


@dataclass(frozen=True, kw_only=True)
class RolloutSide:
    """What exists only when a manager does."""

    rollouts: Rollouts
    runner: UserCodeRunner
    supply: GroupSupply
    versions: PolicyVersions
    evaluator: Evaluator | None = None


@dataclass(frozen=True, kw_only=True)
class RlParts(RolloutSide):
    """What the loop is made of."""

    backend: TrainingBackend
    prompts: DataBuffer[Prompt]
    tokenizer: Tokenizer
    reference: ReferenceScores | None = None
    """Needed when klCoefficient is above 0."""
    own: OwnAlgorithm = NOTHING_OWN
    critic: Critic | None = None
    """Needed by advantage gae."""
    devices: SharedDevices = field(default_factory=not_shared)


class RlStep:
    """One RL step."""

    def __init__(
        self, parts: RlParts, recipe: RecipeSpec, session: Session, step: int, *, ahead: StepsAhead, unsteady: bool
    ) -> None:
        """`unsteady`: its times are no measure, as of the first step of a process, in which engines may still start.
        Nor are those of a step with groups that an earlier trainer left."""
        self._parts = parts
        self._recipe = recipe
        self._session = session
        self._step = step
        self._ahead = ahead
        self._unsteady = unsteady
        self._clock = StepClock()
        self._trained: list[Sample] = []
        self._scored: list[Scored] = []
        algorithm = recipe.algorithm
        self._groups_per_mini_batch = groups_per_mini_batch(algorithm)
        self._mini_batches = mini_batches_left(algorithm, session.state.trained_groups)
        self._mini_batch_samples = self._groups_per_mini_batch * recipe.sampling.samples_per_prompt
        self._loss = policy_loss(algorithm, parts.own.loss)
        self._drawers = Drawers()
        self._sums: dict[str, float] = {}
        self._learned_first: dict[str, float] = {}
        """Averages of the first mini-batch, whose learner is the one that the engines have."""

    async def run(self) -> bool:
        """False when the run was asked to stop. What was submitted is left to a successor then; without one the manager
        cancels it as the run ends."""
        parts, clock = self._parts, self._clock
        if parts.supply.adopted.want_weights or not parts.versions.claim():
            clock.update_weights_s = await parts.versions.ensure_published(parts.backend)
        groups = await self._ahead.begin(self._step)
        clock.submitted(self._ahead.submitted_at(self._step))
        clock.update_weights_s += await parts.versions.snapshot(parts.backend)
        whole = self._recipe.algorithm.old_log_probs is OldLogProbs.RECOMPUTE
        is_whole = await (self._train_whole(groups) if whole else self._train_streamed(groups))
        if not self._sums:
            return False
        last_turn_at = parts.runner.last_turn_at(groups.used)
        was_left = not parts.supply.adopted.taken.isdisjoint(groups.used)
        self._unsteady = self._unsteady or was_left
        clock.generated(last_turn_at, self._ahead.generate_s(self._step, last_turn_at, was_left=was_left))
        if is_whole:
            await self._ahead.end(self._step)
            await self._finish(groups)
        else:
            self._leave(groups)
        return is_whole

    def _leave(self, groups: TrainingGroups) -> None:
        """Notes the mini-batches that are learned; what came after them is generated again."""
        learned = len(self._clock.optimizer_steps)
        groups.give_back([*{one.group for one in self._trained[learned * self._mini_batch_samples :]}])
        self._count(left_after=learned * self._groups_per_mini_batch)

    def _count(self, left_after: int = 0) -> None:
        """What was learned and dropped, and what that took, is in the state from here on."""
        state, cursor = self._session.state, self._parts.prompts.state(self._ahead.not_begun())
        state.finish_step(cursor, self._sums, left_after=left_after)
        state.carried = self._ahead.carried_prompts
        state.results.dropped_groups = dict(Counter(state.results.dropped_groups) + self._parts.supply.dropped)
        self._parts.supply.dropped.clear()
        self._clock.end(state.results)

    async def _train_streamed(self, groups: TrainingGroups) -> bool:
        """Mini-batches in order of completion: training overlaps with generation, and the first hold shorter answers.
        False when asked to stop before they are learned; of a step that is gone over again, before the first is."""
        for number in range(self._mini_batches):
            again = self._recipe.algorithm.update_epochs > 1
            if not await self._train_mini_batch(groups, stoppable=number == 0 or not again):
                return False
        await self._train_epochs(self._trained, first=1)
        return True

    async def _train_whole(self, groups: TrainingGroups) -> bool:
        """All samples of the step, scored by the weights of its start, then its mini-batches; False when asked to stop
        meanwhile."""
        missing, batches, samples = self._mini_batches * self._mini_batch_samples, list[int](), list[Sample]()
        temperature = self._recipe.sampling.temperature
        while missing:
            batch = await self._next(groups, missing, stoppable=True)
            if batch is None:
                return False
            with self._clock.training():
                prepared = await self._prepare(groups, batch)
                samples += await with_old_log_probs(self._parts.backend, prepared, temperature)
            missing -= len(batch.samples)
            batches.append(batch.number)
            if self._session.stop.is_set():
                return False
        self._trained = samples = of_whole_step(samples, self._recipe.algorithm)
        await self._train_epochs(samples, first=0)
        await self._session.answered(*map(self._parts.rollouts.acknowledge, batches))
        return True

    async def _train_epochs(self, samples: Sequence[Sample], first: int) -> None:
        """Passes over the whole step from number `first` on, each in mini-batches that a seed draws."""
        for epoch in range(first, self._recipe.algorithm.update_epochs):
            seed = (self._recipe.seed, self._step, epoch)
            for mini_batch in draw_mini_batches(samples, self._groups_per_mini_batch, seed):
                with self._clock.training():
                    learns = await self._teach_critic(mini_batch)
                    sums = await self._learn(mini_batch, again=epoch > 0) if learns else {}
                if learns:
                    await self._update(sums)

    async def _teach_critic(self, mini_batch: list[Sample]) -> bool:
        """Its optimizer step, if there is one. False when the policy waits until it has warmed up."""
        critic = self._parts.critic
        if critic is None:
            return True
        computed = await critic.learn(mini_batch)
        if not critic.warms_up(self._step):
            return True
        self._sums = merge(self._sums, computed)
        return False

    async def _train_mini_batch(self, groups: TrainingGroups, *, stoppable: bool) -> bool:
        """Micro-batches to the exact boundary, then one optimizer step; False when asked to stop before."""
        missing, sums, batches = self._mini_batch_samples, dict[str, float](), list[int]()
        while missing:
            if stoppable and self._session.stop.is_set():
                return False
            batch = await self._next(groups, missing, stoppable=stoppable)
            if batch is None:
                return False
            sums = merge(sums, await self._train(groups, batch))
            missing -= len(batch.samples)
            batches.append(batch.number)
        assert missing == 0, "a batch crossed the mini-batch boundary"
        await self._update(sums)
        await self._session.answered(*map(self._parts.rollouts.acknowledge, batches))
        return True

    async def _update(self, sums: dict[str, float]) -> None:
        """One optimizer step over a mini-batch."""
        with self._clock.training():
            divisor = normalizer(
                self._recipe.algorithm, self._mini_batch_samples, sums["tokens"], self._recipe.sampling.max_new_tokens
            )
            result = await asyncio.wrap_future(self._parts.backend.optim_step(divisor))
        self._session.state.results.count_optimizer_step(taken=not result.not_finite)
        self._clock.optimizer_steps.append(result)
        self._learned_first = self._learned_first or averages(sums)
        self._sums = merge(self._sums, sums)

    async def _next(self, groups: TrainingGroups, missing: int, *, stoppable: bool) -> Batch | None:
        """A batch with at least one group; None when asked to stop first."""
        pulled = self._pull(groups, missing)
        return await (self._session.unless_stopped(pulled) if stoppable else pulled)

    async def _pull(self, groups: TrainingGroups, missing: int) -> Batch:
        awaited_s = longest_wait_s(self._recipe, self._session.sequence_tokens_per_s)
        while True:
            source, most = groups.next_source()
            most = min(missing, most * groups.samples_per_group)
            with self._clock.waiting():
                pull = self._parts.rollouts.next(
                    source.plan.step,
                    purpose=Purpose.TRAIN,
                    min_samples=min(self._recipe.algorithm.min_micro_batch_samples, most),
                    max_samples=most,
                    max_tokens=self._recipe.max_tokens_per_micro_batch,
                    deadline_s=max(awaited_s, self._session.max_manager_outage_s),
                    alone=self._parts.devices.needs_alone(),
                )
                batch = await self._parts.devices.watched(pull)
            if batch.samples:
                return self._stopped(batch)
            # All that was submitted is packed or dropped: replacements are on their way, or nothing will ever come.
            if not await source.change(SUPPLY_DEADLINE_S):
                raise DeadlineExceeded(
                    f"{missing} samples of step {self._step} (dropped: {groups.reasons() or 'none'})",
                    "the manager, which has nothing more to give",
                    SUPPLY_DEADLINE_S,
                )

    def _stopped(self, batch: Batch) -> Batch:
        stop, tokenizer = self._recipe.sampling.stop, self._parts.tokenizer
        cut = (replace(one, response=up_to_stop(one.response, stop, tokenizer)) for one in batch.samples)
        return replace(batch, samples=tuple(cut))

    async def _train(self, groups: TrainingGroups, batch: Batch) -> dict[str, float]:
        with self._clock.training():
            return await self._learn(await self._prepare(groups, batch))

    async def _learn(self, samples: list[Sample], *, again: bool = False) -> dict[str, float]:
        """Engines are measured by the first pass alone: later ones have moved away from all of them."""
        learning = self._parts.backend.forward_backward(
            samples,
            self._loss if again else with_engine_sums(self._loss),
            self._recipe.sampling.temperature,
            entropy_gradient=learns_entropy(self._recipe.algorithm),
        )
        return await asyncio.wrap_future(learning)

    async def _prepare(self, groups: TrainingGroups, batch: Batch) -> list[Sample]:
        """The batch's samples with all that does not depend on the learner."""
        samples = self._receive(groups, batch)
        if not self._trained:
            # The manager gives the first batch when the learner is to have the devices of the reserved engines.
            self._clock.reserved_closes()
        samples = await with_reference(samples, self._parts.reference, self._recipe.sampling.temperature)
        if self._parts.critic is not None:
            samples = await self._parts.critic.with_values(samples)
        # An own advantage may take its time, and the engines' turns are to be answered meanwhile.
        samples = await asyncio.to_thread(shaped_advantages, samples, self._recipe, self._parts.own.advantage)
        self._trained += samples
        self._scored += batch.samples
        return samples

    def _receive(self, groups: TrainingGroups, batch: Batch) -> list[Sample]:
        """Checks that the batch is complete groups of this step, each for the first time. Raises ProtocolError."""
        indices: dict[int, set[int]] = {}
        for scored in batch.samples:
            indices.setdefault(scored.group, set()).add(scored.index)
        expected = groups.samples_per_group
        if len(batch.samples) != len(indices) * expected or any(len(seen) != expected for seen in indices.values()):
            raise ProtocolError(f"batch {batch.number} of step {self._step} does not hold complete groups")
        tokenizer = self._parts.tokenizer
        learned = len(self._clock.optimizer_steps)
        samples = [
            self._drawers.mark(scored_sample(one, groups.prompt_of(one.group), tokenizer), one.response, learned)
            for one in batch.samples
        ]
        groups.use(list(indices))
        return samples

    async def _finish(self, groups: TrainingGroups) -> None:
        state, clock = self._session.state, self._clock
        self._count()
        clock.published(self._parts.versions.publish_s, self._parts.rollouts.served_at(groups.version))
        began_here = [one for one in self._trained if one.group not in self._parts.supply.adopted.taken]
        if began_here:
            longest = max(one.response_length for one in began_here)
            self._session.sequence_tokens_per_s = longest / max(clock.sequence_s, LEAST_GENERATE_S)
        learned = separate_movement(averages(self._sums), self._learned_first)
        values = step_metrics(self._trained, [with_unpaid_turns(one) for one in self._scored], groups, learned, clock)
        if self._parts.critic is not None:
            values |= value_metrics(self._trained) | self._parts.critic.take_metrics(learned)
        values |= self._parts.versions.publisher.measures
        values["data/epochs"] = self._parts.prompts.epochs(self._ahead.not_begun())
        engines = self._drawers.measures(self._sums)
        values["rollout/unexplained_stop_ratio"] = unexplained_stops(self._trained, groups.own.plan.sampling)
        values["rollout/engine_share_max"] = share = max(engine_shares(engines).values(), default=0.0)
        state.results.reward = values["reward/mean"]
        status_values = {
            **clock.status_values(),
            StepValue.POLLUTED_STEP: float(self._unsteady),
            StepValue.REWARD: values["reward/mean"],
            StepValue.LARGEST_ENGINE_SHARE: share,
        }
        self._session.record(Purpose.TRAIN, self._trained, self._scored)
        await self._session.report(state.step, values, status_values=status_values, engines=engines)


def training_sampling(recipe: RecipeSpec, tokenizer: Tokenizer) -> SamplingParams:
    """The manifest's sampling."""
    sampling = recipe.sampling
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=stop_token_ids(recipe, tokenizer),
        stop=spelled_stops(recipe),
    )
