"""The fork server, as seen by whoever starts processes."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from polyrl.forks import own
from polyrl.forks.forked import Forked
from polyrl.forks.request import ForkRequest, imports_alike, module_of
from polyrl.parent_death_signal import PARENT_PID, adopt_orphans

READY_S: Final = 120.0
"""Longest wait for an answer: at first the server loads its libraries, ten times as long from a cold disk with all
cores taken."""
KILLED_S: Final = 10.0
"""How long the kernel may take to end a process."""
STDOUT: Final = 1
STDERR: Final = 2
ANSWER_BYTES: Final = 64
"""A process id in digits."""

_one_at_a_time = threading.Lock()
"""Asking for orphans is a state of the whole process."""


@dataclass(frozen=True)
class OutputFiles:
    """Open files for a process's output."""

    out: int
    err: int


class ForkServer:
    """One that this process may ask."""

    def __init__(self, link: own.ServerLink, process: subprocess.Popen[bytes] | None = None) -> None:
        self._link, self._process = link, process

    @classmethod
    def start(cls, modules: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
        """Begins to load these modules in a process of its own. Must be closed; it ends with this process anyway."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loaded_in = {**environment, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "polyrl.forks", str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                # What cannot be loaded is said by the process that then is spawned.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**loaded_in, PARENT_PID: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return cls(own.ServerLink(ours, loaded_in), process)

    def takes(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether it can be forked: it runs a module, and its libraries would be loaded as the server's were."""
        return not self._link.is_gone and bool(module_of(command)) and imports_alike(environment, self._link.loaded_in)

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: OutputFiles,
        *,
        folder: str | None = None,
        passed: Sequence[int] = (),
        own_session: bool = False,
        starts_others: bool = False,
        umask: int | None = None,
    ) -> Forked | None:
        """Starts what `takes` accepts; `passed`: further open files, which keep their numbers. None when the server is
        gone, silent for READY_S, or refused, or this is too long to be asked for."""
        module = module_of(command)
        assert module is not None, "asked for by `takes`"
        request = ForkRequest(
            module=module,
            arguments=tuple(map(os.fsencode, command[3:])),
            environment={os.fsencode(name): os.fsencode(text) for name, text in environment.items()},
            # By this process, since its own may be gone, or not the server's.
            folder=os.fsencode(os.path.join(f"/proc/{os.getpid()}/cwd", folder or "")),
            parent=os.getpid(),
            descriptors=(STDOUT, STDERR, *passed),
            own_session=own_session,
            starts_others=starts_others,
            umask=umask,
        )
        pid = self._ask(request, [streams.out, streams.err, *passed])
        return None if pid is None else Forked(pid, tuple(command))

    async def fork_beside(self, command: Sequence[str], *args: object, **named: object) -> Forked | None:
        """As `fork`, beside the event loop. Who stops waiting for it gets no process."""
        asked = asyncio.ensure_future(asyncio.to_thread(self.fork, command, *args, **named))  # type: ignore[arg-type]
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(_end)
            raise

    def keep(self) -> None:
        """Makes it the own server of this process."""
        own.set_link(self._link)

    def close(self) -> None:
        """Ends one that this has started; what it forked goes on. One that was kept is its process's, for all in it."""
        if self._process is not None:
            self._link.is_gone = True
            self._link.socket.close()
            self._process.kill()
            self._process.wait(KILLED_S)

    def _ask(self, request: ForkRequest, files: Sequence[int]) -> int | None:
        pid, is_asked = b"", True
        with _one_at_a_time:
            if self._link.is_gone:
                return None
            adopt_orphans(True)
            try:
                pid = _answer(self._link.socket, msgspec.msgpack.encode(request), files)
            except OSError as error:
                is_asked = error.errno != errno.EMSGSIZE  # the kernel takes no such message: others it does
            finally:
                # No longer than for a fork: what user code leaves behind is not ours to wait for.
                adopt_orphans(False)
                self._link.is_gone = self._link.is_gone or (is_asked and not pid)
        return int(pid) if pid else None


def _answer(link: socket.socket, request: bytes, files: Sequence[int]) -> bytes:
    """By a socket that is this request's own: empty when all that could answer have ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link.settimeout(READY_S)
        socket.send_fds(link, [request], [theirs.fileno(), *files])
        theirs.close()
        ours.settimeout(READY_S)
        return ours.recv(ANSWER_BYTES)


def _end(asked: asyncio.Future[Forked | None]) -> None:
    if not asked.cancelled() and asked.exception() is None and (forked := asked.result()) is not None:
        forked.kill()
        forked.wait(KILLED_S)


def own_server() -> ForkServer | None:
    """The one that this process has."""
    link = own.kept()
    return None if link is None else ForkServer(link)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: OutputFiles,
    *,
    passed: Sequence[int] = (),
    own_session: bool = False,
) -> subprocess.Popen[bytes] | Forked:
    """Forked by this process's own server; where it has none, or that does not take it, spawned."""
    forks = own_server()
    if forks is not None and forks.takes(command, environment):
        forked = forks.fork(command, environment, streams, passed=passed, own_session=own_session)
        if forked is not None:
            return forked
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=streams.out,
        stderr=streams.err,
        env=environment,
        pass_fds=passed,
        start_new_session=own_session,
    )
