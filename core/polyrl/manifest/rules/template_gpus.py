"""GPUs of pod templates: how many reserved engines they hold, and notes where one asks for more than is used, or for
fewer; notes, for there may be reasons.

The API server cannot check it: containers are kept there unseen.
"""

from __future__ import annotations

from polyrl.manifest.cluster import GPU_RESOURCE, PodTemplate
from polyrl.manifest.engine_args import gpus_per_engine
from polyrl.manifest.job import JobSpec


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
    return notes


def _gpus(template: PodTemplate | None) -> int:
    return 0 if template is None else template.gpus
