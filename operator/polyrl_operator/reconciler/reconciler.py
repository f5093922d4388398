"""A job's turn: observe, decide, act, write the status once. All of it may be cut off anywhere and done again.

A turn whose actions failed leaves nothing behind: its status might tell of deeds that were not done.
Refuses to hold: decisions (see `polyrl.cluster`), requests (see `act`). Read next: `act`, `polyrl.cluster.reconcile`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from polyrl.cluster import names
from polyrl.cluster.actions import Object, ReconcileResult
from polyrl.cluster.observation.facts import JobFacts
from polyrl.cluster.observation.job import job_facts
from polyrl.cluster.observation.pods import pod_facts
from polyrl.cluster.reconcile import reconcile
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.state import ReconcileState
from polyrl.errors import PolyRLError
from polyrl.worker import Role
from polyrl_operator.api.client import Client, NotLeader
from polyrl_operator.informer.cache import Cache
from polyrl_operator.informer.cached_object import JobKey
from polyrl_operator.managers.client import Address
from polyrl_operator.managers.poller import ManagerPoller
from polyrl_operator.metrics import Metrics
from polyrl_operator.reconciler.executor import ExecutionResult, Executor
from polyrl_operator.reconciler.status_writer import PendingStatus, StatusWriter, counts
from polyrl_operator.reconciler.work_queue import WorkQueue

log = structlog.get_logger(__name__)

WORKERS: Final = 16
"""Jobs reconciled at a time; each mostly waits for the API server."""

TURN_DEADLINE_S: Final = 120.0
"""Of one turn: five hundred pods take ten seconds on a slow server."""


@dataclass
class JobState:
    """What is known of a job between turns, and may be lost."""

    uid: str
    reconcile_state: ReconcileState = field(default_factory=ReconcileState)
    told: set[str] = field(default_factory=set)
    """UIDs of pods whose drain was confirmed since the last turn."""
    pending: PendingStatus = field(default_factory=PendingStatus)
    dry_run: tuple[int, str] | None = None
    """Generation and answer."""
    refused: bool = False
    """Whether the API server refused to make something in this turn."""


class Reconciler:
    """Reconciles all jobs, one at a time each."""

    def __init__(
        self,
        cache: Cache,
        client: Client,
        actor: Executor,
        links: ManagerPoller,
        queue: WorkQueue,
        metrics: Metrics,
        settings: Settings,
        *,
        sees_nodes: bool,
    ) -> None:
        self._cache, self._actor, self._links = cache, actor, links
        self._queue, self._metrics, self._settings = queue, metrics, settings
        self._now = client.clock.now
        self._sees_nodes = sees_nodes
        self._writer = StatusWriter(client, cache, queue.wake_at, metrics.status_writes.inc)
        self._states: dict[JobKey, JobState] = {}
        self._began: dict[JobKey, float] = {}

    def told(self, key: JobKey, uid: str) -> None:
        """The manager confirmed the drain of a pod."""
        state = self._states.get(key)
        if state is not None:
            state.told.add(uid)

    def longest(self) -> float:
        """Seconds that the longest of the turns under way has taken."""
        return max((time.monotonic() - began for began in self._began.values()), default=0.0)

    async def work(self, may_begin: Callable[[], Any]) -> None:
        """Takes keys and gives each its turn, until cancelled. `may_begin` is awaited before each."""
        while True:
            key = await self._queue.take()
            try:
                await may_begin()
                self._began[key] = time.monotonic()
                with self._metrics.reconcile_seconds.time():
                    async with asyncio.timeout(TURN_DEADLINE_S):
                        refused = await self.turn(key)
            except (PolyRLError, TimeoutError) as error:
                self._failed(key, error)
            except Exception:
                # A fault in one job's turn must not end the turns of all.
                log.exception("turn failed", job=str(key))
                self._failed(key, None)
            else:
                self._metrics.reconciles.labels("done").inc()
                if refused:
                    # Asked again at once, it would say the same: it waits for news, or for a pause.
                    self._queue.failed(key)
                else:
                    self._queue.done(key)
            finally:
                self._began.pop(key, None)

    async def turn(self, key: JobKey) -> bool:
        """One look at one job, and what follows; True when the API server refused to make something. Raises ApiError or
        NotLeader when something was not done."""
        raw = self._cache.job(key)
        if raw is None:
            self._forget(key)
            return False
        state = self._state(key, raw["metadata"]["uid"])
        state.refused = False
        raw = await self._writer.catch_up(key, raw, state.pending)
        status, asked = await self._look(key, raw, state)
        if asked and counts(status) == counts(raw.get("status") or {}):
            # The answer is a fact like any other. Until it was looked at nothing is told: most jobs are accepted.
            state.pending.status = status
            status, asked = await self._look(key, state.pending.shown(raw), state)
        if asked:
            self._queue.add(key)
        await self._writer.decided(key, state.pending, status)
        return state.refused

    async def _look(self, key: JobKey, raw: Object, state: JobState) -> tuple[dict[str, Any], bool]:
        """Observes, decides, acts. The status to write, and whether the API server was asked for its opinion."""
        pods = self._cache.pods(key, state.uid)
        facts = self._facts(key, raw, pods, state)
        address, ready = _manager(facts)
        self._links.follow(key, address, ready=ready)
        decision = reconcile(facts, self._settings, state.reconcile_state, self._now())
        outcome = await self._act(facts, decision)
        self._remember(key, state, facts, decision, outcome)
        self._metrics.decided(key, decision.status)
        if decision.wake_at is not None:
            self._queue.wake_at(key, time.monotonic() + max(0.0, decision.wake_at - self._now()))
        status = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        return status, outcome.dry_run is not None

    def _facts(self, key: JobKey, raw: Object, pods: list[Object], state: JobState) -> JobFacts:
        uid, generation = state.uid, raw["metadata"].get("generation", 0)
        nodes, claims = self._cache.nodes_of(pods)
        while state.told:
            state.reconcile_state = state.reconcile_state.with_drain_confirmed(state.told.pop())
        answered = state.dry_run is not None and state.dry_run[0] == generation
        return job_facts(
            raw,
            pods=filter(None, map(pod_facts, pods)),
            trainer=self._cache.trainer(key, uid),
            nodes=nodes if self._sees_nodes else None,
            claims=claims,
            children=self._cache.children(key, uid),
            manager=self._links.facts(key),
            dry_run=state.dry_run[1] if answered and state.dry_run is not None else None,
        )

    async def _act(self, facts: JobFacts, decision: ReconcileResult) -> ExecutionResult:
        if not decision.actions or facts.job is None:
            return ExecutionResult()
        owner = Owner(facts.name, facts.namespace, facts.uid, facts.job, domain=self._settings.cluster_domain)
        return await self._actor.act(owner, decision.actions)

    def _remember(
        self, key: JobKey, state: JobState, facts: JobFacts, decision: ReconcileResult, outcome: ExecutionResult
    ) -> None:
        state.reconcile_state = decision.state
        state.refused |= bool(outcome.refusal)
        if outcome.refusal:
            log.warning("refused", job=str(key), message=outcome.refusal)
            state.reconcile_state = state.reconcile_state.with_refusal(outcome.refusal, self._now())
        elif outcome.created:
            state.reconcile_state = state.reconcile_state.without_refusal()
        if outcome.dry_run is not None:
            state.dry_run = (facts.generation, outcome.dry_run)

    def _state(self, key: JobKey, uid: str) -> JobState:
        state = self._states.get(key)
        if state is None or state.uid != uid:
            state = self._states[key] = JobState(uid)
        return state

    def _forget(self, key: JobKey) -> None:
        if self._states.pop(key, None) is not None:
            self._metrics.forget(key)
        self._links.follow(key, None)
        self._queue.forget(key)

    def _failed(self, key: JobKey, error: Exception | None) -> None:
        outcome = "not_leader" if isinstance(error, NotLeader) else "failed"
        self._metrics.reconciles.labels(outcome).inc()
        pause = self._queue.failed(key)
        if error is not None:
            log.warning("turn failed", job=str(key), error=str(error) or type(error).__name__, again_s=round(pause, 1))


def _manager(facts: JobFacts) -> tuple[Address | None, bool]:
    """Of the newest manager pod that has an address and has not ended, and whether it is ready."""
    if facts.job is None or facts.deleting:
        return None, False
    spec = facts.job.spec
    for pod in reversed(facts.of_role(Role.MANAGER)):
        if pod.ip and not pod.ended:
            dns = names.manager_service(facts.name)
            return Address(pod.ip, spec.manager.port, pod.uid, dns, float(spec.telemetry.poll_seconds)), pod.ready
    return None, False
