"""Which run a command that looks from outside means: the folder it was given, else the newest under `runs/`.

Refuses to hold: what lies in the folder (see `run_folder`). Read next: `run_folder`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from polyrl.errors import UserError
from polyrl_cli.local.run_folder import RunFolder

RUNS: Final = Path("runs")
"""Where `polyrl run` puts runs unless told otherwise."""


def find_run(given: Path | None) -> RunFolder:
    """The run's folder. Raises UserError when no run lies there."""
    root = given if given is not None else _newest()
    folder = RunFolder(root.resolve())
    if not folder.job.is_file():
        raise UserError(f"{root}: no run lies there (it has no job.json)")
    return folder


def journal_of(folder: RunFolder) -> Path:
    """Where its manager keeps its journal."""
    return folder.root / "journal.sqlite"


def journals_of_older_epochs(folder: RunFolder) -> list[Path]:
    """Those that `polyrl run --resume` has set aside, the oldest first."""
    found = folder.root.glob("journal-of-epoch-*.sqlite")
    return sorted(found, key=lambda path: int(path.stem.rpartition("-")[2]))


def _newest() -> Path:
    runs = [job.parent for job in RUNS.glob("*/job.json")]
    if not runs:
        raise UserError(f"{RUNS.resolve()}: no run lies there; name the folder of one")
    return max(runs, key=lambda run: (run / "job.json").stat().st_mtime)
