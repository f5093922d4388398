"""The user's files as a kubelet mounts a ConfigMap: links to links, in a folder that cannot be written to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "reward.py": "from digits import WANTED\ndef score(sample):\n    return WANTED\n",
    "digits.py": "WANTED = 1.0\n",
    "rl.jsonl": '{"prompt": "12="}\n',
}
SCRIPT = """
import sys
from pathlib import Path
from polyrl_trainer.user_code.loading import load_function
from polyrl_trainer.data.rows import read_rows
folder = Path(sys.argv[1])
assert load_function("reward:score", folder)(None) == 1.0
(row,) = read_rows(folder / "rl.jsonl")
print(row.place)
"""
DEADLINE_S = 60


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """As `atomic_writer.go` lays it out: ..data is swapped when the ConfigMap changes, and files are links into it."""
    folder = tmp_path / "manifest"
    real = folder / "..2026_11_21_00_00_00.1"
    real.mkdir(parents=True)
    (folder / "..data").symlink_to(real.name)
    for name, text in FILES.items():
        (real / name).write_text(text)
        (folder / name).symlink_to(f"..data/{name}")
    for path in (real, folder):
        path.chmod(0o555)
    return folder


def test_code_and_rows_are_read_and_nothing_is_written(mounted: Path) -> None:
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", SCRIPT, str(mounted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{mounted}/rl.jsonl:1"
    assert not list(mounted.rglob("__pycache__")), "root may write where others may not, and must not"
