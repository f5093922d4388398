"""A disk that loses power: what SQLite and the journal ask of it is recorded, and what a power cut may leave is drawn.

After a power cut a file holds what it held at its last sync and, of what was written since, anything: nothing, all, the
first part, single writes, single sectors. No file system that keeps to POSIX leaves more to chance.

    Recorder    stands between SQLite and the system, in this process
    Disk        what is there for sure, and what was asked for since
    PowerSwitch    takes this process and what its disk may lose, at a signal
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple
from unittest.mock import patch

SECTOR: Final = 512

SUFFIXES: Final = ("", "-wal", "-journal", "-shm")
"""What the names of one SQLite database's files end with."""


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
    def recording(self) -> Iterator[None]:
        """Records all that this process asks for meanwhile."""
        library = ctypes.CDLL(ctypes.util.find_library("sqlite3") or "libsqlite3.so.0")
        library.sqlite3_vfs_find.restype = _Pointer
        table = ctypes.cast(library.sqlite3_vfs_find(None), ctypes.POINTER(_Pointer))
        opened, deleted = table[_OPEN] or 0, table[_DELETE] or 0
        table[_OPEN] = self._pointer(_OpenCall(self._open_by(_OpenCall(opened))))
        table[_DELETE] = self._pointer(_DeleteCall(self._delete_by(_DeleteCall(deleted))))
        synced = patch.object(os, "fdatasync", self._fdatasync)
        try:
            with synced, patch.object(os, "fsync", lambda _: self._on_operation(Operation("syncFolder", ""))):
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
            self._on_operation(
                Operation("write", self._paths[handle], offset=offset, data=ctypes.string_at(data, size))
            )
            return int(write(handle, data, size, offset))

        def xtruncate(handle: int, size: int) -> int:
            self._on_operation(Operation("truncate", self._paths[handle], offset=size))
            return int(truncate(handle, size))

        def xsync(handle: int, flags: int) -> int:
            self._on_operation(Operation("sync", self._paths[handle]))
            return 0

        methods[_WRITE] = self._pointer(_WriteCall(xwrite))
        methods[_TRUNCATE] = self._pointer(_TruncateCall(xtruncate))
        methods[_SYNC] = self._pointer(_SyncCall(xsync))
        self._kept.append(methods)
        file[0] = ctypes.cast(methods, ctypes.POINTER(_Pointer))


class PowerSwitch:
    """Takes this process, and of its journal's files what the disk may lose, when the process gets SIGNAL."""

    SIGNAL: Final = signal.SIGUSR1

    def __init__(self, database: Path) -> None:
        """Watches the files of `database`, wherever SQLite puts them; what is there now is sure."""
        self._disk, self._lock = Disk(), threading.Lock()
        self._database = database
        self._disk.sure = {str(path): path.read_bytes() for path in self._files()}

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Nothing is really synced meanwhile; for the main thread."""
        signal.signal(self.SIGNAL, lambda *_: threading.Thread(target=self._lose_power, daemon=True).start())
        with Recorder(self._take).recording():
            yield

    def _take(self, operation: Operation) -> None:
        with self._lock:
            self._disk.take(operation)

    def _lose_power(self) -> None:
        self._lock.acquire()  # for good: no write, and no sync on which a message waits, comes through any more
        left = self._disk.after_power_loss(Random(os.getpid()))
        for path in self._files():
            path.unlink()
        for name, data in left.items():
            if not name.endswith("-shm"):
                Path(name).write_bytes(data)
        os.kill(os.getpid(), signal.SIGKILL)

    def _files(self) -> list[Path]:
        paths = [Path(f"{self._database}{suffix}") for suffix in SUFFIXES]
        return [path for path in paths if path.exists()]
