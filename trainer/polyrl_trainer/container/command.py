"""What a trainer's container is to run, read from its command line, and how an agent that ended is started again.

    python -m polyrl_trainer.container --engines 2 --gpus-each 1 --threads 1 -- AGENT ... -- TRAINER ...

An agent that ended, however it did, is started again after 1 s, then 2, 4 ... 30 s; one that lived for SETTLED_S begins
anew. It is never given up: the trainer goes on with other engines, and a GPU that is free again may hold the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from polyrl.errors import UserError
from polyrl.local.starts import pause_after
from polyrl.manifest.environment import EVERY_WORKER, VISIBLE_GPUS, inherited
from polyrl.worker import ENGINE_SLOT

SETTLED_S: Final = 600.0
"""An agent that lived for so long has started its engine: what ends it is no wrong setting."""

SEPARATOR: Final = "--"
NUMBERS: Final = ("--engines", "--gpus-each", "--threads")

OF_ENGINES: Final = (
    *EVERY_WORKER,
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "SGLANG_*", "TORCH*", "TRITON_*", "OMP_*", "PYTHON*"),
    *("MPLCONFIGDIR", "HF_HOME", "LOGNAME"),
)
"""What an agent inherits of the container's environment."""


@dataclass(frozen=True)
class ContainerCommand:
    """What the container runs."""

    agent: tuple[str, ...]
    """With ENGINE_SLOT where the engine's number goes."""
    trainer: tuple[str, ...]
    engines: int
    gpus_each: int
    """0: an engine sees all that there are."""
    threads: int

    def agent_command(self, number: int) -> list[str]:
        """Command of this engine's agent."""
        return [word.replace(ENGINE_SLOT, str(number)) for word in self.agent]

    def agent_environment(self, number: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Environment of this engine's agent, in a container with `environ`."""
        own = inherited(environ, OF_ENGINES) | {"OMP_NUM_THREADS": str(self.threads)}
        first, after = number * self.gpus_each, (number + 1) * self.gpus_each
        there = [gpu for gpu in environ.get(VISIBLE_GPUS, "").split(",") if gpu] or list(map(str, range(after)))
        return own | ({VISIBLE_GPUS: ",".join(there[first:after])} if self.gpus_each else {})


def parse_command(argv: Sequence[str]) -> ContainerCommand:
    """The command line without the program's name. Raises UserError."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    if len(parts) != 3 or not all(parts):
        raise UserError("give the numbers, the agent's command and the trainer's, with -- between them")
    given = dict(zip(parts[0][::2], parts[0][1::2], strict=False))
    if set(given) != set(NUMBERS) or not all(text.isdecimal() for text in given.values()):
        raise UserError(f"give {', '.join(NUMBERS)}, each a number")
    engines, gpus, threads = (int(given[name]) for name in NUMBERS)
    return ContainerCommand(tuple(parts[1]), tuple(parts[2]), engines=engines, gpus_each=gpus, threads=threads)


@dataclass(frozen=True)
class Restarts:
    """How often in a row an agent has ended."""

    failures: int = 0

    def after(self, lived_s: float) -> Restarts:
        """Another end, of one that lived for so long."""
        return Restarts(1 if lived_s >= SETTLED_S else self.failures + 1)

    @property
    def pause_s(self) -> float:
        """Until the next start."""
        return pause_after(self.failures)


def exit_status(code: int) -> int:
    """The container's, of a trainer that ended with `code`; for one that a signal ended what shells say."""
    return code if code >= 0 else 128 - code
