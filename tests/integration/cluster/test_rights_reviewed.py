"""Who may do what, by the API server's own judgement: the operator's account exactly what is written here, in either
mode of the chart; a job's account, which no pod has a token of, nothing at all."""

from __future__ import annotations

import itertools
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts/polyrl"
AUTHORIZATION = "/apis/authorization.k8s.io/v1"
DEADLINE_S = 60.0
POLL_S = 0.05

IN_A_NAMESPACE = {
    "polyrl.dev/polyrljobs": "get list watch delete",
    "polyrl.dev/polyrljobs/status": "patch",
    "polyrl.dev/polyrljobs/finalizers": "update",
    "/pods": "get list watch create patch delete",
    "batch/jobs": "get list watch create patch delete",
    "/services": "get list create patch",
    "/serviceaccounts": "get list create",
    "/configmaps": "get list create",
    "/persistentvolumeclaims": "get list create",
    "/secrets": "get create patch",
    "policy/poddisruptionbudgets": "get list create patch delete",
    "networking.k8s.io/networkpolicies": "get list create patch delete",
    "events.k8s.io/events": "create patch",
}
"""Group and resource, and the verbs on them, wherever there are jobs."""
ANYWHERE = {
    "/nodes": "list watch",
    "karpenter.sh/nodeclaims": "list watch",
    # Who may read metrics.
    "authentication.k8s.io/tokenreviews": "create",
    "authorization.k8s.io/subjectaccessreviews": "create",
}
AT_HOME = {"coordination.k8s.io/leases": "create"}
OWN_LEASE = {"coordination.k8s.io/leases": "get update"}
"""Of this name alone: the chart's own."""

DENIED = (
    "list /secrets", "watch /secrets", "delete /secrets", "update /secrets", "patch /serviceaccounts",
    "create /pods/exec", "create /pods/attach", "create /pods/portforward", "get /pods/log", "create /pods/eviction",
    "update polyrl.dev/polyrljobs", "patch polyrl.dev/polyrljobs", "create polyrl.dev/polyrljobs",
    "patch /nodes", "update /nodes", "delete /nodes", "create /nodes/proxy", "delete karpenter.sh/nodeclaims",
    "create /serviceaccounts/token", "impersonate /users", "impersonate /serviceaccounts",
    "create rbac.authorization.k8s.io/roles", "bind rbac.authorization.k8s.io/clusterroles",
    "escalate rbac.authorization.k8s.io/roles", "create rbac.authorization.k8s.io/rolebindings",
    "create apps/deployments", "create apps/daemonsets", "delete /namespaces", "create /namespaces",
    "delete /persistentvolumeclaims", "delete /persistentvolumes", "delete batch/cronjobs",
    "patch apiextensions.k8s.io/customresourcedefinitions",
    "create admissionregistration.k8s.io/mutatingwebhookconfigurations",
)  # fmt: skip
"""What somebody who took the operator over would want."""

ABOUT_ONESELF = ("authorization.k8s.io/self", "authentication.k8s.io/self")
"""What everybody may ask."""

Rights = set[tuple[str, str]]
"""Verb, and group and resource."""


def rights(table: dict[str, str]) -> Rights:
    return {(verb, what) for what, verbs in table.items() for verb in verbs.split()}


def at_home(account: Account) -> Rights:
    """With its Lease, which is called as its account is by the chart."""
    return rights(AT_HOME) | {(verb, f"{what} {account.name}") for verb, what in rights(OWN_LEASE)}


@dataclass(frozen=True)
class Account:
    """A ServiceAccount of the bare API server, asked about and spoken for."""

    server: Any
    namespace: str
    name: str

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"

    def may(self, verb: str, what: str, where: str = "") -> bool:
        """By a SubjectAccessReview; `what` is group/resource[/subresource], `where` a namespace, or all."""
        group, resource, *part = what.split("/")
        asked = {"verb": verb, "group": group, "resource": resource, "subresource": "/".join(part), "namespace": where}
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{self.namespace}", "system:authenticated"]
        review = {"spec": {"user": self.user, "groups": groups, "resourceAttributes": asked}}
        status, answer = self.server.request("POST", f"{AUTHORIZATION}/subjectaccessreviews", review)
        assert status == 201, answer
        return bool(answer["status"]["allowed"])

    def all_rights(self, where: str) -> Rights:
        """Whatever rules reach it in a namespace, asked by itself with a token of its own."""
        review = {"spec": {"namespace": where}}
        path = f"{AUTHORIZATION}/selfsubjectrulesreviews"
        status, answer = self.server.request("POST", path, review, token=self._token())
        assert status == 201, answer
        assert not answer["status"]["incomplete"]
        found: Rights = set()
        for rule in answer["status"]["resourceRules"]:
            for verb, group, resource in itertools.product(rule["verbs"], rule["apiGroups"], rule["resources"]):
                found |= {
                    (verb, f"{group}/{resource}{name and ' '}{name}") for name in rule.get("resourceNames") or ("",)
                }
        return {one for one in found if not one[1].startswith(ABOUT_ONESELF)}

    def _token(self) -> str:
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{self.name}/token"
        status, answer = self.server.request("POST", path, {"spec": {"expirationSeconds": 600}})
        assert status == 201, answer
        return str(answer["status"]["token"])


