"""What every fleet must do, asked of the fake and of real processes alike."""

import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from polyrl.local.planner import ObservedWorker, WorkerPhase
from polyrl.testing.fake_fleet import FakeFleet
from polyrl.worker import Role, Worker
from polyrl_cli.chaos.kinds import Part
from polyrl_cli.local.process_fleet import ProcessFleet

DEADLINE_S = 20.0
GRACE_S = 5.0

ENDS_ON_SIGTERM = "import time; time.sleep(600)"
IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
STARTS_A_CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)"
)
SUPERVISES = (
    "import asyncio, sys\n"
    "from polyrl_rollout.engines.child import ChildProcess\n"
    "async def main():\n"
    "    await ChildProcess.start(['sh', '-c', 'setsid sleep 600 & sleep 600 & echo $!; exec sleep 600'])\n"
    "    await asyncio.sleep(600)\n"
    "asyncio.run(main())"
)

Fleet = FakeFleet | ProcessFleet


def a_worker(name: str = "rollout-0", code: str = ENDS_ON_SIGTERM) -> Worker:
    return Worker(name, Role.ROLLOUT, argv=(sys.executable, "-c", code))


@pytest.fixture(params=["fake", "process"])
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fleet]:
    if request.param == "fake":
        yield FakeFleet()
        return
    processes = ProcessFleet(tmp_path)
    yield processes
    await processes.close()


async def until(fleet: Fleet, name: str, holds: Callable[[ObservedWorker], bool]) -> list[ObservedWorker]:
    """Every distinct fact about `name` up to the first that `holds`."""
    seen: list[ObservedWorker] = []
    deadline = fleet.now() + DEADLINE_S
    while fleet.now() < deadline:
        now = next(one for one in await fleet.list() if one.name == name)
        if not seen or seen[-1] != now:
            seen.append(now)
        if holds(now):
            return seen
        await fleet.changed(deadline - fleet.now())
    raise AssertionError(f"{name} never came to it: {seen}")


def runs(seen: ObservedWorker) -> bool:
    return seen.phase is WorkerPhase.RUNNING


def has_exited(seen: ObservedWorker) -> bool:
    return seen.phase is WorkerPhase.EXITED


async def test_phases_come_in_order(fleet: Fleet) -> None:
    await fleet.start(a_worker())
    seen = await until(fleet, "rollout-0", runs)
    await fleet.stop("rollout-0", GRACE_S)
    seen += await until(fleet, "rollout-0", has_exited)
    order = [WorkerPhase.STARTING, WorkerPhase.RUNNING, WorkerPhase.STOPPING, WorkerPhase.EXITED]
    positions = [order.index(one.phase) for one in seen]
    assert positions == sorted(positions)
    assert len({one.uid for one in seen}) == 1
    assert seen[-1].exit_code == -15
    assert seen[-1].exited_at is not None
    assert seen[-1].exited_at >= seen[-1].started_at


async def test_start_is_idempotent_by_name_even_after_the_exit(fleet: Fleet) -> None:
    await fleet.start(a_worker())
    await fleet.start(a_worker())
    await until(fleet, "rollout-0", runs)
    await fleet.kill("rollout-0")
    first = (await until(fleet, "rollout-0", has_exited))[-1]
    await fleet.start(a_worker())
    assert await fleet.list() == [first]


async def test_a_worker_that_is_gone_or_never_was_can_be_stopped(fleet: Fleet) -> None:
    for ending in (
        lambda: fleet.stop("nobody", GRACE_S),
        lambda: fleet.kill("nobody"),
        lambda: fleet.reclaim("nobody", 0),
    ):
        await ending()
    await fleet.start(a_worker())
    await until(fleet, "rollout-0", runs)
    await fleet.kill("rollout-0")
    gone = (await until(fleet, "rollout-0", has_exited))[-1]
    await fleet.stop("rollout-0", GRACE_S)
    await fleet.kill("rollout-0")
    await fleet.reclaim("rollout-0", 1)
    assert await fleet.list() == [gone]


async def test_kill_is_a_kill(fleet: Fleet) -> None:
    await fleet.start(a_worker())
    await until(fleet, "rollout-0", runs)
    await fleet.kill("rollout-0")
    gone = (await until(fleet, "rollout-0", has_exited))[-1]
    assert gone.exit_code == -9
    assert gone.reclaim is None


@pytest.mark.parametrize("notice_s", [0.0, 3.0])
async def test_a_reclaimed_worker_says_so_at_once_and_for_ever(fleet: Fleet, notice_s: float) -> None:
    await fleet.start(a_worker())
    await until(fleet, "rollout-0", runs)
    before = fleet.now()
    await fleet.reclaim("rollout-0", notice_s)
    (now,) = await fleet.list()
    assert now.reclaim is not None
    assert before + notice_s <= now.reclaim.deadline <= fleet.now() + notice_s
    assert not now.counts
    gone = (await until(fleet, "rollout-0", has_exited))[-1]
    assert gone.reclaim == now.reclaim
    assert gone.exit_code == (-9 if notice_s == 0 else -15)


async def test_changed_waits_for_news_and_no_longer_than_asked(fleet: Fleet) -> None:
    assert not await fleet.changed(0.05)
    await fleet.start(a_worker())
    assert await fleet.changed(DEADLINE_S)
    await until(fleet, "rollout-0", runs)
    began = fleet.now()
    assert not await fleet.changed(0.2)
    assert fleet.now() - began >= 0.2 - 0.01


