"""The trainer: an Indexed Job on reserved machines, its engine as a sidecar that ends with it, checkpoints on a volume.

exit 0             the Job is complete
exit 1, 2          it gave its reason and would end so again: the Job fails at once
exit 143           it was asked to leave and saved: replaced, not counted
DisruptionTarget   its machine was taken: replaced, not counted
anything else      counts towards backoffLimit: 75 when it waited in vain, 137 when it was killed, ...
The order is: disruptions, 143, `failurePolicy.rules`, then 1 and 2.
"""

from __future__ import annotations

from typing import Any, Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources import pod
from polyrl.cluster.resources.owner import Owner, Settings, with_content_hash
from polyrl.cluster.resources.placement import trainer_placement
from polyrl.cluster.resources.template import Fields, merged_resources, template_fields
from polyrl.manifest.cluster import FailurePolicy, FailureRule
from polyrl.worker import EXPLAINED_EXITS, HANDED_OVER_EXIT, Role, Worker

GRACE_SLACK_S: Final = 10
"""Beyond what the trainer takes to stop and save: the sidecar ends after it."""

RESOURCES: Final[Fields] = {"requests": {"cpu": "1", "memory": "2Gi"}}
"""Of a tiny model; real ones say theirs, with their devices, in the template."""

RESERVED_RESOURCES: Final[Fields] = {"requests": {"cpu": "100m", "memory": "1Gi"}}
"""The reserved engine works while the learner waits, so it needs no cores of its own."""


def trainer_job(owner: Owner, settings: Settings) -> Object:
    """The Indexed Job `J-trainer`."""
    spec = owner.job.spec
    template = _template(owner, settings)
    metadata = owner.metadata(names.trainer_name(owner.name), Role.TRAINER)
    metadata["labels"][names.LABEL_TEMPLATE] = template["metadata"]["labels"][names.LABEL_TEMPLATE]
    return with_content_hash(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {
                "completionMode": "Indexed",
                "completions": spec.trainer.replicas,
                "parallelism": spec.trainer.replicas,
                "backoffLimit": spec.backoff_limit,
                # A twin beside one that still ends would write the same checkpoints.
                "podReplacementPolicy": "Failed",
                "podFailurePolicy": {"rules": failure_rules(spec.failure_policy)},
                "suspend": spec.suspend,
                "template": template,
            },
        }
    )


def _template(owner: Owner, settings: Settings) -> Fields:
    spec = owner.job.spec
    resources = merged_resources(_their_resources(owner), RESOURCES)
    workers = pod.pod_workers(owner, pod.whole_cpus(resources))
    run = pod.kept_volume("polyrl-run", names.RUN_DIR, spec.trainer.storage, owner, names.trainer_name(owner.name))
    shared = (pod.job_volume(owner), pod.tmp_volume(), pod.memory_volume())
    keys = () if workers.manager is None else (pod.keys_volume(owner, "trainer.key"),)
    code = pod.code_volume(spec.recipe.code)
    volumes = (*shared, *keys, run, *(() if code is None else (code,)))
    ours = pod.container(workers.trainer, settings.trainer_image, settings, volumes)
    ours["env"].append(pod.from_field(pod.ADVERTISE_ENV, "status.podIP"))
    ours |= {"ports": [{"name": "weights", "containerPort": names.PUBLISHER_PORT}], "resources": RESOURCES}
    sidecars, sidecar_volumes = _reserved(owner, workers.reserved, shared, settings)
    parts = pod.PodParts(
        role=Role.TRAINER,
        container=ours,
        volumes=(*volumes, *sidecar_volumes),
        placement=trainer_placement(spec),
        grace_s=int(workers.trainer.grace_s) + GRACE_SLACK_S,
        restart_policy="Never",
        annotations=pod.KEPT,
        priority_class=settings.trainer_priority_class,
        sidecars=sidecars,
        subdomain=names.trainer_name(owner.name),
    )
    return pod.pod_template(owner, parts, spec.trainer.template)


def _reserved(
    owner: Owner, template: Worker | None, shared: tuple[pod.Mounted, ...], settings: Settings
) -> tuple[tuple[Fields, ...], tuple[pod.Mounted, ...]]:
    """The engine on the trainer's devices: a sidecar, because the Job must be complete when the trainer ends. It sees
    the agents' key file and not the trainer's."""
    if template is None:
        return (), ()
    keys = pod.keys_volume(owner, "agent.key", name="polyrl-agent-keys")
    worker = template.named(f"$({pod.POD_NAME_ENV})")
    ours = pod.container(worker, settings.rollout_image, settings, (*shared, keys))
    ours["env"].insert(0, pod.from_field(pod.POD_NAME_ENV, "metadata.name"))
    return (ours | {"restartPolicy": "Always", "resources": RESERVED_RESOURCES},), (keys,)


def _their_resources(owner: Owner) -> Fields:
    _, spec = template_fields(owner.job.spec.trainer.template)
    first: Fields = spec["containers"][0] if spec else {}
    return dict(first.get("resources", {}))


DISRUPTED: Final[Fields] = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}


def failure_rules(policy: FailurePolicy) -> list[Fields]:
    """Rules in order; the first that matches decides, and without a match the end counts."""
    return [
        DISRUPTED,
        _on_exit("Ignore", HANDED_OVER_EXIT),
        *(_rule(rule) for rule in policy.rules),
        _on_exit("FailJob", *EXPLAINED_EXITS),
    ]


def _on_exit(action: str, *codes: int) -> Fields:
    matched = {"containerName": Role.TRAINER.value, "operator": "In", "values": sorted(codes)}
    return {"action": action, "onExitCodes": matched}


def _rule(rule: FailureRule) -> Fields:
    plain: dict[str, Any] = rule.model_dump(mode="json", by_alias=True, exclude_none=True)
    return plain
