"""Reconciles jobs: observe, decide, act, write the status once. All of it may be cut off anywhere and done again.

A reconcile whose actions failed writes nothing: its status might report what was not done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import structlog

from polyrl.cluster import names
from polyrl.cluster.actions import Delete, Object, ReconcileResult
from polyrl.cluster.observation.facts import JobFacts
from polyrl.cluster.observation.job import job_facts
from polyrl.cluster.reconcile import reconcile
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.state import ReconcileState
from polyrl.errors import PolyRLError
from polyrl.manifest.job import PolyRLJob
from polyrl.worker import Role
from polyrl_operator.api.client import ApiError, Client, NotLeader
from polyrl_operator.api.kinds import JOB
from polyrl_operator.informer.cache import Cache, JobKey
from polyrl_operator.managers.client import Address
from polyrl_operator.managers.poller import ManagerPoller
from polyrl_operator.metrics import Metrics
from polyrl_operator.reconciler.executor import ExecutionResult, Executor
from polyrl_operator.reconciler.work_queue import WorkQueue

log = structlog.get_logger(__name__)

WORKERS: Final = 16
"""Jobs reconciled at a time; each mostly waits for the API server."""

DEADLINE_S: Final = 120.0
"""Limit of one reconcile: five hundred pods take ten seconds on a slow server."""

STATUS_SPACING_S: Final = 2.0
"""Least time between two writes of one job's status while no count changes and no condition flips."""

COUNTS: Final = (
    ("rollout", "created"),
    ("rollout", "preemptions"),
    ("rollout", "failures"),
    ("manager", "created"),
    ("trainer", "restarts"),
    ("trainer", "disruptions"),
    ("trainer", "failed"),
)
"""Fields that later decisions rest on and that nothing else remembers."""

MILESTONES: Final = ("state", "runID", "startTime", "completionTime", "lastSuspendTime", "lastResumeTime", "failure")
"""Other fields that are written at once."""


@dataclass
class PendingStatus:
    """A job's status as decided, if it is not stored yet."""

    status: dict[str, Any] | None = None
    written_at: float = float("-inf")
    """Monotonic."""

    def shown(self, raw: Object) -> Object:
        """The job with the status that was decided last."""
        return raw if self.status is None else raw | {"status": self.status}


@dataclass
class JobState:
    """What is known of a job between reconciles, and may be lost."""

    uid: str
    reconcile_state: ReconcileState = field(default_factory=ReconcileState)
    confirmed_drains: set[str] = field(default_factory=set)
    """UIDs of pods whose drain was confirmed since the last reconcile."""
    pending: PendingStatus = field(default_factory=PendingStatus)
    dry_run: tuple[int, str] | None = None
    """Generation and answer."""
    refused: bool = False
    """Whether the API server refused to make something in this reconcile."""


