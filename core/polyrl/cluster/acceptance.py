"""Whether a job, as it is written now, is taken on: understood, supported, unchanged where it must be, and admitted.

The API server's own verdict on the pods comes from a dry run, asked for once per content of the templates. A quota that
is used up is no fault of the template: such a job is accepted and waits for room.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import DryRun, Object
from polyrl.cluster.fleet.pools import POOLS
from polyrl.cluster.lifecycle import cannot_go_on, is_edited
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.reasons import AcceptedReason
from polyrl.cluster.resources.owner import hash_of
from polyrl.cluster.resources.template import Fields, template_fields
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.cluster.state import ReconcileState
from polyrl.manifest.job import JobSpec, PolyRLJob
from polyrl.manifest.rollout import CapacityPolicy
from polyrl.sample import Pool
from polyrl.worker import Role

DRY_RUN_RETRY_S: Final = 60.0
"""What refused a pod, a webhook or a policy, is mended by people."""

QUOTA: Final = "exceeded quota"
"""In the API server's words when a ResourceQuota is used up."""

NO_ANSWER: Final = "failed calling webhook"
"""In its words when an admission webhook that it may not go without is away, which says nothing of the template."""

RUNS_ON: Final = (
    "the trainer runs on as it began; suspend the job to change spec.recipe, spec.trainer, spec.failurePolicy, or of"
    " spec.rollout engine, drainSeconds, weightDeltas, mooncake and capacity.preset"
)

CANNOT_GO_ON: Final = (
    "the trainer does not go on from its newest checkpoint with the job as it is written, and its log says why"
    " (kubectl logs -l {}); edit the job, or suspend and resume it to try once more. Its Job ended so: {}"
)

DRY_ORDINAL: Final = 0
"""No pod that is meant has this number."""


@dataclass(frozen=True)
class Acceptance:
    """The condition Accepted, and what it allows."""

    verdict: bool | None
    """None: not known yet."""
    reason: str
    """An AcceptedReason; of a job that has ended, what was stored."""
    message: str
    makes_pods: bool
    """True when new pods may be asked for."""
    dry_run: DryRun | None = None
    state: ReconcileState | None = None
    """Changed by this reconcile; None: as it was."""
    due: float | None = None


def acceptance(ctx: ReconcileContext) -> Acceptance:
    """Whether the job, as it is written now, can be run."""
    refused = unsupported(ctx.job)
    if refused:
        return Acceptance(False, AcceptedReason.UNSUPPORTED, message=refused, makes_pods=False)
    trainer = ctx.facts.trainer
    if trainer is None or trainer.complete_at is not None:
        return _admitted(ctx)
    edited = is_edited(ctx, trainer)
    if trainer.failed_at is None and not trainer.suspended and edited:
        return Acceptance(False, AcceptedReason.IMMUTABLE_FIELD_CHANGED, message=RUNS_ON, makes_pods=True)
    if trainer.failed_at is not None and not ctx.spec.suspend and not edited and cannot_go_on(ctx, trainer):
        message = CANNOT_GO_ON.format(names.selector(ctx.facts.name, Role.TRAINER), trainer.failed_message)
        return Acceptance(False, AcceptedReason.CANNOT_GO_ON, message=message, makes_pods=False)
    return _admitted(ctx)


def _admitted(ctx: ReconcileContext) -> Acceptance:
    written = hash_of(list(ctx.hashes.templates.values()))
    answer, before = ctx.facts.dry_run, ctx.status.condition("Accepted")
    # An operator that starts anew repeats no dry run that its predecessor made.
    known = before is not None and before.status == "True" and before.observed_generation == ctx.facts.generation
    if ctx.state.accepted == written or known:
        return _yes(ctx, written, "")
    if answer is not None and (not answer or QUOTA in answer):
        return _yes(ctx, written, answer)
    message = answer or "the API server is asked whether it takes these pods"
    verdict = None if answer is None or NO_ANSWER in answer else False
    reason = AcceptedReason.CHECKING if verdict is None else AcceptedReason.INVALID_POD_TEMPLATE
    asked_at = ctx.now if ctx.state.dry_run_at is None else ctx.state.dry_run_at
    if answer is not None and ctx.now < asked_at + DRY_RUN_RETRY_S:
        state = replace(ctx.state, dry_run_at=asked_at)
        again = asked_at + DRY_RUN_RETRY_S
        return Acceptance(verdict, reason, message=message, makes_pods=False, state=state, due=again)
    due = None if answer is None else ctx.now + DRY_RUN_RETRY_S
    asked, state = DryRun(_probes(ctx), ctx.facts.generation), replace(ctx.state, dry_run_at=ctx.now)
    return Acceptance(verdict, reason, message=message, makes_pods=False, dry_run=asked, state=state, due=due)


