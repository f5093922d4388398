"""An operator on a machine whose clock is minutes wrong: it reckons by the API server's time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from polyrl.cluster.timestamps import unix
from polyrl_operator.api import client
from polyrl_operator.api.kinds import JOB

WRONG_S = 300.0
TTL_S = 8
NEAR_S = 2.5
"""A cut second, and a start that is stamped to the second."""


@pytest.mark.parametrize("wrong_s", [-WRONG_S, WRONG_S], ids=["behind", "ahead"])
async def test_its_times_are_the_clusters(
    place: Any, nodes: Any, run_operator: Any, monkeypatch: pytest.MonkeyPatch, wrong_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(client.ClusterClock.__init__, "__defaults__", (lambda: real() + wrong_s, time.monotonic))
    async with run_operator() as held:
        assert abs(held.one.clock.now() - real()) > WRONG_S / 2, "it begins with the machine's"
        stored = await place.submit(ttlSecondsAfterFinished=TTL_S)
        await place.rollouts(2)
        created = unix(stored["metadata"]["creationTimestamp"])
        status = (await place.state("Running", "Degraded", "Pending"))["status"]
        assert created is not None
        assert created - NEAR_S <= unix(status["startTime"]) <= real() + NEAR_S
        timestamps = [unix(one["lastTransitionTime"]) for one in status["conditions"]]
        assert all(created - NEAR_S <= timestamp <= real() + NEAR_S for timestamp in timestamps)
        path = f"/apis/events.k8s.io/v1/namespaces/{place.namespace}/events"
        recorded = await place.until("events are recorded", lambda: items(place, path))
        assert all(created - NEAR_S <= unix(one["eventTime"]) <= real() + NEAR_S for one in recorded)
        ended = time.monotonic()
        await nodes.finish_trainer(place.namespace, "job")
        await place.until("the job goes, not minutes late", lambda: gone(place))
        assert time.monotonic() - ended >= TTL_S - NEAR_S, "nor early"


async def items(place: Any, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = place.server.request("GET", path)[1]["items"]
    return found


async def gone(place: Any) -> bool:
    return await place.client.get(JOB, place.namespace, "job") is None
