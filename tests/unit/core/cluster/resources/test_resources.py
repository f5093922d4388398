"""A job's children: what every pod must be whatever a user wrote, and who sees, reaches and may do what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from polyrl.cluster import names
from polyrl.cluster.resources.fixed import fixed_children, manager_hosts
from polyrl.cluster.resources.owner import Owner, Settings, content_hash, template_hash
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.control import parse_endpoints
from polyrl.manifest.base import CLUSTER_ONLY_KEY, ManifestModel
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.rollout import RolloutSpec
from polyrl.manifest.spec import TrainerSpec
from polyrl.sample import Pool
from polyrl.worker import Role, RunLocation, workers_of

SETTINGS = Settings("registry/manager:1", "registry/trainer:1", rollout_image="registry/rollout:1")
NAME = "a" * 46
"""The longest that a job may have."""
RECIPE = {
    "mode": "rl",
    "model": {"path": "model"},
    "data": {"rl": [{"path": "rl.jsonl"}]},
    "reward": {"function": "reward:score"},
    "algorithm": {"steps": 1},
}


def owner(recipe: dict[str, Any] | None = None, **spec: Any) -> Owner:
    manifest = {"apiVersion": "polyrl.dev/v1alpha1", "kind": "PolyRLJob", "metadata": {"name": NAME}}
    return Owner(
        NAME,
        "ns",
        "uid",
        PolyRLJob.model_validate({**manifest, "spec": {"recipe": {**RECIPE, **(recipe or {})}, **spec}}),
        SETTINGS,
    )


def template(container: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None, **pod: Any) -> dict:
    first = {"name": "theirs", **(container or {})}
    return {"metadata": metadata or {}, "spec": {"containers": [first, *pod.pop("sidecars", [])], **pod}}


def pods(one: Owner) -> dict[str, dict[str, Any]]:
    """Every pod that there can be: metadata and spec by role, rollouts by pool."""
    return {
        "manager": manager_pod(one, 1),
        "trainer": trainer_job(one)["spec"]["template"],
        **{pool.value: rollout_pod(one, 7, pool) for pool in (Pool.SPOT, Pool.ON_DEMAND)},
    }


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod["spec"]["containers"]
    yield from pod["spec"].get("initContainers", [])


def offences(pod: dict[str, Any]) -> list[str]:
    """What Pod Security `restricted` (v1.36) has against a pod."""
    spec, found = pod["spec"], []
    whole = spec["securityContext"]
    if whole.get("runAsNonRoot") is not True or whole.get("runAsUser") == 0:
        found.append("runs as root")
    if whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("seccomp")
    found += [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for one in containers(pod):
        own = one.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            found.append(f"{one['name']} may gain privileges")
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            found.append(f"{one['name']} keeps capabilities")
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "ephemeral", "projected", "downwardAPI"}
    found += [one["name"] for one in spec["volumes"] if not (one.keys() - {"name"}) <= allowed]
    return found


TEMPLATES = st.fixed_dictionaries(
    {
        "container": st.fixed_dictionaries(
            {},
            optional={
                "resources": st.sampled_from([{"limits": {"cpu": "250m"}}, {"limits": {"nvidia.com/gpu": 1}}]),
                "env": st.just([{"name": "HOME", "value": "/home"}, {"name": "X", "value": "y"}]),
                "volumeMounts": st.just([{"name": "disk", "mountPath": "/dev/shm"}]),
                "image": st.just("their/image"),
            },
        ),
        "sidecars": st.lists(st.just({"name": "logs", "image": "logs:1"}), max_size=1),
        "metadata": st.sampled_from([{}, {"labels": {names.LABEL_JOB: "other", "team": "blue"}}]),
        "volumes": st.just([{"name": "disk", "emptyDir": {}}]),
    },
    optional={
        "tolerations": st.just([{"key": "team", "operator": "Exists"}]),
        "initContainers": st.just([{"name": "fetch", "image": "fetch:1"}]),
        "terminationGracePeriodSeconds": st.just(1),
        "restartPolicy": st.just("OnFailure"),
        "nodeSelector": st.just({"zone": "a"}),
    },
)


@given(TEMPLATES, st.sampled_from(["None", "Karpenter", "GKE", "AKS", "EKSManaged"]), st.booleans())
def test_whatever_a_user_writes_our_pods_stay_ours(drawn: dict[str, Any], preset: str, reserved: bool) -> None:
    made = template(**drawn)
    one = owner(
        trainer={"template": made, "reservedEngine": reserved},
        manager={"template": made},
        rollout={"template": made, "capacity": {"preset": preset}, "drainSeconds": 30},
    )
    for role, pod in pods(one).items():
        assert offences(pod) == [], role
        spec = pod["spec"]
        assert pod["metadata"]["labels"][names.LABEL_JOB] == NAME
        assert pod["metadata"]["labels"][names.LABEL_MANAGED_BY] == names.MANAGED_BY
        assert spec["automountServiceAccountToken"] is False
        assert spec["restartPolicy"] == ("Always" if role == "manager" else "Never")
        assert not [one for one in spec["tolerations"] if one.get("key") in (None, "karpenter.sh/disrupted")]
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(volumes) == len(set(volumes))
        for container in containers(pod):
            mounts = container.get("volumeMounts", [])
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
            assert {mount["name"] for mount in mounts} <= set(volumes)
            variables = [variable["name"] for variable in container.get("env", [])]
            assert len(variables) == len(set(variables))
        first = spec["containers"][0]
        assert first["command"][:2] == ["python", "-m"]
        assert first["securityContext"]["readOnlyRootFilesystem"] is True
        assert first["image"] == drawn["container"].get("image", first["image"])
        assert spec["containers"] == [first], "a pod ends when ours does, and not when all do"
        beside = [one["name"] for one in spec.get("initContainers", []) if one.get("restartPolicy") == "Always"]
        assert beside == [one["name"] for one in drawn["sidecars"]]


def test_a_pods_process_is_the_one_description_of_what_runs() -> None:
    """The flags of a laptop's worker and of a pod's differ only in where things are."""
    one = owner(rollout={"engine": {"threads": 3}})
    local = workers_of(one.job.spec, RunLocation("/run", "/manifest", python="python", run_epoch=1, cpus=8))
    assert local.manager is not None
    assert local.rollout is not None
    for role, worker in (("manager", local.manager), ("trainer", local.trainer), ("spot", local.rollout)):
        command = commands(pods(one)[role]["spec"]["containers"][0])[-1]
        ours, theirs = ({part for part in argv if part.startswith("--")} for argv in (command, worker.argv))
        assert theirs - ours <= {"--endpoints"}, role
        assert command[:3] == list(worker.argv[:3])


def test_variables_of_user_code_reach_the_trainer_alone() -> None:
    one = owner(recipe={"env": [{"name": "JUDGE", "value": "large"}, {"name": "JUDGE_TOKEN"}], "envSecret": "judge"})
    for role, pod in pods(one).items():
        for container in containers(pod):
            held = container["name"] == "trainer"
            assert ({"name": "JUDGE", "value": "large"} in container["env"]) is held, role
            assert container.get("envFrom", []) == ([{"secretRef": {"name": "judge"}}] if held else []), role
            assert "JUDGE_TOKEN" not in [variable["name"] for variable in container["env"]]


def test_the_name_of_a_rollouts_engine_is_its_pods_and_it_knows_its_pool() -> None:
    for pool in (Pool.SPOT, Pool.ON_DEMAND):
        pod = rollout_pod(owner(), 7, pool)
        assert pod["metadata"]["name"] == f"{NAME}-r-7"
        command = pod["spec"]["containers"][0]["command"]
        assert command[command.index("--engine-name") + 1] == f"{NAME}-r-7"
        assert command[command.index("--pool") + 1] == pool.value == pod["metadata"]["labels"][names.LABEL_POOL]


def secret_files(pod: dict[str, Any], container: dict[str, Any]) -> set[str]:
    """Files of the Secret that a container can read."""
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounted = [volumes[mount["name"]] for mount in container["volumeMounts"]]
    return {item["key"] for volume in mounted if "secret" in volume for item in volume["secret"]["items"]}


def test_each_container_sees_only_its_own_keys() -> None:
    made = pods(owner())
    seen = {role: secret_files(pod, pod["spec"]["containers"][0]) for role, pod in made.items()}
    assert seen == {
        "manager": {"manager.key", "ca.crt", "tls.crt", "tls.key"},
        "trainer": {"trainer.key", "agent.key"},
        "spot": {"agent.key"},
        "on-demand": {"agent.key"},
    }
    for pod in made.values():
        assert all(volume["secret"]["defaultMode"] == 0o440 for volume in pod["spec"]["volumes"] if "secret" in volume)


def test_a_rollout_has_its_drain_and_five_seconds_and_leaves_a_dead_node_soon() -> None:
    spec = rollout_pod(owner(rollout={"drainSeconds": 40}), 1, Pool.SPOT)["spec"]
    assert spec["terminationGracePeriodSeconds"] == 45
    silent = {one["key"]: one["tolerationSeconds"] for one in spec["tolerations"] if one["effect"] == "NoExecute"}
    assert silent == {"node.kubernetes.io/not-ready": 20, "node.kubernetes.io/unreachable": 20}


def rollout_limits(each: int, kind: str = "sglang", **container: object) -> dict[str, str]:
    template = {"spec": {"containers": [{"name": "rollout", **container}]}}
    spec = rollout_pod(
        owner(rollout={"engine": {"type": kind, "tensorParallel": each}, "template": template}), 1, Pool.SPOT
    )
    found: dict[str, str] = spec["spec"]["containers"][0]["resources"].get("limits", {})
    return found


def test_an_engine_over_several_gpus_asks_for_them() -> None:
    assert rollout_limits(4) == {"nvidia.com/gpu": "4"}
    assert rollout_limits(4, resources={"limits": {"memory": "64Gi"}}) == {"memory": "64Gi", "nvidia.com/gpu": "4"}
    assert rollout_limits(4, resources={"limits": {"nvidia.com/gpu": 8}}) == {"nvidia.com/gpu": 8}
    assert rollout_limits(4, resources={"limits": {"amd.com/gpu": 4}}) == {"amd.com/gpu": 4}
    assert rollout_limits(4, resources={"claims": [{"name": "gpu"}]}) == {}
    assert rollout_limits(1) == {}, "which may run on a CPU"


def test_autoscalers_may_take_rollouts_and_nothing_else() -> None:
    evict, disrupt = "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"
    message = {role: pod["metadata"]["annotations"] for role, pod in pods(owner()).items()}
    assert [message[role].get(evict) for role in ("manager", "trainer", "spot", "on-demand")] == ["false"] * 2 + [
        "true"
    ] * 2
    assert [message[role].get(disrupt) for role in ("manager", "trainer", "spot", "on-demand")] == ["true"] * 2 + [
        None
    ] * 2


def test_the_trainer_has_its_grace_and_knows_it() -> None:
    spec = trainer_job(owner(trainer={"graceSeconds": 90}))["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 100, "and room for its engines to end"
    command = spec["containers"][0]["command"]
    assert command[command.index("--grace") + 1] == "85"


def test_the_trainers_ends() -> None:
    user_rule = {"action": "Count", "onExitCodes": {"operator": "In", "values": [1]}}
    spec = trainer_job(owner(backoffLimit=5, failurePolicy={"rules": [user_rule]}))["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("Ignore", None),
        ("Ignore", [143]),
        ("Count", [1]),
        ("FailJob", [1, 2, 78]),
    ]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {rule["onExitCodes"]["containerName"] for rule in (rules[1], rules[3])} == {"trainer"}
    assert spec["template"]["spec"]["containers"][0]["name"] == "trainer"
    assert (spec["backoffLimit"], spec["podReplacementPolicy"], spec["completionMode"]) == (5, "Failed", "Indexed")


THREE_PODS = {"replicas": 3, "processesPerPod": 2, "storage": {"accessMode": "ReadWriteMany"}}


def test_a_trainer_of_several_pods_is_one_job_whose_pods_find_the_first_by_name() -> None:
    one = owner(trainer=THREE_PODS)
    job = trainer_job(one)["spec"]
    assert (job["completions"], job["parallelism"], job["podReplacementPolicy"]) == (3, 3, "Failed")
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    learner = commands(container)[-1]
    name = f"{NAME}-trainer"
    assert pod["subdomain"] == name
    assert learner[learner.index("--pod") + 1] == "$(POLYRL_POD_INDEX)"
    assert learner[learner.index("--pods-at") + 1] == f"{name}-0.{name}.ns.svc.cluster.local.:5004"
    index = next(entry for entry in container["env"] if entry["name"] == "POLYRL_POD_INDEX")["valueFrom"]["fieldRef"]
    assert index["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    ports = [(port["name"], port["containerPort"]) for port in container["ports"]]
    assert ports == [("weights", 5003), ("learners", 5004)]
    # Each serves its share of the weights, at its own address.
    assert learner[learner.index("--weights-port") + 1] == "5003"
    assert learner[learner.index("--advertise") + 1] == "$(POLYRL_ADVERTISE_HOST)"
    address = next(entry for entry in container["env"] if entry["name"] == "POLYRL_ADVERTISE_HOST")
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    children = {
        (child["kind"], child["metadata"]["name"]): child["spec"] for child in fixed_children(one) if "spec" in child
    }
    assert children["Service", name]["clusterIP"] == "None"
    assert children["Service", name]["publishNotReadyAddresses"], "they meet before they are ready"
    assert children["PodDisruptionBudget", name]["minAvailable"] == 3
    assert children["PersistentVolumeClaim", name]["accessModes"] == ["ReadWriteMany"]


def test_a_trainer_of_one_pod_is_as_it_was() -> None:
    one = owner()
    learner = commands(trainers_container())[-1]
    assert "--pods-at" not in learner
    (claim,) = [
        child
        for child in fixed_children(one)
        if child["metadata"]["name"] == f"{NAME}-trainer" and child["kind"] == "PersistentVolumeClaim"
    ]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "storage" not in json.loads(fixed_children(one)[0]["data"]["job.json"])["spec"]["trainer"]


def test_pods_that_learn_have_keys_also_where_nobody_samples() -> None:
    recipe = {"mode": "sft", "data": {"sft": [{"path": "s.jsonl"}]}, "sft": {"steps": 1}, "reward": None}
    pod = trainer_job(owner(recipe, trainer=THREE_PODS))["spec"]["template"]["spec"]
    assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == [
        f"{NAME}-keys-trainer"
    ]


def test_twenty_rules_are_what_a_job_takes() -> None:
    rule = {"action": "Count", "onExitCodes": {"operator": "In", "values": [9]}}
    spec = trainer_job(owner(failurePolicy={"rules": [rule] * 16}))["spec"]
    assert len(spec["podFailurePolicy"]["rules"]) <= 20


@pytest.mark.parametrize(
    ("code", "path", "source"),
    [
        pytest.param(
            {"configMap": "files"}, "/polyrl/manifest", {"configMap": {"name": "files"}}, id="beside the manifest"
        ),
        pytest.param(
            {"path": "code", "configMap": "files"},
            "/polyrl/manifest/code",
            {"configMap": {"name": "files"}},
            id="in a folder of it",
        ),
        pytest.param(
            {"path": "/code", "volumeClaim": "disk"},
            "/code",
            {"persistentVolumeClaim": {"claimName": "disk", "readOnly": True}},
            id="on a volume",
        ),
        pytest.param({"path": "/app"}, None, None, id="in the image"),
    ],
)
def test_where_the_users_files_are(code: dict[str, str], path: str | None, source: dict | None) -> None:
    spec = trainer_job(owner({"code": code}))["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["name"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    if path is None:
        assert "polyrl-code" not in volumes
        return
    assert mounts["polyrl-code"] == {"name": "polyrl-code", "mountPath": path, "readOnly": True}
    assert volumes["polyrl-code"] == {"name": "polyrl-code", **(source or {})}


def scratch(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, Any]:
    """Name and bound of each emptyDir of a container, by where it is mounted."""
    volumes = {one["name"]: one["emptyDir"] for one in pod["spec"]["volumes"] if "emptyDir" in one}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"] if one["name"] in volumes}
    return {path: (name, volumes[name].get("sizeLimit")) for path, name in mounts.items()}


def trainers_container(**fields: Any) -> dict[str, Any]:
    pod = trainer_job(owner(**fields))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "initContainers" not in pod, "a device plugin lends a GPU to one container only"
    return dict(container)


def commands(container: dict[str, Any]) -> list[list[str]]:
    """What runs the container's processes, the agents' command and the trainer's."""
    parts: list[list[str]] = [[]]
    for word in container["command"]:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def gpus(number: int) -> dict[str, Any]:
    return {"template": template({"resources": {"limits": {"nvidia.com/gpu": number}}})}


