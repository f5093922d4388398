"""The folder that all agents of a run on one machine share, of one user, and whose turn it is to change it.

    polyrl-<run>-<key>/.lock    held shared by every agent that lives; whoever gets it alone may remove the folder
    .../.turn                   held by the one that puts a version together, and touched while it does

All are flocks: the kernel lets go of them when their holder dies, however it dies. One that is frozen holds them still;
the others see that it touches nothing any more, and go on in folders of their own.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

PREFIX: Final = "polyrl-"
LOCK: Final = ".lock"
TURN: Final = ".turn"
NAME_BYTES: Final = 4
"""Bytes of randomness in the name of a folder that nobody else finds."""
SIGN_S: Final = 1.0
FROZEN_S: Final = 15.0
"""Without a sign of life for so long whoever has the turn is taken for frozen: 15 signs, for cores that others want."""
JOIN_TRIES: Final = 50
JOIN_PAUSE_S: Final = 0.02
"""Between two tries: the one that removes the folder just now is soon done, and tells nobody."""


class SharedFolder:
    """Joined until `close`; one thread at a time."""

    def __init__(self, base: Path, name: str) -> None:
        """Where the folder cannot be shared, as when a stranger made it, it is one's own, of a name nobody finds."""
        sweep(base)
        for _ in range(JOIN_TRIES):
            joined = _join(base, base / f"{PREFIX}{name}")
            if joined is not None:
                break
            time.sleep(JOIN_PAUSE_S)
        else:
            joined = _make(base, base / f"{PREFIX}{name}-{secrets.token_hex(NAME_BYTES)}")
        if joined is None:
            raise FileExistsError(f"no folder could be made in {base}")
        self.path, self._lock = joined
        self._turn = _open(self.path / TURN)
        self._over, self._showing = threading.Event(), threading.Thread()

    def take_turn(self) -> bool:
        """Takes the turn, which one of all agents that share the folder has; False: another one has it."""
        if not _locked(self._turn, fcntl.LOCK_EX):
            return False
        os.utime(self._turn)
        self._over = threading.Event()
        self._showing = threading.Thread(
            target=_show_life, args=(self._turn, self._over), name="staging-turn", daemon=True
        )
        self._showing.start()
        return True

    def give_back_turn(self) -> None:
        """Idempotent."""
        self._over.set()
        if self._showing.is_alive():
            self._showing.join()
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def sign_of_life(self) -> int:
        """A sign of life of whoever has the turn: another value each time."""
        return os.fstat(self._turn).st_mtime_ns

    def close(self) -> None:
        """The last one removes everything; idempotent."""
        if self._lock < 0:
            return
        self.give_back_turn()
        if _locked(self._lock, fcntl.LOCK_EX):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._turn)
        os.close(self._lock)
        self._lock = -1


def sweep(base: Path) -> None:
    """Removes folders whose agents were all killed: their lock is free. Folders of other users, and what they may
    change, are left alone: who removes it follows where they lead."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            if not _is_private(folder):
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        # A folder that was removed and made again meanwhile has another lock.
        if _locked(lock, fcntl.LOCK_EX) and _is_at(lock, folder / LOCK):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _join(base: Path, path: Path) -> tuple[Path, int] | None:
    """None when it is being removed, or belongs to somebody else."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _make(base, path)
    except OSError:
        return None
    if _is_private(path) and _locked(lock, fcntl.LOCK_SH) and _is_at(lock, path / LOCK):
        return path, lock
    os.close(lock)
    return None


def _make(base: Path, path: Path) -> tuple[Path, int] | None:
    """None when another one made it first."""
    # Locked before it takes a name that others and a sweep find.
    unnamed = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    lock = _open(unnamed / LOCK)
    _locked(lock, fcntl.LOCK_SH)
    try:
        unnamed.rename(path)
    except OSError:
        shutil.rmtree(unnamed, ignore_errors=True)
        os.close(lock)
        return None
    return path, lock


def _is_private(folder: Path) -> bool:
    """This user's, and no link (its mode is open to all): where all may write, anybody may take the name first."""
    found = folder.lstat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _show_life(descriptor: int, over: threading.Event) -> None:
    while not over.wait(SIGN_S):
        os.utime(descriptor)
