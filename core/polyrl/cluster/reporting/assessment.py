"""All that one reconcile found, in one value: what the status, its conditions and the events are written from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from polyrl.cluster.acceptance import Acceptance
from polyrl.cluster.fleet.pools import PoolView
from polyrl.cluster.lifecycle import Lifecycle
from polyrl.cluster.observation.context import UNREACHABLE_POLLS, ReconcileContext
from polyrl.cluster.observation.disruption import DisruptionNotice
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.rollouts import PodState, RolloutPod
from polyrl.cluster.scaling.decision import ScaleDecision
from polyrl.cluster.state import LastSeenPod


@dataclass(frozen=True)
class Assessment:
    """What one reconcile found."""

    ctx: ReconcileContext
    accepted: Acceptance
    lifecycle: Lifecycle
    fleet: tuple[RolloutPod, ...]
    views: tuple[PoolView, ...]
    scale: ScaleDecision
    preempted: tuple[PodFacts, ...]
    """Rollouts whose number as preempted was read back in this reconcile."""
    failed: tuple[PodFacts, ...]
    """Rollouts whose number as failed was read back in this reconcile."""
    vanished: tuple[LastSeenPod, ...]
    """Rollouts that are gone before their number was read back, or without any; counted in this reconcile."""
    trainers_vanished: tuple[LastSeenPod, ...]
    trainers_disrupted: tuple[tuple[PodFacts, DisruptionNotice], ...]

    def in_state(self, *states: PodState) -> list[RolloutPod]:
        """Rollouts in any of these states."""
        return [one for one in self.fleet if one.state in states]

    @cached_property
    def live(self) -> list[RolloutPod]:
        return [one for one in self.fleet if one.live]

    @property
    def serving(self) -> int:
        """Live rollouts registered at the manager."""
        return len(self.in_state(PodState.SERVING))

    @property
    def refused_child(self) -> str:
        """What the API server said when it refused what pods cannot do without; empty: it did not."""
        refusal = self.ctx.state.refusal
        return "" if refusal is None or refusal.of_pods else refusal.message

    @property
    def unreachable(self) -> bool:
        """The manager answered once, and has failed several polls since."""
        manager = self.ctx.facts.manager
        return manager is not None and manager.failed_polls >= UNREACHABLE_POLLS

    @property
    def trainer_ready(self) -> bool:
        """All trainer pods are ready, and the manager, where there is one, answers."""
        job = self.ctx.facts.trainer
        pods = job is not None and job.ready >= self.ctx.spec.trainer.replicas
        return pods and (not self.ctx.wants_manager or self.ctx.manager_answers)