@pytest.mark.parametrize(
    ("trainer", "each", "engines", "gpus_each"),
    [
        pytest.param({}, 1, "1", "0", id="no device is named, as on a CPU or by a claim"),
        pytest.param(gpus(1), 1, "1", "1", id="one GPU"),
        pytest.param(gpus(4), 1, "4", "1", id="one engine for each GPU"),
        pytest.param(gpus(4), 2, "2", "2", id="or for each group"),
        pytest.param(gpus(1), 2, "1", "0", id="fewer than an engine lies on, which is noted"),
    ],
)
def test_reserved_engines_are_processes_beside_the_trainer_on_its_gpus(
    trainer: dict[str, Any], each: int, engines: str, gpus_each: str
) -> None:
    rollout = {"engine": {"type": "sglang", "tensorParallel": each, "threads": 3}}
    container = trainers_container(trainer=trainer, rollout=rollout)
    program, agent, learner = commands(container)
    counts = ["--engines", engines, "--gpus-each", gpus_each, "--threads", "3"]
    assert program == ["python", "-m", "polyrl_trainer.container", *counts]
    assert agent[:3] == ["python", "-m", "polyrl_rollout.agent"]
    assert agent[agent.index("--keys") + 1] == "/polyrl/engine-keys/agent.key", "never the trainer's"
    assert agent[agent.index("--engine-name") + 1] == "$(POLYRL_POD_NAME).{engine}"
    assert agent[agent.index("--pool") + 1] == "reserved"
    assert learner[:3] == ["python", "-m", "polyrl_trainer"]
    assert learner[learner.index("--keys") + 1] == "/polyrl/keys/trainer.key"
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts["/polyrl/engine-keys"] != mounts["/polyrl/keys"]
    assert container["resources"]["requests"] == {"cpu": "1100m", "memory": "3Gi"}


