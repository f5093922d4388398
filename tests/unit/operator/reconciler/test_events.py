"""Events: repeats are counted, and what is remembered of them is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

from polyrl.cluster.actions import RecordEvent
from polyrl.cluster.reasons import EventReason
from polyrl.cluster.resources.owner import Owner
from polyrl.testing.fake_operator import SETTINGS
from polyrl_operator.api.client import ApiError, ClusterClock
from polyrl_operator.reconciler.events import RECOUNT_S, REMEMBERED, EventAggregator, Events

OWNER = Owner("j", "ns", "job-uid", job=None, settings=SETTINGS)  # type: ignore[arg-type]


def test_a_sentence_is_recorded_once_and_then_counted() -> None:
    aggregator = EventAggregator()
    assert aggregator.count("a", 0.0) == 1
    assert aggregator.count("a", 1.0) is None
    assert aggregator.count("b", 1.0) == 1
    assert aggregator.count("a", RECOUNT_S) == 3
    assert aggregator.count("a", RECOUNT_S + 1) is None
    assert aggregator.count("a", 1000.0) == 5, "the Event is still there, and its count never falls"


class Kept:
    """An API server that keeps Events until `forget`, with their counts."""

    clock = ClusterClock()

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def forget(self) -> None:
        self.counts.clear()

    async def create(self, event: dict[str, Any]) -> None:
        name = event["metadata"]["name"]
        if name in self.counts:
            raise ApiError(409, "AlreadyExists", "taken")
        self.counts[name] = 1

    async def patch(self, _: object, namespace: str, name: str, change: dict[str, Any]) -> None:
        if name not in self.counts:
            raise ApiError(404, "NotFound", "gone")
        self.counts[name] = change["series"]["count"]


async def test_counts_of_an_event_that_is_kept_only_grow_and_one_that_is_gone_is_made_anew() -> None:
    now, server = 0.0, Kept()
    events = Events(server, "one", clock=lambda: now)  # type: ignore[arg-type]
    sending = asyncio.create_task(events.send())
    seen = []
    for minute in range(0, 60, 4):
        now = 60.0 * minute
        if minute == 40:
            server.forget()
        events.record(OWNER, RecordEvent(EventReason.RESUMED, "again"))
        for _ in range(3):
            await asyncio.sleep(0)
        seen += server.counts.values()
    sending.cancel()
    assert seen == [*range(1, 11), 1, *range(12, 16)]
    assert events.dropped == 0


def test_what_is_remembered_of_events_is_bounded() -> None:
    aggregator = EventAggregator()
    for number in range(3 * REMEMBERED):
        assert aggregator.count(str(number), 0.0) == 1
    assert len(aggregator._series) == REMEMBERED
