"""Which version an engine gets next: pulled while the old one serves, then switched to.

Only the newest announcement counts: it cancels a pull that is under way, never a switch. But not twice in a row, as
long as something comes: where a version takes longer to come than the next one to be made, none would ever come. A
version that cannot be had or loaded is answered WeightsFailed, and the old one serves on; the manager announces again.
After MAX_WEIGHTS_FAILURES in a row the engine is given up with the last reason: another machine may do better. While an
engine serves, only what is its machine's counts, loads and a lack of room: a publisher that is away is no fault of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

import structlog
from msgspec import structs

from polyrl import wire
from polyrl.ledger.speed import is_about
from polyrl.weights import WeightsRef
from polyrl.weights.engine_sums import EngineSum
from polyrl_rollout.engines.port import NO_VERSION, EngineFailed, InferenceEngine, LoadSeconds
from polyrl_rollout.engines.trial import Trial
from polyrl_rollout.weights.puller import Pulled, Puller
from polyrl_rollout.weights.staging import Staged, Staging
from polyrl_rollout.weights.transfer import CannotStage, PullFailed

MAX_WEIGHTS_FAILURES: Final = 5
"""Versions in a row that could not be had or loaded: with the manager's pauses half a minute of failing loads, or five
of a silent publisher."""
COMES_S: Final = 5.0
"""Without a chunk for so long a pull is superseded in any case."""
RECEIPTS_KEPT: Final = 256
"""Versions of which an engine may still hold tokens, with room; 16 bytes each."""

log = structlog.get_logger(__name__)


class Versions:
    """Which version this engine serves, and which it is getting."""

    def __init__(
        self,
        engine: InferenceEngine,
        puller: Puller,
        staging: Staging,
        switch: Callable[[Pulled], Awaitable[str]],
        send: Callable[[wire.FromAgent], None],
        give_up: Callable[[EngineFailed], None],
    ) -> None:
        """`switch` has the engine load a staged version and notifies the manager; it returns why the old one serves on,
        empty when the new one does. `give_up` ends the agent."""
        self._engine, self._puller, self._staging = engine, puller, staging
        self._switch, self._send, self._give_up = switch, send, give_up
        self._failures, self._superseded = 0, False
        """`_superseded`: the pull before was given up for a newer version."""
        self._wanted: WeightsRef | None = None
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._served: Staged | None = None
        self.receipts: dict[int, bytes] = {}
        """Receipts of the versions that were pulled last, by version, oldest first."""
        self.sums: dict[int, EngineSum | None] = {}
        """What the engine said that it held when it loaded the last version, by that version."""
        self._loop = asyncio.get_running_loop()
        self._trial, self._tried_at = Trial(), -inf
        """How fast the engine is, and when that was tried."""

    @property
    def is_tried(self) -> bool:
        """Whether the engine was tried, as it is before its first sample."""
        return self._tried_at > -inf

    @property
    def shown(self) -> int:
        """What the manager may know of: nothing while the engine is tried, else a sample comes before it is known."""
        return self._engine.version if self.is_tried else NO_VERSION

    def note_trial(self, trial: Trial) -> None:
        """The engine was tried just now."""
        if not (self.is_tried and is_about(trial.step_s, self._trial.step_s)):
            log.info("engine tried", step_s=round(trial.step_s, 5), read_s=round(trial.read_s, 7))
        self._trial, self._tried_at = trial, self._loop.time()

    def confirm(self) -> None:
        """Says again what the engine serves; while it is tried nothing, that follows."""
        if not self.is_tried:
            return
        version = self._engine.version
        receipt, held = self.receipts.get(version, b""), self.sums.get(version)
        self._send_serving(
            wire.WeightsLoaded(version, 0.0, load_seconds=0.0, bytes_pulled=0, receipt=receipt, sum=held)
        )

    def send_loaded(self, pulled: Pulled, pause: LoadSeconds) -> None:
        """The engine serves what was pulled; `pause` is what that took of its time."""
        version = pulled.staged.version
        self._send_serving(
            wire.WeightsLoaded(
                version,
                pulled.seconds,
                load_seconds=pause.load,
                bytes_pulled=pulled.bytes_pulled,
                receipt=pulled.staged.receipt,
                bytes_from_peers=pulled.bytes_from_peers,
                liars=pulled.liars,
                wait_seconds=pause.wait,
                verify_seconds=pause.verify,
                sum=pause.sum,
            )
        )
        parts = {"wait": pause.wait, "load": pause.load, "verify": pause.verify}
        log.info(
            "weights loaded",
            version=version,
            pull_s=round(pulled.seconds, 3),
            from_peers=pulled.bytes_from_peers,
            **{f"{name}_s": round(seconds, 4) for name, seconds in parts.items()},
        )

    def _send_serving(self, loaded: wire.WeightsLoaded) -> None:
        tried, seconds_ago = self._trial, self._loop.time() - self._tried_at
        with_trial = {"step_seconds": tried.step_s, "read_seconds": tried.read_s, "tried_seconds_ago": seconds_ago}
        self._send(structs.replace(loaded, **with_trial))

    def announce(self, weights: WeightsRef) -> None:
        """A version exists; repeats are harmless."""
        if weights.version == self._engine.version:
            self.confirm()
        elif weights.version < self._engine.version:
            why = f"version {self._engine.version} is served, which is newer"
            self._send(wire.WeightsFailed(weights.version, self._engine.version, reason=why))
        elif self._engine.version == NO_VERSION and self._served and weights.version == self._served.version:
            pass  # the engine sleeps, and loads it when it wakes
        elif weights != self._wanted:
            self._wanted = weights
            self._settled.clear()
            self._changed.set()

    async def settled(self) -> None:
        """Returns once nothing that was announced is on its way."""
        await self._settled.wait()

    async def run(self) -> None:
        """Gets one announced version after the other, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            weights = self._wanted
            if weights is None:
                continue
            pulled = await self._pull(weights)
            if pulled is not None:
                await self._serve(pulled)
            if self._wanted is weights and not self._changed.is_set():
                self._wanted = None
                self._settled.set()

    async def _serve(self, pulled: Pulled) -> None:
        self.receipts[pulled.staged.version] = pulled.staged.receipt
        if len(self.receipts) > RECEIPTS_KEPT:
            del self.receipts[next(iter(self.receipts))]
        why = await self._switch(pulled)
        if why:
            self._staging.keep_only(self._served.version if self._served else NO_VERSION)
            self._count_failure(why)
            return
        self._failures, self._served = 0, pulled.staged
        self._staging.keep_only(pulled.staged.version)

    def _count_failure(self, why: str) -> None:
        self._failures += 1
        if self._failures >= MAX_WEIGHTS_FAILURES:
            self._give_up(EngineFailed(f"weights could not be loaded {self._failures} times in a row: {why}"))

    async def _pull(self, weights: WeightsRef) -> Pulled | None:
        """None when it failed, or a newer announcement came first."""
        pulling = asyncio.create_task(self._puller.pull(weights, self._served))
        newer = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({pulling, newer}, return_when=asyncio.FIRST_COMPLETED)
            if self._superseded:
                await self._while_it_comes(pulling)
            self._superseded = not pulling.done()
            if self._superseded:
                log.info("pull superseded", version=weights.version)
                return None
            return await pulling
        except PullFailed as error:
            log.warning("weights not pulled", version=weights.version, error=str(error))
            self._send(wire.WeightsFailed(weights.version, self._engine.version, reason=str(error)))
            if self._engine.version == NO_VERSION or isinstance(error, CannotStage):
                self._count_failure(str(error))
            return None
        finally:
            pulling.cancel()
            newer.cancel()
            await asyncio.gather(pulling, newer, return_exceptions=True)

    async def _while_it_comes(self, pulling: asyncio.Task[Pulled]) -> None:
        """Returns once it is over, or nothing has come for a while."""
        come = -1
        while not pulling.done() and self._puller.bytes_come != come:
            come = self._puller.bytes_come
            await asyncio.wait({pulling}, timeout=COMES_S)
