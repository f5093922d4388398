"""Models as the learner makes and loads them: packed equals separate, seeds reproduce, bad sources are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from polyrl.errors import InvalidData, InvalidManifest
from polyrl_trainer.backends.configs import EngineConfig, ModelConfig, SpecialTokens
from polyrl_trainer.backends.models.attention import PACKED_ATTENTION
from polyrl_trainer.backends.models.model_factory import DENSE_ATTENTION, load_model, serving_files
from polyrl_trainer.backends.packing import PackingPolicy, pack_pass, plan_passes
from polyrl_trainer.backends.policy import create_policy, hidden_states, probe_model
from polyrl_trainer.sample import Sample

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
EXACT = 2e-5
"""float32, logits of size 10: kernels of other shapes add up in another order."""


def samples_of(lengths: list[int], seed: int) -> list[Sample]:
    draw = np.random.default_rng(seed)
    masks = [(np.arange(length) > 0).astype(np.float32) for length in lengths]
    return [Sample(draw.integers(0, 29, len(mask)), mask, prompt_length=1) for mask in masks]


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("attention", [DENSE_ATTENTION, PACKED_ATTENTION])
@pytest.mark.parametrize(
    "shape", [PackingPolicy.dense, PackingPolicy.variable_length], ids=["dense", "variable length"]
)
def test_packed_logits_are_those_of_each_sequence_alone(model_type: str, shape: Any, attention: str) -> None:
    model = load_model({"model_type": model_type, **SIZES}, seed=3, dtype="float32")
    model.set_attn_implementation(attention)
    probe_model(model)
    samples = samples_of([1, 2, 17, 17, 16, 40, 9, 30, 64, 5, 100], seed=4)
    for one in plan_passes([sample.length for sample in samples], shape(256)):
        batch = pack_pass(samples, one, torch.device("cpu"))
        with torch.no_grad():
            hidden = hidden_states(model, batch.input_ids, batch.position_ids, batch.documents)
            logits = model.lm_head(hidden).flatten(0, 1)[batch.predicting]
        start = 0
        for sample in batch.samples:
            with torch.no_grad():
                alone = model(input_ids=torch.from_numpy(sample.tokens).unsqueeze(0), use_cache=False).logits[0, :-1]
            packed = logits[start : start + len(alone)]
            start += len(alone)
            np.testing.assert_allclose(packed.numpy(), alone.numpy(), atol=EXACT, rtol=EXACT)
        assert start == len(logits)


def test_a_seed_gives_the_same_weights_and_leaves_the_process_generator_alone() -> None:
    fields = {"model_type": "qwen2", **SIZES}
    state = torch.get_rng_state()
    first, again, other = (load_model(fields, seed, "float32").state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("given", "size"), [({}, 14), ({"vocab_size": 29}, 29)], ids=["left out", "given"])
def test_a_vocabulary_that_is_left_out_is_the_tokenizers(given: dict[str, int], size: int) -> None:
    fields = {"model_type": "qwen2", **SIZES} | {"vocab_size": None}
    fields = {name: value for name, value in fields.items() if value is not None} | given
    assert load_model(fields, 0, "float32", vocabulary=14).get_input_embeddings().weight.shape[0] == size


def test_special_tokens_reach_the_files_that_engines_read() -> None:
    model = load_model({"model_type": "llama", **SIZES}, 0, "bfloat16", SpecialTokens(pad=0, bos=1, eos=2))
    files = {name: json.loads(content) for name, content in serving_files(model).items()}
    assert files["config.json"]["architectures"] == ["LlamaForCausalLM"]
    assert files["config.json"]["dtype"] == "bfloat16"
    for content in files.values():
        assert [content[f"{name}_token_id"] for name in ("pad", "bos", "eos")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("known", "ends", "becomes"),
    [
        (5, (2,), [2, 5]),
        ([5, 2], (2, 5), [5, 2]),
        (2, (2,), 2),
        (None, (2,), 2),
        (None, (), 2),
        (2, (2, 7), [2, 7]),
        (5, (2, 5, 7), [2, 5, 7]),
    ],
    ids=["another", "both", "the same", "none", "not even the tokenizer's", "the template's too", "all three"],
)
def test_a_model_ends_where_it_learns_to_end(
    tmp_path: Path, known: object, ends: tuple[int, ...], becomes: object
) -> None:
    """A base model's own end is not that of its chat template."""
    load_model({"model_type": "llama", **SIZES}, 0, "float32").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": known}))
    model = load_model(tmp_path, 0, "float32", SpecialTokens(eos=2, ends=ends))
    assert json.loads(serving_files(model)["generation_config.json"])["eos_token_id"] == becomes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model_type: transformers knows no 'None'"),
        ({"model_type": "qwen22"}, "did you mean qwen2"),
        ({"model_type": "qwen2", "hiden_size": 8}, "hiden_size: qwen2 has no such field; did you mean hidden_size"),
        ({"model_type": "qwen2", "hidden_size": "big"}, "hidden_size"),
        ({"model_type": "qwen2", **SIZES, "num_attention_heads": 0}, "no causal language model"),
        ({"model_type": "t5"}, "no causal language model"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_in_a_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidManifest, match=message) as caught:
        load_model(fields, 0, "float32")
    assert all(fault.startswith("spec.recipe.model.config") for fault in caught.value.faults)


def test_a_model_whose_numbers_would_be_wrong_is_refused() -> None:
    rescaled = load_model({"model_type": "granite", **SIZES, "logits_scaling": 4.0}, 0, "float32")
    with pytest.raises(InvalidData, match="granite cannot be trained packed"):
        probe_model(rescaled)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load_model({"model_type": "qwen2", **SIZES}, 5, "float32").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_its_weights_whatever_the_seed(folder: Path) -> None:
    wanted = load_file(folder / "model.safetensors")
    found = create_policy(ModelConfig(folder, seed=99, dtype="float32"), EngineConfig(device="cpu")).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_folder_that_lacks_a_tensor_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidData, match=r"lack 1 tensors, model\.layers\.1\.mlp\.up_proj\.weight among them"):
        load_model(folder, 0, "float32")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_a_folder_without_its_files_is_refused(folder: Path, lost: str) -> None:
    (folder / lost).unlink()
    with pytest.raises(InvalidData, match=str(folder)):
        load_model(folder, 0, "float32")
