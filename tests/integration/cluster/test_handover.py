"""Replicas take the lead from each other and back: what one did is neither undone nor counted again by the other."""

from __future__ import annotations

import asyncio
from typing import Any

from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import JOB, POD
from polyrl_operator.leader import Terms

TERMS = Terms(duration_s=6.0, renew_s=4.0, retry_s=0.2)
"""Short, for a test waits until a Lease runs out, and long enough for a core that is late."""


class Unreachable:
    """Plays the client of a replica whose network is gone."""

    async def get(self, *_: object) -> None:
        raise ApiError(0, "Unreachable", "the API server does not answer")

    update = create = get


async def leads(held: Any) -> bool:
    return bool(held.one.leader.leads() and held.one.resync.ready)


async def counted(place: Any, preemptions: int) -> bool:
    status = (await place.job()).get("status") or {}
    return bool(status.get("rollout", {}).get("preemptions") == preemptions)


async def stored(place: Any, created: int) -> dict[str, Any] | None:
    found: dict[str, Any] = (await place.job())["status"]["rollout"]
    return found if found["created"] == created else None


async def change(place: Any, replicas: int) -> list[dict[str, Any]]:
    await place.client.patch(JOB, place.namespace, "job", {"spec": {"rollout": {"replicas": replicas}}})
    found: list[dict[str, Any]] = await place.rollouts(replicas)
    return found


async def test_who_leads_again_counts_nothing_twice_and_undoes_nothing(
    place: Any, nodes: Any, run_operator: Any
) -> None:
    async with run_operator(identity="first", terms=TERMS) as first:
        await place.submit(scaling={"mode": "Manual"}, rollout={"replicas": 4})
        await place.rollouts(4)
        # Until its last reconcile has seen all of them run.
        await asyncio.sleep(2)
        network, first.one.leader._client = first.one.leader._client, Unreachable()
        async with run_operator(identity="second", terms=TERMS) as second:
            await place.until("the standby leads", lambda: leads(second))
            pod = (await change(place, 2))[0]["metadata"]
            await place.client.delete(POD, place.namespace, pod["name"], pod["uid"], 0)
            await place.until("one loss is counted", lambda: counted(place, 1))
            await place.rollouts(2)
            shown = first.one.metrics.registry.get_sample_value
            assert not shown("polyrl_jobs", {"state": "Pending"}), "the other one shows it"
        first.one.leader._client = network
        await place.until("the first leads again", lambda: leads(first))
        pods = await change(place, 3)
        assert max(int(pod["metadata"]["name"].rpartition("-")[2]) for pod in pods) == 6, "numbers only grow"
        status = await place.until("the last one is stored", lambda: stored(place, 6))
        assert status["preemptions"] == 1, "three are gone, of which two were released"
