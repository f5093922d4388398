"""The signals by which fault injection partitions an agent from its manager, and heals the partition (see the agent's
`link`). No process can break a connection of another one, so the agent itself drops messages, in one direction or both.
"""

from __future__ import annotations

import signal
from typing import Final

PARTITION: Final = signal.SIGUSR2
PARTITION_IN: Final = int(signal.SIGRTMIN) + 1
"""Messages from the manager are lost."""

PARTITION_OUT: Final = int(signal.SIGRTMIN) + 2
"""Messages from the agent are lost."""

HEAL: Final = signal.SIGUSR1
"""The end of each of them. Its number is the lowest: of several that waited for a stopped process, the handler of the
highest runs first in each thread. Between threads nothing orders them; an agent also takes an end that comes first."""
