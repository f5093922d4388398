"""Two ways by which weights come into an SGLang engine beside the learner: a file in memory, or a handle to a tensor.

    make bench-hand-over-sglang

    file     `update_weights_from_disk` of a folder in /dev/shm, as every engine here gets them; the file is made beside
             the step, for rollouts elsewhere anyway
    handle   the learner puts its weights into one shared tensor and posts where it lies (`update_weights_from_tensor`,
             `flattened_bucket`); it waits until the engine has copied, since the next step changes them

Two versions in turn, on one server; after each the engine has to have the checksums that the other way gave. Seconds
are medians. On a CPU: with a GPU a handle spares the copy from the host, and building is a copy within the device; this
does not measure that. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import torch
from pause import CPU_ARGS, policies
from safetensors.torch import save_file

from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl_rollout.engines.child import ChildProcess
from polyrl_rollout.engines.sglang.launch import (
    HOST,
    PYTHON,
    await_ready,
    draw_key,
    free_port,
    server_command,
    write_config,
)

CONTEXT: Final = 512
CALL_S: Final = 300.0
LINE_BYTES: Final = 64 << 20
"""A payload is kilobytes; asyncio's own limit of a line is 64 KiB."""


class Server:
    """One SGLang, by its control calls."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with self._session.post(path, json=body, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200:
                raise SystemExit(f"SGLang answered {path} with {response.status}: {text[:500]}")
            return json.loads(text)

    async def by_file(self, folder: Path) -> float:
        """Seconds that the engine waits."""
        begun = time.monotonic()
        await self.post("/update_weights_from_disk", {"model_path": str(folder), "load_format": "auto"})
        return time.monotonic() - begun

    async def by_handle(self, payload: str) -> float:
        """Seconds that the engine waits; the learner waits for these and for the building."""
        begun = time.monotonic()
        await self.post("/begin_weight_update", {})
        body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket"}
        await self.post("/update_weights_from_tensor", body)
        await self.post("/end_weight_update", {})
        return time.monotonic() - begun

    async def checksums(self) -> str:
        return json.dumps(await self.post("/weights_checker", {"action": "checksum"}), sort_keys=True)


class Learner:
    """The process whose weights they are."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def bucket(self, folder: Path) -> tuple[float, str]:
        """Seconds to build it, and what is posted."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n".encode())
        await self._process.stdin.drain()
        async with asyncio.timeout(CALL_S):
            answer = json.loads(await self._process.stdout.readline())
        return answer["build"], answer["payload"]


async def measure(folders: list[Path], rounds: int) -> dict[str, Any]:
    spec = EngineSpec(type=EngineType.SGLANG, max_context=CONTEXT, args=CPU_ARGS)
    key, port = draw_key(), free_port()
    config = write_config(key)
    seed = secrets.randbelow(1 << 31)
    child = await ChildProcess.start(server_command(spec, seed, folders[0], port, CONTEXT, config), {})
    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(force_close=True)
    try:
        async with aiohttp.ClientSession(f"http://{HOST}:{port}", headers=headers, connector=connector) as session:
            await await_ready(child, session)
            return await _alternate(Server(session), folders, rounds)
    finally:
        config.unlink(missing_ok=True)
        await child.kill()


async def _alternate(server: Server, folders: list[Path], rounds: int) -> dict[str, Any]:
    command = [os.environ.get(PYTHON, sys.executable), str(Path(__file__).parent / "processes/bucket.py")]
    process = await asyncio.create_subprocess_exec(
        *command,
        *map(str, folders),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    learner, seconds = Learner(process), dict[str, list[float]](file=[], build=[], handle=[])
    sums: dict[Path, str] = {}
    try:
        for number in range(2 * rounds):
            one, other = folders[number % 2], folders[1 - number % 2]
            seconds["file"].append(await server.by_file(one))
            _same(sums, one, await server.checksums())
            build, payload = await learner.bucket(other)
            seconds["build"].append(build)
            seconds["handle"].append(await server.by_handle(payload))
            _same(sums, other, await server.checksums())
    finally:
        process.kill()
        await process.wait()
    if len(set(sums.values())) < len(folders):
        raise SystemExit("two versions have one checksum, so nothing was compared")
    return {name: round(statistics.median(found[1:]), 3) for name, found in seconds.items()}


def _same(sums: dict[Path, str], folder: Path, found: str) -> None:
    if sums.setdefault(folder, found) != found:
        raise SystemExit(f"{folder.name}: the engine has other weights by the one way than by the other")


@contextmanager
def versions(hidden: int, layers: int) -> Iterator[list[Path]]:
    """Two, in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folders = []
        for number, (tensors, config) in enumerate(policies(hidden, layers, 1)):
            folder = Path(name) / f"version-{number}"
            folder.mkdir()
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
            (folder / "config.json").write_bytes(config)
            folders.append(folder)
        yield folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with versions(given.hidden, given.layers) as folders:
        size = (folders[0] / "model.safetensors").stat().st_size
        found = asyncio.run(measure(folders, given.rounds))
    ratio = (found["build"] + found["handle"]) / found["file"]
    print(json.dumps({"bytes": size, **found, "handleToFile": round(ratio, 2)}), flush=True)


if __name__ == "__main__":
    main()
