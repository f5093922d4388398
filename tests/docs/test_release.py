"""The part of `make release` that needs neither Helm, network nor images: wheel and sdist of this tree, as it lies
here, built twice to equal bytes; and the wheel that the tree itself gives is the one that its sdist gives."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from release.artifacts import SUMS, Build, BuildError, Programs, differences, digest
from release.rules import version_of

ROOT = Path(__file__).parents[2]
AUTHOR = {f"GIT_{role}_{field}": "test@example.org" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
COMMITTED_AT = (2023, 11, 14, 22, 13, 20)
COMMIT_EPOCH_S = 1700000000


def commit_of_what_lies_here(folder: Path) -> str:
    """A commit of the working tree, new files too, that no branch and no index knows of."""
    environment = {**os.environ, **AUTHOR, "GIT_INDEX_FILE": str(folder / "index")}
    environment["GIT_COMMITTER_DATE"] = f"{COMMIT_EPOCH_S} +0000"

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("add", "--all")
    return git("commit-tree", git("write-tree"), "-m", "as it lies here")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    command = [sys.executable, "-m", "release", "build", "--commit", commit_of_what_lies_here(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "make")}
    done = subprocess.run(
        [*command, "--out", folder / "out", "--parts", "packages"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def test_the_sums_are_of_what_lies_beside_them(released: Path) -> None:
    version = version_of((ROOT / "pyproject.toml").read_text())
    sums = dict(reversed(line.split()) for line in (released / SUMS).read_text().splitlines())
    assert sums == {path.name: digest(path) for path in released.iterdir() if path.name != SUMS}
    assert set(sums) == {f"polyrl-{version}-py3-none-any.whl", f"polyrl-{version}.tar.gz"}


def test_the_tree_gives_the_wheel_that_its_sdist_gives(released: Path, tmp_path: Path) -> None:
    (wheel,) = released.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        times = {entry.date_time for entry in archive.infolist()}
        names = archive.namelist()
    assert [name for name in names if {"testing", "tests"} & set(Path(name).parts)] == []
    assert times == {COMMITTED_AT}
    (direct,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(direct) as ours, zipfile.ZipFile(wheel) as theirs:
        assert {name: ours.read(name) for name in ours.namelist()} == {name: theirs.read(name) for name in names}


def test_a_file_that_differs_or_is_missing_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, texts in ((first, ("same", "one", "alone")), (second, ("same", "two"))):
        folder.mkdir()
        for name, text in zip(("equal", "other", "single"), texts, strict=False):
            (folder / name).write_text(text)
    assert differences(first, second) == ["other", "single"]


def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    build = Build(tmp_path, tmp_path, version="0.1.0", epoch=0, programs=Programs(helm="false", buildah="false"))
    with pytest.raises(BuildError, match=r"^false package .* ended with 1$"):
        build.chart()
    assert replace(build, programs=Programs("true", "true")).run("sh", "-c", "printf %s $SOURCE_DATE_EPOCH") == "0"
