"""Makes the policy: from the fields of a transformers config with seeded random weights, or from a Hugging Face folder.

Master weights are float32, on the CPU, in eval mode. A folder that lacks a tensor, or a config with a misspelt field,
is refused: transformers would fill both in silently.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from polyrl.errors import InvalidData, InvalidManifest
from polyrl_trainer.backends.configs import Dtype, Head, SpecialTokens
from polyrl_trainer.backends.models.attention import PACKED_ATTENTION
from polyrl_trainer.backends.models.model_config import PLACE, model_config, reason_of
from polyrl_trainer.backends.models.value_head import HEAD_WEIGHT, draw_head, name_padding

_AUTO_MODELS: dict[Head, Any] = {
    "tokens": AutoModelForCausalLM,
    "value": AutoModelForSequenceClassification,
    "both": AutoModelForCausalLM,
}
"""transformers leaves these class methods untyped."""
_KINDS: dict[Head, str] = {
    "tokens": "causal language model",
    "value": "model with a value head",
    "both": "causal language model",
}
NO_SPECIAL_TOKENS = SpecialTokens()

DENSE_ATTENTION = "sdpa"


def load_model(
    source: Path | Mapping[str, Any],
    seed: int,
    dtype: Dtype,
    special_tokens: SpecialTokens = NO_SPECIAL_TOKENS,
    vocabulary: int | None = None,
    head: Head = "tokens",
) -> PreTrainedModel:
    """A model of float32 master weights, ready for scoring; `dtype` is noted as the one it serves in.

    Raises InvalidManifest for a config that makes no model, InvalidData for a folder that holds none.
    """
    if isinstance(source, Path):
        model = _from_folder(source, seed, head)
    else:
        model = _from_config(source, seed, special_tokens, vocabulary, head)
    return _ready(model, dtype, special_tokens, head)


def load_without_values(
    folder: Path, seed: int, dtype: Dtype, special_tokens: SpecialTokens, head: Head
) -> tuple[PreTrainedModel, bool]:
    """The same of a folder whose tensors are read later: no page of a parameter is touched, buffers are right. Of a
    language model a value head is drawn; True when so. Raises InvalidData for a folder that holds no model."""
    _require_config(folder)
    try:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **({"num_labels": 1} if head == "value" else {})
        )
        with no_init_weights():
            made = _AUTO_MODELS[head].from_config(config, dtype=torch.float32, attn_implementation=DENSE_ATTENTION)
        made.tie_weights()
        if (folder / "generation_config.json").is_file() and hasattr(made, "generation_config"):
            made.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, StrictDataclassError) as error:
        raise InvalidData(f"{folder}: cannot be loaded as a model: {reason_of(error)}") from error
    model: PreTrainedModel = made
    drawn = head == "value" and _is_language_model(model)
    if drawn:
        draw_head(model, seed)
    return _ready(model, dtype, special_tokens, head), drawn


def _ready(model: PreTrainedModel, dtype: Dtype, special_tokens: SpecialTokens, head: Head) -> PreTrainedModel:
    if head == "value":
        name_padding(model, special_tokens)
    model.config.dtype = getattr(torch, dtype)
    model.config.architectures = [type(model).__name__]
    _stop_at(model, special_tokens)
    model.train(False)
    return model


def _stop_at(model: PreTrainedModel, special: SpecialTokens) -> None:
    """Whoever generates with the model ends where it has learned to end, which a base model's config does not know: its
    own end is a document's, and an answer's that of the chat template."""
    generation: Any = getattr(model, "generation_config", None)
    if generation is None:  # it writes nothing
        return
    known = generation.eos_token_id
    ids = [] if known is None else known if isinstance(known, list) else [known]
    first = [special.eos] if special.eos is not None and special.eos not in ids else []
    every = list(dict.fromkeys([*first, *ids, *special.ends]))
    if every != ids:
        generation.eos_token_id = every if len(every) > 1 else every[0]


def serving_files(model: PreTrainedModel) -> dict[str, bytes]:
    """`config.json`, and of a model that writes `generation_config.json`, as an engine's model folder needs them."""
    generation = getattr(model, "generation_config", None)
    configs: dict[str, Any] = {"config.json": model.config, "generation_config.json": generation}
    given = {name: config for name, config in configs.items() if config is not None}
    return {name: copy.deepcopy(config).to_json_string().encode() for name, config in given.items()}


def attention_for(device: torch.device, dtype: Dtype) -> str:
    """Name of the attention: torch's variable-length kernel where it computes (GPU, bfloat16), else dense masks."""
    return PACKED_ATTENTION if device.type == "cuda" and dtype == "bfloat16" else DENSE_ATTENTION


def _from_config(
    fields: Mapping[str, Any], seed: int, special_tokens: SpecialTokens, vocabulary: int | None, head: Head
) -> PreTrainedModel:
    config = model_config(fields, special_tokens, vocabulary)
    if head == "value":
        config.update({"num_labels": 1})
    # The generator of the process is left as it was: model weights must not shift data order, or the reverse.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = _AUTO_MODELS[head].from_config(
                config, dtype=torch.float32, attn_implementation=DENSE_ATTENTION
            )
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError, KeyError) as error:
            raise InvalidManifest([f"{PLACE}: no {_KINDS[head]} can be made of it: {reason_of(error)}"]) from error
    return model


def _from_folder(folder: Path, seed: int, head: Head) -> PreTrainedModel:
    _require_config(folder)
    # The run's own display owns the terminal.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, loading = _AUTO_MODELS[head].from_pretrained(
            folder,
            **({"num_labels": 1} if head == "value" else {}),
            dtype=torch.float32,
            attn_implementation=DENSE_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise InvalidData(f"{folder}: cannot be loaded as a model: {reason_of(error)}") from error
    loaded: PreTrainedModel = model
    absent = set(loading["missing_keys"])
    if head == "value" and _is_language_model(loaded):
        draw_head(loaded, seed)
        absent.discard(HEAD_WEIGHT)
    if absent:
        raise InvalidData(f"{folder}: its weight files lack {len(absent)} tensors, {min(absent)} among them")
    return loaded


def _require_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise InvalidData(f"{folder}: not a model folder, it has no config.json")


def _is_language_model(scorer: PreTrainedModel) -> bool:
    """Its folder holds the trunk of one, and no value head."""
    return type(scorer).__name__ not in (scorer.config.architectures or ())
