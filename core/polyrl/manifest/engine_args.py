"""What `rollout.engine.args` say, which SGLang reads: how many GPUs an engine has, above all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from polyrl.manifest.rollout import EngineSpec, EngineType

TENSOR_PARALLEL: Final = ("--tp-size", "--tensor-parallel-size", "--tp")
PIPELINE_PARALLEL: Final = ("--pp-size", "--pipeline-parallel-size", "--pp")
DATA_PARALLEL: Final = ("--dp-size", "--data-parallel-size", "--dp")
MEMORY_FRACTION: Final = "--mem-fraction-static"
"""The share that SGLang takes, for weights, keys and values, of what is free when it starts."""
DATA_PARALLEL_ATTENTION: Final = "--enable-dp-attention"
"""Data parallel within the tensor-parallel group, which adds no GPUs."""


def argument(args: Sequence[str], names: Iterable[str]) -> str | None:
    """The value of an argument of SGLang's command line, which the last one of its names gives; None when none does."""
    value = None
    for index, text in enumerate(args):
        for name in names:
            if text == name and index + 1 < len(args):
                value = args[index + 1]
            elif text.startswith(f"{name}="):
                value = text[len(name) + 1 :]
    return value


def gpus_per_engine(engine: EngineSpec) -> int:
    """GPUs of one engine: what its arguments spread it over; 0 for an embedded one."""
    if engine.type is EngineType.EMBEDDED:
        return 0
    return tensor_parallel(engine) * pipeline_parallel(engine) * copies_per_engine(engine)


def tensor_parallel(engine: EngineSpec) -> int:
    """GPUs over which each layer is spread."""
    return _size(engine, TENSOR_PARALLEL)


def pipeline_parallel(engine: EngineSpec) -> int:
    """GPUs over which the layers are spread."""
    return _size(engine, PIPELINE_PARALLEL)


def memory_fraction(engine: EngineSpec) -> float | None:
    """None where it is not given, or is no number, which SGLang itself refuses."""
    given = argument(engine.args, [MEMORY_FRACTION])
    try:
        return None if given is None else float(given)
    except ValueError:
        return None


def copies_per_engine(engine: EngineSpec) -> int:
    """How often an engine holds its weights, each time on GPUs of their own."""
    return 1 if DATA_PARALLEL_ATTENTION in engine.args else _size(engine, DATA_PARALLEL)


def _size(engine: EngineSpec, names: Iterable[str]) -> int:
    given = argument(engine.args, names)
    return max(1, int(given)) if given is not None and given.isdecimal() else 1
