"""Writes a job's status: once per reconcile, only what changed, and not too often.

Counts, and conditions that flip, are written in the reconcile that decided them, and nothing further is decided before
counts are: a pod may be deleted once it was counted, so what counts it must have been stored by then. Plain numbers
wait until two seconds after the last write; meanwhile they are shown to the next reconciles as if they were stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from polyrl.cluster.actions import Object
from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.kinds import JOB
from polyrl_operator.informer.cache import Cache
from polyrl_operator.informer.cached_object import JobKey

SPACING_S: Final = 2.0
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


class StatusWriter:
    """For all jobs."""

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
        due = pending.written_at + SPACING_S
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
