"""What belongs to a model or rows that are fetched, as their Hub or store lists it, and how much of that has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

from polyrl.manifest.parts.sources import HubPlace, Source
from polyrl_trainer.data.hub import WANTED, stores_cache, wanted


@dataclass(frozen=True)
class ExpectedFile:
    """One file: where it will lie, how large, and the pattern of what has come of it beside that place."""

    path: Path
    size: int
    parts: str

    def come(self) -> int:
        """Bytes of it that are here; several may fetch it at a time, and the largest part counts."""
        with suppress(OSError):
            if self.path.exists() and self.path.stat().st_size == self.size:
                return self.size
            parts = [part.stat().st_size for part in self.path.parent.glob(self.parts)]
            return min(self.size, max(parts, default=0))
        return 0


def bytes_come(files: Sequence[ExpectedFile]) -> tuple[int, int]:
    """How many bytes are here, of how many."""
    return sum(file.come() for file in files), sum(file.size for file in files)


def expected_files(source: Source) -> list[ExpectedFile]:
    """The model's files, or the one of rows. Raises whatever a Hub or store answers with."""
    if (place := source.hub) is not None:
        return _of_a_hub(place)
    from polyrl_trainer.checkpoints.bounded_reads import BoundedReads
    from polyrl_trainer.data.fetched import cache_place, listing

    folder = cache_place(source.path, stores_cache())
    _, there = listing(BoundedReads(source.path), wanted(source))
    places = ((folder / name, size) for name, (size, _) in there.items())
    return [ExpectedFile(path, size, parts=f".{escape(path.name)}.*") for path, size in places]


def _of_a_hub(place: HubPlace) -> list[ExpectedFile]:
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    kind, name, revision = "dataset" if place.file else "model", place.name, place.revision
    blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind) / "blobs"
    # A data set may have more files than can be listed in a minute.
    there: Iterable[object] = (
        HfApi().get_paths_info(name, [place.file], revision=revision, repo_type=kind)
        if place.file
        else HfApi().list_repo_tree(name, recursive=True, revision=revision)
    )
    found = []
    for file in there:
        if isinstance(file, RepoFile) and (place.file or any(fnmatch(file.path, pattern) for pattern in WANTED)):
            blob = file.blob_id if file.lfs is None else file.lfs.sha256
            found.append(ExpectedFile(blobs / blob, file.size, parts=f"{blob}.*incomplete"))
    return found
