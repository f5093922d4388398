"""An agent without an engine: the whole agent protocol over a real socket, with made-up tokens that can be checked.

The token at a response position depends on the sample and the position only (`made_tokens`), so a response that went
through any number of agents is still known to the last token. For tests and benchmarks; no run uses it.

Refuses to hold: a model, weights, faults of its own (a test ends or freezes it from outside). Read next: `agent`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from polyrl.keys import AgentKeys
from polyrl.wire import (
    FINISH_CODES,
    ROW_DTYPE,
    Announce,
    Assign,
    Beat,
    Bye,
    Cancel,
    Deltas,
    Drain,
    Fenced,
    FromAgent,
    Hello,
    Resend,
    Returned,
    Serving,
    ToAgent,
    TokensKept,
    Welcome,
    decode_to_agent,
    encode,
)

VOCABULARY: Final = 997
"""Made-up tokens are below this prime, so that neither sample nor position alone tells the token."""

LENGTH_CODE: Final = FINISH_CODES.index("length")

IN_FLIGHT: Final = 8
"""Deltas sent and not yet kept; a manager that falls behind slows the agent, not its own memory."""

IDLE_S: Final = 0.2
"""Longest sleep of an agent that has nothing to do; shorter than any beat."""


def made_tokens(sample: str, start: int, end: int) -> npt.NDArray[np.uint32]:
    """uint32[end - start], the response tokens of `sample` from position `start`."""
    return ((np.arange(start, end) * 31 + zlib.crc32(sample.encode())) % VOCABULARY).astype("<u4")


@dataclass
class _Running:
    sample: str
    position: int
    end: int


class FakeAgent:
    """One agent; `run` until drained or cancelled."""

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, keys: AgentKeys, hello: Hello, tokens_per_delta: int = 10
    ) -> None:
        """`tokens_per_delta`: of each running sample, in each Deltas."""
        self._hello = hello
        self._chunk = tokens_per_delta
        self._running: dict[int, _Running] = {}
        self._version = hello.weight_version
        self._welcome: Welcome | None = None
        self._seq = self._kept = 0
        self._over = False
        self.assigned: list[Assign] = []
        """Every assignment received."""
        self.bytes_sent = 0
        self.tokens_made = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.curve_publickey = keys.public_key.encode()
        self._socket.curve_secretkey = keys.secret_key.encode()
        self._socket.curve_serverkey = keys.manager_public_key.encode()
        self._socket.setsockopt(zmq.IDENTITY, hello.engine.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(endpoint)

    async def run(self) -> None:
        """Greets, then serves until the manager drains it."""
        try:
            await self.send(self._hello)
            while not self._over:
                await self._step()
        finally:
            self._socket.close()

    async def send(self, message: FromAgent) -> None:
        """Says `message` to the manager."""
        frame = encode(message)
        if isinstance(message, Deltas):
            self.bytes_sent += len(frame)
        await self._socket.send(frame)

    async def _step(self) -> None:
        busy = bool(self._running) and self._seq - self._kept < IN_FLIGHT
        pause = self._welcome.delta_s if busy and self._welcome else IDLE_S
        if await self._socket.poll(int(pause * 1000)):
            await self._hear(decode_to_agent(await self._socket.recv()))
        elif not self._running:
            await self.send(Beat(0, 0, self._hello.kv_tokens))
        if busy:
            await self._send_tokens()

    async def _hear(self, message: ToAgent) -> None:
        if isinstance(message, Welcome):
            self._welcome = message
        elif isinstance(message, Assign):
            self.assigned.append(message)
            end = message.offset + message.max_new_tokens
            self._running[message.assignment] = _Running(message.sample, message.offset, end)
        elif isinstance(message, Cancel):
            self._running.pop(message.assignment, None)
        elif isinstance(message, TokensKept):
            self._kept = max(self._kept, message.seq)
        elif isinstance(message, Resend):
            if message.assignment in self._running:
                self._running[message.assignment].position = message.offset
        elif isinstance(message, Announce):
            self._version = message.version
            await self.send(Serving(message.version, 0.0, 0.0, 0))
        elif isinstance(message, Drain):
            await self._leave(message.reason)
        elif isinstance(message, Fenced):
            await self._start_over()

    async def _leave(self, reason: str) -> None:
        for assignment in self._running:
            await self.send(Returned(assignment, "draining"))
        await self.send(Bye(reason))
        self._over = True

    async def _start_over(self) -> None:
        self._running.clear()
        self._seq = self._kept = 0
        await self.send(self._hello)

    async def _send_tokens(self) -> None:
        rows = np.zeros(len(self._running), dtype=ROW_DTYPE)
        made = [self._advance(row, number) for row, number in zip(rows, list(self._running), strict=True)]
        ids = np.concatenate(made) if made else np.zeros(0, dtype="<u4")
        self._seq += 1
        self.tokens_made += len(ids)
        logprobs = np.full(len(ids), -0.5, dtype="<f4")
        await self.send(Deltas(self._seq, self._version, rows.tobytes(), ids.tobytes(), logprobs.tobytes()))

    def _advance(self, row: np.void, number: int) -> npt.NDArray[np.uint32]:
        """Makes the next tokens of one assignment, and fills its row."""
        running = self._running[number]
        start, running.position = running.position, min(running.position + self._chunk, running.end)
        row["assignment"], row["offset"], row["count"] = number, start, running.position - start
        if running.position == running.end:
            row["finish"] = LENGTH_CODE
            del self._running[number]
        return made_tokens(running.sample, start, running.position)
