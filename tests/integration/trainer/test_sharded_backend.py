"""The learner of several processes: real ranks over gloo, which do what one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from polyrl.errors import InvalidData, RunFailed
from polyrl.keys import FILE_NAMES, TrainerKeys
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.recipe import ActivationCheckpointing
from polyrl.manifest.spec import CpuOffload
from polyrl.weights import TensorEntry
from polyrl_operator.secret import write_run_keys
from polyrl_trainer.backend import BufferOf, Loss
from polyrl_trainer.backends.configs import (
    AdapterConfig,
    CheckpointConfig,
    Dtype,
    EngineConfig,
    Head,
    ModelConfig,
    OptimizerConfig,
)
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learner
from polyrl_trainer.backends.optimizers.adamw import SerialAdamW
from polyrl_trainer.backends.policy import ReferencePolicy, ReferenceScores
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
from polyrl_trainer.weights.publisher import Export, WeightPublisher

WAIT_SECONDS = 120.0
ENGINE = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_SECONDS)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, total_steps=8, schedule="cosine", warmup_steps=3, weight_decay=0.1)
STEPS = 5
"""Three of warm-up, one at the whole rate, and one that decays by a tenth: a schedule that is a step off shows."""
TOLERANCE = 4e-6
"""Sums of float32 in another order, over all steps of AdamW."""


@pytest.fixture(scope="module", params=[4, 2, 1])
def ranks(request: pytest.FixtureRequest) -> Iterator[LearnerGroup]:
    with group(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def spare(ranks: LearnerGroup) -> Learner:
    """With whatever weights the last test left."""
    return of_ranks(ranks)


def alone(model: ModelConfig = MODEL) -> TorchBackend:
    return create_torch_backend(model, ENGINE, OPTIMIZER, CheckpointConfig(fsync=False))


def of_ranks(ranks: LearnerGroup, model: ModelConfig = MODEL, slices: int = 1) -> Learner:
    return ranks.learner(model, replace(ENGINE, context_parallel=slices), OPTIMIZER)


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
    # 2 samples, 9, 5, 12 and 8: of the first, ranks without a sample pass along; of the fourth, one has several passes.
    return draw_samples(step, 2 + 7 * step % 11)


ADAPTED = replace(MODEL, adapter=AdapterConfig(rank=3, alpha=6.0))
"""Fewer rows of a first matrix than ranks."""
PPO = AlgorithmSpec.model_validate({"name": "ppo"})
CASES: dict[str, tuple[ModelConfig, Callable[[Learner, int], list[Sample]], Loss]] = {
    "sft": (MODEL, sft_batch, sft_loss),
    "grpo": (MODEL, grpo_batch, policy_loss(AlgorithmSpec())),
    "critic": (replace(MODEL, head="value"), critic_batch, partial(value_loss, algorithm=PPO)),
    "ppo": (replace(MODEL, head="both"), ppo_batch, with_value_loss(policy_loss(PPO), PPO)),
    "adapters": (ADAPTED, sft_batch, sft_loss),
}


def trained(backend: Learner, batch_of: Callable[[Learner, int], list[Sample]], loss: Loss) -> list[float]:
    """Losses and gradient norms of all steps."""
    seen = []
    for step in range(STEPS):
        sums = backend.forward_backward(batch_of(backend, step), loss).result(WAIT_SECONDS)
        taken = backend.optim_step(sums["tokens"]).result(WAIT_SECONDS)
        seen += [sums["loss"] / sums["tokens"], taken.grad_norm]
    return seen


@cache
def trained_alone(case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """By one process: what `trained` gives, and the weights."""
    model, batch_of, loss = CASES[case]
    backend = alone(model)
    return trained(backend, batch_of, loss), exported(backend)


def assert_trains_as_one_process(case: str, found: Learner) -> None:
    _, batch_of, loss = CASES[case]
    seen, weights = trained_alone(case)
    np.testing.assert_allclose(trained(found, batch_of, loss), seen, atol=TOLERANCE, rtol=0)
    got = exported(found)
    assert weights.keys() == got.keys()
    for name, tensor in weights.items():
        np.testing.assert_allclose(got[name].numpy(), tensor.numpy(), atol=TOLERANCE, rtol=0, err_msg=name)
    found.close()


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_one_process(ranks: LearnerGroup, case: str) -> None:
    assert_trains_as_one_process(case, of_ranks(ranks, CASES[case][0]))


@pytest.mark.parametrize("case", CASES)
def test_steps_in_slices_of_two_ranks_equal_those_of_one_process(ranks: LearnerGroup, case: str) -> None:
    if ranks.size > 1:
        assert_trains_as_one_process(case, of_ranks(ranks, CASES[case][0], slices=2))


def test_more_slices_than_heads_of_keys_and_layers_computed_twice(ranks: LearnerGroup) -> None:
    if ranks.size == 4:
        engine = replace(ENGINE, context_parallel=4, activation_checkpointing=ActivationCheckpointing.FULL)
        assert_trains_as_one_process("sft", ranks.learner(MODEL, engine, OPTIMIZER))


def test_any_number_of_ranks_reads_what_any_other_wrote(ranks: LearnerGroup, spare: Learner, tmp_path: Path) -> None:
    first, one = spare, alone()
    for step in range(2):
        take_step(first, [draw_samples(step, 9)])
    folders = [tmp_path / name for name in ("of-ranks", "of-one")]
    for folder in folders:
        folder.mkdir()
    first.save(folders[0]).result(WAIT_SECONDS)
    one.load(folders[0])
    assert_weights_equal(exported(one), exported(first), "from ranks to one process")
    one.save(folders[1]).result(WAIT_SECONDS)
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


def scores(scorer: ReferenceScores) -> np.ndarray:
    return np.concatenate(scorer.log_probs(draw_samples(3, 5)).result(WAIT_SECONDS))


@pytest.mark.parametrize(("dtype", "head"), [("float32", "both"), ("bfloat16", "tokens")])
def test_adapters_go_from_ranks_to_one_process_and_back(
    ranks: LearnerGroup, tmp_path: Path, dtype: Dtype, head: Head
) -> None:
    (base := tmp_path / "base").mkdir()
    alone().save(base).result(WAIT_SECONDS)
    model = replace(ADAPTED, source=base, dtype=dtype, head=head)
    first, one, second = of_ranks(ranks, model), alone(model), of_ranks(ranks, model)
    for step in range(2):
        take_step(first, [draw_samples(step, 9)])
    folders = [tmp_path / name for name in ("of-ranks", "of-one")]
    for folder in folders:
        folder.mkdir()
    first.save(folders[0]).result(WAIT_SECONDS)
    one.load(folders[0])
    one.save(folders[1]).result(WAIT_SECONDS)
    second.load(folders[1])
    for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors"):
        found, wanted = (load_file(folder / name) for folder in folders)
        assert_weights_equal(found, wanted, name)
    for name in ("adapter/adapter_config.json", "config.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    atol = TOLERANCE if dtype == "float32" else 0.02
    for other in (exported(one), load_file(folders[0] / "model.safetensors")):
        for name, tensor in exported(first).items():
            np.testing.assert_allclose(tensor.float().numpy(), other[name].float().numpy(), atol=atol, err_msg=name)
    if dtype == "float32":
        np.testing.assert_allclose(scores(first.below_adapters()), scores(ReferencePolicy(model, ENGINE)), atol=atol)
    assert abs(scores(first.below_adapters()) - scores(first)).max() > 1e-2
    assert take_step(second, [draw_samples(7, 9)]) == take_step(first, [draw_samples(7, 9)]), "with its optimizer"
    with pytest.raises(InvalidData, match="was not trained on the weights"):
        of_ranks(ranks, replace(ADAPTED, seed=12)).load(folders[0])


def test_dropout_of_adapters_is_drawn_by_step_and_rank(ranks: LearnerGroup, tmp_path: Path) -> None:
    model = replace(ADAPTED, adapter=AdapterConfig(rank=4, alpha=8.0, dropout=0.3, save_merged=False))
    first, second, without = of_ranks(ranks, model), of_ranks(ranks, model), of_ranks(ranks, ADAPTED)
    for step in range(2):
        norm = take_step(first, [draw_samples(step, 9)])
        assert norm != take_step(without, [draw_samples(step, 9)])
    first.save(tmp_path).result(WAIT_SECONDS)
    assert not (tmp_path / "model.safetensors").exists()
    second.load(tmp_path)
    parts = [draw_samples(5, 9), draw_samples(6, 9)]
    assert take_step(second, parts) == take_step(first, parts)
    np.testing.assert_array_equal(scores(first), scores(first))
    losses = [one.forward_backward(parts[0], sft_loss).result(WAIT_SECONDS)["loss"] for one in (first, first)]
    assert losses[0] != losses[1], "a second call draws anew"


@pytest.fixture(scope="module")
def one_step(ranks: LearnerGroup) -> tuple[float, dict[str, torch.Tensor]]:
    """The gradient's norm, and the weights after it."""
    plain = of_ranks(ranks)
    return take_step(plain, [draw_samples(0, 9)]), exported(plain)


