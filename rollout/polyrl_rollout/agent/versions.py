"""Weight versions on the engine's side: pull what is announced while the old version serves, then switch.

Only the newest announcement counts: it cancels a pull that is under way, never a switch. A version that cannot be had
or loaded is answered WeightsFailed, and the old one serves on; the manager announces again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from polyrl.wire import Announce, FromAgent, WeightsFailed, WeightsLoaded
from polyrl_rollout.engines.port import InferenceEngine
from polyrl_rollout.weights.puller import Pulled, Puller, PullFailed
from polyrl_rollout.weights.staging import Staged, Staging

log = structlog.get_logger(__name__)


class Versions:
    """Which version this engine serves, and which it is getting."""

    def __init__(
        self,
        engine: InferenceEngine,
        puller: Puller,
        staging: Staging,
        switch: Callable[[Pulled], Awaitable[bool]],
        send: Callable[[FromAgent], None],
    ) -> None:
        """`switch` has the engine load a staged version and notifies the manager; False when the old one serves on."""
        self._engine, self._puller, self._staging = engine, puller, staging
        self._switch, self._send = switch, send
        self._wanted: Announce | None = None
        self._changed = asyncio.Event()
        self._served: Staged | None = None

    def announce(self, message: Announce) -> None:
        """A version exists; repeats are harmless."""
        if message.version == self._engine.version:
            self._send(WeightsLoaded(message.version, 0.0, 0.0, 0))
        elif message.version < self._engine.version:
            why = f"version {self._engine.version} is served, which is newer"
            self._send(WeightsFailed(message.version, self._engine.version, why))
        elif message != self._wanted:
            self._wanted = message
            self._changed.set()

    async def run(self) -> None:
        """Gets one announced version after the other, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            announce = self._wanted
            if announce is None:
                continue
            pulled = await self._pull(announce)
            if pulled is not None and await self._switch(pulled):
                self._served = pulled.staged
                self._staging.keep_only({pulled.staged.version})
            if self._wanted is announce and not self._changed.is_set():
                self._wanted = None

    async def _pull(self, announce: Announce) -> Pulled | None:
        """None when it failed, or a newer announcement came first."""
        pulling = asyncio.create_task(self._puller.pull(announce, self._served))
        newer = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({pulling, newer}, return_when=asyncio.FIRST_COMPLETED)
            if not pulling.done():
                log.info("pull superseded", version=announce.version)
                return None
            return await pulling
        except PullFailed as error:
            log.warning("weights not pulled", version=announce.version, error=str(error))
            self._send(WeightsFailed(announce.version, self._engine.version, str(error)))
            return None
        finally:
            pulling.cancel()
            newer.cancel()
            await asyncio.gather(pulling, newer, return_exceptions=True)
