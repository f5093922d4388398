"""Agents of several names that speak the protocol and lie in it: long texts, odd numbers, tokens that cannot be for
what they really were assigned. Honest agents beside them do all the work, whole, and the loop goes on.

POLYRL_FUZZ=10 makes it ten times as long.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf, nan
from typing import Any, Final

import numpy as np
import zmq.asyncio

from polyrl import wire
from polyrl.errors import ProtocolError

TIMES: Final = int(os.environ.get("POLYRL_FUZZ", "1"))
LIARS: Final = 6
MESSAGES: Final = 400 * TIMES
"""Of each liar; it greets anew when it is shut out, and reads all that it is sent."""
GROUPS: Final = 16
DEADLINE_S: Final = 60.0 * TIMES
LONGEST_PAUSE_CPU_S: Final = 1.0
"""Of the manager's loop, which the liars share here; CPU seconds of its thread, as the machine has other work."""
CERTAIN: Final = 3
"""Assignments of which a liar sends a bad token at once, right where one is expected."""
TEXTS: Final = (
    "",
    "x" * 100_000,
    "\x1b]52;c;AA==\x07",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
)
NUMBERS: Final = (0, -1, 1, 2**31 - 1, 2**53, -(2**31))
LOGPROBS: Final = (nan, inf, -inf, 1.0, 1e38)
"""None can be; a token with one of them is never taken."""


class Liar:
    """One identity."""

    def __init__(self, socket: zmq.asyncio.Socket, name: str, hello: wire.Hello, seed: str) -> None:
        self._socket, self._hello, self._dice = socket, hello, random.Random(seed)
        self._assigned: dict[int, wire.Assign] = {}
        self._seq = 0
        self.refused = 0

    async def run(self) -> None:
        await self._send(self._hello)
        for _ in range(MESSAGES):
            await self._read()
            await self._send(self._dice.choice(LIES)(self))
        self._socket.close()

    async def _read(self) -> None:
        while await self._socket.poll(1):
            message = wire.decode_to_agent(await self._socket.recv())
            if isinstance(message, wire.Assign):
                self._assigned[message.assignment] = message
                if len(self._assigned) <= CERTAIN:
                    self._seq += 1
                    await self._send(self.lie_about([(message.assignment, message.offset, 1, 0)], 1, 0))
            elif isinstance(message, wire.Fenced):
                self.refused, self._seq = self.refused + 1, 0
                await self._send(self._hello)
            elif isinstance(message, wire.Announce):
                await self._send(wire.WeightsLoaded(message.version, 0.0, load_seconds=0.0, bytes_pulled=0))

    async def _send(self, message: Any) -> None:
        with suppress(ProtocolError, ValueError, OverflowError):
            await self._socket.send(wire.encode(message))

    @property
    def number(self) -> int:
        return self._dice.choice(NUMBERS)

    @property
    def text(self) -> str:
        return self._dice.choice(TEXTS)

    def tokens(self) -> wire.Deltas:
        """Of what it was assigned, where they belong, or nearly so."""
        self._seq += self._dice.choice((0, 1, 1, 1, 2, 1000))
        rows, count = list[tuple[int, int, int, int]](), 0
        for number, assign in self._dice.sample(sorted(self._assigned.items()), min(3, len(self._assigned))):
            size = self._dice.randint(1, 5)
            offset = max(0, assign.offset + self._dice.choice((0, 0, 0, 1, -1)))
            rows.append((self._dice.choice((number, number, number ^ 1)), offset, size, self._dice.randrange(4)))
            count += size
        return self.lie_about(rows, count, self._dice.choice((0, 0, 7)))

    def lie_about(self, rows: list[tuple[int, int, int, int]], count: int, version: int) -> wire.Deltas:
        ids = wire.pack_ids([self._dice.choice((0, 5, 2**32 - 1)) for _ in range(count)])
        logprobs = np.array([self._dice.choice(LOGPROBS) for _ in range(count)], "<f4").tobytes()
        return wire.Deltas(self._seq, version, rows=wire.pack_rows(rows), ids=ids, logprobs=logprobs)

    def greeting(self) -> wire.Hello:
        held = tuple(
            wire.HeldAssignment(
                self._dice.choice((number, 2**31)), f"{number}.0", attempt=1, length=self._dice.randrange(9)
            )
            for number in [*self._assigned][:50]
        )
        return wire.msgspec.structs.replace(self._hello, held=held, max_running=self._dice.choice((1, 4, 2**31, -5)))

    def some_assignment(self) -> int:
        return self._dice.choice([*self._assigned, self.number])


LIES: Final[tuple[Callable[[Liar], Any], ...]] = (
    *(Liar.tokens,) * 6,
    Liar.greeting,
    lambda self: wire.Heartbeat(self.number, self.number, kv_free_tokens=self.number),
    lambda self: wire.WeightsLoaded(self.number, nan, load_seconds=inf, bytes_pulled=self.number),
    lambda self: wire.WeightsFailed(self.number, self.number, self.text),
    lambda self: wire.HandBack(self.some_assignment(), self.text, detail=self.text),
    lambda self: wire.PrefixUnknown(self.some_assignment()),
    lambda self: wire.Leaving(self._dice.choice((nan, inf, -1.0, 1e9)), self.text),
)


async def test_several_lying_agents_cost_honest_ones_nothing_but_moves(site: Any, seed: int) -> None:
    names = [f"liar-{number}" for number in range(LIARS)]
    liars = [
        Liar(site.agent_socket(name), name, site.hello(name, weight_version=-1), f"{seed} {name}") for name in names
    ]
    honest = [asyncio.create_task(site.agent(f"honest-{number}").run()) for number in range(2)]
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.01)
            longest = max(longest, time.thread_time() - began)

    ticking = asyncio.create_task(tick())
    async with asyncio.timeout(DEADLINE_S), site.client() as client:
        lying = [asyncio.create_task(liar.run()) for liar in liars]
        taken = await site.run_work(client, [site.group(number) for number in range(GROUPS)])
        await asyncio.gather(*lying)
        await client.finish(True, "done")
    ticking.cancel()
    await asyncio.gather(*honest)
    assert {scored.response.sample for scored in taken} == {f"{g}.{i}" for g in range(GROUPS) for i in range(4)}
    state = site.ledger.state
    assert state.counters.migrations.get("wrongTokens", 0) > 0, "nobody believed a liar, so nothing was tried"
    assert all(len(engine.draining) <= wire.MAX_REASON for engine in state.engines.values())
    assert longest < LONGEST_PAUSE_CPU_S
