"""How each rollout stands: the pod, its engine at the manager, and its notice, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.disruption import DisruptionNotice, absence_due, is_dead, notice_of
from polyrl.cluster.observation.exactly_once import LossCounter, LossNumber, loss_number_of
from polyrl.cluster.observation.facts import PodFacts, PodPhase
from polyrl.cluster.timestamps import earliest
from polyrl.manifest.status import DisruptionKind
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus
from polyrl.worker import Role

QUIET_S: Final = 10.0
"""When a run ends, rollouts end first and the manager's word arrives within a poll; nobody is to be replaced then."""

LEASE_LOST_S: Final = 5.0
"""On a node that is not ready, silence for so long is no passing reconnect; agents reconnect within a second."""


class PodState(Enum):
    """PENDING -> STARTING -> SERVING count in the fleet; each may end in one of the others."""

    PENDING = auto()
    """No node yet."""
    STARTING = auto()
    """On a node, not yet registered at the manager."""
    SERVING = auto()
    """Registered at the manager; while that does not answer, as it was known before."""
    PREEMPTED = auto()
    """The cluster takes it or took it; replaced at once."""
    FAILED = auto()
    """It ended, never registered or fell silent, and the cluster did not take it."""
    EXITED = auto()
    """It ended a moment ago, and whether the run is over is about to be known."""
    DELETING = auto()
    """We chose to delete it, or it ended with the run."""


LIVE: Final = (PodState.PENDING, PodState.STARTING, PodState.SERVING)


@dataclass(frozen=True)
class RolloutPod:
    """One rollout pod."""

    pod: PodFacts
    state: PodState
    notice: DisruptionNotice | None = None
    """Confirmed when PREEMPTED; unconfirmed: at risk."""
    engine: EngineStatus | None = None
    silent_since: float | None = None
    """Since when a manager that answers has not listed its engine, which it once did."""
    why: str = ""
    """What happened, when it failed; else empty."""

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def pool(self) -> Pool:
        """Pods without the label are of spot, the default."""
        return self.pod.pool or Pool.SPOT

    @property
    def loss_number(self) -> LossNumber | None:
        """Its number among preemptions or failures, once written on it."""
        return loss_number_of(self.pod)


def rollouts(ctx: ReconcileContext) -> tuple[RolloutPod, ...]:
    """Every rollout pod there is, oldest first."""
    return tuple(_rollout(pod, ctx) for pod in ctx.facts.of_role(Role.ROLLOUT))


def next_due(fleet: Sequence[RolloutPod], ctx: ReconcileContext) -> float | None:
    """Unix seconds at which time alone will make one of them stand otherwise; None when never."""
    dues: list[float | None] = [start_due(one.pod, ctx) for one in fleet if one.state is PodState.STARTING]
    dues += [one.pod.ended_at + QUIET_S for one in fleet if one.state is PodState.EXITED and one.pod.ended_at]
    for since in (one.silent_since for one in fleet if one.silent_since is not None):
        dues += [since + LEASE_LOST_S, since + SILENT_S]
    dues += [absence_due(one.pod, ctx) for one in fleet]
    return earliest(dues, after=ctx.now)


def of_pool(fleet: Sequence[RolloutPod], pool: Pool) -> list[RolloutPod]:
    """The live ones of one pool."""
    return [one for one in fleet if one.live and one.pool is pool]


def silent_since(pod: PodFacts, ctx: ReconcileContext) -> float | None:
    """Since when a manager that answers has not listed the engine, which it once did."""
    if pod.uid not in ctx.state.registered or pod.name in ctx.engines or not ctx.manager_answers:
        return None
    return ctx.state.silent_since.get(pod.uid, ctx.now)