@pytest.mark.parametrize("which", [ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL])
def test_layers_that_are_computed_twice_give_the_same_step(
    ranks: LearnerGroup, one_step: tuple[float, dict[str, torch.Tensor]], which: ActivationCheckpointing
) -> None:
    twice = ranks.learner(MODEL, replace(ENGINE, activation_checkpointing=which), OPTIMIZER)
    assert take_step(twice, [draw_samples(0, 9)]) == one_step[0]
    assert_weights_equal(exported(twice), one_step[1], "layers computed twice")


BOTH = replace(MODEL, head="both")
PLACEMENTS = {
    "offloaded": (BOTH, replace(ENGINE, cpu_offload=CpuOffload.ALL)),
    "moments in the host's memory": (BOTH, replace(ENGINE, cpu_offload=CpuOffload.OPTIMIZER)),
    "moments of adapters there": (ADAPTED, replace(ENGINE, cpu_offload=CpuOffload.OPTIMIZER)),
    "two copies": (BOTH, replace(ENGINE, dp_replicate=2)),
    "two copies, passes in slices": (ADAPTED, replace(ENGINE, dp_replicate=2, context_parallel=2)),
}
"""Of a model that ranks hold otherwise."""


@pytest.fixture(scope="module")
def readers(ranks: LearnerGroup) -> tuple[Learner, Learner]:
    """Of `BOTH` and of `ADAPTED`, held as ever: they have what they read last."""
    return of_ranks(ranks, BOTH), of_ranks(ranks, ADAPTED)


