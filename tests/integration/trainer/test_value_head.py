"""A model with a value head, on the constructor of the language model: values, gradients, checkpoints, transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from polyrl.errors import InvalidData
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig, SpecialTokens
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.testing.backend_conformance import MODEL, assert_weights_equal, draw_samples, exported

WAIT_S = 60.0
ENGINE = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_S)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, total_steps=4)
VALUE_MODEL = replace(MODEL, head="value", special_tokens=SpecialTokens(pad=0, eos=2))
EXACT = 2e-5


def make(model: ModelConfig = VALUE_MODEL) -> TorchBackend:
    return create_torch_backend(model, ENGINE, OPTIMIZER, CheckpointConfig(fsync=False))


@pytest.fixture
def backend() -> Iterator[TorchBackend]:
    made = make()
    yield made
    made.close()


def squares(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
    """A critic's, with a return of 1 everywhere."""
    assert inputs.values is not None
    return ((inputs.values - 1).square() * inputs.mask).sum() / 2, {}


def saved(backend: TorchBackend, folder: Path) -> Path:
    folder.mkdir()
    backend.save(folder).result(WAIT_S)
    return folder


def test_a_value_is_what_the_head_says_of_all_before_the_token(backend: TorchBackend) -> None:
    samples = draw_samples(3, 24)
    plain = load_model(MODEL.source, MODEL.seed, "float32", VALUE_MODEL.special_tokens, head="value")
    for sample, found in zip(samples, backend.values(samples).result(WAIT_S), strict=True):
        with torch.no_grad():
            hidden = plain.base_model(input_ids=torch.from_numpy(sample.tokens).unsqueeze(0)).last_hidden_state[0]
            at_each = (hidden @ plain.score.weight[0]).numpy()
        wanted = np.concatenate([[0.0], at_each[:-1]]) * sample.loss_mask
        np.testing.assert_allclose(found, wanted, atol=EXACT)


def test_values_learn_by_the_same_calls_as_logprobs(backend: TorchBackend) -> None:
    samples = draw_samples(4, 12)
    losses = []
    for _ in range(4):
        sums = backend.forward_backward(samples, squares).result(WAIT_S)
        losses.append(sums["loss"])
        backend.optim_step(sums["tokens"]).result(WAIT_S)
    assert losses[-1] < 0.5 * losses[0]


def test_a_saved_value_model_goes_on_bit_for_bit(backend: TorchBackend, tmp_path: Path) -> None:
    samples, other = draw_samples(4, 12), make()
    backend.forward_backward(samples, squares).result(WAIT_S)
    backend.optim_step(10.0).result(WAIT_S)
    other.load(saved(backend, tmp_path / "model"))
    for one in (backend, other):
        one.forward_backward(samples, squares).result(WAIT_S)
        one.optim_step(10.0).result(WAIT_S)
    assert_weights_equal(exported(other), exported(backend), "a step after load")
    other.close()


def test_its_folder_loads_as_a_sequence_classifier_with_the_same_scores(backend: TorchBackend, tmp_path: Path) -> None:
    folder = saved(backend, tmp_path / "model")
    assert not (folder / "generation_config.json").exists(), "it writes nothing"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]])
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0].numpy()
    # One more token, which is the learned one: its value is that of all before it.
    longer = [np.array([5, 6, 7, 8, 9, 0]), np.array([9, 8, 7, 0])]
    samples = [
        replace(draw_samples(0, 1)[0], tokens=ids, loss_mask=np.eye(len(ids), dtype=np.float32)[-1]) for ids in longer
    ]
    wanted = [values[-1] for values in backend.values(samples).result(WAIT_S)]
    np.testing.assert_allclose(found, wanted, atol=EXACT)


def test_a_language_model_gives_the_trunk_and_the_seed_the_head(tmp_path: Path) -> None:
    load_model(MODEL.source, 5, "float32").save_pretrained(tmp_path)
    first, again, other = (load_model(tmp_path, seed, "float32", head="value").state_dict() for seed in (1, 1, 2))
    assert torch.equal(first["score.weight"], again["score.weight"])
    assert not torch.equal(first["score.weight"], other["score.weight"])
    trunk = load_model(tmp_path, 0, "float32").state_dict()
    assert all(torch.equal(first[name], trunk[name]) for name in first if name.startswith("model."))


@pytest.mark.parametrize(("special", "padding"), [(SpecialTokens(pad=0, eos=2), 0), (SpecialTokens(eos=2), 2)])
def test_the_folder_of_a_trunk_that_knew_no_padding_scores_a_batch(
    tmp_path: Path, special: SpecialTokens, padding: int
) -> None:
    load_model(MODEL.source, 5, "float32").save_pretrained(tmp_path / "trunk")
    made = make(replace(VALUE_MODEL, source=tmp_path / "trunk", special_tokens=special))
    model = AutoModelForSequenceClassification.from_pretrained(saved(made, tmp_path / "model"))
    made.close()
    assert model.config.pad_token_id == padding, "without one transformers refuses batches"


def test_a_value_model_without_its_head_is_refused(backend: TorchBackend, tmp_path: Path) -> None:
    folder = saved(backend, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidData, match=r"lack 1 tensors, score\.weight among them"):
        load_model(folder, 0, "float32", head="value")
    shutil.rmtree(folder)


def test_a_language_model_has_no_values() -> None:
    made = make(MODEL)
    with pytest.raises(InvalidData, match="have no value head"):
        made.values(draw_samples(0, 2)).result(WAIT_S)
    made.close()
