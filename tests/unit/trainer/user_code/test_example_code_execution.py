"""examples/code-execution: a program's answer pays, and nothing else that it may try gets out of its process."""

from __future__ import annotations

import errno
import importlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[4] / "examples" / "code-execution"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """Its modules as a reward worker has them; other examples have a module `reward` too."""
    names = ("calls", "confined", "sandbox", "reward")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if module is not None})


def score(example: dict[str, ModuleType], response: str) -> dict[str, float]:
    sample = SimpleNamespace(response=response, metadata={"times": 7, "plus": 4})
    scored: dict[str, float] = example["reward"].score(sample)
    return scored


@pytest.mark.parametrize(
    ("response", "right", "ran"),
    [
        ("7*x+4", 1.0, 1.0),
        ("4+x*7", 1.0, 1.0),
        ("7*x+5", 0.0, 1.0),
        ("7x+4", 0.0, 0.0),
        ("4 if x == 0 else 7/0", 0.0, 0.0),
        ("7*x+4)\n    import os; os._exit(0", 0.0, 1.0),
    ],
    ids=["right", "another way", "wrong", "no Python", "fails half-way", "ends early"],
)
def test_only_a_program_that_is_right_for_every_input_pays(
    example: dict[str, ModuleType], response: str, right: float, ran: float
) -> None:
    scored = score(example, response)
    assert (scored["reward"], scored["ran"], scored["timed_out"]) == (right, ran, 0.0)


def test_a_program_may_compute_and_write_in_its_one_file(example: dict[str, ModuleType]) -> None:
    program = "import math, json\nmine = open('/dev/fd/3', 'w+')\nmine.write('9')\nmine.seek(0)\n"
    assert example["sandbox"].run(f"{program}print(json.dumps([math.pi > 3, mine.read()]))").output == '[true, "9"]\n'


ORDINARY = """
import bisect, collections, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq, io, itertools
import json, math, operator, random, re, signal, statistics, string, sys, tempfile, time, typing, unicodedata, zlib
@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: int = 0
@functools.lru_cache(None)
def steps(n): return n if n < 2 else steps(n - 1) + steps(n - 2)
signal.alarm(30)
sys.setrecursionlimit(5000)
began = time.perf_counter(); time.sleep(0.01); assert time.perf_counter() - began >= 0.01
heap = [3, 1, 2]; heapq.heapify(heap)
random.shuffle(heap); assert sorted(heap) == [1, 2, 3] and 0 <= random.random() < 1
assert steps(90) == 2880067194370816120 and bisect.bisect([1, 2], 1) == 1
assert decimal.Decimal("0.1") * 3 == decimal.Decimal("0.3") and fractions.Fraction(1, 3) * 3 == 1
assert re.findall(r"\\d+", "a12b3") == ["12", "3"] and collections.Counter("aab").most_common(1) == [("a", 2)]
assert list(itertools.accumulate([1, 2, 3])) == [1, 3, 6] and functools.reduce(operator.mul, [2, 3]) == 6
assert string.Template("$a").substitute(a=1) == "1" and math.comb(5, 2) == 10 and statistics.mean([1, 3]) == 2
assert max(Point(1), Point(0, 9)) == Point(1) and hashlib.sha256(b"").hexdigest() and zlib.crc32(b"a")
assert len([bytearray(1 << 20) for _ in range(64)]) == 64 and datetime.datetime.now().year > 2000
try: input()
except EOFError: print(json.dumps({"all": "well"}))
"""


def test_ordinary_programs_run_with_the_calls_that_are_left(example: dict[str, ModuleType]) -> None:
    outcome = example["sandbox"].run(ORDINARY, cpu_seconds=10, wall_seconds=60.0)
    assert (outcome.output, outcome.ended) == ('{"all": "well"}\n', True)


