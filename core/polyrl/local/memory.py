"""Whether a job can fit into one machine's memory at all: a lower bound, so that nothing that would run is refused.

learner     weights, gradients and two moments in float32 on the CPU; on a GPU the float32 weights pass through once,
            or the moments stay (`trainer.fsdp.cpuOffload: optimizer`);
            where adapters learn too, and weights of `model.dtype` stay
critic      as the learner, with PPO
reference   float32 weights, with a KL penalty; with adapters it is the model below them
engines     each its own copy of the weights, where they are embedded, which run on the CPU beside a GPU as well
processes   what torch and transformers take before any weight is there
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polyrl.manifest.job import JobSpec
from polyrl.manifest.spec import CpuOffload
from polyrl.memory.learner import learner_bytes, moments_at_least, parameters_at_least
from polyrl.memory.moments import FLOAT32_BYTES
from polyrl.memory.sizes import GIB, SERVED_BYTES
from polyrl.worker import num_rollouts, wants_engines

PROCESS_BYTES: Final = 300 << 20
"""Private memory of a process that has imported torch and transformers: 330 MB, measured."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run may use."""

    memory_bytes: int
    has_gpu: bool
    """The learner has one."""


def memory_fault(spec: JobSpec, parameters: int, machine: Machine, head: int = 0) -> tuple[str, str] | None:
    """The field to change, below spec, and a sentence with the sizes; None when the machine may hold the job. `head`:
    of the parameters, those of the vocabulary's."""
    engines = num_engines(spec)
    embedded = not spec.rollout.engine.type.is_server
    fsdp = spec.trainer.fsdp
    on_gpu = machine.has_gpu and fsdp.cpu_offload is not CpuOffload.ALL
    held = learner_bytes(spec.recipe, parameters, head)
    if on_gpu:
        offloaded = fsdp.cpu_offload is CpuOffload.OPTIMIZER
        held = moments_at_least(spec.recipe, parameters, head) if offloaded else 0
    loaded = FLOAT32_BYTES * parameters_at_least(spec.recipe, parameters, head)[0]
    learner = max(loaded, held * fsdp.dp_replicate)
    served = engines * parameters * SERVED_BYTES[spec.recipe.model.dtype] if embedded else 0
    processes = PROCESS_BYTES * (1 + (engines if embedded else 0))
    needed = learner + served + processes
    if needed <= machine.memory_bytes:
        return None
    field = "recipe.model" if learner + served > processes else "rollout.replicas"
    return field, (
        f"needs at least {needed / GIB:.1f} GiB of memory here (learner {learner / GIB:.1f}, weights of"
        f" {engines} engines {served / GIB:.1f}, processes {processes / GIB:.1f}), and this machine has"
        f" {machine.memory_bytes / GIB:.1f}; take a smaller model, fewer rollouts, or a cluster"
    )


def num_engines(spec: JobSpec) -> int:
    """Engines that a run on one machine begins with."""
    if not wants_engines(spec):
        return 0
    if not spec.recipe.mode.is_online:
        return 1
    return num_rollouts(spec) + int(spec.trainer.reserved_engine)


def engines_fault(spec: JobSpec) -> str | None:
    """Why nothing would generate here, where no autoscaler adds rollouts; None when something does."""
    if not wants_engines(spec) or num_engines(spec) > 0:
        return None
    return "0 rollouts, and trainer.reservedEngine is false: on this machine nothing would generate; raise it to 1"
