"""How patiently each pool of machines is asked for more.

    Available -> (a pod waits longer than pendingTimeoutSeconds, or the scheduler preempts one) -> BackingOff
    BackingOff: one probe stays pending, because only asking shows that capacity is back; no others
        a pod of the pool gets a node          -> Available
        the time is up and the probe overdue   -> a fresh probe, twice the time (60 s to 30 min, jittered by the job)
    the count of failures is forgotten once all pods have nodes and one has lived for 10 min

Rollouts that fail by themselves hold their pool too: 10 s after the first, twice as long after each further one that
fails before any newer one registered, at most 5 min. What the API server refuses holds both: 60 s to 10 min.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.disruption import SCHEDULER
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.rollouts import PodState, RolloutPod, of_pool
from polyrl.cluster.state import Refusal
from polyrl.cluster.timestamps import earliest, millisecond, unix
from polyrl.manifest.status import PoolStatus
from polyrl.sample import Pool

FIRST_POOL_BACKOFF_S: Final = 60.0
MAX_POOL_BACKOFF_S: Final = 1800.0
"""cluster-autoscaler blocks a failing node group for 5 to 30 min; asking more often than that is of no use."""

PROVED_S: Final = 600.0
"""A pod that kept its node for so long shows that the capacity is real."""

FIRST_RESTART_S: Final = 10.0
MAX_RESTART_S: Final = 300.0
"""Kubernetes' own bounds for a container that crashes again and again."""

FIRST_REFUSAL_S: Final = 60.0
MAX_REFUSAL_S: Final = 600.0
"""A quota or a webhook is mended by people."""

UNLIMITED: Final = 1 << 20
"""More pods than any job may have."""

POOLS: Final = (Pool.SPOT, Pool.ON_DEMAND)
REASON_LENGTH: Final = 256
"""Characters of a scheduler's message that are kept; it repeats itself per node."""


@dataclass(frozen=True)
class PoolView:
    """One pool after this reconcile."""

    status: PoolStatus
    room: int
    """Pods that may be asked of it now."""
    surplus: tuple[RolloutPod, ...] = ()
    """Pods that wait in vain beside, or instead of, the probe."""
    due: float | None = None
    """Unix seconds at which time alone may change this view."""

    @property
    def held(self) -> bool:
        """True while the pool backs off: only one probe pod may be pending."""
        return self.status.state == "BackingOff"


@dataclass(frozen=True)
class _Hold:
    """Whether a pool is held for want of nodes."""

    until: float | None
    """Unix seconds; None: it is not."""
    failures: int
    """Times in a row that it did not place a pod."""
    renews: bool = False
    """The probe makes way for a fresh one."""


def backoff_s(failures: int, uid: str) -> float:
    """Seconds to hold a pool after so many failures in a row: deterministic, and different for each job."""
    full = min(MAX_POOL_BACKOFF_S, FIRST_POOL_BACKOFF_S * 2.0 ** (failures - 1))
    return full * (0.5 + 0.5 * zlib.crc32(f"{uid}/{failures}".encode()) / 2**32)


def restart_at(status: PoolStatus) -> float | None:
    """When a rollout may follow those that failed; None when none did since one registered."""
    failed_at = unix(status.last_failure_time)
    if failed_at is None or status.failed_starts == 0:
        return None
    return failed_at + min(MAX_RESTART_S, FIRST_RESTART_S * 2.0 ** (status.failed_starts - 1))


def refused_until(refusal: Refusal | None, now: float) -> float | None:
    """When the API server is asked again to create pods; not before what they cannot do without is there."""
    if refusal is None:
        return None
    if not refusal.of_pods:
        return now + FIRST_REFUSAL_S
    return refusal.at + min(MAX_REFUSAL_S, FIRST_REFUSAL_S * 2.0 ** (refusal.times - 1))


def pool_views(
    ctx: ReconcileContext, fleet: Sequence[RolloutPod], failed: list[PodFacts], preempted: list[PodFacts]
) -> list[PoolView]:
    """Spot, then on-demand. `failed` and `preempted`: pods that are counted as such in this very reconcile."""
    return [_view(pool, ctx, of_pool(fleet, pool), failed, preempted) for pool in POOLS]