def in_parts(backend: Learner) -> list[float]:
    """The gradient's norms of three steps."""
    return [take_step(backend, [draw_samples(step, 9), draw_samples(step + 9, 3)]) for step in range(3)]


@cache
def alone_in_parts(adapted: bool) -> tuple[list[float], dict[str, torch.Tensor], TorchBackend]:
    """By one process: what `in_parts` gives, the weights then, and what may read others."""
    backend = alone(ADAPTED if adapted else BOTH)
    return in_parts(backend), exported(backend), backend


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_model_that_is_held_otherwise_learns_the_same(
    ranks: LearnerGroup, readers: tuple[Learner, Learner], tmp_path: Path, placement: str
) -> None:
    if ranks.size == 1 and "copies" in placement:
        pytest.skip("one rank has no second copy")
    model, engine = PLACEMENTS[placement]
    several = ranks.learner(model, engine, OPTIMIZER)
    blocks = [one for one in several._model.policy.model.modules() if isinstance(one, FSDPModule)]
    assert len(blocks) == 2
    for block in blocks:
        (group,) = block._get_fsdp_state()._fsdp_param_groups
        assert group.mesh_info.mesh.ndim == 1 + ("copies" in placement)
        assert all(one.offload_to_cpu == (placement == "offloaded") for one in group.fsdp_params)
    updates = several._model.updates
    assert updates is not None
    assert isinstance(updates.optimizer, SerialAdamW) == ("moments" in placement)
    norms, weights, one = alone_in_parts(model is ADAPTED)
    np.testing.assert_allclose(in_parts(several), norms, atol=TOLERANCE, rtol=0)
    found, plain = exported(several), readers[model is ADAPTED]
    for name, tensor in weights.items():
        np.testing.assert_allclose(found[name].numpy(), tensor.numpy(), atol=TOLERANCE, rtol=0, err_msg=name)
    several.save(tmp_path).result(WAIT_SECONDS)
    for other in (one, plain, several):
        other.load(tmp_path)
    assert_weights_equal(exported(plain), exported(several), "as it was saved")
    norms = [take_step(other, [draw_samples(7, 9)]) for other in (several, one, plain)]
    np.testing.assert_allclose(norms, norms[0], atol=TOLERANCE, rtol=0)
    several.close()


