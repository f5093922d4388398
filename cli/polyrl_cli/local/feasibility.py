"""What a valid manifest may still ask of this machine in vain: a variable that is not set, no engine, more GPUs or
memory than there are, or to go on from checkpoints that were made for something else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polyrl.local.gpu_assignment import GpuAssignment, GpuRefusal, assign_gpus
from polyrl.local.gpu_memory import gpu_fault, gpu_notes
from polyrl.local.memory import Machine, engines_fault, memory_fault
from polyrl.manifest.job import PolyRLJob, read_job
from polyrl.manifest.rules.resumption import changed_fields, checkpoint_faults
from polyrl.memory.sizes import ModelSizes
from polyrl_cli.local.gpus import gpus_here
from polyrl_cli.local.run_folder import RunFolder, kept_state
from polyrl_cli.manifests.checks import missing_sinks, unset_variables
from polyrl_cli.manifests.model_size import config_fields, num_parameters
from polyrl_cli.manifests.yaml_source import ManifestFault

CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files that hold a container's limit of memory, of cgroups version 2 and 1."""

CPU_ENGINE: Final = "SGLANG_USE_CPU_ENGINE"
"""Environment variable by which SGLang runs on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Feasibility:
    """What comes of a job on this machine."""

    faults: list[ManifestFault]
    """Every reason why the run would not start, or would not get far."""
    assignment: GpuAssignment
    notes: list[str]


def feasibility(job: PolyRLJob, base: Path, resumed: RunFolder | None) -> Feasibility:
    """Relative paths begin at `base`. Raises UserError when CUDA_VISIBLE_DEVICES names what is not there."""
    here = gpus_here()
    assigned = assign_gpus(job.spec, here.gpus, engines_on_cpu=os.environ.get(CPU_ENGINE) == "1")
    assignment = GpuAssignment() if isinstance(assigned, GpuRefusal) else assigned
    model = job.spec.recipe.model
    parameters = num_parameters(model, base)
    sizes = ModelSizes.of(config_fields(model, base), parameters)
    head = 0 if sizes is None else sizes.head
    refused = assigned if isinstance(assigned, GpuRefusal) else gpu_fault(job.spec, parameters, assignment, head)
    too_large = memory_fault(job.spec, parameters, this_machine(has_gpu=bool(here.gpus)), head)
    faults = list(_faults(job, resumed, too_large))
    if refused is not None:
        faults.append(_fault(refused.field, refused.sentence))
    notes = gpu_notes(job.spec, sizes, assignment)
    return Feasibility(faults=faults, assignment=assignment, notes=[note for note in (here.note, *notes) if note])


def _fault(field: str, sentence: str) -> ManifestFault:
    return ManifestFault(("spec", *field.split(".")), sentence)


def _faults(job: PolyRLJob, resumed: RunFolder | None, too_large: tuple[str, str] | None) -> Iterator[ManifestFault]:
    yield from unset_variables(job)
    yield from missing_sinks(job)
    if (fault := engines_fault(job.spec)) is not None:
        yield ManifestFault(("spec", "rollout", "replicas"), fault)
    if too_large is not None:
        yield _fault(*too_large)
    if resumed is not None and any(resumed.checkpoints.glob("[!.]*/COMPLETE.json")):
        for path, sentence in changed_fields(read_job(resumed.job).spec, job.spec):
            yield ManifestFault(("spec", *path), sentence)
        kept = kept_state(resumed)
        for field, sentence in checkpoint_faults(job.spec.recipe, kept.stage, kept.step, kept.trained_groups):
            yield _fault(field, sentence)


def this_machine(*, has_gpu: bool) -> Machine:
    """Memory of the machine, or of the container that this is."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # there is none, or it is the word max
            found.append(int(Path(limit).read_text()))
    return Machine(memory_bytes=min(found), has_gpu=has_gpu)
