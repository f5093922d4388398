"""Runs the assigned sequences on the engine and reads their streams, on the spot, into the token book.

A sequence that an engine error or a rejection ends is handed back with its reason; one that was stopped on purpose just
ends. Each run of a sequence has a request id of its own, because SGLang may abort a reused one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from polyrl.sample import Finish, sample_seed
from polyrl.weights import TOKENIZER_FILE
from polyrl.wire import HandBackReason
from polyrl_rollout.agent.protocol import Stream, TokenBook
from polyrl_rollout.agent.stop_strings import Decode, StopStrings
from polyrl_rollout.engines.port import EngineFailed, GenerateRequest, InferenceEngine, RequestRejected, TokenChunk

ABORT_S: Final = 5.0
"""An engine answers an abort within 0.1 s when it is well; a stream that outlasts this is cancelled."""
MAX_FAILURES: Final = 3
"""Requests failing one after the other, without a token between them, after which the engine is taken for broken."""

log = structlog.get_logger(__name__)


class GenerationHandler(Protocol):
    """What the agent does with what the streams bring."""

    def on_tokens(self) -> None:
        """New tokens, or an end, are in the book."""

    def hand_back(self, assignment: int, reason: HandBackReason, detail: str) -> None:
        """A sequence ended unfinished, and not because it was stopped."""

    def engine_failed(self, error: EngineFailed) -> None:
        """The engine is broken; nothing more will come of it."""


@dataclass(frozen=True)
class _Run:
    """One request for the rest of a sequence."""

    rid: str
    begins: int
    """Position of the first token that it will give."""
    task: asyncio.Task[None]


class Generation:
    """All sequences that run on one engine."""

    def __init__(self, engine: InferenceEngine, book: TokenBook, handler: GenerationHandler, *, seed: int) -> None:
        self._engine, self._book, self._handler, self._seed = engine, book, handler, seed
        self._running: dict[int, _Run] = {}
        self._requests = itertools.count()
        self._failures = 0
        self._room = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.tokens_at = self._loop.time()
        """When the engine last gave a token."""
        self.decode: Decode | None = None
        """By the tokenizer that came with the weights, if one did."""

    def __len__(self) -> int:
        return len(self._running)

    def start(self, stream: Stream) -> None:
        """Generates on where `stream` ends."""
        number, rid = stream.assign.assignment, f"{next(self._requests):016x}"
        task = asyncio.create_task(self._run(stream, rid), name=f"generate {number}")
        self._running[number] = _Run(rid, stream.length, task=task)

    def is_running(self, stream: Stream) -> bool:
        """Whether a request of this sequence is at the engine."""
        return stream.assign.assignment in self._running

    def has_begun(self, stream: Stream) -> bool:
        """Whether that request has given a token."""
        run = self._running.get(stream.assign.assignment)
        return run is not None and stream.length > run.begins

    def update_room(self) -> None:
        """Streams are read only while the book has room: after its tokens were kept or forgotten, they go on."""
        if self._book.has_room():
            self._room.set()
        else:
            self._room.clear()

    async def stop(self, assignments: Iterable[int]) -> None:
        """Aborts these; when it returns nothing more of them is added to the book."""
        stopped = [self._running.pop(number) for number in assignments if number in self._running]
        await asyncio.gather(*(self._abort(run.rid) for run in stopped))
        tasks = [run.task for run in stopped]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=ABORT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop_all(self) -> None:
        """Aborts everything."""
        await self.stop(tuple(self._running))

    async def _abort(self, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_S):
                await self._engine.abort(rid)
        except (EngineFailed, TimeoutError) as error:
            log.warning("abort failed", rid=rid, error=str(error))

    async def _run(self, stream: Stream, rid: str) -> None:
        number = stream.assign.assignment
        try:
            await self._read(stream, self._request(stream, rid))
        except RequestRejected as error:
            self._give_back(number, rid, HandBackReason.REJECTED, str(error))
        except EngineFailed as error:
            await self._check_failure(number, rid, str(error))
        except Exception as error:
            # Outside the port's types: nobody awaits this task, so it would end unseen and its sample hang.
            log.exception("the engine raised what its port does not allow", assignment=number)
            await self._check_failure(number, rid, repr(error))
        else:
            if not stream.finish:
                self._give_back(number, rid, HandBackReason.ENGINE_ERROR, "the engine's stream ended without a reason")
        finally:
            self._leave(number, rid)

    def _request(self, stream: Stream, rid: str) -> GenerateRequest:
        sampling = stream.assign.sampling
        seed = sample_seed(self._seed, stream.assign.sample, sampling.seed)
        return GenerateRequest(rid, stream.input_ids(), max_new_tokens=stream.remaining, sampling=sampling, seed=seed)

    async def _read(self, stream: Stream, request: GenerateRequest) -> None:
        # Closed at once: a request that a stop string ended still runs at the engine, which hears of it by this.
        async with aclosing(self._chunks(stream, request)) as chunks:
            async for chunk in chunks:
                now = self._loop.time()
                if not self._book.add(stream.assign.assignment, chunk, now):
                    return
                self._failures, self.tokens_at = 0, now
                if chunk.finish is not None:
                    self._leave(stream.assign.assignment, request.rid)
                self._handler.on_tokens()
                self.update_room()
                if chunk.finish is not None:
                    return
                await self._room.wait()

    async def _chunks(self, stream: Stream, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """The engine's chunks, up to the first stop string."""
        stops = self._stop_strings(stream)
        if stops is not None and stops.is_over():
            yield TokenChunk([], [], version=self._engine.version, finish=Finish.STOP)
            return
        async with aclosing(self._engine.generate(request)) as generated:
            async for chunk in generated:
                yield chunk if stops is None else stops.cut(chunk)

    def _stop_strings(self, stream: Stream) -> StopStrings | None:
        stop = stream.assign.sampling.stop
        if not stop:
            return None
        if self.decode is None:
            raise RequestRejected(
                f"it is to end at {', '.join(map(repr, stop))}, and no {TOKENIZER_FILE} came with the weights"
            )
        return StopStrings(stop, self.decode, turn=stream.turn_ids())

    async def _check_failure(self, number: int, rid: str, error: str) -> None:
        """One failed request, or a failed engine?"""
        self._failures += 1
        log.warning("the engine failed a request", assignment=number, error=error)
        try:
            await self._engine.health()
        except EngineFailed as worse:
            self._handler.engine_failed(worse)
            return
        if self._failures >= MAX_FAILURES:
            failed = EngineFailed(f"{self._failures} requests failed one after the other: {error}")
            self._handler.engine_failed(failed)
            return
        self._give_back(number, rid, HandBackReason.ENGINE_ERROR, error)

    def _give_back(self, number: int, rid: str, reason: HandBackReason, detail: str) -> None:
        if self._leave(number, rid):
            self._handler.hand_back(number, reason, detail)

    def _leave(self, number: int, rid: str) -> bool:
        """True when this run was still wanted."""
        if number not in self._running or self._running[number].rid != rid:
            return False
        del self._running[number]
        return True
