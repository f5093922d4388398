"""The machine loses power, at any write: the journal opens, and holds all that anybody was promised.

Every write and sync that SQLite and the journal ask for is recorded. After a power cut a file holds what it held at its
last sync and, of what was written since, anything: nothing, all, the first part, single writes, single sectors. No file
system that keeps to POSIX leaves more to chance.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from polyrl.errors import RunFailed
from polyrl.ledger import Event, Ledger, LedgerConfig
from polyrl.ledger.journal import decode_state, encode_state
from polyrl.ledger.state import LedgerState
from polyrl_rollout.manager import journal as journal_module
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.testing.simulation import draw_schedule, run_schedule
from polyrl_rollout.testing.simulation.manager import lost_by_restart
from polyrl_rollout.testing.simulation.schedule import Schedule, SimulatedFault

EPOCH = 1
SECTOR = 512
CHECKPOINT_PAGES = 24
"""In the log before SQLite moves it to the file: few, so that runs of seconds meet many checkpoints."""


class Operation(NamedTuple):
    """What was asked of the disk."""

    kind: str
    """write, truncate, sync, create, delete; syncFolder for what was created"""
    path: str
    offset: int = 0
    data: bytes = b""


class Disk:
    """What is on it for sure, and what was asked of it since."""

    def __init__(self) -> None:
        self.sure: dict[str, bytes] = {}
        self.unsure: list[Operation] = []

    def take(self, operation: Operation) -> None:
        """One more is asked for."""
        self.unsure.append(operation)
        if operation.kind == "sync":
            self._settle(lambda other: other.path == operation.path)
            if operation.path.endswith(("-journal", "-wal")):
                self._settle(lambda other: other.kind == "create")  # SQLite syncs the folder of a new one with it
        elif operation.kind in ("syncFolder", "delete"):
            self._settle(lambda other: other.kind in ("create", "delete"))

    def after_power_loss(self, random: Random) -> dict[str, bytes]:
        """What may be found then."""
        way = random.choice(("nothing", "all", "first", "some", "sectors", "sectors"))
        first = {"nothing": 0, "first": random.randrange(len(self.unsure) + 1)}.get(way, len(self.unsure))
        files = dict(self.sure)
        for operation in self.unsure[:first]:
            if way in ("some", "sectors") and random.random() < 0.5 and operation.kind != "write":
                continue
            for piece in _sectors(operation) if way == "sectors" else (operation,):
                if way not in ("some", "sectors") or random.random() < 0.5:
                    _apply(files, piece)
        return files

    def as_it_is(self) -> dict[str, bytes]:
        """What another process finds."""
        files = dict(self.sure)
        for operation in self.unsure:
            _apply(files, operation)
        return files

    def _settle(self, is_sure: Callable[[Operation], bool]) -> None:
        unsure, self.unsure = self.unsure, []
        for operation in unsure:
            if is_sure(operation):
                _apply(self.sure, operation)
            elif operation.kind not in ("sync", "syncFolder"):
                self.unsure.append(operation)


def _sectors(operation: Operation) -> Iterator[Operation]:
    if operation.kind != "write":
        yield operation
        return
    for begin in range(0, len(operation.data), SECTOR):
        piece = operation.data[begin : begin + SECTOR]
        yield operation._replace(offset=operation.offset + begin, data=piece)


def _apply(files: dict[str, bytes], operation: Operation) -> None:
    old = files.get(operation.path, b"")
    if operation.kind == "write":
        old = old.ljust(operation.offset, b"\0")
        files[operation.path] = old[: operation.offset] + operation.data + old[operation.offset + len(operation.data) :]
    elif operation.kind == "truncate":
        files[operation.path] = old[: operation.offset]
    elif operation.kind == "delete":
        files.pop(operation.path, None)
    elif operation.kind == "create":
        files.setdefault(operation.path, b"")


# --- what SQLite asks of the disk -------------------------------------------------------------------------------------

_Int64 = ctypes.c_int64
_Pointer = ctypes.c_void_p
_METHODS = 19
"""Pointers in sqlite3_io_methods, version 3, the version among them."""
_WRITE, _TRUNCATE, _SYNC = 3, 4, 5
_OPEN, _DELETE = 5, 6
"""Places in sqlite3_io_methods and in sqlite3_vfs, in pointers; the latter's three ints take the room of two."""

_WriteCall = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, _Pointer, ctypes.c_int, _Int64)
_TruncateCall = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, _Int64)
_SyncCall = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, ctypes.c_int)
_OpenCall = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, _Pointer, _Pointer, ctypes.c_int, _Pointer)
_DeleteCall = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, ctypes.c_char_p, ctypes.c_int)