class Reconciler:
    """Reconciles all jobs, each by one worker at a time."""

    def __init__(
        self,
        cache: Cache,
        client: Client,
        executor: Executor,
        managers: ManagerPoller,
        queue: WorkQueue,
        metrics: Metrics,
        settings: Settings,
        *,
        sees_nodes: bool,
    ) -> None:
        self._cache, self._executor, self._managers = cache, executor, managers
        self._queue, self._metrics, self._settings = queue, metrics, settings
        self._now = client.clock.now
        self._sees_nodes = sees_nodes
        self._writer = StatusWriter(client, cache, queue.wake_at, metrics.status_writes.inc)
        self._states: dict[JobKey, JobState] = {}
        self._under_way: dict[JobKey, tuple[float, asyncio.Timeout]] = {}
        """When each reconcile began, and what ends it."""

    def confirm_drain(self, key: JobKey, uid: str) -> None:
        """The manager confirmed the drain of a pod."""
        if key in self._states:
            self._states[key].confirmed_drains.add(uid)

    def longest(self) -> float:
        """Seconds that the longest reconcile under way has taken."""
        return max((time.monotonic() - began for began, _ in self._under_way.values()), default=0.0)

    def stand_by(self) -> None:
        """Another replica may act from now on, and shows what becomes of jobs; what is under way ends."""
        for _, deadline in self._under_way.values():
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())
        for key in self._states:
            self._metrics.forget(key)

    def take_over(self) -> None:
        """Another replica has acted: what is remembered of pods and statuses would count or undo what it did."""
        self._states.clear()

    async def work(self, may_begin: Callable[[], Any]) -> None:
        """Takes keys from the queue and reconciles them, until cancelled. `may_begin` is awaited before each."""
        while True:
            key = await self._queue.take()
            try:
                await may_begin()
                with self._metrics.reconcile_seconds.time():
                    async with asyncio.timeout(DEADLINE_S) as deadline:
                        self._under_way[key] = time.monotonic(), deadline
                        refused = await self.reconcile(key)
            except (PolyRLError, TimeoutError) as error:
                self._failed(key, error)
            except Exception:
                # A fault in one job must not end the reconciles of all.
                log.exception("reconcile failed", job=str(key))
                self._failed(key, None)
            else:
                self._metrics.reconciles.labels("done").inc()
                if refused:
                    # Asked again at once, the server would say the same: it waits for a change, or for a pause.
                    self._queue.failed(key)
                elif key in self._states:
                    self._queue.done(key)
                else:
                    self._queue.gone(key)
            finally:
                self._under_way.pop(key, None)

    async def reconcile(self, key: JobKey) -> bool:
        """Reconciles one job; True when the API server refused to make something. Raises ApiError or NotLeader when
        something was not done."""
        raw = self._cache.job(key)
        if raw is None:
            self._forget(key)
            return False
        state = self._state(key, raw["metadata"]["uid"])
        state.refused = False
        raw = await self._writer.catch_up(key, raw, state.pending)
        status, dry_ran = await self._once(key, raw, state)
        if dry_ran and counts(status) == counts(raw.get("status") or {}):
            # The dry run's answer is a fact like any other. Until it was used nothing is written: most are accepted.
            state.pending.status = status
            status, dry_ran = await self._once(key, state.pending.shown(raw), state)
        if dry_ran:
            self._queue.add(key)
        await self._writer.decided(key, state.pending, status)
        return state.refused

    async def _once(self, key: JobKey, raw: Object, state: JobState) -> tuple[dict[str, Any], bool]:
        """Observes, decides, acts. The status to write, and whether the API server was asked for a dry run."""
        facts = self._observe(key, raw, state)
        address, ready = _manager_of(facts)
        self._managers.follow(key, address, ready=ready)
        decided = reconcile(facts, self._settings, state.reconcile_state, self._now())
        deleted = {action.uid for action in decided.actions if isinstance(action, Delete)}
        state.reconcile_state = state.reconcile_state.with_released(deleted)
        done = await self._act(facts, decided)
        self._remember(key, state, facts, decided, done)
        self._metrics.decided(key, decided.status)
        if decided.wake_at is not None:
            self._queue.wake_at(key, time.monotonic() + max(0.0, decided.wake_at - self._now()))
        return decided.status.model_dump(mode="json", by_alias=True, exclude_none=True), done.dry_run is not None

    def _observe(self, key: JobKey, raw: Object, state: JobState) -> JobFacts:
        pods = self._cache.pods(key, state.uid)
        nodes, claims = self._cache.nodes_of(pods)
        while state.confirmed_drains:
            state.reconcile_state = state.reconcile_state.with_drain_confirmed(state.confirmed_drains.pop())
        generation, answer = state.dry_run or (None, None)
        return job_facts(
            raw,
            pods=pods,
            trainer=self._cache.trainer(key, state.uid),
            nodes=nodes if self._sees_nodes else None,
            claims=claims,
            children=self._cache.children(key, state.uid),
            manager=self._managers.facts(key),
            dry_run=answer if generation == raw["metadata"].get("generation", 0) else None,
        )

    async def _act(self, facts: JobFacts, decided: ReconcileResult) -> ExecutionResult:
        # Of a job that cannot be read only Events are decided.
        job = cast(PolyRLJob, facts.job)
        owner = Owner(facts.name, facts.namespace, uid=facts.uid, job=job, settings=self._settings)
        return await self._executor.execute(owner, decided.actions)

    def _remember(
        self, key: JobKey, state: JobState, facts: JobFacts, decided: ReconcileResult, done: ExecutionResult
    ) -> None:
        state.reconcile_state = decided.state
        state.refused |= bool(done.refusal) or done.denied
        if done.refusal:
            log.warning("refused", job=str(key), message=done.refusal)
            state.reconcile_state = state.reconcile_state.with_refusal(
                done.refusal, self._now(), of_pods=not done.incomplete
            )
        elif done.created:
            state.reconcile_state = state.reconcile_state.without_refusal()
        if done.dry_run is not None:
            state.dry_run = (facts.generation, done.dry_run)

    def _state(self, key: JobKey, uid: str) -> JobState:
        state = self._states.get(key)
        if state is None or state.uid != uid:
            state = self._states[key] = JobState(uid)
            self._queue.forget_failures(key)
        return state

    def _forget(self, key: JobKey) -> None:
        self._states.pop(key, None)
        self._metrics.forget(key)
        self._managers.follow(key, None)

    def _failed(self, key: JobKey, error: Exception | None) -> None:
        self._metrics.reconciles.labels("not_leader" if isinstance(error, NotLeader) else "failed").inc()
        pause = round(self._queue.failed(key, error.retry_after_s if isinstance(error, ApiError) else 0.0), 1)
        if error is not None:
            log.warning("reconcile failed", job=str(key), error=str(error) or type(error).__name__, retry_s=pause)


