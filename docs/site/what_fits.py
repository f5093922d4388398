"""Prints the table of docs/how-to/run-on-a-workstation.md: python docs/site/what_fits.py"""

from __future__ import annotations

from typing import Final

from polyrl.local.gpu_memory import Fit, ModelSizes, fit, kept_bytes, kv_bytes, rest_bytes
from polyrl.local.memory import GIB

MODELS: Final = {
    "0.5B": ModelSizes(parameters=494_032_768, layers=24, hidden=896, inner=4864, keys=128),
    "1.5B": ModelSizes(parameters=1_543_714_304, layers=28, hidden=1536, inner=8960, keys=256),
    "3B": ModelSizes(parameters=3_085_938_688, layers=36, hidden=2048, inner=11008, keys=256),
    "7B": ModelSizes(parameters=7_615_616_512, layers=28, hidden=3584, inner=18944, keys=512),
}
"""Of Qwen2.5, as its config.json files give them."""

GPUS: Final = {"24 GB": 23_034 << 20, "48 GB": 46_068 << 20, "80 GB": 81_559 << 20}
"""The least that nvidia-smi reports of such cards: L4, L40S, H100."""

DTYPE: Final = "bfloat16"


def table() -> str:
    """Rows of Markdown."""
    heads = [f"{gpu}: alone / shared" for gpu in GPUS]
    heads = ["model", "learner at rest", "1,000 tokens of a pass", "engine: weights, 1,000 tokens in flight", *heads]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, sizes in MODELS.items():
        engine = f"{_gib(2 * sizes.parameters)}, {_gib(1000 * kv_bytes(sizes, DTYPE), 2)}"
        cells = [_gib(rest_bytes(sizes.parameters)), _gib(1000 * kept_bytes(sizes, DTYPE)), engine]
        cells += [_words(fit(sizes, memory, DTYPE)) for memory in GPUS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _words(found: Fit) -> str:
    if not found.alone:
        return "no"
    shared = f"{found.shared:,} at {found.fraction:g}" if found.shared else "no"
    return f"{found.alone:,} / {shared}"


def _gib(number: int, digits: int = 1) -> str:
    return f"{number / GIB:.{digits}f} GiB"


if __name__ == "__main__":
    print(table(), end="")
