"""How a server is started: its command, its key, its port, and when it is ready."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final

import aiohttp

from polyrl.manifest.engine_args import argument, typed_arguments
from polyrl.manifest.rollout import EngineSpec, WeightSwitch
from polyrl_rollout.engines.child import ChildProcess, child_path
from polyrl_rollout.engines.port import EngineFailed, EngineLost

EXACT_VERSIONS: Final = ("--disable-overlap-schedule", "--stream-interval", "1")
"""A batch that was launched before a pause in place is read after it: its tokens would get the new weights' version."""
PYTHON: Final = "POLYRL_SGLANG_PYTHON"
"""Environment variable: the interpreter that has SGLang; default the agent's own."""
HOST: Final = "127.0.0.1"
START_DEADLINE_S: Final = 600.0
"""A CPU start takes 20 to 100 s; a large model on a cold disk, with CUDA graphs to capture, several minutes."""
POLL_S: Final = 0.25
"""Between two health checks of a starting server, which offers no event to wait for."""
HEALTH_DEADLINE_S: Final = 20.0
"""One answer of /health: 1 s by design, and SGLang itself gives up on its scheduler after 20 s."""
API_KEY_BYTES: Final = 32
"""Randomness of the key; beyond guessing."""
MAX_SEED: Final = 2**31
"""Seeds of a server lie below; engines that share one, or one that repeats it when it starts again, draw copies."""
OURS: Final = {"--config": "a key", "--api-key": "a key", "--admin-api-key": "a key", "--random-seed": "a seed"}
"""Arguments that only the agent gives, and why."""
SAVER: Final = "--enable-memory-saver"
"""Without it memory that sleeps is not freed. It needs a GPU: on a CPU orders are followed, and nothing is freed."""
ENVIRONMENT: Final = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "false"}
"""Set by whoever starts the agent, its logprobs would be those of temperature 1, whatever was drawn from."""
SLEEP_ENVIRONMENT: Final = {"NCCL_GRAPH_REGISTER": "0"}
"""Captured kernels of several GPUs that registered memory which is unmapped meanwhile hang after they woke."""


def check_arguments(spec: EngineSpec) -> None:
    """Raises EngineFailed for an argument of the manifest's that is drawn for each start of an engine."""
    for name, drawn in OURS.items():
        if any(text == name or text.startswith(f"{name}=") for text in spec.args):
            raise EngineFailed(f"rollout.engine.args: {name} is not for the manifest; {drawn} is drawn for each engine")


def draw_key() -> str:
    """Letters and digits: SGLang makes an argument of what its config says, and one in 64 keys of base64 begins
    with a dash, as flags do; such a server did not start."""
    return secrets.token_hex(API_KEY_BYTES)


def write_config(key: str) -> Path:
    """A file that only this account may read: arguments of a process can be read by all. SGLang has endpoints that run
    what they are sent, and the loopback interface is open to every account."""
    descriptor, name = tempfile.mkstemp(prefix="sglang-", suffix=".yaml")
    with os.fdopen(descriptor, "w") as file:
        file.write(f'api-key: "{key}"\n')
    return Path(name)


def server_command(
    spec: EngineSpec, seed: int, model_folder: Path, port: int, context_tokens: int, config: Path
) -> list[str]:
    """The server's command; the manifest's own arguments come late, so that they win over all but EXACT_VERSIONS."""
    return [
        *(os.environ.get(PYTHON, sys.executable), "-m", "sglang.launch_server"),
        *("--model-path", child_path(model_folder)),
        *("--host", HOST, "--port", str(port)),
        *("--config", str(config)),
        *("--context-length", str(context_tokens)),
        *("--max-running-requests", str(spec.max_running)),
        *("--random-seed", str(seed)),
        # Weights always come by `load_weights`; reading the folder's own first would be a wasted load.
        *("--load-format", "dummy"),
        "--skip-tokenizer-init",
        "--incremental-streaming-output",
        # Otherwise an idle scheduler burns a whole core.
        "--sleep-on-idle",
        *typed_arguments(spec),
        *spec.args,
        *(EXACT_VERSIONS if spec.weight_switch is WeightSwitch.KEEP else ()),
    ]


def sleep_arguments(spec: EngineSpec) -> list[str]:
    """What a server needs that is to sleep."""
    return [] if argument(spec.args, ["--device"]) == "cpu" or SAVER in spec.args else [SAVER]


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
                    kind = EngineLost if child.returncode < 0 else EngineFailed
                    raise kind(f"SGLang ended with status {child.returncode} while starting; see its log above")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise EngineLost(f"SGLang was not ready within {START_DEADLINE_S:g} s; see its log above") from None


async def _is_healthy(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health", timeout=aiohttp.ClientTimeout(total=HEALTH_DEADLINE_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
