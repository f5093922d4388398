"""The critic of PPO beside the policy: values before a step's first update, its own update after each mini-batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.backend import StepResult, TrainingBackend
from polyrl_trainer.losses import averages, merge, normalizer
from polyrl_trainer.losses.critic import value_loss
from polyrl_trainer.sample import Sample

COMPUTED = frozenset({"tokens", "positions", "padded_positions", "padding_fraction"})
"""Sums of a pass that say what was computed, whoever computed it."""


@dataclass
class Critic:
    """A value function on a trunk of its own, which begins as the policy's does."""

    backend: TrainingBackend
    recipe: RecipeSpec
    _sums: dict[str, float] = field(default_factory=dict)
    _updates: list[StepResult] = field(default_factory=list)

    async def with_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """The same samples with what the critic, as it is now, expects from each of their tokens."""
        values = await asyncio.wrap_future(self.backend.values(samples))
        return [replace(sample, old_values=one) for sample, one in zip(samples, values, strict=True)]

    async def learn(self, mini_batch: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step; how much was computed for it."""
        algorithm, temperature = self.recipe.algorithm, self.recipe.sampling.temperature
        loss = partial(value_loss, algorithm=algorithm)
        sums = await asyncio.wrap_future(self.backend.forward_backward(mini_batch, loss, temperature))
        divisor = normalizer(algorithm, len(mini_batch), sums["tokens"], self.recipe.sampling.max_new_tokens)
        self._updates.append(await asyncio.wrap_future(self.backend.optim_step(divisor)))
        self._sums = merge(self._sums, sums)
        return {name: value for name, value in sums.items() if name in COMPUTED}

    def warms_up(self, step: int) -> bool:
        """Whether the policy stays as it is in RL step `step`, the first of which is 1."""
        return step <= self.recipe.algorithm.critic.warmup_steps

    def take_metrics(self, policy: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the critic's updates since the last call, named as verl's; `policy`: averages of the policy's."""
        learned, updates = averages(self._sums), self._updates
        self._sums, self._updates = {}, []
        norms = [one.grad_norm for one in updates if not one.not_finite]
        return {
            **_of_loss(learned),
            "critic/lr": updates[-1].learning_rate,
            "critic/skipped_steps": float(len(updates) - len(norms)),
            **({"critic/grad_norm": float(np.mean(norms))} if norms else {}),
        }


@dataclass
class SharedCritic(Critic):
    """A value head beside the policy's own, on one trunk: `backend` is the policy's, and its loss has both terms."""

    async def learn(self, mini_batch: Sequence[Sample]) -> dict[str, float]:
        """The critic learns with the policy."""
        return {}

    def take_metrics(self, policy: Mapping[str, float]) -> dict[str, float]:
        return _of_loss(policy)


def _of_loss(learned: Mapping[str, float]) -> dict[str, float]:
    return {
        "critic/vf_loss": learned["vf_loss"],
        "critic/vf_clipfrac": learned["vf_clip_fraction"],
        "critic/vpred_mean": learned["value"],
    }