def test_without_a_reserved_engine_the_container_is_the_trainer_alone() -> None:
    container = trainers_container(trainer={"reservedEngine": False})
    assert container["command"][:3] == ["python", "-m", "polyrl_trainer"]
    assert "/polyrl/engine-keys" not in [one["mountPath"] for one in container["volumeMounts"]]
    assert container["resources"]["requests"] == {"cpu": "1", "memory": "2Gi"}


def test_the_trainer_in_a_pod_learns_in_as_many_processes_as_the_manifest_says() -> None:
    fsdp = {"cpuOffload": "all", "dpReplicate": 2}
    asked = {"processesPerPod": 4, "contextParallel": 2, "reservedMemFraction": 0.2, "fsdp": fsdp}
    data = fixed_children(owner(trainer=asked))[0]["data"]["job.json"]
    trainer = PolyRLJob.model_validate_json(data).spec.trainer
    assert (trainer.processes_per_pod, trainer.context_parallel, trainer.reserved_mem_fraction) == (4, 2, 0.2)
    assert (trainer.fsdp.cpu_offload, trainer.fsdp.dp_replicate) == ("all", 2)
    plain = fixed_children(owner(trainer={"processesPerPod": 4}))[0]["data"]["job.json"]
    assert "fsdp" not in plain, "or every job would start anew with the operator that knows the field"


