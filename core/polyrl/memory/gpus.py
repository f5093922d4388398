"""How much memory a GPU has, by its name or by a number."""

from __future__ import annotations

import re
from typing import Final

from polyrl.errors import UserError

GPU_MEBIBYTES: Final = {
    "L4-24GB": 23_034,
    "A10G-24GB": 23_028,
    "RTX4090-24GB": 24_564,
    "A100-40GB": 40_960,
    "L40S-48GB": 46_068,
    "H100-80GB": 81_559,
    "A100-80GB": 81_920,
    "H20-96GB": 97_871,
    "H200-141GB": 143_771,
    "B200-180GB": 183_359,
}
"""As nvidia-smi lists them, which is less than the name says; smallest first."""

LEAST_BYTES: Final = 1 << 30
MOST_BYTES: Final = 1 << 42
"""Least and most bytes of any GPU that a model could be put on, in the next years."""

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def gpu_bytes(text: str) -> int:
    """Memory of the GPU of this name, or of its only beginning (H100), or the bytes that are written (80Gi, 24GB).
    Raises UserError for anything else."""
    if (amount := _AMOUNT.fullmatch(text.strip())) and amount[2].lower() in _UNITS:
        memory = int(float(amount[1]) * _UNITS[amount[2].lower()])
        if not LEAST_BYTES <= memory <= MOST_BYTES:
            raise UserError(f"GPU {text}: no GPU has {memory:,} bytes; give its memory with a unit, such as 80Gi")
        return memory
    found = [
        name for name in GPU_MEBIBYTES if name.lower().split("-")[0] == text.lower() or name.lower() == text.lower()
    ]
    if len(found) != 1:
        which = f"is one of {' and '.join(found)}" if found else f"is none of {', '.join(GPU_MEBIBYTES)}"
        raise UserError(f"GPU {text}: {which}; name one of them, or its memory, such as 80Gi")
    return GPU_MEBIBYTES[found[0]] << 20
