"""The GPUs that a run on one machine may use, read from what `nvidia-smi` lists and what CUDA_VISIBLE_DEVICES allows.

A GPU is named by nvidia-smi's number, an instance of a divided GPU (MIG) by its own name: SGLang reads only numbers
where an engine has several GPUs. Workers count as nvidia-smi does (CUDA_DEVICE_ORDER=PCI_BUS_ID); CUDA by itself
begins with the fastest, which matters where GPUs differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from polyrl.errors import UserError
from polyrl.manifest.environment import AS_NVIDIA_SMI, GPU_ORDER, VISIBLE_GPUS

NO_GPU: Final = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all."""

MIB: Final = 1 << 20

_GPU: Final = re.compile(r"GPU (\d+): (.+) \(UUID: ([\w-]+)\)")
_INSTANCE: Final = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[\w/-]+)\)")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one instance of a divided one."""

    name: str
    """For CUDA_VISIBLE_DEVICES: nvidia-smi's number, or the instance's name."""
    model: str
    uuid: str
    memory_bytes: int | None = None
    """None where it is not known: nvidia-smi does not list that of an instance."""
    instances: tuple[Gpu, ...] = ()
    """Instances of a divided GPU, which is then used through them alone."""

    @property
    def is_instance(self) -> bool:
        """True for a part of a divided GPU."""
        return self.uuid.startswith("MIG-")


def listed_gpus(listing: str, memory: str) -> list[Gpu]:
    """GPUs from the texts of `nvidia-smi -L` and of its query of `uuid,memory.total` in MiB; lines that are something
    else are passed over."""
    total: dict[str, int] = {}
    for line in memory.splitlines():
        uuid, _, mebibytes = line.partition(",")
        if mebibytes.strip().isdecimal():
            total[uuid.strip()] = int(mebibytes) * MIB
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        if found := _GPU.match(line):
            number, model, uuid = found.groups()
            gpus.append(Gpu(name=number, model=model, uuid=uuid, memory_bytes=total.get(uuid)))
        elif gpus and (found := _INSTANCE.match(line)):
            profile, uuid = found.groups()
            instance = Gpu(name=uuid, model=f"{gpus[-1].model} MIG {profile}", uuid=uuid)
            gpus[-1] = replace(gpus[-1], instances=(*gpus[-1].instances, instance))
    return gpus


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; all where it is not set. Raises UserError for a name that
    none has, and for numbers that CUDA would count differently."""
    allowed = environ.get(VISIBLE_GPUS)
    if allowed is None:
        return tuple(one for gpu in gpus for one in gpu.instances or (gpu,))
    if allowed.strip() in NO_GPU:
        return ()
    names = [name.strip() for name in allowed.split(",")]
    if any(name.isdecimal() for name in names):
        _refuse_other_order(gpus, allowed, environ)
    chosen = tuple(_named(gpus, name, allowed) for name in names)
    if len({gpu.uuid for gpu in chosen}) < len(chosen):
        raise UserError(f"{VISIBLE_GPUS}={allowed}: names a GPU twice; name each once")
    return chosen


def hidden_all(environ: Mapping[str, str]) -> bool:
    """True where CUDA_VISIBLE_DEVICES leaves none, so that nothing need be asked."""
    return environ.get(VISIBLE_GPUS, "0").strip() in NO_GPU


def _refuse_other_order(gpus: Sequence[Gpu], allowed: str, environ: Mapping[str, str]) -> None:
    if environ.get(GPU_ORDER) != AS_NVIDIA_SMI and len({gpu.model for gpu in gpus}) > 1:
        raise UserError(
            f"{VISIBLE_GPUS}={allowed}: this machine's GPUs differ, and CUDA counts them otherwise than nvidia-smi;"
            f" name them by UUID (nvidia-smi -L), or set {GPU_ORDER}={AS_NVIDIA_SMI}"
        )


def _named(gpus: Sequence[Gpu], name: str, allowed: str) -> Gpu:
    every = [one for gpu in gpus for one in (gpu, *gpu.instances)]
    # CUDA takes a UUID's beginning as well, where it is the only one.
    begins = len(name) > len("GPU-")
    found = [gpu for gpu in every if gpu.name == name or (begins and gpu.uuid.startswith(name))]
    if len(found) != 1:
        there = ", ".join(gpu.name for gpu in gpus) or "none"
        raise UserError(f"{VISIBLE_GPUS}={allowed}: {name or 'nothing'} is no GPU of this machine, which has {there}")
    return found[0].instances[0] if found[0].instances else found[0]
