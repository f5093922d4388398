"""What a runner reads of the folder of an earlier run."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from polyrl.errors import UserError
from polyrl.manifest.job import PolyRLJob
from polyrl.testing.job_values import raw_job
from polyrl_cli.local.run_folder import (
    RunFolder,
    cause_of,
    kept_state,
    last_words,
    manifest_dir,
    new_run_folder,
    prepare_folder,
)


def checkpoint(root: Path, stage: str, step: int, serial: int, complete: bool = True) -> Path:
    folder = root / "checkpoints" / f"{stage}-step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"seed": 0, "stage": stage, "step": step}))
    if complete:
        (folder / "COMPLETE.json").write_text(json.dumps({"serial": serial}))
    return folder


def test_rl_steps_are_those_of_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert kept_state(run).rl_steps == 0
    checkpoint(tmp_path, "sft", 40, serial=1)
    assert kept_state(run).rl_steps == 0
    checkpoint(tmp_path, "rl", 25, serial=2)
    checkpoint(tmp_path, "rl", 50, serial=3, complete=False)
    assert kept_state(run).rl_steps == 25


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    made = []
    for _ in range(3):
        folder = new_run_folder(None, "sort", now)
        folder.job.write_text("{}")
        made.append(folder.root.name)
    assert made == ["sort-20260102-030405", "sort-20260102-030405-2", "sort-20260102-030405-3"]


def test_the_next_epoch_sets_summary_and_logs_of_the_last_one_aside(tmp_path: Path) -> None:
    run, job = RunFolder(tmp_path), PolyRLJob.model_validate(raw_job())
    assert prepare_folder(run, job, tmp_path) == 1
    run.log_of("trainer").write_text("the first attempt's error\n")
    run.summary.write_text("{}")
    assert prepare_folder(run, job, tmp_path) == 2
    assert last_words(run.log_of("trainer")) == ""
    assert (tmp_path / "logs-of-epoch-1" / "trainer.log").read_text() == "the first attempt's error\n"
    assert (tmp_path / "summary-of-epoch-1.json").read_text() == "{}"
    assert not run.summary.exists()
    assert manifest_dir(run) == tmp_path


def test_a_manifest_that_is_gone_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="does not say where its manifest lay; name the manifest: polyrl run FILE --resume"
    ):
        manifest_dir(RunFolder(tmp_path))


def test_a_checkpoint_without_its_state_is_named(tmp_path: Path) -> None:
    (checkpoint(tmp_path, "rl", 3, serial=1) / "state.json").write_text("[]")
    with pytest.raises(UserError, match=r"rl-step-000003/state.json: not a trainer's state"):
        kept_state(RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("written", "free", "cause"),
    [
        ("", 0, "no space is left on the disk of {}"),
        ("", 4096, ""),
        ("the port is taken\n", 0, "the port is taken"),
    ],
    ids=["full", "silent", "it still said why"],
)
def test_a_worker_that_could_write_no_reason_ended_for_want_of_room(
    tmp_path: Path, written: str, free: int, cause: str
) -> None:
    log = tmp_path / "manager.log"
    log.write_text(written)
    assert cause_of(log, lambda _: free) == cause.format(tmp_path)
