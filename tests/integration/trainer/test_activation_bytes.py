"""What the learner keeps per token for its backward pass, counted on a CPU, beside the formula that plans by it."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config

from polyrl.memory.learner import kept_bytes
from polyrl.memory.sizes import ModelSizes
from polyrl_trainer.backends.models.attention import Documents
from polyrl_trainer.backends.models.blocks import compute_blocks_twice
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.backends.policy import hidden_states

WIDTH = 256
TOLERANCE = 0.1
"""Norms, the embedding and softmax statistics are small, and no part of the formula."""

SIZES = {
    "as Qwen2.5": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
    "wide": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
    "large MLP": {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8},
}


def kept(fields: dict[str, object], rows: int, dtype: str, *, twice: bool = False) -> int:
    """Bytes of all storages that a forward pass of `rows` x WIDTH tokens keeps, the model's own left out."""
    model = load_model(fields, 0, dtype)  # type: ignore[arg-type]
    if twice:
        compute_blocks_twice(model)
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
@pytest.mark.parametrize("name", SIZES)
def test_the_formula_is_what_a_pass_keeps(name: str, dtype: str) -> None:
    fields = {"model_type": "qwen2", "vocab_size": 64, "num_hidden_layers": 6, **SIZES[name]}
    sizes = ModelSizes.of(Qwen2Config(**{k: v for k, v in fields.items() if k != "model_type"}).to_dict())
    assert sizes is not None
    # Casts of the weights are in both, and not in the difference.
    per_token = (kept(fields, 2, dtype) - kept(fields, 1, dtype)) / WIDTH
    assert per_token == pytest.approx(kept_bytes(sizes, dtype), rel=TOLERANCE)


def test_layers_that_are_computed_twice_keep_their_input_alone() -> None:
    fields = {"model_type": "qwen2", "vocab_size": 64, **SIZES["as Qwen2.5"]}
    few, many = (kept({**fields, "num_hidden_layers": layers}, 1, "float32", twice=True) for layers in (2, 8))
    assert many - few == 6 * WIDTH * 256 * 4
