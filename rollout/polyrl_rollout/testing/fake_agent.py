"""An agent without an engine: the whole agent protocol over a real socket, with made-up tokens that can be checked.

The token at a response position depends on the sample and the position only (`made_tokens`), so a response that went
through any number of agents is still known to the last token. It sends as fast as the manager keeps what it sent, or
at a real engine's pace. For tests and benchmarks; no run uses it.

It does not keep tokens as the real agent's `TokenBook` does: any can be made again, and those of all assignments are
made and sent as columns, so that a benchmark measures the manager and not this. Faults come from outside: a test ends
or freezes it.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import deque
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
    Cancel,
    Deltas,
    Deregister,
    Fenced,
    FromAgent,
    HandBack,
    HandBackReason,
    Heartbeat,
    Hello,
    Recall,
    Resend,
    StartDrain,
    ToAgent,
    TokensKept,
    WeightsLoaded,
    Welcome,
    decode_to_agent,
    encode,
)
from polyrl.wire.engine_identity import draw_process, identity_of

VOCABULARY: Final = 997
"""Made-up tokens are below this prime, so that neither sample nor position alone gives the token."""

LENGTH_CODE: Final = FINISH_CODES.index("length")

IN_FLIGHT: Final = 8
"""Deltas sent and not yet kept; a manager that falls behind slows the agent, not its own memory."""

IDLE_S: Final = 0.2
"""Longest sleep of an agent that has nothing to do; shorter than any heartbeat."""


def made_tokens(sample: str, start: int, end: int) -> npt.NDArray[np.uint32]:
    """uint32[end - start], the response tokens of `sample` from position `start`."""
    return _made(np.arange(start, end), _key(sample))


def _key(sample: str) -> int:
    return zlib.crc32(sample.encode())


def _made(positions: npt.NDArray[np.int64], keys: npt.NDArray[np.int64] | int) -> npt.NDArray[np.uint32]:
    return ((positions * 31 + keys) % VOCABULARY).astype("<u4")


@dataclass
class _Running:
    key: int
    position: int
    end: int


class FakeAgent:
    """One agent; `run` until drained or cancelled."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        keys: AgentKeys,
        hello: Hello,
        tokens_per_delta: int = 10,
        tokens_per_s: float = math.inf,
    ) -> None:
        """`tokens_per_delta`: of each running sample, in each Deltas; `tokens_per_s`: of each running sample."""
        self._hello = hello
        self._chunk = tokens_per_delta
        self._period = tokens_per_delta / tokens_per_s
        self._due = 0.0
        self._unanswered: deque[tuple[int, float]] = deque()
        self._running: dict[int, _Running] = {}
        self._version = hello.weight_version
        self._welcome: Welcome | None = None
        self._seq = self._kept = 0
        self._over = False
        self.assigned: list[Assign] = []
        """Every assignment received."""
        self.bytes_sent = 0
        self.tokens_made = 0
        self.accept_s: list[float] = []
        """Per Deltas, seconds from when its tokens were due until its TokensKept was read here."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.curve_publickey = keys.public_key.encode()
        self.socket.curve_secretkey = keys.secret_key.encode()
        self.socket.curve_serverkey = keys.manager_public_key.encode()
        self.socket.setsockopt(zmq.IDENTITY, identity_of(hello.engine, keys, draw_process()))
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.connect(endpoint)

    async def run(self) -> None:
        """Greets, then serves until the manager drains it."""
        try:
            await self.send(self._hello)
            while not self._over:
                await self._step()
        finally:
            self.socket.close()

    async def send(self, message: FromAgent) -> None:
        """Says `message` to the manager."""
        frame = encode(message)
        if isinstance(message, Deltas):
            self.bytes_sent += len(frame)
        await self.socket.send(frame)

    async def _step(self) -> None:
        busy = bool(self._running) and self._seq - self._kept < IN_FLIGHT
        if await self.socket.poll(math.ceil(self._pause(busy) * 1000)):
            await self._receive(decode_to_agent(await self.socket.recv()))
        elif not self._running:
            await self.send(Heartbeat(0, 0, kv_free_tokens=self._hello.kv_tokens))
        if busy and self._running and time.monotonic() >= self._due:
            await self._send_tokens()

    def _pause(self, busy: bool) -> float:
        if not busy or self._welcome is None:
            return IDLE_S
        return max(0.0, self._due - time.monotonic())

    async def _receive(self, message: ToAgent) -> None:
        if isinstance(message, Welcome):
            self._welcome = message
        elif isinstance(message, Assign):
            self._begin(message)
        elif isinstance(message, Cancel):
            self._running.pop(message.assignment, None)
        elif isinstance(message, Recall):
            self._running.pop(message.assignment, None)
            await self.send(HandBack(message.assignment, HandBackReason.RECALLED))
        elif isinstance(message, TokensKept):
            self._keep(message.seq)
        elif isinstance(message, Resend):
            if message.assignment in self._running:
                self._running[message.assignment].position = message.offset
        elif isinstance(message, Announce):
            self._version = message.version
            await self.send(WeightsLoaded(message.version, 0.0, load_seconds=0.0, bytes_pulled=0))
        elif isinstance(message, StartDrain):
            await self._leave(message.reason)
        elif isinstance(message, Fenced):
            await self._start_over()

    def _begin(self, assign: Assign) -> None:
        self.assigned.append(assign)
        if not self._running:
            # A fleet whose engines all send at the same instant is no fleet.
            phase = _key(self._hello.engine) % VOCABULARY / VOCABULARY
            self._due = time.monotonic() + phase * self._period
        end = assign.offset + assign.max_new_tokens
        self._running[assign.assignment] = _Running(_key(assign.sample), assign.offset, end=end)

    def _keep(self, seq: int) -> None:
        self._kept = max(self._kept, seq)
        while self._unanswered and self._unanswered[0][0] <= seq:
            self.accept_s.append(time.monotonic() - self._unanswered.popleft()[1])

    async def _leave(self, reason: str) -> None:
        for assignment in self._running:
            await self.send(HandBack(assignment, HandBackReason.DRAINING))
        await self.send(Deregister(reason))
        self._over = True

    async def _start_over(self) -> None:
        self._running.clear()
        self._unanswered.clear()
        self._seq = self._kept = 0
        await self.send(self._hello)

    async def _send_tokens(self) -> None:
        rows, ids = self._advance()
        self._seq += 1
        self.tokens_made += len(ids)
        self._unanswered.append((self._seq, self._due if self._period else time.monotonic()))
        self._due += self._period
        logprobs = np.full(len(ids), -0.5, dtype="<f4")
        await self.send(
            Deltas(self._seq, self._version, rows=rows.tobytes(), ids=ids.tobytes(), logprobs=logprobs.tobytes())
        )

    def _advance(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
        """Makes the next tokens of all running assignments: ROW_DTYPE[R], uint32[sum of counts]."""
        running = tuple(self._running.values())
        keys, starts, ends = np.array([(one.key, one.position, one.end) for one in running]).T
        counts = np.minimum(ends - starts, self._chunk)
        rows = np.zeros(len(running), dtype=ROW_DTYPE)
        rows["assignment"], rows["offset"], rows["count"] = list(self._running), starts, counts
        rows["finish"] = np.where(starts + counts == ends, LENGTH_CODE, 0)
        steps = np.arange(self._chunk)
        ids = _made(starts[:, None] + steps, keys[:, None])[steps < counts[:, None]]
        for one in running:
            one.position += self._chunk
        self._running = {number: one for number, one in self._running.items() if one.position < one.end}
        return rows, ids
