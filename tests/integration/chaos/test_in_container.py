"""The text that is run inside a container, run here as it is there: on a worker with an engine below it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyrl.local.planner import ObservedWorker, WorkerPhase
from polyrl.partition_signals import HEAL, PARTITION, PARTITION_IN
from polyrl.worker import Role
from polyrl_cli.chaos import in_container
from polyrl_cli.chaos.faults import SLOW_PERIOD_S, Fault
from polyrl_cli.chaos.kinds import ChaosAction, Direction, Target
from polyrl_cli.remote.chaos import PodWorker, injection_command

DEADLINE_S = 60.0
POLL_S = 0.01
FAULT_S = 3.0
"""Of a fault that ends by itself: it is seen even when who begins it, suffers it or watches is starved for a moment."""
LONG_S = 600.0
"""Beyond the end of any test."""

# An engine that says when it goes on: a line waits for a reader who is starved, a state that was missed does not.
ENGINE = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
while signal.sigwait({signal.SIGCONT}): print("continued", flush=True)
"""
# The real worker is process 1, which inherits what its orphans leave; PR_SET_CHILD_SUBREAPER makes this one the same.
WORKER = f"""
import ctypes, signal, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
def show(number, _): print("got", number, flush=True)
for number in ({PARTITION:d}, {HEAL:d}): signal.signal(number, show)
child = subprocess.Popen([sys.executable, "-c", {ENGINE!r}])
print(child.pid, flush=True)
while True: signal.pause()
"""


@dataclass
class Rig:
    """A worker and the commands that were run on it."""

    argv: tuple[str, ...]
    process: asyncio.subprocess.Process
    engine: psutil.Process
    folder: Path
    commands: list[asyncio.subprocess.Process] = field(default_factory=list)

    def fault(self, action: ChaosAction, target: Target = Target.ENGINE, **more: Any) -> Fault:
        numbers: dict[str, Any] = {"seconds": FAULT_S, "speed": 0.2} | more
        return Fault(action=action, target=target, victim="job-r-1", role=Role.ROLLOUT, **numbers)

    async def begin(self, action: ChaosAction, target: Target = Target.ENGINE, **more: Any) -> str:
        """Runs a command, and returns its answer; it may go on."""
        seen = ObservedWorker("job-r-1", Role.ROLLOUT, uid="uid", phase=WorkerPhase.RUNNING, started_at=0.0)
        worker = PodWorker(seen, "job-r-1", uid="uid", container="rollout", argv=self.argv)
        command = injection_command(worker, self.fault(action, target, **more))
        environment = os.environ | {"TMPDIR": str(self.folder)}
        command = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self.commands.append(command)
        assert command.stdout is not None
        return (await asyncio.wait_for(command.stdout.readline(), DEADLINE_S)).decode().strip()

    def stopped(self) -> bool:
        return self.engine.status() == psutil.STATUS_STOPPED

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """The kernel tells nobody that a process was stopped, so this looks."""
        loop = asyncio.get_running_loop()
        end = loop.time() + DEADLINE_S
        while not holds():
            assert loop.time() < end, f"no {what}"
            await asyncio.sleep(POLL_S)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)).decode().strip()

    def keepers(self) -> list[psutil.Process]:
        """Processes of commands, below them or left to the worker."""
        parents = [self.process.pid, *(command.pid for command in self.commands)]
        below = [child for child in psutil.process_iter() if _parent(child) in parents]
        return [one for one in below if in_container.LOCK in "".join(in_container.command_line(one))]


def _parent(child: psutil.Process) -> int:
    try:
        return child.ppid()
    except psutil.NoSuchProcess:
        return -1


@asynccontextmanager
async def rig_in(folder: Path) -> AsyncIterator[Rig]:
    argv = (sys.executable, "-c", f"{WORKER}# {uuid.uuid4().hex}")
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), DEADLINE_S))
    rig = Rig(argv, process, psutil.Process(pid), folder)
    try:
        yield rig
    finally:
        for one in (*rig.keepers(), rig.engine):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        for child in (*rig.commands, process):
            if child.returncode is None:
                child.kill()
            await child.wait()
        await asyncio.wait_for(process.stdout.read(), DEADLINE_S)  # to its end: the engine had it too


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_in(tmp_path) as rig:
        yield rig


