"""What happened to the fleet and when, as it happens: one JSON object a line in `fleet.jsonl`.

{"time": 1700000012.3, "t": 12.3, "event": "serving", "worker": "rollout-1", "text": "rollout-1 serves"}
{"time": 1700000012.3, "t": 12.3, "event": "fleet", "engines": 2}
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import msgspec

from polyrl.sample import Pool
from polyrl.status import EngineState, ManagerStatus


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line."""

    time: float
    """Unix seconds, as in metrics.jsonl."""
    t: float
    """Seconds since this start of the run."""
    event: str
    """started, serving, reclaimed, fault, stopped, exited, condition or fleet."""
    worker: str = ""
    text: str = ""
    engines: int = -1
    """Rollouts that serve from now on, the reserved engine left out; with `fleet` only."""


RECLAIMED: Final = "reclaimed"
"""A rollout was taken away, with or without notice."""
FAULT: Final = "fault"
"""Another fault was injected."""
FLEET: Final = "fleet"


class Timeline:
    """Appends events; `listener` is called with those that a person wants to see."""

    def __init__(self, file: Path, clock: Callable[[], float], listener: Callable[[FleetEvent], None]) -> None:
        self._file: IO[bytes] = file.open("ab", buffering=0)
        self._clock, self._listener = clock, listener
        self._began = clock()
        self._engines = -1

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    def note(self, event: str, worker: str, text: str) -> None:
        """Writes an event and calls the listener."""
        self._listener(self._write(event, worker=worker, text=text))

    def note_fleet(self, status: ManagerStatus) -> None:
        """Writes the fleet's size when it has changed."""
        engines = num_serving(status)
        if engines != self._engines:
            self._engines = engines
            self._write(FLEET, engines=engines)

    def close(self) -> None:
        """No more events."""
        self._file.close()

    def _write(self, event: str, worker: str = "", text: str = "", engines: int = -1) -> FleetEvent:
        now = round(time.time(), 3)
        line = FleetEvent(time=now, t=round(self.elapsed, 3), event=event, worker=worker, text=text, engines=engines)
        self._file.write(msgspec.json.encode(line) + b"\n")
        return line


def num_serving(status: ManagerStatus) -> int:
    """Rollouts that take samples now, the reserved engine left out."""
    engines = (engine for engine in status.engines if engine.pool is not Pool.RESERVED)
    return sum(engine.state is EngineState.SERVING for engine in engines)


def read_timeline(file: Path) -> list[FleetEvent]:
    """All whole lines of a timeline; the last one may be incomplete after a crash and is left out then."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [msgspec.json.decode(line, type=FleetEvent) for line in lines if line]
