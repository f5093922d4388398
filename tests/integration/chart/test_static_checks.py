"""What linters of manifests look for, held for every object of the chart and every child of a job.

The rules are kube-linter's and Pod Security's; each says what it wants of a pod, a container, a role or a service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.cluster import names
from polyrl.cluster.resources.fixed import fixed_children
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Pool
from polyrl.worker import Role

HERE = Path(__file__).parent
VALUES: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "values.yaml").read_text())
EXAMPLE = HERE.parents[2] / "examples/sort-digits/job.yaml"

VOLUMES = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected", "downwardAPI"}
"""Of those that Pod Security `restricted` allows, what we use."""

Object = dict[str, Any]
Check = Callable[[Object], Iterator[str]]


def children() -> list[Object]:
    """Every child of a job that asks for all there is."""
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["spec"]["recipe"]["code"] = {"configMap": "code"}
    settings = Settings("a/manager:1", "a/trainer:1", rollout_image="a/rollout:1", trainer_priority_class="high")
    owner = Owner("job", "ml", "uid", PolyRLJob.model_validate(manifest), settings)
    rollouts = [rollout_pod(owner, n, pool) for n, pool in enumerate((Pool.SPOT, Pool.ON_DEMAND), start=1)]
    return [*fixed_children(owner), trainer_job(owner), manager_pod(owner, 1), *rollouts]


def pod_of(obj: Object) -> Object | None:
    if obj["kind"] == "Pod":
        return obj["spec"]
    template = obj.get("spec", {}).get("template") if obj["kind"] in ("Deployment", "Job") else None
    return None if template is None else template["spec"]


def containers_of(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def pod_is_restricted(obj: Object) -> Iterator[str]:
    pod = pod_of(obj)
    if pod is None:
        return
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if pod.get(key):
            yield f"{key} is set"
    security = pod.get("securityContext", {})
    if not security.get("runAsNonRoot") or not security.get("runAsUser"):
        yield "may run as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    for volume in pod.get("volumes", []):
        if not volume.keys() - {"name"} <= VOLUMES:
            yield f"volume {volume['name']} is of a kind that `restricted` refuses"


def containers_are_restricted(obj: Object) -> Iterator[str]:
    for one in containers_of(pod_of(obj) or {"containers": []}):
        security = one.get("securityContext", {})
        if security.get("allowPrivilegeEscalation") is not False:
            yield f"{one['name']} may escalate its privileges"
        if security.get("capabilities", {}).get("drop") != ["ALL"] or security["capabilities"].get("add"):
            yield f"{one['name']} keeps capabilities"
        if security.get("readOnlyRootFilesystem") is not True:
            yield f"{one['name']} may write to its root"
        if security.get("privileged"):
            yield f"{one['name']} is privileged"


def hosts_are_left_alone(obj: Object) -> Iterator[str]:
    pod = pod_of(obj) or {"containers": []}
    if pod.get("hostAliases") or pod.get("securityContext", {}).get("sysctls"):
        yield "changes names or the kernel's settings"
    for one in containers_of(pod):
        if any("hostPort" in port for port in one.get("ports", [])):
            yield f"{one['name']} takes a port of its host"
        if one.get("securityContext", {}).get("procMount", "Default") != "Default":
            yield f"{one['name']} sees its host's processes"


def containers_are_sized(obj: Object) -> Iterator[str]:
    for one in containers_of(pod_of(obj) or {"containers": []}):
        requests = one.get("resources", {}).get("requests", {})
        if not {"cpu", "memory"} <= requests.keys():
            yield f"{one['name']} requests no CPU or no memory"


def scratch_is_bounded(obj: Object) -> Iterator[str]:
    for volume in (pod_of(obj) or {}).get("volumes", []):
        if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
            yield f"volume {volume['name']} may fill its node"


def images_are_named(obj: Object) -> Iterator[str]:
    for one in containers_of(pod_of(obj) or {"containers": []}):
        last = one["image"].rpartition("/")[2]
        if ":" not in last or last.endswith(":latest"):
            yield f"{one['name']} runs {one['image']}, which may be another tomorrow"


def tokens_are_wanted(obj: Object) -> Iterator[str]:
    pod = pod_of(obj)
    if pod is not None and (obj["kind"] == "Deployment") is not pod.get("automountServiceAccountToken", True):
        yield "mounts a token that nothing of it uses, or lacks the one it needs"
    if obj["kind"] == "ServiceAccount" and obj.get("automountServiceAccountToken") is not False:
        yield "hands out its token unasked"


def no_secret_in_the_open(obj: Object) -> Iterator[str]:
    for one in containers_of(pod_of(obj) or {"containers": []}):
        for variable in one.get("env", []):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                yield f"{one['name']} gets a Secret as variable {variable['name']}"
        if any("secretRef" in source for source in one.get("envFrom", [])):
            yield f"{one['name']} gets a whole Secret as variables"
    for volume in (pod_of(obj) or {}).get("volumes", []):
        if "secret" in volume and not volume["secret"].get("items"):
            yield f"volume {volume['name']} shows a whole Secret"


def pods_end_in_time(obj: Object) -> Iterator[str]:
    pod = pod_of(obj)
    if pod is not None and not pod.get("restartPolicy") and obj["kind"] != "Deployment":
        yield "says not whether it is restarted"


def servers_are_probed(obj: Object) -> Iterator[str]:
    """Who is spoken to says when it is ready; who nobody would miss says that it lives."""
    pod, role = pod_of(obj), obj["metadata"].get("labels", {}).get(names.LABEL_ROLE)
    if pod is None:
        return
    first = pod["containers"][0]
    if (obj["kind"] == "Deployment" or role == Role.MANAGER) and not first.get("readinessProbe"):
        yield "never says that it is ready"
    if obj["kind"] == "Deployment" and not first.get("livenessProbe"):
        yield "is never found dead"


def rights_are_narrow(obj: Object) -> Iterator[str]:
    if obj["kind"] not in ("Role", "ClusterRole"):
        return
    for rule in obj["rules"]:
        if "nonResourceURLs" in rule:
            if rule != {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}:
                yield f"reaches more than numbers: {rule}"
            continue
        rule_text = f"{rule['apiGroups']} {rule['resources']} {rule['verbs']}"
        if "*" in rule["verbs"] + rule["resources"] + rule["apiGroups"]:
            yield f"a star in {rule_text}"
        if {"escalate", "bind", "impersonate"} & set(rule["verbs"]):
            yield f"may make itself greater: {rule_text}"
        if "secrets" in rule["resources"] and {"list", "watch"} & set(rule["verbs"]):
            yield "may read Secrets that it cannot name"
        if {"pods/exec", "pods/attach", "pods/portforward", "nodes/proxy"} & set(rule["resources"]):
            yield f"may enter pods: {rule_text}"


def services_stay_inside(obj: Object) -> Iterator[str]:
    if obj["kind"] == "Service" and obj["spec"].get("type", "ClusterIP") != "ClusterIP":
        yield f"is open to the outside: {obj['spec']['type']}"


def it_is_labelled(obj: Object) -> Iterator[str]:
    wanted = {f"app.kubernetes.io/{key}" for key in ("name", "instance", "part-of", "managed-by")}
    if missing := wanted - obj["metadata"].get("labels", {}).keys():
        yield f"lacks {sorted(missing)}"


CHECKS: tuple[Check, ...] = (
    pod_is_restricted,
    containers_are_restricted,
    hosts_are_left_alone,
    containers_are_sized,
    scratch_is_bounded,
    images_are_named,
    tokens_are_wanted,
    no_secret_in_the_open,
    pods_end_in_time,
    servers_are_probed,
    rights_are_narrow,
    services_stay_inside,
    it_is_labelled,
)


def findings(objects: list[Object]) -> list[str]:
    return [
        f"{obj['kind']} {obj['metadata']['name']}: {finding}"
        for obj in objects
        for check in CHECKS
        for finding in check(obj)
    ]


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_passes(render: Any, name: str) -> None:
    assert findings(render(VALUES[name])) == []


def test_a_jobs_children_pass() -> None:
    assert {one["kind"] for one in children()} >= {"Pod", "Job", "Service", "ServiceAccount", "NetworkPolicy"}
    assert findings(children()) == []


def test_no_pod_of_a_job_sees_another_roles_keys() -> None:
    seen = {}
    for one in children():
        volumes = (pod_of(one) or {}).get("volumes", [])
        files = {item["path"] for volume in volumes if "secret" in volume for item in volume["secret"]["items"]}
        seen[one["metadata"]["labels"].get(names.LABEL_ROLE, ""), one["kind"]] = files
    assert seen["rollout", "Pod"] == {"agent.key"}
    assert "operator.key" not in set().union(*seen.values())
    assert "trainer.key" not in seen["manager", "Pod"]


BROKEN: list[tuple[str, Callable[[Object], None]]] = [
    ("may run as root", lambda pod: pod["spec"]["securityContext"].update(runAsNonRoot=False)),
    ("hostNetwork", lambda pod: pod["spec"].update(hostNetwork=True)),
    ("refuses", lambda pod: pod["spec"]["volumes"].append({"name": "x", "hostPath": {"path": "/"}})),
    ("escalate", lambda pod: pod["spec"]["containers"][0].update(securityContext={"capabilities": {"drop": ["ALL"]}})),
    ("fill its node", lambda pod: pod["spec"]["volumes"].append({"name": "x", "emptyDir": {"medium": "Memory"}})),
    ("requests no", lambda pod: pod["spec"]["containers"][0].pop("resources")),
    ("another tomorrow", lambda pod: pod["spec"]["containers"][0].update(image="a/b:latest")),
    ("token", lambda pod: pod["spec"].pop("automountServiceAccountToken")),
    ("whole Secret", lambda pod: pod["spec"]["volumes"].append({"name": "x", "secret": {"secretName": "s"}})),
    ("lacks", lambda pod: pod["metadata"].pop("labels")),
    ("port of its host", lambda pod: pod["spec"]["containers"][0].update(ports=[{"containerPort": 1, "hostPort": 1}])),
    ("as variables", lambda pod: pod["spec"]["containers"][0].update(envFrom=[{"secretRef": {"name": "s"}}])),
    ("kernel", lambda pod: pod["spec"].update(hostAliases=[{"ip": "10.0.0.1", "hostnames": ["a"]}])),
    ("never says", lambda pod: pod["spec"]["containers"][0].pop("readinessProbe")),
]


@pytest.mark.parametrize(("words", "damage"), BROKEN, ids=[words for words, _ in BROKEN])
def test_the_checks_find_what_they_are_for(words: str, damage: Callable[[Object], None]) -> None:
    pod = next(one for one in children() if one["kind"] == "Pod")
    damage(pod)
    assert any(words in finding for finding in findings([pod]))


def test_network_rules_know_the_operators_pods(render: Any) -> None:
    (deployment,) = (one for one in render({}) if one["kind"] == "Deployment")
    assert names.OPERATOR_LABELS.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_the_operators_pod_is_isolated_and_finds_its_managers(render: Any) -> None:
    rendered = render({})
    (policy,) = (one["spec"] for one in rendered if one["kind"] == "NetworkPolicy")
    (deployment,) = (one for one in rendered if one["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert all("ports" in rule for rule in policy["ingress"])
    everywhere = [rule for rule in policy["egress"] if "to" not in rule]
    assert [{port["port"] for port in rule["ports"]} for rule in everywhere] == [{443, 6443}]
    (to_managers,) = (to for rule in policy["egress"] for to in rule.get("to", []) if "podSelector" in to)
    manager = next(one for one in children() if one["metadata"]["labels"].get(names.LABEL_ROLE) == "manager")
    assert to_managers["podSelector"]["matchLabels"].items() <= manager["metadata"]["labels"].items()
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert "POD_NAMESPACE" in {one["name"] for one in container["env"]}
    bound = render({"networkPolicy": {"apiServer": {"addresses": ["10.0.0.1/32"]}}})
    (policy,) = (one["spec"] for one in bound if one["kind"] == "NetworkPolicy")
    assert all("to" in rule for rule in policy["egress"])


@pytest.mark.parametrize("name", VALUES)
def test_namespaced_means_roles(render: Any, name: str) -> None:
    values, objects = VALUES[name], render(VALUES[name])
    bindings = [one for one in objects if one["kind"] == "ClusterRoleBinding"]
    of_metrics = {f"polyrl-system:polyrl-operator-{part}" for part in ("metrics", "metrics-reader")}
    cluster_wide = [one for one in bindings if one["metadata"]["name"] not in of_metrics]
    namespaces = values.get("watch", {}).get("namespaces", [])
    roles = {one["metadata"]["namespace"] for one in objects if one["kind"] == "Role"}
    assert roles == {"polyrl-system", *namespaces}
    if namespaces:
        assert all(one["metadata"]["name"].endswith("-nodes") for one in cluster_wide)
    assert len(cluster_wide) == (not namespaces) + values.get("watch", {}).get("nodes", True)