def test_one_process_with_its_moments_in_the_hosts_memory_learns_the_same_bits(tmp_path: Path) -> None:
    engine = replace(ENGINE, cpu_offload=CpuOffload.OPTIMIZER)
    away = create_torch_backend(MODEL, engine, OPTIMIZER, CheckpointConfig(fsync=False))
    assert isinstance(away._updates.optimizer, SerialAdamW)
    one = alone()
    for step in range(3):
        assert take_step(away, [draw_samples(step, 9)]) == take_step(one, [draw_samples(step, 9)])
    (folder := tmp_path / "saved").mkdir()
    away.save(folder).result(WAIT_SECONDS)
    for backend in (one, away):
        backend.load(folder)
        take_step(backend, [draw_samples(7, 9)])
    assert_weights_equal(exported(away), exported(one), "after what both have read")


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


def test_a_folder_that_no_rank_can_read_is_refused_once(ranks: LearnerGroup, spare: Learner, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"config\.json"):
        ranks.learner(replace(MODEL, source=tmp_path), ENGINE, OPTIMIZER)
    take_step(spare, [draw_samples(0, 3)])


def test_the_group_conforms(ranks: LearnerGroup, tmp_path: Path) -> None:
    if ranks.size == 2:
        assert_backend_conforms(lambda model, engine, optimizer, _: ranks.learner(model, engine, optimizer), tmp_path)


# --- publishing -------------------------------------------------------------------------------------------------------

HALF = replace(MODEL, dtype="bfloat16")
"""Served in another dtype than it is kept in; the 23 rows of its embedding, which is tied, are cut unevenly."""
SLOWLY = OptimizerConfig(learning_rate=1e-5, total_steps=8)
KINDS = ["anchor", "delta", "delta", "anchor", "delta", "delta"]
FILES = {"config.json": b"{}"}


def publisher_in(folder: Path) -> WeightPublisher:
    write_run_keys(folder)
    made = WeightPublisher(folder / FILE_NAMES[TrainerKeys])
    made.forms.smallest = 0
    return made


def ungathered(export: Export, buffer: BufferOf) -> list[TensorEntry]:
    """An export during which the first rank fails where it makes a tensor whole, which no other can do without it."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was gathered")

    with pytest.MonkeyPatch.context() as patched:
        for name in ("full_tensor", "redistribute"):
            patched.setattr(DTensor, name, refused)
        return export(buffer)


def test_versions_are_those_of_one_process(
    ranks: LearnerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte."""
    # So that a delta of some kilobytes pays, also where encoding them is slow.
    monkeypatch.setattr("polyrl_trainer.weights.server.WeightServer.bandwidth", 1e2)
    several = ranks.learner(HALF, ENGINE, SLOWLY)
    one = create_torch_backend(HALF, ENGINE, SLOWLY, CheckpointConfig(fsync=False))
    with closing(publisher_in(tmp_path / "several")) as of_several, closing(publisher_in(tmp_path / "one")) as of_one:
        for version, kind in enumerate(KINDS):
            take_step(several, [draw_samples(version, 9)])
            (folder := tmp_path / str(version)).mkdir()
            several.save(folder).result(WAIT_SECONDS)
            one.load(folder)
            files = FILES if version < 3 else {**FILES, "generation_config.json": b"{}"}
            export = partial(ungathered, several.export_weights)
            got = of_several.publish_snapshot(version, of_several.snapshot(export, files))
            wanted = of_one.publish_snapshot(version, of_one.snapshot(one.export_weights, files))
            assert of_several._kept[version].manifest.kind == kind
            images = [one._machines.own.image_of(one._kept[version].copy.number) for one in (of_several, of_one)]
            assert images[0] == images[1]
            assert structs.replace(got, endpoint=wanted.endpoint, public_key=wanted.public_key) == wanted
    several.close()


@pytest.mark.parametrize("head", ["value", "both"])
def test_a_head_of_one_row_is_one_ranks_and_beside_a_vocabulary_nobodys(ranks: LearnerGroup, head: Head) -> None:
    several, one = of_ranks(ranks, replace(MODEL, head=head)), alone(replace(MODEL, head=head))
    wanted = exported(one)
    assert ("score.weight" in wanted) == (head == "value")
    assert_weights_equal(exported(several), wanted, "mapped")
    several.close()
