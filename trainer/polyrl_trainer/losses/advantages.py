"""Advantages: what a sample's reward says against others, per learned token.

All but REINFORCE++ and GAE (see `critic`) compare within a group, so they are known as soon as the group is whole;
those two scale by the whole step and are finished by `whitened`. With the KL penalty in the reward, beta * k1 of the
sample's tokens is taken from its reward before anything is compared (Schulman 2020; the exact gradient of the
divergence, Tang and Munos 2025, arXiv 2506.09477).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from polyrl.errors import InvalidData
from polyrl.manifest.parts.algorithm import AdvantageEstimator, AlgorithmSpec, KlPlace
from polyrl_trainer.losses.critic import by_critic
from polyrl_trainer.losses.own import GroupAdvantage
from polyrl_trainer.losses.presets import advantage_of, scales_by_step
from polyrl_trainer.losses.turns import by_turn
from polyrl_trainer.sample import Sample

Floats = npt.NDArray[np.float64]

STD_EPSILON: Final = 1e-6
"""Added to the standard deviation, in units of the reward; as in verl."""
VARIANCE_EPSILON: Final = 1e-8
"""Added to the variance of a step's returns; as in verl and OpenRLHF."""


def group_norm(rewards: Floats) -> Floats:
    """(r - mean) / (std + eps) of one group, [n]; std is the unbiased one (n - 1), as in TRL and verl. Equal rewards,
    or one sample, give exactly 0. GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2."""
    centred = group_mean(rewards)
    return centred / (float(rewards.std(ddof=1)) + STD_EPSILON) if centred.any() else centred


def group_mean(rewards: Floats) -> Floats:
    """r - mean of one group, [n]: easy and hard prompts weigh alike. Dr. GRPO, Liu et al. 2025, arXiv 2503.20783."""
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    return np.asarray(rewards - rewards.mean())


def leave_one_out(rewards: Floats) -> Floats:
    """r - mean of the group's others, [n] = n / (n - 1) * (r - mean). RLOO, Ahmadian et al. 2024, arXiv 2402.14740. A
    group of one gives 0."""
    n = len(rewards)
    return group_mean(rewards) * (n / max(1, n - 1))


WITHIN_GROUP: Final[Mapping[AdvantageEstimator, Callable[[Floats], Floats]]] = MappingProxyType(
    {
        AdvantageEstimator.GROUP_NORM: group_norm,
        AdvantageEstimator.GROUP_MEAN: group_mean,
        AdvantageEstimator.RLOO: leave_one_out,
    }
)


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, estimator: AdvantageEstimator = AdvantageEstimator.GROUP_NORM
) -> npt.NDArray[np.float32]:
    """float32[N] of `rewards` [N], finite, and `groups` [N]: samples of one prompt share a value.

    Raises ValueError when a reward is not finite."""
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("rewards must be finite")
    advantages = np.zeros_like(values)
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    for group in range(int(member.max(initial=-1)) + 1):
        chosen = member == group
        advantages[chosen] = WITHIN_GROUP[estimator](values[chosen])
    return advantages.astype(np.float32)