def _manager_of(facts: JobFacts) -> tuple[Address | None, bool]:
    """Address of the newest manager pod that has one and has not ended, and whether it is ready."""
    if facts.job is None or facts.deleting:
        return None, False
    spec = facts.job.spec
    for pod in reversed(facts.of_role(Role.MANAGER)):
        if pod.ip and not pod.ended:
            address = Address(
                pod.ip,
                spec.manager.port,
                pod_uid=pod.uid,
                name=names.manager_service(facts.name),
                poll_s=float(spec.telemetry.poll_seconds),
            )
            return address, pod.ready
    return None, False


class StatusWriter:
    """Writes statuses of all jobs: once per reconcile, only what changed, and not too often.

    Counts, and conditions that flip, are written in the reconcile that decided them, and nothing further is decided
    before counts are: a pod may be deleted once it was counted, so what counts it must have been stored by then. Plain
    numbers wait until two seconds after the last write; until then the next reconciles see them as if they were stored.
    """

    def __init__(
        self, client: Client, cache: Cache, wake_at: Callable[[JobKey, float], None], written: Callable[[], None]
    ) -> None:
        self._client, self._cache, self._wake_at, self._written = client, cache, wake_at, written

    async def catch_up(self, key: JobKey, raw: Object, pending: PendingStatus) -> Object:
        """The job with what was decided; counts that could not be stored are, first. Raises ApiError."""
        if pending.status is not None and _urgent(raw.get("status") or {}) != _urgent(pending.status):
            await self._write(key, raw, pending, pending.status)
            return self._cache.job(key) or raw
        return pending.shown(raw)

    async def decided(self, key: JobKey, pending: PendingStatus, status: dict[str, Any]) -> None:
        """Writes what changed, now or when its time comes. Raises ApiError."""
        raw = self._cache.job(key)
        if raw is None:
            return
        stored = raw.get("status") or {}
        if stored == status:
            pending.status = None
            return
        pending.status = status
        due = pending.written_at + STATUS_SPACING_S
        if time.monotonic() < due and _urgent(stored) == _urgent(status):
            self._wake_at(key, due)
            return
        await self._write(key, raw, pending, status)

    async def _write(self, key: JobKey, raw: Object, pending: PendingStatus, status: dict[str, Any]) -> None:
        change = merge_patch(raw.get("status") or {}, status)
        body = {"metadata": {"resourceVersion": raw["metadata"]["resourceVersion"]}, "status": change}
        try:
            stored = await self._client.patch(JOB, key.namespace, key.name, body, "status")
        except ApiError as error:
            if error.status == 404:
                pending.status = None
                return
            if error.status == 409 and (newest := await self._client.get(JOB, key.namespace, key.name)) is not None:
                # Somebody changed the job since it was read: the next reconcile begins from what is stored.
                self._cache.observe(JOB, newest)
            raise
        pending.status, pending.written_at = None, time.monotonic()
        self._written()
        self._cache.observe(JOB, stored, quiet=True)


def merge_patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that makes `old` into `new`; empty when they are the same. `new` may hold no
    null."""
    patch: dict[str, Any] = {key: None for key in old.keys() - new.keys()}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif isinstance(value, dict) and isinstance(old[key], dict):
            inner = merge_patch(old[key], value)
            if inner:
                patch[key] = inner
        elif value != old[key]:
            patch[key] = value
    return patch


def counts(status: dict[str, Any]) -> tuple[int, ...]:
    """What is stored before anything further is decided."""
    return tuple((status.get(part) or {}).get(field) or 0 for part, field in COUNTS)


def _urgent(status: dict[str, Any]) -> tuple[object, ...]:
    """What is not left waiting."""
    conditions = sorted((one.get("type"), one.get("status")) for one in status.get("conditions") or ())
    return conditions, counts(status), *(status.get(field) for field in MILESTONES)
