"""Voluntary evictions, as `kubectl drain` and autoscalers ask for them: a rollout goes at once, the trainer stays."""

from __future__ import annotations

from typing import Any


async def evicted(place: Any, pod: str) -> tuple[int, str]:
    """The API server's status and words."""
    path = f"/api/v1/namespaces/{place.namespace}/pods/{pod}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    status, answer = place.server.request("POST", path, body)
    return status, answer.get("message", "")


async def test_the_budget_spares_the_trainer_and_nobody_else(place: Any, nodes: Any, run_operator: Any) -> None:
    async with run_operator():
        await place.submit()
        rollout, _ = await place.rollouts(2)
        # A pod that does not run yet is evicted whatever its budget says.
        (trainer,) = await place.until("the trainer runs", lambda: running(place, "trainer"))
        budget = f"/apis/policy/v1/namespaces/{place.namespace}/poddisruptionbudgets/job-trainer"
        # What the disruption controller would write of one pod, of which one must stay.
        counted = {"observedGeneration": 1, "expectedPods": 1, "currentHealthy": 1, "desiredHealthy": 1}
        change = {"status": counted | {"disruptionsAllowed": 0}}
        answer = place.server.request("PATCH", f"{budget}/status", change, content="application/merge-patch+json")
        assert answer[0] == 200, answer
        status, message = await evicted(place, trainer["metadata"]["name"])
        assert (status, "disruption budget" in message) == (429, True), message
        assert (await evicted(place, rollout["metadata"]["name"]))[0] == 201
        await place.until("another takes its place", lambda: replaced(place, rollout["metadata"]["uid"]))
        assert [pod["metadata"]["uid"] for pod in await place.pods("trainer")] == [trainer["metadata"]["uid"]]


async def running(place: Any, role: str) -> list[dict[str, Any]]:
    return [pod for pod in await place.pods(role) if pod["status"].get("phase") == "Running"]


async def replaced(place: Any, lost: str) -> bool:
    uids = [pod["metadata"]["uid"] for pod in await place.pods("rollout")]
    return len(uids) == 2 and lost not in uids
