"""GRPO: policy gradient on group-relative advantages with a clipped ratio (Shao et al. 2024, arXiv 2402.03300, eq. 3).

What the ratio compares with, `oldLogProbs` of the manifest says; how far engine and learner are apart is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from polyrl.errors import InvalidData
from polyrl.manifest.recipe import AlgorithmSpec, OldLogProbs
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses.correction import MAX_LOG_RATIO, correction_weights, ratio_of
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
    """The same samples with their group-relative advantage, of reward and penalty, on every learned position."""
    advantages = group_advantages(
        [one.reward + one.penalty for one in samples], [one.group for one in samples], normalize=normalize
    )
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


MAX_K3 = 10.0
"""Largest value of k3, as in verl; beyond it a token has no gradient. One token that the policy has made
impossible would otherwise be e^94 and end the run."""


def k1(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """-log r: unbiased, of high variance, negative for some tokens. Elementwise, any shape."""
    return log_q - log_p


def k3(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """(r - 1) - log r, at most MAX_K3: unbiased below it, of low variance, never negative. Elementwise, any shape."""
    log_ratio = (log_p - log_q).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=MAX_K3)


def grpo(inputs: LossInputs, algorithm: AlgorithmSpec) -> tuple[torch.Tensor, dict[str, float]]:
    """L = sum_i 1/|o_i| sum_t ( -w max(min(r A, clip(r, 1 - low, 1 + high) A), c A if A < 0) + beta * k3(pi, pi_ref) ),
    a scalar.

    i runs over sequences, t over the learned tokens of o_i, r = pi(o_t) / pi_old(o_t); low and high are `clip_low` and
    `clip_high` (DAPO's clip-higher when larger, Yu et al. 2025, arXiv 2503.14476), c is `dual_clip` (Ye et al. 2019,
    arXiv 1912.09729, eq. 5), w the weight of `correction` (see there), beta `kl_coefficient`. A sum over sequences: the
    optimizer step's normalizer is the number of samples of the mini-batch.

    Sums over learned tokens: `pg_loss`, `clip_fraction` and `dual_clip_fraction` (tokens whose gradient the one or the
    other removed), `correction_weight`, `correction_fraction` (bounded or left out), `ratio`, `entropy`, `mismatch_k1`
    and `mismatch_k3` (rollout policy to the old one, where that is recomputed, else to this one), `rollout_drift`
    (absolute difference of their logprobs); with recomputed ones `moved_k1` (old policy to this one), with
    `kl_coefficient` `kl_reference`; and `ratio_max`, `rollout_drift_max`.
    Raises InvalidData when samples lack what the formula needs.
    """
    _refuse_absent(inputs, algorithm)
    old = old_log_probs(inputs, algorithm)
    ratio = ratio_of(inputs.log_probs - old)
    clipped = ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    floor = algorithm.dual_clip * inputs.advantages
    bounded = torch.where(inputs.advantages < 0, torch.maximum(surrogate, floor), surrogate)
    weights, outside = correction_weights(inputs, old, algorithm)
    per_token = -weights * bounded
    sums = {
        **_policy_sums(inputs, per_token, ratio),
        **_mismatch_sums(inputs, old, recomputed=algorithm.old_log_probs is OldLogProbs.RECOMPUTE),
        "clip_fraction": _sum(inputs, ratio * inputs.advantages > clipped * inputs.advantages),
        "dual_clip_fraction": _sum(inputs, (inputs.advantages < 0) & (surrogate < floor)),
        "correction_weight": _sum(inputs, weights),
        "correction_fraction": _sum(inputs, outside),
    }
    if algorithm.kl_coefficient > 0:
        kl = k3(inputs.log_probs, inputs.reference_log_probs)
        per_token = per_token + algorithm.kl_coefficient * kl
        sums["kl_reference"] = _sum(inputs, kl)
    return sequence_means(per_token, inputs).sum(), as_floats(sums)


def old_log_probs(inputs: LossInputs, algorithm: AlgorithmSpec) -> torch.Tensor:
    """float32[P], without gradient: what the clipped ratio compares with."""
    match algorithm.old_log_probs:
        case OldLogProbs.BYPASS:
            return inputs.rollout_log_probs
        case OldLogProbs.REUSE:
            return inputs.log_probs.detach()
        case OldLogProbs.RECOMPUTE:
            return inputs.old_log_probs


def sequence_means(per_token: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """float32[num_sequences], mean over each sequence's learned tokens; 0 for a sequence without any."""
    zeros = torch.zeros(inputs.num_sequences, dtype=torch.float32, device=per_token.device)
    totals = zeros.index_add(0, inputs.sequence, per_token * inputs.mask)
    counts = zeros.index_add(0, inputs.sequence, inputs.mask)
    return totals / counts.clamp(min=1.0)


def _refuse_absent(inputs: LossInputs, algorithm: AlgorithmSpec) -> None:
    needed = {"rollout_log_probs", "advantages"}
    if algorithm.kl_coefficient > 0:
        needed.add("reference_log_probs")
    if algorithm.old_log_probs is OldLogProbs.RECOMPUTE:
        needed.add("old_log_probs")
    missing = sorted(needed & inputs.absent)
    if missing:
        raise InvalidData(f"GRPO needs {' and '.join(missing)} on every sample, and a sample has none")


def _sum(inputs: LossInputs, per_token: torch.Tensor) -> torch.Tensor:
    return (per_token.detach().float() * inputs.mask).sum()


@torch.no_grad()
def _policy_sums(inputs: LossInputs, per_token: torch.Tensor, ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "pg_loss": _sum(inputs, per_token),
        "ratio": _sum(inputs, ratio),
        "entropy": _sum(inputs, inputs.entropy),
        "ratio_max": torch.cat([ratio, ratio.new_zeros(1)]).max(),
    }


@torch.no_grad()
def _mismatch_sums(inputs: LossInputs, old: torch.Tensor, *, recomputed: bool) -> dict[str, torch.Tensor]:
    rollout, now = inputs.rollout_log_probs, inputs.log_probs
    drift = (now - rollout).abs()
    base = old if recomputed else now
    sums = {
        "mismatch_k1": _sum(inputs, k1(rollout, base)),
        "mismatch_k3": _sum(inputs, k3(rollout, base)),
        "rollout_drift": _sum(inputs, drift),
        "rollout_drift_max": torch.cat([drift, drift.new_zeros(1)]).max(),
    }
    return {**sums, "moved_k1": _sum(inputs, k1(old, now))} if recomputed else sums
