"""What is forked is what it would be if it had been spawned: real processes, one module each."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyrl.forks import Forked, ForkServer, OutputFiles, client, own_server
from polyrl.parent_death_signal import PARENT_PID
from polyrl.testing.started import words_of
from polyrl_operator.secret import make_certificate, server_tls

DEADLINE_S = 30.0
pytestmark = pytest.mark.timeout(150)  # more than a silent server is waited for
MODULES = {
    "tells": """
        import json, os, resource, signal, sys
        print(json.dumps({
            "arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid(),
            "session": os.getsid(0), "umask": os.umask(0), "files": sorted(map(int, os.listdir("/proc/self/fd"))),
            "signals": [str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE), "name": __name__,
        }))
    """,
    "ends": "import sys\nsys.exit(int(sys.argv[1]))",
    "fails": "raise ValueError('as it says')",
    "sleeps": "import time\ntime.sleep(600)",
    "says": "import os, sys\nos.write(int(sys.argv[1]), b'said')",
    "draws": "import numpy, random\nprint(numpy.random.random(), random.random())",
    "draws_torch": "import torch\nprint(torch.rand(1, dtype=torch.float64).item(), torch.get_num_threads())",
    "counts": """
        import os
        def note():
            with open(os.environ["POLYRL_NOTES"], "a") as notes:
                print(len(os.listdir("/proc/self/task")), file=notes)
        os.register_at_fork(before=note)
    """,
    "cannot_fork": """
        import errno, os
        server, fork = os.getpid(), os.fork
        def first_alone():
            if os.getpid() != server:
                raise OSError(errno.EAGAIN, "no more processes")
            return fork()
        os.fork = first_alone
    """,
    "dies": """
        import os, signal
        os.chdir = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
    """,
    "cleans_up": "import multiprocessing.util",
    "taken_apart": """
        import ctypes
        ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)
    """,
    "promptly": """
        import sys
        from multiprocessing import util
        from polyrl import interpreter
        util.Finalize(None, print, ("cleaned up",), exitpriority=1)
        with interpreter.prompt_exit():
            sys.exit(3)
    """,
    "uses_heap": "freed = bytearray(8 << 20)\ndel freed",
    "asks": """
        import asyncio, aiohttp, sys
        async def ask():
            async with aiohttp.ClientSession() as session, session.get(sys.argv[1]) as answer:
                print(await answer.text())
        asyncio.run(ask())
    """,
    "scans": """
        import sys
        found, wanted = 0, bytes.fromhex(sys.argv[1])
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
            for line in maps:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                if line.split()[1].startswith("rw"):
                    memory.seek(begin)
                    found += memory.read(end - begin).count(wanted)
        print(found)
    """,
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
    path = os.pathsep.join(filter(None, [str(modules), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


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
    heeded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    assert reported["signals"] == [str(signal.getsignal(one)) for one in heeded], "though their server is deaf to them"


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


def test_it_has_nothing_of_what_its_server_was_asked_for_before(environment: Mapping[str, str], tmp_path: Path) -> None:
    """A trainer's account keys were in the memory of each engine that was forked after it."""
    forks, key = ForkServer.start(["uses_heap"], environment), os.urandom(16).hex()
    for more, found in (({"POLYRL_KEY": key}, True), ({}, False)):
        with (tmp_path / "printed").open("wb") as out:
            command = [sys.executable, "-m", "scans", key.encode().hex()]
            forked = forks.fork(command, {**environment, **more}, OutputFiles(out.fileno(), 2))
            assert forked is not None
            assert forked.wait(DEADLINE_S) == 0
        assert (int((tmp_path / "printed").read_text()) > 1) is found, "it is itself once what is looked for"
    forks.close()


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
    forked.send_signal(signal.SIGTERM)
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


