"""What a critic makes of rewards, and what it learns: GAE (Schulman et al. 2016, arXiv 1506.02438) and the clipped
value loss of PPO.

Tokens that the policy did not draw, as those of a tool, are no steps: a value and an advantage are carried over them to
the next token that it drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from polyrl.errors import InvalidData
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.parts.critic import CriticSpec
from polyrl_trainer.backend import Loss, LossInputs
from polyrl_trainer.losses.policy_gradient import aggregated
from polyrl_trainer.losses.sft import as_floats
from polyrl_trainer.sample import Sample

Floats = npt.NDArray[np.float64]

RETURNS_EPSILON: Final = 1e-5
"""Added to the variance of returns, in squared units of the reward; as in verl."""


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> Floats:
    """[N] advantages of the N tokens that the policy drew, in order, after the last of which nothing comes:
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1} (eq. 16)."""
    advantages = np.zeros_like(values)
    after, next_value = 0.0, 0.0
    for place in reversed(range(len(values))):
        delta = rewards[place] + gamma * next_value - values[place]
        after = delta + gamma * lam * after
        advantages[place], next_value = after, values[place]
    return advantages


def by_critic(sample: Sample, reward: float, costs: Floats, critic: CriticSpec) -> Sample:
    """The sample with its advantages by GAE and its returns A + V. The reward comes with its last drawn token, whether
    it ended there or was cut (as in verl); `costs` [T], a KL penalty's, with each. Raises InvalidData without values.
    """
    if sample.old_values is None:
        raise InvalidData(f"sample {sample.id or '(unnamed)'}: gae needs the critic's old_values, and it has none")
    drawn = np.flatnonzero(sample.loss_mask)
    rewards = -costs[drawn]
    rewards[-1:] += reward
    values = sample.old_values[drawn].astype(np.float64)
    advantages, returns = np.zeros(sample.length, dtype=np.float32), np.zeros(sample.length, dtype=np.float32)
    advantages[drawn] = gae(rewards, values, critic.gamma, critic.gae_lambda)
    returns[drawn] = advantages[drawn] + values
    return replace(sample, advantages=advantages, returns=returns)


def value_loss(inputs: LossInputs, algorithm: AlgorithmSpec) -> tuple[torch.Tensor, dict[str, float]]:
    """L = aggregate( max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 ), a scalar, tokens adding up as in the
    policy's loss (Schulman et al. 2017, as in OpenAI's baselines and verl; c is `valueClip`).

    Sums over learned tokens: `vf_loss`, `vf_clip_fraction` (the clipped term is the larger), `value`.
    Raises InvalidData when samples lack values or returns.
    """
    if inputs.values is None or inputs.old_values is None or inputs.returns is None:
        raise InvalidData("the critic learns from samples with old_values and returns, and a sample has none")
    values, old, bound = inputs.values, inputs.old_values, algorithm.critic.value_clip
    free = (values - inputs.returns).square()
    clipped = (torch.clamp(values, old - bound, old + bound) - inputs.returns).square()
    per_token = torch.maximum(free, clipped) / 2
    sums = {"vf_loss": per_token.detach(), "vf_clip_fraction": (clipped > free).float(), "value": values.detach()}
    return aggregated(per_token, inputs, algorithm), as_floats(
        {name: (column * inputs.mask).sum() for name, column in sums.items()}
    )


def with_value_loss(policy: Loss, algorithm: AlgorithmSpec) -> Loss:
    """The policy's loss plus `coefficient` times the critic's, of a model that is both."""

    def both(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        loss, sums = policy(inputs)
        of_values, more = value_loss(inputs, algorithm)
        return loss + algorithm.critic.coefficient * of_values, sums | more

    return both


def value_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Numbers of a whole step, over the tokens that the policy drew, named as verl names them: mean, max and min of
    values and of returns, and the share of the returns' variance that the values foresaw."""
    drawn = [sample.loss_mask > 0 for sample in samples]
    columns = {
        name: np.concatenate([getattr(one, field)[mask] for one, mask in zip(samples, drawn, strict=True)])
        for name, field in (("values", "old_values"), ("returns", "returns"))
    }
    values, returns = (columns[name].astype(np.float64) for name in ("values", "returns"))
    spread = returns.var(ddof=1) if len(returns) > 1 else 0.0
    left = (returns - values).var(ddof=1) if len(returns) > 1 else 0.0
    statistics = {
        f"critic/{name}/{of}": float(getattr(np, of)(column))
        for name, column in columns.items()
        for of in ("mean", "max", "min")
    }
    return {**statistics, "critic/vf_explained_var": float(1.0 - left / (spread + RETURNS_EPSILON))}
