"""What is forked is what it would be if it had been spawned: real processes, one module each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyrl.forks import Forked, ForkServer, OutputFiles, client
from polyrl.parent_death_signal import PARENT_PID
from polyrl.testing.started import words_of

DEADLINE_S = 30.0
pytestmark = pytest.mark.timeout(150)  # more than a silent server is waited for
MODULES = {
    "tells": """
        import json, os, signal, sys
        print(json.dumps({
            "arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid(),
            "session": os.getsid(0), "umask": os.umask(0), "files": sorted(map(int, os.listdir("/proc/self/fd"))),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "name": __name__,
        }))
    """,
    "ends": "import sys\nsys.exit(int(sys.argv[1]))",
    "fails": "raise ValueError('as it says')",
    "sleeps": "import time\ntime.sleep(600)",
    "says": "import os, sys\nos.write(int(sys.argv[1]), b'said')",
    "draws": "import numpy, random\nprint(numpy.random.random(), random.random())",
    "threaded": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "has_child": """
        import os, sys, time
        from polyrl.forks import OutputFiles, own_server
        inner = own_server().fork([sys.executable, "-m", "sleeps"], os.environ, OutputFiles(1, 2))
        print(inner.pid, flush=True)
        time.sleep(600)
    """,
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        (folder / f"{name}.py").write_text("\n".join(line[indent:] for line in lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def environment(modules: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(modules)}


@pytest.fixture(scope="module")
def forks(environment: Mapping[str, str]) -> Iterator[ForkServer]:
    server = ForkServer.start(["json", "numpy.random"], environment)
    yield server
    server.close()


Run = Callable[..., Forked]


@pytest.fixture
def run(forks: ForkServer, environment: Mapping[str, str], tmp_path: Path) -> Iterator[Run]:
    """Its output is in `printed` and `complaint`."""
    forked: list[Forked] = []

    def begin(module: str, *arguments: object, more: Mapping[str, str] | None = None, **options: Any) -> Forked:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        wanted = {**environment, **(more or {})}
        assert forks.takes(command, wanted)
        with (tmp_path / "printed").open("wb") as out, (tmp_path / "complaint").open("wb") as err:
            one = forks.fork(command, wanted, OutputFiles(out.fileno(), err.fileno()), **options)
        assert one is not None
        forked.append(one)
        return one

    yield begin
    for one in forked:
        one.kill()
        one.wait(DEADLINE_S)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_it_is_as_it_was_asked_for(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    mine = {"POLYRL_MINE": "mine"}
    forked = run("tells", "--a", "b c", more=mine, folder=str(folder), own_session=True, umask=0o077)
    assert forked.wait(DEADLINE_S) == 0, (tmp_path / "complaint").read_text()
    reported = json.loads((tmp_path / "printed").read_text())
    assert reported["arguments"] == ["--a", "b c"]
    assert reported["name"] == "__main__"
    assert reported["environment"]["POLYRL_MINE"] == "mine"
    assert (reported["folder"], reported["umask"]) == (str(folder), 0o077)
    assert (reported["parent"], reported["session"]) == (os.getpid(), forked.pid)
    assert reported["files"][:3] == [0, 1, 2]
    assert len(reported["files"]) == 4, "the streams, and the listing's own"
    assert reported["interrupt"]
    assert reported["terminate"]


def test_it_has_no_variable_that_it_was_not_given(
    forks: ForkServer, environment: Mapping[str, str], tmp_path: Path
) -> None:
    """What it was loaded with may hold an account's key of somebody else."""
    fewer = {name: text for name, text in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "tells"]
    with (tmp_path / "printed").open("wb") as out:
        forked = forks.fork(command, fewer, OutputFiles(out.fileno(), 2))
    assert forked is not None
    assert forked.wait(DEADLINE_S) == 0
    assert json.loads((tmp_path / "printed").read_text())["environment"] == fewer


@pytest.mark.parametrize("code", [0, 3])
def test_its_exit_code_is_its_own(run: Run, code: int) -> None:
    forked = run("ends", code)
    assert forked.wait(DEADLINE_S) == code
    assert forked.returncode == code


def test_an_exception_is_shown_and_ends_it_with_one(run: Run, tmp_path: Path) -> None:
    assert run("fails").wait(DEADLINE_S) == 1
    assert (tmp_path / "complaint").read_text().splitlines()[-1] == "ValueError: as it says"


def test_a_signal_that_ends_it_is_known(run: Run) -> None:
    forked = run("sleeps")
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.01)
    assert forked.poll() is None
    forked.terminate()
    assert forked.wait(DEADLINE_S) == -signal.SIGTERM
    forked.kill()  # gone: nothing happens


def test_one_that_somebody_else_waited_for_has_ended_somehow(run: Run) -> None:
    forked = run("sleeps")
    psutil.Process(forked.pid).kill()
    psutil.Process(forked.pid).wait(DEADLINE_S)
    assert forked.wait(DEADLINE_S) == 255


async def test_its_end_is_awaited_beside_others(run: Run) -> None:
    forked = run("sleeps")
    ended = asyncio.create_task(forked.ended())
    await asyncio.sleep(0)
    assert not ended.done()
    forked.kill()
    async with asyncio.timeout(DEADLINE_S):
        assert await ended == -signal.SIGKILL


def test_files_that_are_passed_keep_their_numbers(run: Run) -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader:
        forked = run("says", write, passed=[write])
        os.close(write)
        assert reader.read() == b"said", "and nobody else holds it open"
    assert forked.wait(DEADLINE_S) == 0


