"""The chart's policy on authors, on a real API server: what one could not have himself he does not get by a job.

`stranger` may do nothing but create PolyRLJobs and read what is named here; `operator` stands for a member who may
create pods. The policy is the chart's, rendered by Helm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from polyrl.manifest.schema.crd import custom_resource_definition
from tests.integration.admission.test_bad_manifests import BASE, JOBS, changed

POLICY = Path(__file__).parents[3] / "charts/polyrl/templates/author-policy.yaml"
AUTHOR, MEMBER = "stranger", "operator"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
APPARMOR = "container.apparmor.security.beta.kubernetes.io/rollout"
ALLOWED = {
    "labels": ["example.org/team"],
    "annotations": ["example.org/cost", APPARMOR],
    "priorityClasses": ["low"],
    "runtimeClasses": ["nvidia"],
    "schedulers": ["volcano"],
}
"""What the chart's values let any author set."""
ROLLOUT = "spec.rollout.template"
MAIN = {"name": "main"}
JOB = changed(BASE, {}, ["spec.recipe.code.configMap"])
"""With nothing of others."""


def pod(**fields: Any) -> dict[str, Any]:
    """Changes of a manifest: the rollout's pod."""
    return {ROLLOUT: {"spec": {"containers": [MAIN], **fields}}}


def metadata(**fields: Any) -> dict[str, Any]:
    return {ROLLOUT: {"metadata": fields, "spec": {"containers": [MAIN]}}}


def container(**fields: Any) -> dict[str, Any]:
    return pod(containers=[{**MAIN, **fields}])


