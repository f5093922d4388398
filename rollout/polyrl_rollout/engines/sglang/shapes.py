"""Names and shapes of a checkpoint's tensors, compared before SGLang may read it: half-way through weights of another
shape it fails, and its server with it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError, safe_open

from polyrl_rollout.engines.port import EngineFailed

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Shape by tensor name."""


def read_shapes(folder: Path) -> Shapes:
    """Shapes by tensor name over all safetensors files of `folder`. Raises EngineFailed naming what cannot be read."""
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise EngineFailed(f"{path} cannot be read: {error}") from error
    if not shapes:
        raise EngineFailed(f"{folder} holds no safetensors")
    return shapes


def dtypes_of(folder: Path) -> set[str]:
    """safetensors' names of the tensors' dtypes."""
    found = set[str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def check_same(shapes: Shapes, loaded: Shapes) -> None:
    """Raises EngineFailed naming a tensor that a loaded checkpoint had otherwise."""
    for name in sorted(shapes.keys() | loaded.keys()):
        if shapes.get(name) != loaded.get(name):
            raise EngineFailed(f"tensor {name} has shape {shapes.get(name)}, not {loaded.get(name)} as it was loaded")
