"""The user's own loss and advantage: what is made of their answers, and what is expected of wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyrl.errors import InvalidCode
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl.wire.checks import CheckFault
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.check.code import check_code
from polyrl_trainer.losses import policy_loss, with_advantages
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.own_algorithm import load_own, own_advantage, own_loss, try_own


def inputs() -> LossInputs:
    columns = {
        "log_probs": [-1.0, -2.0, -0.7], "rollout_log_probs": [-1.1, -1.4, -1.2], "advantages": [1.0, 1.0, -0.5],
        "entropy": [0.0] * 3, "mask": [1.0] * 3, "reference_log_probs": [0.0] * 3, "old_log_probs": [0.0] * 3,
    }  # fmt: skip
    tensors = {name: torch.tensor(values) for name, values in columns.items()}
    tensors["log_probs"].requires_grad_()
    return LossInputs(**tensors, sequence=torch.tensor([0, 0, 1]), num_sequences=2)


def reinforce(tokens: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = (tokens.log_probs - tokens.old_log_probs).exp()
    return -ratio * tokens.advantages, {"ratio": ratio, "ratio_max": ratio}


def test_an_own_loss_takes_the_place_of_the_named_one_and_nothing_else() -> None:
    # Ratios to the engine: 1.105171, .548812, 1.648721, of which nothing is clipped. The mean of -r A over 3 tokens.
    spec = AlgorithmSpec(aggregation="tokenMean", entropy_coefficient=0.5, correction="tokenMask", correction_low=0.6)
    given = inputs()
    loss, sums = policy_loss(spec, own_loss("own:reinforce", reinforce))(given)
    # The mask leaves the second out; entropies are 0.
    assert loss.item() == pytest.approx(-1.105171 + 0.5 * 1.648721, abs=1e-5)
    assert sums["loss/ratio"] == pytest.approx(1.105171 + 0.548812 + 1.648721, abs=1e-5)
    assert sums["loss/ratio_max"] == pytest.approx(1.648721, abs=1e-5)
    (gradient,) = torch.autograd.grad(loss, given.log_probs)
    assert gradient.tolist() == pytest.approx([-1.105171, 0, 0.824361], abs=1e-5)


@pytest.mark.parametrize(
    ("mode", "old"), [("bypass", -1.1), ("reuse", -1.0), ("recompute", 0.0)], ids=["bypass", "reuse", "recompute"]
)
def test_it_finds_the_old_policy_that_the_manifest_names(mode: str, old: float) -> None:
    seen: list[torch.Tensor] = []

    def record(tokens: LossInputs) -> torch.Tensor:
        seen.append(tokens.old_log_probs)
        return -tokens.log_probs

    policy_loss(AlgorithmSpec(old_log_probs=mode), own_loss("own:record", record))(inputs())
    assert seen[0][0].item() == pytest.approx(old)
    assert not seen[0].requires_grad


def sample(group: int, reward: float, penalty: float | None = None) -> Sample:
    mask = np.array([0, 1, 1], dtype=np.float32)
    return Sample(np.arange(3), mask, prompt_length=1, group=group, reward=reward, penalty=penalty)


def test_an_own_advantage_is_of_a_group_with_its_penalties() -> None:
    groups: list[list[float]] = []

    def half(samples: list[Sample]) -> list[Any]:
        groups.append([one.reward for one in samples])
        return [one.reward / 2 if one.reward < 3 else [7.0, 8.0, 9.0] for one in samples]

    samples = [sample(4, 1.0), sample(9, 3.0), sample(4, 2.0, penalty=-0.5)]
    found = with_advantages(samples, AlgorithmSpec(), own_advantage("own:half", half))
    assert groups == [[1.0, 1.5], [3.0]]
    rows = [one.advantages.tolist() for one in found if one.advantages is not None]
    assert rows == [[0, 0.5, 0.5], [0, 8.0, 9.0], [0, 0.75, 0.75]]
    assert [one.reward for one in found] == [1.0, 3.0, 2.0], "what is reported is the task's"


def test_an_own_advantage_sees_a_reward_for_each_turn_where_none_was_paid_too() -> None:
    """As the reward function does: one that asks for the last turn's ended the run with the first sample that earned
    nothing."""
    seen: list[tuple[float, ...]] = []

    def last(samples: list[Sample]) -> list[float]:
        seen.extend(one.turn_rewards for one in samples)
        return [one.turn_rewards[-1] for one in samples]

    paid = replace(sample(4, 1.0), turn_starts=(1, 2), turn_rewards=(0.0, 0.5))
    found = with_advantages(
        [paid, replace(sample(4, 0.0), turn_starts=(1, 2))], AlgorithmSpec(), own_advantage("own:last", last)
    )
    assert seen == [(0.0, 0.5), (0.0, 0.0)]
    assert [one.turn_rewards for one in found] == [(0.0, 0.5), ()]


ASKS_A_ROW = "def best(samples):\n    return [s.reward * s.metadata['level'] + s.turn_rewards[-1] for s in samples]"


@pytest.mark.parametrize(("row", "expected"), [('{"prompt": "1=", "level": 2}', 0), ('{"prompt": "1="}', 1), ("", 0)])
def test_an_own_advantage_is_tried_with_what_the_first_row_holds(folder: Path, row: str, expected: int) -> None:
    """Without a row on this machine nobody knows what it would find there."""
    (folder / "own_of_test.py").write_text(ASKS_A_ROW)
    if row:
        (folder / "rows.jsonl").write_text(row)
    recipe = RecipeSpec.model_validate(
        {"model": {"path": "m"}, "data": {"rl": [{"path": "rows.jsonl"}]}, "code": {"path": "."}}
        | {"algorithm": {"advantageFunction": "own_of_test:best"}}
    )
    faults = [one for one in check_code(recipe, folder) if isinstance(one, CheckFault)]
    assert len(faults) == expected
    assert all("KeyError: 'level'" in one.sentence for one in faults)


def own(folder: Path, text: str, **algorithm: Any) -> None:
    (folder / "own_of_test.py").write_text(text)
    spec = AlgorithmSpec(**algorithm)
    try_own(load_own(spec, folder), spec)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whose module nothing remembers."""
    monkeypatch.delitem(__import__("sys").modules, "own_of_test", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


WRONG_LOSSES = [
    ("def loss(tokens, step): return tokens.log_probs", "is called with 1 argument, but its signature is"),
    ("async def loss(tokens): return tokens.log_probs", "must be a plain `def`"),
    ("loss = 3", "must be a function, got int"),
    ("def loss(tokens): return tokens.log_probs.sum()", r"the loss must be a tensor of shape \[5\].*got shape \[\]"),
    ("def loss(tokens): return 0.5", r"a tensor of shape \[5\], a number per learned token, got float"),
    ("def loss(tokens): return tokens.log_probs, {'x': 1.0}", r"own_of_test:loss: x must be a tensor .* got float"),
    ("def loss(tokens): return tokens.log_probs, 7", "beside the loss goes a dict of tensors, got int"),
    ("def loss(tokens): return tokens.advantages", "has no gradient; it must follow from tokens.log_probs"),
    ("def loss(tokens): return tokens.log_probs.log()", "the loss or its gradient is not finite"),
    ("def loss(tokens):\n    return tokens.logprobs", r"raised AttributeError: .*own_of_test.py:2\)"),
    ("def loss(tokens):\n    raise SystemExit(3)", r"raised SystemExit: 3 .*own_of_test.py:2\)"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_LOSSES, ids=[row[1] for row in WRONG_LOSSES])
def test_a_wrong_loss_is_refused_by_its_trial(folder: Path, text: str, expected: str) -> None:
    with pytest.raises(InvalidCode, match=expected):
        own(folder, text, loss_function="own_of_test:loss")


WRONG_ADVANTAGES = [
    ("def best(samples): return 1.0", "must return a list of 3 numbers, got 1.0"),
    ("def best(samples): return [1.0]", r"must return a list of 3 numbers, got \[1.0\]"),
    ("def best(samples): return None", "must return a list of 3 numbers, got None"),
    ("def best(samples): return ['a', 'b', 'c']", "must return a list of 3 numbers"),
    ("def best(samples): return [float('nan')] * 3", "an advantage is a finite number, .*or 3 of them"),
    ("def best(samples): return [1e39, 0, 0]", "an advantage is a finite number, .*or 3 of them"),
    ("def best(samples): return [[1.0, 2.0]] * 3", "an advantage is a finite number, .*or 3 of them"),
    ("def best(samples):\n    return 1 / 0", r"raised ZeroDivisionError.*own_of_test.py:2\)"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_ADVANTAGES, ids=[row[1] for row in WRONG_ADVANTAGES])
def test_a_wrong_advantage_is_refused_by_its_trial(folder: Path, text: str, expected: str) -> None:
    with pytest.raises(InvalidCode, match=expected):
        own(folder, text, advantage_function="own_of_test:best")


def test_what_goes_wrong_only_later_is_named_in_the_same_way() -> None:
    shrunk: Callable[[LossInputs], torch.Tensor] = lambda tokens: tokens.log_probs[1:]  # noqa: E731
    with pytest.raises(InvalidCode, match=r"own:shrunk: the loss must be a tensor of shape \[3\].*got shape \[2\]"):
        policy_loss(AlgorithmSpec(), own_loss("own:shrunk", shrunk))(inputs())