def test_the_trainer_in_a_pod_learns_in_a_process_for_each_gpu_that_its_template_asks_for() -> None:
    gpus = template({"resources": {"limits": {"nvidia.com/gpu": 4}}})
    data = fixed_children(owner(trainer={"template": gpus}))[0]["data"]["job.json"]
    assert PolyRLJob.model_validate_json(data).spec.trainer.processes_per_pod == 4


def test_what_a_pod_writes_is_bounded() -> None:
    sized = {"resources": {"requests": {"memory": "200Gi"}}}
    made = pods(owner(trainer={"template": template(sized)}))
    trainer = made["trainer"]["spec"]["containers"][0]
    assert scratch(made["trainer"], trainer) == {"/tmp": ("polyrl-tmp", "64Gi"), "/dev/shm": ("polyrl-shm", "200Gi")}
    assert scratch(made["spot"], made["spot"]["spec"]["containers"][0]) == {
        "/tmp": ("polyrl-tmp", "16Gi"),
        "/dev/shm": ("polyrl-shm", "32Gi"),
    }
    assert scratch(made["manager"], made["manager"]["spec"]["containers"][0]) == {"/tmp": ("polyrl-tmp", "256Mi")}


def test_a_template_that_mounts_its_own_volume_has_that_one() -> None:
    mount = {"volumeMounts": [{"name": "large", "mountPath": "/dev/shm"}]}
    large = {"name": "large", "emptyDir": {"medium": "Memory", "sizeLimit": "500Gi"}}
    pod = pods(owner(rollout={"template": template(mount, volumes=[large])}))["spot"]
    assert scratch(pod, pod["spec"]["containers"][0])["/dev/shm"] == ("large", "500Gi")


