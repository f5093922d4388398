"""Complete checkpoints of a run, and their models' files as they were sealed: copied whole and unchanged, or refused.

Names in a seal are text from elsewhere: one that would leave the folder is refused before anything is written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec
import xxhash

from polyrl.errors import UNDECODABLE, UserError

SEAL: Final = "COMPLETE.json"
MODEL: Final = "model"

NOT_SEALED: Final = "is not what the checkpoint was sealed with (size or checksum)"

LEARNERS_OWN: Final = ("optimizer.safetensors", "rng.safetensors", "training_state.json", "value_head.safetensors")
"""Files that are of no use to those who use the model, and twice its size."""

MAX_FREE_SHARE: Final = 0.9
"""Share of the disk's free room that may be filled."""


class SealedFile(msgspec.Struct, frozen=True):
    """What a file must be."""

    size: int
    xxh3: str


class CheckpointFiles(msgspec.Struct, frozen=True):
    """COMPLETE.json of a checkpoint."""

    files: dict[str, SealedFile]
    serial: int = 0
    """Counts the saves of a run."""

    def of_model(self) -> dict[str, SealedFile]:
        """By the name within the model's folder. Raises UserError for a name that would leave it, or is none."""
        found = {
            name.removeprefix(f"{MODEL}/"): sealed for name, sealed in self.files.items() if name.startswith(MODEL)
        }
        for name in found:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
                raise UserError(f"{SEAL} names a file that no model's folder has: {name}")
        return {name: sealed for name, sealed in found.items() if name not in LEARNERS_OWN}


def read_seal(content: bytes, place: str) -> CheckpointFiles:
    """Raises UserError naming the place when it is none."""
    try:
        return msgspec.json.decode(content, type=CheckpointFiles)
    except UNDECODABLE as error:
        raise UserError(f"{place}: not written by PolyRL: {error}") from error


def find_checkpoint(checkpoints: Path, step: int | None) -> Path:
    """The newest complete checkpoint, or that of `step`. Raises UserError when there is none, and says which there
    are."""
    seals = {file.parent: read_seal(file.read_bytes(), str(file)) for file in checkpoints.glob(f"[!.]*/{SEAL}")}
    found = sorted(seals, key=lambda path: (seals[path].serial, path.name))
    if not found:
        raise UserError(f"{checkpoints}: holds no complete checkpoint yet")
    wanted = [path for path in found if step is None or path.name.endswith(f"-step-{step:06d}")]
    if not wanted:
        raise UserError(f"--step {step}: the run has kept {', '.join(path.name for path in found)}")
    return wanted[-1]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and is gone when it does not.

    Raises UserError when `target` holds something already or cannot be made."""
    unfinished = target.absolute().with_name(f".{target.absolute().name}.unfinished-{os.getpid()}")
    try:
        if target.is_dir() and any(target.iterdir()):
            raise UserError(f"{target}: the folder is not empty; name a new one")
        if target.exists() and not target.is_dir():
            raise UserError(f"{target}: is a file; name a new folder")
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        place = str(error.filename or target)
        named = str(target) if place.startswith(str(unfinished)) else place
        raise UserError(f"{named}: {error.strerror}") from error


def require_room(sizes: Collection[int], free: int) -> None:
    """Raises UserError for files of more bytes than may come, or of less than none: a seal may claim any size."""
    wanted = sum(sizes)
    if min(sizes, default=0) < 0 or wanted > free * MAX_FREE_SHARE:
        raise UserError(f"{wanted:,} bytes would come, {free:,} are free here")


def copy_sealed(source: Path, target: Path, sealed: SealedFile) -> None:
    """Copies a file that must be what was sealed, onto the disk. Raises UserError when it is not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # A device that ends never, and a pipe that nobody writes to, have no size that was sealed.
    with _opened(source, sealed) as opened, target.open("xb") as copied:
        shutil.copyfileobj(opened, copied)
        copied.flush()
        os.fsync(copied.fileno())
    check_sealed(target, sealed)


def check_sealed(file: Path, sealed: SealedFile) -> None:
    """Raises UserError when a file is not what was sealed."""
    with _opened(file, sealed) as opened:
        digest = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
    if digest != sealed.xxh3:
        raise UserError(f"{file.name}: {NOT_SEALED}")


@contextmanager
def _opened(file: Path, sealed: SealedFile) -> Iterator[BufferedReader]:
    """An ordinary file of the sealed size, reached through no link in its own folder."""
    if file.is_symlink() or file.parent.is_symlink():
        raise UserError(f"{file}: a link, which no run makes there")
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size != sealed.size:
            raise UserError(f"{file.name}: {NOT_SEALED}")
        yield opened
