"""A link that a drill can cut, in one direction or in both: nothing passes, and nobody tells either end.

As when packets are lost on the way, what is said meanwhile arrives later, in its order. If the cut outlasts the time in
which heartbeats must be answered, the link is down and what it held is lost, as with a TCP connection that breaks: it
needs both directions, so one that is cut in one of them breaks too.

Refuses to hold: when it is cut (the agent obeys signals, see `polyrl.partition_signals`). Read next: `link`.
"""

from __future__ import annotations

import asyncio

import zmq

from polyrl.wire import FromAgent, ToAgent
from polyrl_rollout.agent.link import HEARTBEAT_LOST_MS, Link, LinkDown


class CuttableLink(Link):
    """A `Link`; also made by `open`."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        super().__init__(socket, monitor)
        self._hears, self._speaks = asyncio.Event(), asyncio.Event()
        self._hears.set()
        self._speaks.set()
        self._held: list[FromAgent] = []
        self._giving_up: asyncio.TimerHandle | None = None
        self._broken = False

    def cut(self, inward: bool = True, outward: bool = True) -> None:
        """Nothing passes in these directions until `mend`. Idempotent."""
        if inward:
            self._hears.clear()
        if outward:
            self._speaks.clear()
        if self._giving_up is None and not self._broken:
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(HEARTBEAT_LOST_MS / 1000, self._break)

    def mend(self) -> None:
        """What was held passes. Raises LinkDown when that is too much at once. Idempotent."""
        self._forget_giving_up()
        self._hears.set()
        self._speaks.set()
        held, self._held = self._held, []
        for message in held:
            self.send(message)

    def send(self, message: FromAgent) -> int:
        if self._speaks.is_set():
            return super().send(message)
        self._held.append(message)
        return 0

    async def receive(self) -> ToAgent:
        message = await super().receive()
        await self._hears.wait()
        if self._broken:
            raise LinkDown("no answer to heartbeats, in a drill")
        return message

    def close(self, linger_s: float = 0.0) -> None:
        self._forget_giving_up()
        super().close(linger_s)

    def _break(self) -> None:
        self._broken = True
        self._held.clear()
        self._hears.set()
        self._speaks.set()
        self.fail("no answer to heartbeats, in a drill")

    def _forget_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