@pytest.fixture
def namespaces(crd: Any) -> Callable[[], str]:
    def make() -> str:
        name = f"t-{uuid.uuid4().hex[:8]}"
        assert crd.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})[0] == 201
        return name

    return make


@pytest.fixture
def install(crd: Any, helm_program: str) -> Iterator[Callable[..., Account]]:
    """Gives the server what the chart renders of accounts and rights, as it is, and takes it back afterwards."""
    made: list[str] = []

    def chart(home: str, *values: str) -> Account:
        command = [helm_program, "template", f"r{home}", CHART, "-n", home, "--kube-version", "1.36.3"]
        command += ["--set=images.prefix=registry.example.org/"]
        command += [part for value in values for part in ("--set", value)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        objects = [one for one in yaml.safe_load_all(text) if one]
        wanted = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
        for one in (one for one in objects if one["kind"] in wanted):
            place = "" if one["kind"].startswith("Cluster") else f"/namespaces/{one['metadata'].get('namespace', home)}"
            root = "/api/v1" if one["apiVersion"] == "v1" else f"/apis/{one['apiVersion']}"
            path = f"{root}{place}/{one['kind'].lower()}s"
            status, answer = crd.request("POST", path, one)
            assert status == 201, answer
            made.append(f"{path}/{one['metadata']['name']}")
        (deployment,) = (one for one in objects if one["kind"] == "Deployment")
        return Account(crd, home, name=deployment["spec"]["template"]["spec"]["serviceAccountName"])

    yield chart
    for path in made:
        crd.request("DELETE", path)


def in_force(account: Account, granted: Rights, where: str) -> Rights:
    """All its rights there, once these are among them: the API server judges by its watch of what it stored."""
    until = time.monotonic() + DEADLINE_S
    while not granted <= (found := account.all_rights(where)) and time.monotonic() < until:
        time.sleep(POLL_S)
    return found


def differences(account: Account, granted: Rights, where: str) -> list[str]:
    """Rights that it lacks there, and denials that it lacks."""
    lacking = [f"may not {verb} {what}" for verb, what in sorted(granted) if not account.may(verb, what, where)]
    return lacking + [f"may {one}" for one in DENIED if account.may(*one.split(), where)]


def test_in_namespaced_mode_its_rights_end_at_the_namespaces(install: Any, namespaces: Any) -> None:
    home, theirs, other = namespaces(), namespaces(), namespaces()
    account = install(home, f"watch.namespaces={{{theirs}}}", "watch.nodes=false", "metrics.secure=false")
    assert in_force(account, rights(IN_A_NAMESPACE), theirs) == rights(IN_A_NAMESPACE)
    assert in_force(account, at_home(account), home) == at_home(account)
    assert account.all_rights(other) == set()
    assert differences(account, rights(IN_A_NAMESPACE), theirs) == []
    assert [one for one in rights(IN_A_NAMESPACE | ANYWHERE) if account.may(*one)] == [], "nothing in the whole cluster"


def test_in_the_whole_cluster_it_may_do_the_same_and_see_nodes(install: Any, namespaces: Any) -> None:
    home, theirs = namespaces(), namespaces()
    account = install(home)
    assert in_force(account, rights(IN_A_NAMESPACE | ANYWHERE), theirs) == rights(IN_A_NAMESPACE | ANYWHERE)
    everything = rights(IN_A_NAMESPACE | ANYWHERE) | at_home(account)
    assert in_force(account, everything, home) == everything
    assert differences(account, rights(IN_A_NAMESPACE | ANYWHERE), theirs) == []
    for place in (home, theirs):
        assert not account.may("update", "coordination.k8s.io/leases", place), "others' Leases"


async def test_a_jobs_own_account_may_do_nothing(place: Any, nodes: Any, run_operator: Any) -> None:
    async with run_operator():
        await place.submit()
        await place.rollouts(2)
    account = Account(place.server, place.namespace, name="job")
    assert account.all_rights(place.namespace) == set()
    assert account.all_rights("default") == set()
    table = rights(IN_A_NAMESPACE | ANYWHERE | AT_HOME) | rights(OWN_LEASE) | {tuple(one.split()) for one in DENIED}
    assert [one for one in sorted(table) if account.may(*one, place.namespace)] == []
    for pod in await place.pods():
        assert pod["spec"]["serviceAccountName"] == "job"
        assert pod["spec"]["automountServiceAccountToken"] is False, "and no pod has a token of it"
        assert not [one for one in pod["spec"]["volumes"] if "projected" in one]
