"""The learner of several processes: real ranks over gloo, which do what one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from polyrl.errors import InvalidData, RunFailed
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl_trainer.backend import Loss
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, Head, OptimizerConfig
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learner
from polyrl_trainer.backends.policy import ReferencePolicy
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.losses import policy_loss, sft_loss, with_advantages
from polyrl_trainer.losses.critic import value_loss, with_value_loss
from polyrl_trainer.sample import Sample
from polyrl_trainer.testing.backend_conformance import (
    MODEL,
    assert_backend_conforms,
    assert_weights_equal,
    draw_samples,
    exported,
    take_step,
)
from polyrl_trainer.testing.fsdp_group import group

WAIT_SECONDS = 120.0
ENGINE = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_SECONDS)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, total_steps=20, schedule="cosine", warmup_steps=3, weight_decay=0.1)
STEPS = 20
TOLERANCE = 1e-5
"""Sums of float32 in another order, over 20 steps of AdamW."""


@pytest.fixture(scope="module", params=[4, 2, 1])
def ranks(request: pytest.FixtureRequest) -> Iterator[LearnerGroup]:
    with group(request.param) as made:
        yield made


def alone(head: Head = "tokens") -> TorchBackend:
    return create_torch_backend(replace(MODEL, head=head), ENGINE, OPTIMIZER, CheckpointConfig(fsync=False))


def of_ranks(ranks: LearnerGroup, head: Head = "tokens") -> Learner:
    return ranks.learner(replace(MODEL, head=head), ENGINE, OPTIMIZER)


def grpo_batch(backend: Learner, step: int) -> list[Sample]:
    drawn = draw_samples(step, 8)
    scored = backend.log_probs(drawn).result(WAIT_SECONDS)
    with_rewards = [
        replace(one, rollout_log_probs=seen - 0.05, group=number // 4, reward=float(number % 3 == 0))
        for number, (one, seen) in enumerate(zip(drawn, scored, strict=True))
    ]
    return with_advantages(with_rewards, AlgorithmSpec())


def ppo_batch(backend: Learner, step: int) -> list[Sample]:
    algorithm = AlgorithmSpec.model_validate({"name": "ppo"})
    drawn = draw_samples(step, 7)
    expected = backend.values(drawn).result(WAIT_SECONDS)
    scored = backend.log_probs(drawn).result(WAIT_SECONDS)
    known = [
        replace(one, rollout_log_probs=seen, old_log_probs=seen, old_values=value, reward=float(number % 2))
        for number, (one, seen, value) in enumerate(zip(drawn, scored, expected, strict=True))
    ]
    return with_advantages(known, algorithm)


def critic_batch(backend: Learner, step: int) -> list[Sample]:
    drawn = draw_samples(step, 5)
    expected = backend.values(drawn).result(WAIT_SECONDS)
    known = [
        replace(one, old_values=value, reward=float(number % 2))
        for number, (one, value) in enumerate(zip(drawn, expected, strict=True))
    ]
    return with_advantages(known, AlgorithmSpec.model_validate({"name": "ppo"}))


def sft_batch(backend: Learner, step: int) -> list[Sample]:
    # Some batches are smaller than the group: ranks without a sample pass along.
    return draw_samples(step, 2 + step % 11)


PPO = AlgorithmSpec.model_validate({"name": "ppo"})
CASES: dict[str, tuple[Head, Callable[[Learner, int], list[Sample]], Loss]] = {
    "sft": ("tokens", sft_batch, sft_loss),
    "grpo": ("tokens", grpo_batch, policy_loss(AlgorithmSpec())),
    "critic": ("value", critic_batch, partial(value_loss, algorithm=PPO)),
    "ppo": ("both", ppo_batch, with_value_loss(policy_loss(PPO), PPO)),
}


def trained(backend: Learner, batch_of: Callable[[Learner, int], list[Sample]], loss: Loss) -> list[float]:
    """Losses and gradient norms of all steps."""
    seen = []
    for step in range(STEPS):
        sums = backend.forward_backward(batch_of(backend, step), loss).result(WAIT_SECONDS)
        taken = backend.optim_step(sums["tokens"]).result(WAIT_SECONDS)
        seen += [sums["loss"] / sums["tokens"], taken.grad_norm]
    return seen


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_those_of_one_process(ranks: LearnerGroup, case: str) -> None:
    head, batch_of, loss = CASES[case]
    wanted, found = alone(head), of_ranks(ranks, head)
    np.testing.assert_allclose(trained(found, batch_of, loss), trained(wanted, batch_of, loss), atol=TOLERANCE, rtol=0)
    weights, got = exported(wanted), exported(found)
    assert weights.keys() == got.keys()
    for name, tensor in weights.items():
        np.testing.assert_allclose(got[name].numpy(), tensor.numpy(), atol=TOLERANCE, rtol=0, err_msg=name)
    found.close()


def test_any_number_of_ranks_reads_what_any_other_wrote(ranks: LearnerGroup, tmp_path: Path) -> None:
    first, one = of_ranks(ranks), alone()
    for step in range(2):
        take_step(first, [draw_samples(step, 9)])
    folders = [tmp_path / name for name in ("of-ranks", "of-one")]
    for folder in folders:
        folder.mkdir()
    first.save(folders[0])
    one.load(folders[0])
    assert_weights_equal(exported(one), exported(first), "from ranks to one process")
    one.save(folders[1])
    second = of_ranks(ranks)
    second.load(folders[1])
    assert_weights_equal(exported(second), exported(first), "and back to ranks")
    assert take_step(second, [draw_samples(7, 9)]) == take_step(first, [draw_samples(7, 9)]), "with its optimizer"
    # A stage begins from another's weights alone: each rank reads its own rows.
    begun = ranks.learner(replace(MODEL, source=folders[0]), ENGINE, OPTIMIZER)
    assert_weights_equal(exported(begun), exported(one), "from the folder alone")
    scored = ranks.reference(replace(MODEL, source=folders[0]), ENGINE).log_probs(draw_samples(3, 5))
    plain = ReferencePolicy(replace(MODEL, source=folders[0]), ENGINE).log_probs(draw_samples(3, 5))
    for got, wanted in zip(scored.result(WAIT_SECONDS), plain.result(WAIT_SECONDS), strict=True):
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE)


def test_layers_that_are_computed_twice_give_the_same_step(ranks: LearnerGroup) -> None:
    plain, twice = of_ranks(ranks), ranks.learner(MODEL, replace(ENGINE, gradient_checkpointing=True), OPTIMIZER)
    assert take_step(twice, [draw_samples(0, 9)]) == take_step(plain, [draw_samples(0, 9)])
    assert_weights_equal(exported(twice), exported(plain), "layers computed twice")


def test_an_error_in_the_loss_takes_no_step_and_the_group_lives_on(ranks: LearnerGroup) -> None:
    backend = of_ranks(ranks)
    before = exported(backend)

    def broken(inputs: object) -> tuple[object, dict[str, float]]:
        raise InvalidData("the user's own loss")

    with pytest.raises(InvalidData, match="own loss"):
        backend.forward_backward(draw_samples(0, 9), broken).result(WAIT_SECONDS)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="optimizer step 0 was not taken"):
        backend.optim_step(1.0).result(WAIT_SECONDS)
    backend.discard_gradients().result(WAIT_SECONDS)
    take_step(backend, [draw_samples(0, 9)])
    after = exported(backend)
    assert any(not np.array_equal(after[name].numpy(), tensor.numpy()) for name, tensor in before.items())


def test_a_folder_that_no_rank_can_read_is_refused_once(ranks: LearnerGroup, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"config\.json"):
        ranks.learner(replace(MODEL, source=tmp_path), ENGINE, OPTIMIZER)
    take_step(of_ranks(ranks), [draw_samples(0, 3)])


def test_an_export_that_nobody_takes_to_its_end_stops_nobody(ranks: LearnerGroup) -> None:
    backend = of_ranks(ranks)
    iterator = backend.export_weights()
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    take_step(backend, [draw_samples(0, 3)])


def test_the_group_conforms(ranks: LearnerGroup, tmp_path: Path) -> None:
    if ranks.size == 2:
        assert_backend_conforms(lambda model, engine, optimizer, _: ranks.learner(model, engine, optimizer), tmp_path)
