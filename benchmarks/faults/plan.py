"""Which faults a run gets: one to four, each a kind, a role and an instant, all drawn from the run's seed.

An instant is a share of the job's tokens and a moment after it, so that it means the same on a fast machine and on a
busy one; share 0 falls into the start of the processes.

Refuses to hold: processes (see `injector`), jobs (see `jobs`). Read next: `injector`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Final

from polyrl_cli.chaos.faults import FaultRequest
from polyrl_cli.chaos.kinds import ChaosAction, Target

MOST_FAULTS: Final = 4

AT_START: Final = 0.15
"""Share of the faults that fall into the start."""

START_S: Final = 3.0
"""Even draw of a moment in the start: processes have spoken to each other by its end, or are about to."""

JITTER_S: Final = 0.3
"""Even draw of a moment after the instant's tokens: the status comes five times a second, a fault at any moment."""

FROZEN_S: Final = (0.3, 6.0)
"""Bounds of an even draw: half of the frosts outlast the lease of 3 s."""

MOST_KILLS: Final = 2
"""Of one role. A third failure in a row right after a start is what the planner gives a role up for, by design."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault to come."""

    request: FaultRequest
    share: float
    """Of the tokens that the undisturbed job generates; reached before it is injected."""
    then_s: float
    """Seconds after that."""

    def __str__(self) -> str:
        frozen = f" {self.request.seconds:.1f} s" if self.request.action is ChaosAction.FREEZE else ""
        return f"{self.request.action} {self.request.target}{frozen} at {self.share:.2f}"


def draw(seed: int) -> list[PlannedFault]:
    """The faults of the run with this seed, in the order of their instants."""
    dice = random.Random(seed)
    faults: list[PlannedFault] = []
    kills: Counter[Target] = Counter()
    for _ in range(dice.randint(1, MOST_FAULTS)):
        fault = _draw_one(dice)
        kills[fault.request.target] += fault.request.action is ChaosAction.KILL
        if kills[fault.request.target] <= MOST_KILLS:
            faults.append(fault)
    return sorted(faults, key=lambda fault: fault.share)


def _draw_one(dice: random.Random) -> PlannedFault:
    action, target = dice.choice((ChaosAction.KILL, ChaosAction.FREEZE)), dice.choice(tuple(Target))
    request = FaultRequest(action=action, target=target, seed=dice.getrandbits(32), seconds=dice.uniform(*FROZEN_S))
    if dice.random() < AT_START:
        return PlannedFault(request, 0.0, then_s=dice.uniform(0.0, START_S))
    return PlannedFault(request, dice.random(), then_s=dice.uniform(0.0, JITTER_S))


def stated(text: str) -> PlannedFault:
    """`kill:manager:0.5`, or `freeze:engine:0.2:4.5` with its seconds. Raises ValueError."""
    action, target, share, *seconds = text.split(":")
    frozen = float(seconds[0]) if seconds else FROZEN_S[1]
    return PlannedFault(
        FaultRequest(action=ChaosAction(action), target=Target(target), seconds=frozen), float(share), then_s=0.0
    )
