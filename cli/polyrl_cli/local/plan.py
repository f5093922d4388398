"""`polyrl plan`: what each GPU would hold of a job, by calculation; nothing is loaded, downloaded or run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from polyrl.errors import UserError
from polyrl.local.devices import MIB
from polyrl.local.gpu_assignment import GpuRefusal
from polyrl.local.memory_advice import GpuOffer, JobPlan, plan_job
from polyrl.local.memory_plan import GpuPlan
from polyrl.memory.gpus import gpu_bytes
from polyrl.memory.sizes import GIB, ModelSizes
from polyrl_cli.local.gpus import gpus_here
from polyrl_cli.manifests.load import load_manifest
from polyrl_cli.manifests.model_size import planned_sizes

COMPUTED: Final = "computed, not measured; see docs/reference/memory.md for what is counted, and how it was checked"


def plan_lines(
    file: Path, sets: Sequence[str], gpu: str | None, *, rollout_gpu: str | None, gpus: int | None, as_json: bool
) -> tuple[list[str], bool]:
    """What to print, and whether all fits. Raises UserError for a GPU or a model that is not known, and where there are
    too few GPUs."""
    job = load_manifest(file, sets)
    model = job.spec.recipe.model
    (sizes, source), memory, rollout_memory = _all_known(
        lambda: planned_sizes(model, file.parent),
        lambda: _memory_here() if gpu is None else gpu_bytes(gpu),
        lambda: gpu_bytes(rollout_gpu) if rollout_gpu else None,
    )
    offer = GpuOffer(memory=memory, rollout_memory=rollout_memory or memory, count=gpus)
    plan = plan_job(job.spec, sizes, offer)
    if isinstance(plan, GpuRefusal):
        raise UserError(f"{file}: spec.{plan.field}: {plan.sentence}")
    name = model.path or str((model.config or {}).get("model_type"))
    if as_json:
        return [json.dumps(_data(plan, sizes, name, source=source))], plan.memory.fits
    return [*_lines(plan, sizes, name, source=source)], plan.memory.fits


def _all_known(
    sizes: Callable[[], tuple[ModelSizes, str]], memory: Callable[[], int], rollout_memory: Callable[[], int | None]
) -> tuple[tuple[ModelSizes, str], int, int | None]:
    """What each gives. Raises UserError with every sentence that one of them had."""
    faults: list[str] = []
    found: list[Any] = []
    for read in (sizes, memory, rollout_memory):
        try:
            found.append(read())
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(dict.fromkeys(faults)))
    return found[0], found[1], found[2]


def _memory_here() -> int:
    """Bytes of memory of the smallest GPU that a run here may use."""
    known = [gpu.memory_bytes for gpu in gpus_here().gpus if gpu.memory_bytes is not None]
    if not known:
        raise UserError("this machine shows no GPU to plan on; name one: --gpu H100-80GB, or its memory: --gpu 80Gi")
    return min(known)


def _lines(plan: JobPlan, sizes: ModelSizes, name: str, *, source: str) -> Iterator[str]:
    yield f"{name}: {sizes.parameters:,} parameters in {sizes.layers} layers, by {source}"
    yield f"the learner's longest pass: {plan.memory.pass_tokens:,} tokens"
    for one in plan.memory.gpus:
        yield from _gpu_lines(one)
    if plan.memory.host:
        *others, last = plan.memory.on_host
        held = f"{', '.join(others)} and {last}" if others else last
        yield f"the learner's {held}: {_gib(plan.memory.host)} of its hosts' memory"
    yield from (f"change: {sentence}" for sentence in plan.changes)
    yield COMPUTED


def _gpu_lines(one: GpuPlan) -> Iterator[str]:
    yield f"{one.use}: {one.gpus} {'GPU' if one.gpus == 1 else 'GPUs'} of {_gib(one.memory)}"
    yield from (f"  {part:<18}{_gib(size):>12}" for part, size in one.parts.items())
    yield f"  {'together':<18}{_gib(one.total):>12}"
    if one.tokens is not None:
        yield f"  the engine has room for {one.tokens:,} tokens in flight"
    if one.short:
        yield f"  does not fit: the engine's share lacks {_gib(one.short)} for its weights and a sequence of maxContext"
    if one.left < 0:
        yield f"  does not fit: {_gib(-one.left)} too much"
    if one.fits:
        yield f"  fits, {_gib(one.left)} are left"


def _data(plan: JobPlan, sizes: ModelSizes, name: str, *, source: str) -> dict[str, Any]:
    gpus = [
        {
            **{"use": one.use, "gpus": one.gpus, "memory": one.memory, "parts": dict(one.parts), "total": one.total},
            **{"left": one.left, "short": one.short, "fits": one.fits, "tokensInFlight": one.tokens},
        }
        for one in plan.memory.gpus
    ]
    model = {"name": name, "parameters": sizes.parameters, "layers": sizes.layers, "source": source}
    totals = {
        "passTokens": plan.memory.pass_tokens,
        "hostMemory": plan.memory.host,
        "fits": plan.memory.fits,
        "changes": list(plan.changes),
    }
    return {"model": model, "gpus": gpus, **totals}


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB / 10 else f"{number / MIB:.1f} MiB"
