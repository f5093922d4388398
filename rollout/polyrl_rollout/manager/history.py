"""What the manager remembers of its run for people: the trainer's rows, some samples to read, what happened to engines.

All of it is in memory and bounded; nothing that the ledger promises depends on it, and a report that is lost loses a
row. A manager that starts again begins with nothing, and says since when it remembers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Final

from polyrl.control import History
from polyrl.history.fleet import END_KINDS, RECLAIMED, FleetEvent, machines_by_pool, seconds_by_pool
from polyrl.history.rows import MetricsRow
from polyrl.ledger import events
from polyrl.sample import Pool
from polyrl.sample_record import SampleRecord, parse_records
from polyrl.status import StepValue
from polyrl.wire import TrainerReport

MAX_ROWS: Final = 4_000
"""Ten times the points that a picture has; of forty numbers each they take some 15 MB."""
MAX_VALUES: Final = 128
"""Of one row: the trainer names forty, a reward function the rest."""
MAX_NAME_CHARS: Final = 200
MAX_SAMPLE_BYTES: Final = 2 << 20
"""Of samples together, as JSON; the newest ones stay."""
MAX_EVENTS: Final = 8_000
"""Each engine makes three or four."""
TRAINER: Final = "trainer"
_STATUS_VALUES: Final = frozenset(StepValue)


class RunHistory:
    """Filled by the manager as messages and events pass; times are Unix seconds."""

    def __init__(self, began: float, *, resumed: bool) -> None:
        self._began, self._resumed = began, resumed
        self.rows: list[MetricsRow] = []
        self._samples: deque[bytes] = deque()
        self._sample_bytes = 0
        self._events: list[FleetEvent] = []
        self._settled: Counter[Pool] = Counter()
        """Seconds of engines that are forgotten."""
        self._pools: dict[str, Pool] = {}
        self._serving: set[str] = set()
        self._reasons: dict[str, str] = {}
        self.finished_at: float | None = None

    def take_report(self, report: TrainerReport, now: float) -> None:
        """The trainer's row and its samples. A trainer that went back to a checkpoint does later steps again."""
        # JSON has no NaN; what only status shows is no number of this step.
        named = [pair for pair in report.values.items() if pair[0] not in _STATUS_VALUES and isfinite(pair[1])]
        bounded = {name[:MAX_NAME_CHARS]: value for name, value in named[:MAX_VALUES]}
        row = MetricsRow(round(now, 3), report.phase[:MAX_NAME_CHARS], step=report.step, values=bounded)
        self.rows = [*rows_before(self.rows, row), row]
        if len(self.rows) > MAX_ROWS:
            self.rows = without_half(self.rows)
        for line in report.samples:
            self._samples.append(line)
            self._sample_bytes += len(line)
        while self._sample_bytes > MAX_SAMPLE_BYTES:
            self._sample_bytes -= len(self._samples.popleft())

    def take_events(self, happened: Iterable[events.Event], now: float) -> None:
        """What of the ledger's events is about who is there."""
        for event in happened:
            match event:
                case events.EngineGreeted(engine, pool) if engine not in self._pools:
                    self._pools[engine] = pool
                    self._note("started", engine, f"{engine} has come", now)
                case events.EngineServing(engine, version) if version >= 0 and engine not in self._serving:
                    self._serving.add(engine)
                    self._note("serving", engine, f"{engine} serves", now)
                case events.EngineDraining(engine, _, reason):
                    self._reasons[engine] = reason
                case events.EngineGone(engine, cause):
                    self._go(engine, cause, now)
                case events.TrainerGreeted() | events.TrainerHeard() if TRAINER not in self._pools:
                    self._pools[TRAINER] = Pool.RESERVED
                    self._note("started", TRAINER, "the trainer has come", now)
                case events.RunFinished():
                    self.finished_at = now

    def samples(self) -> list[SampleRecord]:
        """In the order in which they came."""
        return parse_records(self._samples)

    def seconds(self, now: float) -> dict[Pool, float]:
        """That machines were held, as far as this manager knows: from an engine's greeting to its end."""
        until = now if self.finished_at is None else self.finished_at
        return dict(self._settled + Counter(seconds_by_pool(self._events, until)))

    def machines(self) -> dict[Pool, int]:
        """Held now."""
        return machines_by_pool(self._events) if self.finished_at is None else {}

    def since(self, time: float, now: float) -> History:
        """Everything but samples that is newer than `time`."""
        return History(
            began=self._began,
            resumed=self._resumed,
            rows=tuple(row for row in self.rows if row.time > time),
            events=tuple(event for event in self._events if event.time > time),
            seconds=self.seconds(now),
            machines=self.machines(),
        )

    def _go(self, engine: str, cause: str, now: float) -> None:
        reason = self._reasons.pop(engine, "")
        if cause == events.GoneCause.SILENT:
            self._note(RECLAIMED, engine, f"{engine} is gone without a word", now)
        else:
            self._note("exited", engine, f"{engine} has left{f': {reason}' if reason else ''}", now)
        self._serving.discard(engine)
        self._pools.pop(engine, None)

    def _note(self, kind: str, engine: str, text: str, now: float) -> None:
        time, pool = round(now, 3), self._pools.get(engine)
        since_start = round(now - self._began, 3)
        self._events.append(FleetEvent(time=time, t=since_start, kind=kind, worker=engine, text=text, pool=pool))
        if len(self._events) > MAX_EVENTS:
            self._forget()

    def _forget(self) -> None:
        """The older half of those that have ended goes; their seconds stay."""
        ended = [event.worker for event in self._events if event.kind in END_KINDS]
        old = set(ended[: len(ended) // 2])
        gone = [event for event in self._events if event.worker in old]
        self._settled.update(seconds_by_pool(gone, gone[-1].time if gone else 0.0))
        self._events = [event for event in self._events if event.worker not in old]


def rows_before(rows: Sequence[MetricsRow], new: MetricsRow) -> Sequence[MetricsRow]:
    """The rows that still hold when `new` comes: a step that was there already is done again, and all after it."""
    if new.phase == "eval":
        return rows[:-1] if rows and (rows[-1].phase, rows[-1].step) == (new.phase, new.step) else rows
    for position in range(len(rows) - 1, -1, -1):
        if rows[position].phase == new.phase:
            if rows[position].step < new.step:
                return rows
            again = next(at for at, row in enumerate(rows) if row.phase == new.phase and row.step >= new.step)
            return rows[:again]
    return rows


def without_half(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Every second step of the older half left out; evaluations stay, for there are few."""
    half = len(rows) // 2
    older = [row for position, row in enumerate(rows[:half]) if position % 2 or row.phase == "eval"]
    kept = [*older, *rows[half:]]
    return kept if len(kept) <= MAX_ROWS else kept[-MAX_ROWS:]
