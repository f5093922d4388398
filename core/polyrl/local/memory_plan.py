"""What each GPU of a job holds, part by part: a job, its model's sizes and an assignment of GPUs in, a plan out.

The learner's GPU is planned at its fullest: in a pass, with the optimizer's state there, and with the reserved engine
beside it where they share. An engine's share is what SGLang takes of what is free at its start: on a shared GPU after
the learner's weights, before its gradients and moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from polyrl.local.devices import Gpu
from polyrl.local.gpu_assignment import GpuAssignment
from polyrl.manifest.job import JobSpec
from polyrl.memory.engine import EngineMemory, engine_memory
from polyrl.memory.learner import OFFLOADED, REFERENCE, LearnerMemory, holds_reference, learner_memory
from polyrl.memory.sizes import ModelSizes

LEARNER, RESERVED, ROLLOUT = "learner", "reserved engine", "rollout"
SHARED = f"{LEARNER} and {RESERVED}"


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """GPUs that hold the same."""

    use: str
    """Whose they are."""
    gpus: int
    memory: int
    """Bytes of each."""
    parts: Mapping[str, int]
    """Bytes by what they are for."""
    tokens: int | None = None
    """Tokens in flight of the engine that is there."""
    short: int = 0
    """Bytes that the engine's share lacks for its weights and one longest sequence."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def left(self) -> int:
        """Bytes left over; negative where it does not fit."""
        return self.memory - self.total

    @property
    def fits(self) -> bool:
        """Whether all parts have room, by calculation."""
        return self.left >= 0 and not self.short


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All GPUs of a job."""

    gpus: tuple[GpuPlan, ...]
    pass_tokens: int
    """Tokens of the learner's longest pass."""
    host: int = 0
    """Bytes of the host's memory, or of all hosts', that the learner takes for what is not on its GPUs."""
    on_host: tuple[str, ...] = ()
    """Which parts these are of."""

    @property
    def fits(self) -> bool:
        """Whether the parts of each GPU have room."""
        return all(one.fits for one in self.gpus)


def pass_tokens(spec: JobSpec) -> int:
    """Tokens of the learner's longest pass: the budget, or a single longer sample, which has a pass of its own."""
    longest = spec.rollout.engine.max_context if spec.recipe.mode.is_online else 0
    return max(spec.recipe.max_tokens_per_micro_batch, longest)


def plan_memory(spec: JobSpec, sizes: ModelSizes, assignment: GpuAssignment) -> MemoryPlan:
    """What each GPU of known memory holds; those of unknown memory are left out."""
    tokens = pass_tokens(spec)
    own_tokens, ranks = -(-tokens // spec.trainer.context_parallel), max(1, len(assignment.trainer))
    learner = learner_memory(sizes, spec.recipe, tokens=own_tokens, ranks=ranks, fsdp=spec.trainer.fsdp)
    kinds = {RESERVED: spec.reserved_engine, ROLLOUT: spec.rollout.engine}
    engines = {use: engine_memory(sizes, engine, spec.recipe.model.dtype) for use, engine in kinds.items()}
    gpus = tuple(_plans(spec, learner, engines, assignment))
    return MemoryPlan(gpus=gpus, pass_tokens=tokens, host=ranks * learner.host, on_host=_on_host(spec))


def _plans(
    spec: JobSpec, learner: LearnerMemory, engines: Mapping[str, EngineMemory], assignment: GpuAssignment
) -> Iterator[GpuPlan]:
    longest = spec.rollout.engine.max_context * engines[ROLLOUT].per_token
    learning = set(assignment.trainer)
    shared = tuple(gpu for gpu in assignment.reserved if gpu in learning)
    if (memory := _least(assignment.trainer)) is not None:
        parts = _learner_parts(learner)
        if shared:
            engine = engines[RESERVED]
            free = memory - learner.weights - learner.process - engine.process
            yield _with_engine(SHARED, shared, memory, parts=parts, engine=engine, free=free, longest=longest)
        if alone := len(learning) - len(shared):
            yield GpuPlan(use=LEARNER, gpus=alone, memory=memory, parts=parts)
    apart = tuple(gpu for gpu in assignment.reserved if gpu not in learning)
    own = {RESERVED: apart, ROLLOUT: sum(assignment.rollouts, ())}
    for use, gpus in own.items():
        if (memory := _least(gpus)) is not None:
            free = memory - engines[use].process
            yield _with_engine(use, gpus, memory, parts={}, engine=engines[use], free=free, longest=longest)


def _with_engine(
    use: str,
    gpus: tuple[Gpu, ...],
    memory: int,
    *,
    parts: dict[str, int],
    engine: EngineMemory,
    free: int,
    longest: int,
) -> GpuPlan:
    share = engine.share(free)
    parts = {
        **parts,
        "engine's weights": engine.weights,
        "keys and values": max(0, share - engine.weights),
        "engine's graphs": engine.work,
        "engine's process": engine.process,
    }
    short = max(0, engine.weights + longest - share)
    return GpuPlan(use=use, gpus=len(gpus), memory=memory, parts=parts, tokens=engine.tokens(free), short=short)


def _learner_parts(learner: LearnerMemory) -> dict[str, int]:
    return {name: size for name, size in asdict(learner).items() if size and name != "host"}


def _on_host(spec: JobSpec) -> tuple[str, ...]:
    away = OFFLOADED[spec.trainer.fsdp.cpu_offload]
    return tuple(part for part in away if part != REFERENCE or holds_reference(spec.recipe))


def _least(gpus: tuple[Gpu, ...]) -> int | None:
    return min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None)
