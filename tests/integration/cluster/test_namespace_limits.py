"""Limits that others put on a namespace: the job says in a condition what was refused, and the operator lives on."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl_operator.api.kinds import FIXED, JOB, POD, SECRET, TRAINER

LIMITED = 3
"""Pods: a trainer's or a manager's, and not all that the job asks for."""


async def condition(place: Any, kind: str, job: str = "job") -> dict[str, Any]:
    status = (await place.job(job)).get("status") or {}
    return next((one for one in status.get("conditions", []) if one["type"] == kind), {})


async def has_reason(place: Any, kind: str, reason: str, job: str = "job") -> dict[str, Any] | None:
    found = await condition(place, kind, job)
    return found if found.get("reason") == reason else None


async def limit(place: Any, what: str, number: int) -> None:
    """A quota, with the status that its controller would write."""
    path = f"/api/v1/namespaces/{place.namespace}/resourcequotas"
    quota = {"metadata": {"name": "limit"}, "spec": {"hard": {what: str(number)}}}
    assert place.server.request("POST", path, quota)[0] == 201
    status = {"status": {"hard": {what: str(number)}, "used": {what: "0"}}}
    answer = place.server.request("PATCH", f"{path}/limit/status", status, content="application/merge-patch+json")
    assert answer[0] == 200, answer


async def test_a_used_up_quota_is_a_condition_and_what_fits_runs(place: Any, nodes: Any, run_operator: Any) -> None:
    await limit(place, "pods", LIMITED)
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


CLAIMS, NETWORK = "persistentvolumeclaims", "count/networkpolicies.networking.k8s.io"


@pytest.mark.parametrize("what", [CLAIMS, NETWORK])
async def test_no_pod_starts_without_what_a_quota_refuses(place: Any, nodes: Any, run_operator: Any, what: str) -> None:
    await limit(place, what, 1)
    async with run_operator() as held:
        await place.submit()
        refused = await place.until("it is said", lambda: has_reason(place, "TrainerReady", "QuotaExceeded"))
        assert f"used: {what}=1" in refused["message"]
        assert not {kind for kind, _ in await place.children()} & {"Pod", "Job"}, (
            "machines would wait, or be open to all"
        )
        path = f"/api/v1/namespaces/{place.namespace}/resourcequotas/limit"
        assert place.server.request("DELETE", path)[0] == 200
        await place.rollouts(2)
        assert held.one.metrics.registry.get_sample_value("polyrl_reconciles_total", {"outcome": "failed"}) is None


async def test_a_name_that_a_strangers_object_has_is_said(place: Any, nodes: Any, run_operator: Any) -> None:
    """Every namespace has an account `default`."""
    path, account = f"/api/v1/namespaces/{place.namespace}/serviceaccounts", {"metadata": {"name": "default"}}
    assert place.server.request("POST", path, account)[0] == 201
    async with run_operator():
        await place.submit("default")
        refused = await place.until("it is said", lambda: has_reason(place, "TrainerReady", "Refused", "default"))
        assert "ServiceAccount default is there and is not of this PolyRLJob" in refused["message"]
        assert await place.pods() == []


async def test_a_job_whose_namesake_left_its_children_behind_says_so(place: Any, nodes: Any, run_operator: Any) -> None:
    """As `kubectl delete --cascade=orphan` does; nothing that costs is made beside them."""
    async with run_operator():
        await place.submit()
        await place.rollouts(2)
    for kind in (*FIXED, SECRET, TRAINER, POD):
        async for items, _ in place.client.pages(kind, place.namespace, "polyrl.dev/job-name=job"):
            for item in items:
                free = {"metadata": {"ownerReferences": None}}
                await place.client.patch(kind, place.namespace, item["metadata"]["name"], free)
    await place.client.delete(JOB, place.namespace, "job", (await place.job())["metadata"]["uid"])
    left = await place.children()
    await place.submit()
    async with run_operator():
        refused = await place.until("it is said", lambda: has_reason(place, "TrainerReady", "Refused"))
        assert "is there and is not of this PolyRLJob; delete it" in refused["message"]
        assert not await place.children() - left
