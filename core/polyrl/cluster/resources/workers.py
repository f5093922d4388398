"""The pods of the manager and of rollouts, and the trainer's Job.

The manager is small, on-demand, started again in place, its journal on a volume. A rollout is one agent with its
engine, never restarted in place; a replacement is another pod. The trainer is an Indexed Job on reserved machines, its
engines as processes of its own container, since a device plugin lends a GPU to one container only; checkpoints are on a
volume. How its pod ended decides what follows, in this order:

DisruptionTarget           its machine was taken: replaced, not counted
exit 143                   it was asked to leave and saved: replaced, not counted
`failurePolicy.rules`      the first that matches
exit 1, 2                  it gave its reason and would end so again: the Job fails at once
exit 78                    the same, and the PolyRLJob waits for an edit with which it goes on from what is saved
anything else              counts towards backoffLimit: 75 when it waited in vain, 137 when it was killed, ...

Of several pods one lost rank ends all: the pod that is at fault, or the first one in its place, ends with a code that
counts, and all others with 143, so that the group is started again together and that counts once
(`polyrl_trainer.backends.fsdp.pods`).
"""

from __future__ import annotations

from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources import pod, sources
from polyrl.cluster.resources.owner import Owner, with_content_hash
from polyrl.cluster.resources.placement import manager_placement, rollout_placement, trainer_placement
from polyrl.cluster.resources.template import Fields, container_resources, merged_resources
from polyrl.control import HEALTH_PATH
from polyrl.manifest.cluster import GPU_RESOURCE, FailurePolicy
from polyrl.manifest.engine_args import gpus_per_engine
from polyrl.manifest.job import JobSpec
from polyrl.manifest.rules.template_gpus import reserved_engine_counts
from polyrl.sample import Pool
from polyrl.worker import (
    ENGINE_SLOT,
    ENGINES_MODULE,
    EXPLAINED_EXITS,
    HANDED_OVER_EXIT,
    Role,
    Worker,
    exchanges_weights,
)

MANAGER_RESOURCES: Final[Fields] = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
"""The manager's benchmark peaks at 86 to 190 MB, and at 513 MB with 8,192 samples of 4,000 tokens."""

START_SECONDS: Final = 120
"""Longest replay of a journal before the kubelet gives the container up."""
ALIVE_SECONDS: Final = 60
"""A manager that has not answered for so long is stuck, and a fresh one goes on from the journal."""
READY_PERIOD_SECONDS: Final = 2
ALIVE_PERIOD_SECONDS: Final = 10


def manager_pod(owner: Owner, ordinal: int) -> Object:
    """The pod `J-manager-<ordinal>`. Only for jobs that sample."""
    spec, settings = owner.job.spec, owner.settings
    worker = pod.pod_workers(owner).manager
    if worker is None:
        raise ValueError(f"{owner.name} samples nothing, so it has no manager")
    storage = spec.manager.storage
    volumes = (
        pod.job_volume(owner),
        pod.keys_volume(owner, Role.MANAGER),
        pod.kept_volume("polyrl-journal", names.JOURNAL_DIR, storage, owner, names.manager_service(owner.name)),
        pod.tmp_volume(pod.MANAGER_TMP),
    )
    ours = pod.container(worker, settings.manager_image, settings, volumes)
    named = {"http": spec.manager.port, "agents": names.AGENTS_PORT, "trainer": names.TRAINER_PORT}
    if settings.manager_metrics_port:
        named["metrics"] = settings.manager_metrics_port
    ours["ports"] = [{"name": name, "containerPort": port} for name, port in named.items()]
    ours |= {"resources": MANAGER_RESOURCES, **_probes()}
    parts = pod.PodParts(
        role=Role.MANAGER,
        container=ours,
        volumes=volumes,
        placement=manager_placement(spec),
        grace_s=int(worker.grace_s) + 2,
        restart_policy="Always",
        annotations=pod.KEPT,
        priority_class=settings.trainer_priority_class,
    )
    return pod.bare_pod(owner, names.pod_name(owner.name, Role.MANAGER, ordinal), parts, spec.manager.template)


