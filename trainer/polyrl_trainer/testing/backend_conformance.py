"""The check that every training backend must pass: same input, same loss and gradient as plain PyTorch.

    backend_conformance.assert_backend_conforms(create, folder)

`create` makes a backend from the four configs; it is called several times. The comparison is an independent,
deliberately naive learner: one unpacked sequence at a time, full logits, torch's own cross-entropy and AdamW. In a
distributed backend every rank calls this with the same arguments. Raises AssertionError at the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.testing import assert_allclose, assert_array_equal

from polyrl_trainer.backend import LossInputs, TrainingBackend
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.sample import Sample
from polyrl_trainer.testing.memory_publisher import exported_tensors

CreateBackend = Callable[[ModelConfig, EngineConfig, OptimizerConfig, CheckpointConfig], TrainingBackend]
Weights = dict[str, torch.Tensor]

VOCABULARY: Final = 23
MODEL: Final = ModelConfig(
    source={
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    },
    seed=11,
    dtype="float32",
)
"""Wide initial weights, so that attention matters and a leak between sequences would show."""

OPTIMIZER: Final = OptimizerConfig(
    learning_rate=1e-2, total_steps=8, schedule="cosine", warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5, eps=1e-6
)
"""Every branch is taken: warm-up, decay, clipping (the toy gradient's norm is above 0.5)."""

TOLERANCE: Final = 2e-4
"""Absolute, on weights and logprobs: float32 sums in another order, amplified by AdamW's division."""

TEMPERATURE: Final = 0.7
ENTROPY_BONUS: Final = 0.5
"""Weight that makes a bonus a good part of the gradient."""
WAIT_SECONDS: Final = 120.0


def assert_backend_conforms(create: CreateBackend, folder: Path, seed: int = 0) -> None:
    """Runs all checks; `seed` draws the samples, `folder` is empty and takes a checkpoint. Raises AssertionError naming
    the first that fails."""
    samples = draw_samples(seed, count=24)
    engine = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_SECONDS)

    def fresh() -> TrainingBackend:
        return create(MODEL, engine, OPTIMIZER, CheckpointConfig(fsync=False))

    _log_probs_are_those_of_the_plain_model(fresh(), samples)
    _steps_equal_plain_adamw(fresh(), samples)
    _an_entropy_bonus_equals_the_plain_one(fresh(), samples)
    _a_split_mini_batch_gives_the_same_step(fresh, samples)
    _saved_and_loaded_continues_bit_for_bit(fresh, samples, folder)
    _an_export_is_a_snapshot(fresh(), samples)
    _a_step_without_a_gradient_is_refused(fresh())


def draw_samples(seed: int, count: int) -> list[Sample]:
    """Random sequences of 2 to 40 tokens with random masks; the first token is never learned."""
    draw = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(draw.integers(2, 41))
        prompt_length = int(draw.integers(1, length))
        mask = (np.arange(length) >= prompt_length) & (draw.random(length) < 0.8)
        mask[-1] = True
        tokens = draw.integers(0, VOCABULARY, length)
        samples.append(
            Sample(tokens, mask.astype(np.float32), prompt_length=prompt_length, id=f"{index}.0", group=index)
        )
    return samples


def exported(backend: TrainingBackend) -> Weights:
    """The exported weights by name."""
    return dict(exported_tensors(backend.export_weights))


def take_step(backend: TrainingBackend, parts: Sequence[Sequence[Sample]]) -> float:
    """One SFT step over a mini-batch given in parts; its gradient norm."""
    futures = [backend.forward_backward(part, sft_loss, TEMPERATURE) for part in parts]
    tokens = sum(future.result(WAIT_SECONDS)["tokens"] for future in futures)
    return backend.optim_step(tokens).result(WAIT_SECONDS).grad_norm


def assert_weights_close(found: Weights, wanted: Weights, what: str) -> None:
    """Same names; values within TOLERANCE."""
    assert found.keys() == wanted.keys(), f"{what}: other tensors: {sorted(found.keys() ^ wanted.keys())}"
    for name, tensor in wanted.items():
        assert_allclose(
            found[name].float().numpy(), tensor.float().numpy(), atol=TOLERANCE, rtol=0, err_msg=f"{what}: {name}"
        )


def assert_weights_equal(found: Weights, wanted: Weights, what: str) -> None:
    """Same names, same bits."""
    assert found.keys() == wanted.keys(), f"{what}: other tensors: {sorted(found.keys() ^ wanted.keys())}"
    for name, tensor in wanted.items():
        assert_array_equal(found[name].float().numpy(), tensor.float().numpy(), err_msg=f"{what}: {name}")


