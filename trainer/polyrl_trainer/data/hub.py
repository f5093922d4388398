"""Where `recipe.model.path` is: a folder beside the manifest, or, where there is no such folder, a model on a Hub.

A Hub's model is downloaded once into huggingface_hub's cache (HF_HOME), safetensors and what belongs to them only; a
mirror is HF_ENDPOINT, and with HF_HUB_OFFLINE=1, or when the Hub does not answer, the cache alone counts.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

from polyrl.errors import InvalidData
from polyrl.manifest.recipe import HUB_ID, ModelSpec

WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Weights in other formats double many downloads; nothing here reads them."""

DEFAULT_ENDPOINT: Final = "https://huggingface.co"

SHOWN_REASON: Final = 200
"""Most characters shown of a foreign error message."""


def model_folder(model: ModelSpec, manifest_dir: Path) -> Path | None:
    """The model's folder, downloaded if need be; None for a model made from a config. Raises InvalidData when it
    cannot be had."""
    if model.path is None:
        return None
    folder = manifest_dir / model.path
    return _snapshot(model.path, model.revision) if is_on_a_hub(model, manifest_dir) else folder


def cached_folder(model: ModelSpec, manifest_dir: Path) -> Path | None:
    """The same, if it is on this machine already; nothing is where not even what downloads it is installed."""
    if model.path is None:
        return None
    if not is_on_a_hub(model, manifest_dir):
        return manifest_dir / model.path
    try:
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        return _download(model.path, model.revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def is_on_a_hub(model: ModelSpec, manifest_dir: Path) -> bool:
    """A folder that is there is what is meant; a name of the shape OWNER/NAME that is none is a Hub's."""
    path = model.path or ""
    return HUB_ID.fullmatch(path) is not None and not (manifest_dir / path).exists()


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
