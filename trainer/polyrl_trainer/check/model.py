"""The model's config, by transformers and without a tensor: a misspelt field, an architecture that nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from polyrl.errors import InvalidData, InvalidManifest
from polyrl.manifest.recipe import RecipeSpec
from polyrl.wire.checks import CheckBegan, CheckFault, CheckMessage, CheckSkipped
from polyrl_trainer.backends.configs import SpecialTokens
from polyrl_trainer.check.rows import RECIPE, tokenizer_is_here
from polyrl_trainer.preparation import tokenizer_of

CONFIG = (*RECIPE, "model", "config")
SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def check_model(recipe: RecipeSpec, manifest_dir: Path) -> Iterator[CheckMessage]:
    """A config in the manifest; a folder's own was written by transformers."""
    fields = recipe.model.config
    if fields is None or not tokenizer_is_here(recipe, manifest_dir):
        return
    yield CheckBegan(CONFIG, "reading the model's config")
    try:
        from polyrl_trainer.backends.model_config import model_config

        vocabulary = tokenizer_of(recipe, manifest_dir).vocabulary
        yield from _wrong_sizes(model_config(fields, SpecialTokens(), vocabulary))
    except ModuleNotFoundError as error:
        yield CheckSkipped("the model's config", error.name or str(error))
    except InvalidData:
        return  # the tokenizer's fault, which the check of rows reports
    except InvalidManifest as error:
        yield from (CheckFault(*_placed(fault)) for fault in error.faults)


def _wrong_sizes(config: Any) -> Iterator[CheckFault]:
    """Sizes of nothing, and heads that do not share the width evenly, which a model notices at its first token only."""
    sizes = {name: getattr(config, name, None) for name in SIZES}
    wrong = [CheckFault((*CONFIG, name), f"{size} is less than 1") for name, size in sizes.items() if _is_none(size)]
    if wrong:
        yield from wrong
        return
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return
    if getattr(config, "head_dim", None) is None and (heads < 1 or hidden % heads):
        yield CheckFault((*CONFIG, "num_attention_heads"), f"{heads} does not divide hidden_size ({hidden})")
    elif isinstance(shared, int) and (shared < 1 or heads % shared):
        yield CheckFault((*CONFIG, "num_key_value_heads"), f"{shared} does not divide num_attention_heads ({heads})")


def _is_none(size: Any) -> bool:
    return isinstance(size, int) and size < 1


def _placed(fault: str) -> tuple[tuple[str | int, ...], str]:
    """`spec.recipe.model.config.x: sentence`, apart."""
    place, _, sentence = fault.partition(": ")
    return tuple(place.split(".")), sentence