class PlainLearner:
    """The naive learner that backends are compared with."""

    def __init__(self) -> None:
        self._model = load_model(MODEL.source, MODEL.seed, "float32")
        matrices = [one for one in self._model.parameters() if one.ndim >= 2]
        others = [one for one in self._model.parameters() if one.ndim < 2]
        groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups, lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False
        )

    def log_probs(self, sample: Sample) -> torch.Tensor:
        """float32[T], 0 where loss_mask is 0."""
        ids = torch.from_numpy(sample.tokens).unsqueeze(0)
        logits = self._model(input_ids=ids).logits[0, :-1] / TEMPERATURE
        taken = -torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        return torch.cat([taken.new_zeros(1), taken]) * torch.from_numpy(sample.loss_mask)

    def entropy(self, sample: Sample) -> torch.Tensor:
        """A scalar, summed over the learned tokens."""
        logits = self._model(input_ids=torch.from_numpy(sample.tokens).unsqueeze(0)).logits[0, :-1] / TEMPERATURE
        values: torch.Tensor = torch.distributions.Categorical(logits=logits).entropy()  # type: ignore[no-untyped-call]
        return values @ torch.from_numpy(sample.loss_mask[1:])

    def take_step(self, samples: Sequence[Sample], rate: float, bonus: float = 0.0) -> float:
        """One SFT step with an entropy bonus of this weight; its gradient norm before clipping."""
        tokens = sum(float(sample.loss_mask.sum()) for sample in samples)
        gains = [self.log_probs(sample).sum() + bonus * self.entropy(sample) for sample in samples]
        loss = -torch.stack(gains).sum() / tokens
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIMIZER.max_grad_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return norm

    def weights(self) -> Weights:
        """Tied head left out."""
        return {name: one.detach().clone() for name, one in self._model.named_parameters() if name != "lm_head.weight"}


def _log_probs_are_those_of_the_plain_model(backend: TrainingBackend, samples: Sequence[Sample]) -> None:
    found = backend.log_probs(samples, TEMPERATURE).result(WAIT_SECONDS)
    plain = PlainLearner()
    for sample, values in zip(samples, found, strict=True):
        wanted = plain.log_probs(sample).detach().numpy()
        assert_allclose(values, wanted, atol=TOLERANCE, rtol=0, err_msg=f"log_probs of sample {sample.id}")


def _steps_equal_plain_adamw(backend: TrainingBackend, samples: Sequence[Sample]) -> None:
    plain = PlainLearner()
    # Warm-up climbs in thirds of the rate; the first cosine step is taken at the full rate.
    for step, share in enumerate((1 / 3, 2 / 3, 1.0)):
        norm = take_step(backend, [samples])
        wanted = plain.take_step(samples, OPTIMIZER.learning_rate * share)
        assert_allclose(norm, wanted, rtol=TOLERANCE, err_msg=f"gradient norm of step {step}")
        assert_weights_close(exported(backend), plain.weights(), f"weights after step {step}")


def _an_entropy_bonus_equals_the_plain_one(backend: TrainingBackend, samples: Sequence[Sample]) -> None:
    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        return -(inputs.mask * (inputs.log_probs + ENTROPY_BONUS * inputs.entropy)).sum(), {}

    learning = backend.forward_backward(samples, loss, TEMPERATURE, entropy_gradient=True)
    norm = backend.optim_step(learning.result(WAIT_SECONDS)["tokens"]).result(WAIT_SECONDS).grad_norm
    plain = PlainLearner()
    wanted = plain.take_step(samples, OPTIMIZER.learning_rate / 3, ENTROPY_BONUS)
    assert_allclose(norm, wanted, rtol=TOLERANCE, err_msg="gradient norm with an entropy bonus")
    assert_weights_close(exported(backend), plain.weights(), "weights after a step with an entropy bonus")


def _a_split_mini_batch_gives_the_same_step(fresh: Callable[[], TrainingBackend], samples: Sequence[Sample]) -> None:
    whole, split = fresh(), fresh()
    take_step(whole, [samples])
    take_step(split, [samples[:1], samples[1:9], samples[9:]])
    assert_weights_close(exported(split), exported(whole), "weights after a split mini-batch")


def _saved_and_loaded_continues_bit_for_bit(
    fresh: Callable[[], TrainingBackend], samples: Sequence[Sample], folder: Path
) -> None:
    first, second = fresh(), fresh()
    take_step(first, [samples])
    take_step(second, [samples[:3]])
    written = first.save(folder)
    # Steps go on while it is written, and are not in it.
    norm = take_step(first, [samples[:8]])
    written.result(WAIT_SECONDS)
    second.load(folder)
    assert take_step(second, [samples[:8]]) == norm, "a step that was taken while the checkpoint was written is in it"
    for step in range(3):
        part = samples[step * 8 : step * 8 + 8]
        norms = take_step(first, [part]), take_step(second, [part])
        assert norms[0] == norms[1], f"gradient norms differ {step} steps after load: {norms}"
        assert_weights_equal(exported(second), exported(first), f"weights {step} steps after load")


def _an_export_is_a_snapshot(backend: TrainingBackend, samples: Sequence[Sample]) -> None:
    before = exported(backend)
    copies = {name: tensor.clone() for name, tensor in before.items()}
    take_step(backend, [samples])
    assert_weights_equal(before, copies, "an export after a later step")
    assert any(not torch.equal(before[name], tensor) for name, tensor in exported(backend).items()), "nothing learned"
    assert "lm_head.weight" not in before, "tied weights are exported twice"


def _a_step_without_a_gradient_is_refused(backend: TrainingBackend) -> None:
    error = backend.optim_step(1.0).exception(WAIT_SECONDS)
    assert isinstance(error, ValueError), f"optim_step without a gradient gave {error!r}"
