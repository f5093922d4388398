"""Which GPUs this machine has, as `nvidia-smi` lists them: asking CUDA itself would take memory on each of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from polyrl.local.devices import Gpu, hidden_all, listed_gpus, visible_gpus

NVIDIA_SMI: Final = "nvidia-smi"
DEADLINE_S: Final = 30.0
"""It answers in 0.1 to 2 s, longest where nothing keeps the driver loaded; a GPU that fell off the bus may hang it."""

REAP_S: Final = 1.0
"""For one that was killed to be gone."""

GPU_DEVICE: Final = Path("/dev/nvidiactl")
"""There wherever the driver is."""

WITHOUT_CUDA: Final = "+cpu"
"""Ends the version of a torch that was built without CUDA."""


@dataclass(frozen=True)
class GpusHere:
    """What a run may use."""

    gpus: tuple[Gpu, ...] = ()
    note: str = ""
    """Why there are none, where a person would expect some."""


def gpus_here(environ: Mapping[str, str] = os.environ) -> GpusHere:
    """GPUs that CUDA_VISIBLE_DEVICES leaves to this process. Raises UserError where it names others."""
    if hidden_all(environ):
        return GpusHere()
    try:
        listing = _ask("-L")
        memory = _ask("--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        missing = f"there is a GPU driver here but no {NVIDIA_SMI} on PATH: workers choose GPUs by themselves"
        return GpusHere(note=missing if GPU_DEVICE.exists() else "")
    except subprocess.TimeoutExpired:
        return GpusHere(note=f"{NVIDIA_SMI} did not answer within {DEADLINE_S:g} s: workers choose GPUs by themselves")
    except (subprocess.CalledProcessError, OSError) as error:
        return GpusHere(note=f"{NVIDIA_SMI} lists no GPUs: {_reason(error)}")
    gpus = visible_gpus(listed_gpus(listing, memory), environ)
    if gpus and (torch := _torch_version()).endswith(WITHOUT_CUDA):
        return GpusHere(note=f"torch {torch} is built without CUDA, so the learner runs on the CPU, beside a GPU")
    return GpusHere(gpus)


def _ask(*words: str) -> str:
    argv, pipe = [NVIDIA_SMI, *words], subprocess.PIPE
    # Not subprocess.run: past its deadline it waits for the end without one, and what hangs in a driver does not end.
    asked = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")
    try:
        printed, complaint = asked.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        with suppress(subprocess.TimeoutExpired):
            asked.communicate(timeout=REAP_S)
        raise
    if asked.returncode:
        raise subprocess.CalledProcessError(asked.returncode, argv, printed, complaint)
    return printed


def _reason(error: subprocess.CalledProcessError | OSError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    words = " ".join(f"{error.stdout} {error.stderr}".split())
    return words[:200] or f"it ended with exit code {error.returncode}"


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