HOST, SECURITY, VOLUMES = "the host's network", "what Pod Security calls restricted", "volumes may be"
SECRETS, ACCOUNTS = "reads a Secret or ConfigMap", "names a ServiceAccount"
PUBLIC = "open the public internet"
SOURCES: dict[str, Any] = {
    "hostPath": {"path": "/"},
    "secret": {"secretName": "a"},
    "configMap": {"name": "a"},
    "persistentVolumeClaim": {"claimName": "a"},
    "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]},
    "csi": {"driver": "secrets-store.csi.k8s.io"},
    "nfs": {"server": "10.0.0.1", "path": "/"},
    "image": {"reference": "a"},
}
"""Of volumes that no author gets."""
KEYS = {"secretKeyRef": {"name": "a", "key": "b"}, "configMapKeyRef": {"name": "a", "key": "b"}}
"""The same, of variables."""
BESIDE_NULL: list[Any] = [
    *(
        pytest.param(pod(volumes=[{"name": "a", allowed: None, source: given}]), VOLUMES, id=f"{source}-by-{allowed}")
        for source, given in SOURCES.items()
        for allowed in ("emptyDir", "downwardAPI", "ephemeral")
    ),
    *(
        pytest.param(
            container(env=[{"name": "A", "valueFrom": {allowed: None, key: given}}]), SECRETS, id=f"{key}-by-{allowed}"
        )
        for key, given in KEYS.items()
        for allowed in ("fieldRef", "resourceFieldRef")
    ),
]
"""A null beside: CEL sees a field that is allowed, and the API server makes a pod without it."""
REFUSED: list[Any] = [
    *BESIDE_NULL,
    pytest.param(pod(hostNetwork=True), HOST, id="host-network"),
    pytest.param(pod(hostPID=True), HOST, id="host-pid"),
    pytest.param(pod(hostIPC=True), HOST, id="host-ipc"),
    pytest.param(pod(nodeName="control-plane"), HOST, id="node-name"),
    pytest.param(container(ports=[{"containerPort": 80, "hostPort": 80}]), HOST, id="host-port"),
    pytest.param(
        {"spec.trainer.template": {"spec": {"containers": [MAIN], "hostNetwork": True}}},
        HOST,
        id="host-network-of-the-trainer",
    ),
    pytest.param(
        {"spec.manager.template": {"spec": {"containers": [MAIN], "hostNetwork": True}}},
        HOST,
        id="host-network-of-the-manager",
    ),
    pytest.param(container(securityContext={"privileged": True}), SECURITY, id="privileged"),
    pytest.param(
        pod(initContainers=[{"name": "a", "image": "a", "securityContext": {"privileged": True}}]),
        SECURITY,
        id="privileged-init-container",
    ),
    pytest.param(container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}), SECURITY, id="capability"),
    pytest.param(container(securityContext={"allowPrivilegeEscalation": True}), SECURITY, id="escalation"),
    pytest.param(container(securityContext={"runAsUser": 0}), SECURITY, id="root"),
    pytest.param(pod(securityContext={"runAsUser": 0}), SECURITY, id="root-of-the-pod"),
    pytest.param(pod(securityContext={"runAsNonRoot": False}), SECURITY, id="maybe-root"),
    pytest.param(pod(securityContext={"seccompProfile": {"type": "Unconfined"}}), SECURITY, id="seccomp"),
    pytest.param(pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}), SECURITY, id="sysctl"),
    pytest.param(container(securityContext={"procMount": "Unmasked"}), SECURITY, id="proc"),
    pytest.param(container(securityContext={"seLinuxOptions": {"type": "a"}}), SECURITY, id="selinux"),
    pytest.param(container(securityContext={"appArmorProfile": {"type": "Unconfined"}}), SECURITY, id="apparmor"),
    pytest.param(container(securityContext={"windowsOptions": {"hostProcess": True}}), SECURITY, id="windows"),
    pytest.param(pod(volumes=[{"name": "a", "hostPath": {"path": "/"}}]), VOLUMES, id="host-path"),
    pytest.param(pod(volumes=[{"name": "a", "secret": {"secretName": "a"}}]), VOLUMES, id="secret-volume"),
    pytest.param(pod(volumes=[{"name": "a", "configMap": {"name": "a"}}]), VOLUMES, id="config-map-volume"),
    pytest.param(
        pod(volumes=[{"name": "a", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]),
        VOLUMES,
        id="projected-token",
    ),
    pytest.param(pod(volumes=[{"name": "a", "persistentVolumeClaim": {"claimName": "a"}}]), VOLUMES, id="claim-volume"),
    pytest.param(container(envFrom=[{"secretRef": {"name": "a"}}]), SECRETS, id="env-from"),
    pytest.param(
        container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]), SECRETS, id="env"
    ),
    pytest.param(
        container(env=[{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}]),
        SECRETS,
        id="env-of-a-config-map",
    ),
    pytest.param(pod(imagePullSecrets=[{"name": "a"}]), SECRETS, id="pull-secret"),
    pytest.param(pod(serviceAccountName="admin"), ACCOUNTS, id="service-account"),
    pytest.param(pod(serviceAccount="admin"), ACCOUNTS, id="service-account-by-its-old-name"),
    pytest.param(pod(automountServiceAccountToken=True), ACCOUNTS, id="token"),
    pytest.param(pod(priorityClassName="system-node-critical"), "has a priorityClassName that", id="system-priority"),
    pytest.param({"spec.networkPolicy": {"publicHttps": "Always"}}, PUBLIC, id="public-https"),
    pytest.param({"spec.recipe.model": {"path": "hf://a/b"}}, PUBLIC, id="fetched-model"),
    pytest.param({"spec.recipe.data.rl": [{"path": "s3://bucket/a.jsonl"}]}, PUBLIC, id="fetched-rows"),
    pytest.param({"spec.recipe.logging": {"wandb": {}}}, PUBLIC, id="wandb"),
    pytest.param({"spec.recipe.envSecret": "others"}, "envSecret names a Secret", id="env-secret"),
    pytest.param({"spec.recipe.model.secretRef": "others"}, "secretRef names a Secret", id="model-secret"),
    pytest.param({"spec.recipe.data.secretRef": "others"}, "data.secretRef names a Secret", id="rows-secret"),
    pytest.param({"spec.recipe.model": {"path": "pvc://others/model"}}, "a volume claim", id="model-claim"),
    pytest.param({"spec.recipe.code.configMap": "others"}, "names a ConfigMap", id="code-config-map"),
    pytest.param({"spec.recipe.code.volumeClaim": "others"}, "a volume claim", id="code-claim"),
    pytest.param({"spec.trainer.storage": {"claimName": "others"}}, "a volume claim", id="trainer-claim"),
    pytest.param({"spec.manager.storage": {"claimName": "others"}}, "a volume claim", id="manager-claim"),
    pytest.param(container(securityContext={"capabilities": {"drop": []}}), SECURITY, id="capabilities-kept"),
    pytest.param(metadata(annotations={APPARMOR: "unconfined"}), "AppArmor annotation", id="apparmor-by-annotation"),
    pytest.param(metadata(labels={"app": "database"}), "has labels that", id="label-of-another-service"),
    pytest.param(metadata(annotations={"iam.amazonaws.com/role": "admin"}), "has annotations that", id="cloud-role"),
    pytest.param(
        {"spec.manager.template": {"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [MAIN]}}},
        "has labels that",
        id="label-of-the-manager",
    ),
    pytest.param(pod(runtimeClassName="bare"), "has a runtimeClassName that", id="runtime-class"),
    pytest.param(pod(schedulerName="own"), "has a schedulerName that", id="scheduler"),
    pytest.param(pod(priorityClassName="high"), "has a priorityClassName that", id="priority"),
    pytest.param(
        container(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}), HOST, id="probe-of-another-host"
    ),
    pytest.param(
        container(lifecycle={"postStart": {"httpGet": {"host": "169.254.169.254", "port": 80}}}),
        HOST,
        id="hook-at-another-host",
    ),
    pytest.param(
        pod(
            volumes=[
                {
                    "name": "a",
                    "ephemeral": {
                        "volumeClaimTemplate": {
                            "spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "others"}}
                        }
                    },
                }
            ]
        ),
        VOLUMES,
        id="clone-of-a-claim",
    ),
    pytest.param(
        pod(
            volumes=[
                {
                    "name": "a",
                    "ephemeral": {
                        "volumeClaimTemplate": {
                            "spec": {"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "others"}}
                        }
                    },
                }
            ]
        ),
        VOLUMES,
        id="clone-of-a-claim-by-reference",
    ),
    pytest.param(
        pod(volumes=[{"name": "a", "ephemeral": {"volumeClaimTemplate": {"spec": {"volumeName": "others"}}}}]),
        VOLUMES,
        id="named-volume",
    ),
    pytest.param(
        pod(volumes=[{"name": "a", "ephemeral": {"volumeClaimTemplate": {"spec": {"selector": {"matchLabels": {}}}}}}]),
        VOLUMES,
        id="picked-volume",
    ),
    *(
        pytest.param(
            pod(volumes=[{"name": "a", "ephemeral": {"volumeClaimTemplate": {"metadata": {part: given}, "spec": {}}}}]),
            VOLUMES,
            id=f"{part}-of-a-claim",
        )
        for part, given in {"annotations": {"k8s.io/CloneRequest": "others/a"}, "labels": {"a": "b"}}.items()
    ),
    pytest.param(pod(resourceClaims=[{"name": "a", "resourceClaimName": "others"}]), "its own", id="device-claim"),
    pytest.param({"spec.networkPolicy": {"extraEgress": [{"cidr": "10.0.0.0/8"}]}}, "ways out", id="egress"),
    pytest.param({"spec.rollout.capacity.metadataService": True}, "ways out", id="metadata-service"),
]
TAKEN: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param(container(image="a:1", resources={"limits": {"nvidia.com/gpu": 1}}), id="image-and-gpu"),
    pytest.param(container(securityContext={"runAsUser": 1000, "allowPrivilegeEscalation": False}), id="restricted"),
    pytest.param(pod(volumes=[{"name": "a", "emptyDir": {}}]), id="empty-dir"),
    pytest.param(
        pod(
            volumes=[{"name": "a", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}}]
        ),
        id="ephemeral-that-starts-empty",
    ),
    pytest.param(
        container(livenessProbe={"httpGet": {"port": 80}}, lifecycle={"preStop": {"sleep": {}}}), id="own-probe"
    ),
    pytest.param(container(securityContext={"capabilities": {"drop": ["ALL"]}}), id="no-capabilities"),
    pytest.param(metadata(labels={"example.org/team": "a"}, annotations={"example.org/cost": "b"}), id="allowed-keys"),
    pytest.param(pod(runtimeClassName="nvidia", schedulerName="volcano"), id="allowed-classes"),
    pytest.param(pod(priorityClassName="polyrl-rollout"), id="the-priority-that-it-has-anyway"),
    pytest.param(container(env=[{"name": "A", "value": "b"}]), id="plain-env"),
    pytest.param(
        container(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]), id="own-name"
    ),
    pytest.param(
        pod(priorityClassName="low", nodeSelector={"a": "b"}, tolerations=[{"operator": "Exists"}]), id="place"
    ),
    pytest.param({"spec.recipe.envSecret": "own"}, id="a-secret-that-he-may-get"),
    pytest.param(
        {
            "spec.recipe.model": {"path": "hf://a/b", "secretRef": "own"},
            "spec.networkPolicy": {"publicHttps": "Never"},
        },
        id="a-model-with-his-own-secret",
    ),
    pytest.param({"spec.recipe.code.configMap": "own"}, id="a-config-map-that-he-may-get"),
]


