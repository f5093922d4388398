"""Advantages from rewards: pure functions over arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polyrl_trainer.sample import Sample

STD_EPSILON = 1e-6
"""Added to the standard deviation, in units of the reward; as in verl."""


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, *, normalize: bool = True
) -> npt.NDArray[np.float32]:
    """A_i = (r_i - mean of its group) / (std of its group + eps), float32[N].

    `rewards` is [N], finite; `groups` is [N], samples of one prompt share a value. std is the unbiased one (n - 1), as
    in TRL and verl. `normalize=False` leaves the division out, which weighs easy and hard prompts alike (Dr. GRPO, Liu
    et al. 2025, arXiv 2503.20783). A group of equal rewards, or of one sample, gives exactly 0.
    Source: GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2. Raises ValueError when a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("rewards must be finite")
    advantages = np.zeros_like(values)
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    for group in range(int(member.max(initial=-1)) + 1):
        chosen = member == group
        advantages[chosen] = _relative(values[chosen], normalize)
    return advantages.astype(np.float32)


def with_group_advantages(samples: Sequence[Sample], *, normalize: bool = True) -> list[Sample]:
    """The same samples with their group-relative advantage on every learned position."""
    advantages = group_advantages([one.reward for one in samples], [one.group for one in samples], normalize=normalize)
    return [sample.with_advantage(float(advantage)) for sample, advantage in zip(samples, advantages, strict=True)]


def _relative(rewards: npt.NDArray[np.float64], normalize: bool) -> npt.NDArray[np.float64]:
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    centred: npt.NDArray[np.float64] = rewards - rewards.mean()
    scale = float(rewards.std(ddof=1)) + STD_EPSILON if normalize else 1.0
    return centred / scale
