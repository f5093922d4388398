"""The rollout agent, unchanged, on an engine whose tokens are counted where SIGKILL cannot reach: in a mapped file.

python counted_agent.py COUNTERS --engine-name NAME ...   counts into COUNTERS/NAME, one uint64

So what a killed rollout took with it is known exactly: what its agent got from its engine, less what the manager took.
Refuses to hold: anything of the agent. Read next: `polyrl_rollout.agent`.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import typer

from polyrl.manifest.rollout import Engine as EngineSpec
from polyrl_rollout.agent import __main__ as agent
from polyrl_rollout.engine import Engine, EngineInfo, GenerateRequest, TokenChunk
from polyrl_rollout.engines.choice import choose_engine


class CountedEngine:
    """An engine and a counter of the tokens that left it."""

    def __init__(self, engine: Engine, counter: Path) -> None:
        self._engine = engine
        counter.write_bytes(bytes(8))
        with counter.open("r+b") as file:
            self._count = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")

    @property
    def version(self) -> int:
        return self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._engine.version = version

    async def start(self, model_folder: Path) -> EngineInfo:
        return await self._engine.start(model_folder)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in self._engine.generate(request):
            self._count[0] += len(chunk.ids)
            yield chunk

    async def abort(self, rid: str) -> None:
        await self._engine.abort(rid)

    async def load_weights(self, version: int, folder: Path) -> None:
        await self._engine.load_weights(version, folder)

    async def health(self) -> None:
        await self._engine.health()

    async def close(self) -> None:
        await self._engine.close()


if __name__ == "__main__":
    file = Path(sys.argv.pop(1)) / sys.argv[sys.argv.index("--engine-name") + 1]

    def counted(spec: EngineSpec, seed: int) -> Engine:
        return CountedEngine(choose_engine(spec, seed), file)

    with patch.object(agent, "choose_engine", counted):
        typer.run(agent.main)
