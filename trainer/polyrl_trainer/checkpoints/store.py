"""Checkpoints in an object store, or on whatever fsspec reaches: complete or absent there as well.

    URI/RUN/rl-step-000040.7/...   the files of a checkpoint, as the seventh that was saved
                             COMPLETE.json   put last, removed first
    URI/RUN/.trainer               who writes here

No object is written over, so that a save of the same step takes nothing away from one that was covered. Credentials
are those of the library behind the URI's scheme, by environment variables or the machine's own role.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

import fsspec
import msgspec

from polyrl.errors import UNDECODABLE, InvalidData, PolyRLError, StoreFailed, Superseded
from polyrl_trainer.checkpoints.bounded_reads import LISTED_BYTES, BoundedReads
from polyrl_trainer.checkpoints.seals import COMPLETE, Seal, check_file, prunable, seal_in, sync, write_synced

R = TypeVar("R")

FIELD: Final = "recipe.checkpoint.uri"
WRITER: Final = ".trainer"
PROBE: Final = ".probe-"
"""Before a trainer's name, while it starts: two that start together must not remove each other's."""
STORED_NAME: Final = re.compile(r"[a-z][a-z-]*-step-[0-9]{1,18}(-and-[0-9]{1,18}-groups)?[.][0-9]{1,18}")
"""Name of a checkpoint in a store; what is called otherwise, as a copy that somebody put there by hand, is not ours."""
SEAL_BYTES: Final = 4 << 20
"""Bytes of a seal: some 40,000 files, of which a checkpoint has hundreds."""
PACKAGES: Final = {"s3": "polyrl[s3]", "s3a": "polyrl[s3]", "gs": "polyrl[gcs]", "gcs": "polyrl[gcs]"}
"""What speaks to a scheme, beside those that need nothing."""
WITHOUT_FOLDERS: Final = {"s3", "s3a", "gs", "gcs", "az", "abfs"}
"""Schemes where a folder is a part of names: their libraries would make a bucket that is not there, and ask for it
first, which an account of one prefix may not."""
REFUSALS: Final = (PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError, ValueError)
WITHOUT_ACCOUNT: Final = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
"""Errors of botocore and google.auth, which need not be installed. What else a store says may be over in a while."""


class AtMost(fsspec.callbacks.Callback):  # type: ignore[misc]
    """Ends a transfer that brings more than was said, so that a store which lies fills no disk."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def call(self, *_hook: object, **_more: object) -> None:
        if self.value > self._most:
            raise OSError(f"more bytes came than {self._most}")


def name_in_store(name: str, seal: Seal) -> str:
    """Name in the store of the checkpoint that is called `name` in a run's folder."""
    return f"{name}.{seal.serial}"


