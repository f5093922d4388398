"""What a complete checkpoint holds, file by file; and files that are on the disk, or are not there."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from polyrl.errors import UNDECODABLE, DiskRefused, InvalidData

COMPLETE: Final = "COMPLETE.json"
PART: Final = "-and-"
"""In the name of a checkpoint in the middle of a step."""
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class FileSeal(msgspec.Struct, frozen=True):
    """What a file must be."""

    size: int
    xxh3: str


class Seal(msgspec.Struct, frozen=True):
    """COMPLETE.json."""

    stage_final: bool
    files: dict[str, FileSeal]
    serial: int = 0
    """Counts the saves of a folder: the clock may be set back, and a step saved again."""


def seal_in(path: Path) -> Seal:
    place = path / COMPLETE
    if not place.is_file():
        raise InvalidData(f"{path}: not a complete checkpoint, {COMPLETE} is missing")
    try:
        return msgspec.json.decode(place.read_bytes(), type=Seal)
    except UNDECODABLE as error:
        raise InvalidData(f"{place}: not written by PolyRL: {error}") from error


def prunable(found: Sequence[tuple[str, Seal]], keep: int) -> list[str]:
    """Names to be removed, of all that there are, the oldest first: of parts of a step all but the newest, then what
    is more than `keep`. The last of a stage stays."""
    ordinary = [name for name, seal in found if not seal.stage_final]
    useful = [name for name in ordinary if PART not in name or name == found[-1][0]]
    return [name for name in ordinary if name not in useful[-keep:]]


def check_file(path: Path, expected: FileSeal) -> None:
    if not path.is_file():
        raise InvalidData(f"{path}: the checkpoint lacks this file")
    size = path.stat().st_size
    if size != expected.size:
        raise InvalidData(f"{path}: has {size} bytes, the checkpoint was sealed with {expected.size}")
    if checksum(path) != expected.xxh3:
        raise InvalidData(f"{path}: its content differs from what was saved (checksum)")


def seal_of(folder: Path, stage_final: bool, serial: int) -> Seal:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    seals = {str(path.relative_to(folder)): FileSeal(path.stat().st_size, checksum(path)) for path in files}
    return Seal(stage_final, seals, serial=serial)


def checksum(path: Path) -> str:
    """xxh3-128 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def disk_refusal(path: Path, number: int | None, reason: str) -> DiskRefused:
    """The sentence for a file that was not written, by the system's error."""
    right = "the trainer needs a folder that it may write to, on a disk that takes files of this size"
    if number in NO_ROOM:
        right = "make room on its disk, and the run can go on from its newest checkpoint"
    return DiskRefused(f"{path}: cannot be written: {reason}; {right}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises DiskRefused where the system refuses what is done within. It names `path`, or what is below it where the
    system does; of what it refuses to an open file it names none."""
    try:
        yield
    except OSError as error:
        named = Path(error.filename) if isinstance(error.filename, str) else path
        place = named if named.is_relative_to(path) else path
        raise disk_refusal(place, error.errno, error.strerror or str(error)) from error


def sync(path: Path) -> None:
    """A file or a folder is on the disk, not only in its cache, when this returns."""
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def replace_file(path: Path, content: bytes) -> None:
    """The file has the new content or the old one, never a part. Raises DiskRefused."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with writing(path):
            unfinished.write_bytes(content)
            unfinished.replace(path)
    except DiskRefused:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def append(file: io.FileIO, path: Path, content: bytes) -> None:
    """All of it, to an open file without a buffer, which `path` is. Raises DiskRefused; a part may be there then."""
    with writing(path):
        while content:
            content = content[file.write(content) :]


def write_synced(path: Path, content: bytes) -> None:
    """Raises DiskRefused."""
    with writing(path):
        path.write_bytes(content)
    sync(path)
    sync(path.parent)
