"""`polyrl chaos ACTION [RUN]`: inflicts one fault on a live run, and says what was done.

On this machine the run's own runner is asked; on a cluster the job's pods are hit from here (see `chaos_on_pods`).
Refuses to hold: the fault itself (see `inflicting`). Read next: `faults`.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Final

import msgspec

from polyrl_cli.chaos.faults import FaultRequest
from polyrl_cli.local.control_socket import ask_runner
from polyrl_cli.local.find_run import find_run

SEED_BITS: Final = 32
"""Of a drawn seed; short enough to be typed again."""


def chaos_line(run: Path | None, wish: FaultRequest, seed: int | None) -> str:
    """Who was hit on this machine, how, and the seed that would choose the same again.

    Raises UserError when nothing was done.
    """
    folder = find_run(run)
    drawn = with_seed(wish, seed)
    return f"{folder.root}: {asyncio.run(ask_runner(folder.control, drawn))} (seed {drawn.seed})"


def with_seed(wish: FaultRequest, seed: int | None) -> FaultRequest:
    """The wish with this seed, or with a new one."""
    return msgspec.structs.replace(wish, seed=secrets.randbits(SEED_BITS) if seed is None else seed)
