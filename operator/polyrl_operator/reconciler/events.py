"""Events on jobs: each decision recorded once, repeats counted up in place, and no flood.

An Event's name is made from its content, so that an operator that starts anew and repeats it counts it up as well.
Sending is apart from acting: an Event that cannot be stored delays nobody, and is dropped when too many wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from polyrl.cluster.actions import Object, RecordEvent
from polyrl.cluster.resources.owner import Owner
from polyrl.manifest.job import API_VERSION, KIND
from polyrl.manifest.spec import OPERATOR
from polyrl_operator.api.client import ApiError, Client, NotLeader
from polyrl_operator.api.kinds import EVENT

log = structlog.get_logger(__name__)

REMEMBERED: Final = 4096
"""Events whose repeats are counted; older ones are recorded anew."""

RECOUNT_S: Final = 10.0
"""Least time between two updates of one Event's count."""

SENDERS: Final = 4
"""Events sent at a time: enough for a thousand jobs that begin at once, and few beside what is done."""

WAITING: Final = 4096
"""Events that may wait to be sent; more means that the API server is away, and old news help nobody."""

NOTE_LENGTH: Final = 1024
"""Characters that the API takes."""


@dataclass
class _Series:
    sent_at: float
    count: int = 1


class EventAggregator:
    """Decides whether a sentence becomes an Event, a higher count of one, or nothing for now."""

    def __init__(self) -> None:
        self._series: OrderedDict[str, _Series] = OrderedDict()

    def count(self, name: str, now: float) -> int | None:
        """1: create it; more: it exists, raise its count to this; None: counted, but written later."""
        series = self._series.get(name)
        if series is None:
            self._series[name] = _Series(now)
            if len(self._series) > REMEMBERED:
                self._series.popitem(last=False)
            return 1
        self._series.move_to_end(name)
        series.count += 1
        if now - series.sent_at < RECOUNT_S:
            return None
        series.sent_at = now
        return series.count


class Events:
    """Run `send` as SENDERS tasks; `record` never waits."""

    def __init__(self, client: Client, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._instance, self._clock = client, instance, clock
        self._aggregator = EventAggregator()
        self._waiting: asyncio.Queue[tuple[Object, int]] = asyncio.Queue(WAITING)
        self.dropped = 0

    def record(self, job: Owner, event: RecordEvent) -> None:
        """Records it on the job, sooner or later."""
        content = "\n".join((job.uid, event.type, event.reason, event.message))
        name = f"{job.name}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        count = self._aggregator.count(name, self._clock())
        if count is None:
            return
        try:
            self._waiting.put_nowait((self._object(job, event, name), count))
        except asyncio.QueueFull:
            self.dropped += 1

    async def send(self) -> None:
        """Sends what waits, until cancelled."""
        while True:
            event, count = await self._waiting.get()
            try:
                await self._store(event, count)
            except (ApiError, NotLeader) as error:
                self.dropped += 1
                log.warning("event not stored", event_name=event["metadata"]["name"], error=str(error))

    async def _store(self, event: Object, count: int) -> None:
        if count == 1:
            try:
                await self._client.create(event)
                return
            except ApiError as error:
                if error.status != 409:
                    raise
                count = 2
        series = {"series": {"count": count, "lastObservedTime": event["eventTime"]}}
        try:
            await self._client.patch(EVENT, event["metadata"]["namespace"], event["metadata"]["name"], series)
        except ApiError as error:
            if error.status != 404:
                raise
            # API servers keep an Event for an hour: after that a repeat is news.
            await self._client.create(event)

    def _object(self, job: Owner, event: RecordEvent, name: str) -> Object:
        at = datetime.fromtimestamp(self._client.clock.now(), UTC)
        subject = {"apiVersion": API_VERSION, "kind": KIND, "namespace": job.namespace, "name": job.name}
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": name, "namespace": job.namespace},
            "eventTime": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": OPERATOR,
            "reportingInstance": self._instance,
            "action": event.reason,
            "reason": event.reason,
            "type": event.type,
            "note": event.message[:NOTE_LENGTH],
            "regarding": subject | {"uid": job.uid},
        }
