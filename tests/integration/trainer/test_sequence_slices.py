"""A row in slices: each rank's hidden states are those of the whole row, whatever the numbers of heads and slices.

Ranks are threads here, and what they exchange goes from hand to hand; real ones are in `test_sharded_backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config

from polyrl.errors import InvalidData, InvalidManifest
from polyrl_trainer.backends.models.attention import PACKED_ATTENTION
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.backends.models.sequence_slices import SequenceSlices, require_heads
from polyrl_trainer.backends.policy import RELATIVE_TOLERANCE, require_like, sliced_and_whole
from polyrl_trainer.testing.backend_conformance import MODEL

WAIT_S = 60.0
CPU = torch.device("cpu")


@dataclass
class Hands:
    number: int
    given: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all_there = Barrier(self.number, timeout=WAIT_S)

    def exchange(self, own: int, given: torch.Tensor) -> torch.Tensor:
        self.given[own] = given
        self.all_there.wait()
        taken = torch.stack([self.given[rank][own] for rank in range(self.number)])
        self.all_there.wait()
        return taken


class ThreadSlices(SequenceSlices):
    def _exchange(self, given: torch.Tensor) -> torch.Tensor:
        hands: Any = self.group
        found: torch.Tensor = hands.exchange(self.own, given)
        return found


def on_each_rank(model: PreTrainedModel, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    hands: Any = Hands(number)

    def of_rank(own: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sliced_and_whole(model, CPU, ThreadSlices(hands, number, own))

    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(of_rank, range(number), timeout=WAIT_S))


def packed(**changes: Any) -> PreTrainedModel:
    model = load_model({**dict(MODEL.source), **changes}, 3, "float32")  # type: ignore[arg-type]
    model.set_attn_implementation(PACKED_ATTENTION)
    return model


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
MANY = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        pytest.param({}, 2, id="as many heads of keys as slices"),
        pytest.param({}, 4, id="fewer heads of keys"),
        pytest.param(WINDOW, 4, id="windows across slices"),
        pytest.param(MANY, 6, id="neither divides the other"),
        pytest.param(MANY, 12, id="more slices than tokens of a sequence"),
    ],
)
def test_a_slice_is_what_it_is_in_the_whole_row(changes: dict[str, Any], number: int) -> None:
    model = packed(**changes)
    for sliced, whole in on_each_rank(model, number):
        require_like(model, sliced, whole, tolerance=1e-5)


def test_a_model_that_mixes_neighbours_outside_of_attention_is_refused() -> None:
    model = packed()

    def mix(_: object, __: object, found: torch.Tensor) -> torch.Tensor:
        return found + 0.1 * torch.nn.functional.pad(found, (0, 0, 1, 0))[:, :-1]

    hook: Callable[..., Any] = model.base_model.embed_tokens.register_forward_hook
    hook(mix)
    first, second = on_each_rank(model, 2)
    with pytest.raises(
        InvalidData, match=r"qwen2 cannot be trained in slices .* set spec\.trainer\.contextParallel to 1"
    ):
        require_like(model, *second, tolerance=RELATIVE_TOLERANCE)
    # The first slice lacks no neighbour: its rank hears of it from the other.
    require_like(model, *first, tolerance=RELATIVE_TOLERANCE)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    require_heads(Qwen2Config(num_attention_heads=28), 4)
    with pytest.raises(
        InvalidManifest, match="8 does not divide the model's 28 attention heads; set one of 1, 2, 4, 7,"
    ):
        require_heads(Qwen2Config(num_attention_heads=28), 8)
