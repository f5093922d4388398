"""A model's folder or a file of rows that comes from an object store, by fsspec, into a cache that many may share.

    FETCHED/HASH/config.json...     as there, of what belongs to a model; or the one file
                 .fetched.json      size and version of each file that has come; `complete` when all have

A file has its name when all of it is on the disk, so that a fetch which was killed goes on with the next file, and
several at a time do no harm. What is here already serves while the store does not answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import xxhash

from polyrl.errors import UNDECODABLE, InvalidData
from polyrl.manifest.parts.sources import no_pattern

if TYPE_CHECKING:
    from polyrl_trainer.checkpoints.bounded_reads import BoundedReads

log = structlog.get_logger()

NOTES: Final = ".fetched.json"
VERSIONS: Final = ("ETag", "etag", "md5Hash", "generation", "mtime", "created")
"""What stores call a file's version; the first that is there counts."""
MAX_FILES: Final = 2_048
"""Files of one model, whose shards are hundreds at most: with each that comes the notes of all are written anew."""


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


def fetch_files(uri: str, cache: Path, wanted: tuple[str, ...] | None, field: str) -> Path:
    """The folder where it lies. `wanted` None: `uri` is one file. Raises InvalidData, which names `field`, where it
    cannot be had."""
    # They load torch, and whoever checks rows has none.
    from polyrl_trainer.checkpoints.bounded_reads import BoundedReads
    from polyrl_trainer.checkpoints.store import PACKAGES

    folder = cache_place(uri, cache)
    try:
        reads = BoundedReads(uri)
        root, there = listing(reads, wanted)
    except ImportError as error:
        package = PACKAGES.get(uri.partition("://")[0], "another package")
        raise InvalidData(f"{field}: {uri} needs {package}, which is not installed here") from error
    except FileNotFoundError as error:
        raise InvalidData(f"{field}: there is no file {uri}{no_pattern(uri)}") from error
    except IsADirectoryError as error:
        raise InvalidData(f"{field}: {uri} is a folder; name one of its files") from error
    except Exception as error:
        if (found := complete_at(uri, cache)) is not None:
            log.warning("the store does not answer, and what came before serves", uri=uri, reason=str(error))
            return found
        raise InvalidData(f"{field}: {uri} cannot be read: {_short(error)}") from error
    if wanted and not there:
        raise InvalidData(f"{field}: {uri} holds no file of a model ({', '.join(wanted)})")
    _refuse(there, f"{field}: {uri}")
    _fetch(reads, root, there, folder, notes=_notes(folder, uri), field=field)
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


def listing(reads: BoundedReads, wanted: tuple[str, ...] | None) -> tuple[str, dict[str, tuple[int, str]]]:
    """A place in the store, and below that, by name, size and version of what there is of the `wanted` patterns; None:
    of the one file that it is. Raises whatever the store answers with."""
    from polyrl_trainer.checkpoints.bounded_reads import LISTED_BYTES

    with reads.bounded(LISTED_BYTES):
        if wanted is not None:
            return reads.root, _of_patterns(reads.files.find(reads.root, detail=True), reads.root, wanted)
        entry = reads.files.info(reads.root)
    if entry["type"] == "directory":
        raise IsADirectoryError(reads.root)
    folder, _, name = reads.root.rpartition("/")
    return folder, {name: _size_and_version(entry)}


def _of_patterns(
    listed: Mapping[str, Mapping[str, Any]], root: str, wanted: tuple[str, ...]
) -> dict[str, tuple[int, str]]:
    found = {}
    for place, entry in listed.items():
        name = PurePosixPath(place).relative_to(PurePosixPath(root)).as_posix()
        if any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in wanted):
            found[name] = _size_and_version(entry)
    return found


def _size_and_version(entry: Mapping[str, Any]) -> tuple[int, str]:
    return int(entry["size"]), next((str(entry[key]) for key in VERSIONS if entry.get(key)), "")


def _fetch(
    reads: BoundedReads, root: str, there: Mapping[str, tuple[int, str]], folder: Path, *, notes: Notes, field: str
) -> None:
    from polyrl_trainer.checkpoints import replace_file

    folder.mkdir(parents=True, exist_ok=True)
    for name, (size, version) in there.items():
        path = folder / name
        if notes.files.get(name) == (size, version) and path.is_file() and path.stat().st_size == size:
            continue
        notes.complete = False
        try:
            _fetch_file(reads, f"{root}/{name}", path, size)
        except Exception as error:
            raise InvalidData(f"{field}: {name} of {notes.uri} did not come: {_short(error)}") from error
        notes.files[name] = size, version
        replace_file(folder / NOTES, msgspec.json.encode(notes))
    notes.complete = True
    replace_file(folder / NOTES, msgspec.json.encode(notes))


def _fetch_file(reads: BoundedReads, place: str, path: Path, size: int) -> None:
    from polyrl_trainer.checkpoints import sync
    from polyrl_trainer.checkpoints.store import AtMost

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with reads.bounded(None):
            reads.files.get_file(place, str(part), callback=AtMost(size))
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
