"""What happened to the fleet and when, as it happens: one JSON object a line in `fleet.jsonl`.

    {"t": 12.3, "event": "serving", "worker": "rollout-1", "text": "..."}       t: seconds since the run began
    {"t": 12.5, "event": "progress", "phase": "rl", "step": 4, "engines": 3, "values": {"reward": 0.5}}

Refuses to hold: the learner's metrics (the trainer writes metrics.jsonl). Read next: `plot`, which draws it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import msgspec

from polyrl.sample import Pool
from polyrl.status import EngineState, ManagerStatus


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line."""

    t: float
    event: str
    """started, serving, exited, reclaimed, condition or progress."""
    worker: str = ""
    text: str = ""
    phase: str = ""
    step: int = 0
    engines: int = 0
    """Preemptible rollouts that serve; with `progress` only."""
    values: dict[str, float] = {}


RECLAIMED: Final = "reclaimed"
PROGRESS: Final = "progress"


class Timeline:
    """Appends events; `listener` hears those that a person wants to see."""

    def __init__(self, file: Path, clock: Callable[[], float], listener: Callable[[Event], None]) -> None:
        self._file: IO[bytes] = file.open("ab", buffering=0)
        self._clock, self._listener = clock, listener
        self._began = clock()
        self._progress: tuple[str, int, int] = ("", -1, -1)
        self.preemptions = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    def note(self, event: str, worker: str, text: str) -> None:
        """Writes an event and tells the listener."""
        self.preemptions += event == RECLAIMED
        line = Event(t=round(self.elapsed, 3), event=event, worker=worker, text=text)
        self._write(line)
        self._listener(line)

    def note_progress(self, status: ManagerStatus) -> None:
        """Writes phase, step, fleet and reported numbers whenever one of the first three has changed."""
        engines = num_serving(status, Pool.SPOT)
        key = (status.phase, status.step, engines)
        if key == self._progress:
            return
        self._progress = key
        t = round(self.elapsed, 3)
        values = dict(status.values)
        self._write(Event(t=t, event=PROGRESS, phase=status.phase, step=status.step, engines=engines, values=values))

    def close(self) -> None:
        """No more events."""
        self._file.close()

    def _write(self, line: Event) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def num_serving(status: ManagerStatus, pool: Pool) -> int:
    """Engines of `pool` that take samples now."""
    return sum(engine.pool is pool and engine.state is EngineState.SERVING for engine in status.engines)


def read_timeline(file: Path) -> list[Event]:
    """All whole lines of a timeline; the last one may be cut off by a crash and is left out then."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [msgspec.json.decode(line, type=Event) for line in lines if line]
