"""examples/code-execution: a program's answer pays, and nothing else that it may try gets out of its process."""

from __future__ import annotations

import importlib
import sys
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
    names = ("confined", "sandbox", "reward")
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


def test_a_program_may_compute_and_write_in_its_own_folder(example: dict[str, ModuleType]) -> None:
    program = "import math, json\nopen('mine', 'w').write('9')\nprint(json.dumps([math.pi > 3, open('mine').read()]))"
    assert example["sandbox"].run(program).output == '[true, "9"]\n'


FORBIDDEN = {
    "the network": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a process": "import os; os.fork()",
    "a command": "import os; os.execv('/bin/true', ['true'])",
    "a thread": "import threading; threading.Thread(target=print).start()",
    "a signal": "import os; os.kill(os.getppid(), 9)",
    "another's limits": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "a file of the system": "open('/etc/passwd').read()",
    "memory": "x = bytearray(1 << 30)",
    "a file that has no end": "f = open('mine', 'wb')\nwhile True: f.write(bytes(1 << 16)); f.flush()",
    "calls of another kind": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.syscall(0x40000027)\nassert ctypes.get_errno() != 1, 'refused'"
    ),
}


@pytest.mark.parametrize("attempt", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_a_program_gets_nothing_else(example: dict[str, ModuleType], attempt: str) -> None:
    outcome = example["sandbox"].run(f"{attempt}\nprint('got it')")
    assert (outcome.ended, "got it" in outcome.output) == (False, False)


def test_what_lies_outside_stays_as_it_is(example: dict[str, ModuleType], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    mode = kept.stat().st_mode
    attempts = ("os.remove(P)", "os.truncate(P, 0)", "os.rename(P, P + '2')", "os.chmod(P, 0)", "os.link(P, 'mine')")
    attempts += ("open(P, 'w')", "open(P + '2', 'w')", "os.mkdir(P + '2')", "os.symlink(P, P + '2')", "os.utime(P)")
    tries = "".join(f"try: {attempt}\nexcept OSError: failed += 1\n" for attempt in attempts)
    outcome = example["sandbox"].run(f"import os\nP, failed = {str(kept)!r}, 0\n{tries}print(failed)")
    assert outcome.output == f"{len(attempts)}\n"
    assert (kept.read_text(), kept.stat().st_mode, sorted(tmp_path.iterdir())) == ("kept", mode, [kept])


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
    elsewhere.write_text(
        (EXAMPLE / "confined.py").read_text().replace("CREATE_RULESET, ADD", "CREATE_RULESET = 999\n_, ADD")
    )
    monkeypatch.setattr(sandbox, "CONFINED", elsewhere)
    with pytest.raises(sandbox.SandboxUnavailable, match=r"cannot confine a program: .*Landlock"):
        sandbox.run("print('got it')")
