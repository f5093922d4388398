"""Adapters on a frozen model: what learns, what is served, what is saved, what the reference is."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyrl.errors import InvalidData, InvalidManifest
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import ModelSpec
from polyrl.wire.checks import CheckFault
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.backends.configs import AdapterConfig, CheckpointConfig, EngineConfig, ModelConfig
from polyrl_trainer.backends.policy import ReferencePolicy
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.check.model import check_model
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.testing.backend_conformance import (
    MODEL,
    OPTIMIZER,
    assert_weights_close,
    assert_weights_equal,
    draw_samples,
    exported,
    take_step,
)

WAIT_SECONDS = 60.0
ENGINE = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_SECONDS)
ADAPTED = replace(MODEL, adapter=AdapterConfig(rank=4, alpha=8.0))
SAMPLES = draw_samples(5, 8)


def make(model: ModelConfig = ADAPTED) -> TorchBackend:
    return create_torch_backend(model, ENGINE, OPTIMIZER, CheckpointConfig(fsync=False))


def scores(scorer: Any) -> np.ndarray:
    return np.concatenate(scorer.log_probs(SAMPLES).result(WAIT_SECONDS))


def trained(steps: int = 2, model: ModelConfig = ADAPTED) -> TorchBackend:
    backend = make(model)
    for _ in range(steps):
        take_step(backend, [SAMPLES])
    return backend


def saved(backend: TorchBackend, folder: Path) -> Path:
    folder.mkdir()
    backend.save(folder).result(WAIT_SECONDS)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fresh_adapters_change_no_bit(dtype: Any) -> None:
    # bfloat16: the frozen layers are held in it, and compute what float32 ones under autocast do.
    np.testing.assert_array_equal(
        scores(make(replace(ADAPTED, dtype=dtype))), scores(make(replace(MODEL, dtype=dtype)))
    )


def test_frozen_layers_take_the_served_bytes_and_only_adapters_learn() -> None:
    model = make(replace(ADAPTED, dtype="bfloat16"))._policy.model
    learning = {name for name, one in model.named_parameters() if one.requires_grad}
    assert learning == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert {one.dtype for name, one in model.named_parameters() if "base_layer" in name} == {torch.bfloat16}
    # The head is the embedding too, whose part of the sum would lose digits.
    assert model.get_input_embeddings().weight.dtype == torch.float32


def test_what_is_served_is_the_merged_model(tmp_path: Path) -> None:
    backend = trained()
    plain = make(MODEL)
    assert exported(backend).keys() == exported(plain).keys()
    moved = {name for name, one in exported(backend).items() if not torch.equal(one, exported(plain)[name])}
    assert len(moved) == 14
    assert all(name.endswith("proj.weight") for name in moved)
    merged = make(replace(MODEL, source=saved(backend, tmp_path / "model")))
    np.testing.assert_allclose(scores(merged), scores(backend), atol=1e-5)
    assert abs(scores(backend) - scores(plain)).max() > 1e-2


def test_peft_reads_the_adapter_of_a_checkpoint(tmp_path: Path) -> None:
    from peft import PeftModel

    backend, base = trained(), tmp_path / "base"
    saved(make(MODEL), base)
    folder = saved(backend, tmp_path / "model") / "adapter"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what peft asks transformers
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    merged = dict(model.merge_and_unload().named_parameters())
    wanted = exported(backend)
    assert_weights_close({name: merged[name].detach() for name in wanted}, wanted, "peft's merge")


@pytest.mark.parametrize(
    ("path", "base"),
    [("/home/ada/models/tiny", "tiny"), ("hf://ada/tiny@main", "ada/tiny"), (None, None)],
    ids=["a folder", "a hub's", "a fresh one"],
)
def test_an_adapter_names_its_base_as_strangers_know_it(tmp_path: Path, path: str | None, base: str | None) -> None:
    """It named a folder of the machine that it was made on, of a Hub's model one of a cache."""
    model = ModelSpec.model_validate({"path": path, "lora": {"rank": 4}})
    backend = make(replace(MODEL, adapter=AdapterConfig.from_manifest(model)))
    folder = saved(backend, tmp_path / "model")
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == base


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_resume_goes_on_bit_for_bit(tmp_path: Path, dropout: float) -> None:
    model = replace(ADAPTED, adapter=AdapterConfig(rank=4, alpha=8.0, dropout=dropout))
    backend = trained(model=model)
    folder = saved(backend, tmp_path / "model")
    take_step(backend, [SAMPLES])
    resumed = make(model)
    resumed.load(folder)
    take_step(resumed, [SAMPLES])
    assert_weights_equal(exported(resumed), exported(backend), "after a resume")
    names = {name.partition("/")[2] for name in load_file(folder / "optimizer.safetensors")}
    assert names
    assert all(".lora_" in name for name in names)


def test_dropout_acts_in_training_alone() -> None:
    with_dropout = replace(ADAPTED, adapter=AdapterConfig(rank=4, alpha=8.0, dropout=0.5))
    first, second = trained(model=with_dropout), trained(model=with_dropout)
    np.testing.assert_array_equal(scores(first), scores(first))
    losses = [one.forward_backward(SAMPLES, sft_loss).result(WAIT_SECONDS)["loss"] for one in (second, second)]
    assert losses[0] != losses[1]


