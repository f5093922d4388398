"""Small values for all cluster tests: a valid job, pods, nodes, rollouts, and what a reconcile sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.facts import JobFacts, ManagerFacts, NodeFacts, PodFacts, PodPhase, TrainerFacts
from polyrl.cluster.observation.rollouts import PodState, RolloutPod
from polyrl.cluster.state import ReconcileState
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.status import JobStatus
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, FinishedStep, ManagerStatus
from polyrl.testing.fake_operator import SETTINGS
from polyrl.testing.finished_steps import finished_step
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role
from tests.unit.core.cluster.scenario import Scenario, running

NOW = 1_000_000.0


class Build:
    """Values with everything unsaid at its plainest; times are seconds relative to NOW."""

    now = NOW

    def job(self, rollout: dict[str, Any] | None = None, **spec: Any) -> PolyRLJob:
        return PolyRLJob.model_validate(raw_job(rollout, **spec))

    def pod(
        self,
        name: str = "j-r-1",
        role: Role = Role.ROLLOUT,
        *,
        age: float = 100.0,
        placed: float | None = 90.0,
        **more: Any,
    ) -> PodFacts:
        """`age` and `placed`: seconds ago that it was made and got its node, `n-<name>`."""
        plain: dict[str, Any] = {
            "uid": f"uid-{name}",
            "phase": PodPhase.PENDING if placed is None else PodPhase.RUNNING,
            "created_at": NOW - age,
            "pool": Pool.SPOT if role is Role.ROLLOUT else None,
            "node": "" if placed is None else f"n-{name}",
            "scheduled_at": None if placed is None else NOW - placed,
        }
        return PodFacts(name=name, role=role, **plain | more)

    def rollout(
        self,
        name: str = "j-r-1",
        state: PodState = PodState.SERVING,
        *,
        running: int = 1,
        version: int = 1,
        notice: Any = None,
        **pod: Any,
    ) -> RolloutPod:
        if state is PodState.PENDING:
            pod.setdefault("placed", None)
        engine = self.engine(name, running=running, version=version) if state is PodState.SERVING else None
        return RolloutPod(self.pod(name, **pod), state, notice=notice, engine=engine)

    def step(self, number: int, engines: float, **more: Any) -> FinishedStep:
        return finished_step(number, engines, **more)

    def engine(self, name: str, *, running: int = 1, version: int = 1) -> EngineStatus:
        return EngineStatus(
            name=name,
            pool=Pool.SPOT,
            state=EngineState.SERVING,
            weight_version=version,
            running=running,
            max_running=8,
            tokens=0,
        )

    def manager(
        self, engines: Sequence[str] = (), *, ago: float = 0.0, failed_polls: int = 0, **more: Any
    ) -> ManagerFacts:
        status = ManagerStatus(seq=1, run_epoch=1, engines=tuple(self.engine(name) for name in engines), **more)
        return ManagerFacts(status, NOW - ago, failed_polls=failed_polls)

    def trainer(self, **more: Any) -> TrainerFacts:
        plain = {"uid": "t", "active": 1, "ready": 1, "failed": 0, "suspended": False}
        return TrainerFacts(**plain | more)

    def nodes(self, *pods: PodFacts, **more: Any) -> dict[str, NodeFacts]:
        return {pod.node: NodeFacts(pod.node, **more) for pod in pods if pod.node}

    def facts(self, job: PolyRLJob | None = None, status: dict[str, Any] | None = None, **more: Any) -> JobFacts:
        plain: dict[str, Any] = {
            "name": "j",
            "namespace": "n",
            "uid": "job",
            "generation": 1,
            "job": job or self.job(),
            "status": JobStatus.model_validate(status or {}),
            "managed_by": "polyrl.dev/operator",
        }
        pods = more.get("pods", ())
        return JobFacts(**plain | {"nodes": self.nodes(*pods)} | more)

    def ctx(
        self,
        job: PolyRLJob | None = None,
        status: dict[str, Any] | None = None,
        state: ReconcileState | None = None,
        now: float = NOW,
        **facts: Any,
    ) -> ReconcileContext:
        seen = self.facts(job, status, **facts)
        assert seen.job is not None
        return ReconcileContext(seen, seen.job, settings=SETTINGS, state=state or ReconcileState(), now=now)


@pytest.fixture
def build() -> Build:
    return Build()


@pytest.fixture
def scenario() -> Scenario:
    """A running job of three rollouts."""
    return running(raw_job())
