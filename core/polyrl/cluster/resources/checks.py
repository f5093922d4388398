"""What a manifest may say and this version cannot run, each as one sentence that names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polyrl.cluster.resources.template import Fields, template_fields
from polyrl.manifest.job import JobSpec, PolyRLJob
from polyrl.manifest.trainer import TrainerBackend

DISRUPTED: Final = "karpenter.sh/disrupted"
DO_NOT_DISRUPT: Final = "karpenter.sh/do-not-disrupt"


def unsupported(job: PolyRLJob) -> str:
    """The first thing that this version cannot do for `job`, as a sentence; empty when it can run it."""
    return next(_faults(job.spec), "")


def _faults(spec: JobSpec) -> Iterator[str]:
    if spec.trainer.replicas != 1:
        yield f"spec.trainer.replicas: {spec.trainer.replicas} ranks are not supported yet; it must be 1"
    if spec.trainer.backend is not TrainerBackend.JOB:
        only = TrainerBackend.JOB.value
        yield f"spec.trainer.backend: {spec.trainer.backend.value} is not supported yet; it must be {only}"
    if spec.manager.token_secret_ref is not None:
        yield "spec.manager.tokenSecretRef: is not supported yet; leave it out, and the operator makes a token"
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
