"""Finds whom a fault hits on a live run, or says why nobody; `fault_kinds` says what faults there are.

Refuses to hold: processes, timers (see `inflicting`). Read next: `inflicting`.
"""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from polyrl.errors import UserError
from polyrl.local.fleet import ObservedWorker
from polyrl.worker import Role
from polyrl_cli.chaos.kinds import MAX_SECONDS, ChaosAction, Direction, Target


class FaultRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault whose victim is still to be found."""

    action: ChaosAction
    target: Target = Target.AGENT
    worker: str = ""
    """Its name; empty: one of them, drawn by `seed`."""
    seed: int = 0
    seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 5.0
    """How long it lasts; with preempt, from the notice to the end."""
    speed: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Of slow: the share of the time in which the victim runs."""
    direction: Direction = Direction.BOTH
    """Of partition: what is lost."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault and its victim."""

    action: ChaosAction
    target: Target
    victim: str
    role: Role
    seconds: float = 0.0
    speed: float = 1.0
    direction: Direction = Direction.BOTH

    @property
    def takes_capacity(self) -> bool:
        """True when a rollout is taken away as spot capacity is: then its end is nobody's failure."""
        ends = self.action in (ChaosAction.KILL, ChaosAction.PREEMPT) and self.target is Target.AGENT
        return ends and self.role is Role.ROLLOUT

    @property
    def lasts(self) -> bool:
        """True when it is undone after `seconds`."""
        return self.action not in (ChaosAction.KILL, ChaosAction.PREEMPT)

    @property
    def nobody(self) -> str:
        """Said when there is no process to hit."""
        return f"{self.victim}: no {self.target} process lives there"

    @property
    def another(self) -> str:
        """Said when it would last where another one does."""
        return f"{self.victim}: another fault lasts there; wait for its end"

    def __str__(self) -> str:
        engine = f"the engine of {self.victim}"
        whom = engine if self.target is Target.ENGINE else self.victim
        match self.action:
            case ChaosAction.KILL:
                return f"{whom} killed without notice"
            case ChaosAction.PREEMPT:
                return f"{whom} preempted with {self.seconds:g} s notice"
            case ChaosAction.FREEZE:
                return f"{whom} frozen for {self.seconds:g} s"
            case ChaosAction.SLOW:
                return f"{whom} slowed to {self.speed:.0%} for {self.seconds:g} s"
            case ChaosAction.PARTITION:
                return f"{whom} {_CUT_WORDS[self.direction]} for {self.seconds:g} s"


ONLY_AGENTS: Final = {
    ChaosAction.PREEMPT: "only an agent gets a notice; kill ends the others",
    ChaosAction.PARTITION: "only an agent can be cut off from the manager",
}

_CUT_WORDS: Final = {
    Direction.BOTH: "cut off from the manager",
    Direction.IN: "cut off from what the manager says",
    Direction.OUT: "cut off from the manager's ear",
}

_ROLES: Final = {
    Target.AGENT: (Role.ROLLOUT, Role.RESERVED),
    Target.ENGINE: (Role.ROLLOUT, Role.RESERVED),
    Target.MANAGER: (Role.MANAGER,),
    Target.TRAINER: (Role.TRAINER,),
}


def choose_victim(wish: FaultRequest, observed: Sequence[ObservedWorker], greeted: Container[str]) -> Fault:
    """Finds the victim; `greeted` are the agents that the manager knows. Raises UserError when there is none, or when
    the action does not fit it.

    Rollouts come before the reserved engine, which is hit only when it is named.
    """
    if wish.direction is not Direction.BOTH and wish.action is not ChaosAction.PARTITION:
        raise UserError(f"--direction {wish.direction}: only a partition has one, not {wish.action}")
    if wish.action in ONLY_AGENTS and wish.target is not Target.AGENT:
        raise UserError(f"--role {wish.target}: {ONLY_AGENTS[wish.action]}")
    alive = [seen for seen in observed if seen.role in _ROLES[wish.target] and seen.counts]
    fitting = [seen for seen in alive if _fits(wish, seen, greeted)]
    if not fitting:
        raise UserError(_nobody(wish, alive))
    victim = random.Random(wish.seed).choice(sorted(fitting, key=lambda seen: seen.name))
    return Fault(
        action=wish.action,
        target=wish.target,
        victim=victim.name,
        role=victim.role,
        seconds=wish.seconds,
        speed=wish.speed,
        direction=wish.direction,
    )


def _fits(wish: FaultRequest, seen: ObservedWorker, greeted: Container[str]) -> bool:
    if wish.worker and seen.name != wish.worker:
        return False
    if seen.role is Role.RESERVED and (wish.action is ChaosAction.PREEMPT or not wish.worker):
        return False
    # An agent listens to the signal from its greeting on; before that the signal would end it.
    return wish.action is not ChaosAction.PARTITION or seen.name in greeted


def _nobody(wish: FaultRequest, alive: Sequence[ObservedWorker]) -> str:
    kind = "rollout" if wish.target in (Target.AGENT, Target.ENGINE) else str(wish.target)
    whom = f"a live {kind} called {wish.worker}" if wish.worker else f"a live {kind}"
    if wish.action is ChaosAction.PARTITION:
        whom += " that has greeted the manager"
    names = ", ".join(sorted(seen.name for seen in alive))
    return f"this run does not have {whom} now{f'; alive: {names}' if names else ''}"
