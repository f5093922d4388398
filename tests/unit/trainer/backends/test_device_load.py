"""Operations of a pass, counted by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polyrl_trainer.backends.device_load import MatrixSizes, device_numbers

LAYERS, HIDDEN, VOCABULARY = 2, 8, 16


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GH200 480GB", 989), ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362), ("NVIDIA L40", 181), ("NVIDIA A10G", None), ("NVIDIA RTX A1000", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_a_whole_word_of_its_name(
    device: str, tera: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An L40 was taken for an L4, and an A10G for an A10."""
    given = {"get_device_name": device, "max_memory_allocated": 0, "max_memory_reserved": 0}
    for name, answer in given.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    numbers = device_numbers(torch.device("cuda"))
    assert numbers.get("device_flops_max") == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_cost_no_gradient_of_their_own_and_attention_counts(tied: bool) -> None:
    config = AutoConfig.for_model(
        "qwen2", hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16, vocab_size=VOCABULARY, tie_word_embeddings=tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    head = VOCABULARY * HIDDEN
    body = sum(one.numel() for one in model.parameters()) - head * (1 if tied else 2)
    attention = 6 * LAYERS * HIDDEN * (3 * 3 + 5 * 5)
    through = body * 8 + head * 4
    assert MatrixSizes.of(model).operations([3, 5], 4) == 2 * 3 * through + attention
    model.requires_grad_(False)
    norm = model.model.norm.weight
    norm.requires_grad_(True)
    assert MatrixSizes.of(model).operations([3, 5], 4) == 2 * (2 * through + norm.numel() * 8) + attention
