"""All that the policies of a job read, in one value: facts, what was remembered, and the time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from polyrl.cluster import names
from polyrl.cluster.observation.facts import JobFacts
from polyrl.cluster.resources.fixed import fixed_children
from polyrl.cluster.resources.owner import Owner, Settings, template_hash
from polyrl.cluster.state import DesiredHashes, ReconcileState
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.spec import JobSpec
from polyrl.manifest.status import JobStatus
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, ManagerStatus
from polyrl.worker import Role, wants_engines

UNREACHABLE_POLLS: Final = 3
"""Polls in a row without an answer after which the manager counts as unreachable."""

NEWS_S: Final = 90.0
"""An answer of the manager that is older proves nothing about an engine's absence; beyond its longest poll of 60 s."""


@dataclass(frozen=True)
class ReconcileContext:
    """Facts, what was remembered, and the moment (Unix seconds)."""

    facts: JobFacts
    job: PolyRLJob
    settings: Settings
    state: ReconcileState
    now: float

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def status(self) -> JobStatus:
        """The status as stored."""
        return self.facts.status

    @cached_property
    def owner(self) -> Owner:
        facts = self.facts
        return Owner(facts.name, facts.namespace, uid=facts.uid, job=self.job, settings=self.settings)

    @cached_property
    def hashes(self) -> DesiredHashes:
        """Hashes of what the job asks for, as it is written now."""
        known = self.state.hashes
        if known is not None and known.generation == self.facts.generation:
            return known
        templates = {role: template_hash(self.owner, role) for role in (Role.TRAINER, Role.MANAGER, Role.ROLLOUT)}
        fixed = {
            (obj["kind"], obj["metadata"]["name"]): obj["metadata"]["annotations"][names.ANNOTATION_CONTENT]
            for obj in fixed_children(self.owner)
        }
        return DesiredHashes(self.facts.generation, templates, fixed=fixed)

    def highest_ordinal(self, role: Literal[Role.MANAGER, Role.ROLLOUT]) -> int:
        """The highest that a pod of this role has had in its name."""
        created = (self.status.manager if role is Role.MANAGER else self.status.rollout).created
        return max([created, *(names.ordinal_of(pod.name) for pod in self.facts.of_role(role))])

    @property
    def wants_manager(self) -> bool:
        return wants_engines(self.spec)

    @property
    def wants_rollouts(self) -> bool:
        return self.spec.recipe.mode.is_online

    @property
    def manager_status(self) -> ManagerStatus | None:
        """The manager's newest status, however old."""
        return self.facts.manager.status if self.facts.manager is not None else None

    @property
    def manager_answers(self) -> bool:
        """True when the manager's word is recent."""
        manager = self.facts.manager
        return manager is not None and manager.failed_polls == 0 and self.now - manager.answered_at <= NEWS_S

    @property
    def finishing(self) -> bool:
        """True once the trainer has reported the end of the run: rollouts that leave now are not replaced."""
        return self.manager_status is not None and self.manager_status.finished

    @cached_property
    def engines(self) -> dict[str, EngineStatus]:
        """Engines of rollouts that the manager last listed as alive, by name, which is the pod's."""
        listed = self.manager_status.engines if self.manager_status is not None else ()
        rollouts = (engine for engine in listed if engine.pool is not Pool.RESERVED)
        return {engine.name: engine for engine in rollouts if engine.state is not EngineState.SILENT}

    @property
    def drain_s(self) -> float:
        return float(self.spec.rollout.drain_seconds)
