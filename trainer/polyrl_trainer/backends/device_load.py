"""How hard a device works: floating point operations of a pass, the most that it could do, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedModel

PEAK_FLOPS: Final = {
    "B200": 2.25e15, "H200": 9.89e14, "H100": 9.89e14, "A100": 3.12e14, "L40S": 3.62e14, "L4": 1.21e14, "A10": 1.25e14
}  # fmt: skip
"""Dense bfloat16 operations per second by a part of the device's name, as NVIDIA publishes them for the SXM form."""
OPERATIONS_PER_PARAMETER: Final = 6
"""Of a token: a multiplication and an addition, once forward and twice backward (Kaplan et al. 2020, arXiv 2001.08361,
section 2.1)."""


@dataclass(frozen=True)
class MatrixSizes:
    """Parameters of a model that are multiplied with."""

    body: int
    """For every token; of a mixture of experts all of them, so that its use is stated too high."""
    head: int
    """For learned tokens only."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> MatrixSizes:
        """Of an embedding one row is read."""
        embeddings, outputs = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
        read_by_row, multiplied = (list(one.parameters()) if one is not None else [] for one in (embeddings, outputs))
        tied = any(one is other for one in multiplied for other in read_by_row)
        outside = [*read_by_row, *([] if tied else multiplied)]
        body = _count(list(model.parameters())) - _count(outside)
        return cls(body=body, head=_count(multiplied))

    def operations(self, tokens: int, learned: int) -> float:
        """Of one pass forward and backward, without those of attention."""
        return float(OPERATIONS_PER_PARAMETER * (self.body * tokens + self.head * learned))


def _count(parameters: Sequence[torch.nn.Parameter]) -> int:
    return sum(one.numel() for one in parameters)


def device_numbers(device: torch.device) -> dict[str, float]:
    """Of a GPU the bytes that were allocated and reserved at most, and what it can do, where that is known."""
    if device.type != "cuda":
        return {}
    name = torch.cuda.get_device_name(device)
    peak = next((value for part, value in PEAK_FLOPS.items() if part in name), None)
    return {
        "device_allocated_max": float(torch.cuda.max_memory_allocated(device)),
        "device_reserved_max": float(torch.cuda.max_memory_reserved(device)),
        **({"device_flops_max": peak} if peak else {}),
    }