def _probes() -> Fields:
    asked = {"httpGet": {"path": HEALTH_PATH, "port": "http", "scheme": "HTTPS"}, "timeoutSeconds": 5}
    often, rarely = {"periodSeconds": READY_PERIOD_SECONDS}, {"periodSeconds": ALIVE_PERIOD_SECONDS}
    return {
        "startupProbe": asked | often | {"failureThreshold": START_SECONDS // READY_PERIOD_SECONDS},
        "readinessProbe": asked | often | {"failureThreshold": 3},
        "livenessProbe": asked | rarely | {"failureThreshold": ALIVE_SECONDS // ALIVE_PERIOD_SECONDS},
    }


ROLLOUT_GRACE_SLACK_S: Final = 5
"""Between the end of a drain and the kill: room to say goodbye and to end the engine."""

ROLLOUT_MEMORY_REQUEST: Final = "1Gi"
"""Enough for a tiny model on the embedded engine; real ones say theirs in the template."""

SPARED_BY_NOBODY: Final = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
"""Else a bare pod keeps its node for ever. Never do-not-disrupt: such a pod dies without its notice."""


def rollout_pod(owner: Owner, ordinal: int, pool: Pool) -> Object:
    """The pod `J-r-<ordinal>`, whose name is its engine's. Only for jobs whose policy samples."""
    spec, settings = owner.job.spec, owner.settings
    name = names.pod_name(owner.name, Role.ROLLOUT, ordinal)
    made_from = pod.pod_workers(owner, pool=pool).rollout
    if made_from is None:
        raise ValueError(f"{owner.name} does not sample, so it has no rollouts")
    scratch = pod.tmp_volume(pod.ENGINE_TMP), pod.memory_volume(container_resources(spec.rollout.template))
    volumes = (pod.job_volume(owner), pod.engine_keys_volume(name), *scratch)
    ours = pod.container(made_from.named(name), settings.rollout_image, settings, volumes)
    if exchanges_weights(spec, in_pods=True):
        ours["ports"] = [{"name": "exchange", "containerPort": names.EXCHANGE_PORT}]
    ours["resources"] = rollout_resources(spec)
    parts = pod.PodParts(
        role=Role.ROLLOUT,
        container=ours,
        volumes=volumes,
        placement=rollout_placement(spec, pool),
        grace_s=spec.rollout.drain_seconds + ROLLOUT_GRACE_SLACK_S,
        restart_policy="Never",
        annotations=SPARED_BY_NOBODY,
        priority_class=settings.rollout_priority_class,
        labels={names.LABEL_POOL: pool.value},
    )
    return pod.bare_pod(owner, name, parts, spec.rollout.template)


def rollout_resources(spec: JobSpec) -> Fields:
    """What our container asks for. An engine that is spread over GPUs asks for them, unless the template names a device
    or a claim of its own; one on a single device leaves that to the template: it may be none, as on a CPU."""
    resources: Fields = {"requests": {"cpu": str(spec.rollout.engine.threads), "memory": ROLLOUT_MEMORY_REQUEST}}
    theirs = container_resources(spec.rollout.template)
    named = {name for part in ("requests", "limits") for name in theirs.get(part, {})}
    each = gpus_per_engine(spec.rollout.engine)
    if each > 1 and not theirs.get("claims") and not any("/" in name for name in named):
        resources["limits"] = {GPU_RESOURCE: str(each)}
    return resources


TRAINER_GRACE_SLACK_S: Final = 10
"""Beyond what the trainer takes to stop and save: its engines end after it."""

TRAINER_RESOURCES: Final[Fields] = {"requests": {"cpu": "1", "memory": "2Gi"}}
"""Enough for a tiny model; real ones say theirs, with their devices, in the template."""

WITH_ENGINE_RESOURCES: Final[Fields] = {"requests": {"cpu": "1100m", "memory": "3Gi"}}
"""The same with reserved engines, which work while the learner waits and so need no cores of their own."""


def trainer_job(owner: Owner) -> Object:
    """The Indexed Job `J-trainer`."""
    spec, template = owner.job.spec, _trainer_template(owner)
    metadata = owner.metadata(names.trainer_name(owner.name), Role.TRAINER)
    metadata["labels"][names.LABEL_TEMPLATE] = template["metadata"]["labels"][names.LABEL_TEMPLATE]
    job_spec = {
        "completionMode": "Indexed",
        "completions": spec.trainer.replicas,
        "parallelism": spec.trainer.replicas,
        "backoffLimit": spec.backoff_limit,
        # A twin beside one that still ends would write the same checkpoints.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": failure_rules(spec.failure_policy)},
        "suspend": spec.suspend,
        "template": template,
    }
    return with_content_hash({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_spec})


def _trainer_template(owner: Owner) -> Fields:
    spec, settings = owner.job.spec, owner.settings
    their_resources = container_resources(spec.trainer.template)
    workers = pod.pod_workers(owner, pod.whole_cpus(merged_resources(their_resources, TRAINER_RESOURCES)))
    run = pod.kept_volume("polyrl-run", names.RUN_DIR, spec.trainer.storage, owner, names.trainer_name(owner.name))
    scratch = pod.tmp_volume(pod.TRAINER_TMP), pod.memory_volume(their_resources)
    several = spec.trainer.replicas > 1
    keys = () if workers.manager is None and not several else (pod.keys_volume(owner, Role.TRAINER),)
    code = pod.code_volume(spec.recipe.code)
    read = (pod.job_volume(owner), *scratch[:1], *(() if code is None else (code,)))
    read += sources.source_volumes(spec.recipe)
    volumes = (*read, *scratch[1:], *keys, run)
    if workers.reserved is not None:
        volumes += (pod.keys_volume(owner, Role.RESERVED),)
    ours = pod.container(workers.trainer, settings.trainer_image, settings, volumes)
    given = sources.source_environment(spec.recipe)
    ours["env"] = [one for one in ours["env"] if one["name"] not in given]
    ours["env"] += [{"name": name, "value": value} for name, value in given.items()]
    ours["env"].append(pod.from_field(pod.ADVERTISE_ENV, "status.podIP"))
    ours["env"] += [pod.from_field(pod.POD_INDEX_ENV, pod.POD_INDEX)] if several else []
    if (secret := spec.recipe.env_secret) is not None:
        ours["envFrom"] = [{"secretRef": {"name": secret}}]
    named = {"weights": names.PUBLISHER_PORT} | ({"learners": names.LEARNERS_PORT} if several else {})
    ours["ports"] = [{"name": name, "containerPort": port} for name, port in named.items()]
    ours["resources"] = TRAINER_RESOURCES
    if workers.reserved is not None:
        ours["env"].insert(0, pod.from_field(pod.POD_NAME_ENV, "metadata.name"))
        ours["command"] = _with_engines(spec, workers.trainer, workers.reserved)
        ours["resources"] = WITH_ENGINE_RESOURCES
    reports = workers.manager is not None
    read += keys if reports else ()
    parts = pod.PodParts(
        role=Role.TRAINER,
        container=ours,
        volumes=volumes,
        placement=trainer_placement(spec),
        grace_s=int(workers.trainer.grace_s) + TRAINER_GRACE_SLACK_S,
        restart_policy="Never",
        annotations=pod.KEPT,
        priority_class=settings.trainer_priority_class,
        subdomain=names.trainer_name(owner.name),
        before=sources.fetch_containers(spec.recipe, settings.trainer_image, settings, volumes=read, reports=reports),
    )
    return pod.pod_template(owner, parts, spec.trainer.template)


def _with_engines(spec: JobSpec, trainer: Worker, template: Worker) -> list[str]:
    """The trainer's command with one agent and engine for each of its GPUs, or group of GPUs that an engine lies on."""
    agent = template.named(f"$({pod.POD_NAME_ENV}).{ENGINE_SLOT}")
    engines, gpus = reserved_engine_counts(spec)
    counts = ("--engines", str(engines), "--gpus-each", str(gpus), "--threads", str(spec.rollout.engine.threads))
    return [pod.PYTHON, "-m", ENGINES_MODULE, *counts, "--", *agent.argv, "--", *trainer.argv]


def failure_rules(policy: FailurePolicy) -> list[Fields]:
    """Rules in order; the first that matches decides, and without a match the end counts."""
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        _on_exit("Ignore", HANDED_OVER_EXIT),
        *(rule.model_dump(mode="json", by_alias=True, exclude_none=True) for rule in policy.rules),
        _on_exit("FailJob", *EXPLAINED_EXITS),
    ]


def _on_exit(action: str, *codes: int) -> Fields:
    matched = {"containerName": Role.TRAINER.value, "operator": "In", "values": sorted(codes)}
    return {"action": action, "onExitCodes": matched}
