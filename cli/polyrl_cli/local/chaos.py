"""Faults on a run of this machine: asked for by `polyrl chaos` through the runner's control socket, or declared.

The runner injects them, since it started the processes: what it signals is what it started, never a stranger that got
the same process id. A fault that lasts is undone by the runner, at its end or at the run's; if the runner itself dies,
all its processes die with it, frozen or not. The planner replaces what a fault takes as after a real loss.

The socket lies in the run's folder. One JSON line in (`FaultRequest`), one JSON line out (`ControlAnswer`), then the
connection ends. Only the folder's owner can connect: the socket's mode is 0600 before it listens.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from polyrl.errors import UserError
from polyrl.local.planner import ObservedWorker
from polyrl.manifest.rollout import FaultAction, FaultSpec
from polyrl.status import ManagerStatus
from polyrl.worker import Role
from polyrl_cli.chaos.faults import Fault, FaultRequest, signals_of
from polyrl_cli.chaos.kinds import ChaosAction, Target
from polyrl_cli.local.process_fleet import ProcessFleet

RL_PHASE: Final = "rl"
"""The trainer's name of the phase whose steps faults count. It reports whole steps, so the next one has begun then."""

MAX_LINE_BYTES: Final = 64 << 10
"""A request takes two hundred bytes."""

REQUEST_S: Final = 5.0
"""Longest wait for the line of a client that has connected."""

RUNNER_ANSWER_S: Final = 20.0
"""Longest wait for the runner's answer: it waits up to 10 s for the kernel to reap what it killed."""

RequestHandler = Callable[[FaultRequest], Awaitable[str]]


