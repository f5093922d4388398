"""The policy gradient of every algorithm: a bounded ratio times an advantage, a KL penalty, and how tokens add up.

What the ratio compares with, `oldLogProbs` of the manifest says; how far engine and learner are apart is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from polyrl.errors import InvalidData
from polyrl.manifest.parts.algorithm import Aggregation, AlgorithmSpec, KlEstimator, KlPlace, OldLogProbs, PolicyLoss
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses.correction import MAX_LOG_RATIO, correction_weights, ratio_of
from polyrl_trainer.losses.own import TokenLoss
from polyrl_trainer.losses.presets import aggregation_of, clip_of, policy_loss_of
from polyrl_trainer.losses.sft import MAX_SUFFIX, as_floats

MAX_K3 = 10.0
"""Largest value of k3, as in verl; beyond it k2 and k3 have no gradient. One token that the policy has made
impossible would otherwise be e^94 and end the run."""


def k1(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """-log r: unbiased, of high variance, negative for some tokens. Elementwise, any shape."""
    return log_q - log_p


def k2(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """(log r)^2 / 2, at most MAX_K3: biased as a number, with the divergence's own gradient. Elementwise, any shape."""
    return ((log_p - log_q).square() / 2).clamp(max=MAX_K3)


def k3(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """(r - 1) - log r, at most MAX_K3: unbiased below it, of low variance, never negative. Elementwise, any shape."""
    log_ratio = (log_p - log_q).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=MAX_K3)


