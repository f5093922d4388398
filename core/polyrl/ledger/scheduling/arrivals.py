"""How much an engine gets that has the newest weights before others have loaded them: its share.

Engines load a version at about the same time. Whoever came first would get all that waits, as far as its slots reach,
and others little of it: what runs moves only where that pays. So for a while, SHARED_PART of the time that the first
one took, no engine that has them runs more than all live samples divided by all engines. Who is later is not awaited.
"""

from __future__ import annotations

from math import inf
from typing import Final

from polyrl.ledger.events import PlacementPaused
from polyrl.ledger.transition import Transition

SHARED_PART: Final = 0.1
"""Part of the time from a version's publication to the first engine that serves it."""

LEAST_SHARED_S: Final = 0.05
MOST_SHARED_S: Final = 0.5
"""Those that have just greeted, and need minutes, are counted as well: a step is to lose no more by them."""


def share(transition: Transition) -> float:
    """Samples that an engine with the newest weights runs at most now; infinite where others are not waited for."""
    state, fleet, now = transition.state, transition.fleet, transition.now
    newest, (version, published_at, until) = state.weights.version, fleet.arrivals
    if version != newest:
        version, published_at, until = fleet.arrivals = newest, now, inf
    if now >= until:
        return inf
    serving = fleet.num_engines(newest, newest)
    if not serving:
        return inf
    if until == inf:
        until = now + min(MOST_SHARED_S, max(LEAST_SHARED_S, SHARED_PART * (now - published_at)))
        fleet.arrivals = newest, published_at, until
    behind = fleet.num_engines(-1, newest - 1)
    if not behind:
        return inf
    # Not the very next instant: a clock that is set a rounding error short of it would never come to it.
    transition.record(PlacementPaused(max(until, now + LEAST_SHARED_S)))
    return max(1.0, len(state.samples) / (serving + behind))
