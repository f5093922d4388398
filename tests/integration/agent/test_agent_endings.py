"""How the agent's process ends, and an engine's: with its parent, with all that it started, at once on wrong input."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from polyrl.forks import ForkServer
from polyrl.parent_death_signal import PARENT_PID
from polyrl_operator.secret import write_run_keys
from polyrl_rollout import supervise
from polyrl_rollout.engines import child
from polyrl_rollout.engines.child import ChildProcess
from polyrl_rollout.supervise import EXIT_NOT_FOUND

DEADLINE_S = 60.0
SLEEPS = "echo $$; exec sleep 600"
DEEP = f"setsid sh -c '{SLEEPS}' & sh -c 'trap \"\" TERM; {SLEEPS}' & {SLEEPS}"
"""One of its own session, one that would outlive a SIGTERM, and their parent: each prints its process id."""
STARTS = """
import os, subprocess, sys, time
os.write(int(sys.argv[1]), str(subprocess.Popen(["setsid", "sleep", "600"]).pid).encode())
time.sleep(600)
"""
PTRACE_SEIZE = 0x4206
PARENT = """
import asyncio, signal, sys
from polyrl_rollout.engines.child import ChildProcess

signal.signal(signal.SIGINT, lambda *_: print("notice", flush=True))
for number in (signal.SIGHUP, signal.SIGQUIT):  # ignored under nohup, and in the background of a script
    signal.signal(number, signal.SIG_DFL)

async def main():
    child = await ChildProcess.start(sys.argv[1:])
    print(child.pid, flush=True)
    if await asyncio.to_thread(sys.stdin.readline) == "kill\\n":
        await child.kill()
        print("killed", child.returncode, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@dataclass
class Started:
    """A parent of `DEEP`, whose printed ids come on its standard error."""

    parent: asyncio.subprocess.Process
    supervisor: int
    below: list[int]


@contextlib.asynccontextmanager
async def started(script: str, count: int) -> AsyncGenerator[Started]:
    """A parent that supervises `script`, of which `count` processes have printed their ids. Ends them all."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    argv = [sys.executable, "-c", PARENT, "sh", "-c", script]
    parent = await asyncio.create_subprocess_exec(*argv, **pipes, start_new_session=True)
    assert parent.stdout is not None
    assert parent.stderr is not None
    ids = [parent.pid]
    try:
        async with asyncio.timeout(DEADLINE_S):
            supervisor = int(await parent.stdout.readline())
            below = [int(await parent.stderr.readline()) for _ in range(count)]
            ids += [supervisor, *below]
        yield Started(parent, supervisor, below)
    finally:
        for pid in ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await parent.wait()


async def gone(parent: asyncio.subprocess.Process) -> None:
    """Returns when nobody holds the pipe any more that all below `parent` print to."""
    assert parent.stderr is not None
    assert await asyncio.wait_for(parent.stderr.read(), DEADLINE_S) == b""


async def ended(pids: list[int]) -> None:
    """Returns when none of them runs; nobody may have waited for them."""
    until_s = time.monotonic() + DEADLINE_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < until_s, "it lives on"
        await asyncio.sleep(0.01)


async def test_all_that_a_program_started_ends_when_its_parent_is_killed() -> None:
    async with started(DEEP, 3) as deep:
        for pid in deep.below:
            os.kill(pid, 0)
        deep.parent.kill()
        await gone(deep.parent)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL])
async def test_all_that_a_program_started_ends_when_its_parent_s_group_does(number: signal.Signals) -> None:
    """Its terminal was closed, or its fleet ends it: what was to end the others ended first."""
    async with started(DEEP, 3) as deep:
        os.killpg(deep.parent.pid, number)
        await gone(deep.parent)


async def test_an_interrupt_by_a_terminal_is_its_parent_s_to_heed() -> None:
    """To an agent it is a notice: it had no engine left to finish with."""
    async with started(SLEEPS, 1) as one:
        assert one.parent.stdin is not None
        assert one.parent.stdout is not None
        os.killpg(one.parent.pid, signal.SIGINT)
        assert await asyncio.wait_for(one.parent.stdout.readline(), DEADLINE_S) == b"notice\n"
        one.parent.stdin.write(b"kill\n")
        assert await asyncio.wait_for(one.parent.stdout.readline(), DEADLINE_S) == b"killed -15\n"


async def test_all_that_a_program_started_ends_with_it() -> None:
    async with started(DEEP, 3) as deep:
        program = next(one for one in psutil.Process(deep.supervisor).children() if one.pid in deep.below)
        program.kill()
        await ended([deep.supervisor, *deep.below])


async def test_killing_it_kills_all_below_and_tells_by_what() -> None:
    async with started(DEEP, 3) as deep:
        assert deep.parent.stdin is not None
        assert deep.parent.stdout is not None
        deep.parent.stdin.write(b"kill\n")
        assert await asyncio.wait_for(deep.parent.stdout.readline(), DEADLINE_S) == b"killed -15\n"
        assert [pid for pid in deep.below if psutil.pid_exists(pid)] == []


async def test_killing_one_that_stands_still_kills_all_below() -> None:
    """An engine that was frozen with all its processes: only its server ended, and late."""
    async with started(DEEP, 3) as deep:
        assert deep.parent.stdin is not None
        assert deep.parent.stdout is not None
        for pid in (deep.supervisor, *deep.below):
            os.kill(pid, signal.SIGSTOP)
        deep.parent.stdin.write(b"kill\n")
        assert await asyncio.wait_for(deep.parent.stdout.readline(), DEADLINE_S) == b"killed -15\n"
        await ended(deep.below)


async def test_what_starts_others_is_supervised_beside_a_fork_server_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    forks = ForkServer.start([], os.environ)
    monkeypatch.setattr(child, "own_server", lambda: forks)
    reads, writes = os.pipe()
    program = await ChildProcess.start([sys.executable, "-m", "starts", str(writes)], pass_fds=[writes])
    os.close(writes)
    try:
        below = int(await asyncio.wait_for(asyncio.to_thread(os.read, reads, 64), DEADLINE_S))
        await program.kill()
        await ended([below])
    finally:
        forks.close()
        os.close(reads)


def test_one_that_cannot_be_ended_is_named_and_waited_for_no_longer() -> None:
    """As one that hangs in a driver; here its end is its tracer's to see, which does not look."""
    script = "sleep 600 & echo $!; read line; exit 5"
    brief = "import sys; from polyrl_rollout import supervise; supervise.KILLED_S = 0.5; supervise.main(sys.argv[1:])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", brief, "--", "sh", "-c", script], text=True, **pipes) as one:
        assert one.stdout is not None
        stuck = int(one.stdout.readline())
        assert ctypes.CDLL(None).ptrace(PTRACE_SEIZE, stuck, 0, 0) == 0
        try:
            _, errors = one.communicate("\n", DEADLINE_S)
        finally:
            one.kill()
            os.waitpid(stuck, 0)
    assert one.returncode == 5
    assert errors == f"still there 0.5 s after they were killed: [{stuck}]\n"


