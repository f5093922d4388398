"""The loads that a manager is offered. One row of the table each: `python benchmarks/manager/run.py --row NAME`.

`flat out`: agents send as fast as the manager keeps what it got; the cost per token is measured, latencies are not.
`paced`: each sample gives STREAM_TOKENS_PER_S, as engines do; latencies and whether a core is enough are measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

STREAM_TOKENS_PER_S: Final = 40.0
"""What one sample of a busy engine gives."""


@dataclass(frozen=True)
class Load:
    """`groups` x `n` samples on `engines` engines, `chunk` tokens of each sample per Deltas."""

    engines: int
    groups: int
    n: int
    tokens: int
    """Longest response."""
    shortest: int = 0
    """Responses end anywhere from here on, evenly; 0: all are `tokens` long."""
    chunk: int = 10
    pace: float = math.inf
    """Tokens per second of each sample; inf: flat out."""
    limit_tokens: float = math.inf
    """It ends once so many tokens were sent; inf: with its last sample. Until then finished groups are replaced."""
    limit_s: float = math.inf
    """And at the latest after so long."""

    @property
    def samples(self) -> int:
        """In flight at once."""
        return self.groups * self.n

    @property
    def endless(self) -> bool:
        """It ends at a limit, not with its samples."""
        return min(self.limit_tokens, self.limit_s) < math.inf


SLICE_TOKENS: Final = 4_000_000
"""Of the load that would be 229M tokens long."""

HOUR_TOKENS: Final = 8 * 16 * STREAM_TOKENS_PER_S * 3600
"""What 128 streams give in an hour."""

STREAMS: Final = Load(engines=64, groups=1250, n=8, tokens=4000, shortest=200, pace=STREAM_TOKENS_PER_S, limit_s=40)
"""A large fleet on a small manager; about 1 in 100 samples ends each second and is replaced."""

ROWS: Final = {
    "place": Load(engines=8, groups=128, n=8, tokens=10),
    "place-large": Load(engines=256, groups=2048, n=8, tokens=10),
    "8x16x1000": Load(engines=8, groups=16, n=8, tokens=1000),
    "8x16x4000": Load(engines=8, groups=16, n=8, tokens=4000),
    "8x16x14000": Load(engines=8, groups=16, n=8, tokens=14_000),
    "64x32x4000": Load(engines=64, groups=256, n=8, tokens=4000),
    "256x64x14000": Load(engines=256, groups=2048, n=8, tokens=14_000, limit_tokens=SLICE_TOKENS),
    "8x16-paced": Load(engines=8, groups=16, n=8, tokens=4000, pace=STREAM_TOKENS_PER_S, limit_s=20),
    "64x32-paced": Load(engines=64, groups=256, n=8, tokens=4000, pace=STREAM_TOKENS_PER_S, limit_s=20),
    "10000-streams": STREAMS,
    "10000-streams-of-small-rows": replace(STREAMS, chunk=2),
    "hour": Load(engines=8, groups=16, n=8, tokens=4000, shortest=200, limit_tokens=HOUR_TOKENS),
}
