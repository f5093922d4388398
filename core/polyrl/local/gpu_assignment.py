"""Which worker of a run on one machine gets which GPUs: GPUs and what is wanted in, an assignment or one refusal out.

    trainer    the first GPUs, one for each of its processes
    reserved   the trainer's first, on which it generates while the learner waits; an engine over several GPUs has its
               own, since SGLang refuses GPUs of which one has much less memory free than the others
    rollouts   their own, as many each as `rollout.engine` spreads an engine over

Embedded engines run on the CPU, beside a GPU as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from polyrl.local.devices import Gpu
from polyrl.manifest.engine_args import gpus_per_engine
from polyrl.manifest.environment import ENGINE_APART, LEARNER_DEVICE
from polyrl.manifest.job import JobSpec
from polyrl.worker import Workers, num_rollouts, wants_engines

ONE_INSTANCE: Final = (
    "an engine over {each} GPUs cannot have instances of a divided GPU (MIG): CUDA shows a process one of them;"
    " spread it over 1, or let CUDA_VISIBLE_DEVICES name whole GPUs"
)


@dataclass(frozen=True, kw_only=True)
class GpuAssignment:
    """GPUs by worker; all empty where there are none."""

    trainer: tuple[Gpu, ...] = ()
    reserved: tuple[Gpu, ...] = ()
    rollouts: tuple[tuple[Gpu, ...], ...] = ()
    unused: tuple[Gpu, ...] = ()

    @property
    def shared(self) -> bool:
        """True when the reserved engine is on a GPU of the trainer's."""
        return bool(self.reserved) and set(self.reserved) <= set(self.trainer)


@dataclass(frozen=True)
class GpuRefusal:
    """Why the GPUs do not suffice."""

    field: str
    """To change, below spec."""
    sentence: str


def assign_gpus(spec: JobSpec, gpus: Sequence[Gpu], *, engines_on_cpu: bool = False) -> GpuAssignment | GpuRefusal:
    """GPUs for all workers of a run; `engines_on_cpu`: SGLang runs on the CPU as well."""
    if not gpus:
        return GpuAssignment()
    wanted = wanted_gpus(spec, engines_on_cpu=engines_on_cpu)
    each, reserved, rollouts, first, needed = wanted.each, wanted.reserves, wanted.rollouts, wanted.first, wanted.total
    learning = wanted.learning
    if each > 1 and (reserved or rollouts) and any(gpu.is_instance for gpu in gpus[1:]):
        return GpuRefusal("rollout.engine.tensorParallel", ONE_INSTANCE.format(each=each))
    if needed > len(gpus):
        return _refusal(gpus, rollouts=rollouts, each=each, learning=learning, first=first, reserved=reserved)
    return GpuAssignment(
        trainer=tuple(gpus[:learning]),
        reserved=tuple(gpus[:1] if first == learning else gpus[learning:first]) if reserved else (),
        rollouts=tuple(tuple(gpus[at : at + each]) for at in range(first, needed, each or 1)),
        unused=tuple(gpus[needed:]),
    )


@dataclass(frozen=True)
class WantedGpus:
    """GPUs that a run asks for."""

    learning: int
    """The learner's, one for each of its processes."""
    each: int
    """GPUs of one engine; 0 where engines have none."""
    reserves: bool
    """There is a reserved engine with a GPU."""
    rollouts: int
    """Engines with GPUs of their own."""

    @property
    def first(self) -> int:
        """GPUs of the learner and of the reserved engine."""
        return self.learning + (self.each if self.reserves and self.each > 1 else 0)

    @property
    def total(self) -> int:
        """GPUs of all workers."""
        return self.first + self.rollouts * self.each


def wanted_gpus(spec: JobSpec, *, engines_on_cpu: bool = False) -> WantedGpus:
    """What `assign_gpus` assigns."""
    trains = spec.recipe.mode.is_online
    each = 0 if engines_on_cpu or not wants_engines(spec) else gpus_per_engine(spec.rollout.engine)
    reserves = each > 0 and (spec.trainer.reserved_engine or not trains)
    rollouts = num_rollouts(spec) if trains and each else 0
    return WantedGpus(spec.trainer.learner_processes, each, reserves=reserves, rollouts=rollouts)


def with_gpus(wanted: Workers, assignment: GpuAssignment) -> Workers:
    """The same workers, each with the names of its GPUs."""
    reserved, trainer = wanted.reserved, wanted.trainer.on(_names(assignment.trainer))
    if trainer.gpus:
        # A learner that does not find its GPU must not learn on the CPU instead, a hundred times slower and silently.
        trainer = replace(trainer, env={**trainer.env, LEARNER_DEVICE: "cuda"})
    if reserved is not None and trainer.gpus and not assignment.shared:
        trainer = replace(trainer, env={**trainer.env, ENGINE_APART: "1"})
        reserved = replace(reserved, env={**reserved.env, ENGINE_APART: "1"})
    return replace(
        wanted,
        trainer=trainer,
        reserved=None if reserved is None else reserved.on(_names(assignment.reserved)),
        rollout_gpus=tuple(_names(gpus) for gpus in assignment.rollouts),
    )


def assignment_line(assignment: GpuAssignment) -> str:
    """Who has which GPU, for a person; empty where there are none."""
    if not assignment.trainer:
        return ""
    parts = [f"the learner {_numbers(assignment.trainer)}"]
    if assignment.reserved == assignment.trainer:
        parts = [f"the learner and the reserved engine {_numbers(assignment.trainer)}"]
    elif assignment.reserved:
        parts.append(f"the reserved engine {_numbers(assignment.reserved)}")
    parts += [f"rollout {index} {_numbers(gpus)}" for index, gpus in enumerate(assignment.rollouts)]
    if assignment.unused:
        parts.append(f"unused {_numbers(assignment.unused)}")
    every = [*assignment.trainer, *assignment.reserved, *sum(assignment.rollouts, ()), *assignment.unused]
    models = ", ".join(dict.fromkeys(gpu.model for gpu in every))
    return f"GPUs ({models}): {' · '.join(parts)}"


def _refusal(gpus: Sequence[Gpu], *, rollouts: int, each: int, learning: int, first: int, reserved: bool) -> GpuRefusal:
    if learning > len(gpus):
        asked = f"{learning} processes that learn need a GPU each"
        return GpuRefusal("trainer.processesPerPod", f"{asked}, and this run sees {len(gpus)} ({_numbers(gpus)})")
    there = f"and this run sees {len(gpus)} ({_numbers(gpus)})"
    room = (len(gpus) - first) // each
    if room < 0:
        engine = f"{first - learning} of the reserved engine (rollout.engine.tensorParallel)"
        sentence = f"{learning} GPU{'s' if learning > 1 else ''} of the learner and {engine}, {there}"
        return GpuRefusal("trainer.reservedEngine", f"{sentence}; spread engines over fewer GPUs, or set it to false")
    own = f" and {first - learning} of the reserved engine" if first > learning else ""
    advice = f"set {room}" if room or not reserved else "set 0: the reserved engine generates alone"
    return GpuRefusal(
        "rollout.replicas",
        f"{rollouts} {'rollout' if rollouts == 1 else 'rollouts'} of {each} GPU{'s' if each > 1 else ''} each"
        f" (rollout.engine.tensorParallel), beside {learning} of the learner{own}, need {first + rollouts * each} GPUs,"
        f" {there};"
        f" {advice}, or use a cluster",
    )


def _names(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    return tuple(gpu.name for gpu in gpus)


def _numbers(gpus: Iterable[Gpu]) -> str:
    return ",".join(_names(gpus))
