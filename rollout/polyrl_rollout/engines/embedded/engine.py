"""The embedded engine: transformers' continuous batching in a process of its own, reached over a socket pair.

For tiny and small models on CPUs, so that everything runs without a GPU. The process keeps the generation thread away
from the agent's event loop, and lets the engine be killed like any other.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Final

from polyrl.manifest.environment import VISIBLE_GPUS
from polyrl.manifest.rollout import EngineSpec, WeightSwitch
from polyrl.wire import EngineCapacity
from polyrl_rollout.engines.child import ChildProcess, child_path
from polyrl_rollout.engines.embedded import messages
from polyrl_rollout.engines.port import (
    NO_VERSION,
    EngineFailed,
    EngineLost,
    GenerateRequest,
    LoadSeconds,
    ModelLimits,
    TokenChunk,
    check_request,
    read_limits,
)
from polyrl_rollout.engines.streams import SilenceDeadline, Streams

START_DEADLINE_S: Final = 120.0
"""Importing torch and transformers takes 3 s on an idle core, ten times that on a cold disk with its cores taken."""
LOAD_DEADLINE_S: Final = 120.0
"""A small model's checkpoint is read in milliseconds; this bounds a hanging disk."""
PING_DEADLINE_S: Final = 10.0
"""The process's reading thread answers between two forward passes."""
CLOSE_GRACE_S: Final = 5.0
"""The process ends by itself once its socket is closed and the current forward pass is over."""


