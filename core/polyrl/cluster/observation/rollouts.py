"""How each rollout stands: the pod, its engine at the manager, and its notice, put together.

    WAITING -> STARTING -> SERVING      in the count of the fleet
    TAKEN                               the cluster takes it or took it; replaced at once
    FAILED                              ended, never registered or fell silent, by no sign of the cluster's
    LEFT                                ended with status 0 a moment ago: whether the run is over is about to be known
    RELEASED                            we chose to let it go

Refuses to hold: what follows from it (see `fleet_plan`). Read next: `disruption`, `endings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation.context import Look
from polyrl.cluster.observation.disruption import Notice, notice_of
from polyrl.cluster.observation.endings import SILENT_S, failure, start_due
from polyrl.cluster.observation.exactly_once import Counted, Tally, counted
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.node_signals import Kind, absence_due
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus
from polyrl.worker import Role

QUIET_S: Final = 10.0
"""When a run ends, rollouts end first and the manager's word arrives within a poll; nobody is to be replaced then."""

LEASE_LOST_S: Final = 5.0
"""On a node that is not ready, silence for so long is no passing reconnect; agents reconnect within a second."""


class Standing(Enum):
    WAITING = auto()
    """No node yet."""
    STARTING = auto()
    """On a node, not yet registered at the manager."""
    SERVING = auto()
    TAKEN = auto()
    FAILED = auto()
    LEFT = auto()
    RELEASED = auto()


LIVE: Final = (Standing.WAITING, Standing.STARTING, Standing.SERVING)


@dataclass(frozen=True)
class Rollout:
    """One rollout pod."""

    pod: PodFacts
    standing: Standing
    notice: Notice | None = None
    """Confirmed when TAKEN; unconfirmed: at risk."""
    engine: EngineStatus | None = None
    silent_since: float | None = None
    """Since when a manager that answers has not listed its engine, which it once did."""
    why: str = ""
    """Of a failure: what happened."""

    @property
    def live(self) -> bool:
        return self.standing in LIVE

    @property
    def pool(self) -> Pool:
        """Pods without the label are of spot, the default."""
        return self.pod.pool or Pool.SPOT

    @property
    def counted(self) -> Counted | None:
        """Its number among preemptions or failures, once written on it."""
        return counted(self.pod)


def rollouts(look: Look) -> tuple[Rollout, ...]:
    """Every rollout pod there is, oldest first."""
    return tuple(_rollout(pod, look) for pod in look.facts.of_role(Role.ROLLOUT))


def next_due(fleet: Sequence[Rollout], look: Look) -> float | None:
    """Unix seconds at which time alone will make one of them stand otherwise; None when never."""
    dues: list[float | None] = [start_due(one.pod, look) for one in fleet if one.standing is Standing.STARTING]
    dues += [one.pod.ended_at + QUIET_S for one in fleet if one.standing is Standing.LEFT and one.pod.ended_at]
    for since in (one.silent_since for one in fleet if one.silent_since is not None):
        dues += [since + LEASE_LOST_S, since + SILENT_S]
    dues += [absence_due(one.pod, look) for one in fleet]
    return min((due for due in dues if due is not None and due > look.now), default=None)


def of_pool(fleet: Sequence[Rollout], pool: Pool) -> list[Rollout]:
    """The live ones of one pool."""
    return [one for one in fleet if one.live and one.pool is pool]


def silent_since(pod: PodFacts, look: Look) -> float | None:
    """Since when a manager that answers has not listed the engine, which it once did."""
    if pod.uid not in look.memory.registered or pod.name in look.engines or not look.manager_answers:
        return None
    return look.memory.silent_since.get(pod.uid, look.now)


def _rollout(pod: PodFacts, look: Look) -> Rollout:
    engine, since = look.engines.get(pod.name), silent_since(pod, look)
    if names.ANNOTATION_RELEASED in pod.annotations or (look.finishing and pod.ended):
        return Rollout(pod, Standing.RELEASED, None, engine)
    written = counted(pod)
    if written is not None and written.tally is Tally.FAILURE:
        return Rollout(pod, Standing.FAILED, None, engine, since, "it was counted as failed")
    silent = since is not None and look.now - since >= LEASE_LOST_S
    drains = engine is not None and engine.state is EngineState.DRAINING and not look.finishing
    notice = notice_of(pod, look, silent=silent, drains=drains)
    if notice is not None and notice.confirmed:
        return Rollout(pod, Standing.TAKEN, notice, engine, since)
    why = failure(pod, look, since)
    if why:
        return Rollout(pod, Standing.FAILED, None, engine, since, why)
    if pod.ended and pod.ended_at is not None and look.now - pod.ended_at < QUIET_S:
        return Rollout(pod, Standing.LEFT, None, engine, since)
    if pod.ended:
        left = Notice(Kind.UNKNOWN, look.now, look.now, True, "its agent ended after handing over")
        return Rollout(pod, Standing.TAKEN, left, engine, since)
    return Rollout(pod, _standing(pod, engine, look), notice, engine, since)


def _standing(pod: PodFacts, engine: EngineStatus | None, look: Look) -> Standing:
    if pod.scheduled_at is None:
        return Standing.WAITING
    known = engine is not None or (not look.manager_answers and pod.uid in look.memory.registered)
    return Standing.SERVING if known else Standing.STARTING
