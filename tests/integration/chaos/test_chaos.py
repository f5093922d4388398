"""Faults on real processes: each does what it says, is undone, and hits nobody else; and how the runner is asked."""

from __future__ import annotations

import asyncio
import itertools
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyrl.errors import UserError
from polyrl.local.planner import WorkerPhase
from polyrl.partition_signals import HEAL, PARTITION, PARTITION_IN, PARTITION_OUT
from polyrl.worker import Role, Worker
from polyrl_cli.chaos.faults import Fault, FaultRequest
from polyrl_cli.chaos.kinds import ChaosAction, Direction, Target
from polyrl_cli.local.chaos import FaultInjector, ask_runner, listening
from polyrl_cli.local.process_fleet import ProcessFleet

DEADLINE_S = 60.0
POLL_S = 0.01
FAULT_S = 3.0
"""Of a fault that ends by itself: a victim that is starved for a moment still handles its beginning before its end."""
LONG_S = 600.0
"""Beyond the end of any test."""
TURNS = 10
"""Changes between stopped and not, enough to tell the share of each."""

AGENT = f"""
import signal, subprocess, sys
def show(number, _): print("got", number, flush=True)
for number in ({PARTITION:d}, {PARTITION_IN:d}, {PARTITION_OUT:d}): signal.signal(number, show)
signal.signal({HEAL:d}, show)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({LONG_S})"])
print(child.pid, flush=True)
while True: signal.pause()
"""


class Rig:
    """One agent with an engine below it, both asleep."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "rollout-0.log"
        self.fleet = ProcessFleet(folder)
        self.injector = FaultInjector(self.fleet)

    async def start(self) -> None:
        await self.fleet.start(Worker("rollout-0", Role.ROLLOUT, argv=(sys.executable, "-c", AGENT)))
        await self.until(lambda: self.log.exists() and "\n" in self.log.read_text(), "engine")
        self.engine = psutil.Process(int(self.log.read_text().splitlines()[0]))
        self.agent = psutil.Process(self.engine.ppid())

    async def inject(self, action: ChaosAction, target: Target = Target.AGENT, **more: Any) -> None:
        numbers: dict[str, Any] = {"seconds": FAULT_S, "speed": 0.2} | more
        fault = Fault(action=action, target=target, victim="rollout-0", role=Role.ROLLOUT, **numbers)
        self.injector.check(fault)
        await self.injector.inject(fault)

    def stopped(self) -> tuple[bool, bool]:
        """Whether the agent is, and its engine."""
        return self.agent.status() == psutil.STATUS_STOPPED, self.engine.status() == psutil.STATUS_STOPPED

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """The kernel tells nobody that a process was stopped, so this looks."""
        end = self.fleet.now() + DEADLINE_S
        while not holds():
            assert self.fleet.now() < end, f"no {what}"
            await asyncio.sleep(POLL_S)

    def may(self, action: ChaosAction) -> bool:
        try:
            self.injector.check(Fault(action=action, target=Target.AGENT, victim="rollout-0", role=Role.ROLLOUT))
        except UserError:
            return False
        return True

    async def gone(self) -> int | None:
        while True:
            (seen,) = await self.fleet.list()
            if seen.phase is WorkerPhase.EXITED:
                return seen.exit_code
            assert await self.fleet.changed(DEADLINE_S)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    await rig.start()
    yield rig
    await rig.injector.close()
    await rig.fleet.close()


@pytest.mark.parametrize(("target", "stopped"), [(Target.AGENT, (True, True)), (Target.ENGINE, (False, True))])
async def test_frozen_and_awake_again(rig: Rig, target: Target, stopped: tuple[bool, bool]) -> None:
    await rig.inject(ChaosAction.FREEZE, target)
    await rig.until(lambda: rig.stopped() == stopped, "the freeze")
    await rig.until(lambda: rig.stopped() == (False, False), "the thaw")
    await rig.until(lambda: rig.may(ChaosAction.FREEZE), "leave for another fault")


async def test_slow_is_stopped_for_its_share_of_the_time(rig: Rig) -> None:
    await rig.inject(ChaosAction.SLOW, seconds=LONG_S, speed=0.3)
    observed: list[bool] = []

    def has_turned() -> bool:
        observed.append(rig.stopped()[0])
        return sum(first != second for first, second in itertools.pairwise(observed)) >= TURNS

    await rig.until(has_turned, "stopping and continuing in turn")
    assert 0.3 < sum(observed) / len(observed) < 0.95
    await rig.injector.close()
    await rig.until(lambda: rig.stopped() == (False, False), "the end")


async def test_a_killed_engine_leaves_its_agent(rig: Rig) -> None:
    await rig.inject(ChaosAction.KILL, Target.ENGINE)
    await rig.until(lambda: rig.engine.status() == psutil.STATUS_ZOMBIE, "the engine's end")
    assert rig.agent.is_running()
    assert not rig.stopped()[0]


async def test_a_killed_agent_takes_its_engine_along(rig: Rig) -> None:
    await rig.inject(ChaosAction.KILL)
    assert await rig.gone() == -9
    psutil.wait_procs([rig.engine], timeout=DEADLINE_S)
    assert not rig.engine.is_running() or rig.engine.status() == psutil.STATUS_ZOMBIE


async def test_a_preempted_agent_gets_its_notice(rig: Rig) -> None:
    await rig.inject(ChaosAction.PREEMPT, seconds=LONG_S)
    (seen,) = await rig.fleet.list()
    assert seen.reclaim is not None
    assert await rig.gone() == -15


@pytest.mark.parametrize(
    ("direction", "number"),
    [
        (Direction.BOTH, PARTITION),
        (Direction.IN, PARTITION_IN),
        (Direction.OUT, PARTITION_OUT),
    ],
)
async def test_a_partition_signals_the_agent_and_nobody_below(rig: Rig, direction: Direction, number: int) -> None:
    await rig.inject(ChaosAction.PARTITION, direction=direction)
    await rig.until(lambda: rig.may(ChaosAction.PARTITION), "its end")
    await rig.until(lambda: rig.log.read_text().count("\n") >= 3, "both signals")
    assert rig.log.read_text().splitlines()[1:] == [f"got {number:d}", f"got {HEAL:d}"]
    assert rig.engine.is_running()


async def test_a_frozen_one_cannot_be_slowed_too_but_killed(rig: Rig) -> None:
    await rig.inject(ChaosAction.FREEZE, seconds=LONG_S)
    await rig.until(lambda: rig.stopped() == (True, True), "the freeze")
    with pytest.raises(UserError, match="another fault lasts there"):
        await rig.inject(ChaosAction.SLOW)
    await rig.inject(ChaosAction.KILL)
    assert await rig.gone() == -9


async def test_what_lasts_is_undone_when_the_run_ends(rig: Rig) -> None:
    await rig.inject(ChaosAction.FREEZE, seconds=LONG_S)
    await rig.until(lambda: rig.stopped() == (True, True), "the freeze")
    await rig.injector.close()
    await rig.until(lambda: rig.stopped() == (False, False), "the thaw")


async def test_where_no_process_lives_nothing_is_hit(rig: Rig) -> None:
    rig.engine.kill()
    await rig.until(lambda: rig.engine.status() == psutil.STATUS_ZOMBIE, "the engine's end")
    os.kill(rig.agent.pid, 9)
    await rig.gone()
    for target in (Target.AGENT, Target.ENGINE):
        with pytest.raises(UserError, match=f"rollout-0: no {target} process lives there"):
            await rig.inject(ChaosAction.KILL, target)


# --- the control socket ----------------------------------------------------------------------------------------------

REQUEST = FaultRequest(action=ChaosAction.KILL)


async def handle(request: FaultRequest) -> str:
    if request.worker:
        raise UserError(f"nobody is called {request.worker}")
    return f"{request.action} with seed {request.seed}"


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    """Longer than the 107 bytes that a Unix socket's address takes."""
    folder = tmp_path / ("long" * 40) / "run"
    folder.mkdir(parents=True)
    return folder / "control.sock"


