"""The environment of a process that this machine starts for a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from polyrl.manifest.environment import inherited
from polyrl.parent_death_signal import PARENT_PID


def process_environment(own: Mapping[str, str], inherits: Iterable[str]) -> dict[str, str]:
    """What is inherited by name, what every process of ours has, and its own; it ends when this process does."""
    ours = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", PARENT_PID: str(os.getpid())}
    return {**inherited(os.environ, inherits), **ours, **own}
