"""What happened to a run's workers and when; how long each was there, and what its machine is paid as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    """started, serving, reclaimed, fault, stopped, exited, condition or fleet."""
    worker: str = ""
    text: str = ""
    pool: Pool | None = None
    """Where a manager knows it; of a run on one machine the worker's name says it."""
    engines: int = -1
    """Rollouts that serve from now on, the reserved engine left out; with `fleet` only."""


RECLAIMED: Final = "reclaimed"
"""A rollout was taken away, with or without notice."""
FAULT: Final = "fault"
"""Another fault was injected."""
FLEET: Final = "fleet"

END_KINDS: Final = (RECLAIMED, "exited", "stopped")
NOT_ROLLOUTS: Final = ("manager", "trainer")


@dataclass(frozen=True)
class WorkerLife:
    """When a rollout was there, in seconds since the run began; None for what has not happened."""

    worker: str
    started: float
    serving: float | None
    ended: float | None


def worker_lives(events: Sequence[FleetEvent], began: float) -> list[WorkerLife]:
    """A rollout's first start, its first serving, its end; those that are neither manager nor trainer."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event.worker and not event.worker.startswith(NOT_ROLLOUTS):
            found.setdefault(event.worker, {}).setdefault(event.kind, event.time - began)
    return [
        WorkerLife(
            name,
            times.get("started", min(times.values())),
            serving=times.get("serving"),
            ended=min((times[end] for end in END_KINDS if end in times), default=None),
        )
        for name, times in found.items()
    ]


def seconds_by_pool(events: Sequence[FleetEvent], until: float) -> dict[Pool, float]:
    """Seconds that machines were held, each from its worker's start to its end, in Unix seconds; `until` for those that
    are still there. The trainer's machine is a reserved one; the manager's is not counted."""
    seconds: dict[Pool, float] = {}
    for pool, since, ended in _holdings(events):
        seconds[pool] = seconds.get(pool, 0.0) + max(0.0, (until if ended is None else ended) - since)
    return seconds


def machines_by_pool(events: Sequence[FleetEvent]) -> dict[Pool, int]:
    """Machines held after the newest event."""
    return dict(Counter(pool for pool, _, ended in _holdings(events) if ended is None))


def _holdings(events: Sequence[FleetEvent]) -> list[tuple[Pool, float, float | None]]:
    """Pool, start and end of each stay of a worker on a machine that is paid for."""
    over: list[tuple[Pool, float, float | None]] = []
    held: dict[str, tuple[Pool, float]] = {}
    before: FleetEvent | None = None
    for event in events:
        if before is not None and event.t < before.t:
            # The run was started again, and its seconds with it; whoever was there before ended unseen.
            over += [(*stay, before.time) for stay in held.values()]
            held.clear()
        pool = _paid_as(event)
        if event.kind in END_KINDS and event.worker in held:
            over.append((*held.pop(event.worker), event.time))
        elif event.kind == "started" and pool is not None:
            held.setdefault(event.worker, (pool, event.time))
        before = event
    return over + [(*stay, None) for stay in held.values()]


def _paid_as(event: FleetEvent) -> Pool | None:
    if event.worker.startswith("trainer"):
        return Pool.RESERVED
    if event.pool is not None:
        return None if event.pool is Pool.RESERVED else event.pool
    return Pool.SPOT if event.worker.startswith("rollout") else None
