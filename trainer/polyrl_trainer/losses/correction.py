"""How tokens are weighed because an engine drew them, not the learner: truncated and masked importance sampling.

w is a token's probability under the learner's old policy over that under the engine's. Truncation bounds how much a
token can weigh and keeps all; masks leave out what the two see too differently. Masked tokens stay in the denominator
of the loss. Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (token
truncation); IcePop, Ling Team 2025, arXiv 2510.18855 (token mask); TRL's `vllm_importance_sampling_mode` (per
sequence).
"""

from __future__ import annotations

import torch

from polyrl.manifest.parts.algorithm import AlgorithmSpec, Correction, OldLogProbs
from polyrl_trainer.backend import LossInputs

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before exp: e^20 is beyond every bound that a manifest can set (10^6), and e^89 is
float32's end."""

_BY_SEQUENCE = (Correction.SEQUENCE_TRUNCATE, Correction.SEQUENCE_MASK)
_MASKS = (Correction.TOKEN_MASK, Correction.SEQUENCE_MASK)


@torch.no_grad()
def correction_weights(inputs: LossInputs, old: torch.Tensor, algorithm: AlgorithmSpec) -> tuple[torch.Tensor, ...]:
    """float32[P] weights, and float32[P] that is 1 where a bound changed or removed them.

    log w = old - rollout, summed over a sequence's learned tokens for the corrections per sequence. With `bypass` the
    ratio of the loss contains w already: there masks weigh by 1 or 0, by the policy as it is now.
    """
    kind = algorithm.correction or default_correction(algorithm)
    if kind is Correction.NONE:
        return torch.ones_like(old), torch.zeros_like(old)
    bypass = algorithm.old_log_probs is OldLogProbs.BYPASS
    logs = ((inputs.log_probs if bypass else old) - inputs.rollout_log_probs) * inputs.mask
    if kind in _BY_SEQUENCE:
        logs = logs.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence, logs)[inputs.sequence]
    weights = ratio_of(logs)
    if kind in _MASKS:
        outside = (weights < algorithm.correction_low) | (weights > algorithm.correction_high)
        weights = torch.where(outside, 0.0, torch.ones_like(weights) if bypass else weights)
    else:
        outside = weights > algorithm.correction_high
        weights = weights.clamp(max=algorithm.correction_high)
    return weights, outside.float()


def default_correction(algorithm: AlgorithmSpec) -> Correction:
    """What a manifest means that names none."""
    return Correction.NONE if algorithm.old_log_probs is OldLogProbs.BYPASS else Correction.TOKEN_TRUNCATE


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, finite. Elementwise, any shape."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
