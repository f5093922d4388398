"""Attention without masks: forward and backward as with them, and windows that are seen no further."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyrl_trainer.backends.models.attention import PACKED_ATTENTION, Documents, packed_attention
from polyrl_trainer.backends.models.model_factory import DENSE_ATTENTION, load_model
from polyrl_trainer.backends.policy import hidden_states
from polyrl_trainer.testing.backend_conformance import MODEL, VOCABULARY

LENGTHS = [17, 9, 9, 9, 5, 1, 1, 3, 8, 16]
EXACT = 2e-5
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


@pytest.mark.parametrize("changes", [{}, WINDOW], ids=["whole", "window"])
def test_it_computes_what_masks_compute(changes: dict[str, Any]) -> None:
    model = load_model({**dict(MODEL.source), **changes}, 3, "float32")  # type: ignore[arg-type]
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (1, sum(LENGTHS))))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    documents = Documents.of(LENGTHS, torch.device("cpu"))
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for attention in (DENSE_ATTENTION, PACKED_ATTENTION):
        model.set_attn_implementation(attention)
        model.zero_grad()
        hidden = hidden_states(model, ids, positions, documents)
        hidden.square().mean().backward()  # type: ignore[no-untyped-call]
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        found.append((hidden.detach(), gradients))
    (wanted, wanted_gradients), (hidden, gradients) = found
    np.testing.assert_allclose(hidden.numpy(), wanted.numpy(), atol=EXACT)
    for name, gradient in wanted_gradients.items():
        np.testing.assert_allclose(gradients[name].numpy(), gradient.numpy(), atol=EXACT, err_msg=name)


def test_scores_that_it_does_not_know_are_refused() -> None:
    one = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="caps its scores"):
        packed_attention(torch.nn.Identity(), one, one, one, None, softcap=30.0)