async def test_exited_workers_stay_listed_oldest_first(fleet: Fleet) -> None:
    names = [f"rollout-{number}" for number in range(3)]
    for name in names:
        await fleet.start(a_worker(name))
    await until(fleet, "rollout-1", runs)
    await fleet.kill("rollout-1")
    await until(fleet, "rollout-1", has_exited)
    assert [seen.name for seen in await fleet.list()] == names


# --- what only processes can show -------------------------------------------------------------------------------------


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[ProcessFleet]:
    fleet = ProcessFleet(tmp_path)
    yield fleet
    await fleet.close()


async def log_line(read: Callable[[], str], fleet: ProcessFleet) -> str:
    """The first whole line of a worker's log."""
    deadline = fleet.now() + DEADLINE_S
    while "\n" not in read():
        assert fleet.now() < deadline, "the worker never wrote its line"
        await fleet.changed(0.05)
    return read().splitlines()[0]


async def test_a_deaf_worker_is_ended_when_its_grace_is_over(processes: ProcessFleet, tmp_path: Path) -> None:
    await processes.start(a_worker(code=IGNORES_TERM))
    log = tmp_path / "rollout-0.log"
    await log_line(log.read_text, processes)
    await processes.stop("rollout-0", 600)
    assert (await until(processes, "rollout-0", lambda seen: seen.phase is WorkerPhase.STOPPING))[-1].lives
    await processes.stop("rollout-0", 0.2)
    assert (await until(processes, "rollout-0", has_exited))[-1].exit_code == -9


@pytest.mark.parametrize("ending", ["kill", "stop", "crash"])
async def test_no_child_outlives_its_worker(processes: ProcessFleet, tmp_path: Path, ending: str) -> None:
    await processes.start(a_worker(code=STARTS_A_CHILD))
    child = psutil.Process(int(await log_line((tmp_path / "rollout-0.log").read_text, processes)))
    endings: dict[str, Callable[[], Awaitable[None]]] = {
        "kill": lambda: processes.kill("rollout-0"),
        "stop": lambda: processes.stop("rollout-0", GRACE_S),
        "crash": lambda: crash(child.parent()),
    }
    await endings[ending]()
    await until(processes, "rollout-0", has_exited)
    psutil.wait_procs([child], timeout=DEADLINE_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_a_worker_is_gone_when_all_that_it_started_is(processes: ProcessFleet, tmp_path: Path) -> None:
    """Its GPUs' memory is taken until then, and the next one would be given them."""
    child = "import os, time; os.setpgid(0, 0); print(os.getpid(), flush=True); time.sleep(1)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); import time; time.sleep(600)"
    await processes.start(a_worker(code=code))
    slow = psutil.Process(int(await log_line((tmp_path / "rollout-0.log").read_text, processes)))
    await processes.kill("rollout-0")
    await until(processes, "rollout-0", has_exited)
    assert not slow.is_running() or slow.status() == psutil.STATUS_ZOMBIE


async def crash(process: psutil.Process | None) -> None:
    assert process is not None
    process.kill()


def supervising() -> psutil.Process:
    """The worker that runs SUPERVISES, among children that have ended and that nobody has waited for yet."""
    for one in psutil.Process().children():
        with suppress(psutil.ZombieProcess):
            if SUPERVISES in one.cmdline():
                return one
    raise AssertionError("it is not there")


async def test_what_a_frozen_worker_supervises_ends_with_it(processes: ProcessFleet, tmp_path: Path) -> None:
    """Its supervisor, frozen too, is not of its group; the kernel has it go on."""
    await processes.start(a_worker(code=SUPERVISES))
    await log_line((tmp_path / "rollout-0.log").read_text, processes)
    assert processes.signal("rollout-0", Part.ALL, 0) == 5
    below = supervising().children(recursive=True)
    try:
        assert processes.signal("rollout-0", Part.ALL, signal.SIGSTOP) == 5
        await processes.kill("rollout-0")
        _, left = psutil.wait_procs(below, timeout=DEADLINE_S)
        assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()


async def test_a_program_that_is_not_there_is_an_exit_with_a_log(processes: ProcessFleet, tmp_path: Path) -> None:
    await processes.start(Worker("rollout-0", Role.ROLLOUT, argv=("/nowhere/python",)))
    (seen,) = await processes.list()
    assert (seen.phase, seen.exit_code) == (WorkerPhase.EXITED, 127)
    assert "/nowhere/python" in (tmp_path / "rollout-0.log").read_text()


async def test_workers_inherit_no_secrets(
    processes: ProcessFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "secret")
    code = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
    await processes.start(
        Worker("rollout-0", Role.ROLLOUT, argv=(sys.executable, "-c", code), env={"OMP_NUM_THREADS": "1"})
    )
    printed = await log_line((tmp_path / "rollout-0.log").read_text, processes)
    assert "SOME_API_TOKEN" not in printed
    assert '"OMP_NUM_THREADS": "1"' in printed
    assert '"PYTHONSAFEPATH": "1"' in printed


async def test_workers_inherit_where_sglang_is_and_what_is_set_for_it(
    processes: ProcessFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = {"POLYRL_SGLANG_PYTHON": "/opt/sglang/bin/python", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    for name, value in meant.items():
        monkeypatch.setenv(name, value)
    code = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
    await processes.start(Worker("rollout-0", Role.ROLLOUT, argv=(sys.executable, "-c", code)))
    printed = await log_line((tmp_path / "rollout-0.log").read_text, processes)
    assert meant.items() <= json.loads(printed).items()