class Recorder:
    """Stands between SQLite and the system, in this process, while it is open. Nothing is really synced meanwhile."""

    def __init__(self, on_operation: Callable[[Operation], None]) -> None:
        self._on_operation = on_operation
        self._paths: dict[int, str] = {}
        self._kept: list[Any] = []
        """What C code points to."""

    @contextmanager
    def recording(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        library = ctypes.CDLL(ctypes.util.find_library("sqlite3") or "libsqlite3.so.0")
        library.sqlite3_vfs_find.restype = _Pointer
        table = ctypes.cast(library.sqlite3_vfs_find(None), ctypes.POINTER(_Pointer))
        opened, deleted = table[_OPEN] or 0, table[_DELETE] or 0
        patch.setattr(os, "fdatasync", self._fdatasync)
        patch.setattr(os, "fsync", lambda descriptor: self._on_operation(Operation("syncFolder", "")))
        table[_OPEN] = self._pointer(_OpenCall(self._open_by(_OpenCall(opened))))
        table[_DELETE] = self._pointer(_DeleteCall(self._delete_by(_DeleteCall(deleted))))
        try:
            yield
        finally:
            table[_OPEN], table[_DELETE] = opened, deleted

    def _pointer(self, function: Any) -> int:
        self._kept.append(function)
        return ctypes.cast(function, _Pointer).value or 0

    def _fdatasync(self, descriptor: int) -> None:
        self._on_operation(Operation("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def _open_by(self, original: Any) -> Callable[..., int]:
        def xopen(vfs: int, name: int | None, file: int, flags: int, out: int) -> int:
            path = ctypes.string_at(name).decode() if name else ""
            is_new = not os.path.exists(path)
            status = int(original(vfs, name, file, flags, out))
            if path and not status:
                self._paths[file] = path
                if is_new:
                    self._on_operation(Operation("create", path))
                self._wrap(ctypes.cast(file, ctypes.POINTER(ctypes.POINTER(_Pointer))))
            return status

        return xopen

    def _delete_by(self, original: Any) -> Callable[..., int]:
        def xdelete(vfs: int, name: bytes, sync_folder: int) -> int:
            self._on_operation(Operation("delete", name.decode()))
            return int(original(vfs, name, sync_folder))

        return xdelete

    def _wrap(self, file: Any) -> None:
        methods = (_Pointer * _METHODS)(*(file[0][index] or 0 for index in range(_METHODS)))
        write, truncate = _WriteCall(methods[_WRITE] or 0), _TruncateCall(methods[_TRUNCATE] or 0)

        def xwrite(handle: int, data: int, size: int, offset: int) -> int:
            self._on_operation(Operation("write", self._paths[handle], offset, ctypes.string_at(data, size)))
            return int(write(handle, data, size, offset))

        def xtruncate(handle: int, size: int) -> int:
            self._on_operation(Operation("truncate", self._paths[handle], size))
            return int(truncate(handle, size))

        def xsync(handle: int, flags: int) -> int:
            self._on_operation(Operation("sync", self._paths[handle]))
            return 0

        methods[_WRITE] = self._pointer(_WriteCall(xwrite))
        methods[_TRUNCATE] = self._pointer(_TruncateCall(xtruncate))
        methods[_SYNC] = self._pointer(_SyncCall(xsync))
        self._kept.append(methods)
        file[0] = ctypes.cast(methods, ctypes.POINTER(_Pointer))


# --- the journal on such a disk ---------------------------------------------------------------------------------------


class JournalOnDisk:
    """The simulation's store that is a real journal; each death leaves a folder of files to the next process."""

    def __init__(self, root: Path, disk: Disk, state: LedgerState) -> None:
        self._root, self.disk, self._lives = root, disk, 0
        self.states: list[bytes] = []
        """After each commit of this life."""
        self._open()
        self._begin(state, 0.0)
        self._journal.sync()

    @property
    def commits(self) -> int:
        return self._journal.commits

    @property
    def synced(self) -> int:
        return self._journal.synced

    def commit(self, events: list[Event], state: LedgerState, at: float) -> None:
        self._journal.append(events)
        self._journal.commit(state, at)
        if self.commits == len(self.marks):
            self.marks.append(reach(self._journal))
            self.states.append(encode_state(state))

    def sync(self, commits: int) -> None:
        self._journal.sync()

    def die(self, random: Random, *, power_loss: bool) -> int:
        found = self.disk.after_power_loss(random) if power_loss else self.disk.as_it_is()
        self._journal.close()
        marks, before, self._lives = self.marks, str(self._folder), self._lives + 1
        found = {name.replace(before, str(self._folder)): data for name, data in found.items()}
        write(found)
        self.disk.sure, self.disk.unsure = found, []
        self._restored = self._open()
        self.states = []
        return survivors(marks, reach(self._journal))

    def reopen(self) -> tuple[LedgerState, float]:
        state, at = self._restored
        assert state is not None, "the first snapshot was synced"
        self._begin(state, at)
        return state, at

    def close(self) -> None:
        self._journal.close()

    @property
    def _folder(self) -> Path:
        return self._root / f"life-{self._lives}"

    def _open(self) -> tuple[LedgerState | None, float]:
        self._journal = Journal(self._folder / "journal.sqlite", EPOCH)
        self._journal._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        restored = self._journal.restore()
        self.marks = [reach(self._journal)]
        return restored

    def _begin(self, state: LedgerState, at: float) -> None:
        self._journal.begin(state, at)
        self.marks.append(reach(self._journal))
        self.states += [b"", encode_state(state)]


def write(files: dict[str, bytes]) -> None:
    """All of them."""
    for name, data in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)


@pytest.fixture
def small_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of seconds meet rounds of pages and snapshots."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_TAIL_BYTES", 20_000)
    monkeypatch.setattr(journal_module, "SNAPSHOT_RATIO", 0)
    monkeypatch.setattr(journal_module, "PAGES_PER_COMMIT", 2)


def reach(journal: Journal) -> tuple[int, int]:
    """How far it goes; grows with every commit."""
    return journal._seq, journal._last_entry


def survivors(marks: list[tuple[int, int]], found: tuple[int, int]) -> int:
    """The number of the newest commit that was found."""
    return max(number for number, mark in enumerate(marks) if mark <= found)


OUTAGE_SHARE = 0.15
"""Of all writes and syncs that are followed by a power cut."""
SEED = 19
POWER_LOSSES = ("managerPowerLoss", "managerPowerLossMidway")


class Outage(NamedTuple):
    """A power cut that could have been."""

    files: dict[str, bytes]
    synced: int
    commits: int
    """At that moment; one more may be on its way."""


class Outages:
    """Notes what some power cuts would leave, while a run goes on."""

    def __init__(self, seed: int) -> None:
        self.disk, self.made = Disk(), list[Outage]()
        self.store: JournalOnDisk | None = None
        self._random = Random(seed)

    def take(self, operation: Operation) -> None:
        self.disk.take(operation)
        if self._random.random() < OUTAGE_SHARE:
            synced, commits = (0, 0) if self.store is None else (self.store.synced, self.store.commits)
            self.made.append(Outage(self.disk.after_power_loss(self._random), synced, commits))


def run_on_disk(schedule: Schedule, root: Path, disk: Disk, outages: Outages | None = None) -> JournalOnDisk:
    """To its end, on real journals; what is asked of the disk is recorded. Raises Violation."""
    stores: list[JournalOnDisk] = []

    def make(state: LedgerState) -> JournalOnDisk:
        stores.append(JournalOnDisk(root, disk, state))
        if outages is not None:
            outages.store = stores[0]
        return stores[0]

    with pytest.MonkeyPatch.context() as patch, Recorder(outages.take if outages else disk.take).recording(patch):
        try:
            run_schedule(schedule, make)
        finally:
            stores[0].close()
    return stores[0]


def test_wherever_it_is_cut_off_a_journal_holds_a_prefix_of_commits_with_all_that_were_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_journals: None
) -> None:
    outages = Outages(5)
    store = run_on_disk(replace(draw_schedule(SEED), faults=()), tmp_path, outages.disk, outages)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    before, lost = str(tmp_path / "life-0"), 0
    for number, outage in enumerate(outages.made):
        folder = tmp_path / f"outage-{number}"
        write({name.replace(before, str(folder)): data for name, data in outage.files.items()})
        with closing(Journal(folder / "journal.sqlite", EPOCH)) as journal:
            state, _ = journal.restore()
            found = survivors(store.marks, reach(journal))
        assert outage.synced <= found <= outage.commits + 1
        assert state is not None or not outage.synced
        assert state is None or not lost_by_restart(decode_state(store.states[found]), state)
        lost += found < outage.commits
        shutil.rmtree(folder)
    assert len(outages.made) > 150
    assert lost > 30, "of what was not synced, some is gone"


