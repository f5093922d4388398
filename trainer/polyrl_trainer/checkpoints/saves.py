"""A run's saves beside its steps: one at a time, reported when durable, and never lost in silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from polyrl.checkpoints.last_save import MeasuredSave, SaveDecision, SavePace, decide_save
from polyrl.errors import DeadlineExceeded
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.checkpoints.folder import SAVE_DEADLINE_S, Checkpoints, checkpoint_name
from polyrl_trainer.state import TrainerState

log = structlog.get_logger()

WAITED: Final = "timing_s/save_checkpoint"
"""Metric: seconds that steps waited, for copies and for a save that was still in flight."""
TOOK: Final = "timing_s/checkpoint"
"""Metric: seconds of the newest save, until it was durable."""


@dataclass(frozen=True)
class SaveInFlight:
    """One that is being written."""

    name: str
    state: bytes
    size: int
    began: float
    copied_s: float
    on_durable: Callable[[], None]


class Saves:
    """Saves of one run. All methods are the event loop's."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._in_flight: SaveInFlight | None = None
        self._landing: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._pace = SavePace()
        self._durable = b""
        self._metrics: dict[str, float] = {}

    def decide(self, state: TrainerState, size: int, left_s: float | None) -> SaveDecision:
        """See `decide_save`; `size` are the learners' bytes. Raises what a save failed with."""
        if self._failure is not None:
            raise self._failure
        unchanged = msgspec.json.encode(state) == self._durable
        return decide_save(left_s, size, self._pace, in_flight=self._in_flight is not None, unchanged=unchanged)

    async def begin(
        self,
        state: TrainerState,
        backend: TrainingBackend,
        critic: TrainingBackend | None,
        *,
        size: int,
        on_durable: Callable[[], None],
        copied: bool = True,
    ) -> None:
        """Returns once the state is copied, or, not `copied`, durable; `on_durable` is called when it survives this
        process and a power cut."""
        assert self._in_flight is None, "one at a time"
        began = time.monotonic()
        saved = state.copy()
        written = await asyncio.to_thread(self._checkpoints.save, saved, backend, critic, copied=copied)
        self._add(WAITED, time.monotonic() - began)
        self._in_flight = SaveInFlight(
            name=checkpoint_name(state),
            state=msgspec.json.encode(saved),
            size=size,
            began=began,
            copied_s=time.monotonic() - began,
            on_durable=on_durable,
        )
        self._landing = asyncio.ensure_future(self._land(self._in_flight, written))
        if not copied:
            await self.settle()

    async def _land(self, save: SaveInFlight, written: Future[Path]) -> None:
        try:
            path = await asyncio.wrap_future(written)
            seconds = time.monotonic() - save.began
            self._durable, self._pace = save.state, self._pace.after(MeasuredSave(save.size, seconds))
            self._metrics[TOOK] = seconds
            save.on_durable()
            log.info("checkpoint saved", path=str(path), seconds=seconds, waited=save.copied_s, bytes=save.size)
        except Exception as error:  # noqa: BLE001 - raised by who waits, and by `watch`
            log.error("checkpoint failed", name=save.name, reason=str(error) or type(error).__name__)
            self._failure = error
            self._failed.set()
        finally:
            self._in_flight = None

    async def settle(self, within_s: float = SAVE_DEADLINE_S) -> None:
        """Returns when nothing is in flight. Raises what a save failed with, now or before."""
        if self._in_flight is not None and self._landing is not None:
            began = time.monotonic()
            if not (await asyncio.wait([self._landing], timeout=within_s))[0]:
                raise DeadlineExceeded("the last save to be written", "the disk", within_s)
            self._add(WAITED, time.monotonic() - began)
        if self._failure is not None:
            raise self._failure

    async def watch(self) -> None:
        """Until cancelled; raises what a save fails with, at once."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def close(self, within_s: float = SAVE_DEADLINE_S) -> None:
        """For a run that ends, however: the last save may end, and what does not is reported."""
        try:
            await self.settle(max(0.0, within_s))
        except DeadlineExceeded as error:
            log.error("checkpoint not over", reason=str(error))
        except Exception as error:  # noqa: BLE001 - whoever ends the run has its reason
            log.error("the run ends without its last checkpoint", reason=str(error) or type(error).__name__)

    def take_metrics(self) -> dict[str, float]:
        """Since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken

    def why_unsaved(self) -> str:
        """Why no checkpoint holds the state yet; empty: nothing is in flight and nothing failed."""
        if self._in_flight is not None:
            return f"{self._in_flight.name} is still written, after {time.monotonic() - self._in_flight.began:.1f} s"
        return "" if self._failure is None else f"the save failed: {self._failure}"

    def _add(self, name: str, seconds: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds
