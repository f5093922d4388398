"""A model's folder that comes from an object store, by fsspec, into a cache that may be shared by many.

    FETCHED/HASH/config.json...     as there, of what belongs to a model
                 .fetched.json      size and version of each file that has come; `complete` when all have

A file has its name when all of it is on the disk, so that a fetch which was killed goes on with the next file, and
several at a time do no harm. What is here already serves while the store does not answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec
import structlog
import xxhash

from polyrl.errors import UNDECODABLE, InvalidData
from polyrl_trainer.checkpoints import replace_file, sync
from polyrl_trainer.checkpoints.bounded_reads import LISTED_BYTES, BoundedReads
from polyrl_trainer.checkpoints.store import PACKAGES, AtMost

log = structlog.get_logger()

NOTES: Final = ".fetched.json"
VERSIONS: Final = ("ETag", "etag", "md5Hash", "generation", "mtime", "created")
"""What stores call a file's version; the first that is there counts."""
MAX_FILES: Final = 2_048
"""Of one model, whose shards are hundreds at most: with each file that comes the notes of all are written anew."""


class Notes(msgspec.Struct):
    """.fetched.json"""

    uri: str
    complete: bool = False
    files: dict[str, tuple[int, str]] = {}
    """Size and version by name."""


def cache_place(uri: str, cache: Path) -> Path:
    """Where its files lie, or will."""
    return cache / xxhash.xxh3_128_hexdigest(uri.encode())


def complete_at(uri: str, cache: Path) -> Path | None:
    """The folder, if all of it has come once."""
    folder = cache_place(uri, cache)
    return folder if _notes(folder, uri).complete else None


def fetch_files(uri: str, cache: Path, wanted: tuple[str, ...], field: str) -> Path:
    """Raises InvalidData, which names `field`, where it cannot be had."""
    folder = cache_place(uri, cache)
    try:
        reads = BoundedReads(uri)
        there = listed_files(reads, wanted)
    except ImportError as error:
        package = PACKAGES.get(uri.partition("://")[0], "another package")
        raise InvalidData(f"{field}: {uri} needs {package}, which is not installed here") from error
    except Exception as error:
        if (found := complete_at(uri, cache)) is not None:
            log.warning("the store does not answer, and what came before serves", uri=uri, reason=str(error))
            return found
        raise InvalidData(f"{field}: {uri} cannot be read: {_short(error)}") from error
    if not there:
        raise InvalidData(f"{field}: {uri} holds no file of a model ({', '.join(wanted)})")
    _refuse(there, f"{field}: {uri}")
    _fetch(reads, there, folder, notes=_notes(folder, uri), field=field)
    return folder


def _refuse(there: Iterable[str], begin: str) -> None:
    """Keys of an object store are any text, and a stranger's store is fetched as well. Raises InvalidData."""
    names = list(there)
    if len(names) > MAX_FILES:
        raise InvalidData(f"{begin} holds {len(names)} files of a model, of which {MAX_FILES} are read at most")
    for name in names:
        if ".." in PurePosixPath(name).parts:
            raise InvalidData(f"{begin} names {name!r}, which lies outside of it")
        if not name.isprintable() or name == NOTES:
            raise InvalidData(f"{begin} names {name!r}, which is no name of a model's file; rename it there")


def listed_files(reads: BoundedReads, wanted: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    """Size and version of what there is of the `wanted` patterns, by name."""
    with reads.bounded(LISTED_BYTES):
        listed = reads.files.find(reads.root, detail=True)
    found = {}
    for place, entry in listed.items():
        name = PurePosixPath(place).relative_to(PurePosixPath(reads.root)).as_posix()
        if any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in wanted):
            version = next((str(entry[key]) for key in VERSIONS if entry.get(key)), "")
            found[name] = int(entry["size"]), version
    return found


def _fetch(
    reads: BoundedReads, there: Mapping[str, tuple[int, str]], folder: Path, *, notes: Notes, field: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (size, version) in there.items():
        path = folder / name
        if notes.files.get(name) == (size, version) and path.is_file() and path.stat().st_size == size:
            continue
        notes.complete = False
        try:
            _fetch_file(reads, name, path, size)
        except Exception as error:
            raise InvalidData(f"{field}: {name} of {notes.uri} did not come: {_short(error)}") from error
        notes.files[name] = size, version
        replace_file(folder / NOTES, msgspec.json.encode(notes))
    notes.complete = True
    replace_file(folder / NOTES, msgspec.json.encode(notes))


def _fetch_file(reads: BoundedReads, name: str, path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with reads.bounded(None):
            reads.files.get_file(f"{reads.root}/{name}", str(part), callback=AtMost(size))
        found = part.stat().st_size
        if found != size:
            raise OSError(f"{found} bytes came of {size}")
        sync(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _notes(folder: Path, uri: str) -> Notes:
    try:
        return msgspec.json.decode((folder / NOTES).read_bytes(), type=Notes)
    except (OSError, *UNDECODABLE):
        return Notes(uri)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
