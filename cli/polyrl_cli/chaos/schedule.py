"""The faults that a manifest declares for its own run: which are due, and on whom. A drill, never a default.

The planner replaces what they take exactly as it would after a real loss.

Refuses to hold: how a fault is inflicted (see `inflicting`). Read next: `faults`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polyrl.local.fleet import ObservedWorker
from polyrl.manifest.rollout import FaultAction, FaultSpec
from polyrl.status import ManagerStatus
from polyrl.worker import Role
from polyrl_cli.chaos.faults import Fault
from polyrl_cli.chaos.kinds import ChaosAction, Target

RL_PHASE: Final = "rl"
"""The trainer's name of the phase whose steps faults count. It reports whole steps, so the next one has begun then."""


@dataclass(frozen=True)
class DueFault:
    """A declared fault and its victim."""

    fault: FaultSpec
    victim: str

    @property
    def infliction(self) -> Fault:
        kills = self.fault.action is FaultAction.KILL
        return Fault(
            action=ChaosAction.KILL if kills else ChaosAction.PREEMPT,
            target=Target.AGENT,
            victim=self.victim,
            role=Role.ROLLOUT,
            seconds=0.0 if kills else float(self.fault.notice_seconds),
        )

    def __str__(self) -> str:
        return f"drill: {self.infliction} at step {self.fault.at_step}"


class FaultSchedule:
    """Remembers which declared faults are still to come; each strikes once, in the order of their steps."""

    def __init__(self, faults: Sequence[FaultSpec], done_steps: int = 0) -> None:
        """`done_steps`: RL steps that a resumed run does not repeat; their faults have struck before."""
        coming = [fault for fault in faults if fault.at_step > done_steps]
        self.pending = sorted(coming, key=lambda fault: fault.at_step)

    def due(self, status: ManagerStatus, observed: Sequence[ObservedWorker]) -> DueFault | None:
        """The next strike, taken off the list; None while its step has not begun or no victim is at work.

        Within its own step a fault waits until the victim generates: to kill an idle engine would show nothing.
        """
        if not self.pending or status.phase != RL_PHASE or status.step + 1 < self.pending[0].at_step:
            return None
        fault = self.pending[0]
        victim = self._victim(fault, status, observed)
        if victim is None:
            return None
        self.pending.pop(0)
        return DueFault(fault, victim)

    def _victim(self, fault: FaultSpec, status: ManagerStatus, observed: Sequence[ObservedWorker]) -> str | None:
        running = {engine.engine: engine.running for engine in status.engines}
        preemptible = [seen for seen in observed if seen.role is Role.ROLLOUT and seen.counts]
        oldest_first = sorted((seen for seen in preemptible if seen.name in running), key=lambda seen: seen.started_at)
        if not oldest_first:
            return None
        victim = oldest_first[min(fault.rollout, len(oldest_first) - 1)].name
        return victim if running[victim] > 0 or status.step >= fault.at_step else None
