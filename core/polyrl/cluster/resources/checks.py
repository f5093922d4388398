"""What a manifest may say and this version cannot run, each as one sentence that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from polyrl.cluster.resources.template import Fields, template_fields
from polyrl.manifest.cluster import PodTemplate
from polyrl.manifest.job import JobSpec, PolyRLJob
from polyrl.manifest.trainer import TrainerBackend

DISRUPTED: Final = "karpenter.sh/disrupted"
DO_NOT_DISRUPT: Final = "karpenter.sh/do-not-disrupt"


def unsupported(job: PolyRLJob) -> str:
    """The first thing that this version cannot do for `job`, as a sentence; empty when it can run it."""
    return next((message for message in (check(job.spec) for check in _CHECKS) if message), "")


def _one_rank(spec: JobSpec) -> str:
    if spec.trainer.replicas == 1:
        return ""
    return f"spec.trainer.replicas: {spec.trainer.replicas} ranks are not supported yet; it must be 1"


def _a_job(spec: JobSpec) -> str:
    backend = spec.trainer.backend
    if backend is TrainerBackend.JOB:
        return ""
    return f"spec.trainer.backend: {backend.value} is not supported yet; it must be {TrainerBackend.JOB.value}"


def _token_is_ours(spec: JobSpec) -> str:
    if spec.manager.token_secret_ref is None:
        return ""
    return "spec.manager.tokenSecretRef: is not supported yet; leave it out, and the operator makes a token"


def _command_is_ours(spec: JobSpec) -> str:
    for role, template in _templates(spec):
        for key in ("command", "args"):
            if key in _first_container(template):
                return f"spec.{role}.template.spec.containers[0].{key}: is the operator's to set; leave it out"
    return ""


def _rollouts_drain(spec: JobSpec) -> str:
    metadata, pod = template_fields(spec.rollout.template)
    if DO_NOT_DISRUPT in metadata.get("annotations", {}):
        return (
            f"spec.rollout.template.metadata.annotations: {DO_NOT_DISRUPT} lets a rollout die without its notice;"
            " leave it out"
        )
    for toleration in pod.get("tolerations", []):
        if _tolerates_disruption(toleration):
            return (
                f"spec.rollout.template.spec.tolerations: tolerates {DISRUPTED}, so Karpenter would never drain a"
                " rollout; name the keys that are meant"
            )
    return ""


def _tolerates_disruption(toleration: Fields) -> bool:
    return toleration.get("key") == DISRUPTED or (not toleration.get("key") and toleration.get("operator") == "Exists")


def _templates(spec: JobSpec) -> tuple[tuple[str, PodTemplate | None], ...]:
    roles = (("manager", spec.manager.template), ("trainer", spec.trainer.template))
    return (*roles, ("rollout", spec.rollout.template))


def _first_container(template: PodTemplate | None) -> Fields:
    _, pod = template_fields(template)
    return dict(pod["containers"][0]) if pod else {}


_CHECKS: Final[tuple[Callable[[JobSpec], str], ...]] = (
    _one_rank,
    _a_job,
    _token_is_ours,
    _command_is_ours,
    _rollouts_drain,
)
