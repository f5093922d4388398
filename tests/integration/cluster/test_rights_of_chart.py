"""The chart's rights are those that the operator uses: it lives through all there is with no more than them, under the
chart's policy on its requests, and what it never used is named here with its reason."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl_operator.api.kinds import JOB, POD

CHART = Path(__file__).parents[3] / "charts/polyrl"
SHOWN = ("serviceaccount", "rbac", "operator-policy")
ROOTS = {"v1": "/api/v1"}
"""All other groups are where their names say."""
PLURALS = {"ValidatingAdmissionPolicy": "validatingadmissionpolicies"}
"""Where an s is not enough."""

SELDOM_ASKED = {
    # A pod that was made by a request whose answer was lost is read.
    ("get", "pods"),
    # A status that somebody else wrote meanwhile is read; an event that is said again is counted up.
    ("get", "polyrljobs"), ("patch", "events"),
    # A manager's certificate is renewed every week.
    ("patch", "secrets"),
    # Asked of the API server by itself, where OwnerReferencesPermissionEnforcement is on.
    ("update", "polyrljobs/finalizers"),
    # Where Karpenter is.
    ("list", "nodeclaims"), ("watch", "nodeclaims"),
}  # fmt: skip
"""Granted, and seldom or never asked for in a life without crashes on a cluster without Karpenter."""

MENDED = (("services", "job-manager", "v1"), ("poddisruptionbudgets", "job-trainer", "policy/v1"),
          ("networkpolicies", "job-manager", "networking.k8s.io/v1"))  # fmt: skip
FORGOTTEN = (*MENDED, ("serviceaccounts", "job", "v1"), ("persistentvolumeclaims", "job-trainer", "v1"),
             ("jobs", "job-trainer", "batch/v1"))  # fmt: skip
JOB_LABEL = "polyrl.dev/job-name"
"""The label by which the operator finds what it made."""


@pytest.fixture
def granted(place: Any, helm_program: str) -> Iterator[set[tuple[str, str]]]:
    """What the chart grants in namespaced mode, given to its account here, with its policy: verb and resource."""
    command = [helm_program, "template", "polyrl", CHART, "-n", place.namespace, "--kube-version", "1.36.3"]
    command += ["--set=images.prefix=registry.example.org/", "--set", f"watch.namespaces={{{place.namespace}}}"]
    command += [part for name in SHOWN for part in ("--show-only", f"templates/{name}.yaml")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    objects, rights, made = [one for one in yaml.safe_load_all(text) if one], set(), []
    for one in objects:
        for rule in one.get("rules", []):
            rights |= {(verb, what) for verb in rule["verbs"] for what in rule["resources"]}
        scope = f"/namespaces/{one['metadata']['namespace']}" if "namespace" in one["metadata"] else ""
        root = ROOTS.get(one["apiVersion"], f"/apis/{one['apiVersion']}")
        path = f"{root}{scope}/{PLURALS.get(one['kind'], one['kind'].lower() + 's')}"
        status, answer = place.server.request("POST", path, one)
        assert status == 201, answer
        made += [] if scope else [f"{path}/{one['metadata']['name']}"]
    yield rights
    for path in made:
        place.server.request("DELETE", path)


@pytest.fixture
def kubeconfig(place: Any, granted: set[tuple[str, str]], tmp_path: Path) -> Path:
    """Of the chart's account."""
    assert granted
    path = f"/api/v1/namespaces/{place.namespace}/serviceaccounts/polyrl-operator/token"
    status, answer = place.server.request("POST", path, {"spec": {"expirationSeconds": 3600}})
    assert status == 201, answer
    config = json.loads(place.server.kubeconfig().read_text())
    config["users"][0]["user"] = {"token": answer["status"]["token"]}
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    return file


async def first_half(place: Any) -> None:
    """A job begins, loses a rollout, pauses, is changed meanwhile and goes on."""
    await place.submit(ttlSecondsAfterFinished=1)
    pods = await place.rollouts(2)
    await place.client.delete(POD, place.namespace, pods[0]["metadata"]["name"], pods[0]["metadata"]["uid"])
    await place.until("the lost one is replaced", lambda: numbered(place, 3))
    await change(place, {"suspend": True})
    await place.state("Suspended")
    await change(place, {"suspend": False, "backoffLimit": 5, "recipe": {"algorithm": {"steps": 5}}})
    await place.state("Pending", "Running", "Degraded")
    await place.rollouts(2)


async def second_half(place: Any, nodes: Any) -> None:
    """A new operator puts right what somebody changed; the job wants less, ends, and goes."""
    await place.until("what was changed is as it was", lambda: right(place))
    await change(place, {"networkPolicy": {"mode": "None"}, "podDisruptionBudget": {"trainer": "None"}})
    await place.until("what is not asked for is gone", lambda: optional_gone(place))
    await nodes.finish_trainer(place.namespace, "job")
    await place.until("the job is deleted at its time", lambda: gone(place))


