"""What happened to a run's workers and when; how long each was there, and what its machine is paid as."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from polyrl.sample import Pool


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line."""

    time: float
    """Unix seconds, as in metrics.jsonl."""
    t: float
    """Seconds since this start of the run."""
    kind: str = msgspec.field(name="event")
    """run, started, serving, reclaimed, fault, stopped, exited, condition, over or fleet."""
    worker: str = ""
    text: str = ""
    pool: Pool | None = None
    """Where a manager knows it; of a run on one machine the worker's name says it."""
    engines: int = -1
    """Rollouts that serve from now on, the reserved engine left out; with `fleet` only."""


RUN: Final = "run"
"""The run begins, or goes on in its own folder; whoever was there before has ended unseen."""
RECLAIMED: Final = "reclaimed"
"""A rollout was taken away, with or without notice."""
FAULT: Final = "fault"
"""Another fault was injected."""
OVER: Final = "over"
"""A condition of the whole fleet, by its text, has ended."""
FLEET: Final = "fleet"

END_KINDS: Final = (RECLAIMED, "exited", "stopped")
TRAINER: Final = "trainer"
NOT_ROLLOUTS: Final = ("manager", TRAINER)
_ROLE_WITH_NUMBER: Final = re.compile(rf"({'|'.join(NOT_ROLLOUTS)}|reserved|rollout)(-\d+)?")
"""Names of a local run's workers. A pod's name begins with its job's, which may begin with any of these words."""


@dataclass(slots=True)
class WorkerLife:
    """One stay of a worker on a machine, in seconds; None for what has not happened. Who vanished and came back under
    its name has two."""

    worker: str
    started: float
    serving: float | None = None
    ended: float | None = None
    reclaimed: bool = False
    """Taken away, which ended it."""
    pool: Pool | None = None
    """What its machine is paid as; None where it has none of its own, or nobody knows."""


def worker_lives(events: Sequence[FleetEvent], began: float) -> list[WorkerLife]:
    """All stays of rollouts and the reserved engine, in seconds since the run began."""
    workers = {event.worker: event for event in events}
    shown = {name for name, event in workers.items() if _local_role(event) not in NOT_ROLLOUTS}
    lives, _ = _lives(events)
    return [
        replace(
            life,
            started=life.started - began,
            serving=None if life.serving is None else life.serving - began,
            ended=None if life.ended is None else life.ended - began,
        )
        for life in lives
        if life.worker in shown
    ]


def seconds_by_pool(events: Sequence[FleetEvent], until: float) -> dict[Pool, float]:
    """Seconds that machines were held, each from its worker's start to its end, in Unix seconds; `until` for those that
    are still there. The trainer's machine is a reserved one; the manager's is not counted."""
    lives, ahead = _lives(events)
    seconds: dict[Pool, float] = {}
    for life in lives:
        if life.pool is not None:
            ended = until + ahead if life.ended is None else life.ended
            seconds[life.pool] = seconds.get(life.pool, 0.0) + max(0.0, ended - life.started)
    return seconds


def machines_by_pool(events: Sequence[FleetEvent]) -> dict[Pool, int]:
    """Machines held after the newest event."""
    return dict(Counter(life.pool for life in _lives(events)[0] if life.pool is not None and life.ended is None))


def _lives(events: Sequence[FleetEvent]) -> tuple[list[WorkerLife], float]:
    """All stays by a clock that never goes back, and by how much it is ahead of the events' own at the end."""
    lives: list[WorkerLife] = []
    newest: dict[str, WorkerLife] = {}
    ahead, now = 0.0, -math.inf
    for event in events:
        if event.kind == RUN:
            for left in newest.values():
                left.ended = now if left.ended is None else left.ended
        # NTP may set a clock back; that is no time, and no restart of the run.
        ahead = max(ahead, now - event.time)
        now = event.time + ahead
        life = newest.get(event.worker)
        if _begins(event, life):
            life = newest[event.worker] = WorkerLife(event.worker, now)
            lives.append(life)
        if life is not None and life.ended is None:
            _live_on(life, event, now)
    return lives, ahead


def _begins(event: FleetEvent, life: WorkerLife | None) -> bool:
    """A manager that was started again hears first of an engine that it serves, or that it is gone."""
    if life is None:
        return event.kind in ("started", "serving", *END_KINDS)
    return event.kind == "started" and life.ended is not None


def _live_on(life: WorkerLife, event: FleetEvent, now: float) -> None:
    if event.kind == "started":
        life.pool = _paid_as(event)
    elif event.kind == "serving" and life.serving is None:
        life.serving = now
    elif event.kind in END_KINDS:
        life.ended, life.reclaimed = now, event.kind == RECLAIMED


def _paid_as(event: FleetEvent) -> Pool | None:
    role = _local_role(event)
    if role == TRAINER:
        return Pool.RESERVED
    if event.pool is not None:
        # The reserved engine is on the trainer's machine.
        return None if event.pool is Pool.RESERVED else event.pool
    return Pool.SPOT if role == "rollout" else None


def _local_role(event: FleetEvent) -> str | None:
    """What a worker's name says; nothing where it has a pool that only an engine has."""
    named = _ROLE_WITH_NUMBER.fullmatch(event.worker)
    return named[1] if named is not None and event.pool in (None, Pool.RESERVED) else None
