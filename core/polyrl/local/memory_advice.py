"""What to change in a job whose GPUs do not hold it: each proposal is a changed job that was planned again and fits.

Changes are tried alone and together, those that leave what is learned as it is first; one is proposed only where no
part of it would do. Where it alone is not enough, the largest passes with which it is are proposed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from polyrl.local.devices import Gpu
from polyrl.local.gpu_assignment import GpuAssignment, GpuRefusal, assign_gpus, wanted_gpus
from polyrl.local.gpu_memory import fit
from polyrl.local.memory_plan import LEARNER, SHARED, GpuPlan, MemoryPlan, pass_tokens, plan_memory
from polyrl.local.pod_gpus import assign_in_pods, gpus_in_pods, pod_gpus
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import ActivationCheckpointing
from polyrl.manifest.spec import CpuOffload
from polyrl.memory.engine import USUAL_FRACTION
from polyrl.memory.gpus import GPU_MEBIBYTES
from polyrl.memory.heads import engine_spreads, wrong_spreads
from polyrl.memory.sizes import GIB, ModelSizes

PASS_STEP: Final = 512
"""Tokens of a pass are proposed in such steps."""
LEAST_PASS: Final = 1024
"""Shorter passes leave a GPU idle between its kernels."""
GPUS_TOGETHER: Final = (2, 4, 8)
"""GPUs of one machine."""

KEPT_OF_A_LAYER: Final = "recipe.activationCheckpointing"
OFFLOAD: Final = "trainer.fsdp.cpuOffload"
PASSES: Final = "recipe.maxTokensPerMicroBatch"
Edits = Mapping[str, Any]
"""Values by field below spec."""


@dataclass(frozen=True, kw_only=True)
class GpuOffer:
    """GPUs that a job is planned on."""

    memory: int
    """Bytes of each GPU of the learner and of the reserved engine."""
    rollout_memory: int
    """Bytes of each of the rollouts' GPUs."""
    count: int | None = None
    """GPUs in all; None: as many as the job asks for."""

    def assign(self, spec: JobSpec) -> GpuAssignment | GpuRefusal:
        """Who gets which, on a cluster where the trainer's template names GPUs, else on one machine; a refusal where
        they are too few."""
        if pod_gpus(spec):
            return assign_in_pods(spec, self._gpus(*gpus_in_pods(spec)))
        wanted = wanted_gpus(spec)
        return assign_gpus(spec, self._gpus(wanted.first, wanted.total - wanted.first))

    def _gpus(self, first: int, others: int) -> list[Gpu]:
        count = first + others if self.count is None else self.count
        sizes = [self.memory if at < first else self.rollout_memory for at in range(count)]
        return [Gpu(name=str(at), model="", uuid=f"GPU-{at}", memory_bytes=size) for at, size in enumerate(sizes)]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job on the GPUs that are offered."""

    memory: MemoryPlan
    assignment: GpuAssignment
    changes: tuple[str, ...]
    """A sentence each; empty where all fits, or where nothing was found."""


def plan_job(spec: JobSpec, sizes: ModelSizes, offer: GpuOffer) -> JobPlan | GpuRefusal:
    """What each GPU holds, and what to change where it does not fit; a refusal where there are too few GPUs, or the
    model cannot be spread over as many."""
    for field, sentence in wrong_spreads(spec, sizes.heads, sizes.key_heads):
        return GpuRefusal(field, sentence)
    assignment = offer.assign(spec)
    if isinstance(assignment, GpuRefusal):
        return assignment
    plan = plan_memory(spec, sizes, assignment)
    short = {one.use in (LEARNER, SHARED): one for one in reversed(plan.gpus) if not one.fits}
    changes = [sentence for one in reversed(short.values()) for sentence in _changes(spec, sizes, offer, one)]
    return JobPlan(memory=plan, assignment=assignment, changes=tuple(changes))


def _changes(spec: JobSpec, sizes: ModelSizes, offer: GpuOffer, one: GpuPlan) -> Iterator[str]:
    learns = one.use in (LEARNER, SHARED)
    found: list[Edits] = []
    for edits in _learner_edits(spec, sizes, offer) if learns else _engine_edits(spec, sizes):
        if any(_covers(less, edits) for less in found):
            continue
        enough = _enough(edited(spec, edits), sizes, offer, learns=learns)
        if enough is not None:
            found.append({**edits, **enough})
            yield f"{one.use}: set {_words({**edits, **enough})}"
    if (name := _larger_gpu(spec, sizes, offer, learns=learns)) is not None:
        yield f"{one.use}: take GPUs of at least {name}, which hold it as it is"
    elif not found:
        needed = (one.total + one.short) / GIB
        yield f"{one.use}: no change was found with which {needed:.1f} GiB fit into a GPU; take a smaller model"


def _covers(less: Edits, edits: Edits) -> bool:
    """Whether a proposal that was found makes another one needless. One that shortens passes leaves open whether they
    may stay as they are where less is kept of a layer."""
    kept = [one.get(KEPT_OF_A_LAYER) for one in (less, edits)]
    shorter_instead = PASSES in less and kept[0] is not None and kept[0] != kept[1]
    return set(less) - {PASSES} <= set(edits) and not shorter_instead


def _learner_edits(spec: JobSpec, sizes: ModelSizes, offer: GpuOffer) -> Iterator[Edits]:
    """From no change on, each also with less kept of a layer; more processes and slices of passes, then the host's
    memory, of which as little as is enough, which learn the same, before adapters."""
    fsdp = spec.trainer.fsdp
    kinds: list[Edits] = [{}] if fsdp.dp_replicate == 1 else [{}, {"trainer.fsdp.dpReplicate": 1}]
    kinds += [*_more_processes(spec), *_slices(spec, sizes)]
    known_places = list(CpuOffload)
    further = known_places[known_places.index(fsdp.cpu_offload) + 1 :]
    kinds += [{OFFLOAD: place.value} for place in further]
    kinds += [{"recipe.model.lora": {}}] if spec.recipe.model.lora is None else []
    apart: Edits = {"trainer.reservedEngine": False}
    known = list(ActivationCheckpointing)
    less = known[known.index(spec.recipe.activation_checkpointing) + 1 :]
    spared: list[Edits] = [{}, *({KEPT_OF_A_LAYER: one.value} for one in less)]
    for beside in [{**kind, **edits} for kind in kinds for edits in spared]:
        yield beside
        if wanted_gpus(spec).reserves and spec.recipe.mode.is_online:
            changed = edited(spec, beside)
            fraction = _fraction(changed, sizes, offer)
            if fraction < 1:
                yield {**beside, "trainer.reservedMemFraction": fraction}
            yield {**beside, **apart}


def _more_processes(spec: JobSpec) -> Iterator[Edits]:
    trainer = spec.trainer
    for number in GPUS_TOGETHER:
        together = trainer.replicas * number
        divided = together % trainer.context_parallel == 0 and together % trainer.fsdp.dp_replicate == 0
        if number > trainer.processes_per_pod and divided:
            yield {"trainer.processesPerPod": number}


def _slices(spec: JobSpec, sizes: ModelSizes) -> Iterator[Edits]:
    """More of them, where a single sample is longer than a pass should be, by the processes that there are or by as
    many as slices; else shorter passes do, and cost no exchange."""
    trainer = spec.trainer
    if pass_tokens(spec) <= spec.recipe.max_tokens_per_micro_batch:
        return
    fitting = [one for one in GPUS_TOGETHER if one > trainer.context_parallel and sizes.heads % one == 0]
    yield from ({"trainer.contextParallel": one} for one in fitting if trainer.learner_processes % one == 0)
    more = [one for one in fitting if one > trainer.processes_per_pod]
    yield from ({"trainer.processesPerPod": one, "trainer.contextParallel": one} for one in more)


def _fraction(spec: JobSpec, sizes: ModelSizes, offer: GpuOffer) -> float:
    """Memory fraction of the reserved engine beside the learner."""
    return fit(sizes, offer.memory, spec.recipe, spec.trainer.learner_processes, spec.trainer.fsdp).fraction


def _engine_edits(spec: JobSpec, sizes: ModelSizes) -> Iterator[Edits]:
    """Larger shares of its GPUs, then more GPUs, then both."""
    if not spec.rollout.engine.type.is_server:
        return
    shares = list(_larger_shares(spec))
    yield from shares
    for size in (one for one in GPUS_TOGETHER if engine_spreads(sizes.heads, sizes.key_heads, one)):
        spread: Edits = {"rollout.engine.tensorParallel": size}
        yield spread
        yield from ({**share, **spread} for share in shares)


def _larger_shares(spec: JobSpec) -> Iterator[Edits]:
    """What an engine takes where it is not limited, for each that is limited to less, and for all."""
    given = {
        "trainer.reservedMemFraction": spec.trainer.reserved_mem_fraction,
        "rollout.engine.memFraction": spec.rollout.engine.mem_fraction,
    }
    limited = [field for field, fraction in given.items() if fraction is not None and fraction < USUAL_FRACTION]
    yield from ({field: USUAL_FRACTION} for field in limited)
    if len(limited) > 1:
        yield dict.fromkeys(limited, USUAL_FRACTION)


def _enough(spec: JobSpec, sizes: ModelSizes, offer: GpuOffer, *, learns: bool) -> Edits | None:
    """What must be added for it to fit: nothing, or shorter passes; None where neither does."""
    if _holds(spec, sizes, offer, learns=learns):
        return {}
    longest = spec.rollout.engine.max_context if spec.recipe.mode.is_online else 0
    least = -(-max(longest, LEAST_PASS) // PASS_STEP)
    tokens = spec.recipe.max_tokens_per_micro_batch // PASS_STEP
    if not learns or tokens <= least:
        return None
    fits_at = [least - 1, tokens]
    while fits_at[1] - fits_at[0] > 1:
        middle = sum(fits_at) // 2
        shorter = edited(spec, {PASSES: middle * PASS_STEP})
        fits_at[0 if _holds(shorter, sizes, offer, learns=True) else 1] = middle
    return {PASSES: fits_at[0] * PASS_STEP} if fits_at[0] >= least else None


def _holds(spec: JobSpec, sizes: ModelSizes, offer: GpuOffer, *, learns: bool) -> bool:
    """Whether the learner's GPUs, or else all others, fit."""
    assignment = offer.assign(spec)
    if isinstance(assignment, GpuRefusal):
        return False
    plans = plan_memory(spec, sizes, assignment).gpus
    return all(one.fits for one in plans if (one.use in (LEARNER, SHARED)) is learns)


def _larger_gpu(spec: JobSpec, sizes: ModelSizes, offer: GpuOffer, *, learns: bool) -> str | None:
    for name, mebibytes in sorted(GPU_MEBIBYTES.items(), key=lambda item: item[1]):
        memory = mebibytes << 20
        larger = replace(offer, memory=max(offer.memory, memory), rollout_memory=max(offer.rollout_memory, memory))
        if _holds(spec, sizes, larger, learns=learns):
            return name
    return None


def edited(spec: JobSpec, edits: Edits) -> JobSpec:
    """The same job with other values."""
    data: dict[str, Any] = spec.model_dump(by_alias=True, mode="json")
    for path, value in edits.items():
        *folders, last = path.split(".")
        node = data
        for folder in folders:
            node = node[folder]
        node[last] = value
    return JobSpec.model_validate(data)


def _words(edits: Edits) -> str:
    return ", and ".join(f"{path} to {str(value).lower()}" for path, value in edits.items())