def k3_by_ratio(log_q: torch.Tensor, log_p: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """k3 times the ratio, whose gradient is the ratio times -log r. Where k3 is bounded it has none, and the ratio's
    alone would drive a token that the policy has left further from the reference: the whole of it, at most MAX_K3 times
    the ratio, stands there instead. Elementwise, any shape."""
    number = k3(log_q, log_p)
    pull = (ratio * k1(log_q, log_p).clamp(-MAX_K3, MAX_K3)).detach()
    bounded = (number * ratio).detach() + pull * (log_q - log_q.detach())
    return torch.where(number < MAX_K3, number * ratio, bounded)


def policy_gradient(
    inputs: LossInputs, algorithm: AlgorithmSpec, own: TokenLoss | None = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """L = aggregate( -w max(min(r A, clip(r, low, high) A), c A if A < 0) + beta KL(pi, pi_ref) - eta H ), a scalar.

    r = pi(o_t) / pi_old(o_t) of each learned token, of GSPO its geometric mean over the sequence; CISPO's term is
    -w sg(clip(r, low, high)) A log pi(o_t) instead. low and high are by `clip_of`, c is `dual_clip` (Ye et al. 2019,
    arXiv 1912.09729, eq. 5), w the weight of `correction` (see there), beta `kl_coefficient`, eta
    `entropy_coefficient` of the entropy H at the token (Mnih et al. 2016, arXiv 1602.01783, section 4). The aggregate
    is a sum over sequences, of means over their tokens or of sums; `presets.normalizer` divides it in the optimizer
    step. With `own` its numbers stand in place of the whole bracket of max; it finds pi_old in `old_log_probs`. Tokens
    that are not `kept` add nothing, and count in the aggregate's divisor.

    Sums over learned tokens: `pg_loss`, `clip_fraction` and `dual_clip_fraction` (tokens that the one or the other
    bounds), `correction_weight`, `correction_square`, `correction_fraction` (bounded or left out), `ratio`,
    `ratio_square`, `entropy`, `mismatch_k1` and `mismatch_k3` (rollout policy to the old one, where that is recomputed,
    else to this one), `rollout_drift` (absolute difference of their logprobs); with recomputed ones `moved_k1` (old
    policy to this one), with a penalty in the loss `kl_reference`; and `ratio_max`, `rollout_drift_max`.
    Raises InvalidData when samples lack what the formula needs.
    """
    _refuse_absent(inputs, algorithm)
    old = old_log_probs(inputs, algorithm)
    ratio = ratio_of(inputs.log_probs - old)
    bounded, shares = _bounded(inputs, old, algorithm) if own is None else _own_terms(inputs, old, own)
    weights, outside = correction_weights(inputs, old, algorithm)
    per_token = -weights * bounded
    sums = {
        **_policy_sums(inputs, per_token, ratio),
        **_mismatch_sums(inputs, old, recomputed=algorithm.old_log_probs is OldLogProbs.RECOMPUTE),
        **{name: _summed(inputs, name, share) for name, share in shares.items()},
        "correction_weight": _sum(inputs, weights),
        "correction_square": _sum(inputs, weights.square()),
        "correction_fraction": _sum(inputs, outside),
    }
    kept = torch.ones_like(per_token) if inputs.kept is None else inputs.kept
    per_token = per_token * kept
    if penalizes_loss(algorithm):
        kl = _penalty(inputs, ratio, algorithm)
        per_token = per_token + algorithm.kl_coefficient * kl * kept
        sums["kl_reference"] = _sum(inputs, kl)
    if learns_entropy(algorithm):
        per_token = per_token - algorithm.entropy_coefficient * inputs.entropy * kept
    return aggregated(per_token, inputs, algorithm), as_floats(sums)


def _bounded(
    inputs: LossInputs, old: torch.Tensor, algorithm: AlgorithmSpec
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """float32[P], what is to be maximized, and by name which tokens (1 or 0) have a bound."""
    (low, high), kind = clip_of(algorithm), policy_loss_of(algorithm)
    ratio = ratio_of(_sequence_logs(inputs, old) if kind is PolicyLoss.GSPO else inputs.log_probs - old)
    clipped = ratio.clamp(low, high)
    if kind is PolicyLoss.CISPO:
        cut = clipped.detach()
        return cut * inputs.advantages * inputs.log_probs, {"clip_fraction": cut != ratio}
    surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    floor = algorithm.dual_clip * inputs.advantages
    bounded = torch.where(inputs.advantages < 0, torch.maximum(surrogate, floor), surrogate)
    return bounded, {
        "clip_fraction": ratio * inputs.advantages > clipped * inputs.advantages,
        "dual_clip_fraction": (inputs.advantages < 0) & (surrogate < floor),
    }


def _own_terms(
    inputs: LossInputs, old: torch.Tensor, own: TokenLoss
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    loss, numbers = own(replace(inputs, old_log_probs=old))
    return -loss, numbers


def _sequence_logs(inputs: LossInputs, old: torch.Tensor) -> torch.Tensor:
    """float32[P]: at each token the mean of its sequence's log-ratios, with the gradient of that token's own (GSPO,
    Zheng et al. 2025, arXiv 2507.18071, eq. 14)."""
    mean = sequence_means((inputs.log_probs - old).detach(), inputs)[inputs.sequence]
    return mean + inputs.log_probs - inputs.log_probs.detach()


def _penalty(inputs: LossInputs, ratio: torch.Tensor, algorithm: AlgorithmSpec) -> torch.Tensor:
    """float32[P]; the ratio counts up to `dualClip`."""
    now, reference = inputs.log_probs, inputs.reference_log_probs
    match algorithm.kl_estimator:
        case KlEstimator.K1:
            return k1(now, reference)
        case KlEstimator.K2:
            return k2(now, reference)
        case KlEstimator.K3:
            return k3(now, reference)
        case KlEstimator.K3_RATIO:
            return k3_by_ratio(now, reference, ratio.clamp(max=algorithm.dual_clip))


def penalizes_loss(algorithm: AlgorithmSpec) -> bool:
    """Whether the loss has a KL term."""
    return algorithm.kl_coefficient > 0 and algorithm.kl_place is KlPlace.LOSS


def pulls_elsewhere(algorithm: AlgorithmSpec) -> bool:
    """Whether the KL term has not the gradient of KL(pi || piRef): that of k1 is 0 on average, k3's is biased."""
    return penalizes_loss(algorithm) and algorithm.kl_estimator in (KlEstimator.K1, KlEstimator.K3)


def learns_entropy(algorithm: AlgorithmSpec) -> bool:
    """Whether the loss has an entropy bonus, whose gradient the backend has to keep."""
    return algorithm.entropy_coefficient > 0


def aggregated(per_token: torch.Tensor, inputs: LossInputs, algorithm: AlgorithmSpec) -> torch.Tensor:
    """A scalar, yet to be divided by `presets.normalizer`."""
    if aggregation_of(algorithm) is Aggregation.SEQUENCE_MEAN:
        return sequence_means(per_token, inputs).sum()
    return (per_token * inputs.mask).sum()


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
    return totals / zeros.index_add(0, inputs.sequence, inputs.mask).clamp(min=1.0)


def _refuse_absent(inputs: LossInputs, algorithm: AlgorithmSpec) -> None:
    needed = {"rollout_log_probs", "advantages"}
    if penalizes_loss(algorithm):
        needed.add("reference_log_probs")
    if algorithm.old_log_probs is OldLogProbs.RECOMPUTE:
        needed.add("old_log_probs")
    missing = sorted(needed & inputs.absent)
    if missing:
        raise InvalidData(
            f"{algorithm.name.value} needs {' and '.join(missing)} on every sample, and a sample has none"
        )


def _sum(inputs: LossInputs, per_token: torch.Tensor) -> torch.Tensor:
    return (per_token.detach().float() * inputs.mask).sum()


def _summed(inputs: LossInputs, name: str, per_token: torch.Tensor) -> torch.Tensor:
    if name.endswith(MAX_SUFFIX):
        learned = per_token.detach().float()[inputs.mask > 0]
        return learned.max() if learned.numel() else learned.new_zeros(())
    return _sum(inputs, per_token)


@torch.no_grad()
def _policy_sums(inputs: LossInputs, per_token: torch.Tensor, ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "pg_loss": _sum(inputs, per_token),
        "ratio": _sum(inputs, ratio),
        "ratio_square": _sum(inputs, ratio.square()),
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
