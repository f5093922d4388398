"""What a user sees of a disk that refuses the trainer's files: one sentence that names the file, and an exit status."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyrl.errors import DiskRefused
from polyrl.testing.started import StartedProcess
from polyrl.worker import TEMPORARY_EXIT
from polyrl_trainer.checkpoints import Checkpoints
from polyrl_trainer.checkpoints.seals import append, replace_file, writing
from polyrl_trainer.metrics import METRICS, MetricsLogger
from polyrl_trainer.session import RESULT, Session
from polyrl_trainer.state import TrainerState, TrainingStage

DEADLINE_S = 120
FULL = Path("/dev/full")
FILE_BYTES = 100_000
"""Of a file at most: no weights, but all that lies beside them."""
MODEL = {
    **{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True},
}


def job(processes: int) -> dict[str, Any]:
    recipe = {
        "mode": "sft",
        "model": {"config": MODEL, "dtype": "float32", "tokenizer": {"type": "characters", "alphabet": "abcdefghij "}},
        "data": {"sft": [{"path": "sft.jsonl"}]},
        "sft": {"steps": 4, "batchSize": 4},
        "checkpoint": {"everySteps": 2},
    }
    trainer = {"processesPerPod": processes, "reservedEngine": False}
    spec = {"trainer": trainer, "recipe": recipe}
    return {"apiVersion": "polyrl.dev/v1alpha1", "kind": "PolyRLJob", "metadata": {"name": "full"}, "spec": spec}


def trained(folder: Path, processes: int, *more: str) -> subprocess.CompletedProcess[str]:
    """A limit of its files' size stands in for a disk that is full at the checkpoint; the result finds a full one."""
    dice, run = random.Random(1), folder / "run"
    texts = ["".join(dice.choice("abcdefghij") for _ in range(12)) for _ in range(16)]
    rows = [json.dumps({"prompt": text, "response": "".join(sorted(text))}) for text in texts]
    (folder / "sft.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "job.json").write_text(json.dumps(job(processes)))
    run.mkdir()
    (run / f".{RESULT}.unfinished").symlink_to(FULL)
    argv = [sys.executable, "-m", "polyrl_trainer", "--job", f"{folder}/job.json", "--manifest-dir", str(folder)]
    argv += ["--run", str(run), "--keys", f"{folder}/none", "--epoch", "1", *more]
    pipe = subprocess.PIPE
    with StartedProcess(argv, stdout=pipe, stderr=pipe, text=True) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        out, err = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


@pytest.mark.parametrize(
    ("processes", "more", "code"),
    [(1, (), 1), (1, ("--hand-over",), TEMPORARY_EXIT), (2, (), 1)],
    ids=["alone", "in a pod", "two ranks"],
)
def test_a_trainer_ends_with_one_sentence_that_names_the_file(
    tmp_path: Path, processes: int, more: tuple[str, ...], code: int
) -> None:
    """It ended with a traceback to the result, which came last, and named no file."""
    ended = trained(tmp_path, processes, *more)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"{tmp_path}/run/checkpoints/.unfinished-sft-step-000002/model/"), last
    assert "safetensors: cannot be written: " in last, last
    assert "File too large" in last, last
    assert "the trainer needs" in last, last
    assert f"{RESULT}: cannot be written: No space left on device" in ended.stderr, "said, and not at the end"
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == [], "what was begun takes no room any more"


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (errno.ENOSPC, "No space left on device; make room on its disk"),
        (errno.EDQUOT, "make room on its disk"),
        (errno.EROFS, "Read-only file system; the trainer needs"),
    ],
    ids=["full", "quota", "read-only"],
)
def test_the_sentence_says_what_would_be_right(tmp_path: Path, number: int, wanted: str) -> None:
    with pytest.raises(DiskRefused) as refused, writing(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert str(refused.value).startswith(f"{tmp_path}/file: cannot be written: ")
    assert wanted in str(refused.value)


def test_a_file_that_was_not_replaced_is_as_it_was_and_takes_no_more_room(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    (tmp_path / ".file.unfinished").symlink_to(FULL)
    with pytest.raises(DiskRefused, match="/file: cannot be written: No space left"):
        replace_file(path, b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_what_is_appended_names_its_file(tmp_path: Path) -> None:
    with FULL.open("ab", buffering=0) as file, pytest.raises(DiskRefused, match=f"^{tmp_path}/rows: cannot be written"):
        append(file, tmp_path / "rows", b"row")


def session(run: Path) -> Session:
    checkpoints = Checkpoints(run, keep=2)
    checkpoints.start()
    state = TrainerState(seed=1, stage=TrainingStage.SFT)
    return Session(state, checkpoints, MetricsLogger(run), checkpoint_every_steps=2)


async def test_a_result_that_cannot_be_written_hides_no_reason_for_which_the_run_failed(tmp_path: Path) -> None:
    (tmp_path / f".{RESULT}.unfinished").symlink_to(FULL)
    session(tmp_path).end(tmp_path, "failed")


async def test_a_run_that_is_done_and_cannot_say_so_fails(tmp_path: Path) -> None:
    one = session(tmp_path)
    (tmp_path / f".{RESULT}.unfinished").symlink_to(FULL)
    with pytest.raises(DiskRefused, match=RESULT):
        one.end(tmp_path, "done")


def test_a_row_of_metrics_that_the_disk_refuses_names_its_file_and_holds_up_no_end(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(DiskRefused, match=f"{METRICS}: cannot be written"):
            metrics.log("sft", 1, {"loss": 0.5})
        metrics.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
