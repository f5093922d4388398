"""`polyrl init` writes a job that is valid as it stands, and writes over nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyrl.errors import UserError
from polyrl.manifest.job import Metadata
from polyrl_cli.manifests.load import check_files, load_manifest
from polyrl_cli.manifests.starter import MANIFEST, STARTERS, Task, init_lines, job_name

README = Path(__file__).parents[3] / "README.md"
NAMES = {"job.yaml", "reward.py", "rows.jsonl", "test_reward.py"}
MAX_LINES = 15


def without_comments(text: str) -> list[str]:
    lines = (re.sub(r"\s*#.*", "", line) for line in text.splitlines())
    return [line for line in lines if line]


@pytest.mark.parametrize("task", Task)
def test_what_is_written_is_valid(tmp_path: Path, task: Task) -> None:
    folder = tmp_path / "My Task"
    lines = init_lines(folder, task)
    assert {path.name for path in folder.iterdir()} == NAMES
    assert str(folder / "job.yaml") in lines[-1]
    job = load_manifest(folder / "job.yaml")
    assert job.metadata.name == "my-task"
    check_files(job, folder / "job.yaml")


@pytest.mark.parametrize("name", ["007", "2026", "1e3", "0x10", "no", "null"])
def test_a_folder_whose_name_looks_like_a_number_names_its_job_all_the_same(tmp_path: Path, name: str) -> None:
    init_lines(tmp_path / name)
    assert load_manifest(tmp_path / name / "job.yaml").metadata.name == name


@pytest.mark.slow
@pytest.mark.parametrize("task", Task)
def test_the_test_of_the_reward_passes(tmp_path: Path, task: Task) -> None:
    init_lines(tmp_path, task)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_reward.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("task", Task)
def test_it_is_short(task: Task) -> None:
    assert len(without_comments(STARTERS[task]["job.yaml"])) <= MAX_LINES
    assert STARTERS[task]["rows.jsonl"].count("\n") == 10


def test_the_readme_shows_the_same_manifest() -> None:
    shown = re.findall(r"^```yaml\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    ours = without_comments(MANIFEST.replace("NAME", "my-task"))
    assert ours in [without_comments(block) for block in shown]


@pytest.mark.parametrize("there", sorted(NAMES))
def test_nothing_is_written_over(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(UserError, match=f"{there}: is there already"):
        init_lines(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "mine")]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("digits", "digits"),
        ("My_Task 2", "my-task-2"),
        ("--é--", "my-task"),
        ("x" * 90, "x" * 46),
        ("a" * 45 + "_b", "a" * 45),
    ],
)
def test_a_folder_gives_its_name(folder: str, name: str) -> None:
    assert job_name(folder) == name
    Metadata(name=name)