async def test_the_runner_is_asked_and_answers(socket_path: Path) -> None:
    async with listening(socket_path, handle):
        assert stat.S_IMODE(os.lstat(socket_path).st_mode) == 0o600
        assert await ask_runner(socket_path, FaultRequest(action=ChaosAction.KILL, seed=7)) == "kill with seed 7"
        with pytest.raises(UserError, match="nobody is called x"):
            await ask_runner(socket_path, FaultRequest(action=ChaosAction.KILL, worker="x"))
    assert socket_path.name not in os.listdir(socket_path.parent)


@pytest.mark.parametrize("state", ["never began", "has ended", "was killed"])
async def test_a_run_that_is_not_live_is_a_sentence(socket_path: Path, state: str) -> None:
    if state != "never began":
        async with listening(socket_path, handle):
            left = socket_path.with_suffix(".left")
            os.link(socket_path, left)
        if state == "was killed":
            left.rename(socket_path)
    with pytest.raises(UserError, match="no `polyrl run` is at work there, so nothing can be done to it"):
        await ask_runner(socket_path, REQUEST)


async def test_a_successor_listens_where_a_killed_runner_did(socket_path: Path) -> None:
    async with listening(socket_path, handle):
        os.link(socket_path, socket_path.with_suffix(".left"))
    socket_path.with_suffix(".left").rename(socket_path)
    async with listening(socket_path, handle):
        assert await ask_runner(socket_path, REQUEST) == "kill with seed 0"


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b'{"action": "hug"}\n', b"\xff\xfe\n", b"x" * 100_000 + b"\n", b"[" * 50_000 + b"\n"]
)
async def test_nonsense_is_refused_and_the_runner_goes_on(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "control.sock"
    async with listening(path, handle):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()
        assert b"the runner does not understand the request" in answer
        assert await ask_runner(path, REQUEST) == "kill with seed 0"