@pytest.mark.parametrize("role", ["trainer", "manager"])
@pytest.mark.parametrize(
    ("storage", "volume", "made"),
    [
        pytest.param({}, {"persistentVolumeClaim": {"claimName": "?"}}, True, id="a claim is made"),
        pytest.param(
            {"claimName": "disk"}, {"persistentVolumeClaim": {"claimName": "disk"}}, False, id="the user's own claim"
        ),
        pytest.param({"ephemeral": True, "size": "3Gi"}, {"emptyDir": {"sizeLimit": "3Gi"}}, False, id="nothing"),
    ],
)
def test_what_outlives_its_pod(role: str, storage: dict[str, Any], volume: dict[str, Any], made: bool) -> None:
    one = owner(**{role: {"storage": storage}})
    claim = f"{NAME}-{role}"
    claims = [child["metadata"]["name"] for child in fixed_children(one) if child["kind"] == "PersistentVolumeClaim"]
    assert (claim in claims) is made
    name, pod = {"trainer": "polyrl-run", "manager": "polyrl-journal"}[role], pods(one)[role]
    (found,) = [entry for entry in pod["spec"]["volumes"] if entry["name"] == name]
    expected = json.loads(json.dumps(volume).replace("?", claim))
    assert found == {"name": name, **expected}
    (mount,) = [entry for entry in pod["spec"]["containers"][0]["volumeMounts"] if entry["name"] == name]
    assert ("subPath" in mount) is ("claimName" in storage), "a claim may serve several jobs"