class EmbeddedEngine:
    """See `polyrl_rollout.engines.port.InferenceEngine`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.version = NO_VERSION
        self.keeps = spec.weight_switch is WeightSwitch.KEEP
        self.sleeps = False  # the host's memory is no device's
        self._asleep = False
        self._spec = spec
        self._max_context = 0
        self._limits = ModelLimits(0, 0)
        self._child: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._questions: deque[asyncio.Future[messages.ToParent]] = deque()
        self._failure = "the engine was not started"

    @property
    def pid(self) -> int:
        """Process id of the engine. Raises EngineFailed before `start`."""
        if self._child is None:
            raise EngineFailed(self._failure)
        return self._child.pid

    async def start(self, model_folder: Path) -> EngineCapacity:
        self._limits = read_limits(model_folder)
        self._silence = SilenceDeadline(asyncio.get_running_loop().time)
        self._streams = Streams(self._silence)
        reader, self._writer = await self._spawn()
        self._failure = ""
        self._reader = asyncio.create_task(self._read(reader))
        spec = self._spec
        wanted = EngineCapacity(spec.max_running, spec.kv_tokens, max_context=spec.max_context)
        question = messages.StartEngine(child_path(model_folder), wanted, threads=spec.threads)
        answer = await self._ask(question, START_DEADLINE_S)
        if not isinstance(answer, messages.Started):
            raise EngineFailed(f"a start was answered by {answer}")
        self._max_context = answer.capacity.max_context
        return answer.capacity

    async def _spawn(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "polyrl_rollout.engines.embedded.process", str(theirs.fileno())]
        # On a machine with a GPU too: that is the learner's, and the draws of tokens are made for the CPU.
        environment = {"OMP_NUM_THREADS": str(self._spec.threads), VISIBLE_GPUS: ""}
        try:
            with theirs:
                passed = [theirs.fileno()]
                self._child = await ChildProcess.start(command, environment, passed, starts_others=False)
            return await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        self._check_alive()
        check_request(request, self._limits.vocab_size, self._max_context)
        if self.version == NO_VERSION:
            raise EngineFailed("the engine has no weights yet")
        self._streams.open(request.rid)
        self._send(messages.Generate(request))
        finished = False
        try:
            async for chunk in self._streams.chunks(request.rid):
                finished = chunk.finish is not None
                yield chunk
        finally:
            # A consumer that goes away early, or gets a failure, must not leave its request running.
            if not finished and not self._failure:
                self._send(messages.Abort(request.rid))

    async def abort(self, rid: str) -> None:
        self._check_alive()
        self._streams.end(rid)
        self._send(messages.Abort(rid))

    async def load_weights(self, version: int, folder: Path) -> LoadSeconds:
        self._check_alive()
        if self._asleep:
            raise EngineFailed(f"cannot load version {version} from {folder}: its weights sleep")
        begun = asyncio.get_running_loop().time()
        if not self.keeps:
            self._streams.end_all()
        with self._silence.suspended():
            answer = await self._ask(messages.Load(version, child_path(folder), keep=self.keeps), LOAD_DEADLINE_S)
        if isinstance(answer, messages.LoadFailed):
            raise EngineFailed(f"cannot load version {version} from {folder}: {answer.reason}")
        if not isinstance(answer, messages.Loaded) or answer.version != version:
            raise EngineFailed(f"loading version {version} was answered by {answer}")
        # The order itself waits, too: for the forward pass that has the process's cores.
        asked = asyncio.get_running_loop().time() - begun
        inside = answer.seconds
        return replace(inside, wait=max(inside.wait, asked - inside.load - inside.verify))

    async def sleep(self) -> None:
        self._check_alive()
        self._streams.end_all()
        self._asleep, self.version = True, NO_VERSION

    async def wake(self, version: int, folder: Path) -> LoadSeconds:
        self._asleep = False
        return await self.load_weights(version, folder)

    async def health(self) -> None:
        answer = await self._ask(messages.Ping(), PING_DEADLINE_S)
        if not isinstance(answer, messages.Pong):
            raise EngineFailed(f"a ping was answered by {answer}")

    async def close(self) -> None:
        if self._child is None:
            return
        self._fail("the engine was closed")
        if self._writer is not None:
            self._writer.close()
        await self._child.end(CLOSE_GRACE_S)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    def _check_alive(self) -> None:
        if self._failure:
            raise EngineFailed(self._failure)

    def _send(self, message: messages.ToProcess) -> None:
        if self._writer is not None and not self._failure:
            self._writer.write(messages.frame(message))

    async def _ask(self, question: messages.ToProcess, deadline_s: float) -> messages.ToParent:
        """The process answers questions in order. Raises EngineFailed, past the deadline for good, as EngineLost when
        it was killed or too slow."""
        answer: asyncio.Future[messages.ToParent] = asyncio.get_running_loop().create_future()
        try:
            self._check_alive()
            self._questions.append(answer)
            self._send(question)
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            self._fail(f"{type(question).__name__} was not answered within {deadline_s:g} s")
            raise EngineLost(self._failure) from None
        except EngineFailed as error:
            if self._child is not None and await self._child.was_killed():
                raise EngineLost(f"{error}: it was killed") from error
            raise

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Takes the process's frames until it is gone, then fails whatever still waits."""
        try:
            while True:
                (length,) = messages.LENGTH.unpack(await reader.readexactly(messages.LENGTH.size))
                self._take(messages.decode_to_parent(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail(self._failure or "the engine's process has ended")

    def _take(self, message: messages.ToParent) -> None:
        match message:
            case messages.Tokens(version, rows):
                for row in rows:
                    self._streams.deliver(
                        row.rid, TokenChunk(row.ids, row.logprobs, version=version, finish=row.finish)
                    )
            case messages.Failed(reason):
                self._fail(reason)
            case _:
                # Here and not in `load_weights`, which may have been cancelled meanwhile.
                if isinstance(message, messages.Loaded):
                    self.version = message.version
                question = self._questions.popleft()
                if not question.done():
                    question.set_result(message)

    def _fail(self, reason: str) -> None:
        """From now on every call raises EngineFailed with `reason`."""
        self._failure = reason
        self._streams.fail_all(reason)
        while self._questions:
            question = self._questions.popleft()
            if not question.done():
                question.set_exception(EngineFailed(reason))
