"""Where `recipe.model.path` is: a folder beside the manifest, or, where there is no such folder, a model on a Hub; or
what its URI says: hf://, an object store, a claim that is mounted.

A Hub's model is downloaded once into huggingface_hub's cache (HF_HOME), safetensors and what belongs to them only; a
mirror is HF_ENDPOINT, and with HF_HUB_OFFLINE=1, or when the Hub does not answer, the cache alone counts.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

from polyrl.errors import InvalidData
from polyrl.manifest.environment import FETCHED, MODEL_CLAIM
from polyrl.manifest.recipe import CLAIM_SCHEME, HUB_ID, MODEL_URI, ModelSpec

WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Weights in other formats double many downloads; nothing here reads them."""

DEFAULT_ENDPOINT: Final = "https://huggingface.co"

HUB_SCHEME: Final = "hf://"

SHOWN_REASON: Final = 200
"""Most characters shown of a foreign error message."""


def model_folder(model: ModelSpec, manifest_dir: Path) -> Path | None:
    """The model's folder, downloaded if need be; None for a model made from a config. Raises InvalidData when it
    cannot be had. Where the environment has FETCHED, only what was fetched before counts."""
    if FETCHED not in os.environ:
        return fetch_model(model, manifest_dir)
    folder = cached_folder(model, manifest_dir)
    if folder is None and model.path is not None:
        raise InvalidData(f"recipe.model.path: {model.path} was not fetched into {os.environ[FETCHED]} before the run")
    return folder


def fetch_model(model: ModelSpec, manifest_dir: Path) -> Path | None:
    """The same, from wherever it is. Raises InvalidData."""
    if model.path is None or not is_fetched(model, manifest_dir):
        return cached_folder(model, manifest_dir)
    if model.is_claimed:
        raise InvalidData(f"recipe.model.path: {model.path} is a claim of a cluster; name a folder of this machine")
    if (named := named_on_a_hub(model)) is not None:
        return _snapshot(*named)
    from polyrl_trainer.data.fetched import fetch_files  # what it stands on loads torch

    return fetch_files(model.path, stores_cache(), WANTED, "recipe.model.path")


def cached_folder(model: ModelSpec, manifest_dir: Path) -> Path | None:
    """The same, if it is on this machine already; nothing is where not even what downloads it is installed."""
    if model.path is None:
        return None
    if model.is_claimed:
        _, _, below = model.path.removeprefix(CLAIM_SCHEME).partition("/")
        return Path(os.environ[MODEL_CLAIM]) / below if MODEL_CLAIM in os.environ else None
    if not is_fetched(model, manifest_dir):
        return manifest_dir / model.path
    if (named := named_on_a_hub(model)) is None:
        from polyrl_trainer.data.fetched import complete_at

        return complete_at(model.path, stores_cache())
    try:
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        return _download(*named, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def is_fetched(model: ModelSpec, manifest_dir: Path) -> bool:
    """A folder that is there is what is meant; a name of the shape OWNER/NAME that is none is a Hub's, and a URI is
    elsewhere, unless it is a claim's, which is mounted."""
    path = model.path or ""
    if MODEL_URI.match(path) is not None:
        return not (model.is_claimed and MODEL_CLAIM in os.environ)
    return HUB_ID.fullmatch(path) is not None and not (manifest_dir / path).exists()


def named_on_a_hub(model: ModelSpec) -> tuple[str, str | None] | None:
    """OWNER/NAME and a revision; None for what is in a store."""
    path = model.path or ""
    if path.startswith(HUB_SCHEME):
        name, _, revision = path.removeprefix(HUB_SCHEME).partition("@")
        return name, revision or model.revision
    return (path, model.revision) if MODEL_URI.match(path) is None else None


def stores_cache() -> Path:
    """Of object stores' files; huggingface_hub has one of its own."""
    if (named := os.environ.get(FETCHED)) is not None:
        return Path(named) / "stores"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyrl" / "models"


def _download(name: str, revision: str | None, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = list(WANTED)
    return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=local_files_only))


@cache
def _snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    place = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT)
    begin = f"recipe.model.path: {name} is no folder beside the manifest, and"
    try:
        return _download(name, revision, local_files_only=False)
    except GatedRepoError as error:
        raise InvalidData(f"{begin} {place} gives it only to those it knows; accept its terms, set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise InvalidData(f"recipe.model.revision: {place} has no revision {revision} of {name}") from error
    except RepositoryNotFoundError as error:
        raise InvalidData(f"{begin} {place} has no such model, or none that you may see (HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise InvalidData(
            f"{begin} {place} does not answer or HF_HUB_OFFLINE is set, and the cache does not hold it;"
            " name a folder, a mirror (HF_ENDPOINT), or download it before"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:SHOWN_REASON]
        raise InvalidData(f"{begin} {place} did not deliver it: {reason}") from error
