"""When the trainer's own devices may generate: while the window is open, or when nobody else can.

So a step never needs spot capacity: without another engine that serves the right version, reserved engines take the
work, window or not. When the window closes they hand over what they run, if another engine can go on with it; if none
can, they finish it.
"""

from __future__ import annotations

from polyrl.ledger import speed
from polyrl.ledger.events import MoveCause
from polyrl.ledger.scheduling.moves import move
from polyrl.ledger.state import LeasedEngine, LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool


def serves(engine: LeasedEngine, low: int, high: int) -> bool:
    """It takes work, and its verified version may generate."""
    return low <= engine.version <= high and not engine.draining


def may_generate(state: LedgerState, engine: LeasedEngine, low: int, high: int, now: float) -> bool:
    """Whether samples of these versions may be placed on it now, room aside."""
    if not serves(engine, low, high):
        return False
    return engine.pool is not Pool.RESERVED or state.window_open or not _others_can(state, low, high, now)


def hand_over(transition: Transition) -> None:
    """Moves what reserved engines run outside the window, as far as others can go on with it."""
    if transition.state.window_open:
        return
    for engine in transition.state.engines.values():
        if engine.pool is Pool.RESERVED:
            for number in tuple(engine.running):
                assignment = transition.state.assignments[number]
                if _others_can(transition.state, assignment.low, assignment.high, transition.now):
                    move(transition, number, MoveCause.WINDOW)


def slowest_pace(state: LedgerState) -> tuple[float, float]:
    """Seconds per token generated and per token read on the slowest reserved engine when it is full; 0, 0 unless all
    are measured. An audit bounds the window by it: no engine is busy for longer than all work takes it one by one."""
    engines = [engine for engine in state.engines.values() if engine.pool is Pool.RESERVED]
    if not engines or not all(engine.step_scale for engine in engines):
        return 0.0, 0.0
    paces = [(speed.pace_of(engine, 0.0), engine.capacity.max_running) for engine in engines]
    return max(pace.step(running) for pace, running in paces), max(pace.read(running) for pace, running in paces)


def _others_can(state: LedgerState, low: int, high: int, now: float) -> bool:
    engines = state.engines.values()
    return any(e.pool is not Pool.RESERVED and e.quarantined_until <= now and serves(e, low, high) for e in engines)
