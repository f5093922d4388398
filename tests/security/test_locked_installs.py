"""Images and releases install only files whose hash the lock has: by the very options of their Dockerfiles and make
rules, with the real uv, of an index that serves something else."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = [*sorted(ROOT.glob("images/*/Dockerfile")), ROOT / "make/release.mk"]
OPTIONS = "--require-hashes --no-build -c constraints.lock"
OF_A_WHEEL_MADE_HERE = "--no-deps --no-index"
OF_PIP = "--require-hashes --only-binary :all:"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: str(place.relative_to(ROOT)))
def test_nothing_is_installed_without_a_hash(place: Path) -> None:
    lines = place.read_text().replace("\\\n", " ").splitlines()
    commands = [one for line in lines for one in line.split("&&") if " install " in one and "apt-get" not in one]
    assert len(commands) >= 2
    for command in commands:
        by_uv = OPTIONS in command or OF_A_WHEEL_MADE_HERE in command
        assert by_uv if "/uv pip" in command else OF_PIP in command, command


def test_a_forge_runs_what_was_read() -> None:
    """Actions are named by their commits: a tag may be moved to another one."""
    workflows = [path.read_text() for path in ROOT.glob(".github/workflows/*.yml")]
    used = [line for text in workflows for line in re.findall(r"uses: (.*)", text)]
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", line)] == []


def wheel(folder: Path, name: str, content: str, needs: str = "") -> str:
    """A wheel of one module, and the SHA-256 of its bytes."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        hashed = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={hashed},{len(text)}\n"
    target = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return hashlib.sha256(target.read_bytes()).hexdigest()


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A project that wants `first`, which wants `second`; an index of both, as a folder; the lock of both."""
    (tmp_path / "index").mkdir()
    first = wheel(tmp_path / "index", "first", "", "Requires-Dist: second\n")
    second = wheel(tmp_path / "index", "second", "")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1"\ndependencies = ["first>=1,<2"]\n')
    (tmp_path / "constraints.lock").write_text(
        f"first==1.0 \\\n    --hash=sha256:{first}\nsecond==1.0 \\\n    --hash=sha256:{second}\n"
    )
    venv.create(tmp_path / "venv", with_pip=False)
    return tmp_path


def install(room: Path) -> subprocess.CompletedProcess[str]:
    uv = Path(sys.executable).with_name("uv")
    where = ["--python", "venv", "--no-index", "--find-links", "index", "--no-cache", "--offline"]
    command = [uv, "pip", "install", *where, *OPTIONS.split(), "-r", "pyproject.toml"]
    return subprocess.run(command, cwd=room, capture_output=True, text=True, timeout=60)


def test_what_the_lock_has_is_installed(room: Path) -> None:
    done = install(room)
    assert done.returncode == 0, done.stderr
    assert list((room / "venv").rglob("second.py"))


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize("attack", ["another file", "no hash", "not in the lock", "a source archive"])
def test_what_the_lock_has_not_is_refused(room: Path, name: str, attack: str) -> None:
    lock = room / "constraints.lock"
    entry = re.search(rf"^{name}==1.0 \\\n.*\n", lock.read_text(), re.MULTILINE)
    assert entry
    if attack == "another file":
        wheel(room / "index", name, "print('I am another')", "Requires-Dist: second\n" if name == "first" else "")
    elif attack == "a source archive":
        (room / f"index/{name}-1.0-py3-none-any.whl").rename(room / f"index/{name}-1.0.tar.gz")
    else:
        lock.write_text(lock.read_text().replace(entry[0], f"{name}==1.0\n" if attack == "no hash" else ""))
    done = install(room)
    assert done.returncode != 0
    assert re.search("[Hh]ash|building from source is disabled", done.stderr), done.stderr
    assert not list((room / "venv").rglob("first.py"))
    assert not list((room / "venv").rglob("second.py"))
