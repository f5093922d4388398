"""The chart's policy on the operator's own requests, on a real API server: whatever a stored job says, and whoever has
taken the operator over, children of jobs are all that is written, and their pods are harmless.

The operator here may do everything by its rights, so that what is refused is refused by the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.cluster.resources.fixed import fixed_children
from polyrl.cluster.resources.owner import Owner
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Pool
from polyrl.worker import Role
from tests.integration.admission.test_children_admitted import PATHS, SETTINGS, TEMPLATE, manifest

HOME, ACCOUNT = "polyrl-system", "polyrl-operator"
UNCHOSEN, CHOSEN = "policy-unchosen", "policy-chosen"
"""Namespaces of jobs: without a level of Pod Security, and with `privileged`."""
RBAC = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
ALL_PATHS = PATHS | {"Secret": "/api/v1/namespaces/{}/secrets"}
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*/job.yaml"))
Object = dict[str, Any]
Damage = Callable[[Object], object]


def owner_in(namespace: str) -> Owner:
    job = PolyRLJob.model_validate(manifest("None"))
    return Owner("job", namespace, "6b8c1f0e-0000-4000-8000-000000000000", job=job, settings=SETTINGS)


def children(namespace: str) -> list[Object]:
    owner = owner_in(namespace)
    return [*fixed_children(owner), secret(owner), *pods_of(owner), trainer_job(owner)]


def pods_of(owner: Owner) -> list[Object]:
    return [manager_pod(owner, 1), rollout_pod(owner, 1, Pool.SPOT)]


def secret(owner: Owner) -> Object:
    return owner.object("v1", "Secret", "job-keys", type="Opaque", stringData={"a": "b"})


def rollout(namespace: str) -> Object:
    return rollout_pod(owner_in(namespace), 1, Pool.SPOT)


def spec(**fields: Any) -> Damage:
    return lambda pod: pod["spec"].update(fields)


def main(**fields: Any) -> Damage:
    return lambda pod: pod["spec"]["containers"][0].update(fields)


def security(**fields: Any) -> Damage:
    return lambda pod: pod["spec"]["containers"][0]["securityContext"].update(fields)


def without(*fields: str) -> Damage:
    """Neither the pod nor its containers say so."""

    def strip(pod: Object) -> None:
        for part in (pod["spec"], *pod["spec"]["containers"], *pod["spec"].get("initContainers", [])):
            for field in fields:
                part.get("securityContext", {}).pop(field, None)

    return strip


def volume(**source: Any) -> Damage:
    return lambda pod: pod["spec"]["volumes"].append({"name": "extra", **source})


def token(**fields: Any) -> Damage:
    return volume(projected={"sources": [{"serviceAccountToken": {"path": "token", **fields}}]})


def projected(**source: Any) -> Damage:
    """Behind a source that is allowed."""
    audience = {"serviceAccountToken": {"path": "token", "audience": "sts.amazonaws.com"}}
    return volume(projected={"sources": [audience, source]})


def bare(pod: Object) -> None:
    """Neither the pod nor its containers have a securityContext at all."""
    for part in (pod["spec"], *pod["spec"]["containers"]):
        part.pop("securityContext", None)


HOST, LOOSE, VOLUMES = "the host's network", "what Pod Security calls restricted", "calls not restricted"
PLAIN = {"name": "plain", "image": "a:1"}
"""A container that says nothing of its rights."""
CERTIFICATE = {
    "signerName": "kubernetes.io/kube-apiserver-client-pod",
    "keyType": "ED25519",
    "credentialBundlePath": "c",
}
NOT_CHOSEN: list[Any] = [
    pytest.param(spec(hostNetwork=True), HOST, id="host-network"),
    pytest.param(spec(hostPID=True), HOST, id="host-processes"),
    pytest.param(spec(nodeName="control-plane"), HOST, id="node-name"),
    pytest.param(main(ports=[{"containerPort": 80, "hostPort": 80}]), HOST, id="host-port"),
    pytest.param(main(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 80}}), HOST, id="probe-elsewhere"),
    pytest.param(security(allowPrivilegeEscalation=True), LOOSE, id="escalation"),
    pytest.param(security(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}), LOOSE, id="capability"),
    pytest.param(security(runAsUser=0), LOOSE, id="root"),
    pytest.param(without("runAsNonRoot"), LOOSE, id="maybe-root"),
    pytest.param(without("seccompProfile"), LOOSE, id="no-seccomp"),
    pytest.param(without("allowPrivilegeEscalation"), LOOSE, id="escalation-by-default"),
    pytest.param(without("capabilities"), LOOSE, id="capabilities-by-default"),
    pytest.param(bare, LOOSE, id="no-security-context"),
    pytest.param(lambda pod: pod["spec"]["containers"].append(PLAIN), LOOSE, id="plain-sidecar"),
    pytest.param(spec(initContainers=[PLAIN]), LOOSE, id="plain-init-container"),
    pytest.param(volume(hostPath={"path": "/"}), VOLUMES, id="host-path"),
    pytest.param(volume(nfs={"server": "10.0.0.1", "path": "/"}), VOLUMES, id="nfs"),
]
"""Refused where the namespace has not chosen a level of Pod Security, and left to it where it has."""
TOKENS, PRIORITY = "a token for the API server", "a priority of the system's own"
ANYWHERE: list[Any] = [
    pytest.param(spec(automountServiceAccountToken=True), TOKENS, id="token"),
    pytest.param(lambda pod: pod["spec"].pop("automountServiceAccountToken"), TOKENS, id="token-by-default"),
    pytest.param(token(), TOKENS, id="projected-token"),
    pytest.param(token(audience="https://kubernetes.default.svc"), TOKENS, id="projected-token-by-its-audience"),
    pytest.param(projected(serviceAccountToken={"path": "second"}), TOKENS, id="token-behind-an-allowed-one"),
    pytest.param(projected(podCertificate=CERTIFICATE), TOKENS, id="certificate"),
    pytest.param(spec(priorityClassName="system-node-critical"), PRIORITY, id="system-priority"),
]
"""Refused wherever it is."""


@pytest.fixture(scope="module")
def guarded(server: Any, guarded_by: Any) -> Iterator[Any]:
    levels = {HOME: {}, UNCHOSEN: {}, CHOSEN: {"pod-security.kubernetes.io/enforce": "privileged"}}
    for name, labels in levels.items():
        body = {"metadata": {"name": name, "labels": labels}}
        assert server.request("POST", "/api/v1/namespaces", body)[0] in (201, 409)
    account = {"metadata": {"name": ACCOUNT}}
    assert server.request("POST", f"/api/v1/namespaces/{HOME}/serviceaccounts", account)[0] == 201
    binding = {
        "metadata": {"name": ACCOUNT},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": HOME}],
    }
    assert server.request("POST", RBAC, binding)[0] == 201
    asked = {"spec": {"expirationSeconds": 3600}}
    _, answer = server.request("POST", f"/api/v1/namespaces/{HOME}/serviceaccounts/{ACCOUNT}/token", asked)
    operator = Asking(server, token=answer["status"]["token"])

    def refuses() -> bool:
        return operator.create(damaged(rollout(UNCHOSEN), spec(hostNetwork=True)))[0] == 422

    with guarded_by("operator-policy.yaml", refuses=refuses):
        yield operator
    server.request("DELETE", f"{RBAC}/{ACCOUNT}")


class Asking:
    """One user of the API server."""

    def __init__(self, server: Any, **who: str) -> None:
        self.server, self.who = server, who

    def create(self, item: Object, dry: bool = True) -> tuple[int, str]:
        """Status and message."""
        path = ALL_PATHS[item["kind"]].format(item["metadata"]["namespace"])
        return self.send("POST", f"{path}?fieldValidation=Strict{'&dryRun=All' if dry else ''}", item)

    def send(self, method: str, path: str, body: Any = None, **more: str) -> tuple[int, str]:
        status, answer = self.server.request(method, path, body, **self.who, **more)
        return status, str(answer.get("message", ""))


def damaged(item: Object, damage: Damage) -> Object:
    made = deepcopy(item)
    damage(made)
    return made


@pytest.mark.parametrize("namespace", [UNCHOSEN, CHOSEN])
def test_every_child_is_taken(guarded: Any, namespace: str) -> None:
    assert [guarded.create(child)[1] for child in children(namespace)] == [""] * len(children(namespace))
    audience = damaged(rollout(namespace), token(audience="sts.amazonaws.com"))
    assert guarded.create(audience)[0] == 201, "a cloud's account, as a webhook adds it"


SIDECARS = {"spec": {**TEMPLATE["spec"], "initContainers": [PLAIN]}}


@pytest.mark.parametrize("preset", ["None", "Karpenter", "GKE", "AKS", "EKSManaged"])
@pytest.mark.parametrize("theirs", [{}, {"template": SIDECARS}], ids=["plain", "templates"])
def test_pods_of_each_preset_are_taken(guarded: Any, preset: str, theirs: Object) -> None:
    """Also with containers of users that say nothing of their rights: the operator says it for them."""
    job = PolyRLJob.model_validate(manifest(preset, trainer=theirs, manager=theirs, rollout=theirs))
    owner = Owner("job", UNCHOSEN, "6b8c1f0e-0000-4000-8000-000000000000", job=job, settings=SETTINGS)
    made = [manager_pod(owner, 1), trainer_job(owner), *(rollout_pod(owner, 1, pool) for pool in Pool)]
    assert [guarded.create(one) for one in made] == [(201, "")] * len(made)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.parent.name)
def test_pods_of_each_example_are_taken(guarded: Any, example: Path) -> None:
    job = PolyRLJob.model_validate(yaml.safe_load(example.read_text()))
    owner = Owner("job", UNCHOSEN, "6b8c1f0e-0000-4000-8000-000000000000", job=job, settings=SETTINGS)
    made = [manager_pod(owner, 1), trainer_job(owner), rollout_pod(owner, 1, Pool.SPOT)]
    assert [guarded.create(one) for one in made] == [(201, "")] * len(made)


@pytest.mark.parametrize(("damage", "reason"), [*NOT_CHOSEN, *ANYWHERE])
def test_no_dangerous_pod_where_nobody_chose_it(guarded: Any, damage: Damage, reason: str) -> None:
    status, message = guarded.create(damaged(rollout(UNCHOSEN), damage))
    assert status == 422
    assert reason in message
    job = trainer_job(owner_in(UNCHOSEN))
    damage(job["spec"]["template"])
    status, message = guarded.create(job)
    assert status == 422, "nor by the trainer's Job"
    assert reason in message


@pytest.mark.parametrize(("damage", "reason"), ANYWHERE)
def test_no_token_and_no_system_priority_anywhere(guarded: Any, damage: Damage, reason: str) -> None:
    status, message = guarded.create(damaged(rollout(CHOSEN), damage))
    assert status == 422
    assert reason in message


@pytest.mark.parametrize(("damage", "_"), NOT_CHOSEN)
def test_a_namespace_that_chose_a_level_is_left_to_it(guarded: Any, damage: Damage, _: str) -> None:
    assert guarded.create(damaged(rollout(CHOSEN), damage)) == (201, "")


@pytest.mark.parametrize(("damage", "_"), [*NOT_CHOSEN, *ANYWHERE])
def test_others_are_not_asked(guarded: Any, damage: Damage, _: str) -> None:
    admin = Asking(guarded.server)
    assert admin.create(damaged(rollout(UNCHOSEN), damage)) == (201, "")


def of_nobody(item: Object) -> None:
    item["metadata"].pop("ownerReferences")


def of_a_deployment(item: Object) -> None:
    item["metadata"]["ownerReferences"][0] |= {"apiVersion": "apps/v1", "kind": "Deployment"}


def unlabelled(item: Object) -> None:
    item["metadata"]["labels"].pop("polyrl.dev/job-name")


CHILDREN_ONLY = "children of PolyRLJobs only"


@pytest.mark.parametrize("damage", [of_nobody, of_a_deployment, unlabelled])
def test_what_is_no_jobs_child_is_not_made(guarded: Any, damage: Damage) -> None:
    for child in children(UNCHOSEN):
        status, message = guarded.create(damaged(child, damage))
        assert (status, CHILDREN_ONLY in message) == (422, True), child["kind"]


SELECTORS: list[Any] = [
    pytest.param("Service", lambda one: one["spec"].update(selector={"app": "database"}), id="service"),
    pytest.param("Service", lambda one: one["spec"].pop("selector"), id="service-of-endpoints-by-hand"),
    pytest.param(
        "Service", lambda one: one.update(spec={"type": "ExternalName", "externalName": "example.org"}), id="name"
    ),
    pytest.param("Service", lambda one: one["spec"].update(type="NodePort", clusterIP=""), id="service-to-the-outside"),
    pytest.param("Service", lambda one: one["spec"].update(externalIPs=["8.8.8.8"]), id="service-at-anothers-address"),
    pytest.param("NetworkPolicy", lambda one: one["spec"].update(podSelector={}), id="network-policy"),
    pytest.param("PodDisruptionBudget", lambda one: one["spec"].update(selector={}), id="budget"),
]


@pytest.mark.parametrize(("kind", "damage"), SELECTORS)
def test_pods_of_others_are_not_selected(guarded: Any, kind: str, damage: Damage) -> None:
    child = next(one for one in children(UNCHOSEN) if one["kind"] == kind)
    status, message = guarded.create(damaged(child, damage))
    assert status == 422
    assert "may select pods of jobs only" in message


def test_no_account_gets_a_clouds_role(guarded: Any) -> None:
    account = next(one for one in children(UNCHOSEN) if one["kind"] == "ServiceAccount")
    account["metadata"].setdefault("annotations", {})["eks.amazonaws.com/role-arn"] = "arn:aws:iam::1:role/admin"
    status, message = guarded.create(account)
    assert (status, "no annotations but its own" in message) == (422, True)


@pytest.mark.parametrize("kind", ["kubernetes.io/service-account-token", "bootstrap.kubernetes.io/token"])
def test_no_secret_makes_it_somebody_else(guarded: Any, kind: str) -> None:
    """The control plane fills the one with a token of any account, and believes the other."""
    made = secret(owner_in(UNCHOSEN)) | {"type": kind}
    made["metadata"]["annotations"] = {"kubernetes.io/service-account.name": "default"}
    status, message = guarded.create(made)
    assert status == 422
    assert "plain Secrets only" in message


def test_of_secrets_the_managers_alone_is_changed(guarded: Any) -> None:
    admin = Asking(guarded.server)
    owner, path = owner_in(UNCHOSEN), ALL_PATHS["Secret"].format(UNCHOSEN)
    for role, status in ((Role.MANAGER, 200), (Role.TRAINER, 422)):
        name = f"job-keys-{role.value}"
        made = owner.object("v1", "Secret", name, role, type="Opaque", stringData={"a": "b"})
        assert guarded.create(made, dry=False)[0] == 201
        change = {"stringData": {"a": "c"}}
        answer = guarded.send("PATCH", f"{path}/{name}", change, content="application/merge-patch+json")
        assert answer[0] == status, answer
        assert admin.send("DELETE", f"{path}/{name}")[0] == 200


def test_others_objects_stay_as_they_are_and_old_children_can_go(guarded: Any) -> None:
    """Also one that is given an owner on the way. A pod of before the policy is annotated and deleted, as any is."""
    admin = Asking(guarded.server)
    theirs, old = damaged(rollout(UNCHOSEN), of_nobody), damaged(rollout(UNCHOSEN), spec(hostNetwork=True))
    old["metadata"]["name"] = "old"
    assert [admin.create(one, dry=False)[0] for one in (theirs, old)] == [201, 201]
    pods = ALL_PATHS["Pod"].format(UNCHOSEN)
    adopted = {"metadata": {"ownerReferences": rollout(UNCHOSEN)["metadata"]["ownerReferences"]}}
    merge = "application/merge-patch+json"
    noted = {"metadata": {"annotations": {"a": "b"}}}
    path = f"{pods}/{theirs['metadata']['name']}"
    for answer in (
        guarded.send("PATCH", path, noted, content=merge),
        guarded.send("PATCH", path, adopted, content=merge),
        guarded.send("DELETE", path),
    ):
        assert (answer[0], CHILDREN_ONLY in answer[1]) == (422, True)
    assert guarded.send("PATCH", f"{pods}/old", noted, content=merge)[0] == 200
    assert [guarded.send("DELETE", f"{pods}/old")[0], admin.send("DELETE", path)[0]] == [200, 200]
