"""An engine without a model, for tests: each token is a hash of all ids before it, so a continuation can be checked.

Because the next token depends on the input alone, generating on from prompt + tokens so far gives what an undisturbed
run gives (`continuation`). Speed, failures and hangs are set by whoever drives the test.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Final

from polyrl.sample import Finish
from polyrl.wire import EngineCapacity
from polyrl_rollout.engines.port import (
    NO_VERSION,
    EngineFailed,
    GenerateRequest,
    LoadSeconds,
    RequestRejected,
    TokenChunk,
)

VOCABULARY: Final = 1000
"""Tokens are drawn from range(VOCABULARY)."""
LOGPROB: Final = -0.5
HEALTH_SECONDS: Final = 0.5


class FakeEngine:
    """Follows the port to the letter; every knob is a public attribute."""

    def __init__(
        self, capacity: EngineCapacity | None = None, tokens_per_second: float = 2000.0, chunk_tokens: int = 4
    ) -> None:
        self.capacity = capacity or EngineCapacity(max_running=32, kv_tokens=1 << 16, max_context=4096)
        self.tokens_per_second = tokens_per_second
        """Speed of each sequence."""
        self.chunk_tokens = chunk_tokens
        self.version = NO_VERSION
        self.keeps = False
        self.sleeps = False
        self.asleep = False
        """Set while it holds no memory."""
        self.falls_asleep = asyncio.Event()
        """Cleared: an order to sleep waits."""
        self.falls_asleep.set()
        self.folder: Path | None = None
        """What is loaded."""
        self.broken = False
        """Every call fails from now on."""
        self.refuse_weights = False
        self.raises: Exception | None = None
        """What the next request raises."""
        self.hang = asyncio.Event()
        """Set: streams give nothing and health does not answer."""
        self.aborted: list[str] = []
        self.begun = 0
        """Requests so far."""
        self.loading = asyncio.Event()
        """Cleared: a load of weights waits."""
        self.loading.set()
        self.load_seconds = LoadSeconds(wait=0.25, load=0.5, verify=0.125)
        """What a load says of itself."""
        self.on_close: Callable[[], None] = lambda: None
        self._running: set[str] = set()

    async def start(self, model_folder: Path) -> EngineCapacity:
        self._fail_if_broken()
        self.folder = model_folder
        return self.capacity

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        if len(request.input_ids) + request.max_new_tokens > self.capacity.max_context:
            raise RequestRejected(f"{len(request.input_ids)} + {request.max_new_tokens} tokens exceed the context")
        if self.raises is not None:
            raised, self.raises = self.raises, None
            raise raised
        ids, left = list(request.input_ids), request.max_new_tokens
        self._running.add(request.rid)
        self.begun += 1
        try:
            while request.rid in self._running:
                await asyncio.sleep(self.chunk_tokens / self.tokens_per_second)
                self._fail_if_broken()
                if self.hang.is_set() or request.rid not in self._running:
                    continue
                new = continuation(ids, min(left, self.chunk_tokens), request.sampling.stop_token_ids)
                ids, left = ids + new, left - len(new)
                finish = finish_of(new, left, request.sampling.stop_token_ids)
                yield TokenChunk(new, [LOGPROB] * len(new), version=self.version, finish=finish)
                if finish is not None:
                    return
        finally:
            self._running.discard(request.rid)

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        self._running.discard(rid)

    async def load_weights(self, version: int, folder: Path) -> LoadSeconds:
        await self.loading.wait()
        self._fail_if_broken()
        if self.asleep:
            raise EngineFailed("its weights sleep")
        if self.refuse_weights:
            raise EngineFailed(f"version {version} does not fit the model")
        if self._running and not self.keeps:
            raise EngineFailed("weights cannot be loaded while requests run")
        self.version, self.folder = version, folder
        return self.load_seconds

    async def sleep(self) -> None:
        await self.falls_asleep.wait()
        self._fail_if_broken()
        if self.folder is None:
            raise EngineFailed("the engine was not started")
        if self._running:
            raise EngineFailed("it cannot sleep while requests run")
        self.asleep, self.version = True, NO_VERSION

    async def wake(self, version: int, folder: Path) -> LoadSeconds:
        self.asleep = False
        return await self.load_weights(version, folder)

    async def health(self) -> None:
        self._fail_if_broken()
        if self.hang.is_set():
            await asyncio.sleep(HEALTH_SECONDS)
            raise EngineFailed("the engine does not answer")

    async def close(self) -> None:
        self.on_close()
        self._running.clear()

    def _fail_if_broken(self) -> None:
        if self.broken:
            raise EngineFailed("the engine is broken")


def next_token(ids: Sequence[int]) -> int:
    """The token after `ids`."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in ids)) % VOCABULARY


def continuation(ids: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
    """At most `count` tokens after `ids`, up to and including the first of `stop`."""
    everything, begin = list(ids), len(ids)
    while len(everything) < begin + count:
        everything.append(next_token(everything))
        if everything[-1] in stop:
            break
    return everything[begin:]


def finish_of(new: Sequence[int], left: int, stop: Sequence[int]) -> Finish | None:
    """How a sequence ends whose newest tokens are `new` and which may still have `left`."""
    if new and new[-1] in stop:
        return Finish.STOP
    return Finish.LENGTH if left == 0 else None
