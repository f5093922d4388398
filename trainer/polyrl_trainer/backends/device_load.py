"""How hard a device works: floating point operations of a pass, the most that it could do, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedModel

from polyrl.engines.hand_over import DeviceUse

PEAK_FLOPS: Final = {
    "B200": 2.25e15, "GB200": 2.25e15, "H200": 9.89e14, "GH200": 9.89e14, "H100": 9.89e14, "A100": 3.12e14,
    "L40S": 3.62e14, "L40": 1.81e14, "L4": 1.21e14, "A10": 1.25e14,
}  # fmt: skip
"""Dense bfloat16 operations per second by a word of the device's name, as NVIDIA publishes them for the SXM form."""
OPERATIONS_PER_PARAMETER: Final = 2
"""Operations of a token in one direction: a multiplication and an addition (Kaplan et al. 2020, arXiv 2001.08361,
section 2.1). Forward, backward to what came in, and, where a parameter learns, backward to it."""
ATTENTION_OPERATIONS: Final = 6
"""Per layer, width and pair of positions of a sequence: two products of two operations each, forward once and backward
twice, of which a causal mask needs half (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, without the half)."""


@dataclass(frozen=True)
class MatrixSizes:
    """Parameters of a model that are multiplied with."""

    body: int
    """For every token; of a mixture of experts all of them, so that its use is stated too high."""
    head: int
    """For learned tokens only."""
    learning_body: int
    """Parameters of the body that learn, and below those of the head: with adapters only the adapters do."""
    learning_head: int
    attention_width: int = 0
    """Heads times their width, summed over layers; where a layer looks at a window only, its use is stated too high."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> MatrixSizes:
        """The sizes of a model; an embedding is left out, since only one row of it is read."""
        embeddings, outputs = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
        read_by_row, multiplied = (list(one.parameters()) if one is not None else [] for one in (embeddings, outputs))
        outside = {id(one) for one in [*read_by_row, *multiplied]}
        body = [one for one in model.parameters() if id(one) not in outside]
        return cls(
            body=_count(body),
            head=_count(multiplied),
            learning_body=_count(_learning(body)),
            learning_head=_count(_learning(multiplied)),
            attention_width=_attention_width(model),
        )

    def operations(self, lengths: Sequence[int], learned: int) -> float:
        """Operations of one pass, forward and backward, over sequences of `lengths`, with `learned` learned tokens."""
        tokens = sum(lengths)
        through = self.body * tokens + self.head * learned
        to_parameters = self.learning_body * tokens + self.learning_head * learned
        pairs = sum(length * length for length in lengths)
        attention = ATTENTION_OPERATIONS * self.attention_width * pairs
        return float(OPERATIONS_PER_PARAMETER * (2 * through + to_parameters) + attention)


def _learning(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [one for one in parameters if one.requires_grad]


def _attention_width(model: PreTrainedModel) -> int:
    """0 where the config does not say."""
    config = model.config.get_text_config()
    heads, layers = getattr(config, "num_attention_heads", 0), getattr(config, "num_hidden_layers", 0)
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads)
    return int(layers * heads * width)


def _count(parameters: Sequence[torch.nn.Parameter]) -> int:
    return sum(one.numel() for one in parameters)


def device_use(device: torch.device) -> DeviceUse | None:
    """Memory of a GPU, whoever holds it; None of a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    own, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    return DeviceUse(total, free, own=own, own_peak=peak)


def give_back(device: torch.device) -> None:
    """Returns to the GPU what torch's allocator holds of it unused, for an engine that wakes there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_numbers(device: torch.device) -> dict[str, float]:
    """Numbers of a GPU: the most bytes allocated and reserved so far, and its peak FLOP/s where its name is known. Of a
    CPU nothing."""
    if device.type != "cuda":
        return {}
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    peak = next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)
    return {
        "device_allocated_max": float(torch.cuda.max_memory_allocated(device)),
        "device_reserved_max": float(torch.cuda.max_memory_reserved(device)),
        **({"device_flops_max": peak} if peak else {}),
    }
