"""What one look came to, in one value: what the status, its conditions and the events are written from.

Refuses to hold: actions. Read next: `conditions`, `status_of`, `announce`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from polyrl.cluster.acceptance import Acceptance
from polyrl.cluster.autoscaling.scale_decision import Wish
from polyrl.cluster.autoscaling.steps import StepNews
from polyrl.cluster.fleet.pools import PoolView
from polyrl.cluster.lifecycle import Life
from polyrl.cluster.observation.context import UNREACHABLE_POLLS, Look
from polyrl.cluster.observation.disruption import Notice
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.rollouts import Rollout, Standing
from polyrl.cluster.state import SeenPod


@dataclass(frozen=True)
class Judged:
    """One look, judged."""

    look: Look
    accepted: Acceptance
    life: Life
    fleet: tuple[Rollout, ...]
    views: tuple[PoolView, ...]
    wish: Wish
    news: StepNews
    taken: tuple[PodFacts, ...]
    """Rollouts whose number as preempted was read back in this look."""
    failed: tuple[PodFacts, ...]
    """Rollouts whose number as failed was read back in this look."""
    vanished: tuple[SeenPod, ...]
    """Rollouts that are gone before their number was read back, or without any; counted in this look."""
    trainers_vanished: tuple[SeenPod, ...]
    trainers_disrupted: tuple[tuple[PodFacts, Notice], ...]

    def standing(self, *standings: Standing) -> list[Rollout]:
        """Rollouts that stand in one of these ways."""
        return [one for one in self.fleet if one.standing in standings]

    @cached_property
    def live(self) -> list[Rollout]:
        return [one for one in self.fleet if one.live]

    @property
    def serving(self) -> int:
        """Live rollouts registered at the manager."""
        return len(self.standing(Standing.SERVING))

    @property
    def unreachable(self) -> bool:
        """The manager was heard once, and has missed several polls since."""
        heard = self.look.facts.manager
        return heard is not None and heard.missed >= UNREACHABLE_POLLS

    @property
    def trainer_ready(self) -> bool:
        """All trainer pods are ready, and the manager, where there is one, answers."""
        job = self.look.facts.trainer
        pods = job is not None and job.ready >= self.look.spec.trainer.replicas
        return pods and (not self.look.wants_manager or self.look.manager_answers)