class CheckpointStore:
    """Checkpoints of one run, in a store."""

    def __init__(self, uri: str) -> None:
        """Raises InvalidData for a URI that nothing here can reach."""
        self._uri = uri
        scheme = uri.partition("://")[0]
        try:
            self._reads = BoundedReads(uri)
        except ImportError as error:
            package = PACKAGES.get(scheme, f"what fsspec needs for {scheme}://")
            raise InvalidData(f"{FIELD}: {uri} needs {package}, which is not installed here") from error
        except ValueError as error:
            raise InvalidData(f"{FIELD}: {uri}: {error}") from error
        self._files, self._root = self._reads.files, self._reads.root

    def start(self, writer: str) -> None:
        """The run's writer is `writer` from now on. Raises InvalidData where the store refuses what a run will ask of
        it, StoreFailed where it fails."""
        probe = f"{PROBE}{writer}"
        self._ask_first("written to", lambda: self._note(probe, writer))
        self._ask_first("read from", lambda: self._cat(probe))
        self._ask_first("listed in", self._bounded_folders)
        self._ask_first("removed from", lambda: self._files.rm_file(self._at(probe)))
        self._ask_first("written to", lambda: self._note(WRITER, writer))

    def complete(self) -> dict[str, Seal]:
        """Complete checkpoints that are here, by name, the oldest first."""
        found = self._read(self._sealed, LISTED_BYTES)
        return dict(sorted(found.items(), key=lambda one: (one[1].serial, one[0])))

    def put(self, checkpoint: Path, writer: str) -> None:
        """Copies a complete one; it is here, whole, when this returns. Raises Superseded when another trainer writes
        here by now, StoreFailed where the store refuses."""
        seal = seal_in(checkpoint)
        self._asked(lambda: self._put(checkpoint, seal, name_in_store(checkpoint.name, seal), writer))

    def prune(self, keep: int) -> None:
        """Removes what is prunable, and what a kill left half."""
        complete = self.complete()
        half = [name for name in self._asked(self._bounded_folders) if name not in complete]
        for name in (*half, *prunable([*complete.items()], keep)):
            self._asked(partial(self._remove, name))

    def fetch(self, name: str, seal: Seal, into: Path) -> None:
        """Copies one into a folder that is new, and checks it. Raises InvalidData naming a file that is not what was
        put here."""
        for file, expected in seal.files.items():
            _refuse_path(f"{self._uri}/{name}", file)
            (into / file).parent.mkdir(parents=True, exist_ok=True)
            at_most = AtMost(expected.size)
            self._read(partial(self._files.get_file, self._at(name, file), str(into / file), callback=at_most), None)
            check_file(into / file, expected)
        write_synced(into / COMPLETE, msgspec.json.encode(seal))

    def _ask_first(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            if isinstance(error, REFUSALS) or type(error).__name__ in WITHOUT_ACCOUNT:
                raise InvalidData(f"{FIELD}: nothing can be {what} {self._uri}: {_reason(error)}") from error
            raise StoreFailed(f"{FIELD}: {self._uri} failed: {_reason(error)}") from error

    # --- below: what may raise whatever a library raises --------------------------------------------------------------

    def _note(self, name: str, writer: str) -> None:
        self._make_folder(self._root)
        self._files.pipe_file(self._at(name), writer.encode())

    def _cat(self, name: str) -> bytes:
        with self._reads.bounded(LISTED_BYTES):
            content: bytes = self._files.cat_file(self._at(name))
            return content

    def _bounded_folders(self) -> list[str]:
        with self._reads.bounded(LISTED_BYTES):
            return self._folders()

    def _make_folder(self, place: str) -> None:
        if WITHOUT_FOLDERS.isdisjoint(_protocols(self._files)):
            self._files.makedirs(place, exist_ok=True)

    def _put(self, checkpoint: Path, seal: Seal, name: str, writer: str) -> None:
        for file, expected in seal.files.items():
            self._copy(checkpoint / file, self._at(name, file))
            size = self._files.info(self._at(name, file))["size"]
            if size != expected.size:
                raise OSError(f"{file} has {size} bytes there, not {expected.size}")
        if self._cat(WRITER).decode() != writer:
            raise Superseded(f"{self._uri}: another trainer writes here by now")
        self._copy(checkpoint / COMPLETE, self._at(name, COMPLETE))

    def _copy(self, source: Path, to: str) -> None:
        self._make_folder(posixpath.dirname(to))
        self._files.put_file(str(source), to)
        if "file" in _protocols(self._files):
            sync(Path(to))
            sync(Path(to).parent)

    def _folders(self) -> list[str]:
        found = self._files.ls(self._root, detail=False)
        return [name for place in found if STORED_NAME.fullmatch(name := PurePosixPath(place).name)]

    def _remove(self, name: str) -> None:
        if self._files.exists(self._at(name, COMPLETE)):
            self._files.rm_file(self._at(name, COMPLETE))
        self._files.rm(self._at(name), recursive=True)

    def _sealed(self) -> dict[str, Seal]:
        """A seal that was cut is none, nor is one that is larger than any of ours."""
        self._files.invalidate_cache()
        found = dict[str, Seal]()
        for place, entry in self._files.glob(f"{self._root}/*/{COMPLETE}", detail=True).items():
            if STORED_NAME.fullmatch(name := PurePosixPath(place).parent.name) is None:
                continue  # under another name it would be taken for a file of ours
            if entry["size"] > SEAL_BYTES:
                continue
            try:
                seal = msgspec.json.decode(self._files.cat_file(place), type=Seal)
            except UNDECODABLE:
                continue
            found[name] = seal
        return found

    def _read(self, work: Callable[[], R], most: int | None) -> R:
        def bounded() -> R:
            with self._reads.bounded(most):
                return work()

        return self._asked(bounded)

    def _asked(self, work: Callable[[], R]) -> R:
        try:
            return work()
        except PolyRLError:
            raise
        except Exception as error:
            raise StoreFailed(f"{FIELD}: {self._uri} failed: {_reason(error)}") from error

    def _at(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _refuse_path(place: str, file: str) -> None:
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\0" in file:
        raise InvalidData(f"{place}/{COMPLETE}: names {file!r}, which lies outside of the checkpoint")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
