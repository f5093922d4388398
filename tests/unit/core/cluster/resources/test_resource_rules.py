"""Tables of a job's pods: machines by preset, a template merged with ours, who may talk to whom, what is refused."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from polyrl.cluster import names
from polyrl.cluster.acceptance import unsupported
from polyrl.cluster.resources.fixed import config_map
from polyrl.cluster.resources.network import METADATA, NAMESPACE_LABEL, PUBLIC, network_policies
from polyrl.cluster.resources.owner import Owner, template_hash
from polyrl.cluster.resources.placement import Placement, manager_placement, rollout_placement, trainer_placement
from polyrl.cluster.resources.pod import whole_cpus
from polyrl.cluster.resources.template import merged_metadata, merged_resources, merged_spec
from polyrl.cluster.resources.workers import rollout_pod
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Pool
from polyrl.testing.fake_operator import SETTINGS
from polyrl.worker import EXCHANGE_LEAST_BYTES, Role

RECIPE = {
    "mode": "rl",
    "model": {"path": "model"},
    "data": {"rl": [{"path": "rl.jsonl"}]},
    "reward": {"function": "reward:score"},
    "algorithm": {"steps": 1},
}
TWO_PODS = {"replicas": 2, "storage": {"accessMode": "ReadWriteMany"}}
SFT = {"mode": "sft", "model": {"path": "model"}, "data": {"sft": [{"path": "sft.jsonl"}]}, "sft": {"steps": 1}}


def job(**spec: Any) -> PolyRLJob:
    manifest = {"apiVersion": "polyrl.dev/v1alpha1", "kind": "PolyRLJob", "metadata": {"name": "job"}}
    return PolyRLJob.model_validate({**manifest, "spec": {"recipe": RECIPE, **spec}})


def shown(requirement: dict[str, Any]) -> str:
    values = ",".join(requirement.get("values", ()))
    return f"{requirement['key']} {requirement['operator']} {values}".strip()


CAPACITY_TYPE, EKS = "karpenter.sh/capacity-type", "eks.amazonaws.com/capacityType"
GKE, AKS = "cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority"
PREEMPTIBLE = "cloud.google.com/gke-preemptible"
PLACES = [
    ("None", [], [], []),
    ("Karpenter", [f"{CAPACITY_TYPE} In spot"], [f"{CAPACITY_TYPE} In on-demand,reserved"], ["nvidia.com/gpu"]),
    ("GKE", [f"{GKE} In true"], [f"{GKE} DoesNotExist", f"{PREEMPTIBLE} DoesNotExist"], [GKE, "nvidia.com/gpu"]),
    ("AKS", [f"{AKS} In spot"], [f"{AKS} DoesNotExist"], [AKS]),
    ("EKSManaged", [f"{EKS} In SPOT"], [f"{EKS} In ON_DEMAND"], ["nvidia.com/gpu"]),
]


@pytest.mark.parametrize(("preset", "spot", "on_demand", "tolerated"), PLACES, ids=[row[0] for row in PLACES])
def test_machines_by_preset(preset: str, spot: list[str], on_demand: list[str], tolerated: list[str]) -> None:
    spec = job(rollout={"capacity": {"preset": preset}}).spec
    anywhere = job(rollout={"capacity": {"preset": preset}}, trainer={"capacity": "Any"}).spec
    by_role = {
        "spot": rollout_placement(spec, Pool.SPOT),
        "on-demand": rollout_placement(spec, Pool.ON_DEMAND),
        "trainer": trainer_placement(spec),
        "manager": manager_placement(spec),
        "trainer anywhere": trainer_placement(anywhere),
    }
    required = {role: [shown(one) for one in place.required] for role, place in by_role.items()}
    assert required == {
        "spot": spot,
        "on-demand": on_demand,
        "trainer": on_demand,
        "manager": on_demand,
        "trainer anywhere": [],
    }
    taints = {
        role: [one["key"] for one in place.tolerations if one["effect"] == "NoSchedule"]
        for role, place in by_role.items()
    }
    assert taints["spot"] == taints["trainer anywhere"] == tolerated
    assert taints["on-demand"] == taints["trainer"] == [key for key in tolerated if key == "nvidia.com/gpu"]
    assert taints["manager"] == []


@pytest.mark.parametrize(
    ("theirs", "ours", "merged"),
    [
        pytest.param({}, {"requests": {"cpu": "1"}}, {"requests": {"cpu": "1"}}, id="theirs says nothing"),
        pytest.param(
            {"limits": {"cpu": "500m"}},
            {"requests": {"cpu": "1", "memory": "1Gi"}},
            {"requests": {"memory": "1Gi"}, "limits": {"cpu": "500m"}},
            id="they limit what we request",
        ),
        pytest.param(
            {"requests": {"memory": "9Gi"}},
            {"limits": {"memory": "2Gi"}},
            {"requests": {"memory": "9Gi"}},
            id="they request what we limit",
        ),
        pytest.param(
            {"claims": [{"name": "gpu"}]},
            {"requests": {"cpu": "1"}},
            {"claims": [{"name": "gpu"}], "requests": {"cpu": "1"}},
            id="what is no resource stays",
        ),
    ],
)
def test_no_request_of_ours_exceeds_a_limit_of_theirs(theirs: dict, ours: dict, merged: dict) -> None:
    assert merged_resources(theirs, ours) == merged


@pytest.mark.parametrize(
    ("amount", "cores"),
    [
        pytest.param("2", 2, id="whole"),
        pytest.param("500m", 1, id="a part of one"),
        pytest.param("2500m", 3, id="millicores are rounded up"),
        pytest.param("0.5", 1, id="a fraction of one"),
        pytest.param(4, 4, id="a number"),
        pytest.param("many", 1, id="not a quantity"),
    ],
)
def test_whole_cores(amount: object, cores: int) -> None:
    assert whole_cpus({"requests": {"cpu": amount}}) == cores
    assert whole_cpus({"requests": {"cpu": 9}, "limits": {"cpu": amount}}) == cores
    assert whole_cpus({}) == 1


OURS = {
    "defaults": {"serviceAccountName": "job"},
    "forced": {"restartPolicy": "Never"},
    "securityContext": {"runAsUser": 10001},
    "container": {"name": "trainer", "command": ["python"], "image": "ours", "securityContext": {"x": 1}},
    "volumes": [{"name": "polyrl-tmp", "emptyDir": {}}],
}


def test_both_requirements_hold_in_every_alternative() -> None:
    terms = [{"matchExpressions": [{"key": "zone"}]}, {"matchFields": [{"key": "metadata.name"}]}]
    hard = "requiredDuringSchedulingIgnoredDuringExecution"
    theirs = {
        "affinity": {"podAffinity": {"a": 1}, "nodeAffinity": {hard: {"nodeSelectorTerms": terms}, "preferred": []}}
    }
    merged = merged_spec(theirs, OURS, Placement(({"key": "spot"},)))["affinity"]
    assert merged["podAffinity"] == {"a": 1}
    assert merged["nodeAffinity"]["preferred"] == []
    assert merged["nodeAffinity"][hard]["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": "zone"}, {"key": "spot"}]},
        {"matchFields": [{"key": "metadata.name"}], "matchExpressions": [{"key": "spot"}]},
    ]


def test_a_user_adds_and_we_keep_what_must_be() -> None:
    container = {"name": "mine", "image": "theirs", "command": ["sh"], "lifecycle": {}, "securityContext": {"x": 2}}
    theirs = {"containers": [container], "serviceAccountName": "theirs", "restartPolicy": "Always", "hostname": "h"}
    spec = merged_spec(theirs, OURS, Placement())
    assert (spec["serviceAccountName"], spec["restartPolicy"], spec["hostname"]) == ("theirs", "Never", "h")
    (first,) = spec["containers"]
    assert (first["name"], first["image"], first["command"]) == ("trainer", "theirs", ["python"])
    assert (first["lifecycle"], first["securityContext"]) == ({}, {"x": 2})
    assert "affinity" not in spec


def test_our_labels_select_so_they_win() -> None:
    merged = merged_metadata(
        {"labels": {"a": "theirs", "b": "b"}, "annotations": {"a": "theirs"}}, {"a": "ours"}, {"a": "ours"}
    )
    assert merged == {"labels": {"a": "ours", "b": "b"}, "annotations": {"a": "theirs"}}


def test_a_users_init_containers_are_held_to_what_ours_are() -> None:
    spec = merged_spec({"initContainers": [{"name": "fetch"}]}, OURS, Placement())
    (only,) = spec["initContainers"]
    assert only["securityContext"]["allowPrivilegeEscalation"] is False


def flows(policies: tuple[dict[str, Any], ...]) -> set[tuple[str, str, int]]:
    """(from, to, port) by role that both ends allow; the outside is where no role is named."""
    out, into = set(), set()
    for policy in policies:
        spec, role = policy["spec"], policy["spec"]["podSelector"]["matchLabels"][names.LABEL_ROLE]
        for rule in spec["egress"]:
            for peer in rule.get("to", [{}]):
                out |= {(role, _peer(peer), port.get("port", 0)) for port in rule.get("ports", [{}])}
        for rule in spec["ingress"]:
            for peer in rule["from"]:
                into |= {(_peer(peer), role, port.get("port", 0)) for port in rule["ports"]}
    roles = {"manager", "trainer", "rollout"}
    return {
        flow for flow in out | into if (flow in out or flow[0] not in roles) and (flow in into or flow[1] not in roles)
    }


def _peer(peer: dict[str, Any]) -> str:
    if "ipBlock" in peer:
        return str(peer["ipBlock"]["cidr"])
    place = peer.get("namespaceSelector", {}).get("matchLabels", {}).get(NAMESPACE_LABEL, "")
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    if labels == dict(names.OPERATOR_LABELS):
        return f"operator in {place}"
    return str(labels.get(names.LABEL_ROLE) or place or "anywhere")


def test_the_named_flows_and_no_other() -> None:
    settings = replace(SETTINGS, operator_namespace="polyrl-system", dns_namespace="dns", dns_addresses=("1.2.3.4/32",))
    owner = Owner("job", "ns", "uid", job(manager={"port": 6000}, rollout=ON_GKE), settings)
    asked = {
        (role, dns, port) for role in ("trainer", "rollout") for dns in ("dns", "1.2.3.4/32") for port in (53, 5353)
    }
    assert flows(network_policies(owner)) == asked | {
        ("trainer", "manager", 5001),
        ("rollout", "manager", 5001),
        ("trainer", "manager", 5002),
        ("rollout", "trainer", 5003),
        ("rollout", "rollout", 5005),
        ("operator in polyrl-system", "manager", 6000),
    }


@pytest.mark.parametrize("recipe", [RECIPE, SFT], ids=["rl", "sft"])
def test_pods_that_learn_together_reach_each_other_on_every_tcp_port(recipe: dict[str, Any]) -> None:
    one, two = (Owner("job", "ns", "uid", job(recipe=recipe, trainer=trainer), SETTINGS) for trainer in ({}, TWO_PODS))
    assert flows(network_policies(two)) - flows(network_policies(one)) == {("trainer", "trainer", 0)}
    rules = [
        rule for policy in network_policies(two) for part in ("ingress", "egress") for rule in policy["spec"][part]
    ]
    assert {"protocol": "TCP"} in [port for rule in rules for port in rule["ports"]], "and no UDP"


def test_rollouts_reach_each_other_only_to_exchange_weights() -> None:
    for choice, opened in (("Auto", True), ("Always", True), ("Never", False)):
        one = Owner("job", "ns", "uid", job(rollout={"weightExchange": choice}), SETTINGS)
        between = {flow for flow in flows(network_policies(one)) if flow[:2] == ("rollout", "rollout")}
        assert between == ({("rollout", "rollout", names.EXCHANGE_PORT)} if opened else set()), choice
        container = rollout_pod(one, 7, Pool.SPOT)["spec"]["containers"][0]
        ports = [port["containerPort"] for port in container.get("ports", [])]
        assert ports == ([names.EXCHANGE_PORT] if opened else []), choice
        argv, least = container["command"], EXCHANGE_LEAST_BYTES if choice == "Auto" else 0
        asked = ["--exchange-bind", "*", "--exchange-port", str(names.EXCHANGE_PORT), "--exchange-least", str(least)]
        assert (argv[-6:] == asked) is opened, choice
        assert ("--exchange-bind" in argv) is opened, choice


def test_the_transfer_engines_ports_are_open_from_rollouts_to_their_trainer_and_only_where_it_is_wanted() -> None:
    lent = {"protocol": "TCP", "port": 5100, "endPort": 5163}
    for chosen in ({}, {"mooncake": {"clearText": "Accepted"}}):
        one = Owner("job", "ns", "uid", job(rollout=chosen), SETTINGS)
        found = {
            (policy["metadata"]["name"], part, *(key for key in rule if key != "ports"))
            for policy in network_policies(one)
            for part in ("ingress", "egress")
            for rule in policy["spec"][part]
            if lent in rule["ports"]
        }
        assert found == ({("job-trainer", "ingress", "from"), ("job-rollout", "egress", "to")} if chosen else set())


ON_GKE = {"capacity": {"preset": "GKE"}}
PUBLIC_HTTPS = {("trainer", "0.0.0.0/0", 443), ("trainer", "::/0", 443)}
PUBLIC_ROWS: list[tuple[str, dict[str, Any], str, bool]] = [
    ("a folder", {}, "Auto", False),
    ("a Hub's model", {"model": {"path": "owner/name"}}, "Auto", True),
    ("a Hub's model, from a mirror", {"model": {"path": "owner/name"}}, "Never", False),
    ("rows of a Hub", {"data": {"rl": [{"path": "hf://datasets/a/b/c.jsonl"}], "sft": [{"path": "a"}]}}, "Auto", True),
    ("Weights & Biases", {"logging": {"wandb": {}}}, "Auto", True),
    ("Weights & Biases, offline", {"logging": {"wandb": {"mode": "offline"}}}, "Auto", False),
    ("MLflow", {"logging": {"mlflow": {}}}, "Auto", False),
    ("a judge", {}, "Always", True),
]


@pytest.mark.parametrize(
    ("recipe", "choice", "opened"), [row[1:] for row in PUBLIC_ROWS], ids=[row[0] for row in PUBLIC_ROWS]
)
@pytest.mark.parametrize("mode", ["rl", "sft"])
def test_only_a_trainer_that_needs_it_reaches_the_internet(
    recipe: dict[str, Any], choice: str, opened: bool, mode: str
) -> None:
    changed = {**RECIPE, **recipe} if mode == "rl" else {**SFT, **recipe}
    owner = Owner("job", "ns", "uid", job(recipe=changed, networkPolicy={"publicHttps": choice}), SETTINGS)
    outside = {flow for flow in flows(network_policies(owner)) if flow[1][0] in "0123456789:"}
    assert outside == (PUBLIC_HTTPS if opened else set())


def test_public_is_neither_a_cluster_nor_a_machine() -> None:
    blocks = [peer["ipBlock"] for peer in PUBLIC]
    private = [ip_network(one) for block in blocks for one in block["except"]]
    closed = ["10.1.2.3", "172.20.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "127.0.0.1"]
    by_nat64 = [f"64:ff9b::{address}" for address in closed]
    for address in (*closed, "fd00:ec2::254", "fe80::1", *by_nat64, "64:ff9b:1::169.254.169.254"):
        assert any(ip_address(address) in one for one in private if one.version == ip_address(address).version), address
    hub = ip_address("64:ff9b::8.8.8.8")
    assert not any(hub in one for one in private if one.version == hub.version), "a Hub in a cluster of IPv6 alone"


def test_the_metadata_service_only_where_a_job_asks_for_it() -> None:
    hashes = set()
    for asked in (False, True):
        rollout = {"capacity": {"preset": "GKE", "metadataService": asked}}
        one = Owner("job", "ns", "uid", job(rollout=rollout), SETTINGS)
        opened = {flow for flow in flows(network_policies(one)) if flow[1] == METADATA["ipBlock"]["cidr"]}
        assert opened == ({("rollout", "169.254.169.254/32", 80)} if asked else set())
        read = PolyRLJob.model_validate_json(config_map(one)["data"]["job.json"])
        assert read.spec.rollout.capacity.metadata_service is asked
        hashes.add(template_hash(one, Role.ROLLOUT))
    assert len(hashes) == 2, "rollouts that run get it, or lose it"


def test_more_flows_are_asked_for_by_name() -> None:
    extra = [{"cidr": "10.0.0.0/8", "port": 443}, {"cidr": "192.168.0.0/16"}]
    owner = Owner("job", "ns", "uid", job(networkPolicy={"extraEgress": extra}), SETTINGS)
    outside = {flow for flow in flows(network_policies(owner)) if flow[1][0].isdigit()}
    wanted = {("10.0.0.0/8", 443), ("192.168.0.0/16", 0)}
    assert outside == {(role, *to) for role in ("trainer", "rollout") for to in wanted}


def template(**pod: Any) -> dict[str, Any]:
    return {
        "spec": {"containers": [{"name": "x", **pod.pop("container", {})}], **pod},
        "metadata": pod.pop("metadata", {}),
    }


REFUSED = [
    (
        {"trainer": TWO_PODS, "recipe": {**RECIPE, "model": {"path": "owner/name"}}},
        "spec.recipe.model.revision: each of 2 trainer pods fetches owner/name; name a commit of 40 hexadecimal digits",
    ),
    (
        {"trainer": TWO_PODS, "recipe": {**RECIPE, "data": {"rl": [{"path": "hf://datasets/o/n@main/a.jsonl"}]}}},
        "spec.recipe.data.rl[0].path: each of 2 trainer pods fetches hf://datasets/o/n@main/a.jsonl; name a commit of"
        " 40 hexadecimal digits after @",
    ),
    (
        {"trainer": {"template": template(container={"command": ["sh"]})}},
        "spec.trainer.template.spec.containers[0].command",
    ),
    ({"rollout": {"template": template(container={"args": ["x"]})}}, "spec.rollout.template.spec.containers[0].args"),
    (
        {"rollout": {"template": template(metadata={"annotations": {"karpenter.sh/do-not-disrupt": "true"}})}},
        "spec.rollout.template.metadata.annotations: karpenter.sh/do-not-disrupt",
    ),
    (
        {"rollout": {"template": template(tolerations=[{"operator": "Exists"}])}},
        "spec.rollout.template.spec.tolerations",
    ),
    (
        {"rollout": {"template": template(tolerations=[{"key": "karpenter.sh/disrupted", "operator": "Exists"}])}},
        "spec.rollout.template.spec.tolerations",
    ),
]


@pytest.mark.parametrize(("spec", "sentence"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_this_version_cannot_run_is_reported_by_field(spec: dict[str, Any], sentence: str) -> None:
    assert unsupported(job(**spec)).startswith(sentence)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="nothing said"),
        pytest.param({"trainer": TWO_PODS}, id="a trainer of two pods"),
        pytest.param(
            {
                "trainer": TWO_PODS,
                "recipe": {**RECIPE, "data": {"rl": [{"path": f"hf://datasets/o/n@{'c' * 40}/a.jsonl"}]}},
            },
            id="two pods that fetch the same commit",
        ),
        pytest.param(
            {"rollout": {"template": template(tolerations=[{"key": "team", "operator": "Exists"}])}},
            id="a toleration by key",
        ),
        pytest.param(
            {"trainer": {"template": template(metadata={"annotations": {"karpenter.sh/do-not-disrupt": "true"}})}},
            id="the trainer's node may be spared",
        ),
    ],
)
def test_everything_else_runs(spec: dict[str, Any]) -> None:
    assert unsupported(job(**spec)) == ""
