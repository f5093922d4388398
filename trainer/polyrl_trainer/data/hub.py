"""Where `recipe.model.path` and files of rows are: a folder or file beside the manifest, or, where there is no such
folder, a model on a Hub; or what the URI says: hf://, an object store, a claim that is mounted.

What is on a Hub is downloaded once into huggingface_hub's cache (HF_HOME), of a model safetensors and what belongs to
them only, of a data set the one file; a mirror is HF_ENDPOINT, and with HF_HUB_OFFLINE=1, or when the Hub does not
answer, the cache alone counts.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from polyrl.errors import InvalidData
from polyrl.manifest.environment import FETCHED, MODEL_CLAIM
from polyrl.manifest.parts.sources import CLAIM_SCHEME, HubPlace, Source
from polyrl.manifest.recipe import ModelSpec

WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Weights in other formats double many downloads; nothing here reads them."""

DEFAULT_ENDPOINT: Final = "https://huggingface.co"

SHOWN_REASON: Final = 200
"""Most characters shown of a foreign error message."""


def model_folder(model: ModelSpec, manifest_dir: Path) -> Path | None:
    """The model's folder, as `local_path`; None for a model made from a config. Raises InvalidData."""
    return None if model.source is None else local_path(model.source, manifest_dir)


def cached_folder(model: ModelSpec, manifest_dir: Path) -> Path | None:
    """The model's folder, if it is on this machine already; None for a model made from a config."""
    return None if model.source is None else cached_path(model.source, manifest_dir)


def local_path(source: Source, manifest_dir: Path) -> Path:
    """The folder or file on this machine, downloaded if need be. Raises InvalidData when it cannot be had. Where the
    environment has FETCHED, only what was fetched before counts."""
    if FETCHED not in os.environ:
        return fetch(source, manifest_dir)
    found = cached_path(source, manifest_dir)
    if found is None:
        raise InvalidData(f"{source.field}: {source.path} was not fetched into {os.environ[FETCHED]} before the run")
    return found


def fetch(source: Source, manifest_dir: Path) -> Path:
    """The folder or file, from wherever it is. Raises InvalidData."""
    if source.is_claimed and MODEL_CLAIM not in os.environ:
        raise InvalidData(f"{source.field}: {source.path} is a claim of a cluster; name a folder of this machine")
    if not is_fetched(source, manifest_dir):
        return _named(source, manifest_dir)
    if (place := source.hub) is not None:
        return _of_a_hub(place, source)
    from polyrl_trainer.data.fetched import fetch_files  # what it stands on loads torch

    return _in(fetch_files(source.path, stores_cache(), wanted(source), source.field), source)


def cached_path(source: Source, manifest_dir: Path) -> Path | None:
    """The folder or file, if it is on this machine already; None where not even what downloads it is installed."""
    if source.is_claimed and MODEL_CLAIM not in os.environ:
        return None
    if not is_fetched(source, manifest_dir):
        return _named(source, manifest_dir)
    if (place := source.hub) is None:
        from polyrl_trainer.data.fetched import complete_at

        found = complete_at(source.path, stores_cache())
        return None if found is None else _in(found, source)
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    if place.file:
        # hf_hub_download asks its Hub who serves agents, even where it may download nothing.
        file = try_to_load_from_cache(place.name, place.file, revision=place.revision, repo_type="dataset")
        return Path(file) if isinstance(file, str) else None
    try:
        return _download(place, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def is_fetched(source: Source, manifest_dir: Path) -> bool:
    """A folder that is there is what is meant; a name of the shape OWNER/NAME that is none is a Hub's, and a URI is
    elsewhere, unless it is a claim's, which is mounted."""
    if source.is_claimed:
        return MODEL_CLAIM not in os.environ
    return source.may_be_fetched and (source.is_uri or not (manifest_dir / source.path).exists())


def wanted(source: Source) -> tuple[str, ...] | None:
    """Patterns of what belongs to it; None: it is one file."""
    return None if source.is_rows else WANTED


def stores_cache() -> Path:
    """Folder for object stores' files; huggingface_hub has one of its own."""
    if (named := os.environ.get(FETCHED)) is not None:
        return Path(named) / "stores"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyrl" / "models"


def _named(source: Source, manifest_dir: Path) -> Path:
    if not source.is_claimed:
        return manifest_dir / source.path
    _, _, below = source.path.removeprefix(CLAIM_SCHEME).partition("/")
    return Path(os.environ[MODEL_CLAIM]) / below


def _in(folder: Path, source: Source) -> Path:
    return folder / PurePosixPath(source.path).name if source.is_rows else folder


def _download(place: HubPlace, *, local_files_only: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    name, revision = place.name, place.revision
    if place.file:
        return Path(hf_hub_download(name, place.file, repo_type="dataset", revision=revision))
    patterns = list(WANTED)
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=local_files_only))


@cache
def _of_a_hub(place: HubPlace, source: Source) -> Path:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT)
    what, here = ("data set", "file") if place.file else ("model", "folder")
    begin = f"{source.field}: {place.name} is no {here} beside the manifest, and"
    try:
        return _download(place, local_files_only=False)
    except GatedRepoError as error:
        raise InvalidData(f"{begin} {hub} gives it only to those it knows; accept its terms, set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        field = source.field if place.file else "recipe.model.revision"
        raise InvalidData(f"{field}: {hub} has no revision {place.revision} of {place.name}") from error
    except RepositoryNotFoundError as error:
        raise InvalidData(f"{begin} {hub} has no such {what}, or none that you may see (HF_TOKEN)") from error
    except RemoteEntryNotFoundError as error:
        raise InvalidData(f"{source.field}: {hub} has no file {place.file} in {place.name}") from error
    except LocalEntryNotFoundError as error:
        raise InvalidData(
            f"{begin} {hub} does not answer or HF_HUB_OFFLINE is set, and the cache does not hold it;"
            f" name a {here}, a mirror (HF_ENDPOINT), or download it before"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:SHOWN_REASON]
        raise InvalidData(f"{begin} {hub} did not deliver it: {reason}") from error
