"""Checkpoints on disk: complete or absent, never half.

    checkpoints/rl-step-000040/ model/...       what the backend saves, and what makes it usable: tokenizer, card
                                critic/...      the same of PPO's critic, where there is one
                                state.json      `TrainerState`
                                COMPLETE.json   every file's size and checksum

A checkpoint is written under a temporary name, flushed to the disk, and renamed; leftovers are removed when a run
starts. The newest `keep` stay, and the last of each stage besides: a later stage starts from it.
Who starts last is the run's one writer. One that a frozen machine brings back, on a disk that several machines share,
finds another name in .trainer and touches nothing any more.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from polyrl.errors import UNDECODABLE, InvalidData, Superseded
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.state import TrainerState, TrainingStage

COMPLETE: Final = "COMPLETE.json"
STATE: Final = "state.json"
MODEL: Final = "model"
CRITIC: Final = "critic"
UNFINISHED_PREFIX: Final = ".unfinished-"

CompleteModel = Callable[[Path, TrainerState], None]
"""Writes into a model's folder what others need beside the weights."""

SAVE_SLACK: Final = 1.25
"""A save may take so many times what the last one took."""
WRITER: Final = ".trainer"
"""Beside the folder."""
WRITER_BYTES: Final = 8
"""Bytes of a writer's random name."""


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


class Checkpoints:
    """The `checkpoints` folder of one run."""

    def __init__(self, run: Path, keep: int, complete_model: CompleteModel = lambda folder, state: None) -> None:
        self.folder = run / "checkpoints"
        self._writer = run / WRITER
        self._keep = keep
        self._complete_model = complete_model
        self._name = secrets.token_hex(WRITER_BYTES)

    def start(self) -> None:
        """Makes the folder ours and removes what an interrupted save left behind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writer.write_text(self._name)
        for leftover in self.folder.glob(f"{UNFINISHED_PREFIX}*"):
            shutil.rmtree(leftover)

    def newest(self) -> Path | None:
        """The newest complete one of this run; None before the first."""
        return next(reversed(complete_checkpoints(self.folder)), None)

    def save(self, state: TrainerState, backend: TrainingBackend, critic: TrainingBackend | None = None) -> Path:
        """Writes one checkpoint and prunes older ones; blocks until it is on the disk. Raises Superseded when the
        folder has another writer by now."""
        self._must_be_ours()
        try:
            return self._save(state, backend, critic)
        except OSError:
            self._must_be_ours()  # who starts removes what others have not finished
            raise

    def _must_be_ours(self) -> None:
        if self._writer.read_text() != self._name:
            raise Superseded(f"{self.folder}: another trainer writes here by now")

    def _save(self, state: TrainerState, backend: TrainingBackend, critic: TrainingBackend | None) -> Path:
        final = self.folder / checkpoint_name(state.stage, state.step)
        unfinished = self.folder / f"{UNFINISHED_PREFIX}{final.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / MODEL).mkdir(parents=True)
        backend.save(unfinished / MODEL)
        self._complete_model(unfinished / MODEL, state)
        if critic is not None:
            (unfinished / CRITIC).mkdir()
            critic.save(unfinished / CRITIC)
        _sync_all(unfinished)
        _write(unfinished / STATE, msgspec.json.format(msgspec.json.encode(state)))
        newest = self.newest()
        serial = 1 if newest is None else _read_seal(newest).serial + 1
        _write(unfinished / COMPLETE, msgspec.json.encode(_seal(unfinished, state.stage_done, serial)))
        self._move_into_place(unfinished, final)
        self._prune()
        return final

    def _move_into_place(self, unfinished: Path, final: Path) -> None:
        self._must_be_ours()
        replaced = self.folder / f"{UNFINISHED_PREFIX}replaced-{final.name}"
        if final.exists():
            # Saved again at the same step, as when a run is stopped right after a periodic save.
            final.rename(replaced)
        unfinished.rename(final)
        sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self) -> None:
        ordinary = [path for path in complete_checkpoints(self.folder) if not _read_seal(path).stage_final]
        for path in ordinary[: -self._keep]:
            shutil.rmtree(path)

    def adopt_finals(self, source: Path) -> None:
        """Takes over stage-final checkpoints that lie beside `source`, when a resumed run writes to another folder."""
        for path in complete_checkpoints(source.parent):
            if _read_seal(path).stage_final and not (self.folder / path.name).exists():
                _refuse_links(path)
                shutil.copytree(path, self.folder / f"{UNFINISHED_PREFIX}{path.name}", symlinks=True)
                self._move_into_place(self.folder / f"{UNFINISHED_PREFIX}{path.name}", self.folder / path.name)

    def stage_final(self, stage: TrainingStage) -> Path | None:
        """The last checkpoint of a stage that ran to its end."""
        found = [path for path in complete_checkpoints(self.folder) if path.name.startswith(f"{stage.value}-step-")]
        return next((path for path in reversed(found) if _read_seal(path).stage_final), None)


def _refuse_links(folder: Path) -> None:
    """A folder that came from others must not fill ours with what its links point to. Raises InvalidData."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            raise InvalidData(f"{path}: is a link; a checkpoint holds files alone, so put there what it points to")


