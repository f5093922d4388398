"""Which GPUs of a job's pods hold what on a cluster, for a plan: GPUs in, an assignment or one refusal out.

trainer    of each of its pods the first GPUs, one for each process
reserved   of each the first GPUs too, one engine for each GPU of the pod or group that an engine lies on
rollouts   a pod of its own each
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrl.local.devices import Gpu
from polyrl.local.gpu_assignment import GpuAssignment, GpuRefusal, wanted_gpus
from polyrl.manifest.job import JobSpec


def pod_gpus(spec: JobSpec) -> int:
    """GPUs of a trainer's pod; 0 where its template names none. Where more processes learn it is to ask for as many."""
    gpus = 0 if spec.trainer.template is None else spec.trainer.template.gpus
    return max(gpus, spec.trainer.processes_per_pod) if gpus else 0


def gpus_in_pods(spec: JobSpec) -> tuple[int, int]:
    """GPUs of all the trainer's pods, and of all rollouts."""
    wanted = wanted_gpus(spec)
    return spec.trainer.replicas * pod_gpus(spec), wanted.rollouts * wanted.each


def assign_in_pods(spec: JobSpec, gpus: Sequence[Gpu]) -> GpuAssignment | GpuRefusal:
    """GPUs for all pods of a job whose trainer's template names some."""
    (first, others), own, wanted = gpus_in_pods(spec), pod_gpus(spec), wanted_gpus(spec)
    if first + others > len(gpus):
        sentence = f"the trainer's pods need {first} GPUs in all, and rollouts {others}; there are {len(gpus)}"
        return GpuRefusal("trainer.template" if first > len(gpus) else "rollout.replicas", sentence)
    pods = [gpus[at : at + own] for at in range(0, first, own)]
    # A pod with fewer GPUs than an engine lies on has one engine all the same, which sees them all.
    shared = own - own % wanted.each if 0 < wanted.each <= own else own
    rollouts = range(first, first + others, wanted.each or 1)
    return GpuAssignment(
        trainer=tuple(gpu for pod in pods for gpu in pod[: spec.trainer.processes_per_pod]),
        reserved=tuple(gpu for pod in pods for gpu in pod[:shared]) if wanted.reserves else (),
        rollouts=tuple(tuple(gpus[at : at + wanted.each]) for at in rollouts),
        unused=tuple(gpus[first + others :]),
    )
