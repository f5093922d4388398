"""Many real agents in one process, on engines that give tokens at a fixed pace: what a restarted manager takes back.

Started by `restart`: `python restart_fleet.py FOLDER ENGINES STREAMS PACE HEAD`. Each engine runs STREAMS samples; each
gives HEAD tokens at once and then PACE tokens per second, for ever if its budget allows.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from stand import EPOCH

from polyrl import parent_death_signal
from polyrl.sample import Finish, Pool
from polyrl.wire import EngineCapacity
from polyrl.wire.engine_identity import engine_keys
from polyrl_rollout.agent.__main__ import read_endpoint
from polyrl_rollout.agent.app import Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.engines.port import NO_VERSION, GenerateRequest, LoadSeconds, TokenChunk
from polyrl_rollout.weights.staging import Staging

CHUNK: Final = 10
"""Tokens per chunk of a stream."""
TOKEN: Final = 12345
CONTEXT: Final = 65_536
NOTICE_S: Final = 1.0


class PacedEngine:
    """The port, with one token for everything."""

    def __init__(self, streams: int, pace: float, head: int) -> None:
        self.version = NO_VERSION
        self.keeps = self.sleeps = False
        self._info = EngineCapacity(streams, streams * CONTEXT, max_context=CONTEXT)
        self._pause, self._head = CHUNK / pace, head
        self._running: set[str] = set()

    async def start(self, model_folder: Path) -> EngineCapacity:
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        left, count = request.max_new_tokens, self._head
        self._running.add(request.rid)
        # Streams that all give at the same instant are no fleet's.
        await asyncio.sleep(self._pause * (zlib.crc32(request.rid.encode()) % 997) / 997)
        while request.rid in self._running and left:
            count = min(count, left)
            left -= count
            yield TokenChunk(
                [TOKEN] * count, [-0.5] * count, version=self.version, finish=None if left else Finish.LENGTH
            )
            count = CHUNK
            await asyncio.sleep(self._pause)

    async def abort(self, rid: str) -> None:
        self._running.discard(rid)

    async def load_weights(self, version: int, folder: Path) -> LoadSeconds:
        self.version = version
        return LoadSeconds(wait=0.0, load=0.0, verify=0.0)

    async def sleep(self) -> None:
        self.version = NO_VERSION

    async def wake(self, version: int, folder: Path) -> LoadSeconds:
        return await self.load_weights(version, folder)

    async def health(self) -> None:
        return

    async def close(self) -> None:
        self._running.clear()


async def run(folder: Path, engines: int, streams: int, pace: float, head: int) -> None:
    """Until cancelled, or until every agent has ended."""
    file, info = folder / "manager.json", EngineCapacity(streams, streams * CONTEXT, max_context=CONTEXT)
    async with asyncio.TaskGroup() as agents:
        for number in range(engines):
            name = f"paced-{number}"
            settings = AgentSettings(
                lambda: read_endpoint(file, EPOCH),
                engine_keys(folder / "keys", name),
                run_epoch=EPOCH,
                engine=name,
                pool=Pool.SPOT,
                drain_s=NOTICE_S,
                seed=0,
            )
            staging = Staging("restart-benchmark", name)
            agents.create_task(Agent(settings, PacedEngine(streams, pace, head), info, staging).run())


if __name__ == "__main__":
    parent_death_signal.hold()
    place, fleet_size, width, speed, first = sys.argv[1:]
    asyncio.run(run(Path(place), int(fleet_size), int(width), float(speed), int(first)))