def why_not_begun(left_s: float | None, save_s: float | None) -> str:
    """Of a save, with so much time left (None: any) and a last one that took so long (None: unknown); empty: it is."""
    if left_s is None or save_s is None or SAVE_SLACK * save_s <= left_s:
        return ""
    return f"a save takes {save_s:.1f} s, and {max(0.0, left_s):.1f} s were left"


def checkpoint_name(stage: TrainingStage, step: int) -> str:
    """Sorts by step within a stage."""
    return f"{stage.value}-step-{step:06d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest first. Raises InvalidData naming a seal that cannot be read."""
    found = [path for path in folder.iterdir() if (path / COMPLETE).is_file()] if folder.is_dir() else []
    usual = [path for path in found if not path.name.startswith(".")]
    return sorted(usual, key=lambda path: (_read_seal(path).serial, path.name))


def latest(folder: Path) -> Path:
    """The newest checkpoint of a run's folder, or the folder itself if it is a checkpoint. Raises InvalidData."""
    if not folder.is_dir():
        raise InvalidData(f"{folder}: no such folder to resume from")
    if (folder / COMPLETE).exists() or (folder / STATE).exists():
        return folder
    found = complete_checkpoints(folder / "checkpoints")
    if not found:
        raise InvalidData(f"{folder}: holds no complete checkpoint; name a run's folder or one of its checkpoints")
    return found[-1]


def read_checkpoint(path: Path) -> TrainerState:
    """Checks every file and gives the state. Raises InvalidData naming the file that is missing, cut or foreign."""
    seal = _read_seal(path)
    for name, expected in seal.files.items():
        _check_file(path / name, expected)
    if STATE not in seal.files:
        raise InvalidData(f"{path / COMPLETE}: does not list {STATE}")
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=TrainerState)
    except UNDECODABLE as error:
        raise InvalidData(f"{path / STATE}: not a trainer's state: {error}") from error


def _read_seal(path: Path) -> Seal:
    place = path / COMPLETE
    if not place.is_file():
        raise InvalidData(f"{path}: not a complete checkpoint, {COMPLETE} is missing")
    try:
        return msgspec.json.decode(place.read_bytes(), type=Seal)
    except UNDECODABLE as error:
        raise InvalidData(f"{place}: not written by PolyRL: {error}") from error


def _check_file(path: Path, expected: FileSeal) -> None:
    if not path.is_file():
        raise InvalidData(f"{path}: the checkpoint lacks this file")
    size = path.stat().st_size
    if size != expected.size:
        raise InvalidData(f"{path}: has {size} bytes, the checkpoint was sealed with {expected.size}")
    if checksum(path) != expected.xxh3:
        raise InvalidData(f"{path}: its content differs from what was saved (checksum)")


def _seal(folder: Path, stage_final: bool, serial: int) -> Seal:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    seals = {str(path.relative_to(folder)): FileSeal(path.stat().st_size, checksum(path)) for path in files}
    return Seal(stage_final, seals, serial=serial)


def checksum(path: Path) -> str:
    """xxh3-128 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def sync(path: Path) -> None:
    """A file or a folder is on the disk, not only in its cache, when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def replace_file(path: Path, content: bytes) -> None:
    """The file has the new content or the old one, never a part."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)
    sync(path.parent)