def _rollout(pod: PodFacts, ctx: ReconcileContext) -> RolloutPod:
    engine, since = ctx.engines.get(pod.name), silent_since(pod, ctx)
    if names.ANNOTATION_RELEASED in pod.annotations or (ctx.finishing and pod.ended):
        return RolloutPod(pod, PodState.DELETING, engine=engine)
    observed = partial(RolloutPod, pod, engine=engine, silent_since=since)
    written = loss_number_of(pod)
    if written is not None and written.counter is LossCounter.FAILURE:
        return observed(PodState.FAILED, why="it was counted as failed")
    silent = since is not None and ctx.now - since >= LEASE_LOST_S
    drains = engine is not None and engine.state is EngineState.DRAINING and not ctx.finishing
    notice = notice_of(pod, ctx, silent=silent, drains=drains)
    if notice is not None and notice.confirmed:
        return observed(PodState.PREEMPTED, notice=notice)
    why = failure(pod, ctx, since)
    if why:
        return observed(PodState.FAILED, why=why)
    if pod.ended and pod.ended_at is not None and ctx.now - pod.ended_at < QUIET_S:
        return observed(PodState.EXITED)
    if pod.ended:
        left = DisruptionNotice(
            DisruptionKind.UNKNOWN, ctx.now, deadline=ctx.now, confirmed=True, why="its agent ended after handing over"
        )
        return observed(PodState.PREEMPTED, notice=left)
    return observed(_state(pod, engine, ctx), notice=notice)


def _state(pod: PodFacts, engine: EngineStatus | None, ctx: ReconcileContext) -> PodState:
    if pod.scheduled_at is None:
        return PodState.PENDING
    known = engine is not None or (not ctx.manager_answers and pod.uid in ctx.state.registered)
    return PodState.SERVING if known else PodState.STARTING


OF_USE_S: Final = 60.0
"""A pod that lived so long before it ended with status 0 had started well: its agent saw a notice that we did not."""

SILENT_S: Final = 120.0
"""A registered engine that the manager has not listed for so long is stuck: a new manager knows all within 30 s."""


def failure(pod: PodFacts, ctx: ReconcileContext, silent_since: float | None) -> str:
    """Why the pod failed, for one that the cluster did not take; empty when it did not."""
    if pod.ended:
        return _ended(pod, ctx)
    if is_dead(pod, ctx) or not ctx.manager_answers:
        return ""
    if silent_since is not None and ctx.now - silent_since >= SILENT_S:
        return f"the manager has not heard its engine for {SILENT_S:.0f} s"
    due = start_due(pod, ctx)
    if due is not None and ctx.now >= due:
        image = f", and could not pull {pod.unpulled}" if pod.unpulled else ""
        return f"it did not register within {ctx.spec.rollout.startup_timeout_seconds} s of being scheduled{image}"
    return ""


def start_due(pod: PodFacts, ctx: ReconcileContext) -> float | None:
    """Unix seconds by which the pod must have registered; None when it has, or has no node yet. An operator that began
    just now may have met a manager that did too, and does not know its engines yet."""
    if pod.scheduled_at is None or pod.name in ctx.engines or pod.uid in ctx.state.registered:
        return None
    began_at = ctx.now if ctx.state.began_at is None else ctx.state.began_at
    return max(pod.scheduled_at + ctx.spec.rollout.startup_timeout_seconds, began_at + SILENT_S)


def _ended(pod: PodFacts, ctx: ReconcileContext) -> str:
    lived = pod.uid in ctx.state.registered or ctx.now - pod.created_at >= OF_USE_S
    if pod.phase is PodPhase.SUCCEEDED:
        return "" if lived else "it ended with status 0 before it was of use"
    if pod.reason == "Evicted":
        return "the kubelet evicted it, not for its node's sake: it wrote more than a volume of it may hold"
    bad = next((end for end in pod.exits if end.code != 0), None)
    if bad is None:
        return f"the kubelet refused it: {pod.reason}" if pod.reason else "it ended, and nobody says why"
    return f"container {bad.container} ended with status {bad.code}" + (f" ({bad.reason})" if bad.reason else "")
