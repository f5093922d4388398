"""What is measured of a step, and what it says in a sentence: who was busy, idle or gone, and when the window moved.

An engine's time is idle when it could have generated (it serves the step's weights, is not paused, and the learner does
not have its devices) and ran nothing; needlessly so when a sample waited that fits its context, or ran elsewhere and
would have ended sooner here, reading it again included.

What is watched: `world`; what is made of it: `run`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from world import Engine, Observer, World

from polyrl.ledger import Event
from polyrl.ledger.events import Assigned, GroupDiscarded, Moved, WindowSet
from polyrl.ledger.state import SamplePhase
from polyrl.sample import Pool
from polyrl.wire import GroupDropped

SAMPLED_S: Final = 0.25
"""Time between two looks at who is idle."""
SOONER: Final = 0.9
"""A sample would have ended sooner elsewhere when it needs less than this share of the time: moving costs."""
SHOWN: Final = 5
"""Engines, window changes, losses in a sentence."""


@dataclass
class EngineTime:
    """Seconds of an engine that could have generated."""

    busy: float = 0.0
    idle: float = 0.0
    needless: float = 0.0


@dataclass
class StepReport:
    """One step, measured."""

    seconds: float
    done: bool
    needless_s: float
    engine_s: float
    generated: float
    wanted: int
    why: str


@dataclass
class Measures(Observer):
    """Gathers what happens in one step."""

    began: float
    made: float = 0.0
    engines: dict[str, EngineTime] = field(default_factory=lambda: defaultdict(EngineTime))
    moves: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    windows: list[tuple[float, bool]] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    learned: list[tuple[float, float]] = field(default_factory=list)
    """(when, seconds) of each batch."""
    places: dict[str, list[tuple[float, str, str]]] = field(default_factory=lambda: defaultdict(list))
    """By sample: (when, engine or why it left, "" or from where)."""
    _unsampled: float = 0.0
    _assigned: dict[int, tuple[str, str]] = field(default_factory=dict)
    _causes: dict[str, str] = field(default_factory=dict)

    def passed(self, world: World, seconds: float) -> None:
        """Time goes on."""
        self._unsampled += seconds
        if self._unsampled < SAMPLED_S:
            return
        idle = []
        for engine in world.engines.values():
            if engine.pool is Pool.RESERVED and engine.stuck:
                continue
            if engine.version != world.version or engine.loading >= 0 or engine.frozen or engine.machine.rejects:
                continue
            if engine.decoding:
                self.engines[engine.name].busy += self._unsampled
            elif not engine.protocol.draining:
                self.engines[engine.name].idle += self._unsampled
                idle.append(engine)
        if idle:
            waiting, running = _waiting(world), _running(world)
            for engine in idle:
                if _could_help(engine, waiting, running):
                    self.engines[engine.name].needless += self._unsampled
        self._unsampled = 0.0

    def generated(self, tokens: float) -> None:
        """An engine made tokens."""
        self.made += tokens

    def learning(self, now: float, seconds: float) -> None:
        """The trainer begins a batch."""
        self.learned.append((now - self.began, seconds))

    def lost(self, name: str, now: float) -> None:
        """An engine is gone."""
        self.gone.append(f"{name} lost at {now - self.began:.0f}")

    def paused(self, name: str, now: float) -> None:
        """An engine is silent."""
        self.gone.append(f"{name} silent at {now - self.began:.0f}")

    def dropped(self, message: GroupDropped) -> None:
        """The trainer was notified that a group is given up."""
        self.drops[str(message.reason)] += 1

    def events(self, events: Iterable[Event], now: float) -> None:
        """What the ledger decided."""
        for event in events:
            match event:
                case Assigned(number, sample, engine):
                    cause = self._causes.pop(sample, "")
                    self._assigned[number] = (sample, engine)
                    self.places[sample].append((now - self.began, engine, cause))
                case Moved(number, cause):
                    sample, _ = self._assigned.get(number, ("", ""))
                    self._causes[sample] = str(cause)
                    self.moves[str(cause)] += 1
                case WindowSet(is_open):
                    self.windows.append((now - self.began, is_open))
                case GroupDiscarded(reason=reason):
                    self.drops[str(reason)] += 0

    def report(self, world: World, seconds: float) -> StepReport:
        """The step is over, or was given up."""
        wanted = [sample for prompt in world.workload.steps[world.version] for sample in prompt.samples]
        return StepReport(
            seconds,
            done=world.missing <= 0,
            needless_s=sum(each.needless for each in self.engines.values()),
            engine_s=sum(each.busy + each.idle for each in self.engines.values()),
            generated=self.made,
            wanted=sum(sample.tokens for sample in wanted),
            why=self._why(world, seconds),
        )

    def _why(self, world: World, seconds: float) -> str:
        taken = sum(each for _, each in self.learned)
        first = f"first batch at {self.learned[0][0]:.1f}" if self.learned else "no batch"
        parts = [f"learner busy {taken:.1f} of {seconds:.1f} s in {len(self.learned)} batches, {first}"]
        parts += [self._window(seconds), self._last(world), self._engine_times()]
        if self.moves:
            parts.append("moves: " + ", ".join(f"{count} {cause}" for cause, count in self.moves.most_common()))
        if self.gone:
            more = f" and {len(self.gone) - SHOWN} more" if len(self.gone) > SHOWN else ""
            parts.append(", ".join(self.gone[:SHOWN]) + more)
        if self.drops:
            parts.append("groups dropped: " + ", ".join(f"{count} {reason}" for reason, count in self.drops.items()))
        return "; ".join(part for part in parts if part)

    def _window(self, seconds: float) -> str:
        closed = [at for at, is_open in self.windows if not is_open]
        ends = [at for at, is_open in self.windows if is_open]
        if not closed:
            return "window never closed"
        spans = [f"{at:.1f}-{next((end for end in ends if end > at), seconds):.1f}" for at in closed]
        more = f" and {len(spans) - SHOWN} times more" if len(spans) > SHOWN else ""
        return f"window closed {', '.join(spans[:2] + spans[2:][-SHOWN + 2 :])}{more}"

    def _last(self, world: World) -> str:
        if not world.ended:
            return ""
        sample = max(world.ended, key=lambda name: world.ended[name])
        visits = [f"{engine} at {at:.1f}{f' ({cause})' if cause else ''}" for at, engine, cause in self.places[sample]]
        tokens, at = world.truth[sample].tokens, world.ended[sample] - self.began
        return f"last verdict {sample} ({tokens} tokens) at {at:.1f}, on {', '.join(visits[-SHOWN:])}"

    def _engine_times(self) -> str:
        rows = sorted(self.engines.items(), key=lambda row: (row[0][0] != "r", -row[1].needless))[:SHOWN]
        shown = ", ".join(f"{name} {each.busy:.0f}/{each.idle:.0f}/{each.needless:.0f}" for name, each in rows)
        return f"busy/idle/needlessly: {shown}" + (" ..." if len(self.engines) > SHOWN else "")


def train(world: World, step: int, limit_s: float) -> StepReport:
    """Has the world train one step, and measures it."""
    measures = Measures(world.now)
    return measures.report(world, world.train(step, limit_s, measures))


def _waiting(world: World) -> list[int]:
    """Contexts of some samples that wait."""
    found = []
    for *_, number in world.ledger.state.queue[:SHOWN]:
        group = world.ledger.state.groups[number].group
        for index in range(group.n):
            sample = world.ledger.state.samples[f"{number}.{index}"]
            if sample.phase is SamplePhase.WAITING:
                found.append(len(group.prompt_ids) // 4 + sample.length + 1)
    return found


def _running(world: World) -> list[tuple[float, float, int]]:
    """Of each busy engine, its longest run: seconds left here, tokens left, tokens to read elsewhere."""
    found = []
    for engine in world.engines.values():
        if engine.decoding:
            run = max(engine.decoding.values(), key=lambda run: run.end - run.position)
            left, pace = run.end - run.position, engine.token_s(len(engine.decoding))
            held = world.learned_at - world.now if engine.stuck else 0.0
            found.append((held + left * pace, left, int(engine.size_of(run))))
    return found


def _could_help(engine: Engine, waiting: list[int], running: list[tuple[float, float, int]]) -> bool:
    limit = engine.speed.max_context
    if any(context < limit for context in waiting):
        return True
    return any(
        size + left < limit and size * engine.speed.prefill_s + left * engine.token_s(1) < SOONER * seconds
        for seconds, left, size in running
    )
