"""An operator in miniature for `fake_cluster`: reads late, acts in order, may die between any two actions.

It keeps the promises of the real operator to `reconcile`: what it wrote it has read; of two views of an object the
newer counts; status and state are kept together, once all was done; a status is written only on top of what was read.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

from polyrl.cluster import names
from polyrl.cluster.actions import (
    Action,
    Annotate,
    Apply,
    Create,
    Delete,
    DrainEngine,
    DryRun,
    LimitRestarts,
    MakeEngineKeys,
    MakeKeys,
    Object,
    ReconcileResult,
    RecordEvent,
    RenewCertificate,
    SuspendTrainer,
)
from polyrl.cluster.fleet.certificate import LIFE_S
from polyrl.cluster.observation.facts import JobFacts, ManagerFacts
from polyrl.cluster.observation.job import child_facts, job_facts, node_facts, pod_facts, trainer_facts
from polyrl.cluster.reconcile import reconcile
from polyrl.cluster.resources.owner import Settings
from polyrl.cluster.state import ReconcileState
from polyrl.cluster.timestamps import second
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, FinishedStep, ManagerStatus
from polyrl.testing.fake_cluster import Conflict, FakeCluster, Forbidden, Place
from polyrl.testing.finished_steps import finished_step
from polyrl.worker import Role

SETTINGS = Settings("manager:test", "trainer:test", rollout_image="rollout:test")


class Killed(Exception):
    """The operator died here."""


@dataclass
class FakeOperator:
    """One life of an operator."""

    cluster: FakeCluster
    state: ReconcileState = field(default_factory=ReconcileState)
    read: int = 0
    """Changes of the cluster's log that its watches have delivered."""
    cache: dict[Place, tuple[int, Object | None]] = field(default_factory=dict)
    dry_run: tuple[int, str] | None = None
    status: dict[str, Any] | None = None
    """Decided last, written or not."""
    drained: dict[str, float] = field(default_factory=dict)
    """By uid: seconds given, of drains that the manager confirmed."""
    finished: list[FinishedStep] = field(default_factory=list)
    step: int = 0
    clock_ahead_s: float = 0.0
    """How far its machine's clock is before the cluster's."""
    message: list[RecordEvent] = field(default_factory=list)
    done: list[Action] = field(default_factory=list)

    @property
    def now(self) -> float:
        """By its own clock."""
        return self.cluster.now + self.clock_ahead_s

    def catch_up(self, changes: int | None = None) -> None:
        """Watches deliver so many further changes; None: all."""
        log = self.cluster.log
        end = len(log) if changes is None else min(len(log), self.read + changes)
        for place, version, raw in log[self.read : end]:
            self._learn(place, version, raw)
        self.read = end

    def facts(self) -> JobFacts:
        """As it sees them now."""
        seen = {place: raw for place, (_, raw) in self.cache.items() if raw is not None}
        job = seen["PolyRLJob", self.cluster.job["metadata"]["name"]]
        generation = job["metadata"]["generation"]
        fixed = ("Pod", "Job", "Node", "PolyRLJob")
        return job_facts(
            job if self.status is None else job | {"status": self.status},
            pods=filter(None, (pod_facts(raw) for (kind, _), raw in seen.items() if kind == "Pod")),
            trainer=next((trainer_facts(raw) for (kind, _), raw in seen.items() if kind == "Job"), None),
            nodes={name: node_facts(raw) for (kind, name), raw in seen.items() if kind == "Node"},
            claims=(),
            children=[child_facts(kind, raw) for (kind, _), raw in seen.items() if kind not in fixed],
            manager=self.manager(),
            dry_run=self.dry_run[1] if self.dry_run is not None and self.dry_run[0] == generation else None,
        )

    def manager(self) -> ManagerFacts | None:
        """What the manager says, which is never late: it is asked."""
        alive = [pod for pod in self.cluster.pods(Role.MANAGER) if self.cluster.serves(pod)]
        engines = tuple(_engine(pod) for pod in self.cluster.pods(Role.ROLLOUT) if self.cluster.serves(pod))
        status = ManagerStatus(
            seq=1,
            run_epoch=1,
            step=self.step,
            finished_steps=tuple(self.finished),
            trainer_connected=True,
            engines=engines if alive else (),
        )
        return ManagerFacts(status, self.now, failed_polls=0 if alive else 3)

    def end_step(self, rollout_s: float, train_s: float) -> None:
        """The engines that serve now have ended a step."""
        self.step += 1
        reported = self.manager()
        engines = 0 if reported is None else len(reported.status.engines)
        self.finished.append(finished_step(self.step, engines, rollout_s=rollout_s, train_s=train_s))

    def turn(self, rng: random.Random | None = None) -> ReconcileResult:
        """One reconcile and its actions. With `rng`, it may die between any two actions, and then raises Killed."""
        facts = self.facts()
        decision = reconcile(facts, SETTINGS, self.state, self.now)
        state = decision.state
        for action in decision.actions:
            if rng is not None and rng.random() < 0.02:
                raise Killed
            state = self._do(action, state)
        self.state = state
        self._store(decision)
        return decision

    def _do(self, action: Action, state: ReconcileState) -> ReconcileState:
        self.done.append(action)
        before = len(self.cluster.log)
        try:
            return self._request(action, state)
        except Conflict:
            return state
        except Forbidden as error:
            return state.with_refusal(str(error), self.now)
        finally:
            self._read_own(before)

    def _request(self, action: Action, state: ReconcileState) -> ReconcileState:
        match action:
            case Create():
                self.cluster.create(action.object)
                return state.without_refusal() if action.object["kind"] == "Pod" else state
            case MakeKeys() | MakeEngineKeys():
                self._make_secrets(action)
            case Apply():
                self.cluster.apply(action.object)
            case Delete():
                self.cluster.delete(action.kind, action.name, action.uid, action.grace_s)
            case RenewCertificate():
                stored = self.cluster.objects["Secret", action.name]["metadata"]
                renewed = stored["annotations"] | {names.ANNOTATION_EXPIRES: second(action.now + LIFE_S)}
                self.cluster.patch("Secret", action.name, {"metadata": stored | {"annotations": renewed}})
            case Annotate():
                self.cluster.annotate(action.pod, action.uid, dict(action.annotations))
            case SuspendTrainer() | LimitRestarts():
                spec = self.cluster.objects["Job", action.name]["spec"] | action.spec
                self.cluster.patch("Job", action.name, {"spec": spec})
            case DryRun():
                self.dry_run = (action.generation, "")
            case DrainEngine(ended=False):
                self.drained[action.uid] = action.deadline_s
                return state.with_drain_confirmed(action.uid)
            case RecordEvent():
                self.message.append(action)
        return state

    def _make_secrets(self, action: MakeKeys | MakeEngineKeys) -> None:
        job = self.cluster.job["metadata"]["name"]
        wanted = [names.keys_secret_name(job), *(names.role_secret_name(job, role) for role in names.KEY_FILES)]
        for name in wanted if isinstance(action, MakeKeys) else (pod for pod, _ in action.pods):
            metadata: Object = {"name": name}
            if isinstance(action, MakeKeys):
                root = self.cluster.objects.get(("Secret", wanted[0]), {"metadata": {"uid": ""}})["metadata"]["uid"]
                expires = second(action.now + LIFE_S)
                metadata["annotations"] = {names.ANNOTATION_CONTENT: root, names.ANNOTATION_EXPIRES: expires}
            with contextlib.suppress(Conflict):
                self.cluster.create({"kind": "Secret", "metadata": metadata})

    def _store(self, decision: ReconcileResult) -> None:
        """Shows the status to the next turn, and writes it unless somebody changed the job meanwhile."""
        place = ("PolyRLJob", self.cluster.job["metadata"]["name"])
        if place not in self.cluster.objects:
            return
        version, known = self.cache[place]
        self.status = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        newest = int(self.cluster.objects[place]["metadata"]["resourceVersion"])
        if known is not None and known.get("status") != self.status and newest == version:
            before = len(self.cluster.log)
            self.cluster.patch(*place, {"status": self.status})
            self._read_own(before)

    def _read_own(self, before: int) -> None:
        """Replies to own requests are the newest views of those objects."""
        for place, version, raw in self.cluster.log[before:]:
            self._learn(place, version, raw)

    def _learn(self, place: Place, version: int, raw: Object | None) -> None:
        known = self.cache.get(place)
        if known is None or known[0] < version:
            self.cache[place] = (version, raw)


def _engine(pod: Object) -> EngineStatus:
    pool = Pool(pod["metadata"]["labels"][names.LABEL_POOL])
    state = EngineState.SERVING
    return EngineStatus(
        name=pod["metadata"]["name"], pool=pool, state=state, weight_version=1, running=1, max_running=8, tokens=1
    )
