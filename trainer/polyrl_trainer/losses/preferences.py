"""Losses of pairs of answers: DPO, and the reward model's.

A pass holds whole pairs, the chosen answer before the rejected one: sequences 2n and 2n + 1 are pair n. Losses are sums
over pairs; the optimizer step's normalizer is the number of pairs. Shapes: P positions, N pairs of the pass.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from polyrl.errors import InvalidData
from polyrl.manifest.parts.preferences import DpoSpec, PreferenceLoss, RewardModelSpec
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses.sft import as_floats


def dpo_loss(inputs: LossInputs, dpo: DpoSpec) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum over pairs, with d = (log pi - log piRef of the chosen answer) - (the same of the rejected one), logprobs
    summed over an answer's learned tokens, b = `beta` and e = `labelSmoothing`:

    sigmoid: -(1 - e) log sigmoid(b d) - e log sigmoid(-b d) (Rafailov et al. 2023, arXiv 2305.18290; e: Mitchell 2023)
    ipo: (d - 1 / (2 b))^2, with logprobs averaged over an answer's tokens (Azar et al. 2023, arXiv 2310.12036, eq. 17;
    the average is TRL's, as the authors have it)
    hinge: max(0, 1 - b d) (Zhao et al. 2023, arXiv 2305.10425)

    Sums over pairs, named as TRL names them: `rewards/chosen` and `rewards/rejected` (b times log pi - log piRef),
    `rewards/margins`, `rewards/accuracies` (margin above 0), `logps/chosen`, `logps/rejected`.
    Raises InvalidData when samples lack the reference's logprobs.
    """
    if "reference_log_probs" in inputs.absent:
        raise InvalidData("dpo needs reference_log_probs on every sample, and a sample has none")
    chosen, rejected = _of_pairs(inputs, inputs.log_probs - inputs.reference_log_probs)
    margin = dpo.beta * (chosen - rejected)
    match dpo.loss:
        case PreferenceLoss.SIGMOID:
            smoothed = dpo.label_smoothing
            losses = -(1 - smoothed) * logsigmoid(margin) - smoothed * logsigmoid(-margin)
        case PreferenceLoss.IPO:
            lengths = [counts.clamp(min=1.0) for counts in _of_pairs(inputs, torch.ones_like(inputs.mask))]
            losses = (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * dpo.beta)).square()
        case PreferenceLoss.HINGE:
            losses = (1 - margin).clamp(min=0.0)
    logps = _of_pairs(inputs, inputs.log_probs)
    sums = {
        "rewards/chosen": dpo.beta * chosen.sum(),
        "rewards/rejected": dpo.beta * rejected.sum(),
        "rewards/margins": margin.sum(),
        "rewards/accuracies": (margin > 0).sum(),
        "logps/chosen": logps[0].sum(),
        "logps/rejected": logps[1].sum(),
        "entropy": (inputs.mask * inputs.entropy).sum(),
    }
    return losses.sum(), as_floats(sums)


def reward_model_loss(inputs: LossInputs, model: RewardModelSpec) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum over pairs of -log sigmoid(c - r - m) + w (c + r)^2, c and r the scores of the chosen and the rejected answer
    (Bradley and Terry 1952), m the margin that the chosen one's `advantages` hold (Touvron et al. 2023, arXiv
    2307.09288, eq. 2), w `centerRewardsCoefficient` (Eisenstein et al. 2023, arXiv 2312.09244).

    Sums over pairs: `accuracy` (c above r), `margin` (c - r), `mean_reward` (of both).
    """
    assert inputs.values is not None, "a reward model has a value head"
    chosen, rejected = _of_pairs(inputs, inputs.values)
    wanted, _ = _of_pairs(inputs, inputs.advantages)
    losses = -logsigmoid(chosen - rejected - wanted)
    losses = losses + model.center_rewards_coefficient * (chosen + rejected).square()
    sums = {
        "accuracy": (chosen > rejected).sum(),
        "margin": (chosen - rejected).sum(),
        "mean_reward": (chosen + rejected).sum() / 2,
    }
    return losses.sum(), as_floats(sums)


def _of_pairs(inputs: LossInputs, per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[N] each, sums over learned tokens of the chosen and of the rejected answers."""
    zeros = torch.zeros(inputs.num_sequences, dtype=torch.float32, device=per_token.device)
    chosen, rejected = zeros.index_add(0, inputs.sequence, per_token * inputs.mask).view(-1, 2).unbind(1)
    return chosen, rejected
