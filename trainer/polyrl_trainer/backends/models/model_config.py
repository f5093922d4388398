"""The config of a fresh model, from the manifest's fields: no tensor is made, so that a check can read it too.

A misspelt field is refused: transformers would keep it and ignore it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from polyrl.errors import InvalidManifest
from polyrl_trainer.backends.configs import SpecialTokens

UNDECLARED_FIELDS = frozenset({"model_type", "rope_theta", "rope_scaling", "torch_dtype", "head_dim"})
"""Fields of published config.json files that transformers reads, though not every config declares them."""
MAX_REASON_CHARACTERS = 200
"""Most characters shown of a foreign error message; some list every model that exists."""

PLACE = "spec.recipe.model.config"


def model_config(fields: Mapping[str, Any], special_tokens: SpecialTokens, vocabulary: int | None) -> PretrainedConfig:
    """The config that the fields make; ids of special tokens and the size of the vocabulary are the tokenizer's where
    the fields do not give them, instead of the architecture's own. Raises InvalidManifest."""
    model_type = str(fields.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise InvalidManifest([f"{PLACE}.model_type: transformers knows no {model_type!r}{_nearest(model_type)}"])
    config_class = CONFIG_MAPPING[model_type]
    _refuse_unknown(fields, config_class)
    ids = dataclasses.asdict(special_tokens)
    defaults: dict[str, Any] = {f"{name}_token_id": value for name, value in ids.items() if value is not None}
    if vocabulary is not None and "vocab_size" in _known_fields(config_class):
        defaults["vocab_size"] = vocabulary
    given = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return config_class(**{**defaults, **given})
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise InvalidManifest([f"{PLACE}: {reason_of(error)}"]) from error


def _refuse_unknown(fields: Mapping[str, Any], config_class: type[PretrainedConfig]) -> None:
    known = _known_fields(config_class)
    faults = [
        f"{PLACE}.{name}: {config_class.model_type} has no such field{_nearest(name, known)}"
        for name in fields
        if name not in known
    ]
    if faults:
        raise InvalidManifest(faults)


def _known_fields(config_class: type[PretrainedConfig]) -> set[str]:
    declared = {field.name for field in dataclasses.fields(config_class)}
    return declared | UNDECLARED_FIELDS | set(config_class.attribute_map)


def _nearest(word: object, known: set[str] | None = None) -> str:
    close = difflib.get_close_matches(str(word), known if known is not None else list(CONFIG_MAPPING), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def reason_of(error: Exception) -> str:
    """A foreign error on one short line."""
    return " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
