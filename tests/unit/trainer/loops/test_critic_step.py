"""The critic's own optimizer step."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.backend import StepResult
from polyrl_trainer.loops.critic import Critic


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Backend:
    """Notes what a step divides by."""

    def __init__(self) -> None:
        self.divisors: list[float] = []

    def forward_backward(self, *_: Any) -> Future[Any]:
        return done({"tokens": 7.0, "vf_loss": 3.5, "vf_clip_fraction": 0.0, "value": 14.0})

    def optim_step(self, normalizer: float) -> Future[Any]:
        self.divisors.append(normalizer)
        return done(StepResult(grad_norm=1.0, learning_rate=0.1))


@pytest.mark.parametrize(
    ("aggregation", "divisor"), [(None, 7.0), ("sequenceMean", 3.0), ("constant", 30.0)], ids=["tokens", "samples", "L"]
)
async def test_it_is_divided_as_the_policys_is(aggregation: str | None, divisor: float) -> None:
    algorithm = {"name": "ppo", "aggregation": aggregation}
    recipe = RecipeSpec.model_validate(
        {"model": {"path": "m"}, "algorithm": algorithm, "sampling": {"max_new_tokens": 10}}
    )
    backend: Any = Backend()
    critic, samples = Critic(backend, recipe), [None] * 3
    assert await critic.learn(samples) == {"tokens": 7.0}  # type: ignore[arg-type]
    assert backend.divisors == [divisor]
    measured = critic.take_metrics({})
    assert (measured["critic/vf_loss"], measured["critic/vpred_mean"]) == (0.5, 2.0)
