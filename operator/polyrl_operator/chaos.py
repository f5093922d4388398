"""`polyrl chaos ACTION [RUN]`: asks the runner of a live run for one fault, and says what it has done.

Refuses to hold: the fault itself (see `inflicting`). Read next: `faults`.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Final

import msgspec

from polyrl_operator.faults import Wish
from polyrl_operator.find_run import find_run
from polyrl_operator.runner_desk import ask_runner

SEED_BITS: Final = 32
"""Of a drawn seed; short enough to be typed again."""


def chaos_line(run: Path | None, wish: Wish, seed: int | None) -> str:
    """Who was hit, how, and the seed that would choose the same again. Raises UserError when nothing was done."""
    folder = find_run(run)
    drawn = secrets.randbits(SEED_BITS) if seed is None else seed
    done = asyncio.run(ask_runner(folder.control, msgspec.structs.replace(wish, seed=drawn)))
    return f"{folder.root}: {done} (seed {drawn})"
