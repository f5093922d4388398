"""The agent's conversation with its manager: dials, greets, receives, sends; over one link after the other.

greet       Hello with all that is held; the answer is a Resend or a Cancel for each of it, then Welcome; or Fenced
fenced      nothing that runs here counts any more: all is dropped, then greeted anew; too often in a row: the end.
            After a lease that is over all goes on, and the greeting says what is held
partition   an injected fault (see `link`): as if the manager could not be reached, until healed
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from polyrl.keys import AgentKeys
from polyrl.sample import Pool
from polyrl.weights.engine_sums import REFUSALS
from polyrl.wire import Fenced, FromAgent, Hello, ToAgent
from polyrl.wire.engine_identity import REVOKED, UNPROVEN, draw_process, identity_of
from polyrl_rollout.agent.link import HANDSHAKE_S, AgentLink, LinkDown, ZmqContext
from polyrl_rollout.agent.protocol import AgentProtocol

WELCOME_S: Final = 5.0
"""Longest wait for the answer to Hello."""
BACKOFF_S: Final = (0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.5, 1.0, 2.0)
"""Pauses between greetings; the last one repeats. A manager that was killed is back within the first three seconds."""
DRAINING_PAUSE_S: Final = 0.3
"""Longest pause while the agent drains: of its notice a second may be left to hand over what it holds."""
MAX_MANAGER_SILENCE_S: Final = 600.0
"""Without a message of the manager for this long the agent ends: the run is over, and the agent was not notified."""
LINGER_S: Final = 1.0
"""Time that the last messages get to leave."""
EARLY_HEAL_S: Final = 0.5
"""An end and its beginning that waited for a stopped process are handled within milliseconds of each other."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class AgentSettings:
    """Who this agent is and whom it dials."""

    manager: Callable[[], str | None]
    """Its endpoint, asked before every connection, since a restarted manager listens elsewhere; None: not known yet."""
    keys: AgentKeys
    run_epoch: int
    engine: str
    pool: Pool
    drain_s: float
    """How long after SIGTERM the agent is ended by force."""
    seed: int
    """The run's; each sample's draws are seeded from it and the sample's name."""
    rdma_devices: str | None = None
    """By which weights come, where the publisher lends them; empty: by TCP. None: nothing is asked for so."""
    tries_idle: bool = False
    """The engine is tried whenever it has had no work for a while. Not one on cores or devices that a learner uses: it
    would say how fast that one is."""


class SessionHandler(Protocol):
    """What the agent puts into the conversation, and does with what comes."""

    def hello(self) -> Hello:
        """The greeting, with what is held at the moment."""

    def handle(self, message: ToAgent) -> None:
        """Takes a message of the manager, after the protocol has done what it asks of held tokens."""

    async def reset(self) -> None:
        """The agent is fenced: nothing is held any more, and the engine must stop."""

    def give_up(self, why: str) -> None:
        """There is no manager to talk to any more."""


class Conversation:
    """At most one link at a time."""

    def __init__(self, settings: AgentSettings, protocol: AgentProtocol, handler: SessionHandler) -> None:
        self._settings, self._protocol, self._handler = settings, protocol, handler
        self._identity = identity_of(settings.engine, settings.keys, draw_process())
        self._loop = asyncio.get_running_loop()
        self.link: AgentLink | None = None
        self._received_at = self._loop.time()
        self._reachable = asyncio.Event()
        self._reachable.set()
        self._early_heal_at = -math.inf

    async def run(self, context: ZmqContext) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            endpoint = self._settings.manager()
            try:
                if endpoint is not None:
                    link = self.link = await self._dial(context, endpoint)
                    await self._greet(link)
                    failures = 0
                    while True:
                        await self._handle(await link.receive())
            except LinkDown as error:
                log.info("no manager", error=str(error), attempt=failures)
            finally:
                if self.link is not None:
                    self.link.close()
                self.link = None
                self._protocol.disconnect()
            if self._loop.time() - self._received_at > MAX_MANAGER_SILENCE_S:
                self._handler.give_up(f"the manager was silent for {MAX_MANAGER_SILENCE_S:.0f} s")
            pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            await asyncio.sleep(min(pause, DRAINING_PAUSE_S) if self._protocol.draining else pause)
            failures += 1

    def send(self, message: FromAgent) -> None:
        """Sends now or never: what matters of it is repeated by the next greeting."""
        if self.link is None or (self._protocol.welcome is None and not isinstance(message, Hello)):
            return
        with contextlib.suppress(LinkDown):  # `receive` raises it as well
            self.link.send(message)

    def doubt_lease(self, silent_s: float) -> None:
        """After so long a pause. Who was frozen finds orders of a lease that may be over: it reads none, and greets."""
        welcome = self._protocol.welcome
        if self.link is not None and welcome is not None and silent_s > welcome.lease_s:
            self._protocol.disconnect()
            self.link.fail(f"this process stood still for {silent_s:.1f} s, and its lease may be over")

    def partition(self, inward: bool = True, outward: bool = True) -> None:
        """An injected fault: the manager does not reach us, or cannot be reached, or both; a new link needs both."""
        if self._loop.time() - self._early_heal_at < EARLY_HEAL_S:
            # Of signals that waited for a stopped process each of its threads may take one, so their order is open; an
            # end that was handled first would leave the agent partitioned for good.
            log.info("an injected partition was over before it began")
            self._early_heal_at = -math.inf
            return
        log.info("partitioned from the manager by an injected fault", inward=inward, outward=outward)
        self._reachable.clear()
        if self.link is not None:
            self.link.partition(inward, outward)

    def heal(self) -> None:
        """Ends the partition, or the one that is about to begin."""
        if not self._reachable.is_set():
            log.info("partition healed")
        else:
            self._early_heal_at = self._loop.time()
        self._reachable.set()
        if self.link is not None:
            with contextlib.suppress(LinkDown):  # `receive` raises it as well
                self.link.heal()

    def close(self) -> None:
        """Lets the last messages leave; nothing can be sent afterwards."""
        link, self.link = self.link, None
        if link is not None:
            link.close(LINGER_S)

    async def _dial(self, context: ZmqContext, endpoint: str) -> AgentLink:
        """Raises LinkDown."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._reachable.wait()
        except TimeoutError:
            raise LinkDown("partitioned from the manager by an injected fault") from None
        return await AgentLink.open(context, endpoint, self._settings.keys, self._identity)

    async def _greet(self, link: AgentLink) -> None:
        """Raises LinkDown when the manager does not welcome us."""
        link.send(self._handler.hello())
        try:
            async with asyncio.timeout(WELCOME_S):
                while self._protocol.welcome is None:
                    await self._handle(await link.receive())
        except TimeoutError:
            raise LinkDown("the manager does not answer the greeting") from None

    async def _handle(self, message: ToAgent) -> None:
        """Raises LinkDown when fenced: the next connection greets anew."""
        if not self._protocol.counts(message):
            return
        self._received_at = self._loop.time()
        self._protocol.receive(message, self._received_at)
        if not isinstance(message, Fenced):
            self._handler.handle(message)
            return
        if self._protocol.is_rejected or message.reason in (UNPROVEN, REVOKED, *REFUSALS):
            self._handler.give_up(f"fenced: {message.reason}")
        if not message.lease_over:
            await self._handler.reset()
        raise LinkDown(f"fenced: {message.reason}")