def test_forks_compute_by_their_own_and_their_server_is_forked_before_they_have_threads(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    """torch draws its seed where it is loaded: each fork had the same one."""
    notes, drawn = tmp_path / "notes", []
    forks = ForkServer.start(["torch", "counts"], {**environment, "POLYRL_NOTES": str(notes)})
    for threads in ("2", "2,1", "0"):
        given = {**environment, "POLYRL_NOTES": str(notes), "OMP_NUM_THREADS": threads}
        with (tmp_path / "printed").open("w+b") as out:
            command = [sys.executable, "-m", "draws_torch"]
            forked = forks.fork(command, given, OutputFiles(out.fileno(), 2), starts_others=True)
            assert forked is not None
            assert forked.wait(DEADLINE_S) == 0
        drawn.append((tmp_path / "printed").read_text().split())
    forks.close()
    assert len({number for number, _ in drawn}) == 3
    assert [count for _, count in drawn] == ["2", "2", str(len(os.sched_getaffinity(0)))]
    assert set(notes.read_text().split()) == {"1"}


def test_limits_are_those_of_whoever_asks_at_that_time(run: Run, tmp_path: Path) -> None:
    """Who has read keys leaves no core dump, nor does what it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert run("tells").wait(DEADLINE_S) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert json.loads((tmp_path / "printed").read_text())["limit"] == [soft - 1, hard]


def test_names_need_be_no_text(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "m\udcfcller"
    folder.mkdir()
    forked = run("tells", folder, more={"POLYRL_MINE": str(folder)}, folder=str(folder))
    assert forked.wait(DEADLINE_S) == 0, (tmp_path / "complaint").read_text()
    reported = json.loads((tmp_path / "printed").read_text())
    assert reported["environment"]["POLYRL_MINE"] == reported["folder"] == reported["arguments"][0] == str(folder)


def test_it_works_where_whoever_asks_does_even_in_a_folder_that_is_gone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert run("tells", folder="below").wait(DEADLINE_S) == 0
    assert json.loads((tmp_path / "printed").read_text())["folder"] == str(tmp_path / "here" / "below")
    shutil.rmtree(tmp_path / "here")
    assert run("ends", 3).wait(DEADLINE_S) == 3


@pytest.mark.parametrize(("module", "code", "last"), [("ends", 3, ""), ("fails", 1, "ValueError: as it says\n")])
def test_what_its_server_has_loaded_is_not_taken_apart_at_its_end(
    module: str, code: int, last: str, environment: Mapping[str, str], tmp_path: Path
) -> None:
    """What such libraries print then stood below a worker's last words."""
    forks = ForkServer.start(["taken_apart"], environment)
    with (tmp_path / "printed").open("wb") as out:
        command = [sys.executable, "-m", module, "3"]
        forked = forks.fork(command, environment, OutputFiles(out.fileno(), out.fileno()))
        assert forked is not None
        assert forked.wait(DEADLINE_S) == code
    forks.close()
    assert (tmp_path / "printed").read_text().endswith(last)


def test_exit_handlers_of_what_its_server_has_loaded_are_called(environment: Mapping[str, str], tmp_path: Path) -> None:
    forks = ForkServer.start(["cleans_up"], environment)
    with (tmp_path / "printed").open("wb") as out:
        forked = forks.fork([sys.executable, "-m", "promptly"], environment, OutputFiles(out.fileno(), 2))
        assert forked is not None
        assert forked.wait(DEADLINE_S) == 3
    forks.close()
    assert (tmp_path / "printed").read_text() == "cleaned up\n"


async def test_it_believes_the_certificates_of_its_own_environment(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    """aiohttp reads them when it is loaded, which was in the server: whoever has them is the trainer alone."""
    made, authority = make_certificate(["localhost"]), tmp_path / "authority.pem"
    authority.write_bytes(made.authority)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nbelieved")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_tls(made)) as server:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        without = {name: text for name, text in environment.items() if name not in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
        forks = ForkServer.start(["aiohttp"], without)
        command, given = [sys.executable, "-m", "asks", url], {**without, "SSL_CERT_FILE": str(authority)}
        assert forks.takes(command, given)
        with (tmp_path / "printed").open("wb") as out:
            forked = await forks.fork_beside(command, given, OutputFiles(out.fileno(), 2))
            assert forked is not None
            assert await forked.ended() == 0
        forks.close()
    assert (tmp_path / "printed").read_text() == "believed\n"


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
        try:
            assert asker.stdout is not None
            pid = int(asker.stdout.readline())
            # Its server may not have looked yet how the one between the two ended.
            below = [one for one in psutil.Process(asker.pid).children(recursive=True) if lives(one.pid)]
            assert pid in [one.pid for one in below]
            assert len(below) == 2
        finally:
            asker.kill()  # what is left of `with` waits for its end
    for one in below:
        until(lambda one=one: not lives(one.pid), f"{one} to end")


def test_a_fork_that_is_not_adopted_is_refused(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel gives its orphans to nobody else: the server is not asked again."""
    monkeypatch.setattr(client, "adopt_orphans", lambda wanted: None)
    forks = ForkServer.start([], environment)
    command = [sys.executable, "-m", "sleeps"]
    began = time.monotonic()
    assert forks.fork(command, environment, OutputFiles(1, 2)) is None
    assert time.monotonic() - began < client.READY_S
    assert not forks.takes(command, environment)
    forks.close()


@pytest.mark.parametrize("loads", ["json", "cannot_fork", "dies"])
def test_what_cannot_become_what_was_asked_for_is_refused_at_once(
    loads: str, environment: Mapping[str, str], tmp_path: Path
) -> None:
    forks = ForkServer.start([loads], environment)
    command = [sys.executable, "-m", "sleeps"]
    began = time.monotonic()
    assert forks.fork(command, environment, OutputFiles(1, 2), folder=str(tmp_path / "gone")) is None
    assert time.monotonic() - began < client.READY_S / 2
    forks.close()


def test_one_that_cannot_have_its_files_is_refused(environment: Mapping[str, str]) -> None:
    """It ended with 1 and without a word."""
    forks = ForkServer.start([], environment)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    highest = os.dup2(1, 511)
    try:
        command = [sys.executable, "-m", "ends", "0"]
        assert forks.fork(command, environment, OutputFiles(1, 2), passed=[highest]) is None
    finally:
        os.close(highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        forks.close()


def test_the_next_one_gets_nothing_of_one_that_was_interrupted(environment: Mapping[str, str]) -> None:
    """It got that one's process."""
    forks = ForkServer.start([], environment)
    assert forks._process is not None
    forks._process.send_signal(signal.SIGSTOP)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        forks.fork([sys.executable, "-m", "sleeps"], environment, OutputFiles(1, 2))
    signal.signal(signal.SIGALRM, before)
    forks._process.send_signal(signal.SIGCONT)
    assert forks.fork([sys.executable, "-m", "ends", "3"], environment, OutputFiles(1, 2)) is None
    assert [one for one in psutil.Process().children() if lives(one.pid) and "sleeps" in words_of(one)] == []
    forks.close()


def test_a_silent_server_is_waited_for_once(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "READY_S", 1.0)
    forks = ForkServer.start([], environment)
    assert forks._process is not None
    forks._process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        command = [sys.executable, "-m", "sleeps"]
        asked = [threads.submit(forks.fork, command, environment, OutputFiles(1, 2)) for _ in range(4)]
        assert [one.result(DEADLINE_S) for one in asked] == [None] * 4
    assert time.monotonic() - began < 3.5
    forks.close()


def test_who_waits_for_a_server_that_is_closed_waits_no_longer(environment: Mapping[str, str]) -> None:
    forks = ForkServer.start([], environment)
    assert forks._process is not None
    forks._process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(forks.fork, [sys.executable, "-m", "sleeps"], environment, OutputFiles(1, 2))
        time.sleep(0.1)
        forks.close()
        forks.close()  # as who closes on the way out does
        assert asked.result(DEADLINE_S) is None
    assert time.monotonic() - began < DEADLINE_S


def test_what_it_forked_outlives_a_server(environment: Mapping[str, str]) -> None:
    forks = ForkServer.start([], environment)
    forked = forks.fork([sys.executable, "-m", "sleeps"], environment, OutputFiles(1, 2))
    assert forked is not None
    forks.close()
    assert forked.poll() is None
    assert not forks.takes([sys.executable, "-m", "sleeps"], environment)
    forked.kill()
    assert forked.wait(DEADLINE_S) == -signal.SIGKILL


def test_what_is_too_long_to_be_asked_for_leaves_the_server_to_others(environment: Mapping[str, str]) -> None:
    """All that followed one with 200 KB of variables was spawned."""
    forks = ForkServer.start([], environment)
    command, streams = [sys.executable, "-m", "ends", "0"], OutputFiles(1, 2)
    assert forks.fork(command, {**environment, **{f"POLYRL_{n}": "x" * 100_000 for n in range(4)}}, streams) is None
    forked = forks.fork(command, environment, streams)
    assert forked is not None
    assert forked.wait(DEADLINE_S) == 0
    forks.close()


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
    await asyncio.sleep(0)  # it is asked, and cannot have answered
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
        command = [sys.executable, "-m", "polyrl_rollout.supervise", "--", "echo", "held"]
        forked = forks.fork(command, given, OutputFiles(out.fileno(), 2))
    assert forked is not None
    assert forked.wait(DEADLINE_S) == 0
    assert (tmp_path / "printed").read_text() == "held\n"
    forks.close()


def test_one_that_was_kept_outlives_whoever_closes_it() -> None:
    """As a run in this process does at its end: all that came after it in the process was spawned."""
    kept = own_server()
    assert kept is not None
    kept.close()
    assert kept.takes([sys.executable, "-m", "ends"], os.environ)