def _view(
    pool: Pool, ctx: ReconcileContext, live: list[RolloutPod], failed: list[PodFacts], preempted: list[PodFacts]
) -> PoolView:
    stored = (one for one in ctx.status.rollout.pools if one.name == pool.value)
    prior = next(stored, PoolStatus.model_validate({"name": pool.value}))
    pushed_out = any(pod.pool is pool and pod.disruption == SCHEDULER for pod in preempted)
    capacity = _capacity(prior, ctx, live, pushed_out)
    status = _restarts(capacity.status, ctx, live, [pod for pod in failed if pod.pool is pool])
    holds = [restart_at(status), refused_until(ctx.state.refusal, ctx.now)]
    waits = [hold for hold in holds if hold is not None and hold > ctx.now]
    waiting = sum(one.state is PodState.PENDING for one in live) - len(capacity.surplus)
    probe = 0 if waiting > 0 else 1
    room = 0 if waits else probe if status.backoff_until is not None else UNLIMITED
    state = "BackingOff" if waits or status.backoff_until is not None else "Available"
    due = earliest((*waits, capacity.due), after=ctx.now)
    return PoolView(status.model_copy(update={"state": state}), room, surplus=capacity.surplus, due=due)


def _capacity(prior: PoolStatus, ctx: ReconcileContext, live: list[RolloutPod], pushed_out: bool) -> PoolView:
    """The part of the view that follows from pods without nodes."""
    timeout = ctx.spec.rollout.pending_timeout_seconds
    waiting = [one for one in live if one.state is PodState.PENDING]
    overdue = [one for one in waiting if ctx.now - one.pod.created_at >= timeout]
    hold = _hold(prior, ctx, live, overdue, pushed_out)
    surplus: list[RolloutPod] = [] if hold.until is None else overdue if hold.renews else overdue[1:]
    since = prior.limited_since or (millisecond(min(one.pod.created_at for one in waiting)) if waiting else None)
    update = {
        "backoff_until": None if hold.until is None else millisecond(hold.until),
        "consecutive_failures": hold.failures,
        "limited_since": since if waiting or hold.until is not None else None,
        "last_reason": _reason(prior, overdue, pushed_out, timeout),
    }
    dues = [one.pod.created_at + timeout for one in waiting] + ([] if hold.until is None else [hold.until])
    if hold.failures and hold.until is None:
        dues += [placed + PROVED_S for placed in _placed(live)]
    return PoolView(prior.model_copy(update=update), 0, surplus=tuple(surplus), due=earliest(dues, after=ctx.now))


def _hold(
    prior: PoolStatus, ctx: ReconcileContext, live: list[RolloutPod], overdue: list[RolloutPod], pushed_out: bool
) -> _Hold:
    until, failures = unix(prior.backoff_until), prior.consecutive_failures
    if until is not None and not pushed_out and _is_over(until, failures, ctx, live):
        return _Hold(None, failures)
    if pushed_out or (overdue and (until is None or ctx.now >= until)):
        longer = ctx.now + backoff_s(failures + 1, ctx.facts.uid)
        return _Hold(longer, failures + 1, renews=until is not None and ctx.now >= until)
    waiting = any(one.state is PodState.PENDING for one in live)
    lived = any(ctx.now - placed >= PROVED_S for placed in _placed(live))
    return _Hold(until, 0 if until is None and lived and not waiting else failures)


def _placed(live: list[RolloutPod]) -> list[float]:
    return [one.pod.scheduled_at for one in live if one.pod.scheduled_at is not None]


def _is_over(until: float, failures: int, ctx: ReconcileContext, live: list[RolloutPod]) -> bool:
    """A pod got a node since the back-off began, or its time is up and nothing waits any more."""
    began = until - backoff_s(max(1, failures), ctx.facts.uid)
    waiting = any(one.state is PodState.PENDING for one in live)
    return any(placed > began for placed in _placed(live)) or (ctx.now >= until and not waiting)


def _reason(prior: PoolStatus, overdue: list[RolloutPod], pushed_out: bool, timeout: int) -> str:
    if pushed_out:
        return "a pod of higher priority took the place of a rollout"
    if not overdue:
        return prior.last_reason
    message = overdue[0].pod.unschedulable or "no scheduler took it"
    return f"{overdue[0].pod.name} got no node within {timeout} s: {message}"[:REASON_LENGTH]


def _restarts(status: PoolStatus, ctx: ReconcileContext, live: list[RolloutPod], failed: list[PodFacts]) -> PoolStatus:
    """Pods that were made before the last failure was seen belong to the same batch, and count as one failure."""
    failed_at = unix(status.last_failure_time)
    step = [pod for pod in failed if failed_at is None or pod.created_at > failed_at]
    if step:
        update = {"failed_starts": status.failed_starts + 1, "last_failure_time": millisecond(ctx.now)}
        return status.model_copy(update=update)
    proved = failed_at is not None and any(one.engine is not None and one.pod.created_at >= failed_at for one in live)
    return status.model_copy(update={"failed_starts": 0}) if proved else status