def spoil(place: Any) -> None:
    """Somebody edits children of the job."""
    for child in MENDED:
        edit(place, child, {"annotations": {"polyrl.dev/content-hash": "other"}})


def relabel(place: Any, job: str | None) -> None:
    """None: the operator sees them no longer, as if the answer to their creation had been lost; so it makes them again,
    meets what is there, and reads whose it is."""
    for child in (*FORGOTTEN, configuration(place)):
        edit(place, child, {"labels": {JOB_LABEL: job}})


def edit(place: Any, child: tuple[str, str, str], metadata: dict[str, Any]) -> None:
    change = {"metadata": metadata}
    answer = place.server.request("PATCH", place_of(place, *child), change, content="application/merge-patch+json")
    assert answer[0] == 200, answer


def configuration(place: Any) -> tuple[str, str, str]:
    """The newest ConfigMap, whose name ends in a hash."""
    stored = place.server.request("GET", f"/api/v1/namespaces/{place.namespace}/configmaps")[1]["items"]
    own = [one["metadata"] for one in stored if one["metadata"]["name"].startswith("job-cfg-")]
    return "configmaps", max(own, key=lambda one: int(one["resourceVersion"]))["name"], "v1"


async def change(place: Any, spec: dict[str, Any]) -> None:
    await place.client.patch(JOB, place.namespace, "job", {"spec": spec})


async def right(place: Any) -> bool:
    found = [place.server.request("GET", place_of(place, *child))[1] for child in MENDED]
    return all(one["metadata"]["annotations"]["polyrl.dev/content-hash"] != "other" for one in found)


async def optional_gone(place: Any) -> bool:
    return all(place.server.request("GET", place_of(place, *child))[0] == 404 for child in MENDED[1:])


def place_of(place: Any, kind: str, name: str, version: str) -> str:
    root = "/api" if version == "v1" else "/apis"
    return f"{root}/{version}/namespaces/{place.namespace}/{kind}/{name}"


async def numbered(place: Any, least: int) -> bool:
    names = [pod["metadata"]["name"] for pod in await place.pods("rollout")]
    return any(int(name.rpartition("-")[2]) >= least for name in names)


async def gone(place: Any) -> bool:
    return await place.client.get(JOB, place.namespace, "job") is None


async def asked(operator: Any) -> set[tuple[str, str]]:
    """Verb and resource of every request that was answered with what was asked for."""
    _, text = await operator.get("/metrics")
    pattern = r'polyrl_api_requests_total\{code="2xx",resource="([^"]+)",verb="(\w+)"\}'
    return {(verb, resource) for resource, verb in re.findall(pattern, text) if resource != "discovery"}


async def has_asked(operator: Any, right: tuple[str, str]) -> bool:
    return right in await asked(operator)


def token_of(kubeconfig: Path) -> str:
    return str(json.loads(kubeconfig.read_text())["users"][0]["user"]["token"])


async def held(place: Any, token: str) -> bool:
    """Whether the policy is at work: what no job owns is refused."""
    path = f"/api/v1/namespaces/{place.namespace}/configmaps?dryRun=All"
    return bool(place.server.request("POST", path, {"metadata": {"name": "of-nobody"}}, token=token)[0] == 422)


async def test_it_lives_with_the_charts_rights_and_uses_them(
    place: Any, nodes: Any, start_operator: Any, granted: set[tuple[str, str]], kubeconfig: Path
) -> None:
    await place.until("the policy is at work", lambda: held(place, token_of(kubeconfig)))
    async with start_operator("--nodes", kubeconfig=kubeconfig) as first:
        await first_half(place)
        used = await asked(first)
        assert await first.end() == 0
    spoil(place)
    relabel(place, None)
    async with start_operator("--nodes", kubeconfig=kubeconfig, name="two") as second:
        for kind in ("configmaps", *(one[0] for one in FORGOTTEN)):
            await place.until(f"a {kind} is read", lambda kind=kind: has_asked(second, ("get", kind)))
        relabel(place, "job")
        await second_half(place, nodes)
        # The job may be gone before the operator has read that it is.
        await place.until("its deletion is counted", lambda: has_asked(second, ("delete", JOB.plural)))
        used |= await asked(second)
    logged = [json.dumps(line) for line in (*first.lines, *second.lines)]
    assert not [line for line in logged if "forbidden" in line.lower()]
    assert used <= granted
    assert sorted(granted - used - SELDOM_ASKED) == [], "granted, and never used"
