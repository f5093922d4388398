"""What `pip install polyrl` alone does not bring, and which extra does: so that a command says it in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

from polyrl.errors import UserError

EXTRA_OF: Final = {
    **dict.fromkeys(
        ("aiohttp", "cryptography", "kopf", "kubernetes", "prometheus_client", "psutil", "zmq"), "operator"
    ),
    **dict.fromkeys(("pyarrow", "safetensors", "tensorboard", "torch", "transformers"), "trainer"),
    **dict.fromkeys(("huggingface_hub", "tokenizers"), "trainer"),  # transformers brings them
    "matplotlib": "plot",
}
"""Module to extra; the tests compare it with pyproject.toml."""

FOR_CLUSTERS: Final = ("kopf", "kubernetes")

MAX_NAMED: Final = 3
"""Packages that a sentence names; where all are missing, the extra says it better."""

RUN_HERE: Final = "all"
"""A run on this machine has a trainer, engines, a manager, and a picture at its end."""


def require_for_run(command: str) -> None:
    """Raises UserError naming what a run on this machine needs and what is not installed."""
    missing = [module for module in EXTRA_OF if module not in FOR_CLUSTERS and _is_missing(module)]
    if missing:
        raise UserError(missing_packages(command, missing, RUN_HERE))


def missing_packages(command: str, missing: Iterable[str], extra: str) -> str:
    """Reads on from the command's name."""
    names = list(missing)
    shown = ", ".join(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        shown += f" and {len(names) - MAX_NAMED} more packages"
    return f"{command}: needs {shown}, not installed here; pip install 'polyrl[{extra}]'"


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ValueError:  # imported by hand, without a spec
        return False
