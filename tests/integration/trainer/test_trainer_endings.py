"""How a trainer's process ends when it cannot reach the manager: for good on a laptop, for the time being in a pod."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyrl.errors import (
    CannotGoOn,
    DeadlineExceeded,
    DiskRefused,
    GroupLeft,
    GroupLost,
    InvalidCode,
    PolyRLError,
    ProtocolError,
    RunFailed,
    StoreFailed,
    Superseded,
)
from polyrl.testing.started import StartedProcess, ran
from polyrl.worker import CANNOT_GO_ON_EXIT, HANDED_OVER_EXIT, TEMPORARY_EXIT
from polyrl_cli.manifests.load import load_manifest
from polyrl_operator.secret import write_run_keys
from polyrl_trainer.__main__ import exit_code_of
from polyrl_trainer.session import RESULT

EXAMPLE = Path(__file__).parents[3] / "examples" / "sort-digits"
DEADLINE_S = 120
NOBODY = {
    "agents": "tcp://127.0.0.1:1",
    "trainer": "tcp://127.0.0.1:1",
    "http": "http://127.0.0.1:1",
    "pid": 0,
    "epoch": 1,
    "publicKey": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    job = load_manifest(EXAMPLE / "job.yaml")
    (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    (tmp_path / "manager.json").write_text(json.dumps(NOBODY))
    (tmp_path / "run").mkdir()
    write_run_keys(tmp_path / "keys")
    return tmp_path


def trainer(folder: Path, *more: str) -> list[str]:
    argv = [sys.executable, "-m", "polyrl_trainer", "--job", f"{folder}/job.json", "--epoch", "1"]
    argv += ["--manifest-dir", str(EXAMPLE), "--run", f"{folder}/run", "--keys", f"{folder}/keys/trainer.key"]
    return [*argv, "--manager-endpoints", f"{folder}/manager.json", *more]


def test_a_pod_that_waited_in_vain_is_tried_again(folder: Path) -> None:
    command = trainer(folder, "--hand-over", "--max-manager-outage", "1", "--advertise", "127.0.0.1")
    ended = ran(command, timeout_s=DEADLINE_S)
    assert ended.returncode == TEMPORARY_EXIT, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "for a welcome from the manager" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("saved", "code"), [(True, CANNOT_GO_ON_EXIT), (False, 2)], ids=["something is saved", "nothing is saved"]
)
def test_a_slip_in_the_manifest_leaves_what_is_saved_to_another_edit(folder: Path, saved: bool, code: int) -> None:
    job = load_manifest(EXAMPLE / "job.yaml", ["spec.recipe.reward.function=reward:nowhere"])
    (folder / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    if saved:
        checkpoint = folder / "run/checkpoints/rl-step-000003"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE.json").write_text("{}")
    ended = ran(trainer(folder, "--hand-over", "--advertise", "127.0.0.1"), timeout_s=DEADLINE_S)
    assert ended.returncode == code, ended.stderr
    assert "nowhere" in ended.stderr.splitlines()[-1]


def test_a_job_that_an_image_does_not_understand_leaves_what_is_saved_to_another(folder: Path) -> None:
    (folder / "job.json").write_text('{"spec": {"later": 1}}')
    ended = ran(trainer(folder, "--hand-over", "--advertise", "127.0.0.1"), timeout_s=DEADLINE_S)
    assert ended.returncode == 2, ended.stderr
    checkpoint = folder / "run/checkpoints/rl-step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE.json").write_text("{}")
    ended = ran(trainer(folder, "--hand-over", "--advertise", "127.0.0.1"), timeout_s=DEADLINE_S)
    assert ended.returncode == CANNOT_GO_ON_EXIT, ended.stderr


def test_a_pod_leaves_at_once_when_it_is_asked_to_while_it_waits(folder: Path) -> None:
    command = trainer(folder, "--hand-over", "--max-manager-outage", "600", "--advertise", "127.0.0.1")
    with (folder / "log").open("wb") as log, StartedProcess(command, stderr=log) as process:
        until = time.monotonic() + DEADLINE_S
        while b"trainer starts" not in (folder / "log").read_bytes():
            assert time.monotonic() < until, (folder / "log").read_text()
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        process.terminate()
        assert process.wait(DEADLINE_S) == HANDED_OVER_EXIT, (folder / "log").read_text()
    assert json.loads((folder / "run" / RESULT).read_text())["outcome"] == "stopped"


@pytest.mark.parametrize(
    ("error", "local", "in_a_pod"),
    [
        (InvalidCode("no such function"), 2, 2),
        (CannotGoOn("fewer steps than were done"), 2, CANNOT_GO_ON_EXIT),
        (RunFailed("nothing can be scored"), 1, 1),
        (ProtocolError("nonsense"), 1, 1),
        (DeadlineExceeded("a batch", "the manager", 600.0), 1, TEMPORARY_EXIT),
        (DiskRefused("model.safetensors: cannot be written"), 1, TEMPORARY_EXIT),
        (StoreFailed("s3://place failed: Slow Down"), 1, TEMPORARY_EXIT),
        (Superseded("another trainer has come"), 1, HANDED_OVER_EXIT),
        (GroupLost("rank 1 was ended"), TEMPORARY_EXIT, TEMPORARY_EXIT),
        (GroupLeft("pod 1 is gone"), HANDED_OVER_EXIT, HANDED_OVER_EXIT),
    ],
    ids=[
        *(
            "invalid code",
            "cannot go on",
            "run failed",
            "protocol error",
            "deadline",
            "disk",
            "a store",
            "superseded",
            "a rank lost",
        ),
        "a pod gone",
    ],
)
def test_what_an_ending_says(error: PolyRLError, local: int, in_a_pod: int) -> None:
    assert exit_code_of(error, hand_over=False) == local
    assert exit_code_of(error, hand_over=True) == in_a_pod


PROCESS = """
import atexit, sys
from polyrl.interpreter import prompt_exit

class Object:
    def __del__(self):
        print("taken apart")

one = Object()
atexit.register(print, "exit handler", end="")
"""


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [
        ("sys.exit(3)", 3, "exit handler"),
        ("pass", 0, "exit handler"),
        ("sys.exit()", 0, "exit handler"),
        ("sys.exit('words')", 1, "exit handler"),
        ("raise ValueError", 1, "exit handler"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "exit handlertaken apart\n"),
        ("sys.stdout.close(); sys.exit(4)", 4, ""),
    ],
    ids=["with-a-code", "with-success", "without-one", "with-words", "unforeseen", "interrupted", "output-closed"],
)
def test_exit_handlers_are_called_and_nothing_is_taken_apart(end: str, code: int, printed: str) -> None:
    argv = [sys.executable, "-I", "-c", f"{PROCESS}\nwith prompt_exit(): {end}"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr
