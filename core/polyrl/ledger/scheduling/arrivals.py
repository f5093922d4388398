"""How much an engine gets that has the newest weights before others have loaded them: its share.

Engines load a version at about the same time. Whoever came first would get all that waits, as far as its slots reach,
and others little of it: what runs moves only where that pays. So for a while, SHARED_PART of the time that the first
one took, no engine that has them gets more than all that runs or waits divided by all engines. Who is later is not
awaited, and for LEAST_SHARED_S only who has no weights yet: a new machine needs minutes, a broken one never has any.
The trainer's own are awaited like those that have some: without others they would have it all.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from polyrl.ledger.causes import RestPhase
from polyrl.ledger.events import PlacementPaused
from polyrl.ledger.transition import Transition

SHARED_PART: Final = 0.1
"""Part of the time from a version's publication to the first engine that serves it."""

LEAST_SHARED_S: Final = 0.05
MOST_SHARED_S: Final = 0.5
"""One that is much slower than the first is counted as well: a step is to lose no more by it."""


class Share(NamedTuple):
    """What an engine with the newest weights may be given now; infinite where others are not waited for."""

    most: float = inf
    """Samples that it runs then."""
    until: float = -inf


def share(transition: Transition) -> Share:
    """Looked at again when it ends. After a restart of the manager there is none until the next version."""
    state, fleet, now = transition.state, transition.fleet, transition.now
    (version, first_at), published_at = fleet.arrivals, state.published_at
    until = first_at + min(MOST_SHARED_S, max(LEAST_SHARED_S, SHARED_PART * (first_at - published_at)))
    if first_at == inf or now >= until:
        return Share()
    early, behind = first_at + LEAST_SHARED_S, fleet.num_engines(0, version - 1)
    behind += sum(engine.version < 0 and engine.rest.phase is RestPhase.AWAKE for engine in fleet.reserved())
    until = until if behind else early
    if now < early:
        behind = fleet.num_engines(-1, version - 1)
    serving = fleet.num_engines(version, version)
    if not (serving and behind) or now >= until:
        return Share()
    # Not the very next instant: a clock that is set a rounding error short of it would never come to it.
    transition.record(PlacementPaused(max(early if now < early else until, now + LEAST_SHARED_S)))
    if now >= fleet.counted_until:  # a queue of 16,384 groups takes milliseconds to count
        fleet.counted_until = now + LEAST_SHARED_S
        fleet.wanted = len(state.assignments) + sum(len(state.groups[number].waiting) for *_, number in state.queue)
    return Share(max(1.0, fleet.wanted / (serving + behind)), until)
