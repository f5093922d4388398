"""Events on jobs: each decision told once, repeats counted up in place, and no flood.

An Event's name is made from what it says, so that an operator that starts anew and says it again counts it up as well.
Sending is apart from acting: an Event that cannot be stored delays nobody, and is dropped when too many wait.
Refuses to hold: what is worth saying (see `polyrl.cluster`). Read next: `worker`.
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
from polyrl.manifest.job import API_VERSION, KIND
from polyrl.manifest.spec import OPERATOR
from polyrl_operator.api.client import ApiError, Client, NotLeader
from polyrl_operator.api.kinds import EVENT

log = structlog.get_logger(__name__)

REMEMBERED: Final = 4096
"""Events whose repeats are counted; older ones are told anew."""

WINDOW_S: Final = 360.0
"""After which the same sentence is news again."""

RECOUNT_S: Final = 10.0
"""Least time between two updates of one Event's count."""

SENDERS: Final = 4
"""Events sent at a time: enough for a thousand jobs that begin at once, and few beside what is done."""

WAITING: Final = 4096
"""Events that may wait to be sent; more means that the API server is away, and old news help nobody."""

NOTE_LENGTH: Final = 1024
"""Characters that the API takes."""


@dataclass(frozen=True)
class Subject:
    """The job that an Event is about."""

    namespace: str
    name: str
    uid: str


@dataclass
class _Told:
    first_at: float
    sent_at: float
    count: int = 1


class Aggregator:
    """Decides whether a sentence becomes an Event, a higher count of one, or nothing for now."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, _Told] = OrderedDict()

    def count(self, name: str, now: float) -> int | None:
        """1: tell it; more: it was told, raise its count to this; None: counted, but written later."""
        told = self._told.get(name)
        if told is None or now - told.first_at > WINDOW_S:
            self._told[name] = _Told(now, now)
            self._told.move_to_end(name)
            if len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
            return 1
        told.count += 1
        if now - told.sent_at < RECOUNT_S:
            return None
        told.sent_at = now
        return told.count


class Events:
    """Run `send` as SENDERS tasks; `say` never waits."""

    def __init__(self, client: Client, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._instance, self._clock = client, instance, clock
        self._aggregator = Aggregator()
        self._waiting: asyncio.Queue[tuple[Object, int]] = asyncio.Queue(WAITING)
        self.dropped = 0

    def say(self, subject: Subject, say: RecordEvent) -> None:
        """Tells it, sooner or later."""
        name = _name(subject, say)
        count = self._aggregator.count(name, self._clock())
        if count is None:
            return
        try:
            self._waiting.put_nowait((self._event(subject, say, name), count))
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
        metadata = event["metadata"]
        await self._client.patch(EVENT, metadata["namespace"], metadata["name"], series)

    def _event(self, subject: Subject, say: RecordEvent, name: str) -> Object:
        at = datetime.fromtimestamp(self._client.clock.now(), UTC)
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": name, "namespace": subject.namespace},
            "eventTime": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": OPERATOR,
            "reportingInstance": self._instance,
            "action": say.reason,
            "reason": say.reason,
            "type": say.type,
            "note": say.message[:NOTE_LENGTH],
            "regarding": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
            },
        }


def _name(subject: Subject, say: RecordEvent) -> str:
    said = "\n".join((subject.uid, say.type, say.reason, say.message))
    return f"{subject.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