FORBIDDEN = {
    "the network": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a process": "import os; os.fork()",
    "a command": "import os; os.execv('/bin/true', ['true'])",
    "a thread": "import threading; threading.Thread(target=print).start()",
    "a signal": "import os; os.kill(os.getppid(), 9)",
    "another's limits": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "a file of the system": "open('/etc/passwd').read()",
    "memory": "x = bytearray(1 << 30)",
    "a file that has no end": "f = open('/dev/fd/3', 'wb')\nwhile True: f.write(bytes(1 << 16)); f.flush()",
    "a file of its own": "open('mine', 'w')",
    "a file in the folder of temporary files": "import tempfile; tempfile.TemporaryFile()",
    "a folder": "import os; os.mkdir('/tmp/d')",
    "memory without an address": "import os; os.memfd_create('x')",
    "a pipe": "import os; os.pipe()",
    "its parent's cores": "import os; os.sched_setaffinity(os.getppid(), {0})",
    "its parent's priority": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "an end of its own choice": "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    **{
        what: f"import ctypes\nif ctypes.CDLL(None).{call} == -1: raise OSError"
        for what, call in {
            "capabilities in a namespace": "unshare(0x10000000)",
            "a queue of messages": "msgget(0, 0o1600)",
            "a semaphore": "semget(0, 1, 0o1600)",
            "memory that outlives it": "shmget(0, 4096, 0o1600)",
            "a life after its parent's": "prctl(1, 0, 0, 0, 0)",
            "a second filter": "prctl(22, 2, 0, 0, 0)",
        }.items()
    },
    "calls of another kind": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.syscall(0x40000027)\nassert ctypes.get_errno() != 1, 'refused'"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("attempt", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_a_program_gets_nothing_else(example: dict[str, ModuleType], attempt: str) -> None:
    outcome = example["sandbox"].run(f"{attempt}\nprint('got it')")
    assert (outcome.ended, "got it" in outcome.output) == (False, False)


SIGNALS = {
    "kill": "os.kill(V, 9)",
    "queued": "libc.syscall({'x86_64': 129, 'aarch64': 138}[os.uname().machine], V, 9, INFO)",
    "queued for a thread": "libc.syscall({'x86_64': 297, 'aarch64': 240}[os.uname().machine], V, V, 9, INFO)",
    "an owner of standard input": "[fcntl.fcntl(0, *a) for a in ((8, V), (10, 9), (4, os.O_ASYNC | os.O_NONBLOCK))]",
    "an owner as a structure": "fcntl.fcntl(0, 15, struct.pack('ii', 1, V)); fcntl.fcntl(0, 10, 9)",
}