class FaultInjector:
    """Injects faults and holds those that last. Must be closed while the loop still runs."""

    def __init__(self, fleet: ProcessFleet) -> None:
        self._fleet = fleet
        self._lasting: dict[str, asyncio.Task[None]] = {}

    def check(self, fault: Fault) -> None:
        """Raises UserError when there is no process to hit, or when it would last where another one does."""
        if not self._fleet.signal(fault.victim, signals_of(fault).part, 0):
            raise UserError(fault.no_process)
        if fault.lasts and fault.victim in self._lasting:
            raise UserError(fault.busy)

    async def inject(self, fault: Fault) -> None:
        """Begins; what lasts goes on in the background. A victim that has gone meanwhile is fine."""
        if fault.takes_capacity:
            await self._fleet.reclaim(fault.victim, fault.seconds if fault.action is ChaosAction.PREEMPT else 0.0)
        elif fault.action is ChaosAction.KILL and fault.target is Target.ENGINE:
            signals = signals_of(fault)
            self._fleet.signal(fault.victim, signals.part, signals.begin)
        elif fault.action is ChaosAction.KILL:
            await self._fleet.kill(fault.victim)
        else:
            task = asyncio.create_task(self._last(fault), name=f"fault of {fault.victim}")
            self._lasting[fault.victim] = task
            task.add_done_callback(lambda _: self._lasting.pop(fault.victim, None))

    async def close(self) -> None:
        """Undoes what still lasts."""
        tasks = list(self._lasting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _last(self, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + fault.seconds
        part, begin, undo, on_s, off_s = signals_of(fault)
        while (left := end - loop.time()) > 0 and self._fleet.signal(fault.victim, part, begin):
            try:
                await asyncio.sleep(min(on_s, left))
            finally:
                self._fleet.signal(fault.victim, part, undo)
            await asyncio.sleep(off_s)


@dataclass(frozen=True)
class DueFault:
    """A fault that the manifest declares, with its victim."""

    fault: Fault
    at_step: int

    def __str__(self) -> str:
        return f"declared fault: {self.fault} at step {self.at_step}"


class FaultSchedule:
    """The declared faults that are still to come, in the order of their steps; each is due once."""

    def __init__(self, faults: Sequence[FaultSpec], done_steps: int = 0) -> None:
        """`done_steps`: RL steps that a resumed run does not repeat; their faults were injected before."""
        self.pending = sorted((fault for fault in faults if fault.at_step > done_steps), key=lambda f: f.at_step)

    def due(self, status: ManagerStatus, observed: Sequence[ObservedWorker]) -> DueFault | None:
        """The next fault, taken off the list; None while its step has not begun or no victim is at work."""
        if not self.pending or status.phase != RL_PHASE or status.step + 1 < self.pending[0].at_step:
            return None
        declared = self.pending[0]
        victim = _victim(declared, status, observed)
        if victim is None:
            return None
        self.pending.pop(0)
        kills = declared.action is FaultAction.KILL
        fault = Fault(
            action=ChaosAction.KILL if kills else ChaosAction.PREEMPT,
            target=Target.AGENT,
            victim=victim,
            role=Role.ROLLOUT,
            seconds=0.0 if kills else float(declared.notice_seconds),
        )
        return DueFault(fault, declared.at_step)


def _victim(declared: FaultSpec, status: ManagerStatus, observed: Sequence[ObservedWorker]) -> str | None:
    running = {engine.name: engine.running for engine in status.engines}
    known = [seen for seen in observed if seen.role is Role.ROLLOUT and seen.counts and seen.name in running]
    if not known:
        return None
    known.sort(key=lambda seen: seen.started_at)
    victim = known[min(declared.rollout, len(known) - 1)].name
    # Within its own step a fault waits until the victim generates: to kill an idle engine would show nothing.
    return victim if running[victim] > 0 or status.step >= declared.at_step else None


class ControlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, or why nothing was."""

    done: str = ""
    refused: str = ""


@asynccontextmanager
async def listening(path: Path, handler: RequestHandler) -> AsyncIterator[None]:
    """Answers requests at `path` while the context lasts. Raises UserError when the folder takes no socket."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(msgspec.json.encode(await _answer(reader, handler)) + b"\n")
            await writer.drain()
        except ConnectionError:
            return  # whoever asked has left
        finally:
            writer.close()

    with _bound(path) as listener:
        server = await asyncio.start_unix_server(serve, sock=listener, limit=MAX_LINE_BYTES)
        try:
            yield
        finally:
            server.close()


@contextmanager
def _bound(path: Path) -> Iterator[socket.socket]:
    with _address(path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            path.unlink(missing_ok=True)
            listener.bind(address)
            path.chmod(0o600)
        except OSError as error:
            raise UserError(f"{path}: cannot make the runner's socket: {error.strerror}") from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


async def ask_runner(path: Path, request: FaultRequest) -> str:
    """What the runner has done. Raises UserError when it refuses, or when nobody listens at `path`."""
    try:
        async with asyncio.timeout(RUNNER_ANSWER_S):
            with _address(path) as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=MAX_LINE_BYTES)
            try:
                writer.write(msgspec.json.encode(request) + b"\n")
                answer = msgspec.json.decode(await reader.readline(), type=ControlAnswer)
            finally:
                writer.close()
    except TimeoutError:
        raise UserError(f"{path}: the runner gave no answer within {RUNNER_ANSWER_S:g} s") from None
    except (OSError, ValueError):
        raise UserError(
            f"{path.parent.parent}: no `polyrl run` is at work there, so nothing can be done to it"
        ) from None
    if answer.refused:
        raise UserError(answer.refused)
    return answer.done


async def _answer(reader: asyncio.StreamReader, handler: RequestHandler) -> ControlAnswer:
    try:
        async with asyncio.timeout(REQUEST_S):
            line = await reader.readline()
        return ControlAnswer(done=await handler(msgspec.json.decode(line, type=FaultRequest)))
    except (TimeoutError, ValueError) as error:
        return ControlAnswer(refused=f"the runner does not understand the request: {error or 'no line came'}")
    except UserError as error:
        return ControlAnswer(refused=str(error))


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """`path` in a form short enough for a Unix socket, which takes 107 bytes; valid while the context lasts."""
    if sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
