"""What a fault is to the processes that it hits: which of them get which signal, and what undoes it after how long.

Refuses to hold: who sends it, from outside (`inflicting`) or from inside a container (`pod_drill`).
"""

from __future__ import annotations

import signal
from typing import Final, NamedTuple

from polyrl.partition_signals import CUT_IN, CUT_OFF, CUT_OUT, LET_BACK
from polyrl_cli.chaos.faults import Infliction
from polyrl_cli.chaos.kinds import Action, Direction, Target
from polyrl_cli.local.process_fleet import Part

SLOW_PERIOD_S: Final = 0.5
"""A slow victim is stopped once in this time: often beside a lease of 3 s, rarely beside a token."""

_CUT: Final = {Direction.BOTH: CUT_OFF, Direction.IN: CUT_IN, Direction.OUT: CUT_OUT}


class Signals(NamedTuple):
    """In turn until the fault's time is over: `begin`, `on_s` later `undo`, and `off_s` later again."""

    part: Part
    begin: int
    undo: int = 0
    """0: there is nothing to undo, `begin` is sent once."""
    on_s: float = 0.0
    off_s: float = 0.0


def signals_of(fault: Infliction) -> Signals:
    """Of any fault but one that takes a worker away."""
    part = Part.BELOW if fault.target is Target.ENGINE else Part.ALL
    match fault.action:
        case Action.PARTITION:
            return Signals(Part.WORKER, _CUT[fault.direction], LET_BACK, fault.seconds)
        case Action.SLOW:
            stopped_s = SLOW_PERIOD_S * (1 - fault.speed)
            return Signals(part, signal.SIGSTOP, signal.SIGCONT, stopped_s, SLOW_PERIOD_S - stopped_s)
        case Action.FREEZE:
            return Signals(part, signal.SIGSTOP, signal.SIGCONT, fault.seconds)
        case Action.KILL | Action.PREEMPT:
            return Signals(part, signal.SIGKILL if fault.action is Action.KILL else signal.SIGTERM)