def test_the_manager_reads_leases_that_were_chosen_and_no_default_changes_what_runs() -> None:
    def rollout(**chosen: int) -> Any:
        return json.loads(fixed_children(owner(rollout=chosen))[0]["data"]["job.json"])["spec"]["rollout"]

    assert rollout(leaseSeconds=5, lostAfterSeconds=60).items() >= {"leaseSeconds": 5, "lostAfterSeconds": 60}.items()
    assert not {"leaseSeconds", "lostAfterSeconds"} & rollout(leaseSeconds=3, lostAfterSeconds=15).keys()


BY_FLAGS = {"trainer": {"graceSeconds"}, "rollout": {"weightExchange"}}
"""What a worker's command line tells it."""
OF_THE_OPERATOR = {"minReplicas", "maxReplicas", "template"}
"""Of pods, and of how many there are: no worker acts on it."""


def workers_fields(part: type[ManifestModel]) -> set[str]:
    """Those that mean something off a cluster too."""
    fields = {str(one.alias): one.json_schema_extra for one in part.model_fields.values()}
    return {name for name, extra in fields.items() if CLUSTER_ONLY_KEY not in (extra or {})}


def test_whatever_a_worker_may_read_it_reads_as_the_user_wrote_it() -> None:
    """`reservedSleep`, `weightDeltas` and `mooncake` were left away: pods went by the defaults, without a word."""
    asked = {
        "trainer": {
            **{"processesPerPod": 4, "contextParallel": 2, "reservedMemFraction": 0.4, "reservedSleep": "never"},
            **{"fsdp": {"cpuOffload": "optimizer", "dpReplicate": 2}, "graceSeconds": 60, "replicas": 2},
            **{"storage": {"accessMode": "ReadWriteMany"}, "reservedEngine": True},
        },
        "rollout": {
            **{"leaseSeconds": 9, "lostAfterSeconds": 40, "drainSeconds": 33, "weightDeltas": "Never"},
            **{"weightExchange": "Never", "mooncake": {"clearText": "Accepted", "rdmaDevices": "mlx5_0"}},
            **{"engine": {"tensorParallel": 2, "memFraction": 0.5}},
        },
    }
    data = fixed_children(owner(**asked))[0]["data"]["job.json"]
    written, read = (
        spec.model_dump(mode="json", by_alias=True)
        for spec in (owner(**asked).job.spec, PolyRLJob.model_validate_json(data).spec)
    )
    for part, fields in asked.items():
        for name in fields.keys() - BY_FLAGS[part]:
            assert read[part][name] == written[part][name], f"{part}.{name}"
    assert asked["trainer"].keys() >= workers_fields(TrainerSpec) - OF_THE_OPERATOR
    assert asked["rollout"].keys() >= workers_fields(RolloutSpec) - {*OF_THE_OPERATOR, "replicas"}