async def test_a_frozen_engine_is_awake_again(rig: Rig) -> None:
    assert await rig.begin(ChaosAction.FREEZE) == in_container.DONE
    await rig.until(rig.stopped, "freeze")
    assert psutil.Process(rig.process.pid).status() != psutil.STATUS_STOPPED
    await rig.until(lambda: not rig.stopped(), "thaw")
    assert await asyncio.wait_for(rig.commands[0].wait(), DEADLINE_S) == 0
    assert not rig.keepers(), "and leaves nobody"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_the_thaw_comes_whoever_ends_the_command(rig: Rig, how: signal.Signals) -> None:
    """As a runtime may, when the connection through which it was asked is gone."""
    assert await rig.begin(ChaosAction.FREEZE) == in_container.DONE
    await rig.until(rig.stopped, "freeze")
    rig.commands[0].send_signal(how)
    await asyncio.wait_for(rig.commands[0].wait(), DEADLINE_S)
    await rig.until(lambda: not rig.stopped(), "thaw")


async def test_the_thaw_comes_when_nobody_listens_any_more(rig: Rig) -> None:
    assert await rig.begin(ChaosAction.FREEZE) == in_container.DONE
    command = rig.commands[0]
    assert command.stdin is not None
    command.stdin.close()
    command._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
    await rig.until(rig.stopped, "freeze")
    await rig.until(lambda: not rig.stopped(), "thaw")
    assert await asyncio.wait_for(command.wait(), DEADLINE_S) == 0


async def test_a_keeper_is_not_talked_out_of_it(rig: Rig) -> None:
    assert await rig.begin(ChaosAction.FREEZE) == in_container.DONE
    (keeper,) = rig.keepers()
    for number in in_container.IGNORED:
        keeper.send_signal(number)
    await rig.until(rig.stopped, "freeze")
    await rig.until(lambda: not rig.stopped(), "thaw")


async def test_slow_stops_and_continues_in_turn_and_not_its_own_keeper(rig: Rig) -> None:
    assert await rig.begin(ChaosAction.SLOW, seconds=16 * SLOW_PERIOD_S) == in_container.DONE
    rig.commands[0].kill()
    await rig.until(rig.stopped, "stop")
    assert [await rig.line() for _ in range(3)] == ["continued"] * 3
    await rig.until(lambda: not rig.keepers(), "end of the keeper")
    assert not rig.stopped()


async def test_one_fault_lasts_at_a_time_and_a_frozen_engine_can_be_killed(rig: Rig) -> None:
    assert await rig.begin(ChaosAction.FREEZE, seconds=LONG_S) == in_container.DONE
    assert await rig.begin(ChaosAction.SLOW) == in_container.BUSY
    assert await rig.begin(ChaosAction.PARTITION, Target.AGENT) == in_container.BUSY
    assert await rig.begin(ChaosAction.KILL) == in_container.DONE
    await rig.until(lambda: rig.engine.status() == psutil.STATUS_ZOMBIE, "end of the engine")
    assert rig.process.returncode is None
    assert await rig.begin(ChaosAction.KILL) == in_container.GONE


async def test_a_partition_signals_the_worker_and_nobody_below(rig: Rig) -> None:
    assert await rig.begin(ChaosAction.PARTITION, Target.AGENT) == in_container.DONE
    assert [await rig.line(), await rig.line()] == [f"got {PARTITION:d}", f"got {HEAL:d}"]
    assert rig.engine.is_running()


async def test_a_worker_that_does_not_listen_is_left_alone(rig: Rig) -> None:
    answer = await rig.begin(ChaosAction.PARTITION, Target.AGENT, direction=Direction.IN)
    assert answer == in_container.DEAF, f"it has no handler for {PARTITION_IN}"
    assert rig.process.returncode is None


async def test_nobody_is_hit_where_no_worker_is(rig: Rig) -> None:
    rig.process.kill()
    await rig.until(lambda: rig.process.returncode is not None, "end of the worker")
    assert await rig.begin(ChaosAction.FREEZE) == in_container.GONE
    assert not rig.stopped()
