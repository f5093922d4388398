"""Which faults a run gets, all drawn from the run's seed.

    draw          one to four, each a kind, a role and an instant, by the runner's own hand
    draw_harder   processes killed by somebody else while they start, and power cuts of the manager's machine

An instant is a share of the job's tokens and a moment after it, so that it means the same on a fast machine and on a
busy one; share 0 falls into the start of the processes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
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
"""Bounds of an even draw: half of the freezes outlast the lease of 3 s."""

MOST_KILLS: Final = 2
"""Of one role. A third failure in a row right after a start is what the planner gives a role up for, by design."""


STARTS_S: Final = 12.0
"""Even draw of a moment at which somebody kills what may be starting: a replacement's start is meant as well."""

MOST_STARTS_KILLED: Final = 5
"""A start that is killed is no wrong setting, however often it happens: the runner goes on trying."""

MOST_POWER_CUTS: Final = 2


class Hand(StrEnum):
    """Whose fault it is."""

    RUNNER = "runner"
    """As `polyrl chaos` does it: the runner knows of it."""
    OUTSIDE = "outside"
    """Somebody sends SIGKILL, and tells nobody."""
    POWER = "power"
    """Of the manager's machine: its journal loses what was not synced, or a part of it."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault to come."""

    request: FaultRequest
    share: float
    """Of the tokens that the undisturbed job generates; reached before it is injected."""
    then_s: float
    """Seconds after that."""
    hand: Hand = Hand.RUNNER

    def __str__(self) -> str:
        if self.hand is not Hand.RUNNER:
            return f"{self.hand} ends {self.request.target} at {self.share:.2f} + {self.then_s:.1f} s"
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


def draw_harder(seed: int) -> list[PlannedFault]:
    """Of the run with this seed, in the order of their instants."""
    dice = random.Random(f"harder/{seed}")
    starts = [
        _ended(dice.choice((Target.AGENT, Target.ENGINE)), Hand.OUTSIDE, then_s=dice.uniform(0.0, STARTS_S))
        for _ in range(dice.randint(1, MOST_STARTS_KILLED))
    ]
    if dice.random() < AT_START:
        starts.append(_ended(Target.TRAINER, Hand.OUTSIDE, then_s=dice.uniform(0.0, START_S)))
    starts.sort(key=lambda fault: fault.then_s)
    waits = [0.0, *(fault.then_s for fault in starts)]
    in_turn = [replace(fault, then_s=fault.then_s - before) for fault, before in zip(starts, waits, strict=False)]
    cuts = [
        _ended(Target.MANAGER, Hand.POWER, share=dice.random(), then_s=dice.uniform(0.0, JITTER_S))
        for _ in range(dice.randint(0, MOST_POWER_CUTS))
    ]
    return in_turn + sorted(cuts, key=lambda fault: fault.share)


def _ended(target: Target, hand: Hand, *, share: float = 0.0, then_s: float) -> PlannedFault:
    return PlannedFault(FaultRequest(action=ChaosAction.KILL, target=target), share, then_s=then_s, hand=hand)


def stated(text: str) -> PlannedFault:
    """`kill:manager:0.5`, `freeze:engine:0.2:4.5` with its seconds, `outside:agent:0`, `power:manager:0.3`. Raises
    ValueError."""
    action, target, share, *seconds = text.split(":")
    if action in (Hand.OUTSIDE, Hand.POWER):
        return _ended(Target(target), Hand(action), share=float(share), then_s=0.0)
    frozen = float(seconds[0]) if seconds else FROZEN_S[1]
    return PlannedFault(
        FaultRequest(action=ChaosAction(action), target=Target(target), seconds=frozen), float(share), then_s=0.0
    )
