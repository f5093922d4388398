"""Which engines are so slow that they hold up a step, and what becomes of them.

    straggler: step(b) >= SLOWNESS * median of its peers' step(b), in each of its last windows,
               as many as MIN_TOKENS came in and MIN_WINDOWS at least

Peers are the other engines that serve the same version and are fit to take its work. With fewer than PEERS of them
nobody is a straggler: of two engines either may be the odd one, and a slow engine is better than none. What a straggler
runs moves to its peers, with all its tokens. It pauses, then is tried with one sample, until a window says that it is
slow no longer (`proven`), or until it has too few peers left (`needed`).

Refuses to hold: moving what pays to be moved (see `rebalance`), engines without any progress (see `leases`).
"""

from __future__ import annotations

from math import inf
from statistics import median
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.decision import Decision
from polyrl.ledger.events import STRAGGLER, EngineTrusted
from polyrl.ledger.scheduling.moves import move, strike
from polyrl.ledger.scheduling.placement import need_of
from polyrl.ledger.scheduling.reserved import may_generate
from polyrl.ledger.state import Engine, State
from polyrl.sample import Pool

SLOWNESS: Final = 10.0
"""Times the peers' median: beyond what different hardware in a fleet explains; rebalancing deals with the rest."""

PEERS: Final = 2
"""Others that must be there: who is slow is told by a majority."""

MIN_TOKENS: Final = 16
"""Tokens over which it must be slow; as many as the slowest that is worth waiting for gives within a minute."""

MIN_WINDOWS: Final = 3
"""Windows over which it must be slow: a pause of a few seconds falls into one or two."""

PAUSE_S: Final = speed.STALE_S
"""Before it is tried again: by then its measurement is old as well, so a fresh sample goes there of itself."""


def look_for_stragglers(d: Decision) -> None:
    """Drains those that are found, and trusts those again that are slow no longer. Part of `tick`."""
    fit = [engine for engine in d.state.engines.values() if _is_fit(d, engine)]
    least = min((engine.step_scale for engine in fit), default=inf)
    for engine in tuple(d.state.engines.values()):
        peers = [other for other in fit if other is not engine]
        if engine.straggler:
            _review(d, engine, peers)
        elif engine.windows and engine.windows[-1][1] >= SLOWNESS * least:
            peers = [other for other in peers if other.version == engine.version]
            if not engine.draining and is_straggler(d.state, engine, peers):
                _drain(d, engine, peers)


def is_straggler(state: State, engine: Engine, peers: list[Engine]) -> bool:
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


def _is_slow(running: float, step: float, peers: list[Engine], fleet: float) -> bool:
    """Against what its peers would need with as many samples; the model of a pace takes any number of them."""
    return step >= SLOWNESS * median(_step(peer, fleet, running) for peer in peers)


def _step(engine: Engine, fleet: float, running: float) -> float:
    pace = speed.pace_of(engine, fleet)
    return pace.step_s * (1 + running / pace.half_batch)


def _is_fit(d: Decision, engine: Engine) -> bool:
    """Whether it is measured, may generate, and has not failed."""
    if not engine.step_scale or engine.version < 0 or engine.draining:
        return False
    if engine.strikes or engine.straggler or engine.trusted_at > d.now:
        return False
    return engine.pool is not Pool.RESERVED or d.state.window_open


def _review(d: Decision, engine: Engine, peers: list[Engine]) -> None:
    if len(peers) < PEERS:
        d.record(EngineTrusted(engine.name, "needed", d.now))
    elif engine.windows:
        running, step, _ = engine.windows[-1]
        if not _is_slow(running, step, peers, speed.fleet_step(d.state)):
            d.record(EngineTrusted(engine.name, "proven", d.now))


def _drain(d: Decision, engine: Engine, peers: list[Engine]) -> None:
    strike(d, engine.name, STRAGGLER, PAUSE_S)
    for number in tuple(engine.running):
        if any(_takes(d, peer, number) for peer in peers):
            move(d, number, STRAGGLER)


def _takes(d: Decision, peer: Engine, number: int) -> bool:
    """Whether the sample could ever go on there."""
    assignment = d.state.assignments[number]
    able = may_generate(d.state, peer, assignment.low, assignment.high, d.now)
    return able and need_of(d.state, assignment.sample).context <= peer.max_context
