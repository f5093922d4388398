"""The manager, unchanged, on a machine whose power is cut: `power_loss.PowerSwitch` says what its journal keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from polyrl_rollout.manager import __main__ as manager
from polyrl_rollout.testing.power_loss import PowerSwitch

if __name__ == "__main__":
    journal = Path(sys.argv[sys.argv.index("--journal") + 1])
    with PowerSwitch(journal).armed():
        typer.run(manager.main)
