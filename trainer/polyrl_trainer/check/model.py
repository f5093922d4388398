"""The model's config, by transformers and without a tensor: a misspelt field, an architecture that nobody knows,
adapters for layers that the model does not have, more GPUs than its heads can be spread over, a longer context than its
table of positions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from polyrl.errors import InvalidData, InvalidManifest
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl.memory.heads import wrong_spreads
from polyrl.wire.checks import CheckBegan, CheckFault, CheckMessage, CheckSkipped
from polyrl_trainer.backends.configs import SpecialTokens
from polyrl_trainer.check.rows import CONTEXT, RECIPE, tokenizer_is_here
from polyrl_trainer.data.hub import cached_folder
from polyrl_trainer.preparation import context_fault, tokenizer_of

CONFIG = (*RECIPE, "model", "config")
LORA = (*RECIPE, "model", "lora")
SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def check_model(spec: JobSpec, manifest_dir: Path) -> Iterator[CheckMessage]:
    """A config in the manifest, of which a folder's own was written by transformers; where adapters go, and over what
    the model is spread."""
    recipe = spec.recipe
    place = LORA if recipe.model.config is None else CONFIG
    config = None
    yield CheckBegan(place, "reading the model's config")
    try:
        config = _config(recipe, manifest_dir)
        faults = [] if config is None or recipe.model.config is None else list(_wrong_sizes(config))
        yield from faults
        if config is not None and not faults:
            yield from _wrong_spreads(spec, config.get_text_config())
            if fault := context_fault(config.to_dict(), spec.rollout.engine.max_context):
                yield CheckFault(CONTEXT, fault)
        if config is not None and recipe.model.lora is not None and not faults:
            from polyrl_trainer.backends.models.lora import check_targets

            check_targets(config, recipe.model.lora.target_modules)
    except ModuleNotFoundError as error:
        yield CheckSkipped("the model's config", error.name or str(error))
    except InvalidData:
        return  # the tokenizer's fault, which the check of rows reports
    except InvalidManifest as error:
        yield from (CheckFault(*_placed(fault)) for fault in error.faults)


def _config(recipe: RecipeSpec, manifest_dir: Path) -> Any:
    """None where the model or its tokenizer is not on this machine."""
    if recipe.model.config is not None:
        from polyrl_trainer.backends.models.model_config import model_config

        if not tokenizer_is_here(recipe, manifest_dir):
            return None
        return model_config(recipe.model.config, SpecialTokens(), tokenizer_of(recipe, manifest_dir).vocabulary)
    folder = cached_folder(recipe.model, manifest_dir)
    if folder is None or not (folder / "config.json").is_file():
        return None
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _wrong_sizes(config: Any) -> Iterator[CheckFault]:
    """Sizes of nothing, and heads that do not share the width evenly, which a model notices at its first token only."""
    sizes = {name: getattr(config, name, None) for name in SIZES}
    wrong = {name: size for name, size in sizes.items() if isinstance(size, int) and size < 1}
    if wrong:
        yield from (CheckFault((*CONFIG, name), f"{size} is less than 1") for name, size in wrong.items())
        return
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return
    if getattr(config, "head_dim", None) is None and (heads < 1 or hidden % heads):
        yield CheckFault((*CONFIG, "num_attention_heads"), f"{heads} does not divide hidden_size ({hidden})")
    elif isinstance(shared, int) and (shared < 1 or heads % shared):
        yield CheckFault((*CONFIG, "num_key_value_heads"), f"{shared} does not divide num_attention_heads ({heads})")


def _wrong_spreads(spec: JobSpec, config: Any) -> Iterator[CheckFault]:
    heads, keys = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int):
        for field, sentence in wrong_spreads(spec, heads, keys if isinstance(keys, int) else heads):
            yield CheckFault(("spec", *field.split(".")), sentence)


def _placed(fault: str) -> tuple[tuple[str | int, ...], str]:
    """`spec.recipe.model.config.x: sentence`, apart."""
    place, _, sentence = fault.partition(": ")
    return tuple(place.split(".")), sentence
