"""What the learner keeps per token for its backward pass, counted on a CPU, beside the formula that plans by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from polyrl.manifest.recipe import ActivationCheckpointing, RecipeSpec
from polyrl.memory.learner import activation_bytes, kept_bytes, learner_memory
from polyrl.memory.sizes import ModelSizes
from polyrl_trainer.backends.configs import AdapterConfig, Dtype
from polyrl_trainer.backends.models import lora
from polyrl_trainer.backends.models.attention import Documents
from polyrl_trainer.backends.models.blocks import checkpoint_blocks
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.backends.policy import hidden_states

WIDTH = 256
TOLERANCE = 0.1
"""Norms, the embedding and softmax statistics are small, and no part of the formula."""
FEW_AND_MORE = (2, 4)
"""Layers."""

SIZES: dict[str, dict[str, Any]] = {
    "as Qwen2.5": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
    "wide": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
    "large MLP": {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8},
}
NORMED = {"model_type": "qwen3", "head_dim": 64, "num_key_value_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    **SIZES,
    "as Qwen3": {**SIZES["as Qwen2.5"], **NORMED, "num_attention_heads": 4},
    "as Qwen3, with twice the queries": {**SIZES["as Qwen2.5"], **NORMED, "num_attention_heads": 8},
}


def kept(fields: dict[str, object], rows: int, dtype: str) -> int:
    """Bytes of all storages that a forward pass of `rows` x WIDTH tokens keeps, the model's own left out."""
    model = load_model(fields, 0, dtype)  # type: ignore[arg-type]
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    alive = []  # or an address would be taken twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    positions = torch.arange(WIDTH).repeat(rows, 1)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        documents = Documents.of([WIDTH] * rows, torch.device("cpu"))
        hidden_states(model, torch.zeros(rows, WIDTH, dtype=torch.long), positions, documents)
    return sum(found.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_formula_is_what_a_pass_keeps(name: str, dtype: str) -> None:
    fields = {"model_type": "qwen2", "vocab_size": 64, "num_hidden_layers": 6, **SHAPES[name]}
    sizes = ModelSizes.of(fields)
    assert sizes is not None
    # Casts of the weights are in both, and not in the difference.
    per_token = (kept(fields, 2, dtype) - kept(fields, 1, dtype)) / WIDTH
    assert per_token == pytest.approx(kept_bytes(sizes, dtype), rel=TOLERANCE)


def there_after(fields: dict[str, object], layers: int, rows: int, dtype: str, which: ActivationCheckpointing) -> int:
    """Bytes of all tensors that are there after a forward pass, those that are kept beside the graph among them."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = load_model({**fields, "num_hidden_layers": layers}, 0, dtype)  # type: ignore[arg-type]
        checkpoint_blocks(model, which)
        positions = torch.arange(WIDTH).repeat(rows, 1)
        documents, ids = Documents.of([WIDTH] * rows, torch.device("cpu")), torch.zeros(rows, WIDTH, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            hidden = hidden_states(model, ids, positions, documents)
            (snapshot,) = tracker.get_tracker_snapshot("current").values()
    assert hidden.requires_grad
    return int(snapshot["Total"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("which", [ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL])
@pytest.mark.parametrize("name", ["as Qwen2.5", "as Qwen3, with twice the queries"])
def test_layers_that_are_computed_twice_keep_what_is_planned(
    name: str, which: ActivationCheckpointing, dtype: str
) -> None:
    fields: dict[str, object] = {"model_type": "qwen2", "vocab_size": 64, **SHAPES[name]}
    (one, more), (wide, wider) = (
        [there_after(fields, layers, rows, dtype, which) for layers in FEW_AND_MORE] for rows in (1, 2)
    )
    added = FEW_AND_MORE[1] - FEW_AND_MORE[0]
    per_layer = (wider - wide - more + one) / WIDTH / added
    recipe = RecipeSpec.model_validate({"model": {"path": "m", "dtype": dtype}, "activationCheckpointing": which})
    planned = [
        activation_bytes(sizes, recipe) - kept_bytes(sizes, dtype) // sizes.layers
        for sizes in (ModelSizes.of({**fields, "num_hidden_layers": n}) for n in FEW_AND_MORE)
        if sizes is not None
    ]
    assert per_layer == pytest.approx((planned[1] - planned[0]) / added, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_below_adapters_take_what_is_planned(tied: bool, dtype: Dtype) -> None:
    fields = {"model_type": "qwen2", "vocab_size": 2048, "num_hidden_layers": 2, **SIZES["as Qwen2.5"]}
    fields |= {"tie_word_embeddings": tied}
    model, sizes = load_model(fields, 0, dtype), ModelSizes.of(fields)
    assert sizes is not None
    lora.add_adapter(model, AdapterConfig(rank=4, alpha=4.0), seed=0)
    lora.hold_frozen_in(model, dtype)
    recipe = RecipeSpec.model_validate({"model": {"path": "m", "dtype": dtype, "lora": {"rank": 4}}})
    planned = learner_memory(sizes, recipe, tokens=1)
    # Norms and biases are small, and no part of the formula.
    assert planned.weights == pytest.approx(sum(one.nbytes for one in model.parameters()), rel=0.01)
