"""A stock SGLang server as a child process: its command line, its start, and the checkpoints that it cannot load.

SGLang pins its own torch, so it usually lives in an environment of its own: POLYRL_SGLANG_PYTHON names that
environment's interpreter. Whatever else SGLang reads from the environment it inherits from the agent.

SGLang's loader fails half-way through weights of another shape and takes the server with it; a check of the headers
first keeps the old weights serving.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Final, TypeAlias

import aiohttp
from safetensors import SafetensorError, safe_open

from polyrl.manifest.rollout import EngineSpec
from polyrl_rollout.engines.child import ChildProcess, child_path
from polyrl_rollout.engines.port import EngineFailed

PYTHON: Final = "POLYRL_SGLANG_PYTHON"
"""Environment variable: the interpreter that has SGLang; default the agent's own."""
HOST: Final = "127.0.0.1"

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Shape by tensor name."""
START_DEADLINE_S: Final = 600.0
"""A CPU start takes 20 to 100 s; a large model on a cold disk, with CUDA graphs to capture, several minutes."""
POLL_S: Final = 0.25
"""Between two health checks of a starting server, which offers no event to wait for."""
HEALTH_DEADLINE_S: Final = 20.0
"""One answer of /health: 1 s by design, and SGLang itself gives up on its scheduler after 20 s."""


def command_line(spec: EngineSpec, seed: int, model_folder: Path, port: int, context_tokens: int) -> list[str]:
    """The server's command; the manifest's own arguments come last, so that they win."""
    return [
        *(os.environ.get(PYTHON, sys.executable), "-m", "sglang.launch_server"),
        *("--model-path", child_path(model_folder)),
        *("--host", HOST, "--port", str(port)),
        *("--context-length", str(context_tokens)),
        *("--max-running-requests", str(spec.max_running)),
        *("--random-seed", str(seed)),
        # Weights always come by `load_weights`; reading the folder's own first would be a wasted load.
        *("--load-format", "dummy"),
        "--skip-tokenizer-init",
        "--incremental-streaming-output",
        # Otherwise an idle scheduler burns a whole core.
        "--sleep-on-idle",
        *spec.args,
    ]


def free_port() -> int:
    """A port that the system had free just now; a server that finds it taken fails its start."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def await_ready(child: ChildProcess, session: aiohttp.ClientSession) -> None:
    """Returns once /health answers 200. Raises EngineFailed when the server ends first, or at the deadline."""
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            while not await _is_healthy(session):
                if child.returncode is not None:
                    raise EngineFailed(f"SGLang ended with status {child.returncode} while starting; see its log above")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise EngineFailed(f"SGLang was not ready within {START_DEADLINE_S:g} s; see its log above") from None


async def _is_healthy(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health", timeout=aiohttp.ClientTimeout(total=HEALTH_DEADLINE_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def read_shapes(folder: Path) -> Shapes:
    """Shapes by tensor name over all safetensors files of `folder`. Raises EngineFailed naming what cannot be read."""
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise EngineFailed(f"{path} cannot be read: {error}") from error
    if not shapes:
        raise EngineFailed(f"{folder} holds no safetensors")
    return shapes


def check_same(shapes: Shapes, loaded: Shapes) -> None:
    """Raises EngineFailed naming a tensor that a loaded checkpoint had otherwise."""
    for name in sorted(shapes.keys() | loaded.keys()):
        if shapes.get(name) != loaded.get(name):
            raise EngineFailed(f"tensor {name} has shape {shapes.get(name)}, not {loaded.get(name)} as it was loaded")
