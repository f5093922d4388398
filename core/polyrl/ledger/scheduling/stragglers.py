"""Which engines are so slow that they hold up a step, and what becomes of them.

    straggler: step(b) >= SLOWNESS * median of its peers' step(b), in each of its last windows,
               as many as MIN_TOKENS came in and MIN_WINDOWS at least

Peers are the other engines that serve the same version and are fit to take its work. With fewer than PEERS of them
nobody is a straggler: of two engines either may be the odd one, and a slow engine is better than none. What a straggler
runs moves to its peers, with all its tokens. It pauses, then is tried with one sample, until a window says that it is
slow no longer (`proven`), or until it has too few peers left (`needed`).
"""

from __future__ import annotations

from math import inf
from statistics import median
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.events import EngineRestored, MoveCause, RestoreCause
from polyrl.ledger.scheduling.moves import move, quarantine
from polyrl.ledger.scheduling.placement import may_generate, placement_request
from polyrl.ledger.state import LeasedEngine, LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool

SLOWNESS: Final = 10.0
"""Times the peers' median: beyond what different hardware in a fleet explains; rebalancing deals with the rest."""

PEERS: Final = 2
"""Others that must be there: a majority decides who is slow."""

MIN_TOKENS: Final = 16
"""Tokens over which it must be slow; as many as the slowest that is worth waiting for gives within a minute."""

MIN_WINDOWS: Final = 3
"""Windows over which it must be slow: a pause of a few seconds falls into one or two."""

PAUSE_S: Final = speed.STALE_S
"""Before it is tried again: by then its measurement is old as well, so a fresh sample goes there of itself."""


def look_for_stragglers(transition: Transition) -> None:
    """Drains those that are found, and trusts those again that are slow no longer. Part of `tick`."""
    fit = [engine for engine in transition.state.engines.values() if _is_fit(transition, engine)]
    least = min((engine.step_scale for engine in fit), default=inf)
    for engine in tuple(transition.state.engines.values()):
        peers = [other for other in fit if other is not engine]
        if engine.straggler:
            _review(transition, engine, peers)
        elif engine.windows and engine.windows[-1][1] >= SLOWNESS * least:
            peers = [other for other in peers if other.version == engine.version]
            if not engine.draining and is_straggler(transition.state, engine, peers):
                _drain(transition, engine, peers)


def is_straggler(state: LedgerState, engine: LeasedEngine, peers: list[LeasedEngine]) -> bool:
    """Whether all of its last windows say so."""
    if len(peers) < PEERS:
        return False
    fleet, tokens = speed.fleet_step(state), 0
    for seen, (running, step, count) in enumerate(reversed(engine.windows), start=1):
        if not _is_slow(running, step, peers, fleet):
            return False
        tokens += count
        if seen >= MIN_WINDOWS and tokens >= MIN_TOKENS:
            return True
    return False


def _is_slow(running: float, step: float, peers: list[LeasedEngine], fleet: float) -> bool:
    """Against what its peers would need with as many samples."""
    return step >= SLOWNESS * median(speed.pace_of(peer, fleet).step(running) for peer in peers)


def _is_fit(transition: Transition, engine: LeasedEngine) -> bool:
    """Whether it is measured, may generate, and has not failed."""
    if not engine.step_scale or engine.version < 0 or engine.draining:
        return False
    if engine.failures or engine.straggler or engine.quarantined_until > transition.now:
        return False
    return engine.pool is not Pool.RESERVED or transition.state.window_open


def _review(transition: Transition, engine: LeasedEngine, peers: list[LeasedEngine]) -> None:
    if len(peers) < PEERS:
        transition.record(EngineRestored(engine.name, RestoreCause.NEEDED, at=transition.now))
    elif engine.windows:
        running, step, _ = engine.windows[-1]
        if not _is_slow(running, step, peers, speed.fleet_step(transition.state)):
            transition.record(EngineRestored(engine.name, RestoreCause.PROVEN, at=transition.now))


def _drain(transition: Transition, engine: LeasedEngine, peers: list[LeasedEngine]) -> None:
    quarantine(transition, engine.name, MoveCause.STRAGGLER, first_pause_s=PAUSE_S)
    for number in tuple(engine.running):
        if any(_takes(transition, peer, number) for peer in peers):
            move(transition, number, MoveCause.STRAGGLER)


def _takes(transition: Transition, peer: LeasedEngine, number: int) -> bool:
    """Whether the sample could ever go on there."""
    assignment = transition.state.assignments[number]
    able = may_generate(transition.state, peer, assignment.low, assignment.high, transition.now)
    return able and placement_request(transition.state, assignment.sample).context <= peer.capacity.max_context
