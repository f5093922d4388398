"""Whether a job, as it is written now, is taken on: understood, supported, unchanged where it must be, and admitted.

The API server's own verdict on the pods comes from a dry run, asked for once per content of the templates. A quota that
is used up is no fault of the template: such a job is accepted and waits for room.
Refuses to hold: rules that CEL checks at admission. Read next: `lifecycle`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.actions import DryRun, Object
from polyrl.cluster.fleet.pools import POOLS
from polyrl.cluster.observation.context import Look
from polyrl.cluster.resources.checks import unsupported
from polyrl.cluster.resources.hashes import hash_of
from polyrl.cluster.resources.manager import manager_pod
from polyrl.cluster.resources.rollout import rollout_pod
from polyrl.cluster.resources.trainer import trainer_job
from polyrl.cluster.state import Memory
from polyrl.manifest.rollout import CapacityPolicy
from polyrl.sample import Pool
from polyrl.worker import Role

ASK_AGAIN_S: Final = 60.0
"""What refused a pod, a webhook or a policy, is mended by people."""

QUOTA: Final = "exceeded quota"
"""In the API server's words when a ResourceQuota is used up."""

DRY_ORDINAL: Final = 0
"""No pod that is meant has this number."""


@dataclass(frozen=True)
class Acceptance:
    """The condition Accepted, and what it allows."""

    accepted: bool | None
    """None: not known yet."""
    reason: str
    message: str
    makes_pods: bool
    """True when new pods may be asked for."""
    ask: DryRun | None = None
    memory: Memory | None = None
    """Changed by this look; None: as it was."""
    due: float | None = None


def acceptance(look: Look) -> Acceptance:
    """Of the job as it is written now."""
    refused = unsupported(look.job)
    if refused:
        return Acceptance(False, "Unsupported", refused, makes_pods=False)
    trainer = look.facts.trainer
    if trainer is not None and not trainer.suspended and trainer.template_hash != look.written.templates[Role.TRAINER]:
        said = "spec.trainer and spec.recipe: the trainer runs on as it began; suspend the job to change them"
        if trainer.complete_at is None and trainer.failed_at is None:
            return Acceptance(False, "ImmutableFieldChanged", said, makes_pods=True)
    return _admitted(look)


def _admitted(look: Look) -> Acceptance:
    written = hash_of(list(look.written.templates.values()))
    answer = look.facts.dry_run
    if look.memory.accepted == written or _accepted_before(look):
        return _yes(look, written, "")
    if answer is None:
        ask = DryRun(_probes(look), look.facts.generation)
        asked = replace(look.memory, asked_at=look.now)
        return Acceptance(None, "Checking", "the API server is asked whether it takes these pods", False, ask, asked)
    if not answer or QUOTA in answer:
        return _yes(look, written, answer)
    asked_at = look.memory.asked_at if look.memory.asked_at is not None else look.now
    due = asked_at + ASK_AGAIN_S
    again = look.now >= due
    repeated = DryRun(_probes(look), look.facts.generation) if again else None
    memory = replace(look.memory, asked_at=look.now if again else asked_at)
    return Acceptance(
        False, "InvalidPodTemplate", answer, False, repeated, memory, look.now + ASK_AGAIN_S if again else due
    )


def _accepted_before(look: Look) -> bool:
    """An operator that starts anew does not ask again for what its predecessor was told."""
    return any(
        known.type == "Accepted" and known.status == "True" and known.observed_generation == look.facts.generation
        for known in look.status.conditions
    )


def _yes(look: Look, written: str, warning: str) -> Acceptance:
    message = f"the job is understood, but for now: {warning}" if warning else "the job is understood and its pods fit"
    memory = replace(look.memory, accepted=written, asked_at=None)
    return Acceptance(True, "Valid", message, makes_pods=True, memory=memory)


def _probes(look: Look) -> tuple[Object, ...]:
    """A pod of each kind that this job may ask for."""
    owner, settings = look.owner, look.settings
    job = trainer_job(owner, settings)
    template = job["spec"]["template"]
    metadata = template["metadata"] | {key: job["metadata"][key] for key in ("name", "namespace", "ownerReferences")}
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}]
    if look.wants_manager:
        pods.append(manager_pod(owner, DRY_ORDINAL, settings))
    if look.wants_rollouts and look.spec.rollout.max_replicas > 0:
        pods += [rollout_pod(owner, DRY_ORDINAL, pool, settings) for pool in _pools(look)]
    return (job, *pods)


def _pools(look: Look) -> list[Pool]:
    capacity = look.spec.rollout.capacity
    dear = capacity.base_on_demand > 0 or capacity.fallback.enabled
    wanted = {Pool.SPOT: capacity.policy is not CapacityPolicy.ON_DEMAND, Pool.ON_DEMAND: dear}
    wanted[Pool.ON_DEMAND] |= capacity.policy is CapacityPolicy.ON_DEMAND
    return [pool for pool in POOLS if wanted[pool]]
