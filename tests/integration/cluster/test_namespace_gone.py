"""In namespaced mode a tenant who deletes his namespace takes the operator's Role in it along; nobody else suffers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from kubernetes.aio.client.api_client import ApiClient

from polyrl_operator import app
from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.connect import load_configuration
from polyrl_operator.api.kinds import JOB

DEADLINE_S = 30.0
RBAC = "/apis/rbac.authorization.k8s.io/v1"
RIGHTS = [
    {"apiGroups": [group], "resources": ["*"], "verbs": ["*"]}
    for group in (
        "polyrl.dev", "", "batch", "policy", "networking.k8s.io", "events.k8s.io", "coordination.k8s.io",
    )
]  # fmt: skip


@pytest.fixture
def other(place: Any) -> str:
    """Another tenant's namespace; the operator's user has rights in both."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    assert place.server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})[0] == 201
    for namespace in (place.namespace, name):
        role = {"metadata": {"name": "operator"}, "rules": RIGHTS}
        assert place.server.request("POST", f"{RBAC}/namespaces/{namespace}/roles", role)[0] == 201
        bind(place.server, namespace)
    return name


def bind(server: Any, namespace: str) -> None:
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"}
    body = {"metadata": {"name": "operator"}, "roleRef": reference, "subjects": [{"kind": "User", "name": "operator"}]}
    assert server.request("POST", f"{RBAC}/namespaces/{namespace}/rolebindings", body)[0] == 201


def unbind(server: Any, namespace: str) -> None:
    assert server.request("DELETE", f"{RBAC}/namespaces/{namespace}/rolebindings/operator")[0] == 200


async def test_a_namespace_that_is_gone_keeps_no_other_waiting(
    place: Any, other: str, nodes: Any, start_operator: Any
) -> None:
    unbind(place.server, other)
    async with start_operator(f"--namespace={other}", kubeconfig=place.server.kubeconfig("operator")) as operator:
        await place.submit()
        await place.rollouts(2)
        assert (await operator.get("/readyz"))[0] == (await operator.get("/healthz"))[0] == 200
        assert [line["namespaces"] for line in operator.lines if "namespaces" in line] == [[other]]


async def test_the_operator_ends_for_a_namespace_that_goes_or_comes_back(
    place: Any, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "CLOSED_S", 0.05)
    both = (place.namespace, other)
    async with ApiClient(await load_configuration(place.server.kubeconfig("operator"))) as api:
        client = Client(api)
        assert await app.closed_namespaces(client, both) == set()
        looking = asyncio.create_task(app.until_others(client, both, set()))
        done, _ = await asyncio.wait({looking}, timeout=0.5)
        assert not done, "nothing has changed"
        unbind(place.server, other)
        await asyncio.wait_for(looking, DEADLINE_S)
        assert await app.closed_namespaces(client, both) == {other}
        bind(place.server, other)
        await asyncio.wait_for(app.until_others(client, both, {other}), DEADLINE_S)
        for namespace in both:
            unbind(place.server, namespace)
        await asyncio.wait_for(until_closed(client, both), DEADLINE_S)
        assert await app.closed_namespaces(client, both) == set(), "then it is the operator's right that is at fault"


async def until_closed(client: Client, namespaces: Sequence[str]) -> None:
    """The server hears a moment later of a right that is gone."""
    for namespace in namespaces:
        while await may_read(client, namespace):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)


async def may_read(client: Client, namespace: str) -> bool:
    try:
        await client.get(JOB, namespace, "any")
    except ApiError as error:
        return error.status != app.FORBIDDEN
    return True
