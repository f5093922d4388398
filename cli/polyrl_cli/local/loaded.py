"""Whether the processes of a run on this machine are forked from one that has loaded its libraries, and which."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from polyrl.forks import ForkServer, own_server
from polyrl.local.devices import hidden_all
from polyrl.manifest.environment import EVERY_WORKER, inherited

LIBRARIES: Final = (
    "polyrl_trainer.app",
    "transformers.generation.continuous_batching.continuous_api",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.processing_utils",
    "torch.utils.tensorboard",
    "polyrl_rollout.manager.server",
    "polyrl_rollout.agent.app",
    "typer",
)
"""What takes long to load of a trainer and of an embedded engine, with torch below it and what every model's module
imports, and of manager and agent."""

DRIVERS: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""One is there wherever the driver of a GPU is; the last one under Windows."""


@contextmanager
def loaded_libraries() -> Iterator[ForkServer | None]:
    """Begins to load them, and ends what did on the way out. None where processes are spawned: beside a GPU, since CUDA
    bears no fork, and where the kernel gives nobody its orphans."""
    if sys.platform != "linux" or (any(driver.exists() for driver in DRIVERS) and not hidden_all(os.environ)):
        yield None
        return
    forks = own_server() or ForkServer.start(LIBRARIES, inherited(os.environ, EVERY_WORKER))
    try:
        yield forks
    finally:
        forks.close()
