"""The chart as a package: the same bytes whenever and from whichever folder it is made, and what it was made from."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from release.artifacts import Build, Programs, digest
from release.provenance import sign_chart

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


def test_helm_itself_verifies_the_provenance_of_a_signed_package(
    helm_program: str, helm: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, keyring = packaged(helm_program, tmp_path), tmp_path / "keyring"
    with tempfile.TemporaryDirectory(prefix="g") as home:  # its sockets' names are short
        monkeypatch.setenv("GNUPGHOME", home)
        of_us = ["--passphrase", "", "--quick-generate-key", "us@example.org", "ed25519", "sign", "never"]
        subprocess.run(["gpg", "--batch", "--quiet", *of_us], check=True, timeout=60)
        subprocess.run(["gpg", "--export", "--output", keyring, "us@example.org"], check=True, timeout=60)
        sign_chart(package.parent, "0.1.0", "us@example.org", keyring)
        subprocess.run(["gpgconf", "--kill", "gpg-agent"], check=True, timeout=60)
    verified = helm("verify", "--keyring", keyring, package)
    assert verified.returncode == 0, verified.stderr
    assert digest(package) in verified.stdout
    with package.open("ab") as file:
        file.write(b" ")
    assert helm("verify", "--keyring", keyring, package).returncode != 0