@pytest.mark.parametrize("attempt", SIGNALS.values(), ids=SIGNALS.keys())
def test_no_signal_reaches_another_process(example: dict[str, ModuleType], attempt: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as victim:
        info = "struct.pack('iiii', 9, 0, -1, 0) + bytes(112)"
        start = "import ctypes, fcntl, os, struct\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        start += f"V, INFO = {victim.pid}, {info}\n"
        program = f"{start}try: {attempt}\nexcept OSError as error: print(error.errno)\nelse: print(ctypes.get_errno())"
        outcome = example["sandbox"].run(program)
        assert victim.stdin is not None
        victim.stdin.write(b"\n")
        victim.stdin.flush()
        assert (outcome.output, victim.wait(timeout=60)) == (f"{errno.EPERM}\n", 0)


def test_landlock_alone_keeps_signals_in_where_the_kernel_can() -> None:
    program = "import confined, ctypes, errno, os\nversion = ctypes.CDLL(None).syscall(444, None, 0, 1)\n"
    program += "confined.LIBC.prctl(38, 1, 0, 0, 0)\nos.dup2(0, 3)\nconfined.close_files()\n"
    program += "try: os.kill(os.getppid(), 0)\nexcept PermissionError: print(version, 'refused')\nelse: print(version)"
    child = [sys.executable, "-c", program]
    with tempfile.TemporaryFile() as scratch:
        ran = subprocess.run(child, cwd=EXAMPLE, stdin=scratch, capture_output=True, text=True, timeout=60, check=True)
    version, _, refused = ran.stdout.strip().partition(" ")
    if int(version) < 6:
        pytest.skip("this kernel's Landlock has no scopes")
    assert refused == "refused"


def test_a_program_that_nests_folders_is_wrong_and_leaves_nothing(
    example: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os\nfor _ in range(1500): os.mkdir('d', 0o100); os.chdir('d')"
    assert not example["sandbox"].run(program).ended
    assert not example["sandbox"].run("print('\ud800')").ended
    assert list(tmp_path.iterdir()) == []


def test_a_program_ends_with_its_parent_and_leaves_nothing(tmp_path: Path) -> None:
    program = "import ctypes, os, sys, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\ntime.sleep(600)"
    parent = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\nimport sandbox\n"
    parent += "sandbox.subprocess.Popen = lambda *a, real=sandbox.subprocess.Popen, **k: show(real(*a, **k))\n"
    parent += "def show(process): print(process.pid, flush=True); return process\n"
    parent += "wait = sandbox.await_ready\n"
    parent += "sandbox.await_ready = lambda process: (wait(process), print('ready', flush=True))\n"
    parent += f"sandbox.run({program!r}, wall_seconds=600)"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=EXAMPLE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        process = os.pidfd_open(int(worker.stdout.readline()))
        try:
            assert worker.stdout.readline() == "ready\n"
            assert not select.select([process], [], [], 1.0)[0], "it runs, and has had time for its tricks"
            worker.kill()
            ended = select.select([process], [], [], 60)[0]
            if not ended:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            assert ended
        finally:
            worker.kill()
            os.close(process)
    assert list(tmp_path.iterdir()) == []


def test_what_lies_outside_stays_as_it_is(example: dict[str, ModuleType], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    mode = kept.stat().st_mode
    attempts = ("os.remove(P)", "os.truncate(P, 0)", "os.rename(P, P + '2')", "os.chmod(P, 0)")
    attempts += ("open(P, 'w')", "open(P + '2', 'w')", "os.mkdir(P + '2')", "os.symlink(P, P + '2')", "os.utime(P)")
    attempts += ("os.link(P, P + '2')", "open(os.open(P, os.O_RDONLY | os.O_TRUNC))")
    tries = "".join(f"try: {attempt}\nexcept OSError: failed += 1\n" for attempt in attempts)
    outcome = example["sandbox"].run(f"import os\nP, failed = {str(kept)!r}, 0\n{tries}print(failed)")
    assert outcome.output == f"{len(attempts)}\n"
    assert (kept.read_text(), kept.stat().st_mode, sorted(tmp_path.iterdir())) == ("kept", mode, [kept])


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(60)", "import sys\nwhile True: sys.stderr.write('x' * 100000)"],
    ids=["computes", "sleeps", "prints"],
)
def test_a_program_that_does_not_end_is_ended(example: dict[str, ModuleType], program: str) -> None:
    began = time.monotonic()
    outcome = example["sandbox"].run(program, wall_seconds=1.0)
    assert (outcome.ended, outcome.timed_out) == (False, True)
    assert time.monotonic() - began < 30


def test_its_file_and_its_output_end_at_their_limit(example: dict[str, ModuleType]) -> None:
    program = "import os\nfor place in (3, 1):\n    try:\n        while True: os.write(place, bytes(1 << 16))\n"
    program += "    except OSError: size = os.fstat(place).st_size; assert size == 1 << 20, size"
    outcome = example["sandbox"].run(program, cpu_seconds=10, wall_seconds=60.0)
    assert (outcome.ended, outcome.timed_out, len(outcome.output)) == (True, False, 1 << 20)


@pytest.mark.slow
def test_no_handler_buys_a_second_second(example: dict[str, ModuleType]) -> None:
    program = "import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    program += "while time.process_time() < 1.5: pass\nprint('got it')"
    outcome = example["sandbox"].run(program, wall_seconds=60.0)
    assert (outcome.output, outcome.ended, outcome.timed_out) == ("", False, True)


def test_nothing_of_the_trainers_environment_is_there(
    example: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    assert "secret" not in example["sandbox"].run("import os; print(dict(os.environ))").output


def test_a_machine_that_cannot_confine_says_so_and_no_program_can(
    example: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sandbox: Any = example["sandbox"]
    assert not sandbox.run("import sys; sys.exit('this platform cannot confine a program')").ended
    elsewhere = tmp_path / "confined.py"
    shutil.copy(EXAMPLE / "calls.py", tmp_path)
    elsewhere.write_text(
        (EXAMPLE / "confined.py").read_text().replace("CREATE_RULESET, ADD", "CREATE_RULESET = 999\n_, ADD")
    )
    monkeypatch.setattr(sandbox, "CONFINED", elsewhere)
    with pytest.raises(sandbox.SandboxUnavailable, match=r"cannot confine a program: .*Landlock"):
        sandbox.run("print('got it')")