def with_advantages(
    samples: Sequence[Sample], algorithm: AlgorithmSpec, own: GroupAdvantage | None = None
) -> list[Sample]:
    """The same samples with an advantage on every learned position; of REINFORCE++ their returns, for `whitened`.
    `own` in place of the named estimator. With the KL penalty in the reward also what it is of each.

    Raises InvalidData when the KL penalty is in the reward and a sample lacks the logprobs for it.
    """
    penalties = [_penalties(sample, algorithm) for sample in samples]
    if _penalizes_reward(algorithm):
        coefficient = algorithm.kl_coefficient
        samples = [_with_reward_kl(one, cost / coefficient) for one, cost in zip(samples, penalties, strict=True)]
    if own is not None:
        return _by_own(
            samples, [_shaped(one) - float(cost.sum()) for one, cost in zip(samples, penalties, strict=True)], own
        )
    estimator = advantage_of(algorithm)
    if estimator is AdvantageEstimator.GAE:
        return [
            by_critic(one, _shaped(one), cost, algorithm.critic) for one, cost in zip(samples, penalties, strict=True)
        ]
    if estimator is AdvantageEstimator.REINFORCE_PLUS_PLUS:
        # Undiscounted: a token's return is the reward at the end less what it and all later tokens cost.
        returns = [_shaped(one) - np.cumsum(cost[::-1])[::-1] for one, cost in zip(samples, penalties, strict=True)]
        return [_carrying(sample, values) for sample, values in zip(samples, returns, strict=True)]
    if estimator is AdvantageEstimator.TURN_NORM:
        ends, discount = [_shaped(one) for one in samples], algorithm.turn_discount
        found = by_turn(samples, ends, penalties, discount=discount, compared=group_norm)
        return [_carrying(sample, values) for sample, values in zip(samples, found, strict=True)]
    rewards = [_shaped(sample) - float(cost.sum()) for sample, cost in zip(samples, penalties, strict=True)]
    advantages = group_advantages(rewards, [one.group for one in samples], estimator)
    return [_carrying(sample, np.full(sample.length, value)) for sample, value in zip(samples, advantages, strict=True)]


def _by_own(samples: Sequence[Sample], rewards: Sequence[float], own: GroupAdvantage) -> list[Sample]:
    """`own` of each group, as it is by penalties; in the order of `samples`."""
    by_group: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        by_group.setdefault(sample.group, []).append(place)
    found = list(samples)
    for places in by_group.values():
        shaped = [replace(samples[place], reward=rewards[place], penalty=None) for place in places]
        # As the reward function sees it: with a number for each turn where none was paid too.
        shaped = [replace(one, turn_rewards=one.turn_rewards or (0.0,) * len(one.turn_starts)) for one in shaped]
        for place, values in zip(places, own(shaped), strict=True):
            found[place] = _carrying(samples[place], values)
    return found


def _shaped(sample: Sample) -> float:
    return sample.reward + (sample.penalty or 0.0)


def whitened(samples: Sequence[Sample], algorithm: AlgorithmSpec) -> list[Sample]:
    """A whole step's samples; with REINFORCE++ and GAE (A - mean) / sqrt(var + eps) over all their learned tokens, var
    unbiased (Hu 2025, arXiv 2501.03262, eq. 4), with all others as they are."""
    if not scales_by_step(algorithm):
        return list(samples)
    every = np.concatenate([_advantages(one)[one.loss_mask > 0] for one in samples]).astype(np.float64)
    spread = float(np.sqrt(every.var(ddof=1) + VARIANCE_EPSILON)) if len(every) > 1 else 1.0
    return [_carrying(one, (_advantages(one) - every.mean()) / spread) for one in samples]


def _advantages(sample: Sample) -> npt.NDArray[np.float32]:
    assert sample.advantages is not None, "with_advantages comes first"
    return sample.advantages


def _carrying(sample: Sample, values: npt.NDArray[np.floating]) -> Sample:
    return replace(sample, advantages=(sample.loss_mask * values).astype(np.float32))


def _penalizes_reward(algorithm: AlgorithmSpec) -> bool:
    return algorithm.kl_coefficient > 0 and algorithm.kl_place is KlPlace.REWARD


def _with_reward_kl(sample: Sample, k1: Floats) -> Sample:
    """Nothing of a sample without a learned token, of which no mean is."""
    learned = float(sample.loss_mask.sum())
    return replace(sample, reward_kl=float(k1.sum()) / learned) if learned else sample


def _penalties(sample: Sample, algorithm: AlgorithmSpec) -> Floats:
    """[T]: beta * (log pi - log pi_ref) of each learned token, under the policy that drew it."""
    if not _penalizes_reward(algorithm):
        return np.zeros(sample.length)
    if sample.rollout_log_probs is None or sample.reference_log_probs is None:
        raise InvalidData("a KL penalty in the reward needs rollout_log_probs and reference_log_probs on every sample")
    difference = sample.rollout_log_probs.astype(np.float64) - sample.reference_log_probs
    return np.asarray(algorithm.kl_coefficient * difference * sample.loss_mask)
