"""From a request for a fault to its victim, or to the reason why there is none; and the signals that a fault takes."""

from __future__ import annotations

import random
import signal
from collections.abc import Container, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from polyrl.errors import UserError
from polyrl.local.planner import ObservedWorker
from polyrl.partition_signals import HEAL, PARTITION, PARTITION_IN, PARTITION_OUT
from polyrl.worker import Role
from polyrl_cli.chaos.kinds import MAX_SECONDS, ChaosAction, Direction, Part, Target

SLOW_PERIOD_S: Final = 0.5
"""A slow victim is stopped once in this time: often beside a lease of 3 s, rarely beside a token."""


class FaultRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault whose victim is still to be chosen."""

    action: ChaosAction
    target: Target = Target.AGENT
    worker: str = ""
    """Name of the victim; empty: one is drawn by `seed`."""
    seed: int = 0
    seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 5.0
    """How long it lasts; with preempt, from the notice to the end."""
    speed: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """For `slow`: the share of the time in which the victim runs."""
    direction: Direction = Direction.BOTH
    """For `partition`: which messages are lost."""


class Fault(FaultRequest, frozen=True, kw_only=True):
    """A fault and its victim."""

    victim: str
    role: Role

    @property
    def takes_capacity(self) -> bool:
        """True when a rollout is taken away as spot capacity is: then its end counts as no failure."""
        ends = self.action in (ChaosAction.KILL, ChaosAction.PREEMPT) and self.target is Target.AGENT
        return ends and self.role is Role.ROLLOUT

    @property
    def lasts(self) -> bool:
        """True when it is undone after `seconds`."""
        return self.action not in (ChaosAction.KILL, ChaosAction.PREEMPT)

    @property
    def no_process(self) -> str:
        """The refusal when there is no process to hit."""
        return f"{self.victim}: no {self.target} process lives there"

    @property
    def busy(self) -> str:
        """The refusal when another fault lasts on the same victim."""
        return f"{self.victim}: another fault lasts there; wait for its end"

    def __str__(self) -> str:
        whom = f"the engine of {self.victim}" if self.target is Target.ENGINE else self.victim
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
                return f"{whom} {_PARTITION_TEXT[self.direction]} for {self.seconds:g} s"


class Signals(NamedTuple):
    """In turn until the fault's time is over: `begin`, `on_s` later `undo`, and `off_s` later again."""

    part: Part
    begin: int
    undo: int = 0
    """0: there is nothing to undo, `begin` is sent once."""
    on_s: float = 0.0
    off_s: float = 0.0


ONLY_AGENTS: Final = {
    ChaosAction.PREEMPT: "only an agent gets a notice; kill ends the others",
    ChaosAction.PARTITION: "only an agent can be cut off from the manager",
}

_PARTITION_TEXT: Final = {
    Direction.BOTH: "cut off from the manager",
    Direction.IN: "cut off from what the manager sends",
    Direction.OUT: "cut off from the manager in what it sends",
}

_PARTITION_SIGNALS: Final = {Direction.BOTH: PARTITION, Direction.IN: PARTITION_IN, Direction.OUT: PARTITION_OUT}

_ROLES: Final = {
    Target.AGENT: (Role.ROLLOUT, Role.RESERVED),
    Target.ENGINE: (Role.ROLLOUT, Role.RESERVED),
    Target.MANAGER: (Role.MANAGER,),
    Target.TRAINER: (Role.TRAINER,),
}


def choose_victim(request: FaultRequest, observed: Sequence[ObservedWorker], greeted: Container[str]) -> Fault:
    """The fault with its victim; `greeted` are the agents that the manager knows. Rollouts come before the reserved
    engine, which is hit only when it is named. Raises UserError when nobody fits, or when the action fits no target."""
    if request.direction is not Direction.BOTH and request.action is not ChaosAction.PARTITION:
        raise UserError(f"--direction {request.direction}: only a partition has one, not {request.action}")
    if request.action in ONLY_AGENTS and request.target is not Target.AGENT:
        raise UserError(f"--role {request.target}: {ONLY_AGENTS[request.action]}")
    alive = [worker for worker in observed if worker.role in _ROLES[request.target] and worker.counts]
    fitting = [worker for worker in alive if _fits(request, worker, greeted)]
    if not fitting:
        raise UserError(_nobody(request, alive))
    victim = random.Random(request.seed).choice(sorted(fitting, key=lambda worker: worker.name))
    return Fault(**msgspec.structs.asdict(request), victim=victim.name, role=victim.role)


def signals_of(fault: Fault) -> Signals:
    """The signals of any fault but one that takes a worker away."""
    part = Part.BELOW if fault.target is Target.ENGINE else Part.ALL
    match fault.action:
        case ChaosAction.PARTITION:
            return Signals(Part.WORKER, _PARTITION_SIGNALS[fault.direction], undo=HEAL, on_s=fault.seconds)
        case ChaosAction.SLOW:
            stopped_s = SLOW_PERIOD_S * (1 - fault.speed)
            off_s = SLOW_PERIOD_S - stopped_s
            return Signals(part, signal.SIGSTOP, undo=signal.SIGCONT, on_s=stopped_s, off_s=off_s)
        case ChaosAction.FREEZE:
            return Signals(part, signal.SIGSTOP, undo=signal.SIGCONT, on_s=fault.seconds)
        case ChaosAction.KILL | ChaosAction.PREEMPT:
            return Signals(part, signal.SIGKILL if fault.action is ChaosAction.KILL else signal.SIGTERM)


def _fits(request: FaultRequest, worker: ObservedWorker, greeted: Container[str]) -> bool:
    if request.worker and worker.name != request.worker:
        return False
    if worker.role is Role.RESERVED and (request.action is ChaosAction.PREEMPT or not request.worker):
        return False
    # An agent handles the signal from its greeting on; before that the signal would end it.
    return request.action is not ChaosAction.PARTITION or worker.name in greeted


def _nobody(request: FaultRequest, alive: Sequence[ObservedWorker]) -> str:
    kind = "rollout" if request.target in (Target.AGENT, Target.ENGINE) else str(request.target)
    whom = f"a live {kind} called {request.worker}" if request.worker else f"a live {kind}"
    if request.action is ChaosAction.PARTITION:
        whom += " that has greeted the manager"
    names = ", ".join(sorted(worker.name for worker in alive))
    return f"this run does not have {whom} now{f'; alive: {names}' if names else ''}"
