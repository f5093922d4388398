"""The single-process backend: the port's conformance, and what it promises beyond it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from polyrl.errors import InvalidData, InvalidManifest, RunFailed
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.recipe import ActivationCheckpointing
from polyrl_trainer.backend import LossInputs, StepResult
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.models.blocks import decoder_blocks
from polyrl_trainer.backends.policy import ReferencePolicy
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.backends.updates import MAX_SKIPPED_IN_A_ROW
from polyrl_trainer.losses import policy_loss, sft_loss, with_advantages
from polyrl_trainer.sample import Sample
from polyrl_trainer.testing.backend_conformance import (
    MODEL,
    OPTIMIZER,
    VOCABULARY,
    assert_backend_conforms,
    assert_weights_close,
    assert_weights_equal,
    draw_samples,
    exported,
    take_step,
)

WAIT_SECONDS = 60.0
ENGINE = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_SECONDS)
NO_FSYNC = CheckpointConfig(fsync=False)
FILES = ["config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"]


def make(
    model: ModelConfig = MODEL, engine: EngineConfig = ENGINE, optimizer: OptimizerConfig = OPTIMIZER
) -> TorchBackend:
    return create_torch_backend(model, engine, optimizer, NO_FSYNC)


@pytest.fixture
def backend() -> Iterator[TorchBackend]:
    made = make()
    yield made
    made.close()


@pytest.fixture
def checkpoint(tmp_path: Path, backend: TorchBackend) -> Path:
    """A checkpoint after one step."""
    take_step(backend, [draw_samples(5, 6)])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    backend.save(folder).result(WAIT_SECONDS)
    return folder


@pytest.mark.parametrize("seed", [0, 1])
def test_the_torch_backend_conforms(tmp_path: Path, seed: int) -> None:
    assert_backend_conforms(create_torch_backend, tmp_path, seed)


def test_two_threads_give_the_same_step_as_one(backend: TorchBackend) -> None:
    samples = draw_samples(1, 24)
    other = make(engine=replace(ENGINE, threads=2))
    take_step(backend, [samples])
    take_step(other, [samples])
    assert_weights_close(exported(other), exported(backend), "two threads")


@pytest.mark.parametrize("which", [ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL])
def test_layers_that_are_computed_twice_give_the_same_step(
    backend: TorchBackend, which: ActivationCheckpointing
) -> None:
    samples = draw_samples(1, 24)
    other = make(engine=replace(ENGINE, activation_checkpointing=which))
    assert take_step(other, [samples]) == take_step(backend, [samples])
    assert_weights_equal(exported(other), exported(backend), "layers computed twice")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, while it traces
def test_compiled_layers_give_the_same_step(backend: TorchBackend) -> None:
    # Traced whole, forward and backward, without the kernels that a GPU would have made.
    other, samples = make(engine=replace(ENGINE, compile_by="aot_eager")), draw_samples(1, 24)
    np.testing.assert_allclose(take_step(other, [samples]), take_step(backend, [samples]), rtol=1e-5)
    assert_weights_close(exported(other), exported(backend), "layers compiled")
    layers = decoder_blocks(other._policy.model)
    assert layers
    assert all(one._compiled_call_impl is not None for one in layers)


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        InvalidManifest, match=r"recipe\.compile: needs a compiler here, one of g\+\+, clang\+\+; install"
    ):
        make(engine=replace(ENGINE, compile_by="inductor"))


@pytest.mark.parametrize("room", [1, 1000])
def test_a_head_in_chunks_gives_the_same_numbers_as_a_whole_one(backend: TorchBackend, room: int) -> None:
    samples = draw_samples(2, 12)
    chunked = make(engine=replace(ENGINE, max_logits_bytes=room))
    whole = backend.log_probs(samples).result(WAIT_SECONDS)
    for values, wanted in zip(chunked.log_probs(samples).result(WAIT_SECONDS), whole, strict=True):
        np.testing.assert_allclose(values, wanted, atol=1e-5)
    take_step(backend, [samples])
    take_step(chunked, [samples])
    assert_weights_close(exported(chunked), exported(backend), "chunked head")


def test_what_forward_backward_reports(backend: TorchBackend) -> None:
    samples = draw_samples(3, 16)
    report = backend.forward_backward(samples, sft_loss).result(WAIT_SECONDS)
    log_probs = np.concatenate(backend.log_probs(samples).result(WAIT_SECONDS))
    assert report["tokens"] == sum(sample.loss_mask.sum() for sample in samples)
    assert report["loss"] == pytest.approx(-log_probs.sum(), rel=1e-4)
    assert report["positions"] - report["padded_positions"] == sum(sample.length for sample in samples)
    assert report["padding_fraction"] == pytest.approx(report["padded_positions"] / report["positions"])
    assert report["padding_fraction"] < 0.1
    assert 0 < report["entropy"] / report["tokens"] <= np.log(VOCABULARY)


@pytest.mark.parametrize("room", [1, 2**20])
def test_entropy_has_a_gradient_only_where_it_is_asked_for(room: int) -> None:
    made, seen = make(engine=replace(ENGINE, max_logits_bytes=room)), list[bool]()

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        seen.append(inputs.entropy.requires_grad)
        return sft_loss(inputs)

    for wanted in (False, True):
        made.forward_backward(draw_samples(3, 1), loss, entropy_gradient=wanted).result(WAIT_SECONDS)
    assert seen == [False, True]


def test_operations_of_a_pass_by_hand(backend: TorchBackend) -> None:
    # Two layers of 32: q, o 32 x 32, k, v 32 x 16 (biases 32 + 16 + 16), mlp 3 x 32 x 48, norms 2 x 32; a last norm of
    # 32; the head, 23 x 32, is tied to the embedding and multiplied for learned tokens only.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 64 + 3 * 32 * 48 + 64
    samples = draw_samples(3, 16)
    report = backend.forward_backward(samples, sft_loss).result(WAIT_SECONDS)
    tokens = report["positions"] - report["padded_positions"]
    # Attention: two layers of four heads, eight wide, over pairs of positions.
    attention = 6 * 2 * 4 * 8 * sum(sample.length**2 for sample in samples)
    assert report["flops"] == 6 * ((2 * layer + 32) * tokens + 23 * 32 * report["tokens"]) + attention
    assert 0 < report["learn_seconds"] < WAIT_SECONDS


def test_greedy_samples_are_scored_at_temperature_one(backend: TorchBackend) -> None:
    samples = draw_samples(4, 4)
    at_zero = backend.log_probs(samples, 0.0).result(WAIT_SECONDS)
    at_one = backend.log_probs(samples, 1.0).result(WAIT_SECONDS)
    at_half = backend.log_probs(samples, 0.5).result(WAIT_SECONDS)
    assert all(np.array_equal(zero, one) for zero, one in zip(at_zero, at_one, strict=True))
    assert any(not np.allclose(half, one, atol=0.1) for half, one in zip(at_half, at_one, strict=True))
    with pytest.raises(ValueError, match="temperature"):
        backend.log_probs(samples, -1.0).result(WAIT_SECONDS)


def test_sft_learns_a_toy_task() -> None:
    # Answer with the prompt's token, twice: 6 sequences, learned by heart within 30 steps.
    mask = np.array([0, 0, 1, 1], dtype=np.float32)
    samples = [Sample(np.array([1, token, token, token]), mask, prompt_length=2) for token in range(3, 9)]
    backend = make(optimizer=OptimizerConfig(learning_rate=1e-2, total_steps=30))
    losses = []
    for _ in range(30):
        losses.append(backend.forward_backward(samples, sft_loss).result(WAIT_SECONDS)["loss"] / 12)
        backend.optim_step(12).result(WAIT_SECONDS)
    assert losses[0] > 1.0
    assert losses[-1] < 0.05


def test_grpo_makes_what_was_rewarded_likelier() -> None:
    backend = make(optimizer=OptimizerConfig(learning_rate=5e-3, total_steps=1))
    drawn = [replace(one, group=index // 4, reward=float(index % 2)) for index, one in enumerate(draw_samples(6, 8))]
    before = backend.log_probs(drawn).result(WAIT_SECONDS)
    on_policy = [replace(one, rollout_log_probs=values) for one, values in zip(drawn, before, strict=True)]
    report = backend.forward_backward(with_advantages(on_policy, AlgorithmSpec()), policy_loss(AlgorithmSpec())).result(
        WAIT_SECONDS
    )
    assert report["ratio"] == pytest.approx(report["tokens"], rel=1e-4)
    assert report["rollout_drift_max"] < 1e-4
    backend.optim_step(len(drawn)).result(WAIT_SECONDS)
    after = backend.log_probs(drawn).result(WAIT_SECONDS)
    change = [
        float(new.sum() - old.sum()) / one.loss_mask.sum() for new, old, one in zip(after, before, drawn, strict=True)
    ]
    assert sum(change[1::2]) > sum(change[0::2])


def test_grpo_without_rollout_logprobs_is_refused_and_no_step_is_taken(backend: TorchBackend) -> None:
    before = exported(backend)
    with pytest.raises(InvalidData, match="rollout_log_probs"):
        backend.forward_backward(draw_samples(0, 2), policy_loss(AlgorithmSpec())).result(WAIT_SECONDS)
    with pytest.raises(RunFailed, match="optimizer step 0 was not taken"):
        backend.optim_step(2).result(WAIT_SECONDS)
    assert_weights_equal(exported(backend), before, "after a refused step")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=repr)
def test_a_gradient_that_is_not_finite_skips_its_step_and_fails_the_run_only_in_a_row(
    backend: TorchBackend, poison: float
) -> None:
    def poisoned(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        return (inputs.log_probs * poison).sum(), {}

    def skipped() -> StepResult:
        backend.forward_backward(draw_samples(0, 4), poisoned).result(WAIT_SECONDS)
        return backend.optim_step(4).result(WAIT_SECONDS)

    take_step(backend, [draw_samples(0, 4)])
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        before = exported(backend)
        assert skipped().not_finite.startswith("model.")
        assert_weights_equal(exported(backend), before, "after a poisoned gradient")
        take_step(backend, [draw_samples(0, 4)])
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        skipped()
    with pytest.raises(RunFailed, match=r"5 optimizer steps in a row .* (nan|inf), first seen in model"):
        skipped()


@pytest.mark.parametrize("normalizer", [0.0, -1.0, float("nan")])
def test_a_normalizer_that_is_not_positive_is_refused(backend: TorchBackend, normalizer: float) -> None:
    backend.forward_backward(draw_samples(0, 2), sft_loss).result(WAIT_SECONDS)
    with pytest.raises(ValueError, match="positive normalizer"):
        backend.optim_step(normalizer).result(WAIT_SECONDS)


def test_an_unlearnable_first_token_and_an_empty_batch_are_refused(backend: TorchBackend) -> None:
    first_learned = Sample(np.array([3, 4]), np.ones(2, dtype=np.float32), prompt_length=0, id="8.1")
    with pytest.raises(ValueError, match=r"sample 8\.1: its first token"):
        backend.log_probs([first_learned]).result(WAIT_SECONDS)
    with pytest.raises(ValueError, match="at least one sample"):
        backend.forward_backward([], sft_loss).result(WAIT_SECONDS)


def test_bfloat16_serves_halves_and_trains_full_weights(tmp_path: Path) -> None:
    backend = make(replace(MODEL, dtype="bfloat16"), optimizer=OptimizerConfig(learning_rate=1e-6, total_steps=3))
    before = exported(backend)
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    take_step(backend, [draw_samples(0, 8)])
    backend.save(tmp_path).result(WAIT_SECONDS)
    other = make(replace(MODEL, dtype="bfloat16"))
    untouched = other.log_probs(draw_samples(0, 8)).result(WAIT_SECONDS)
    other.load(tmp_path)
    assert_weights_equal(exported(other), exported(backend), "bfloat16 after load")
    # A step of 1e-6 is below bfloat16's resolution; the float32 weights keep it.
    full = make(ModelConfig(tmp_path, dtype="float32"))
    fresh = make()
    moved = [not torch.equal(a, b) for a, b in zip(exported(full).values(), exported(fresh).values(), strict=True)]
    assert any(moved)
    exact = fresh.log_probs(draw_samples(0, 8)).result(WAIT_SECONDS)
    assert max(np.abs(a - b).max() for a, b in zip(untouched, exact, strict=True)) < 0.2


def test_a_checkpoint_is_a_model_folder_for_anyone(checkpoint: Path, backend: TorchBackend) -> None:
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted([*FILES, "training_state.json"])
    next_stage = make(ModelConfig(checkpoint, dtype="float32"))
    assert_weights_equal(exported(next_stage), exported(backend), "a stage started from a checkpoint")
    config = json.loads(backend.serving_files()["config.json"])
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "float32"


def test_the_reference_stays_where_its_source_was(checkpoint: Path, backend: TorchBackend) -> None:
    samples = draw_samples(7, 6)
    before = backend.log_probs(samples, 0.8).result(WAIT_SECONDS)
    reference = ReferencePolicy(ModelConfig(checkpoint, dtype="float32"), ENGINE)
    take_step(backend, [samples])
    again = reference.log_probs(samples, 0.8).result(WAIT_SECONDS)
    after = backend.log_probs(samples, 0.8).result(WAIT_SECONDS)
    reference.close()
    assert all(np.array_equal(new, old) for new, old in zip(again, before, strict=True))
    assert any(not np.array_equal(new, old) for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize("name", [*FILES, "training_state.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_checkpoint_is_refused_by_name_and_changes_nothing(
    checkpoint: Path, backend: TorchBackend, name: str, damage: str
) -> None:
    before = exported(backend)
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    with pytest.raises(InvalidData, match=name.replace(".", r"\.")):
        backend.load(checkpoint)
    assert_weights_equal(exported(backend), before, "after a refused load")


def test_a_checkpoint_of_another_model_is_refused(checkpoint: Path) -> None:
    assert isinstance(MODEL.source, dict)
    other = make(replace(MODEL, source={**MODEL.source, "intermediate_size": 64}))
    with pytest.raises(
        InvalidData, match=r"model\.safetensors: .* is float32\[48, 32\], this run needs float32\[64, 32\]"
    ):
        other.load(checkpoint)


def test_a_checkpoint_is_not_written_over_files_nor_within_a_mini_batch(
    checkpoint: Path, backend: TorchBackend
) -> None:
    with pytest.raises(FileExistsError):
        backend.save(checkpoint)
    backend.forward_backward(draw_samples(0, 2), sft_loss).result(WAIT_SECONDS)
    empty = checkpoint / "empty"
    empty.mkdir()
    with pytest.raises(RunFailed, match="mini-batch"):
        backend.save(empty)


def test_load_heals_a_failed_mini_batch(checkpoint: Path, backend: TorchBackend) -> None:
    samples = draw_samples(9, 4)
    assert backend.forward_backward([], sft_loss).exception(WAIT_SECONDS) is not None
    backend.load(checkpoint)
    other = make()
    other.load(checkpoint)
    take_step(backend, [samples])
    take_step(other, [samples])
    assert_weights_equal(exported(backend), exported(other), "a step after load")
