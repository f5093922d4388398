"""Offline RL: the loss and advantages of `rl_loop`, over a file of finished, scored samples; no engine, no manager.

Where the file carries no `rollout_log_probs`, the policy at the start of the step stands in for the one that drew
them, so the ratio begins at 1 and several optimizer steps per step are still clipped.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from polyrl.manifest.parts.algorithm import OldLogProbs
from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.backend import Loss, StepResult, TrainingBackend
from polyrl_trainer.backends.policy import ReferenceScores, with_reference
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.examples import FinishedGroup
from polyrl_trainer.loops.mini_batches import draw_mini_batches, groups_per_mini_batch, with_old_log_probs
from polyrl_trainer.loops.step_metrics import learning_metrics, separate_movement
from polyrl_trainer.losses import averages, learns_entropy, merge, normalizer, policy_loss, whitened, with_advantages
from polyrl_trainer.losses.own import NOTHING_OWN, GroupAdvantage, OwnAlgorithm
from polyrl_trainer.sample import Sample
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainingStage


async def run_offline_training(
    backend: TrainingBackend,
    groups: DataBuffer[FinishedGroup],
    recipe: RecipeSpec,
    session: Session,
    reference: ReferenceScores | None = None,
    own: OwnAlgorithm = NOTHING_OWN,
) -> bool:
    """Trains to `algorithm.steps` from where `session.state` stands. True when done, False when stopped."""
    session.enter(TrainingStage.OFFLINE_RL, groups)
    state, results = session.state, session.state.results
    while state.step < recipe.algorithm.steps and not session.stop.is_set():
        started = time.monotonic()
        drawn = [draw.item for draw in groups.get(recipe.algorithm.prompts_per_step)]
        mini_batches = await _prepare(backend, drawn, recipe, reference, own.advantage)
        loss = policy_loss(recipe.algorithm, own.loss)
        epochs = mini_batches_by_epoch(mini_batches, recipe, state.step)
        sums, first, steps = await _train(backend, epochs, recipe, loss)
        seconds = time.monotonic() - started
        for taken in steps:
            results.count_optimizer_step(taken=not taken.not_finite)
        results.train_seconds += seconds
        results.rl_train_seconds += seconds
        results.rl_step_seconds += seconds
        state.finish_step(groups.state(), sums)
        learned = separate_movement(averages(sums), first)
        values = learning_metrics(list(itertools.chain(*mini_batches)), learned, steps)
        throughput = sums["tokens"] / max(seconds, 1e-9)
        timing = {"timing_s/step": seconds, "perf/throughput": throughput, "data/epochs": groups.epochs()}
        await session.report(state.step, {**values, **timing})
        await session.end_step(backend, recipe.algorithm.steps)
    await session.leave(backend, recipe.algorithm.steps)
    return state.step >= recipe.algorithm.steps


async def _prepare(
    backend: TrainingBackend,
    drawn: Sequence[FinishedGroup],
    recipe: RecipeSpec,
    reference: ReferenceScores | None,
    own: GroupAdvantage | None,
) -> list[list[Sample]]:
    """Mini-batches of whole groups, with advantages and all logprobs that the loss needs."""
    size = groups_per_mini_batch(recipe.algorithm)
    temperature = recipe.sampling.temperature
    mini_batches = []
    for first in range(0, len(drawn), size):
        # A group may be drawn twice in one step when the file is small: its draws are baselines of their own.
        numbered = [
            replace(one, group=place) for place, group in enumerate(drawn[first : first + size], first) for one in group
        ]
        samples = await _with_rollout_log_probs(backend, numbered, temperature)
        if recipe.algorithm.old_log_probs is OldLogProbs.RECOMPUTE:
            samples = await with_old_log_probs(backend, samples, temperature)
        samples = await with_reference(samples, reference, temperature)
        mini_batches.append(with_advantages(samples, recipe.algorithm, own))
    every = iter(whitened(list(itertools.chain(*mini_batches)), recipe.algorithm))
    return [[next(every) for _ in mini_batch] for mini_batch in mini_batches]


def mini_batches_by_epoch(first: Sequence[list[Sample]], recipe: RecipeSpec, step: int) -> list[list[Sample]]:
    """The mini-batches of all `updateEpochs`: the first ones as they were drawn, those of later passes by seed."""
    samples, groups = list(itertools.chain(*first)), groups_per_mini_batch(recipe.algorithm)
    seeds = [(recipe.seed, step, epoch) for epoch in range(1, recipe.algorithm.update_epochs)]
    return list(itertools.chain(first, *(draw_mini_batches(samples, groups, seed) for seed in seeds)))


async def _with_rollout_log_probs(backend: TrainingBackend, samples: list[Sample], temperature: float) -> list[Sample]:
    lacking = [sample for sample in samples if sample.rollout_log_probs is None]
    if not lacking:
        return samples
    scored = await asyncio.wrap_future(backend.log_probs(lacking, temperature))
    scores = iter(scored)
    return [
        sample if sample.rollout_log_probs is not None else replace(sample, rollout_log_probs=next(scores))
        for sample in samples
    ]


async def _train(
    backend: TrainingBackend, mini_batches: Sequence[list[Sample]], recipe: RecipeSpec, loss: Loss
) -> tuple[dict[str, float], dict[str, float], list[StepResult]]:
    """Sums of all, averages of the first mini-batch, and what each optimizer step did."""
    first: dict[str, float] = {}
    sums: dict[str, float] = {}
    results = []
    entropy, temperature = learns_entropy(recipe.algorithm), recipe.sampling.temperature
    for samples in mini_batches:
        learning = backend.forward_backward(samples, loss, temperature, entropy_gradient=entropy)
        learned = await asyncio.wrap_future(learning)
        first = first or averages(learned)
        sums = merge(sums, learned)
        limit = recipe.sampling.max_new_tokens
        divisor = normalizer(recipe.algorithm, len(samples), learned["tokens"], limit)
        results.append(await asyncio.wrap_future(backend.optim_step(divisor)))
    return sums, first, results
