"""What of an engine SGLang reads from its command line: how many GPUs it has, above all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from polyrl.manifest.rollout import EngineSpec

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
    """GPUs of one engine, over which it is spread; 0 for an embedded one."""
    if not engine.type.is_server:
        return 0
    return engine.tensor_parallel * pipeline_parallel(engine) * copies_per_engine(engine)


def attention_parallel(engine: EngineSpec) -> int:
    """GPUs over which a layer's heads are spread; fewer than tensor parallel where copies of attention share those."""
    copies = engine.data_parallel if DATA_PARALLEL_ATTENTION in engine.args else 1
    return max(1, engine.tensor_parallel // copies)


def pipeline_parallel(engine: EngineSpec) -> int:
    """GPUs over which the layers are spread."""
    given = argument(engine.args, PIPELINE_PARALLEL)
    return max(1, int(given)) if given is not None and given.isdecimal() else 1


def copies_per_engine(engine: EngineSpec) -> int:
    """How often an engine holds its weights, each time on GPUs of their own."""
    return 1 if DATA_PARALLEL_ATTENTION in engine.args else engine.data_parallel


def typed_arguments(engine: EngineSpec) -> list[str]:
    """SGLang's arguments for the fields that say the same; none for what it does anyway."""
    sizes = ((TENSOR_PARALLEL[0], engine.tensor_parallel), (DATA_PARALLEL[0], engine.data_parallel))
    given = [text for name, size in sizes if size > 1 for text in (name, str(size))]
    return given if engine.mem_fraction is None else [*given, MEMORY_FRACTION, f"{engine.mem_fraction:g}"]
