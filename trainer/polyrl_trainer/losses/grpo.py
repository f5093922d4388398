"""GRPO: policy gradient on group-relative advantages with a clipped ratio (Shao et al. 2024, arXiv 2402.03300, eq. 3).

The ratio is taken to what the engine itself reported; the drift between engine and learner is measured, not corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from polyrl.errors import InvalidData
from polyrl.manifest.recipe import AlgorithmSpec
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses.sft import as_floats
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
    return [
        replace(sample, advantages=(sample.loss_mask * float(advantage)).astype(np.float32))
        for sample, advantage in zip(samples, advantages, strict=True)
    ]


def _relative(rewards: npt.NDArray[np.float64], normalize: bool) -> npt.NDArray[np.float64]:
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    centred: npt.NDArray[np.float64] = rewards - rewards.mean()
    scale = float(rewards.std(ddof=1)) + STD_EPSILON if normalize else 1.0
    return centred / scale


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before exp: e^20 is beyond any clip range, and e^89 is float32's end."""


def k1(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """-log r: unbiased, of high variance, negative for some tokens. Elementwise, any shape."""
    return log_q - log_p


def k3(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """(r - 1) - log r: unbiased, of low variance, never negative. Elementwise, any shape."""
    log_ratio = log_p - log_q
    return torch.expm1(log_ratio) - log_ratio


def grpo(inputs: LossInputs, algorithm: AlgorithmSpec) -> tuple[torch.Tensor, dict[str, float]]:
    """L = sum_i 1/|o_i| sum_t ( -min(r A, clip(r, 1 - low, 1 + high) A) + beta * k3(pi, pi_ref) ), a scalar.

    i runs over sequences, t over the learned tokens of o_i, r = pi(o_t) / pi_rollout(o_t); low and high are
    `clip_low` and `clip_high` (DAPO's clip-higher when larger, Yu et al. 2025, arXiv 2503.14476), beta is
    `kl_coefficient`. A sum over sequences: the optimizer step's normalizer is the number of samples of the mini-batch.

    Sums over learned tokens: `pg_loss`, `clip_fraction` (tokens whose gradient the clip removed), `ratio`, `entropy`,
    `kl_rollout_k1` and `kl_rollout_k3` (rollout policy to this one), `rollout_drift` (absolute difference of their
    logprobs), with `kl_coefficient` also `kl_reference`; and `ratio_max`, `rollout_drift_max`.
    Raises InvalidData when samples lack what the formula needs.
    """
    _refuse_absent(inputs, algorithm)
    drift = inputs.log_probs - inputs.rollout_log_probs
    ratio = drift.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    per_token = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    sums = _policy_sums(inputs, per_token, ratio, clipped)
    if algorithm.kl_coefficient > 0:
        kl = k3(inputs.log_probs, inputs.reference_log_probs)
        per_token = per_token + algorithm.kl_coefficient * kl
        sums["kl_reference"] = (kl * inputs.mask).sum()
    return sequence_means(per_token, inputs).sum(), as_floats(sums)


def sequence_means(per_token: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """float32[num_sequences], mean over each sequence's learned tokens; 0 for a sequence without any."""
    zeros = torch.zeros(inputs.num_sequences, dtype=torch.float32, device=per_token.device)
    totals = zeros.index_add(0, inputs.sequence, per_token * inputs.mask)
    counts = zeros.index_add(0, inputs.sequence, inputs.mask)
    return totals / counts.clamp(min=1.0)


def _refuse_absent(inputs: LossInputs, algorithm: AlgorithmSpec) -> None:
    needed = {"rollout_log_probs", "advantages"} | ({"reference_log_probs"} if algorithm.kl_coefficient > 0 else set())
    missing = sorted(needed & inputs.absent)
    if missing:
        raise InvalidData(f"GRPO needs {' and '.join(missing)} on every sample, and a sample has none")


@torch.no_grad()
def _policy_sums(
    inputs: LossInputs, per_token: torch.Tensor, ratio: torch.Tensor, clipped: torch.Tensor
) -> dict[str, torch.Tensor]:
    drift = (inputs.log_probs - inputs.rollout_log_probs).abs()
    removed = (ratio * inputs.advantages > clipped * inputs.advantages).float()
    zero = drift.new_zeros(1)
    sums = {
        "pg_loss": per_token,
        "clip_fraction": removed,
        "ratio": ratio,
        "entropy": inputs.entropy,
        "kl_rollout_k1": k1(inputs.rollout_log_probs, inputs.log_probs),
        "kl_rollout_k3": k3(inputs.rollout_log_probs, inputs.log_probs),
        "rollout_drift": drift,
    }
    totals = {name: (value * inputs.mask).sum() for name, value in sums.items()}
    totals["ratio_max"] = torch.cat([ratio, zero]).max()
    totals["rollout_drift_max"] = torch.cat([drift, zero]).max()
    return totals
