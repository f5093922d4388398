"""What engines did: counted, for whom, before what they run changes."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.measures.usage import EVALUATION
from polyrl.ledger.state import LeasedEngine, LedgerState, step_key
from polyrl.sample import Group, Pool, Purpose

PRIORITIES_READ: Final = 16
"""Of what waits, the most urgent: one in each group would be read whole at each end of a turn."""


def work_name(group: Group) -> str:
    """How `LedgerState.usage` names what a group's samples are generated for."""
    return EVALUATION if group.purpose is Purpose.EVAL else step_key(group.step, group.purpose)


def count_work(state: LedgerState, engine: LeasedEngine, at: float) -> None:
    """What an engine runs, it ran until `at`. Before what it runs changes, or whether it may."""
    if engine.running and (state.window_open or engine.pool is not Pool.RESERVED):
        shared, batched = speed.shared_part(engine, waiting=bool(state.queue)), speed.batched_part(engine)
        state.usage.work(engine.work, at, shared, batched=batched, waits_from=_waits_from(state))
    engine.work.since = at


def _waits_from(state: LedgerState) -> float:
    """The first training step of which samples wait, by what is first of each priority: see `GroupState.key`."""
    place, first = 0, inf
    for _ in range(PRIORITIES_READ):
        if place == len(state.queue):
            break
        rank, step, number = state.queue[place]
        if state.groups[number].group.purpose is Purpose.TRAIN:
            first = min(first, step)
        place = bisect_left(state.queue, (rank + 1,))
    return first
