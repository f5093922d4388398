"""Losses of pairs against numbers worked by hand, and the laws that they keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyrl.errors import InvalidData
from polyrl.manifest.parts.preferences import DpoSpec, PreferenceLoss, RewardModelSpec
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses.preferences import dpo_loss, reward_model_loss

Column = list[float]


def pairs(lengths: list[int], log_probs: Column, reference: Column, **more: Any) -> LossInputs:
    """Answers one after the other, the chosen one of each pair first."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    nothing = torch.zeros(len(sequence))
    return LossInputs(
        log_probs=torch.tensor(log_probs, requires_grad=True),
        entropy=nothing + 0.5,
        mask=nothing + 1,
        rollout_log_probs=nothing,
        advantages=torch.tensor(more.get("advantages", nothing.tolist())),
        reference_log_probs=torch.tensor(reference),
        old_log_probs=nothing,
        sequence=sequence,
        num_sequences=len(lengths),
        values=more.get("values"),
    )


def worked() -> LossInputs:
    """The chosen answer's log-ratio is 1 over 5 tokens, the rejected one's -1 over 4."""
    log_probs = [-1.0, -1.2, -0.8, -0.5, -1.5, -2.0, -1.0, -3.0, -1.0]
    reference = [-1.5, -1.2, -0.8, -1.0, -1.5, -1.5, -0.5, -3.0, -1.0]
    return pairs([5, 4], log_probs, reference)


WORKED = [
    # (of the manifest, loss, its gradient by a chosen token's logprob, by a rejected one's)
    ({}, 0.598139, -0.0450166, 0.0450166),
    ({"label_smoothing": 0.1}, 0.618139, -0.0350166, 0.0350166),
    ({"loss": PreferenceLoss.IPO}, 20.7025, 2 * -4.55 / 5, 2 * 4.55 / 4),
    ({"loss": PreferenceLoss.HINGE}, 0.8, -0.1, 0.1),
    ({"loss": PreferenceLoss.HINGE, "beta": 0.6}, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("given", "wanted", "by_chosen", "by_rejected"), WORKED)
def test_dpo_by_hand(given: dict[str, Any], wanted: float, by_chosen: float, by_rejected: float) -> None:
    inputs = worked()
    loss, sums = dpo_loss(inputs, DpoSpec(**given))
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, inputs.log_probs)
    assert gradient.tolist() == pytest.approx([by_chosen] * 5 + [by_rejected] * 4, rel=1e-4)
    beta = given.get("beta", 0.1)
    assert sums == pytest.approx(
        {
            "rewards/chosen": beta,
            "rewards/rejected": -beta,
            "rewards/margins": 2 * beta,
            "rewards/accuracies": 1.0,
            "logps/chosen": -5.0,
            "logps/rejected": -7.0,
            "entropy": 4.5,
        },
        rel=1e-5,
    )


def test_what_is_not_learned_counts_neither_for_sums_nor_for_lengths() -> None:
    shorter = replace(worked(), mask=torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]))
    loss, sums = dpo_loss(shorter, DpoSpec(loss=PreferenceLoss.IPO))
    assert loss.item() == pytest.approx((1 / 2 + 1 / 2 - 5) ** 2)
    assert sums["logps/chosen"] == pytest.approx(-1.5)


def test_pairs_add_up_however_they_are_split() -> None:
    one, other = pairs([1, 1], [-1.0, -2.0], [-2.0, -1.0]), pairs([1, 1], [-3.0, -2.0], [-1.0, -2.5])
    both = pairs([1, 1, 1, 1], [-1.0, -2.0, -3.0, -2.0], [-2.0, -1.0, -1.0, -2.5])
    apart = [dpo_loss(part, DpoSpec()) for part in (one, other)]
    loss, sums = dpo_loss(both, DpoSpec())
    assert loss.item() == pytest.approx(sum(part[0].item() for part in apart))
    assert sums == pytest.approx({name: sum(part[1][name] for part in apart) for name in sums})
    assert sums["rewards/accuracies"] == 1, "the second pair is the wrong way round"


def test_a_reference_is_needed() -> None:
    with pytest.raises(InvalidData, match="dpo needs reference_log_probs on every sample"):
        dpo_loss(replace(worked(), absent=frozenset({"reference_log_probs"})), DpoSpec())


@pytest.mark.parametrize(
    ("margin", "centre", "wanted"), [(0.0, 0.0, 0.371101), (0.5, 0.0, 0.554355), (0.0, 0.01, 0.371101 + 0.0144)]
)
def test_the_reward_model_by_hand(margin: float, centre: float, wanted: float) -> None:
    scores = torch.tensor([1.0, 0.2], requires_grad=True)
    inputs = pairs([1, 1], [0.0, 0.0], [0.0, 0.0], values=scores, advantages=[margin, 0.0])
    loss, sums = reward_model_loss(inputs, RewardModelSpec(center_rewards_coefficient=centre))
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert sums == pytest.approx({"accuracy": 1.0, "margin": 0.8, "mean_reward": 0.6})
    (gradient,) = torch.autograd.grad(loss, scores)
    assert sum(gradient.tolist()) == pytest.approx(2 * 2 * centre * 1.2, abs=1e-6)
