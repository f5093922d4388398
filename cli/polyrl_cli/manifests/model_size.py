"""How large the manifest's model is, from its config and the sizes of its files; nothing is loaded."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from polyrl.errors import UserError
from polyrl.local.gpu_memory import estimate_line
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import ModelSpec
from polyrl.memory.known_models import KNOWN_MODELS, known_config
from polyrl.memory.sizes import ModelSizes, parameters_of
from polyrl_trainer.backends.configs import SpecialTokens
from polyrl_trainer.data.hub import cached_folder

SAVED_BYTES: Final = {"float32": 4, "torch.float32": 4}
"""Per parameter in a model's files; else 2."""
CONFIG_BYTES: Final = 16 << 20
"""Read of a config at most; one has kilobytes."""


def num_parameters(model: ModelSpec, base: Path) -> int:
    """At least so many; 0 for a model that is not on this machine yet. Relative paths begin at `base`."""
    config = config_fields(model, base)
    if model.path is None:
        return parameters_of(config)
    weights = sum(file.stat().st_size for file in _folder(model, base).glob("*.safetensors"))
    return weights // SAVED_BYTES.get(str(config.get("dtype", config.get("torch_dtype"))), 2)


def config_fields(model: ModelSpec, base: Path) -> Mapping[str, Any]:
    """Fields of the model's config; empty where it cannot be read."""
    if model.path is None:
        return model.config or {}
    try:
        config: Any = json.loads(_value_in(_folder(model, base) / "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def planned_sizes(model: ModelSpec, base: Path) -> tuple[ModelSizes, str]:
    """What memory depends on, and where it was found: in the manifest, in the model's folder, or among usual models.
    Raises UserError for a model that is in none of them."""
    if model.config is not None and (sizes := ModelSizes.of(_with_defaults(model.config))):
        return sizes, "recipe.model.config"
    sizes = ModelSizes.of(config_fields(model, base), num_parameters(model, base))
    if sizes is not None:
        return sizes, "its config.json"
    hub = None if model.source is None else model.source.hub
    sizes = None if hub is None else ModelSizes.of(known_config(hub.name))
    if sizes is not None:
        return sizes, "the sizes of usual models"
    raise UserError(
        f"spec.recipe.model: the sizes of {model.path or 'recipe.model.config'} are not known; give a folder whose"
        " config.json names them (hidden_size, num_hidden_layers, intermediate_size, num_attention_heads), or one of"
        f" {', '.join(KNOWN_MODELS)}"
    )


def _with_defaults(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the model would be made of: the manifest names what differs from its architecture alone."""
    from polyrl_trainer.backends.models.model_config import model_config  # transformers: seconds

    made: Mapping[str, Any] = model_config(fields, SpecialTokens(), None).to_dict()
    return made


def size_notes(spec: JobSpec, base: Path) -> list[str]:
    """What a GPU would have to hold; nothing for a tiny model, or for one that is not on this machine yet."""
    model = spec.recipe.model
    line = estimate_line(spec, ModelSizes.of(config_fields(model, base), num_parameters(model, base)))
    return [line] if line else []


def _value_in(file: Path) -> bytes:
    """Content of an ordinary file, which a Hub's cache has behind a link. Raises OSError, ValueError for any other."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > CONFIG_BYTES:
            raise ValueError("no model's config")
        return opened.read()


def _folder(model: ModelSpec, base: Path) -> Path:
    return cached_folder(model, base) or base / str(model.path)
