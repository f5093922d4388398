"""Where commands print: as wide as the terminal, and 120 columns where there is none, as in a log or a pipe."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

WIDTH_ELSEWHERE: Final = 120


def terminal() -> Console:
    """Numbers and paths in what it prints get no colours of its own."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_ELSEWHERE, highlight=False)
