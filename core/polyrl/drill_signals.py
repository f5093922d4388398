"""The two signals by which a drill cuts an agent off from its manager, and lets it back (see the agent's `link`).

A plain process cannot cut a connection of another one; so the agent itself holds everything back in both directions.
Refuses to hold: who sends them (see the runner's `inflicting`).
"""

from __future__ import annotations

import signal
from typing import Final

CUT_OFF: Final = signal.SIGUSR1
LET_BACK: Final = signal.SIGUSR2
