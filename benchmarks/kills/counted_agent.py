"""The rollout agent, unchanged, with two counters where SIGKILL cannot reach: in a mapped file.

python counted_agent.py COUNTERS --engine-name NAME ...   counts into COUNTERS/NAME, two uint64

So what a killed rollout took with it is known exactly: what its agent got from its engine, less what the manager took.
And so are the bytes that it sent: every frame to the manager, whatever is in it.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final
from unittest.mock import patch

import typer

from polyrl.manifest.rollout import EngineSpec
from polyrl.wire import EngineCapacity, FromAgent
from polyrl_rollout.agent import __main__ as agent
from polyrl_rollout.agent.__main__ import choose_engine
from polyrl_rollout.agent.link import AgentLink
from polyrl_rollout.engines.port import GenerateRequest, InferenceEngine, LoadSeconds, TokenChunk

FORMAT: Final = "=2Q"
"""Tokens that the engine gave, bytes that the agent sent."""
TOKENS, BYTES = 0, 1


class CountedEngine:
    """An engine and a counter of the tokens that left it."""

    def __init__(self, engine: InferenceEngine, counters: memoryview) -> None:
        self._engine, self._counters = engine, counters
        self.keeps, self.sleeps = engine.keeps, engine.sleeps

    @property
    def version(self) -> int:
        return self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._engine.version = version

    async def start(self, model_folder: Path) -> EngineCapacity:
        return await self._engine.start(model_folder)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        async for chunk in self._engine.generate(request):
            self._counters[TOKENS] += len(chunk.ids)
            yield chunk

    async def abort(self, rid: str) -> None:
        await self._engine.abort(rid)

    async def load_weights(self, version: int, folder: Path) -> LoadSeconds:
        return await self._engine.load_weights(version, folder)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self, version: int, folder: Path) -> LoadSeconds:
        return await self._engine.wake(version, folder)

    async def health(self) -> None:
        await self._engine.health()

    async def close(self) -> None:
        await self._engine.close()


def mapped(file: Path) -> memoryview:
    """Two counters at zero, uint64 each, whose every change is in the file at once."""
    file.write_bytes(struct.pack(FORMAT, 0, 0))
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), struct.calcsize(FORMAT))).cast("Q")


def main(file: Path) -> None:
    """The agent's own command line, counted into `file`."""
    counters = mapped(file)
    send = AgentLink.send

    def counted_send(link: AgentLink, message: FromAgent) -> int:
        size = send(link, message)
        counters[BYTES] += size
        return size

    def counted_engine(spec: EngineSpec, *, sleeps: bool = False) -> InferenceEngine:
        return CountedEngine(choose_engine(spec, sleeps=sleeps), counters)

    with patch.object(agent, "choose_engine", counted_engine), patch.object(AgentLink, "send", counted_send):
        typer.run(agent.main)


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)) / sys.argv[sys.argv.index("--engine-name") + 1])
