"""The agent's conversation with its manager: dials, greets, listens, tells; made anew for as long as it takes.

    greet       Hello with all that is held; the answer is a Resend or a Cancel for each of it, then Welcome; or Fenced
    fenced      nothing that runs here counts any more: all is dropped, then greeted anew; MAX_FENCED in a row: the end
    cut off     a drill (see `cut`): as if the manager could not be reached, until let back

Refuses to hold: what the messages mean (see `app`). Read next: `link`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog
import zmq

from polyrl.keys import AgentKeys
from polyrl.sample import Pool
from polyrl.wire import Cancel, Fenced, FromAgent, Hello, Resend, ToAgent, Welcome
from polyrl_rollout.agent.link import HANDSHAKE_S, LinkDown, ManagerAddress
from polyrl_rollout.agent.partition import CuttableLink

WELCOME_S: Final = 5.0
"""Longest wait for the answer to Hello."""
BACKOFF_S: Final = (0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.5, 1.0, 2.0)
"""Pauses between greetings; the last one repeats. A manager that was killed is back within the first three seconds."""
MANAGER_LOST_S: Final = 600.0
"""Without a word of the manager for this long the agent ends: the run is over and nobody told it."""
MAX_FENCED: Final = 3
FAREWELL_S: Final = 1.0
"""Time that the last words get to leave."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class AgentSettings:
    """Who this agent is and whom it dials."""

    manager: Callable[[], ManagerAddress | None]
    """Asked before every connection, since a restarted manager listens elsewhere; None: not known yet."""
    keys: AgentKeys
    run_epoch: int
    engine: str
    pool: Pool
    drain_s: float
    """How long after SIGTERM the agent is ended by force."""


@dataclass(frozen=True)
class Speaker:
    """The agent's side: what it has to say, and what it does with what is said."""

    hello: Callable[[], Hello]
    """The greeting, with what is held at the moment."""
    entered: Callable[[], None]
    """The manager has welcomed us."""
    obey: Callable[[ToAgent], None]
    disown: Callable[[], Awaitable[None]]
    """We are fenced: stop and forget everything."""
    give_up: Callable[[str], None]
    """There is no manager to talk to any more; says why."""


class Conversation:
    """At most one link at a time; `welcome` is None while nobody listens."""

    def __init__(self, settings: AgentSettings, speaker: Speaker) -> None:
        self._settings, self._speaker = settings, speaker
        self._loop = asyncio.get_running_loop()
        self.link: CuttableLink | None = None
        self.welcome: Welcome | None = None
        self.said_at = self._heard_at = self._loop.time()
        self._reachable = asyncio.Event()
        self._reachable.set()
        self._fenced = 0

    async def run(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            address = self._settings.manager()
            try:
                if address is not None:
                    self.link = await self._dial(context, address)
                    await self._greet(self.link)
                    failures = 0
                    await self._listen(self.link)
            except LinkDown as error:
                log.info("no manager", error=str(error), attempt=failures)
            finally:
                self._unlink()
            if self._loop.time() - self._heard_at > MANAGER_LOST_S:
                self._speaker.give_up(f"the manager was silent for {MANAGER_LOST_S:.0f} s")
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    def tell(self, message: FromAgent) -> None:
        """Says it now or never: what matters of it is said again by the next greeting."""
        if self.link is None or (self.welcome is None and not isinstance(message, Hello)):
            return
        try:
            self.link.send(message)
        except LinkDown:
            return
        self.said_at = self._loop.time()

    def cut_off(self, inward: bool = True, outward: bool = True) -> None:
        """From here on the manager does not reach us, or cannot be reached, or both; a new link needs both."""
        self._reachable.clear()
        if self.link is not None:
            self.link.cut(inward, outward)

    def let_back(self) -> None:
        """The end of that."""
        self._reachable.set()
        if self.link is not None:
            with contextlib.suppress(LinkDown):  # then `receive` says so too
                self.link.mend()

    def close(self) -> None:
        """Lets the last words leave; nothing can be said afterwards."""
        link, self.link = self.link, None
        if link is not None:
            link.close(FAREWELL_S)

    async def _dial(self, context: zmq.Context[zmq.Socket[bytes]], address: ManagerAddress) -> CuttableLink:
        """Raises LinkDown."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._reachable.wait()
        except TimeoutError:
            raise LinkDown("cut off from the manager, for a drill") from None
        return await CuttableLink.open(context, address, self._settings.keys, self._settings.engine)

    async def _greet(self, link: CuttableLink) -> None:
        """Raises LinkDown when the manager does not welcome us."""
        link.send(self._speaker.hello())
        try:
            async with asyncio.timeout(WELCOME_S):
                answer = await link.receive()
                while not isinstance(answer, Welcome | Fenced):
                    # Of what else comes, words to a former connection of this name, only these hold whenever they come.
                    if isinstance(answer, Resend | Cancel):
                        self._speaker.obey(answer)
                    answer = await link.receive()
        except TimeoutError:
            raise LinkDown("the manager does not answer the greeting") from None
        await self._hear(answer)

    async def _listen(self, link: CuttableLink) -> None:
        while True:
            await self._hear(await link.receive())

    async def _hear(self, message: ToAgent) -> None:
        """Raises LinkDown when fenced: the next connection greets anew."""
        self._heard_at = self._loop.time()
        if isinstance(message, Fenced):
            self._fenced += 1
            if self._fenced >= MAX_FENCED:
                self._speaker.give_up(f"fenced: {message.reason}")
            await self._speaker.disown()
            raise LinkDown(f"fenced: {message.reason}")
        if isinstance(message, Welcome):
            self.welcome, self._fenced = message, 0
            self._speaker.entered()
        else:
            self._speaker.obey(message)

    def _unlink(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = self.welcome = None
