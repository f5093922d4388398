"""Limits that others put on a namespace: the job says in a condition what was refused, and the operator lives on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import FIXED, JOB, POD, SECRET, TRAINER

POLICY_S = 3.0
"""Until an admission policy is in force; it takes about one."""
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


async def test_a_webhook_that_is_away_is_a_condition(place: Any, nodes: Any, run_operator: Any) -> None:
    """The job had no status, and who looked for the reason found that no operator handles it."""
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    hook = {
        "name": "pods.example.org",
        "clientConfig": {"url": "https://127.0.0.1:1/nobody-listens"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}},
        "rules": [rule],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    body = {"metadata": {"name": place.namespace}, "webhooks": [hook]}
    assert place.server.request("POST", path, body)[0] == 201
    try:
        await asyncio.sleep(POLICY_S)
        async with run_operator():
            await place.submit()
            checking = await place.until("it is said", lambda: has_reason(place, "Accepted", "Checking"))
            assert checking["status"] == "Unknown"
            assert 'failed calling webhook "pods.example.org"' in checking["message"]
            assert place.server.request("DELETE", f"{path}/{place.namespace}")[0] == 200
            await asyncio.sleep(POLICY_S)
            await place.client.patch(JOB, place.namespace, "job", {"spec": {"backoffLimit": 4}})
            await place.rollouts(2)
    finally:
        place.server.request("DELETE", f"{path}/{place.namespace}")


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


DENIED = "images of pods are not signed"


@asynccontextmanager
async def pods_kept_as_they_are(place: Any, operation: str) -> AsyncIterator[None]:
    """A policy that came while the job ran, as those of Kyverno and Gatekeeper do."""
    name = f"{place.namespace}-{operation.lower()}"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": [operation]}
    validation = {"expression": "false", "message": DENIED}
    spec = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]}, "validations": [validation]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": selector}}
    kinds = (("validatingadmissionpolicies", spec), ("validatingadmissionpolicybindings", binding))
    paths = [(f"/apis/admissionregistration.k8s.io/v1/{plural}", content) for plural, content in kinds]
    for path, content in paths:
        assert place.server.request("POST", path, {"metadata": {"name": name}, "spec": content})[0] == 201
    try:
        yield
    finally:
        for path, _ in paths:
            place.server.request("DELETE", f"{path}/{name}")


async def denied(place: Any, pod: str) -> bool:
    """Whether the policy is in force."""
    change = {"metadata": {"annotations": {"example.org/seen": str(time.monotonic())}}}
    try:
        await place.client.patch(POD, place.namespace, pod, change)
    except ApiError as error:
        return DENIED in str(error)
    return False


async def events(place: Any, reason: str) -> list[str]:
    path = f"/apis/events.k8s.io/v1/namespaces/{place.namespace}/events"
    return [one["note"] for one in place.server.request("GET", path)[1]["items"] if one["reason"] == reason]


async def test_a_job_is_suspended_although_its_pods_may_not_be_annotated(
    place: Any, nodes: Any, run_operator: Any
) -> None:
    async with run_operator():
        await place.submit()
        pod = (await place.rollouts(2))[0]["metadata"]["name"]
        async with pods_kept_as_they_are(place, "UPDATE"):
            await place.until("the policy is in force", lambda: denied(place, pod))
            await place.client.patch(JOB, place.namespace, "job", {"spec": {"suspend": True}})
            await place.until("the rollouts go", lambda: gone(place), deadline_s=30.0)
            notes = await place.until("it is an event", lambda: events(place, "Refused"))
            assert DENIED in notes[0]


async def gone(place: Any) -> bool:
    return not [pod for pod in await place.pods("rollout") if "deletionTimestamp" not in pod["metadata"]]


async def test_the_status_is_written_although_a_pod_may_not_be_deleted(
    place: Any, nodes: Any, run_operator: Any
) -> None:
    async with run_operator():
        await place.submit(scaling={"mode": "Manual"})
        await place.rollouts(2)
        async with pods_kept_as_they_are(place, "DELETE"):
            await asyncio.sleep(POLICY_S)
            await place.client.patch(JOB, place.namespace, "job", {"spec": {"rollout": {"replicas": 1}}})
            notes = await place.until("it is an event", lambda: events(place, "Refused"), deadline_s=30.0)
            assert DENIED in notes[0]
            await place.until("the status follows", lambda: observed(place, 2), deadline_s=30.0)


async def observed(place: Any, generation: int) -> bool:
    return bool((await place.job())["status"]["observedGeneration"] == generation)
