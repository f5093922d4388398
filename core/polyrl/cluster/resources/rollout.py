"""A rollout's pod: one agent with its engine, never restarted in place; a replacement is another pod."""

from __future__ import annotations

from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources import pod
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.placement import rollout_placement
from polyrl.cluster.resources.template import Fields
from polyrl.sample import Pool
from polyrl.worker import Role

GRACE_SLACK_S: Final = 5
"""Between the end of a drain and the kill: room to say goodbye and to end the engine."""

MEMORY_REQUEST: Final = "1Gi"
"""Of a tiny model on the embedded engine; real ones say theirs in the template."""

SPARED_BY_NOBODY: Final = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
"""Else a bare pod keeps its node for ever. Never do-not-disrupt: such a pod dies without its notice."""


def rollout_pod(owner: Owner, ordinal: int, pool: Pool, settings: Settings) -> Object:
    """The pod `J-r-<ordinal>`, whose name is its engine's. Only for jobs whose policy samples."""
    spec = owner.job.spec
    name = names.pod_name(owner.name, Role.ROLLOUT, ordinal)
    made_from = pod.pod_workers(owner, pool=pool).rollout
    if made_from is None:
        raise ValueError(f"{owner.name} does not sample, so it has no rollouts")
    worker = made_from.named(name)
    volumes = (pod.job_volume(owner), pod.keys_volume(owner, "agent.key"), pod.tmp_volume(), pod.memory_volume())
    ours = pod.container(worker, settings.rollout_image, settings, volumes)
    ours["resources"] = _resources(spec.rollout.engine.threads)
    parts = pod.PodParts(
        role=Role.ROLLOUT,
        container=ours,
        volumes=volumes,
        placement=rollout_placement(spec, pool),
        grace_s=spec.rollout.drain_seconds + GRACE_SLACK_S,
        restart_policy="Never",
        annotations=SPARED_BY_NOBODY,
        priority_class=settings.rollout_priority_class,
        labels={names.LABEL_POOL: pool.value},
    )
    return pod.bare_pod(owner, name, parts, spec.rollout.template)


def _resources(threads: int) -> Fields:
    return {"requests": {"cpu": str(threads), "memory": MEMORY_REQUEST}}