@pytest.mark.parametrize("seed", range(12))
def test_after_power_losses_the_run_ends_with_no_promise_broken(
    tmp_path: Path, small_journals: None, seed: int
) -> None:
    """Agents and trainer greet a manager whose files are what the power cut left."""
    random, schedule = Random(seed), draw_schedule(seed)
    drawn = [fault for fault in schedule.faults if fault.kind != "journalLoss"]  # its files are what is tried here
    losses = [
        SimulatedFault(
            random.uniform(0.0, 4.0), random.choice(POWER_LOSSES), target=0, seconds=random.uniform(0.1, 1.0)
        )
        for _ in range(8)
    ]
    faults = tuple(sorted((*drawn, *losses), key=lambda fault: fault.at))
    run_on_disk(replace(schedule, faults=faults), tmp_path, Disk())


def test_after_a_sync_that_failed_nothing_is_promised_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have dropped what it could not write, so that a second try would succeed without it."""
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH))
    with closing(Journal(tmp_path / "journal.sqlite", EPOCH)) as journal:
        journal.begin(ledger.state, 0.0)
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", _fail)
            with pytest.raises(RunFailed, match="cannot be written: Input/output error"):
                journal.sync()
        for act in (journal.sync, lambda: journal.commit(ledger.state, 1.0)):
            with pytest.raises(RunFailed, match="cannot be written: Input/output error"):
                act()
        assert not journal.synced


def _fail(descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
