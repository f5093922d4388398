"""The `checkpoints` folder of a run: what is saved into it, kept in it, and read from it."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from polyrl.errors import UNDECODABLE, DeadlineExceeded, DiskRefused, InvalidData, Superseded
from polyrl_trainer.backend import TrainFuture, TrainingBackend
from polyrl_trainer.checkpoints.seals import (
    COMPLETE,
    PART,
    check_file,
    prunable,
    seal_in,
    seal_of,
    sync,
    sync_all,
    write_synced,
    writing,
)
from polyrl_trainer.checkpoints.store import CheckpointStore, name_in_store
from polyrl_trainer.checkpoints.writer import Writer
from polyrl_trainer.state import TrainerState, TrainingStage

STATE: Final = "state.json"
MODEL: Final = "model"
CRITIC: Final = "critic"
UNFINISHED_PREFIX: Final = ".unfinished-"
REPLACED_PREFIX: Final = f"{UNFINISHED_PREFIX}replaced-"
"""Prefix of one saved again, until the other has its name; it gets it back where the trainer was killed before."""

CompleteModel = Callable[[Path, TrainerState], None]
"""Writes into a model's folder what others need beside the weights."""

SAVE_DEADLINE_S: Final = 1800.0
"""Longest wait for what is written of a state: terabytes by a network's disk take minutes."""
WRITER: Final = ".trainer"
"""Beside the folder."""
WRITER_BYTES: Final = 8
"""Bytes of a writer's random name."""