def test_workers_read_the_job_again() -> None:
    one = owner(rollout={"drainSeconds": 7, "engine": {"threads": 2}, "capacity": {"preset": "GKE"}})
    data = fixed_children(one)[0]["data"]
    read = PolyRLJob.model_validate_json(data["job.json"]).spec
    assert read.recipe == one.job.spec.recipe
    assert (read.rollout.engine, read.rollout.drain_seconds) == (one.job.spec.rollout.engine, 7)
    assert read.rollout.capacity.preset == "GKE"
    ends = parse_endpoints(data["manager.json"], "manager.json")
    whole = f"{NAME}-manager.ns.svc.cluster.local."
    assert (ends.agents, ends.trainer) == (f"tcp://{whole}:5001", f"tcp://{whole}:5002")
    assert (ends.http, ends.run_epoch) == (f"https://{NAME}-manager:5000", names.EPOCH)


def test_workers_of_older_images_get_no_field_that_nobody_wrote() -> None:
    """They would refuse the default of a later operator's field; a job may pin its images and outlive upgrades."""
    read = json.loads(fixed_children(owner(rollout={"drainSeconds": 7}))[0]["data"]["job.json"])["spec"]
    written = {key: value for key, value in RECIPE.items() if key != "mode"}  # the default
    assert read == {"recipe": written, "trainer": {}, "rollout": {"drainSeconds": 7}}


def test_every_manifest_that_is_right_is_right_for_its_workers() -> None:
    """Rules between fields hold of the part that workers get."""
    for spec in (
        {"rollout": {"maxReplicas": 0}},
        {
            "rollout": {
                "maxReplicas": 4,
                "capacity": {"policy": "SpotPreferred", "baseOnDemand": 2, "fallback": {"enabled": True}},
            }
        },
        {"scaling": {"objective": "Cost"}, "pricing": {"spotPerHour": 1.0, "onDemandPerHour": 2.0}},
        {"trainer": {"reservedEngine": False}},
        {"trainer": THREE_PODS},
        {"faultInjection": [{"atStep": 0, "action": "Kill"}]},
    ):
        PolyRLJob.model_validate_json(fixed_children(owner(**spec))[0]["data"]["job.json"])


SAME_CONFIG = [
    pytest.param({"rollout": {"maxReplicas": 9}}, id="maxReplicas"),
    pytest.param({"suspend": True}, id="suspend"),
    pytest.param({"scaling": {"mode": "Manual"}}, id="scaling"),
]


@pytest.mark.parametrize("change", [*SAME_CONFIG, pytest.param({"rollout": {"template": template()}}, id="a template")])
def test_what_workers_do_not_read_makes_no_new_config_map(change: dict[str, Any]) -> None:
    assert fixed_children(owner())[0] == fixed_children(owner(**change))[0]


@pytest.mark.parametrize("change", SAME_CONFIG)
def test_what_makes_no_other_pods_leaves_their_hash(change: dict[str, Any]) -> None:
    for role in Role:
        assert template_hash(owner(), role) == template_hash(owner(**change), role)


@pytest.mark.parametrize(
    ("change", "roles"),
    [
        pytest.param({"rollout": {"template": template()}}, {Role.ROLLOUT}, id="the rollout's template"),
        pytest.param(
            {"rollout": {"engine": {"threads": 2}}}, {Role.ROLLOUT, Role.TRAINER, Role.RESERVED}, id="the engine"
        ),
        pytest.param({"trainer": {"template": template()}}, {Role.TRAINER, Role.RESERVED}, id="the trainer's template"),
        pytest.param({"trainer": {"processesPerPod": 2}}, {Role.TRAINER, Role.RESERVED}, id="the trainer's processes"),
        pytest.param(
            {"trainer": {"processesPerPod": 2, "contextParallel": 2}},
            {Role.TRAINER, Role.RESERVED},
            id="the trainer's slices",
        ),
        pytest.param(
            {"trainer": {"fsdp": {"cpuOffload": "all"}}}, {Role.TRAINER, Role.RESERVED}, id="where they hold it"
        ),
        pytest.param({"trainer": {"graceSeconds": 60}}, {Role.TRAINER, Role.RESERVED}, id="its grace"),
        pytest.param({"trainer": {"reservedMemFraction": 0.2}}, {Role.TRAINER, Role.RESERVED}, id="its engine's share"),
        pytest.param({"trainer": {"reservedSleep": "always"}}, {Role.TRAINER, Role.RESERVED}, id="its engine's sleep"),
        pytest.param({"rollout": {"weightDeltas": "Never"}}, {Role.TRAINER, Role.RESERVED}, id="what it publishes"),
        pytest.param(
            {"rollout": {"mooncake": {"clearText": "Accepted"}}},
            {Role.TRAINER, Role.RESERVED},
            id="by what it publishes",
        ),
        pytest.param(
            {"failurePolicy": {"rules": [{"action": "Count", "onExitCodes": {"operator": "In", "values": [1]}}]}},
            {Role.TRAINER, Role.RESERVED},
            id="which of its ends count",
        ),
        pytest.param({"manager": {"template": template()}}, {Role.MANAGER}, id="the manager's template"),
        pytest.param({"recipe": {"seed": 2}}, {Role.TRAINER, Role.RESERVED}, id="the recipe"),
    ],
)
def test_a_change_is_seen_where_it_matters(change: dict[str, Any], roles: set[Role]) -> None:
    changed = {role for role in Role if template_hash(owner(), role) != template_hash(owner(**change), role)}
    assert changed == roles