def _yes(ctx: ReconcileContext, written: str, warning: str) -> Acceptance:
    message = f"the job is understood, but for now: {warning}" if warning else "the job is understood and its pods fit"
    if ctx.facts.unknown:
        message += f"; this operator is too old for these fields, and leaves them out: {', '.join(ctx.facts.unknown)}"
    state = replace(ctx.state, accepted=written, dry_run_at=None)
    return Acceptance(True, AcceptedReason.VALID, message=message, makes_pods=True, state=state)


def _probes(ctx: ReconcileContext) -> tuple[Object, ...]:
    """A pod of each kind that this job may ask for."""
    job = trainer_job(ctx.owner)
    template = job["spec"]["template"]
    metadata = template["metadata"] | {key: job["metadata"][key] for key in ("name", "namespace", "ownerReferences")}
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}]
    if ctx.wants_manager:
        pods.append(manager_pod(ctx.owner, DRY_ORDINAL))
    if ctx.wants_rollouts and ctx.spec.rollout.max_replicas > 0:
        pods += [rollout_pod(ctx.owner, DRY_ORDINAL, pool) for pool in _pools(ctx)]
    return (job, *pods)


def _pools(ctx: ReconcileContext) -> list[Pool]:
    capacity = ctx.spec.rollout.capacity
    if capacity.policy is CapacityPolicy.ON_DEMAND:
        return [Pool.ON_DEMAND]
    return list(POOLS) if capacity.base_on_demand > 0 or capacity.fallback.enabled else [Pool.SPOT]


DISRUPTED: Final = "karpenter.sh/disrupted"
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
DO_NOT_DISRUPT: Final = "karpenter.sh/do-not-disrupt"


def unsupported(job: PolyRLJob) -> str:
    """The first thing that this version cannot do for `job`, a sentence that names the field; empty: it can run it."""
    return next(_faults(job.spec), "")


def _faults(spec: JobSpec) -> Iterator[str]:
    if spec.trainer.replicas > 1:
        for one in spec.recipe.fetchable:
            if one.hub is not None and COMMIT.fullmatch(one.hub.revision or "") is None:
                yield (
                    f"spec.{one.field if one.is_rows else 'recipe.model.revision'}: each of {spec.trainer.replicas}"
                    f" trainer pods fetches {one.path}; name a commit of 40 hexadecimal digits"
                    f"{' after @' if one.is_rows else ''}, so that all have the same"
                )
    for role in ("manager", "trainer", "rollout"):
        _, pod = template_fields(getattr(spec, role).template)
        for key in ("command", "args"):
            if key in (pod["containers"][0] if pod else ()):
                yield f"spec.{role}.template.spec.containers[0].{key}: is the operator's to set; leave it out"
    yield from _undrainable(*template_fields(spec.rollout.template))


def _undrainable(metadata: Fields, pod: Fields) -> Iterator[str]:
    if DO_NOT_DISRUPT in metadata.get("annotations", {}):
        field = "spec.rollout.template.metadata.annotations"
        yield f"{field}: {DO_NOT_DISRUPT} lets a rollout die without its notice; leave it out"
    if any(_tolerates_disruption(toleration) for toleration in pod.get("tolerations", [])):
        yield (
            f"spec.rollout.template.spec.tolerations: tolerates {DISRUPTED}, so Karpenter would never drain a"
            " rollout; name the keys that are meant"
        )


def _tolerates_disruption(toleration: Fields) -> bool:
    return toleration.get("key") == DISRUPTED or (not toleration.get("key") and toleration.get("operator") == "Exists")
