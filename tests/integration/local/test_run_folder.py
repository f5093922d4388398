"""What a runner reads of the folder of an earlier run."""

import json
from pathlib import Path

import pytest

from polyrl.errors import UserError
from polyrl_cli.local.run_folder import RunFolder, rl_steps_kept


def checkpoint(root: Path, stage: str, step: int, serial: int, complete: bool = True) -> Path:
    folder = root / "checkpoints" / f"{stage}-step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"seed": 0, "stage": stage, "step": step}))
    if complete:
        (folder / "COMPLETE.json").write_text(json.dumps({"serial": serial}))
    return folder


def test_rl_steps_are_those_of_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert rl_steps_kept(run) == 0
    checkpoint(tmp_path, "sft", 40, serial=1)
    assert rl_steps_kept(run) == 0
    checkpoint(tmp_path, "rl", 25, serial=2)
    checkpoint(tmp_path, "rl", 50, serial=3, complete=False)
    assert rl_steps_kept(run) == 25


def test_a_checkpoint_without_its_state_is_named(tmp_path: Path) -> None:
    (checkpoint(tmp_path, "rl", 3, serial=1) / "state.json").write_text("[]")
    with pytest.raises(UserError, match=r"rl-step-000003/state.json: not a trainer's state"):
        rl_steps_kept(RunFolder(tmp_path))
