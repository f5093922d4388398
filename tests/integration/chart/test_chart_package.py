"""The chart as a package: the same bytes whenever and from whichever folder it is made, and what it was made from."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from release.artifacts import Build, Programs, digest

ROOT = Path(__file__).parents[3]
EPOCH_S = 1700000000


def packaged(helm_program: str, folder: Path) -> Path:
    """From a copy whose files are as new as the copy."""
    (folder / "out").mkdir(parents=True)
    shutil.copytree(ROOT / "charts", folder / "charts", copy_function=shutil.copyfile)
    programs = Programs(helm=helm_program, buildah="false")
    Build(folder, folder / "out", version="0.1.0", epoch=EPOCH_S, programs=programs).chart()
    (package,) = (folder / "out").iterdir()
    return package


def test_it_is_the_same_twice_and_renders_as_the_folder_does(
    helm_program: str, helm: Callable[..., Any], tmp_path: Path
) -> None:
    first, second = (packaged(helm_program, tmp_path / name) for name in ("first", "second"))
    assert digest(first) == digest(second)
    with tarfile.open(first) as archive:
        assert {member.mtime for member in archive} == {EPOCH_S}
    rendered = [
        helm("template", "r", chart, "--set=images.prefix=example.org/").stdout
        for chart in (first, ROOT / "charts/polyrl")
    ]
    assert rendered[0]
    assert rendered[0] == rendered[1]