class Checkpoints:
    """The `checkpoints` folder of one run."""

    def __init__(
        self,
        run: Path,
        keep: int,
        complete_model: CompleteModel = lambda folder, state: None,
        store: CheckpointStore | None = None,
    ) -> None:
        """With a `store` a checkpoint counts as saved when it is there as well."""
        self.folder = run / "checkpoints"
        self._writer = run / WRITER
        self._keep = keep
        self._complete_model = complete_model
        self._name = secrets.token_hex(WRITER_BYTES)
        self._store = store
        self._thread = Writer("checkpoint")

    def start(self) -> None:
        """Makes the folder ours and removes what an interrupted save left behind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing(self._writer):
            self._writer.write_text(self._name)
        for replaced in self.folder.glob(f"{REPLACED_PREFIX}*"):
            if not (final := self.folder / replaced.name.removeprefix(REPLACED_PREFIX)).exists():
                replaced.rename(final)
        for leftover in self.folder.glob(f"{UNFINISHED_PREFIX}*"):
            shutil.rmtree(leftover)
        sync(self.folder.parent)
        if self._store is not None:
            self._store.start(self._name)
            self._meet(self._store)

    def _meet(self, store: CheckpointStore) -> None:
        """Takes from the store what this folder lost or never had, and gives it what it was killed before giving."""
        own = {name_in_store(path.name, seal_in(path)): path for path in complete_checkpoints(self.folder)}
        serial, there = max((seal_in(path).serial for path in own.values()), default=0), store.complete()
        newest = next(reversed(there.items()), None)
        for name, seal in there.items():
            final = self.folder / name.rpartition(".")[0]
            lost = seal.stage_final and not final.exists()
            if lost or ((name, seal) == newest and seal.serial > serial):
                unfinished = self.folder / f"{UNFINISHED_PREFIX}{final.name}"
                store.fetch(name, seal, unfinished)
                sync_all(unfinished)
                self._move_into_place(unfinished, final)
        for name, path in own.items():
            seal = seal_in(path)
            if name not in there and (seal.stage_final or seal.serial == serial):
                store.put(path, self._name)

    def newest(self) -> Path | None:
        """The newest complete one of this run; None before the first."""
        return next(reversed(complete_checkpoints(self.folder)), None)

    def save(
        self,
        state: TrainerState,
        backend: TrainingBackend,
        critic: TrainingBackend | None = None,
        *,
        copied: bool = True,
    ) -> Future[Path]:
        """Begins one checkpoint, and returns when the learner may go on: with a copy of its state. The future has the
        path once it is on the disk, and older ones are pruned; or Superseded when the folder has another writer by
        now, DiskRefused, or OSError of the store. One at a time: the one before has to be over. Not `copied`, the
        learner waits for the future."""
        self._must_be_ours()
        unfinished = self.folder / f"{UNFINISHED_PREFIX}{checkpoint_name(state)}"
        begun: list[TrainFuture[None]] = []
        with self._writing(unfinished, begun):
            shutil.rmtree(unfinished, ignore_errors=True)
            begun.append(_begin(backend, unfinished / MODEL, copied))
            if critic is not None:
                begun.append(_begin(critic, unfinished / CRITIC, copied))
        return self._thread.submit(lambda: self._end(state, unfinished, begun))

    @contextmanager
    def _writing(self, unfinished: Path, begun: Sequence[TrainFuture[None]]) -> Iterator[None]:
        """Raises DiskRefused, when what was written is removed; Superseded where another trainer has removed it."""
        try:
            with writing(unfinished):
                yield
        except DiskRefused:
            over = not wait(begun, SAVE_DEADLINE_S).not_done
            self._must_be_ours()
            if over:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _end(self, state: TrainerState, unfinished: Path, begun: Sequence[TrainFuture[None]]) -> Path:
        with self._writing(unfinished, begun):
            for one in begun:
                _await_written(one, unfinished)
            final = self._complete(state, unfinished)
        try:
            self._put(final)
        except OSError:
            self._must_be_ours()
            raise
        return final

    def _put(self, final: Path) -> None:
        if self._store is not None:
            self._store.put(final, self._name)
            self._store.prune(self._keep)

    def _must_be_ours(self) -> None:
        if self._writer.read_text() != self._name:
            raise Superseded(f"{self.folder}: another trainer writes here by now")

    def _complete(self, state: TrainerState, unfinished: Path) -> Path:
        final = self.folder / checkpoint_name(state)
        self._complete_model(unfinished / MODEL, state)
        sync_all(unfinished)
        write_synced(unfinished / STATE, msgspec.json.format(msgspec.json.encode(state)))
        newest = self.newest()
        serial = 1 if newest is None else seal_in(newest).serial + 1
        write_synced(unfinished / COMPLETE, msgspec.json.encode(seal_of(unfinished, state.stage_done, serial)))
        self._move_into_place(unfinished, final)
        self._prune()
        return final

    def _move_into_place(self, unfinished: Path, final: Path) -> None:
        self._must_be_ours()
        replaced = self.folder / f"{REPLACED_PREFIX}{final.name}"
        if final.exists():
            # Saved again at the same step, as when a run is stopped right after a periodic save.
            final.rename(replaced)
        unfinished.rename(final)
        sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self) -> None:
        found = [(path.name, seal_in(path)) for path in complete_checkpoints(self.folder)]
        for name in prunable(found, self._keep):
            # Whoever reads while it goes, or starts after a kill, finds none rather than a part.
            shutil.rmtree((self.folder / name).rename(self.folder / f"{UNFINISHED_PREFIX}pruned-{name}"))

    def adopt_finals(self, source: Path) -> None:
        """Takes over stage-final checkpoints that lie beside `source`, when a resumed run writes to another folder."""
        for path in complete_checkpoints(source.parent):
            if seal_in(path).stage_final and not (self.folder / path.name).exists():
                _refuse_links(path)
                shutil.copytree(path, self.folder / f"{UNFINISHED_PREFIX}{path.name}", symlinks=True)
                self._move_into_place(self.folder / f"{UNFINISHED_PREFIX}{path.name}", self.folder / path.name)

    def stage_final(self, stage: TrainingStage) -> Path | None:
        """The last checkpoint of a stage that ran to its end."""
        found = [path for path in complete_checkpoints(self.folder) if path.name.startswith(f"{stage.value}-step-")]
        return next((path for path in reversed(found) if seal_in(path).stage_final), None)


def _refuse_links(folder: Path) -> None:
    """A folder that came from others must not fill ours with what its links point to. Raises InvalidData."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            raise InvalidData(f"{path}: is a link; a checkpoint holds files alone, so put there what it points to")


def _begin(backend: TrainingBackend, folder: Path, copied: bool) -> TrainFuture[None]:
    folder.mkdir(parents=True)
    return backend.save(folder, copied=copied)


def _await_written(one: TrainFuture[None], folder: Path) -> None:
    try:
        one.result(SAVE_DEADLINE_S)
    except TimeoutError as error:
        if one.done():
            raise
        raise DeadlineExceeded(f"{folder} to be written", "the disk", SAVE_DEADLINE_S) from error


def checkpoint_name(state: TrainerState) -> str:
    """Sorts by step within a stage; one in the middle of a step takes the place of no whole one."""
    begun = f"{PART}{state.trained_groups:06d}-groups" if state.trained_groups else ""
    return f"{state.stage.value}-step-{state.step:06d}{begun}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest first. Raises InvalidData naming a seal that cannot be read."""
    found = [path for path in folder.iterdir() if (path / COMPLETE).is_file()] if folder.is_dir() else []
    usual = [path for path in found if not path.name.startswith(".")]
    return sorted(usual, key=lambda path: (seal_in(path).serial, path.name))


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
    seal = seal_in(path)
    for name, expected in seal.files.items():
        check_file(path / name, expected)
    if STATE not in seal.files:
        raise InvalidData(f"{path / COMPLETE}: does not list {STATE}")
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=TrainerState)
    except UNDECODABLE as error:
        raise InvalidData(f"{path / STATE}: not a trainer's state: {error}") from error