def submit(server: Any, changes: dict[str, Any], user: str) -> tuple[int, Any]:
    """As `kubectl apply --dry-run=server` asks."""
    status, answer = server.request("POST", f"{JOBS}?dryRun=All", changed(JOB, changes), user=user)
    return status, answer


def grant(server: Any, user: str, rules: list[dict[str, Any]]) -> None:
    role = {"metadata": {"name": f"{user}-here"}, "rules": rules}
    bound = {
        "metadata": {"name": f"{user}-here"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": f"{user}-here"},
        "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    for kind, body in (("roles", role), ("rolebindings", bound)):
        status, answer = server.request("POST", f"{RBAC}/{kind}", body)
        assert status in (201, 409), answer


@pytest.fixture(scope="module")
def guarded(server: Any, guarded_by: Any) -> Any:
    """The server with both users' rights and the policy at work; neither afterwards."""
    jobs = {"apiGroups": ["polyrl.dev"], "resources": ["polyrljobs"], "verbs": ["create", "update", "get"]}
    own = {"apiGroups": [""], "resources": ["secrets", "configmaps"], "verbs": ["get"], "resourceNames": ["own"]}
    grant(server, AUTHOR, [jobs, own])
    grant(server, MEMBER, [jobs, {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}])
    refuses = lambda: submit(server, pod(hostNetwork=True), AUTHOR)[0] != 201  # noqa: E731
    with guarded_by("author-policy.yaml", f"authorPolicy.allow={json.dumps(ALLOWED)}", refuses=refuses):
        yield server
    for user in (AUTHOR, MEMBER):
        for kind in ("rolebindings", "roles"):
            server.request("DELETE", f"{RBAC}/{kind}/{user}-here")


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_who_may_create_jobs_alone_gets_nothing_of_others(guarded: Any, changes: dict[str, Any], reason: str) -> None:
    status, answer = submit(guarded, changes, AUTHOR)
    assert status in (403, 422), answer
    assert reason in answer["message"]


@pytest.mark.parametrize("changes", TAKEN)
def test_and_gets_what_hurts_nobody(guarded: Any, changes: dict[str, Any]) -> None:
    status, answer = submit(guarded, changes, AUTHOR)
    assert status == 201, str(answer)


@pytest.mark.parametrize("changes", [one.values[0] for one in REFUSED], ids=[str(one.id) for one in REFUSED])
def test_who_may_create_pods_writes_what_he_likes(guarded: Any, changes: dict[str, Any]) -> None:
    status, answer = submit(guarded, changes, MEMBER)
    assert status == 201, str(answer)


def test_a_change_is_the_changers_and_labels_are_anybodys(guarded: Any) -> None:
    """What a member wrote, an author without his rights may label, and not change."""
    job = changed(JOB, {**pod(hostNetwork=True), "metadata.name": "shared"})
    status, stored = guarded.request("POST", JOBS, job, user=MEMBER)
    assert status == 201, stored
    try:
        path = f"{JOBS}/shared"
        labelled = {**stored, "metadata": {**stored["metadata"], "labels": {"team": "a"}}}
        status, stored = guarded.request("PUT", path, labelled, user=AUTHOR)
        assert status == 200, stored
        stored["spec"]["rollout"]["maxReplicas"] += 1
        status, answer = guarded.request("PUT", path, stored, user=AUTHOR)
        assert status in (403, 422), answer
        status, answer = guarded.request("PUT", path, stored, user=MEMBER)
        assert status == 200, answer
    finally:
        guarded.request("DELETE", f"{JOBS}/shared")


REFERENCES = re.compile(r"[Ss]ecret|[Cc]laim|configMap|serviceAccount")
"""Of names of fields that lend a job something that is not its own."""


def test_every_field_that_lends_something_of_others_is_asked_about() -> None:
    """Beside templates, whose every source is: a field that comes later is not forgotten."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    lent = [place for place, one in objects_of(spec) if place and place[-2:-1] == ("properties",) and "type" in one]
    fields = {place[-1] for place in lent if REFERENCES.search(place[-1]) and "template" not in place}
    assert {"envSecret", "secretRef", "configMap", "volumeClaim", "claimName"} <= fields
    policy = POLICY.read_text()
    assert [field for field in fields if field not in policy] == []


CORE = "io.k8s.api.core.v1"
ALLOWED_SOURCES: dict[str, dict[str, Any]] = {
    "Volume": {"emptyDir": {}, "downwardAPI": {}, "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
    "EnvVarSource": {"fieldRef": {"fieldPath": "metadata.name"}, "resourceFieldRef": {"resource": "limits.cpu"}},
}
"""What an author may have, of each kind of source."""


def with_source(kind: str, source: dict[str, Any]) -> dict[str, Any]:
    if kind == "Volume":
        return pod(volumes=[{"name": "a", **source}])
    return container(env=[{"name": "A", "valueFrom": source}])


@pytest.mark.parametrize("kind", ALLOWED_SOURCES)
def test_of_all_sources_that_this_server_has_only_the_allowed_are_taken(guarded: Any, kind: str) -> None:
    """Alone, beside each allowed one, and beside a null of each: also those of later releases of Kubernetes."""
    _, document = guarded.request("GET", "/openapi/v3/api/v1")
    allowed = ALLOWED_SOURCES[kind]
    others = document["components"]["schemas"][f"{CORE}.{kind}"]["properties"].keys() - allowed.keys() - {"name"}
    assert len(others) >= 2, others
    taken = []
    for other in others:
        beside = [{}, *({key: value} for key, given in allowed.items() for value in (given, None))]
        sources: list[dict[str, Any]] = [{**one, other: {}} for one in beside] + [{other: {}, **one} for one in beside]
        taken += [one for one in sources if submit(guarded, with_source(kind, one), AUTHOR)[0] == 201]
    assert taken == []
    alone = [submit(guarded, with_source(kind, {key: given}), AUTHOR)[0] for key, given in allowed.items()]
    assert alone == [201] * len(allowed)


Place = tuple[str, ...]


def objects_of(value: Any, place: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Each object within, and where: an item of a list is at [] whatever its number."""
    if isinstance(value, dict):
        yield place, value
        for key, part in value.items():
            yield from objects_of(part, (*place, key))
    if isinstance(value, list):
        for part in value:
            yield from objects_of(part, (*place, "[]"))


def allowed_keys() -> dict[Place, set[str]]:
    keys: dict[Place, set[str]] = {}
    for case in TAKEN:
        for place, one in objects_of(case.values[0]):
            keys.setdefault(place, set()).update(one)
    return keys


def with_a_null(changes: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same with one allowed key as null, wherever it is not there yet."""
    allowed = allowed_keys()
    for number, (place, one) in enumerate(objects_of(changes)):
        for key in sorted(allowed.get(place, set()) - one.keys()) if place else ():
            made = deepcopy(changes)
            list(objects_of(made))[number][1][key] = None
            yield f"{'.'.join(place)}.{key}", made


@pytest.mark.parametrize("changes", [one.values[0] for one in REFUSED], ids=[str(one.id) for one in REFUSED])
def test_a_null_beside_it_opens_nothing(guarded: Any, changes: dict[str, Any]) -> None:
    taken = [place for place, made in with_a_null(changes) if submit(guarded, made, AUTHOR)[0] == 201]
    assert taken == []


def test_nulls_are_put_beside_all_that_is_allowed() -> None:
    secret = container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}])
    places = {place.removeprefix(f"{ROLLOUT}.spec.") for place, _ in with_a_null(secret)}
    assert {"containers.[].env.[].valueFrom.fieldRef", "containers.[].env.[].value", "volumes"} <= places