def test_what_dropout_leaves_out_follows_from_the_seed_alone() -> None:
    model = replace(ADAPTED, adapter=AdapterConfig(rank=4, alpha=8.0, dropout=0.3))
    processes = []
    for _ in range(2):
        torch.seed()  # as every process of a run begins with a state of its own
        before = torch.get_rng_state()
        processes.append(exported(trained(model=model)))
        assert torch.equal(torch.get_rng_state(), before), "no generator of the process moves"
    assert_weights_equal(*processes, "the same seed in two processes")


def test_the_reference_is_the_model_without_its_adapters() -> None:
    backend = trained()
    reference = ReferencePolicy(MODEL, ENGINE)
    np.testing.assert_array_equal(scores(backend.below_adapters()), scores(reference))
    reference.close()


def test_a_reference_asked_within_a_mini_batch_leaves_its_gradient() -> None:
    asked, other = trained(), trained()
    for backend in (asked, other):
        backend.forward_backward(SAMPLES[:4], sft_loss).result(WAIT_SECONDS)
    scores(asked.below_adapters())
    for backend in (asked, other):
        backend.forward_backward(SAMPLES[4:], sft_loss).result(WAIT_SECONDS)
        backend.optim_step(8).result(WAIT_SECONDS)
    assert_weights_equal(exported(asked), exported(other), "after the reference was asked")


def test_adapters_alone_are_saved_and_go_on(tmp_path: Path) -> None:
    model = replace(ADAPTED, adapter=AdapterConfig(rank=4, alpha=8.0, save_merged=False))
    backend = trained(model=model)
    folder = saved(backend, tmp_path / "model")
    assert not (folder / "model.safetensors").exists()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    resumed = make(model)
    resumed.load(folder)
    assert_weights_equal(exported(resumed), exported(backend), "after a resume")


def test_adapters_of_other_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(trained(), tmp_path / "model")
    with pytest.raises(InvalidData, match=r"was not trained on the weights .* recipe\.model"):
        make(replace(ADAPTED, seed=12)).load(folder)
    with pytest.raises(InvalidData, match="was not trained on the weights"):
        make(MODEL).load(folder)
    with pytest.raises(InvalidData, match=r"lora_A.*is float32\[4, 32\], this run needs float32\[8, 32\]"):
        make(replace(ADAPTED, adapter=AdapterConfig(rank=8, alpha=8.0))).load(folder)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("q_pro", r"targetModules: the model has no linear layer q_pro, only down_proj.*; did you mean q_proj\?"),
        ("lm_head", "no linear layer lm_head"),
        ("embed_tokens", "no linear layer embed_tokens"),
    ],
)
def test_a_target_that_the_model_lacks_is_refused(wanted: str, sentence: str) -> None:
    with pytest.raises(InvalidManifest, match=sentence):
        make(replace(ADAPTED, adapter=AdapterConfig(rank=4, alpha=8.0, target_modules=("v_proj", wanted))))


def test_named_targets_get_adapters_and_no_other() -> None:
    backend = make(replace(ADAPTED, adapter=AdapterConfig(rank=4, alpha=8.0, target_modules=("v_proj", "up_proj"))))
    owners = {name.split(".lora_")[0] for name, _ in backend._policy.model.named_parameters() if ".lora_" in name}
    assert {name.rpartition(".")[2] for name in owners} == {"v_proj", "up_proj"}


def test_validate_names_a_target_that_a_models_folder_lacks(tmp_path: Path) -> None:
    saved(make(MODEL), tmp_path / "model")
    model = {"path": "model", "lora": {"targetModules": ["v_proj", "qkv_proj"]}}
    spec = JobSpec.model_validate({"recipe": {"model": model}, "trainer": {"processesPerPod": 3, "contextParallel": 3}})
    spread, fault = (one for one in check_model(spec, tmp_path) if isinstance(one, CheckFault))
    assert spread.field == ("spec", "trainer", "contextParallel")
    assert spread.sentence == "3 does not divide the model's 4 attention heads; set one of 1, 2, 4"
    assert ".".join(map(str, fault.field)) == "spec.recipe.model.lora.targetModules"
    assert fault.sentence.startswith("the model has no linear layer qkv_proj, only ")


def test_a_value_head_learns_beside_its_adapters_and_goes_on(tmp_path: Path) -> None:
    def squares(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        assert inputs.values is not None
        return (inputs.values - 1.0).square().sum(), {}

    def step(backend: TorchBackend) -> None:
        backend.forward_backward(SAMPLES, squares).result(WAIT_SECONDS)
        backend.optim_step(8).result(WAIT_SECONDS)

    model = replace(ADAPTED, head="value")
    backend, fresh = make(model), exported(make(model))
    step(backend)
    assert not torch.equal(exported(backend)["score.weight"], fresh["score.weight"])
    assert torch.equal(exported(backend)["model.norm.weight"], fresh["model.norm.weight"])
    resumed = make(model)
    resumed.load(saved(backend, tmp_path / "model"))
    step(backend)
    step(resumed)
    assert_weights_equal(exported(resumed), exported(backend), "after a resume")
