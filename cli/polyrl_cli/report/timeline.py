"""What happened to the fleet and when, as it happens: one JSON object a line in `fleet.jsonl`.

{"time": 1700000012.3, "t": 12.3, "event": "serving", "worker": "rollout-1", "text": "rollout-1 serves"}
{"time": 1700000012.3, "t": 12.3, "event": "fleet", "engines": 2}

And the trainer's own rows beside it in `metrics.jsonl`: all of them, or those that come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from polyrl.errors import rows_of
from polyrl.history.fleet import FLEET, OVER, RUN, FleetEvent
from polyrl.history.rows import LARGEST, MetricsRow, parse_metrics
from polyrl.sample import Pool
from polyrl.status import EngineState, ManagerStatus


class Timeline:
    """Appends events; `listener` is called with those that a person wants to see."""

    def __init__(self, file: Path, clock: Callable[[], float], listener: Callable[[FleetEvent], None]) -> None:
        self._file: IO[bytes] = file.open("ab", buffering=0)
        self._clock, self._listener = clock, listener
        self._began = clock()
        self._unwritten = b""
        self._engines = -1
        self._write(RUN)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    def note(self, kind: str, worker: str, text: str) -> None:
        """Writes an event and calls the listener."""
        event = self._write(kind, worker=worker, text=text)
        with suppress(OSError):  # what cannot be shown ends no run
            self._listener(event)

    def note_over(self, text: str) -> None:
        """Writes that a condition of this text has ended, which nobody is shown."""
        self._write(OVER, text=text)

    def note_fleet(self, status: ManagerStatus) -> None:
        """Writes the fleet's size when it has changed."""
        engines = num_serving(status)
        if engines != self._engines:
            self._engines = engines
            self._write(FLEET, engines=engines)

    def close(self) -> None:
        """No more events."""
        self._file.close()

    def _write(self, kind: str, worker: str = "", text: str = "", engines: int = -1) -> FleetEvent:
        now = round(time.time(), 3)
        line = FleetEvent(time=now, t=round(self.elapsed, 3), kind=kind, worker=worker, text=text, engines=engines)
        self._unwritten += msgspec.json.encode(line) + b"\n"
        with suppress(OSError):  # of a full disk; once it has room again, none is missing
            self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        return line


def num_serving(status: ManagerStatus) -> int:
    """Rollouts that take samples now, the reserved engine left out."""
    engines = (engine for engine in status.engines if engine.pool is not Pool.RESERVED)
    return sum(engine.state is EngineState.SERVING for engine in engines)


def read_timeline(file: Path) -> list[FleetEvent]:
    """All whole lines of a timeline. One that is no event is left out: the last may be torn, a received one may be
    anything."""
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        whole = (line for line in lines if line.endswith(b"\n"))
        events = rows_of(whole, msgspec.json.Decoder(FleetEvent).decode, file.name)
        return [event for event in events if max(abs(event.time), abs(event.t), abs(event.engines)) <= LARGEST]


class MetricsTail:
    """Follows a metrics.jsonl that another process appends to, from its present end.

    A trainer that goes back to a checkpoint puts another file in its place, with the rows that still hold: rows older
    than the newest one returned are not returned again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode, self._offset = (file.stat().st_ino, file.stat().st_size) if file.exists() else (0, 0)
        self._newest = max((row.time for row in read_metrics(file)), default=0.0)

    def read(self) -> list[MetricsRow]:
        """Every line that was finished since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            replaced, self._inode = inode != self._inode, inode
            file.seek(0 if replaced else self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        self._offset = (0 if replaced else self._offset) + (len(whole) + 1 if whole else 0)
        rows = [row for row in parse_metrics(whole) if not replaced or row.time > self._newest]
        self._newest = max([self._newest, *(row.time for row in rows)])
        return rows


def read_metrics(file: Path) -> list[MetricsRow]:
    """All whole lines; none when there is no file."""
    return parse_metrics(file.read_bytes().rpartition(b"\n")[0]) if file.is_file() else []
