"""The signals by which a drill cuts an agent off from its manager, and lets it back (see the agent's `link`).

A plain process cannot cut a connection of another one; so the agent itself holds everything back, in one direction or
in both.
"""

from __future__ import annotations

import signal
from typing import Final

PARTITION: Final = signal.SIGUSR2
PARTITION_IN: Final = int(signal.SIGRTMIN) + 1
"""What the manager says is lost."""

PARTITION_OUT: Final = int(signal.SIGRTMIN) + 2
"""What the agent says is lost."""

HEAL: Final = signal.SIGUSR1
"""The end of each of them. Its number is the lowest: of several that waited for a stopped process, the handler of the
highest runs first, and an end before its beginning would leave the agent cut off for good."""
