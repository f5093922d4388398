"""Prints the table of docs/how-to/run-on-a-workstation.md: python docs/site/what_fits.py"""

from __future__ import annotations

from typing import Final

from polyrl.local.gpu_memory import Fit, fit
from polyrl.manifest.recipe import RecipeSpec
from polyrl.memory.engine import kv_bytes
from polyrl.memory.gpus import gpu_bytes
from polyrl.memory.known_models import known_config
from polyrl.memory.learner import kept_bytes, learner_memory
from polyrl.memory.sizes import GIB, ModelSizes

MODELS: Final = ("0.5B", "1.5B", "3B", "7B")
"""Of Qwen2.5."""

GPUS: Final = {"24 GB": "L4", "48 GB": "L40S", "80 GB": "H100"}
"""Of such cards the ones with the least memory."""

DTYPE: Final = "bfloat16"
RECIPE: Final = RecipeSpec.model_validate({"model": {"path": "model"}})


def table() -> str:
    """Rows of Markdown."""
    heads = [f"{gpu}: alone / shared" for gpu in GPUS]
    heads = ["model", "learner at rest", "1,000 tokens of a pass", "engine: weights, 1,000 tokens in flight", *heads]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in MODELS:
        sizes = ModelSizes.of(known_config(f"Qwen/Qwen2.5-{name}"))
        assert sizes is not None
        engine = f"{_gib(2 * sizes.parameters)}, {_gib(1000 * kv_bytes(sizes, DTYPE), 2)}"
        held = learner_memory(sizes, RECIPE, tokens=0).held
        cells = [_gib(held), _gib(1000 * kept_bytes(sizes, DTYPE)), engine]
        cells += [_words(fit(sizes, gpu_bytes(gpu), RECIPE)) for gpu in GPUS.values()]
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
