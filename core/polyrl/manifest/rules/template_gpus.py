"""GPUs of pod templates: how many reserved engines they hold, and notes where one asks for more than is used, or for
fewer; notes, for there may be reasons.

The API server cannot check it: containers are kept there unseen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from polyrl.manifest.cluster import GPU_RESOURCE, PodTemplate
from polyrl.manifest.engine_args import gpus_per_engine
from polyrl.manifest.job import JobSpec

FORMER_SIDECAR: Final = "reserved"
"""What the initContainer was called that added to the reserved engine's, while that was a container."""


def reserved_engine_counts(spec: JobSpec) -> tuple[int, int]:
    """How many engines a trainer's pod holds, and the GPUs of each: one for every group of GPUs that the template's
    container asks for; with 0 GPUs each, a single one that sees whatever there is."""
    each = gpus_per_engine(spec.rollout.engine)
    groups = _gpus(spec.trainer.template) // each if each else 0
    return (groups, each) if groups else (1, 0)


def template_notes(spec: JobSpec) -> list[str]:
    """One sentence each."""
    trainer, rollout = _gpus(spec.trainer.template), _gpus(spec.rollout.template)
    each, learning = gpus_per_engine(spec.rollout.engine), spec.trainer.processes_per_pod
    shared = each if spec.trainer.reserved_engine else 0
    notes = []
    if trainer and trainer != learning:
        notes.append(f"spec.trainer.template asks for {trainer} {GPU_RESOURCE}, and the learner uses {learning}")
    if trainer and shared and trainer % shared:
        notes.append(f"spec.trainer.template asks for {trainer} {GPU_RESOURCE}, and a reserved engine lies on {shared}")
    if rollout and rollout != each:
        notes.append(f"spec.rollout.template asks for {rollout} {GPU_RESOURCE}, and an engine uses {each}")
    if FORMER_SIDECAR in _init_containers(spec.trainer.template):
        notes.append(
            f"spec.trainer.template: initContainer {FORMER_SIDECAR} is no part of ours: reserved engines are processes"
            " of the first container, and use its GPUs"
        )
    return notes


def _gpus(template: PodTemplate | None) -> int:
    return 0 if template is None else template.gpus


def _init_containers(template: PodTemplate | None) -> list[Any]:
    given = None if template is None else (template.spec.model_extra or {}).get("initContainers")
    containers: Iterable[Any] = given if isinstance(given, list) else ()
    return [one.get("name") for one in containers if isinstance(one, dict)]
