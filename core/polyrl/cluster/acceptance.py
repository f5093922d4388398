"""Whether a job, as it is written now, is taken on: understood, supported, unchanged where it must be, and admitted.

The API server's own verdict on the pods comes from a dry run, asked for once per content of the templates. A quota that
is used up is no fault of the template: such a job is accepted and waits for room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.actions import DryRun, Object
from polyrl.cluster.fleet.pools import POOLS
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.resources.checks import unsupported
from polyrl.cluster.resources.manager import manager_pod
from polyrl.cluster.resources.owner import hash_of
from polyrl.cluster.resources.rollout import rollout_pod
from polyrl.cluster.resources.trainer import trainer_job
from polyrl.cluster.state import ReconcileState
from polyrl.manifest.rollout import CapacityPolicy
from polyrl.sample import Pool
from polyrl.worker import Role

DRY_RUN_RETRY_S: Final = 60.0
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
    dry_run: DryRun | None = None
    state: ReconcileState | None = None
    """Changed by this reconcile; None: as it was."""
    due: float | None = None


def acceptance(ctx: ReconcileContext) -> Acceptance:
    """Of the job as it is written now."""
    refused = unsupported(ctx.job)
    if refused:
        return Acceptance(False, "Unsupported", refused, makes_pods=False)
    trainer = ctx.facts.trainer
    if trainer is not None and not trainer.suspended and trainer.template_hash != ctx.hashes.templates[Role.TRAINER]:
        message = "spec.trainer and spec.recipe: the trainer runs on as it began; suspend the job to change them"
        if trainer.complete_at is None and trainer.failed_at is None:
            return Acceptance(False, "ImmutableFieldChanged", message, makes_pods=True)
    return _admitted(ctx)


def _admitted(ctx: ReconcileContext) -> Acceptance:
    written = hash_of(list(ctx.hashes.templates.values()))
    answer = ctx.facts.dry_run
    if ctx.state.accepted == written or _accepted_before(ctx):
        return _yes(ctx, written, "")
    if answer is None:
        dry_run = DryRun(_probes(ctx), ctx.facts.generation)
        asked = replace(ctx.state, dry_run_at=ctx.now)
        return Acceptance(
            None, "Checking", "the API server is asked whether it takes these pods", False, dry_run, asked
        )
    if not answer or QUOTA in answer:
        return _yes(ctx, written, answer)
    dry_run_at = ctx.state.dry_run_at if ctx.state.dry_run_at is not None else ctx.now
    due = dry_run_at + DRY_RUN_RETRY_S
    again = ctx.now >= due
    repeated = DryRun(_probes(ctx), ctx.facts.generation) if again else None
    state = replace(ctx.state, dry_run_at=ctx.now if again else dry_run_at)
    return Acceptance(
        False, "InvalidPodTemplate", answer, False, repeated, state, ctx.now + DRY_RUN_RETRY_S if again else due
    )


def _accepted_before(ctx: ReconcileContext) -> bool:
    """An operator that starts anew repeats no dry run that its predecessor made."""
    return any(
        known.type == "Accepted" and known.status == "True" and known.observed_generation == ctx.facts.generation
        for known in ctx.status.conditions
    )


def _yes(ctx: ReconcileContext, written: str, warning: str) -> Acceptance:
    message = f"the job is understood, but for now: {warning}" if warning else "the job is understood and its pods fit"
    state = replace(ctx.state, accepted=written, dry_run_at=None)
    return Acceptance(True, "Valid", message, makes_pods=True, state=state)


def _probes(ctx: ReconcileContext) -> tuple[Object, ...]:
    """A pod of each kind that this job may ask for."""
    owner, settings = ctx.owner, ctx.settings
    job = trainer_job(owner, settings)
    template = job["spec"]["template"]
    metadata = template["metadata"] | {key: job["metadata"][key] for key in ("name", "namespace", "ownerReferences")}
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}]
    if ctx.wants_manager:
        pods.append(manager_pod(owner, DRY_ORDINAL, settings))
    if ctx.wants_rollouts and ctx.spec.rollout.max_replicas > 0:
        pods += [rollout_pod(owner, DRY_ORDINAL, pool, settings) for pool in _pools(ctx)]
    return (job, *pods)


def _pools(ctx: ReconcileContext) -> list[Pool]:
    capacity = ctx.spec.rollout.capacity
    num_on_demand = capacity.base_on_demand > 0 or capacity.fallback.enabled
    wanted = {Pool.SPOT: capacity.policy is not CapacityPolicy.ON_DEMAND, Pool.ON_DEMAND: num_on_demand}
    wanted[Pool.ON_DEMAND] |= capacity.policy is CapacityPolicy.ON_DEMAND
    return [pool for pool in POOLS if wanted[pool]]