def test_a_program_has_the_signals_of_one_that_nobody_supervises() -> None:
    """Python ignores two, which who is executed by it would inherit: a writer went on when its reader was gone."""
    argv = [sys.executable, "-m", supervise.__name__, "--", "grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    direct = subprocess.run(argv[4:], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert ended.stdout == direct.stdout


async def test_a_killed_supervisor_takes_the_program_along() -> None:
    async with started(SLEEPS, 1) as one:
        os.kill(one.supervisor, signal.SIGKILL)
        await ended(one.below)


def test_ends_are_seen_where_whoever_started_it_ignores_those_of_children() -> None:
    """Which a process inherits, and which would have the kernel forget them."""
    argv = ["env", "--ignore-signal=CHLD", sys.executable, "-m", supervise.__name__]
    ended = subprocess.run([*argv, "--", "sh", "-c", "exit 3"], capture_output=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 3, ended.stderr


async def test_what_a_program_was_passed_is_its_own() -> None:
    """Who reads from the other end must notice when the program has ended."""
    reads, writes = os.pipe()
    closes = f"import os, time; os.close({writes}); time.sleep(600)"
    program = await ChildProcess.start([sys.executable, "-c", closes], pass_fds=[writes])
    try:
        os.close(writes)
        assert await asyncio.wait_for(asyncio.to_thread(os.read, reads, 1), DEADLINE_S) == b""
    finally:
        await program.kill()
        os.close(reads)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param("exit 0", 0, id="well"),
        pytest.param("exit 3", 3, id="with a status"),
        pytest.param("kill -9 $$", -9, id="killed"),
        pytest.param("kill -11 $$", -11, id="by a fault"),
        pytest.param("kill -15 $$", -15, id="terminated"),
        pytest.param("sleep 600 & exit 4", 4, id="before what it started"),
    ],
)
def test_a_supervisor_ends_as_its_program_does(script: str, code: int) -> None:
    argv = [sys.executable, "-m", supervise.__name__, "--", "sh", "-c", script]
    # Its pipes close when the last process that holds them is gone.
    assert subprocess.run(argv, capture_output=True, timeout=DEADLINE_S, check=False).returncode == code


def test_a_program_whose_parent_is_gone_already_is_not_started() -> None:
    env = {**os.environ, PARENT_PID: "1"}
    argv = [sys.executable, "-m", "polyrl_rollout.supervise", "--", "echo", "started"]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""


def test_a_program_that_does_not_exist() -> None:
    argv = [sys.executable, "-m", "polyrl_rollout.supervise", "--", "no-such-program"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == EXIT_NOT_FOUND
    assert ended.stderr == "no-such-program: No such file or directory\n"


@pytest.mark.parametrize(
    ("job", "words"),
    [(None, "job.json: cannot read the job: No such file"), ("{}", "job.json: apiVersion: Field required")],
)
def test_wrong_files_end_the_agent_with_one_sentence(tmp_path: Path, job: str | None, words: str) -> None:
    write_run_keys(tmp_path / "keys")
    if job is not None:
        (tmp_path / "job.json").write_text(job)
    argv = [sys.executable, "-m", "polyrl_rollout.agent", "--job", str(tmp_path / "job.json"), "--epoch", "1"]
    argv += ["--keys", str(tmp_path / "keys/agent.key"), "--engine-name", "e", "--pool", "spot"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
