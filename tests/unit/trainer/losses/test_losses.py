"""Losses against numbers worked by hand, and the laws that every loss must keep."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from polyrl.errors import InvalidData
from polyrl.manifest.parts.algorithm import AlgorithmName, AlgorithmSpec
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses import averages, merge, normalizer, policy_loss, sft_loss
from polyrl_trainer.losses.policy_gradient import k1, k2, k3, policy_gradient as grpo, pulls_elsewhere
from polyrl_trainer.losses.presets import PRESETS

LN2 = math.log(2.0)


def inputs(sequence: list[int], **columns: Any) -> LossInputs:
    """LossInputs of the given columns; what is not given is 0, the mask 1."""
    num_positions = len(sequence)

    def column(name: str, default: float = 0.0) -> torch.Tensor:
        return torch.tensor(columns.get(name, [default] * num_positions), dtype=torch.float32)

    return LossInputs(
        log_probs=column("log_probs").requires_grad_(),
        entropy=column("entropy"),
        mask=column("mask", 1.0),
        rollout_log_probs=column("rollout_log_probs"),
        advantages=column("advantages"),
        reference_log_probs=column("reference_log_probs"),
        old_log_probs=column("old_log_probs"),
        sequence=torch.tensor(sequence, dtype=torch.int64),
        num_sequences=max(sequence) + 1,
        absent=columns.get("absent", frozenset()),
        kept=torch.tensor(columns["kept"], dtype=torch.float32) if "kept" in columns else None,
    )


def gradient(loss: torch.Tensor, given_inputs: LossInputs) -> list[float]:
    (values,) = torch.autograd.grad(loss, given_inputs.log_probs)
    numbers: list[float] = values.tolist()
    return numbers


def test_sft_is_the_masked_sum_of_negative_logprobs() -> None:
    given_inputs = inputs([0, 0, 1], log_probs=[-1.0, -2.0, -4.0], mask=[1.0, 0.0, 0.5], entropy=[1.0, 1.0, 2.0])
    loss, sums = sft_loss(given_inputs)
    assert loss.item() == pytest.approx(1.0 + 0.5 * 4.0)
    assert sums == {"entropy": pytest.approx(1.0 + 0.5 * 2.0)}
    assert gradient(loss, given_inputs) == [-1.0, 0.0, -0.5]


def test_grpo_by_hand() -> None:
    # Ratios 2, 1, 1/2, 1; clipped to [0.8, 1.3]. Sequence 0 (A = 1): min(2, 1.3) and 1 -> mean -1.15.
    # Sequence 1 (A = -1): min(-0.5, -0.8) = -0.8 and -1 -> mean 0.9.
    rollout = [-1.0, -1.0, -1.0, -1.0]
    given_inputs = inputs(
        [0, 0, 1, 1],
        log_probs=[-1.0 + LN2, -1.0, -1.0 - LN2, -1.0],
        rollout_log_probs=rollout,
        advantages=[1.0, 1.0, -1.0, -1.0],
        entropy=[0.5, 0.5, 0.25, 0.25],
    )
    loss, sums = policy_loss(AlgorithmSpec(clip_low=0.2, clip_high=0.3))(given_inputs)
    assert loss.item() == pytest.approx(-1.15 + 0.9)
    assert sums["pg_loss"] == pytest.approx(-1.3 - 1.0 + 0.8 + 1.0)
    assert sums["clip_fraction"] == 2.0
    assert sums["ratio"] == pytest.approx(4.5)
    assert sums["ratio_max"] == pytest.approx(2.0)
    assert sums["entropy"] == pytest.approx(1.5)
    assert sums["mismatch_k1"] == pytest.approx(0.0, abs=1e-6)
    assert sums["mismatch_k3"] == pytest.approx((2 - 1 - LN2) + (0.5 - 1 + LN2))
    assert sums["rollout_drift"] == pytest.approx(2 * LN2)
    assert sums["rollout_drift_max"] == pytest.approx(LN2)
    # Where the clip bites there is no gradient; elsewhere -ratio * A / |o|.
    assert gradient(loss, given_inputs) == pytest.approx([0.0, -0.5, 0.0, 0.5])


def test_the_clip_leaves_the_way_back_open() -> None:
    # Ratio 2 with A < 0, and 1/2 with A > 0: the pessimistic side is the unclipped one, so the gradient stays.
    given_inputs = inputs([0, 1], log_probs=[LN2, -LN2], advantages=[-1.0, 1.0])
    loss, sums = grpo(given_inputs, AlgorithmSpec())
    assert loss.item() == pytest.approx(2.0 - 0.5)
    assert sums["clip_fraction"] == 0.0
    assert gradient(loss, given_inputs) == pytest.approx([2.0, -0.5])


def test_grpo_adds_the_weighted_penalty_to_the_reference() -> None:
    # Reference twice and half as likely: k3 = 2 - 1 - ln 2 and 1/2 - 1 + ln 2; their gradients are 1 - 2 and 1 - 1/2.
    given_inputs = inputs([0, 0], reference_log_probs=[LN2, -LN2])
    loss, sums = grpo(given_inputs, AlgorithmSpec(kl_coefficient=0.1, kl_estimator="k3"))
    penalty = (1 - LN2) + (LN2 - 0.5)
    assert loss.item() == pytest.approx(0.1 * penalty / 2)
    assert sums["kl_reference"] == pytest.approx(penalty)
    assert gradient(loss, given_inputs) == pytest.approx([0.1 * (1 - 2) / 2, 0.1 * (1 - 0.5) / 2])


def test_each_sequence_weighs_the_same_whatever_its_length() -> None:
    loss, _ = grpo(inputs([0, 1, 1, 1, 1], advantages=[1.0, -1.0, -1.0, -1.0, -1.0]), AlgorithmSpec())
    assert loss.item() == pytest.approx(0.0)


def test_a_sequence_without_learned_tokens_adds_nothing() -> None:
    loss, _ = grpo(inputs([0, 2], advantages=[1.0, 1.0]), AlgorithmSpec())
    assert loss.item() == pytest.approx(-2.0)
    unmasked, _ = grpo(inputs([0, 1], advantages=[1.0, 1.0], mask=[1.0, 0.0]), AlgorithmSpec())
    assert unmasked.item() == pytest.approx(-1.0)


def test_grpo_of_no_positions_is_zero() -> None:
    empty = inputs([0])
    nothing = {
        name: getattr(empty, name)[:0]
        for name in (
            "log_probs",
            "entropy",
            "mask",
            "rollout_log_probs",
            "advantages",
            "reference_log_probs",
            "old_log_probs",
            "sequence",
        )
    }
    loss, sums = grpo(LossInputs(num_sequences=1, **nothing), AlgorithmSpec())
    assert loss.item() == 0.0
    assert sums["ratio_max"] == 0.0


@pytest.mark.parametrize("field", ["rollout_log_probs", "advantages"])
def test_grpo_refuses_samples_without_what_it_needs(field: str) -> None:
    with pytest.raises(InvalidData, match=field):
        grpo(inputs([0], absent=frozenset({field})), AlgorithmSpec())


def test_the_reference_is_needed_only_with_a_penalty() -> None:
    without = inputs([0], absent=frozenset({"reference_log_probs"}))
    grpo(without, AlgorithmSpec())
    with pytest.raises(InvalidData, match="reference_log_probs"):
        grpo(without, AlgorithmSpec(kl_coefficient=0.1))


def test_every_algorithm_that_a_manifest_may_name_stands_for_something() -> None:
    assert set(PRESETS) == set(AlgorithmName)


# Two sequences, the second with a negative advantage; every number of the table below is worked by hand from these.
WORKED: dict[str, Any] = {
    "sequence": [0, 0, 1, 1, 1],
    "log_probs": [-1.0, -2.0, -0.7, -1.5, -0.2],
    "old_log_probs": [-1.2, -1.0, -1.2, -1.0, -2.2],
    "rollout_log_probs": [-1.1, -1.4, -1.2, -2.2, -2.0],
    "advantages": [1.0, 1.0, -0.5, -0.5, -0.5],
}
FREE = 1_000_000.0
"""No dual clip."""


@pytest.mark.parametrize(
    ("algorithm", "mean_of_sequences"),
    [
        # r of old: A 1.221403, .367879; B 1.648721, .606531, 7.389056; the last one weighs 1.5 at most with c = 3.
        ({"old_log_probs": "recompute", "correction": "none", "dual_clip": FREE}, 0.427845),
        ({"old_log_probs": "recompute", "correction": "none", "dual_clip": FREE, "clip_high": 0.28}, 0.422494),
        ({"old_log_probs": "recompute", "correction": "none"}, 0.062090),
        # w of old to rollout: A .904837, 1.491825; B 1, 3.320117, .818731; products 1.349859 and 2.718282.
        ({"old_log_probs": "recompute", "dual_clip": FREE}, 0.366210),
        ({"old_log_probs": "recompute", "correction": "sequenceTruncate", "dual_clip": FREE}, 1.110526),
        (
            {"old_log_probs": "recompute", "correction": "tokenMask", "correction_low": 0.5, "dual_clip": FREE},
            # A: -1.2 * .904837, -.367879 * 1.491825; B: .824361, 0 (3.32 is outside), 3.694528 * .818731; over 3 still.
            ((-1.085804 - 0.548812) / 2 + (0.824361 + 3.024824) / 3) / 2,
        ),
        (
            {"old_log_probs": "recompute", "correction": "sequenceMask", "correction_low": 0.5, "dual_clip": FREE},
            -0.529104,
        ),
        # The ratio to the engine: A 1.105171, .548812; B 1.648721, 2.013753, 6.049647.
        ({"dual_clip": FREE}, 0.395848),
        # A mask leaves out what is beyond 2 and weighs nothing: B keeps its first token only.
        ({"dual_clip": FREE, "correction": "tokenMask"}, ((-1.105171 - 0.548812) / 2 + 0.824361 / 3) / 2),
        # r is 1, all of it is in the weight min(w, 2) of the policy to the engine.
        ({"old_log_probs": "reuse"}, (-(1.105171 + 0.548812) / 2 + 0.5 * (1.648721 + 2 + 2) / 3) / 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_mode_by_hand(algorithm: dict[str, Any], mean_of_sequences: float) -> None:
    loss, _ = grpo(inputs(**WORKED), AlgorithmSpec(**algorithm))
    assert loss.item() / 2 == pytest.approx(mean_of_sequences, abs=2e-6)


RECOMPUTED: dict[str, Any] = {"old_log_probs": "recompute", "correction": "none", "dual_clip": FREE}


@pytest.mark.parametrize(
    ("algorithm", "loss_per_unit"),
    [
        # The four sums of the same per-token losses: -1.2, -.367879 and .824361, .4, 3.694528.
        pytest.param({"aggregation": "tokenMean"}, 0.670202, id="token-mean"),
        pytest.param({"aggregation": "sequenceMean"}, 0.427845, id="sequence-mean"),
        pytest.param({"aggregation": "sequenceSum"}, 1.675505, id="sequence-sum"),
        pytest.param({"aggregation": "constant"}, 0.418876, id="constant, 4 tokens at most"),
        pytest.param({"name": "dapo"}, 0.665921, id="dapo"),
        pytest.param({"name": "rloo"}, 1.675505, id="rloo"),
        pytest.param({"name": "dr-grpo"}, 0.418876, id="dr-grpo"),
        pytest.param({"name": "reinforce++"}, 0.670202, id="reinforce++"),
        # Geometric means of the ratios: .670320 and 1.947734; neither is bounded, as A > 0 below and A < 0 above.
        pytest.param({"policy_loss": "gspo"}, 0.151773, id="gspo's ratio with the wide clip"),
        pytest.param({"name": "gspo"}, (-0.670320 + 0.5 * 1.947734) / 2, id="gspo"),
        # Weights within [.8, 1.2], or at most 5 with no lower bound.
        pytest.param({"name": "cispo", "clip_low": 0.2, "clip_high": 0.2}, 0.332, id="cispo, cut at the actor's range"),
        pytest.param({"name": "cispo"}, 0.085042, id="cispo"),
    ],
)
def test_each_algorithm_by_hand(algorithm: dict[str, Any], loss_per_unit: float) -> None:
    spec = AlgorithmSpec(**{**RECOMPUTED, **algorithm})
    loss, _ = grpo(inputs(**WORKED), spec)
    divisor = normalizer(spec, samples=2, tokens=5, max_new_tokens=4)
    assert loss.item() / divisor == pytest.approx(loss_per_unit, abs=2e-6)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        pytest.param({"aggregation": "tokenMean"}, [0, -0.073576, 0.164872, 0, 0.738906], id="clip"),
        pytest.param({"policy_loss": "gspo"}, [-0.167580] * 2 + [0.162311] * 3, id="gspo: a sequence's tokens alike"),
        pytest.param(
            {"name": "cispo", "clip_low": 0.2, "clip_high": 0.2}, [-0.24, -0.16, 0.12, 0.08, 0.12], id="cispo: all pull"
        ),
    ],
)
def test_gradients_by_hand(algorithm: dict[str, Any], expected: list[float]) -> None:
    spec, given_inputs = AlgorithmSpec(**{**RECOMPUTED, **algorithm}), inputs(**WORKED)
    loss, _ = grpo(given_inputs, spec)
    divisor = normalizer(spec, samples=2, tokens=5, max_new_tokens=4)
    assert gradient(loss / divisor, given_inputs) == pytest.approx(expected, abs=2e-6)


PI, REFERENCE = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
EXACT = [0.320702, -0.082466, -0.238236]
"""Gradient of KL(pi || reference) = .274887 in the logits of PI."""


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        pytest.param("k1", [0.0, 0.0, 0.0], id="k1 pulls nowhere"),
        pytest.param("k2", EXACT, id="k2 is exact"),
        pytest.param("k3", [0.3, 0.0, -0.3], id="k3 is the other divergence's"),
        pytest.param("k3Ratio", EXACT, id="k3 with the ratio is exact"),
    ],
)
def test_where_each_penalty_pulls_on_average(estimator: str, expected: list[float]) -> None:
    logits = torch.tensor(PI).log().requires_grad_()
    drawn = inputs([0, 1, 2], rollout_log_probs=np.log(PI).tolist(), reference_log_probs=np.log(REFERENCE).tolist())
    drawn = replace(drawn, log_probs=torch.log_softmax(logits, dim=0))
    spec = AlgorithmSpec(kl_coefficient=1.0, kl_estimator=estimator)
    # The average over draws: each token's loss by its probability, which has no gradient of its own.
    average = sum(grpo(replace(drawn, mask=torch.eye(3)[token]), spec)[0] * PI[token] for token in range(3))
    (found,) = torch.autograd.grad(average, logits)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx(expected, abs=2e-6)
    assert k2(torch.tensor([-1.0]), torch.tensor([-1.5])).item() == pytest.approx(0.125)


def test_a_ratio_beyond_the_dual_clip_makes_no_penalty_larger() -> None:
    # Ratio e^2, counted as 3; k3 of d = -1 is e - 2. Its own gradient is 1 - e^-d = 1 - e; the ratio, at its bound, has
    # none.
    given_inputs = inputs([0], log_probs=[-1.0], rollout_log_probs=[-3.0], reference_log_probs=[0.0])
    loss, _ = grpo(given_inputs, AlgorithmSpec(kl_coefficient=1.0, kl_estimator="k3Ratio"))
    assert loss.item() == pytest.approx(3 * (math.e - 2), abs=1e-5)
    assert gradient(loss, given_inputs) == pytest.approx([3 * (1 - math.e)], abs=1e-5)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        pytest.param(-2.0, -2.0, id="less likely than the reference has it"),
        pytest.param(-4.0, -4.0, id="far less likely: k3 at its bound"),
        pytest.param(-30.0, -10.0, id="impossible"),
        pytest.param(4.0, 4.0, id="more likely"),
        pytest.param(12.0, 10.0, id="far more likely: k3 at its bound"),
    ],
)
def test_k3_with_the_ratio_pulls_to_the_reference_beyond_its_bound_too(difference: float, expected: float) -> None:
    # At ratio 1 the gradient of k3 times the ratio is d; beyond 10 no token pulls more.
    given_inputs = inputs([0], log_probs=[-1.0], rollout_log_probs=[-1.0], reference_log_probs=[-1.0 - difference])
    loss, sums = grpo(given_inputs, AlgorithmSpec(kl_coefficient=1.0, kl_estimator="k3Ratio"))
    assert gradient(loss, given_inputs) == pytest.approx([expected], abs=1e-5)
    assert (
        loss.item()
        == pytest.approx(sums["kl_reference"])
        == pytest.approx(min(10.0, math.exp(-difference) + difference - 1), abs=1e-5)
    )


@pytest.mark.parametrize(
    ("algorithm", "warned"),
    [
        pytest.param({"kl_estimator": "k1"}, True, id="k1 in the loss"),
        pytest.param({"kl_estimator": "k3"}, True, id="k3 in the loss"),
        pytest.param({"kl_estimator": "k2"}, False, id="k2 in the loss"),
        pytest.param({"kl_estimator": "k3Ratio"}, False, id="k3 times the ratio"),
        pytest.param({"kl_estimator": "k3", "kl_place": "reward"}, False, id="k1 in the reward"),
        pytest.param({"kl_estimator": "k3", "kl_coefficient": 0.0}, False, id="no penalty"),
    ],
)
def test_a_penalty_that_pulls_elsewhere_is_warned_of(algorithm: dict[str, Any], warned: bool) -> None:
    assert pulls_elsewhere(AlgorithmSpec(**{"kl_coefficient": 0.1, **algorithm})) == warned


def test_shares_and_both_divergences_by_hand() -> None:
    _, sums = grpo(inputs(**WORKED), AlgorithmSpec(old_log_probs="recompute"))
    assert sums["clip_fraction"] == 2
    assert sums["dual_clip_fraction"] == 1
    assert sums["correction_fraction"] == 1
    assert sums["correction_weight"] == pytest.approx(0.904837 + 1.491825 + 1 + 2 + 0.818731, abs=1e-5)
    assert sums["correction_weight"] ** 2 / sums["correction_square"] / 5 == pytest.approx(0.886584, abs=1e-5)
    assert sums["ratio_square"] == pytest.approx(1.491825 + 0.135335 + 2.718282 + 0.367879 + 54.598150, abs=1e-4)
    assert sums["mismatch_k1"] / 5 == pytest.approx(-0.26)
    assert sums["mismatch_k3"] / 5 == pytest.approx(0.247102, abs=1e-6)
    assert sums["moved_k1"] / 5 == pytest.approx(-0.24)


@pytest.mark.parametrize(
    ("aggregation", "mean_entropy"),
    [("tokenMean", 0.54), ("sequenceMean", 0.575), ("sequenceSum", 1.35), ("constant", 0.3375)],
)
def test_an_entropy_bonus_by_hand(aggregation: str, mean_entropy: float) -> None:
    # H 1, .5 and .2, .4, .6: they add up as the policy loss does, and pull with the same weights.
    given_inputs = inputs(**WORKED, entropy=[1.0, 0.5, 0.2, 0.4, 0.6])
    given_inputs.entropy.requires_grad_()
    spec, plain = (
        AlgorithmSpec(aggregation=aggregation, entropy_coefficient=coefficient, **RECOMPUTED)
        for coefficient in (0.1, 0.0)
    )
    divisor = normalizer(spec, samples=2, tokens=5, max_new_tokens=4)
    with_bonus, without = (grpo(given_inputs, one)[0] / divisor for one in (spec, plain))
    assert (without - with_bonus).item() == pytest.approx(0.1 * mean_entropy, abs=1e-6)
    (pull,) = torch.autograd.grad(with_bonus, given_inputs.entropy)
    assert (pull @ given_inputs.entropy).item() == pytest.approx(-0.1 * mean_entropy, abs=1e-6)
    assert not torch.autograd.grad(without, given_inputs.entropy, allow_unused=True)[0]


def test_one_token_that_became_likely_does_not_outweigh_all_others() -> None:
    # 12 nats up with A < 0: e^12 = 162,755 without a bound, 3 with; and beyond the bound it has no gradient.
    given_inputs = inputs([0, 1], log_probs=[0.0, 0.0], rollout_log_probs=[-12.0, 0.0], advantages=[-1.0, -1.0])
    loss, sums = grpo(given_inputs, AlgorithmSpec())
    assert loss.item() == pytest.approx(3.0 + 1.0)
    assert sums["dual_clip_fraction"] == 1
    assert gradient(loss, given_inputs) == [0.0, 1.0]


def test_a_reused_policy_has_the_plain_gradient_times_the_weight() -> None:
    given_inputs = inputs(**WORKED)
    loss, sums = grpo(given_inputs, AlgorithmSpec(old_log_probs="reuse"))
    assert sums["ratio"] == 5
    expected = [-1.105171 / 2, -0.548812 / 2, 0.5 * 1.648721 / 3, 0.5 * 2 / 3, 0.5 * 2 / 3]
    assert gradient(loss, given_inputs) == pytest.approx(expected, abs=1e-6)


def test_recomputed_logprobs_are_needed_where_they_are_asked_for() -> None:
    with pytest.raises(InvalidData, match="old_log_probs"):
        grpo(inputs([0], absent=frozenset({"old_log_probs"})), AlgorithmSpec(old_log_probs="recompute"))


def test_impossible_ratios_stay_finite() -> None:
    given_inputs = inputs([0], rollout_log_probs=[-500.0], advantages=[-1.0], reference_log_probs=[400.0])
    loss, sums = grpo(given_inputs, AlgorithmSpec(dual_clip=FREE, kl_coefficient=1.0, kl_estimator="k3"))
    assert loss.item() == pytest.approx(FREE + 10.0)
    assert sums["rollout_drift_max"] == 500.0
    assert k3(torch.tensor([-95.0]), torch.tensor([-1.0])).item() == 10.0


logprob = st.floats(min_value=-8.0, max_value=0.0, width=32)


@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=20))
def test_k3_is_never_negative_and_both_estimators_vanish_on_equal_policies(pairs: list[tuple[float, float]]) -> None:
    log_q, log_p = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert (k3(log_q, log_p) >= 0).all()
    assert torch.equal(k1(log_q, log_q), torch.zeros_like(log_q))
    assert torch.equal(k3(log_q, log_q), torch.zeros_like(log_q))


def test_both_estimators_average_to_the_divergence() -> None:
    q, p = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = (q * (q / p).log()).sum().item()
    assert (q * k1(q.log(), p.log())).sum().item() == pytest.approx(exact)
    assert (q * k3(q.log(), p.log())).sum().item() == pytest.approx(exact)


tokens = st.lists(st.tuples(logprob, logprob, st.floats(-2, 2, width=32)), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.lists(tokens, min_size=2, max_size=5))
def test_the_loss_and_its_sums_do_not_depend_on_the_split(sequences: list[list[tuple[float, float, float]]]) -> None:
    def of(part: list[list[tuple[float, float, float]]]) -> tuple[torch.Tensor, dict[str, float]]:
        flat = [token for tokens_of_one in part for token in tokens_of_one]
        log_probs, rollout, advantages = (list(column) for column in zip(*flat, strict=True))
        sequence = [index for index, tokens_of_one in enumerate(part) for _ in tokens_of_one]
        loss, sums = grpo(
            inputs(sequence, log_probs=log_probs, rollout_log_probs=rollout, advantages=advantages), AlgorithmSpec()
        )
        return loss, {**sums, "tokens": float(len(flat))}

    whole, whole_sums = of(sequences)
    first, first_sums = of(sequences[:1])
    rest, rest_sums = of(sequences[1:])
    assert whole.item() == pytest.approx((first + rest).item(), rel=1e-4, abs=1e-3)
    assert merge(first_sums, rest_sums) == pytest.approx(whole_sums, rel=1e-4, abs=1e-3)


def test_averages_divide_sums_and_leave_maxima_and_counts() -> None:
    parts = merge(
        {"entropy": 4.0, "ratio_max": 2.0, "tokens": 3.0, "loss": 7.0, "positions": 8.0, "padded_positions": 0.0},
        {"entropy": 2.0, "ratio_max": 1.5, "tokens": 1.0, "loss": 1.0, "positions": 8.0, "padded_positions": 4.0},
    )
    assert averages(parts) == {
        "entropy": 1.5,
        "ratio_max": 2.0,
        "tokens": 4.0,
        "loss": 8.0,
        "positions": 16.0,
        "padded_positions": 4.0,
        "padding_fraction": 0.25,
    }


def test_the_largest_of_an_own_number_is_that_of_learned_tokens_also_where_all_are_negative() -> None:
    given_inputs = inputs([0, 0, 0], log_probs=[-1.0, -1.0, -1.0], mask=[1.0, 1.0, 0.0], rollout_log_probs=[-1.0] * 3)

    def own(seen: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -seen.log_probs, {"depth_max": torch.tensor([-3.0, -2.0, 9.0])}

    _, sums = policy_loss(AlgorithmSpec(), own)(given_inputs)
    assert [value for name, value in sums.items() if name.endswith("depth_max")] == [-2.0]


@pytest.mark.parametrize("aggregation", ["sequenceMean", "tokenMean"])
def test_tokens_that_are_left_out_pull_nowhere(aggregation: str) -> None:
    """Neither by a KL penalty nor by an entropy bonus; what is kept is as it was."""
    columns = {
        "log_probs": [-1.0, -2.0, -0.5], "reference_log_probs": [-2.0, -1.0, -3.0], "entropy": [0.5, 0.7, 0.9],
        "advantages": [1.0, 1.0, 0.0], "rollout_log_probs": [-1.0, -2.0, -0.5],
    }  # fmt: skip
    algorithm = AlgorithmSpec.model_validate(
        {"klCoefficient": 0.5, "entropyCoefficient": 0.1, "aggregation": aggregation}
    )
    cut = inputs([0, 0, 1], kept=[1.0, 1.0, 0.0], **columns)
    loss, sums = grpo(cut, algorithm)
    alone = inputs([0, 0], **{name: values[:2] for name, values in columns.items()})
    expected, _ = grpo(alone, algorithm)
    assert loss.item() == pytest.approx(expected.item())
    assert gradient(loss, cut) == pytest.approx([*gradient(expected, alone), 0.0])
    assert sums["entropy"] == pytest.approx(2.1), "metrics see all tokens"
