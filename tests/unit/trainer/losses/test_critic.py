"""GAE, the value loss and what is said of both, by hand: the cases of the reference, as verl computes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from polyrl.errors import InvalidData
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses import whitened, with_advantages
from polyrl_trainer.losses.critic import gae, value_loss, value_metrics
from polyrl_trainer.sample import Sample

REWARDS, VALUES = [0.0, 0.0, 1.0], [0.5, 0.4, 0.6]


def ppo(**changes: object) -> AlgorithmSpec:
    critic = {"gaeLambda": 0.95, "valueClip": 0.2}
    return AlgorithmSpec.model_validate({"name": "ppo", "oldLogProbs": "recompute", "critic": critic, **changes})


def sample(mask: list[int], values: list[float], reward: float = 1.0, **more: object) -> Sample:
    """One token of prompt before."""
    tokens = np.zeros(len(mask) + 1, dtype=np.int64)
    padded = [np.array([0.0, *column], dtype=np.float32) for column in (mask, values)]
    made = Sample(tokens, padded[0], prompt_length=1, reward=reward, old_values=padded[1], id="0.0", group=0)
    return replace(made, **more)  # type: ignore[arg-type]


def test_gae_by_hand() -> None:
    advantages = gae(np.array(REWARDS), np.array(VALUES), 1.0, 0.95)
    np.testing.assert_allclose(advantages, [0.451, 0.58, 0.4], atol=1e-9)


def test_gamma_discounts_both_the_reward_and_what_is_expected() -> None:
    # 1 - .6 = .4;  .9 * .6 - .4 + .45 * .4 = .32;  .9 * .4 - .5 + .45 * .32 = .004
    advantages = gae(np.array(REWARDS), np.array(VALUES), 0.9, 0.5)
    np.testing.assert_allclose(advantages, [0.004, 0.32, 0.4], atol=1e-9)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8), st.floats(-2, 2), st.floats(0, 1))
def test_its_two_ends(values: list[float], reward: float, gamma: float) -> None:
    """lambda 1 is the discounted reward less the value; lambda 0 looks one token ahead."""
    rewards = np.zeros(len(values))
    rewards[-1] = reward
    discounted = reward * gamma ** np.arange(len(values) - 1, -1, -1)
    np.testing.assert_allclose(gae(rewards, np.array(values), gamma, 1.0), discounted - values, atol=1e-9)
    ahead = rewards + gamma * np.array([*values[1:], 0.0]) - values
    np.testing.assert_allclose(gae(rewards, np.array(values), gamma, 0.0), ahead, atol=1e-9)


@pytest.mark.parametrize(
    ("mask", "values", "advantages", "returns"),
    [
        pytest.param([1, 1, 1], VALUES, [0.451, 0.58, 0.4], [0.951, 0.98, 1.0], id="one turn"),
        pytest.param(
            [1, 1, 0, 1], [0.5, 0.4, 0.9, 0.6], [0.451, 0.58, 0, 0.4], [0.951, 0.98, 0, 1.0], id="a tool's token within"
        ),
        pytest.param([1, 1, 1, 0], [*VALUES, 9.0], [0.451, 0.58, 0.4, 0], [0.951, 0.98, 1.0, 0], id="one at the end"),
    ],
)
def test_values_are_carried_over_tokens_that_were_not_drawn(
    mask: list[int], values: list[float], advantages: list[float], returns: list[float]
) -> None:
    (found,) = with_advantages([sample(mask, values)], ppo())
    assert found.advantages is not None
    assert found.returns is not None
    np.testing.assert_allclose(found.advantages[1:], advantages, atol=1e-6)
    np.testing.assert_allclose(found.returns[1:], returns, atol=1e-6)


def test_advantages_are_whitened_over_the_step_and_returns_are_not() -> None:
    (found,) = whitened(with_advantages([sample([1, 1, 1], VALUES)], ppo()), ppo())
    assert found.advantages is not None
    assert found.returns is not None
    np.testing.assert_allclose(found.advantages[1:], [-0.280251, 1.110225, -0.829974], atol=1e-5)
    np.testing.assert_allclose(found.returns[1:], [0.951, 0.98, 1.0], atol=1e-6)


def test_a_penalty_in_the_reward_is_taken_from_each_token() -> None:
    # k1 is .5, -.2, .1, and .1 of it is taken: rewards -.05, .02, .99; undiscounted returns are sums of what follows.
    rollout = np.array([0, -1.0, -1.0, -1.0], dtype=np.float32)
    reference = np.array([0, -1.5, -0.8, -1.1], dtype=np.float32)
    scored = sample([1, 1, 1], VALUES, rollout_log_probs=rollout, reference_log_probs=reference)
    algorithm = ppo(klCoefficient=0.1, klPlace="reward", critic={})
    (found,) = with_advantages([scored], algorithm)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns[1:], [0.96, 1.01, 0.99], atol=1e-6)


def test_a_penalty_for_length_counts_as_reward() -> None:
    (found,) = with_advantages([sample([1, 1, 1], VALUES, penalty=-0.5)], ppo(critic={}))
    assert found.returns is not None
    np.testing.assert_allclose(found.returns[1:], [0.5, 0.5, 0.5], atol=1e-6)


def test_without_values_it_is_refused() -> None:
    with pytest.raises(InvalidData, match=r"sample 0\.0: gae needs the critic's old_values"):
        with_advantages([sample([1], [0.0], old_values=None)], ppo())


def inputs(values: torch.Tensor, mask: tuple[float, ...] = (1, 1, 1)) -> LossInputs:
    nothing = torch.zeros(3)
    return LossInputs(
        log_probs=nothing,
        entropy=nothing,
        mask=torch.tensor(mask, dtype=torch.float32),
        rollout_log_probs=nothing,
        advantages=nothing,
        reference_log_probs=nothing,
        old_log_probs=nothing,
        sequence=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        values=values,
        old_values=torch.tensor(VALUES),
        returns=torch.tensor([0.951, 0.98, 1.0]),
    )


def test_the_value_loss_by_hand() -> None:
    values = torch.tensor([0.9, 0.3, 0.6], requires_grad=True)
    loss, sums = value_loss(inputs(values), ppo())
    assert loss.item() / 3 == pytest.approx(0.114233, abs=1e-6)
    assert sums["vf_loss"] / 3 == pytest.approx(0.114233, abs=1e-6)
    assert sums["vf_clip_fraction"] == 1.0
    assert sums["value"] == pytest.approx(1.8)
    loss.backward()  # type: ignore[no-untyped-call]
    # The first is bounded and learns no more; the others are V - R.
    np.testing.assert_allclose(values.grad.numpy(), [0.0, -0.68, -0.4], atol=1e-6)  # type: ignore[union-attr]


def test_the_value_loss_sees_learned_tokens_alone_and_adds_up_as_the_policys() -> None:
    values = torch.tensor([0.9, 0.3, 0.6])
    loss, sums = value_loss(inputs(values, (1, 0, 1)), ppo())
    assert loss.item() == pytest.approx((0.063001 + 0.16) / 2, abs=1e-6)
    assert sums["value"] == pytest.approx(1.5)
    mean, _ = value_loss(inputs(values, (1, 0, 1)), ppo(aggregation="sequenceMean"))
    assert mean.item() == pytest.approx((0.063001 + 0.16) / 4, abs=1e-6)


@pytest.mark.parametrize("field", ["values", "old_values", "returns"])
def test_a_critic_refuses_samples_without_what_it_learns_from(field: str) -> None:
    with pytest.raises(InvalidData, match="the critic learns from samples with old_values and returns"):
        value_loss(replace(inputs(torch.zeros(3)), **{field: None}), ppo())  # type: ignore[arg-type]


def test_the_explained_share_by_hand() -> None:
    samples = with_advantages([sample([1, 1, 0, 1], [0.5, 0.4, 0.9, 0.6])], ppo())
    found = value_metrics(samples)
    assert found["critic/values/mean"] == pytest.approx(0.5)
    assert (found["critic/values/min"], found["critic/values/max"]) == pytest.approx((0.4, 0.6))
    assert found["critic/returns/mean"] == pytest.approx(0.977)
    # Returns .951, .98, 1 have variance .000607; what the values left, .451, .58, .4, .008607.
    assert found["critic/vf_explained_var"] == pytest.approx(1 - 0.008607 / (0.000607 + 1e-5), abs=1e-2)


def test_a_critic_that_knows_explains_all_and_one_that_says_one_thing_nothing() -> None:
    each = [sample([1], [reward], reward) for reward in (0.0, 1.0, 0.0, 1.0)]
    assert value_metrics(with_advantages(each, ppo()))["critic/vf_explained_var"] == pytest.approx(1.0)
    same = [replace(one, old_values=np.full(2, 0.3, dtype=np.float32)) for one in each]
    assert value_metrics(with_advantages(same, ppo()))["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
