"""What a step that waits for all its samples does with them: old logprobs, and mini-batches that are drawn by seed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polyrl.errors import InvalidData
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.rules.resumption import mini_batch_fault
from polyrl.sample import split_sample_id
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.sample import Sample


def draw_mini_batches(samples: Sequence[Sample], groups: int, seed: Sequence[int]) -> list[list[Sample]]:
    """Mini-batches of as many samples as so many groups have, drawn from all groups: each sees something of every
    prompt, and learns more than one of whole groups (benchmarks/curves). A function of the set of samples and the seed,
    not of their order: what is complete first is short. Samples of a file have no names, and their order is the
    file's."""
    ordered = sorted(samples, key=lambda one: split_sample_id(one.id) if one.id else (one.group, 0))
    parts = math.ceil(len({one.group for one in ordered}) / groups)
    places = np.random.default_rng(seed).permutation(len(ordered))
    return [[ordered[place] for place in part] for part in np.array_split(places, parts)]


def updates_per_step(algorithm: AlgorithmSpec) -> int:
    """Optimizer steps of one RL step."""
    return algorithm.update_epochs * algorithm.prompts_per_step // groups_per_mini_batch(algorithm)


def updates_until(algorithm: AlgorithmSpec, step: int, groups: int = 0) -> int:
    """The policy's optimizer steps in so many RL steps and groups of the next one: none while a critic warms up."""
    warmup = algorithm.critic.warmup_steps if algorithm.uses_critic else 0
    if step < warmup:
        return 0
    return (step - warmup) * updates_per_step(algorithm) + groups // groups_per_mini_batch(algorithm)


def groups_per_mini_batch(algorithm: AlgorithmSpec) -> int:
    """The manifest's, else all of a step."""
    return algorithm.mini_batch_prompts or algorithm.prompts_per_step


def mini_batches_left(algorithm: AlgorithmSpec, trained_groups: int) -> int:
    """Mini-batches left of an RL step with so many groups learned. Raises InvalidData if the rest cannot be divided."""
    if fault := mini_batch_fault(algorithm, trained_groups):
        raise InvalidData(f"recipe.algorithm: {fault}")
    return (algorithm.prompts_per_step - trained_groups) // groups_per_mini_batch(algorithm)


async def with_old_log_probs(backend: TrainingBackend, samples: list[Sample], temperature: float) -> list[Sample]:
    """The same samples with the logprobs of the learner as it is now: before the step's first update."""
    scores = await asyncio.wrap_future(backend.log_probs(samples, temperature))
    return [replace(sample, old_log_probs=score) for sample, score in zip(samples, scores, strict=True)]
