"""Limits that others put on a namespace: the job says in a condition what was refused, and the operator lives on."""

from __future__ import annotations

from typing import Any

from polyrl_operator.api.kinds import JOB

LIMITED = 3
"""Pods: a trainer's or a manager's, and not all that the job asks for."""


async def condition(place: Any, kind: str) -> dict[str, Any]:
    status = (await place.job()).get("status") or {}
    return next((one for one in status.get("conditions", []) if one["type"] == kind), {})


async def has_reason(place: Any, kind: str, reason: str) -> dict[str, Any] | None:
    found = await condition(place, kind)
    return found if found.get("reason") == reason else None


async def limit_pods(place: Any, number: int) -> None:
    """A quota, with the status that its controller would write."""
    path = f"/api/v1/namespaces/{place.namespace}/resourcequotas"
    quota = {"metadata": {"name": "limit"}, "spec": {"hard": {"pods": str(number)}}}
    assert place.server.request("POST", path, quota)[0] == 201
    status = {"status": {"hard": {"pods": str(number)}, "used": {"pods": "0"}}}
    answer = place.server.request("PATCH", f"{path}/limit/status", status, content="application/merge-patch+json")
    assert answer[0] == 200, answer


async def test_a_used_up_quota_is_a_condition_and_what_fits_runs(place: Any, nodes: Any, run_operator: Any) -> None:
    await limit_pods(place, LIMITED)
    async with run_operator() as held:
        await place.submit(rollout={"replicas": 6})
        limited = await place.until(
            "the quota is reported", lambda: has_reason(place, "CapacityLimited", "QuotaExceeded")
        )
        assert "exceeded quota" in limited["message"]
        assert (await condition(place, "Accepted"))["status"] == "True", "the quota is no fault of the job"
        assert len(await place.pods()) == LIMITED
        assert not [task for task in held.tasks if task.done()]
        asked = sum(count for (access, _), count in held.one.requests.counts.items() if access.resource == "pods")
        assert asked < 100, "a refusal is not asked for again and again"
        assert held.one.metrics.registry.get_sample_value("polyrl_reconciles_total", {"outcome": "failed"}) is None


async def test_a_pod_that_a_limit_range_forbids_is_a_job_not_accepted(
    place: Any, nodes: Any, run_operator: Any
) -> None:
    limits = {"metadata": {"name": "small"}, "spec": {"limits": [{"type": "Container", "max": {"memory": "64Mi"}}]}}
    path = f"/api/v1/namespaces/{place.namespace}/limitranges"
    assert place.server.request("POST", path, limits)[0] == 201
    async with run_operator() as held:
        await place.submit()
        refused = await place.until(
            "the refusal is reported", lambda: has_reason(place, "Accepted", "InvalidPodTemplate")
        )
        assert refused["status"] == "False"
        assert "64Mi" in refused["message"], refused
        assert await place.pods() == []
        assert not [task for task in held.tasks if task.done()]
        assert place.server.request("DELETE", f"{path}/small")[0] == 200
        await place.client.patch(JOB, place.namespace, "job", {"spec": {"backoffLimit": 4}})
        await place.rollouts(2)
