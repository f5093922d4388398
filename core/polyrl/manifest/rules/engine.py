"""Rules about engines: what has a field of its own is no argument, and what an engine that takes new weights cannot be.

CEL and Python share one pattern for an argument's names. SGLang's own parser takes abbreviations of them too, which no
rule finds; they say nothing that a field would not be believed before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from polyrl.manifest.engine_args import DATA_PARALLEL, MEMORY_FRACTION, TENSOR_PARALLEL
from polyrl.manifest.rules.rule import Rule
from polyrl.manifest.spec import JobSpec

TYPED: Final = (*TENSOR_PARALLEL, *DATA_PARALLEL, MEMORY_FRACTION)
QUANTISED: Final = ("--quantization", "--torchao-config", "--quantization-param-path")
SEVERAL_HOSTS: Final = ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr")


def _pattern(names: tuple[str, ...]) -> str:
    """Pattern of an argument of one of these names, alone or with its value behind `=`."""
    return f"^({'|'.join(names)})(=.*)?$"


def _without(names: tuple[str, ...]) -> Callable[[JobSpec], bool]:
    found = re.compile(_pattern(names)).search
    return lambda spec: not any(found(argument) for argument in spec.rollout.engine.args)


def _refused(rule: str, names: tuple[str, ...], message: str) -> Rule:
    cel = f"!self.rollout.engine.args.exists(a, a.matches('{_pattern(names)}'))"
    return Rule(rule, "rollout.engine.args", message=message, holds=_without(names), cel=cel)


ENGINE_RULES: Final[tuple[Rule, ...]] = (
    _refused(
        "engine-arguments-typed",
        TYPED,
        "how many GPUs an engine has, and how much of them, is written beside args: tensorParallel for --tp-size,"
        " dataParallel for --dp-size, memFraction for --mem-fraction-static",
    ),
    _refused(
        "engine-not-quantised",
        QUANTISED,
        "an engine of quantised weights cannot take new ones while it runs (it would crash, or serve wrong numbers):"
        " leave --quantization and --torchao-config out",
    ),
    _refused(
        "engine-on-one-host",
        SEVERAL_HOSTS,
        "an engine lies on one machine: leave --nnodes and --dist-init-addr out, and take a tensorParallel of at most"
        " the GPUs of one",
    ),
    Rule(
        "engine-parallel-on-gpus",
        "rollout.engine.tensorParallel",
        message="tensorParallel, dataParallel and memFraction are of type sglang; an embedded engine runs on the CPU",
        holds=lambda s: (
            s.rollout.engine.type.is_server
            or (s.rollout.engine.tensor_parallel, s.rollout.engine.data_parallel, s.rollout.engine.mem_fraction)
            == (1, 1, None)
        ),
        cel="self.rollout.engine.type != 'embedded' || (self.rollout.engine.tensorParallel == 1"
        " && self.rollout.engine.dataParallel == 1 && !has(self.rollout.engine.memFraction))",
    ),
)
