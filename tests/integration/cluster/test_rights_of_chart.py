"""The chart's rights are those that the operator uses: it lives through all there is with no more than them, and what
it never used is named here with its reason."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl_operator.cluster.kinds import JOB, POD

CHART = Path(__file__).parents[3] / "charts/polyrl"
USER = "operator"
RBAC = "/apis/rbac.authorization.k8s.io/v1"

WITHOUT_A_REQUEST = {
    # A creation that met its own object reads it: only after a crash between request and answer.
    *(("get", kind) for kind in ("pods", "jobs", "services", "configmaps", "serviceaccounts", "networkpolicies")),
    *(("get", kind) for kind in ("persistentvolumeclaims", "poddisruptionbudgets")),
    # Asked of the API server by itself, where OwnerReferencesPermissionEnforcement is on.
    ("update", "polyrljobs/finalizers"),
    # Where Karpenter is.
    ("get", "nodeclaims"), ("list", "nodeclaims"), ("watch", "nodeclaims"), ("get", "nodes"),
}  # fmt: skip


@pytest.fixture
def granted(place: Any) -> set[tuple[str, str]]:
    """What the chart grants in namespaced mode, given to USER on this server: verb and resource."""
    helm = shutil.which("helm", path=f"{os.environ['PATH']}:{os.environ.get('KUBEBUILDER_ASSETS', '')}")
    if helm is None:
        pytest.skip("helm is neither on the PATH nor in KUBEBUILDER_ASSETS: the chart cannot be rendered")
    command = [helm, "template", "polyrl", CHART, "-n", place.namespace, "--kube-version", "1.36.3"]
    command += ["--set", f"watch.namespaces={{{place.namespace}}}", "--show-only", "templates/rbac.yaml"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    rights = set()
    for one in (one for one in yaml.safe_load_all(text) if one):
        if "rules" in one:
            rights |= {(verb, what) for rule in one["rules"] for verb in rule["verbs"] for what in rule["resources"]}
        else:
            one["subjects"] = [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}]
        scope = "" if one["kind"].startswith("Cluster") else f"/namespaces/{one['metadata']['namespace']}"
        status, answer = place.server.request("POST", f"{RBAC}{scope}/{one['kind'].lower()}s", one)
        assert status == 201, answer
    return rights


async def live_through_all_there_is(place: Any, nodes: Any) -> None:
    await place.submit(networkPolicy={"mode": "Isolated"}, ttlSecondsAfterFinished=1)
    pods = await place.rollouts(2)
    # One is taken away, one fleet is too large, one job pauses.
    await place.client.delete(POD, place.namespace, pods[0]["metadata"]["name"], pods[0]["metadata"]["uid"])
    await place.until("the lost one is replaced", lambda: numbered(place, 3))
    for change in ({"suspend": True}, {"suspend": False}):
        await place.client.patch(JOB, place.namespace, "job", {"spec": change})
        await place.state("Suspended" if change["suspend"] else "Pending", "Running", "Degraded")
    await place.rollouts(2)
    await nodes.finish_trainer(place.namespace, "job")
    await place.until("the job is deleted at its time", lambda: gone(place))


async def numbered(place: Any, least: int) -> bool:
    names = [pod["metadata"]["name"] for pod in await place.pods("rollout")]
    return any(int(name.rpartition("-")[2]) >= least for name in names)


async def gone(place: Any) -> bool:
    return await place.client.get(JOB, place.namespace, "job") is None


async def test_it_lives_with_the_charts_rights_and_uses_them(
    place: Any, nodes: Any, start_operator: Any, granted: set[tuple[str, str]]
) -> None:
    async with start_operator("--nodes", kubeconfig=place.server.kubeconfig(USER)) as operator:
        await live_through_all_there_is(place, nodes)
        await asyncio.sleep(0)
        _, text = await operator.get("/metrics")
    refused = [line for line in operator.lines if "forbidden" in json.dumps(line).lower()]
    assert not refused
    pattern = r'polyrl_api_requests_total\{code="2xx",resource="([^"]+)",verb="(\w+)"\}'
    used = {(verb, resource) for resource, verb in re.findall(pattern, text) if resource != "discovery"}
    assert used <= granted
    assert granted - used - WITHOUT_A_REQUEST == set(), "granted, and never used"
    assert not used & WITHOUT_A_REQUEST, "used after all"
