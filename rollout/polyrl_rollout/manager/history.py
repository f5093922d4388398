"""What the manager remembers of its run for people: the trainer's rows, some samples to read, what happened to engines.

All of it is in memory and bounded; nothing that the ledger promises depends on it, and a report that is lost loses a
row. A manager that starts again begins with nothing, and says since when it remembers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from polyrl.control import History
from polyrl.history.fleet import END_KINDS, RECLAIMED, FleetEvent, machines_by_pool, seconds_by_pool
from polyrl.history.rows import MetricsRow
from polyrl.ledger import events
from polyrl.ledger.causes import GoneCause
from polyrl.sample import Pool
from polyrl.sample_record import SampleRecord, parse_records
from polyrl.wire import TrainerReport
from polyrl_rollout.manager.reports import KeptRows, KeptSamples

MAX_EVENTS: Final = 8_000
"""Each engine makes three or four."""
TRAINER: Final = "trainer"


class RunHistory:
    """Filled by the manager as messages and events pass; times are Unix seconds."""

    def __init__(self, began: float, *, resumed: bool, lease_s: float) -> None:
        """A trainer that gives no sign of life for `lease_s` is gone, and its machine with it."""
        self._began, self._resumed, self._lease_s = began, resumed, lease_s
        self._rows = KeptRows()
        self._samples = KeptSamples()
        self.left_out: Counter[str] = Counter()
        """How many were left out of reports that held more than a report may: `samples`, `numbers`."""
        self._events: list[FleetEvent] = []
        self._settled: Counter[Pool] = Counter()
        """Seconds of engines that are forgotten."""
        self._pools: dict[str, Pool] = {}
        self._serving: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._trainer_at = began
        """When it was last alive."""
        self.finished_at: float | None = None

    @property
    def rows(self) -> list[MetricsRow]:
        """The rows that hold, in order."""
        return self._rows.rows

    def take_report(self, report: TrainerReport, now: float) -> None:
        """The trainer's row and its samples. A trainer that went back to a checkpoint does later steps again."""
        self._count_left_out("numbers", self._rows.take(report, now), now)
        self._count_left_out("samples", self._samples.take(report.samples), now)

    def take_events(self, happened: Iterable[events.Event], now: float) -> None:
        """What of the ledger's events is about who is there."""
        self._end_silent_trainer(now)
        for event in happened:
            match event:
                case events.EngineGreeted(engine, pool) if engine not in self._pools:
                    self._pools[engine] = pool
                    self._note("started", engine, f"{engine} has come", now)
                case events.EngineServing(engine, version) if version >= 0 and engine not in self._serving:
                    self._serving.add(engine)
                    self._note("serving", engine, f"{engine} serves", now)
                case events.EngineDeparted(engine, step, text):
                    self._note("condition", engine, f"step {step}: {engine}'s tokens are not the policy's: {text}", now)
                case events.EngineDraining(engine, _, reason) if reason:
                    self._reasons[engine] = reason
                case events.EngineGone(engine, cause):
                    self._go(engine, cause, now)
                case events.TrainerGreeted() | events.TrainerHeard():
                    self._note_trainer_alive(now)
                case events.RunFinished():
                    self.finished_at = now

    def note_condition(self, engine: str, text: str, now: float) -> None:
        """What no event of the ledger says."""
        self._note("condition", engine, text, now)

    def samples(self) -> list[SampleRecord]:
        """In the order in which they came."""
        return parse_records(self._samples.lines)

    def seconds(self, now: float) -> dict[Pool, float]:
        """Seconds that machines were held, as far as this manager knows: from an engine's greeting to its end."""
        self._end_silent_trainer(now)
        until = now if self.finished_at is None else self.finished_at
        return dict(self._settled + Counter(seconds_by_pool(self._events, until)))

    def machines(self, now: float) -> dict[Pool, int]:
        """Held now."""
        self._end_silent_trainer(now)
        return machines_by_pool(self._events) if self.finished_at is None else {}

    def since(self, time: float, now: float) -> History:
        """Everything but samples that is newer than `time`."""
        self._end_silent_trainer(now)
        return History(
            began=self._began,
            resumed=self._resumed,
            rows=tuple(row for row in self.rows if row.time > time),
            events=tuple(event for event in self._events if event.time > time),
            seconds=self.seconds(now),
            machines=self.machines(now),
        )

    def _go(self, engine: str, cause: str, now: float) -> None:
        reason = self._reasons.pop(engine, "")
        if cause == GoneCause.SILENT:
            self._note(RECLAIMED, engine, f"{engine} is gone without a word", now)
        else:
            self._note("exited", engine, f"{engine} has left{f': {reason}' if reason else ''}", now)
        self._serving.discard(engine)
        self._pools.pop(engine, None)

    def _note_trainer_alive(self, now: float) -> None:
        self._trainer_at = now
        if TRAINER not in self._pools:
            self._pools[TRAINER] = Pool.RESERVED
            self._note("started", TRAINER, "the trainer has come", now)

    def _end_silent_trainer(self, now: float) -> None:
        """The ledger has no event for it, for samples wait for their trainer. Called before anything is noted or read,
        so that its end takes its place among the events."""
        end = self._trainer_at + self._lease_s
        if TRAINER in self._pools and end < (now if self.finished_at is None else self.finished_at):
            self._note("exited", TRAINER, "the trainer is gone without a word", end)
            del self._pools[TRAINER]

    def _count_left_out(self, what: str, count: int, now: float) -> None:
        if count and not self.left_out[what]:
            self._note("condition", "", f"a report has too many {what}: {count} are left out", now)
        self.left_out[what] += count

    def _note(self, kind: str, engine: str, text: str, now: float) -> None:
        # A clock that was set back must not look like a run that began again.
        time = max(round(now, 3), self._events[-1].time if self._events else 0.0)
        pool, since_start = self._pools.get(engine), round(time - self._began, 3)
        self._events.append(FleetEvent(time=time, t=since_start, kind=kind, worker=engine, text=text, pool=pool))
        if len(self._events) > MAX_EVENTS:
            self._forget()

    def _forget(self) -> None:
        """The older half of the stays that have ended goes; their seconds stay. A worker may come again: its name has
        several stays."""
        number: Counter[str] = Counter()
        stays, ended = [], []
        for event in self._events:
            stays.append((event.worker, number[event.worker]))
            if event.kind in END_KINDS:
                ended.append(stays[-1])
                number[event.worker] += 1
        old = set(ended[: (len(ended) + 1) // 2])
        gone = [event for event, stay in zip(self._events, stays, strict=True) if stay in old]
        self._settled.update(seconds_by_pool(gone, gone[-1].time if gone else 0.0))
        self._events = [event for event, stay in zip(self._events, stays, strict=True) if stay not in old]
