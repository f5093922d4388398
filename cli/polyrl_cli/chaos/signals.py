"""What a fault is to the processes that it hits: which of them get which signal, and what undoes it after how long.

Refuses to hold: who sends it, from outside (`inflicting`) or from inside a container (`pod_drill`).
"""

from __future__ import annotations

import signal
from typing import Final, NamedTuple

from polyrl.partition_signals import HEAL, PARTITION, PARTITION_IN, PARTITION_OUT
from polyrl_cli.chaos.faults import Fault
from polyrl_cli.chaos.kinds import ChaosAction, Direction, Target
from polyrl_cli.local.process_fleet import Part

SLOW_PERIOD_S: Final = 0.5
"""A slow victim is stopped once in this time: often beside a lease of 3 s, rarely beside a token."""

_CUT: Final = {
    Direction.BOTH: PARTITION,
    Direction.IN: PARTITION_IN,
    Direction.OUT: PARTITION_OUT,
}


class Signals(NamedTuple):
    """In turn until the fault's time is over: `begin`, `on_s` later `undo`, and `off_s` later again."""

    part: Part
    begin: int
    undo: int = 0
    """0: there is nothing to undo, `begin` is sent once."""
    on_s: float = 0.0
    off_s: float = 0.0


def signals_of(fault: Fault) -> Signals:
    """Of any fault but one that takes a worker away."""
    part = Part.BELOW if fault.target is Target.ENGINE else Part.ALL
    match fault.action:
        case ChaosAction.PARTITION:
            return Signals(Part.WORKER, _CUT[fault.direction], HEAL, fault.seconds)
        case ChaosAction.SLOW:
            stopped_s = SLOW_PERIOD_S * (1 - fault.speed)
            return Signals(part, signal.SIGSTOP, signal.SIGCONT, stopped_s, SLOW_PERIOD_S - stopped_s)
        case ChaosAction.FREEZE:
            return Signals(part, signal.SIGSTOP, signal.SIGCONT, fault.seconds)
        case ChaosAction.KILL | ChaosAction.PREEMPT:
            return Signals(part, signal.SIGKILL if fault.action is ChaosAction.KILL else signal.SIGTERM)
