"""One sink's thread and queue, so that a service that is away, slow or broken costs a run nothing but its rows there.

    offer ─> queue (bounded; full: lost) ─> thread: open, write (tried again; then lost) ─> finish, within a deadline

A first failure is logged, the count of lost rows at the end. What a sink has is kept beside the run: a trainer that
goes back to a checkpoint trains some steps again, and neither TensorBoard nor the services can take a row back, so
what they have stays, and rows up to there are not sent twice. What it is known to have are settled rows alone: of those
that it took in the last seconds before a kill some may be lost, so they are sent again.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Final

import msgspec
import structlog

from polyrl.errors import UNDECODABLE, DiskRefused
from polyrl_trainer.checkpoints import replace_file, writing
from polyrl_trainer.sinks.port import Entry, MetricRow, MetricsSink

log = structlog.get_logger()

QUEUE_ENTRIES: Final = 1000
"""Held for a sink that is slow or away: minutes to hours of steps, some megabytes with samples."""
ATTEMPTS: Final = 3
"""Per entry; one that a service refuses for what it holds must not keep all others."""
RETRY_S: Final = 10.0
"""Between attempts."""
POLL_S: Final = 0.1
"""How late the thread sees that the run ends."""
DELIVERY_DEADLINE_S: Final = 60.0
"""For everything that is still to be sent at the end, by all sinks together."""
STOPPED_DEADLINE_S: Final = 12.0
"""The same when asked to stop; whoever does that ends the process after 20 s."""
THREAD_PREFIX: Final = "sink-"
ACCOUNT: Final = re.compile(r"(?<=://)\S+@")
"""Name and password in a URL, as MLFLOW_TRACKING_URI may have them; a library's errors hold it whole. Passwords of
databases may hold slashes and more of these signs: what follows the last one is no secret."""


class SinkMemory(msgspec.Struct):
    """RUN/sinks/NAME.json."""

    id: str = ""
    sent: dict[str, int] = {}
    """The newest step that the sink has, by phase."""
    lost: dict[str, list[int]] = {}
    """Steps before that which it does not have."""


class SinkReport(msgspec.Struct, frozen=True):
    """What became of a run's entries at one sink, in this process."""

    written: int
    lost: int
    error: str = ""
    """The first failure."""


OpenSink = Callable[[str], MetricsSink]
"""Opens a sink, going on with the run of this id there; empty: a new one."""


class Delivery:
    """Takes entries without ever waiting."""

    def __init__(self, name: str, open_sink: OpenSink, folder: Path, *, retry_s: float = RETRY_S) -> None:
        self.name = name
        self._open_sink, self._retry_s = open_sink, retry_s
        self._file = folder / f"{name}.json"
        self._memory = read_memory(self._file)
        self._known = dict(self._memory.sent)
        self._gaps = {phase: set(steps) for phase, steps in self._memory.lost.items()}
        self._queue: Queue[Entry] = Queue(QUEUE_ENTRIES)
        self._unsettled = deque[tuple[float, Entry]]()
        self._offered = self._written = 0
        self._error = ""
        self._sink: MetricsSink | None = None
        self._ending = threading.Event()
        self._end: tuple[str, Mapping[str, Any]] = ("", {})
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}{name}", daemon=True)
        self._thread.start()

    def offer(self, entry: Entry) -> None:
        """Sends it some time, unless the sink has it from an earlier process."""
        if entry.step <= self._known.get(entry.phase, -1) and entry.step not in self._gaps.get(entry.phase, ()):
            return
        self._gaps.get(entry.phase, set()).discard(entry.step)
        self._offered += 1
        try:
            self._queue.put_nowait(entry)
        except Full:
            self._failed(f"{QUEUE_ENTRIES} rows wait for it, more are lost")
            self._lose(entry)

    def end(self, outcome: str, results: Mapping[str, Any]) -> None:
        """Nothing is offered after it; an empty outcome leaves the sink's run open."""
        self._end = (outcome, results)
        self._ending.set()

    def finish(self, deadline: float) -> SinkReport:
        """Waits until what is left is sent and the sink's run ended; what is not by `deadline`, on the monotonic clock,
        is lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._failed("it did not take the end of the run in time")
        report = SinkReport(self._written, self._offered - self._written, error=self._error)
        if report.lost:
            log.warning("metrics were lost on their way", sink=self.name, lost=report.lost, written=report.written)
        return report

    def _run(self) -> None:
        self._try(self._opened)  # so that what is wrong with it is logged early
        while not (self._ending.is_set() and self._queue.empty()):
            try:
                entry = self._queue.get(timeout=POLL_S)
            except Empty:
                entry = None
            if entry is not None and self._delivered(entry):
                self._written += 1
                self._unsettled.append((time.monotonic(), entry))
            elif entry is not None:
                self._lose(entry)
            self._settle(time.monotonic())
        if (sink := self._sink) is not None and self._end[0]:
            finish = partial(sink.finish, *self._end)
            if self._try(finish):
                self._settle(math.inf)

    def _settle(self, now: float) -> None:
        """What is written for long enough is what the sink has."""
        before = len(self._unsettled)
        while self._unsettled and self._sink is not None and now - self._unsettled[0][0] >= self._sink.settles_s:
            self._has(self._unsettled.popleft()[1])
        if len(self._unsettled) < before:
            self._remember()

    def _has(self, entry: Entry) -> None:
        self._memory.sent[entry.phase] = max(entry.step, self._memory.sent.get(entry.phase, -1))
        gaps = self._memory.lost.get(entry.phase, [])
        if entry.step in gaps:
            gaps.remove(entry.step)

    def _lose(self, entry: Entry) -> None:
        """Remembered, so that a step that is trained again fills the gap."""
        gaps = self._memory.lost.setdefault(entry.phase, [])
        gaps.append(entry.step)
        del gaps[:-QUEUE_ENTRIES]

    def _delivered(self, entry: Entry) -> bool:
        for attempt in range(ATTEMPTS):
            if attempt:
                self._ending.wait(self._retry_s)
            if self._try(lambda: self._write(entry)):
                return True
        return False

    def _write(self, entry: Entry) -> None:
        sink = self._opened()
        if isinstance(entry, MetricRow):
            sink.write(entry)
        else:
            sink.write_texts(entry)

    def _opened(self) -> MetricsSink:
        if self._sink is None:
            self._sink = self._open_sink(self._memory.id)
            if self._sink.id != self._memory.id:
                self._memory.id = self._sink.id
                self._remember()
        return self._sink

    def _remember(self) -> None:
        try:
            with writing(self._file):
                self._file.parent.mkdir(exist_ok=True)
            replace_file(self._file, msgspec.json.encode(self._memory))
        except DiskRefused as error:
            self._failed(str(error))

    def _try(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a service's library raises
            self._failed(words_of(error))
            return False
        return True

    def _failed(self, reason: str) -> None:
        """Logged once; `_error` keeps it."""
        if not self._error:
            self._error = reason
            log.warning("a sink of metrics failed; the run goes on, metrics.jsonl has all", sink=self.name, why=reason)


def words_of(error: BaseException) -> str:
    """What a library raised, without accounts."""
    try:
        return ACCOUNT.sub("", f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - a library's error may fail to say what it is
        return type(error).__name__


def any_abandoned() -> bool:
    """True when a sink was left while it was at work."""
    return any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate())


def read_memory(file: Path) -> SinkMemory:
    """What an earlier process left; nothing when there is none or it is broken."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=SinkMemory)
    except (OSError, *UNDECODABLE):
        return SinkMemory()
