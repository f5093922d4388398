"""A step that takes more prompts than there are asks some of them again, which a note says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyrl.manifest.job import JobSpec
from polyrl.wire.checks import CheckFault, CheckNote
from polyrl_trainer.check.rows import check_data

PROMPT = {"prompt": "1="}
FINISHED = {**PROMPT, "response": "1", "reward": 1.0}


def checked(
    folder: Path, files: dict[str, list[dict[str, Any]]], mode: str, of: type[CheckNote | CheckFault] = CheckNote
) -> list[str]:
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"config": {"model_type": "qwen2"}, "tokenizer": {"type": "characters", "alphabet": "1="}}
    data = [{"path": name, "weight": 0 if name == "unread.jsonl" else 1} for name in files]
    recipe = {"mode": mode, "model": model, "data": {"rl": data}, "algorithm": {"promptsPerStep": 3}}
    recipe["reward"] = {"function": "reward:score"}
    spec = JobSpec.model_validate({"recipe": recipe, "rollout": {"engine": {"type": "embedded"}}})
    return [one.sentence for one in check_data(spec, folder) if isinstance(one, of)]


def test_fewer_prompts_than_a_step_takes_are_named(tmp_path: Path) -> None:
    files = {"a.jsonl": [PROMPT], "b.jsonl": [PROMPT]}
    (note,) = checked(tmp_path, files, "rl")
    assert note == (
        "recipe.algorithm.promptsPerStep is 3, and data.rl has 2 prompts: each step takes some more than once"
    )


@pytest.mark.parametrize("files", [{"a.jsonl": [PROMPT] * 3}, {"a.jsonl": [PROMPT], "b.jsonl": [PROMPT] * 2}])
def test_enough_of_them_are_no_note(tmp_path: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    assert checked(tmp_path, files, "rl") == []


def test_of_finished_samples_groups_count(tmp_path: Path) -> None:
    rows = [FINISHED | {"group": number // 2} for number in range(4)]
    (note,) = checked(tmp_path, {"a.jsonl": rows}, "offline-rl")
    assert "data.rl has 2 groups" in note


def test_files_of_no_weight_do_not_count(tmp_path: Path) -> None:
    (note,) = checked(tmp_path, {"a.jsonl": [PROMPT], "unread.jsonl": [PROMPT] * 9}, "rl")
    assert "data.rl has 1 prompts" in note


def test_nothing_is_counted_of_rows_that_are_refused(tmp_path: Path) -> None:
    files = {"a.jsonl": [PROMPT, {"prompt": "2="}]}
    assert checked(tmp_path, files, "rl") == []
    assert len(checked(tmp_path, files, "rl", CheckFault)) == 1