def test_two_forks_draw_differently(run: Run, tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        assert run("draws").wait(DEADLINE_S) == 0
        drawn += (tmp_path / "printed").read_text().split()
    assert len(set(drawn)) == 4


def test_processes_are_listed_by_what_they_do(run: Run) -> None:
    forked = run("sleeps", "--as", "rollout-0")
    until(lambda: words_of(psutil.Process(forked.pid))[1:] == ["-m", "sleeps", "--as", "rollout-0"], "a title")


def test_one_that_starts_others_has_them_forked_too_and_they_end_with_it(run: Run, tmp_path: Path) -> None:
    forked = run("has_child", starts_others=True)
    until(lambda: (tmp_path / "printed").read_text().endswith("\n"), (tmp_path / "complaint").read_text())
    child = psutil.Process(int((tmp_path / "printed").read_text()))
    assert child.ppid() == forked.pid
    below = psutil.Process(forked.pid).children(recursive=True)
    forked.kill()
    forked.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(below, timeout=DEADLINE_S)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


ASKS = """
import os, sys, time
from polyrl.forks import ForkServer, OutputFiles
server = ForkServer.start([], os.environ)
print(server.fork([sys.executable, "-m", "sleeps"], os.environ, OutputFiles(1, 2), own_session=True).pid, flush=True)
time.sleep(600)
"""


def test_it_ends_when_whoever_asked_is_killed(environment: Mapping[str, str]) -> None:
    argv = [sys.executable, "-c", ASKS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=dict(environment)) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        below = psutil.Process(asker.pid).children(recursive=True)
        assert pid in [one.pid for one in below]
        assert len(below) == 2
        asker.kill()
    for one in below:
        until(lambda one=one: not lives(one.pid), f"{one} to end")


def test_a_fork_that_is_not_adopted_is_refused(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel gives its orphans to nobody else: the server is not asked again."""
    monkeypatch.setattr(client, "_ask_for_orphans", lambda wanted: None)
    forks = ForkServer.start([], environment)
    command = [sys.executable, "-m", "sleeps"]
    began = time.monotonic()
    assert forks.fork(command, environment, OutputFiles(1, 2)) is None
    assert time.monotonic() - began < client.READY_S
    assert not forks.takes(command, environment)
    forks.close()


def test_what_cannot_become_what_was_asked_for_is_refused_at_once(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    forks = ForkServer.start([], environment)
    command = [sys.executable, "-m", "sleeps"]
    began = time.monotonic()
    assert forks.fork(command, environment, OutputFiles(1, 2), folder=str(tmp_path / "gone")) is None
    assert time.monotonic() - began < client.READY_S / 2
    forks.close()


def test_what_it_forked_outlives_a_server(environment: Mapping[str, str]) -> None:
    forks = ForkServer.start([], environment)
    forked = forks.fork([sys.executable, "-m", "sleeps"], environment, OutputFiles(1, 2))
    assert forked is not None
    forks.close()
    assert forked.poll() is None
    assert not forks.takes([sys.executable, "-m", "sleeps"], environment)
    forked.kill()
    assert forked.wait(DEADLINE_S) == -signal.SIGKILL


@pytest.mark.parametrize("loads", ["threaded", "fails", "not_there"])
def test_a_server_that_cannot_serve_is_not_asked_again(loads: str, environment: Mapping[str, str]) -> None:
    """A fork beside a thread would hold that thread's locks for ever."""
    forks = ForkServer.start([loads], environment)
    command = [sys.executable, "-m", "sleeps"]
    assert forks.takes(command, environment), "nobody knows yet"
    assert forks.fork(command, environment, OutputFiles(1, 2)) is None
    assert not forks.takes(command, environment)
    forks.close()


async def test_who_stops_waiting_leaves_no_process(environment: Mapping[str, str]) -> None:
    forks = ForkServer.start([], environment)
    asked = asyncio.create_task(forks.fork_beside([sys.executable, "-m", "sleeps"], environment, OutputFiles(1, 2)))
    await asyncio.sleep(0.05)  # it loads
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    # One at a time: the first is there when the second is.
    second = await asyncio.to_thread(forks.fork, [sys.executable, "-m", "ends", "0"], environment, OutputFiles(1, 2))
    assert second is not None
    assert second.wait(DEADLINE_S) == 0
    left = [1]
    until_s = time.monotonic() + DEADLINE_S
    while left:
        assert time.monotonic() < until_s, "it lives on"
        await asyncio.sleep(0.01)
        left = [one.pid for one in psutil.Process().children() if lives(one.pid) and "sleeps" in words_of(one)]
    forks.close()


def test_a_parent_is_named_to_what_it_starts(environment: Mapping[str, str], tmp_path: Path) -> None:
    """A process that holds on to its parent by itself finds it."""
    forks = ForkServer.start([], environment)
    given = {**environment, PARENT_PID: str(os.getpid())}
    with (tmp_path / "printed").open("wb") as out:
        command = [sys.executable, "-m", "polyrl_rollout.exec_with_parent_death_signal", "--", "echo", "held"]
        forked = forks.fork(command, given, OutputFiles(out.fileno(), 2))
    assert forked is not None
    assert forked.wait(DEADLINE_S) == 0
    assert (tmp_path / "printed").read_text() == "held\n"
    forks.close()