def test_a_default_written_out_is_no_change() -> None:
    spelled = owner(rollout={"engine": {"threads": 1}, "drainSeconds": 20}, trainer={"replicas": 1})
    assert all(template_hash(owner(), role) == template_hash(spelled, role) for role in Role)


def test_objects_know_their_content_and_their_owner() -> None:
    one = owner()
    children = [*fixed_children(one), trainer_job(one), manager_pod(one, 1)]
    for child in children:
        metadata = child["metadata"]
        assert metadata["annotations"][names.ANNOTATION_CONTENT] == content_hash(child)
        assert metadata["ownerReferences"][0]["controller"] is True
        assert len(metadata["name"]) <= 63
    assert len({(child["kind"], child["metadata"]["name"]) for child in children}) == len(children)


def test_a_job_that_samples_nothing_has_no_manager() -> None:
    one = owner({"mode": "sft", "data": {"sft": [{"path": "s.jsonl"}]}, "sft": {"steps": 1}, "reward": None})
    kinds = {(child["kind"], child["metadata"]["name"]) for child in fixed_children(one)}
    assert not {name for _, name in kinds if name.endswith("-manager")}
    job = trainer_job(one)
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][:3] == ["python", "-m", "polyrl_trainer"]
    assert not [volume for volume in pod["volumes"] if "secret" in volume], "nobody to talk to, so nothing to hide"
    for build in (lambda: manager_pod(one, 1), lambda: rollout_pod(one, 1, Pool.SPOT)):
        with pytest.raises(ValueError, match="sample"):
            build()


def test_the_trainers_threads_are_its_own_cores() -> None:
    for resources, threads in (({}, "1"), ({"limits": {"cpu": "2500m"}}, "3"), ({"requests": {"cpu": "4"}}, "4")):
        made = template({"resources": resources})
        pod = trainer_job(owner(trainer={"template": made}, rollout={"engine": {"threads": 3}}))["spec"]["template"]
        env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        assert env["OMP_NUM_THREADS"] == threads


def test_the_certificate_is_for_every_name_of_the_managers_service() -> None:
    assert manager_hosts(owner()) == (
        f"{NAME}-manager",
        f"{NAME}-manager.ns",
        f"{NAME}-manager.ns.svc",
        f"{NAME}-manager.ns.svc.cluster.local",
    )


def test_a_port_for_prometheus_is_open_only_where_the_operator_has_one() -> None:
    for port in (0, 9090):
        one = replace(owner(), settings=replace(SETTINGS, manager_metrics_port=port))
        container = manager_pod(one, 0)["spec"]["containers"][0]
        flags = container["command"] + container.get("args", [])
        assert ("--metrics-port" in flags) is bool(port)
        assert {"name": "metrics", "containerPort": 9090} in container["ports"] or not port
        policy = next(child for child in fixed_children(one) if child["metadata"]["name"].endswith("-manager") and
                      child["kind"] == "NetworkPolicy")  # fmt: skip
        opened = [rule for rule in policy["spec"]["ingress"] if "from" not in rule]
        assert opened == ([{"ports": [{"protocol": "TCP", "port": port}]}] if port else [])


def test_pull_secrets_of_the_operator_reach_every_pod_whose_template_names_none() -> None:
    own = {"template": template(imagePullSecrets=[{"name": "own"}])}
    one = replace(owner(trainer=own), settings=replace(SETTINGS, image_pull_secrets=("a", "b")))
    named = {role: pod["spec"]["imagePullSecrets"] for role, pod in pods(one).items()}
    assert named.pop("trainer") == [{"name": "own"}]
    assert all(secrets == [{"name": "a"}, {"name": "b"}] for secrets in named.values())
    assert all("imagePullSecrets" not in pod["spec"] for pod in pods(owner()).values())
