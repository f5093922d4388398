"""What a valid manifest may still ask of this machine in vain: a variable that is not set, no engine, more memory than
there is, or to go on from checkpoints that were made for something else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from polyrl.local.memory import Machine, engines_fault, memory_fault, parameters_of
from polyrl.manifest.job import PolyRLJob, read_job
from polyrl.manifest.recipe import ModelSpec
from polyrl.manifest.rules.resumption import changed_fields
from polyrl_cli.local.run_folder import RunFolder, rl_steps_kept
from polyrl_cli.manifests.checks import unset_variables
from polyrl_cli.manifests.yaml_source import ManifestFault
from polyrl_trainer.data.hub import cached_folder

CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of a container, version 2 and 1."""

GPU_DEVICE: Final = "/dev/nvidiactl"

SAVED_BYTES: Final = {"float32": 4, "torch.float32": 4}
"""Per parameter in a model's files; else 2."""


def faults_here(job: PolyRLJob, base: Path, resumed: RunFolder | None) -> Iterator[ManifestFault]:
    """Every reason why the run would not start, or would not get far; relative paths begin at `base`."""
    yield from unset_variables(job)
    if (fault := engines_fault(job.spec)) is not None:
        yield ManifestFault(("spec", "rollout", "replicas"), fault)
    too_large = memory_fault(job.spec, _parameters(job.spec.recipe.model, base), this_machine())
    if too_large is not None:
        yield ManifestFault(("spec", *too_large[0].split(".")), too_large[1])
    if resumed is not None and any(resumed.checkpoints.glob("[!.]*/COMPLETE.json")):
        for path, sentence in changed_fields(read_job(resumed.job).spec, job.spec):
            yield ManifestFault(("spec", *path), sentence)
        done, wanted = rl_steps_kept(resumed), job.spec.recipe.algorithm.steps
        if done > wanted:
            sentence = f"{wanted} steps, but the newest checkpoint is of step {done}: ask for {done} or more"
            yield ManifestFault(("spec", "recipe", "algorithm", "steps"), sentence)


def this_machine() -> Machine:
    """Memory of the machine, or of the container that this is."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # there is none, or it is the word max
            found.append(int(Path(limit).read_text()))
    return Machine(memory_bytes=min(found), has_gpu=Path(GPU_DEVICE).exists())


def _parameters(model: ModelSpec, base: Path) -> int:
    if model.path is None:
        return parameters_of(model.config or {})
    folder = cached_folder(model, base) or base / model.path
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return weights // SAVED_BYTES.get(_saved_dtype(folder), 2)


def _saved_dtype(folder: Path) -> str:
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    return str(config.get("dtype", config.get("torch_dtype"))) if isinstance(config, dict) else ""
