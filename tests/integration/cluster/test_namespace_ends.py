"""A namespace is deleted with jobs in it, one of them held by somebody's finalizer: the operator does not keep it."""

from __future__ import annotations

import asyncio
from typing import Any

from polyrl_operator.api.kinds import JOB, POD

JOBS = 6
WATCHED_S = 20.0
MOST_ASKED = 60
"""Per job in that time: a new try after 0.5 s, 1 s, 2 s and so on, each with what is missing of a job's children."""


async def jobs(place: Any) -> list[dict[str, Any]]:
    return [job async for found, _ in place.client.pages(JOB, place.namespace) for job in found]


async def none_left(place: Any) -> bool:
    return not await jobs(place)


async def test_a_namespace_ends_with_jobs_in_it(place: Any, nodes: Any, run_operator: Any) -> None:
    async with run_operator(poll_s=1.0) as held:
        for number in range(JOBS):
            await place.submit(f"job-{number}")
        for number in range(JOBS):
            await place.rollouts(2, f"job-{number}")
        hold = {"metadata": {"finalizers": ["example.org/hold"]}}
        await place.client.patch(JOB, place.namespace, "job-0", hold)
        path = f"/api/v1/namespaces/{place.namespace}"
        assert place.server.request("DELETE", path)[1]["status"]["phase"] == "Terminating"
        # Its controller begins with pods.
        for pod in await place.pods():
            await place.client.delete(POD, place.namespace, pod["metadata"]["name"], pod["metadata"]["uid"], 0)
        before = sum(count for (what, _), count in held.one.requests.counts.items() if what.verb != "list")
        await asyncio.sleep(WATCHED_S)
        counts = held.one.requests.counts
        asked = sum(count for (what, _), count in counts.items() if what.verb != "list") - before
        print(f"{asked / JOBS:.1f} requests per job in {WATCHED_S} s")
        assert await place.pods() == [], "none can be made"
        assert not [task for task in held.tasks if task.done()]
        assert asked < JOBS * MOST_ASKED
        for job in await jobs(place):
            await place.client.delete(JOB, place.namespace, job["metadata"]["name"], job["metadata"]["uid"])
        assert [job["metadata"]["name"] for job in await jobs(place)] == ["job-0"], "the finalizer's owner holds it"
        before = sum(count for (what, _), count in counts.items() if what.verb != "list")
        await asyncio.sleep(5)
        assert sum(count for (what, _), count in counts.items() if what.verb != "list") - before < 10
        await place.client.patch(JOB, place.namespace, "job-0", {"metadata": {"finalizers": None}})
        await place.until("all jobs are gone", lambda: none_left(place))
