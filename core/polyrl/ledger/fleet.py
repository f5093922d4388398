"""The engines in the orders that decisions ask for, so that none of them reads the whole fleet.

    tokenless  engines that run something and give no token
    roomy      engines with a free slot, where one more token takes least first; the trainer's own apart, which mostly
               idle while it learns, and would be in the way then
    busy       engines that run something, where a token takes longest first
    idle       engines that run nothing, the longest idle first
    reserved   the trainer's own; `leaving` those that drain; `silent` those that gave no sign of life for a lease;
               `reading` those that have prompts to read; `loading` those that are awake and serve nothing
    kinds      how many engines take work of which version, with which context

It follows from the state alone, is never saved, and a new one is made for a state that was read. Who records an event
names it here first (`note`): the engines that it changes are put in order again before the next question, and an order
that is being read ends with it. What changes with time alone (a pause, silence) is not in it: askers check that of the
few they look at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import cycle, islice
from math import inf
from typing import Any, Final, Generic, NamedTuple, TypeVar

from polyrl.ledger import events as f, speed
from polyrl.ledger.causes import RestPhase
from polyrl.ledger.state import LeasedEngine, LedgerState
from polyrl.sample import Pool, sample_id
from polyrl.wire import EndStep

Place = tuple[float, float, str]
"""Seconds per token, what decides between equals, name."""


class _Entry(NamedTuple):
    """How an engine stands in the orders."""

    roomy: Place | None
    busy: Place | None
    kind: tuple[int, int] | None
    """Version and context."""
    step_s: float
    alone: tuple[float, str] | None
    """Seconds per token of one sample alone, if measured."""
    own: bool
    """The trainer's."""


T = TypeVar("T")

AT_ONCE: Final = 2048
"""Items that one look reads in one tick: some 3 ms."""


SILENT_READ: Final = 1024
"""Samples of silent engines that one look reads, a millisecond or two: where a cloud is cut off, tens of thousands are,
and each end of a turn elsewhere is a look."""


class Round(Generic[T]):
    """One look at everything there is, a part of it in each tick, and the next one once that is over."""

    def __init__(self) -> None:
        self._left: Iterator[T] = iter(())
        self._begun_at = self._least = inf
        self._ticks = 0

    def some(self, everything: Iterable[T], now: float) -> list[T]:
        """The next few, some of which may be gone; at the beginning of a look the first of `everything`."""
        if not self._ticks:
            self._left, self._begun_at, self._least = iter(tuple(everything)), now, inf
        self._ticks += 1
        return list(islice(self._left, AT_ONCE))

    def due_after(self, read: list[T], dues: Iterable[float], now: float, shortest_s: float) -> float:
        """When there is something to look at again, once `read` is: at once if that is not all, else at the least of
        the look's `dues`; what came meanwhile is due `shortest_s` after its beginning at the earliest."""
        self._least = min(self._least, min(dues, default=inf))
        if len(read) == AT_ONCE:
            return now
        came_meanwhile = self._begun_at + shortest_s if self._ticks > 1 else inf
        self._ticks = 0
        return min(self._least, came_meanwhile)


class Fleet:
    """One state's engines."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self._entries: dict[str, _Entry] = {}
        self._roomy: list[Place] = []
        self._roomy_own: list[Place] = []
        self._busy: list[Place] = []
        self._alone: list[tuple[float, str]] = []
        self._steps, self._measured = 0.0, 0
        self._kinds: Counter[tuple[int, int]] = Counter()
        self._roomy_kinds: Counter[tuple[int, int]] = Counter()
        self._roomy_own_kinds: Counter[tuple[int, int]] = Counter()
        self._idle: dict[str, None] = {}
        self._reserved: dict[str, None] = {}
        self._draining: dict[str, None] = {}
        self._silent: dict[str, None] = {}
        self._reading: dict[str, None] = {}
        self._tried: dict[str, None] = {}
        self._loading: dict[str, None] = {}
        self._old: dict[str, None] = {}
        """Of those the ones that greeted before the newest version came."""
        self._changed: dict[str, None] = dict.fromkeys(state.engines)
        by_token = sorted(state.engines.values(), key=lambda engine: engine.token_at)
        self._tokenless = dict.fromkeys(engine.name for engine in by_token)
        """What may run something, by its newest token, the oldest first."""
        self._turns: dict[str, int] = {}
        """Where `some_running` goes on, per engine."""
        self._asked = 0
        """Where `asked` goes on."""
        self.whole_pass_at = -inf
        """When the queue was looked through last, see `placement`."""
        self.arrivals = (-1, inf)
        """The newest version, and when the first engine served it, see `arrivals`."""
        self.wanted, self.counted_until = 0, -inf
        """Samples that ran or waited when they were counted last, and until when that stands."""
        self.own_rates: dict[tuple[object, ...], tuple[float, list[LeasedEngine]]] = {}
        self.own_read_until = -inf
        """What was read last of the trainer's own engines, and until when that stands, see `cost`."""
        self.last_other = ""
        """An engine beside the trainer's own that took work when somebody looked last, see `cost`."""
        self.no_other: dict[tuple[int, int], float] = {}
        """By versions that none of them took then: until when that stands, unless one comes or has loaded others."""
        self.absence_noticed = False
        """Since the last tick it was seen that we had been away, see `leases`."""
        self.kept: dict[int, tuple[str, float]] = {}
        """By group that waits for KV room: the engine that is kept for it, and until when others may use that, see
        `keeping`."""
        self.progress, self.questions = Round[int](), Round[str]()
        """Looks at running samples without a token, and at verdicts that are awaited, see `leases`."""
        self.ending: dict[EndStep, list[int]] = {}
        """What the trainer said, and groups that are left, see `messages.trainer.end_steps`."""
        self.last_offer: object = None
        """What the queue was last looked through for, see `moves.end_unservable`."""

    def tokenless(self, now: float) -> list[LeasedEngine]:
        """Engines that run something and gave no token for TOKENLESS_S."""
        found, over = list[LeasedEngine](), list[str]()
        for name in self._tokenless:
            engine = self._state.engines.get(name)
            if engine is None or not engine.running:
                over.append(name)
            elif now - max(engine.token_at, engine.window_at) < speed.TOKENLESS_S:
                break
            elif speed.tokenless_s(engine) >= speed.TOKENLESS_S:
                found.append(engine)
        for name in over:
            del self._tokenless[name]
        return found

    def some_running(self, engine: LeasedEngine, most: int) -> Iterator[int]:
        """At most so many of what it runs, other ones each time until all had their turn."""
        count = len(engine.running)
        if count <= most:
            return iter(tuple(engine.running))
        start = self._turns.get(engine.name, 0) % count
        self._turns[engine.name] = start + most
        return islice(cycle(tuple(engine.running)), start, start + most)

    def note(self, event: f.Event) -> None:
        """`event` is about to be applied."""
        if isinstance(event, f.TokensTaken):
            self._tokenless.pop(event.engine, None)
            self._tokenless[event.engine] = None
            if not _may_place_anew(self._state.engines[event.engine], event.at):
                return
        elif isinstance(event, f.Assigned):
            self._tokenless.setdefault(event.engine)
        elif isinstance(event, f.VersionPublished):
            self.arrivals = event.weights.version, inf
            self._changed.update(self._loading)
        elif isinstance(event, f.EngineServing) and event.version == self.arrivals[0] >= 0:
            self.arrivals = event.version, min(self.arrivals[1], event.at)
        if isinstance(event, _BEGINS_TO_SERVE):
            self.no_other.clear()
        engines_of = _ENGINES_OF.get(type(event))
        if engines_of is not None:
            for name in engines_of(self._state, event):
                self._changed[name] = None

    def roomy(self, *, with_own: bool = True) -> Iterator[LeasedEngine]:
        """A slot is free, the fastest first; `with_own`: the trainer's too."""
        self.refresh()
        places = merge(self._roomy, self._roomy_own) if with_own and self._roomy_own else self._roomy
        return (self._state.engines[name] for _, _, name in places)

    def roomy_own(self) -> Iterator[LeasedEngine]:
        """The trainer's own with a free slot, the fastest first."""
        self.refresh()
        return (self._state.engines[name] for _, _, name in self._roomy_own)

    def asked(self, most: int, *, with_own: bool) -> Iterator[LeasedEngine]:
        """At most so many with a free slot: the fastest, and of the others as many more in turns. An engine far down
        may be the only one that serves a version, or has KV room."""
        yield from islice(self.roomy(with_own=with_own), most // 2)
        others = len(self._roomy) - most // 2
        start = self._asked if others > most // 2 else 0
        for turn in range(min(others, most // 2)):
            self._asked = (start + turn + 1) % others
            yield self._state.engines[self._roomy[most // 2 + (start + turn) % others][-1]]

    @property
    def roomy_engines(self) -> int:
        """How many have a free slot."""
        self.refresh()
        return len(self._roomy) + len(self._roomy_own)

    def busy(self) -> Iterator[LeasedEngine]:
        """Something runs there, the slowest first."""
        self.refresh()
        return (self._state.engines[name] for _, _, name in reversed(self._busy))

    def idle(self) -> Iterator[LeasedEngine]:
        """Engines on which nothing runs, the longest idle first."""
        self.refresh()
        return (self._state.engines[name] for name in self._idle)

    def leaving(self) -> list[LeasedEngine]:
        """Engines that drain."""
        self.refresh()
        return [self._state.engines[name] for name in self._draining]

    def some_silent(self) -> tuple[list[LeasedEngine], bool]:
        """Engines that gave no sign of life for a lease and run something, until that is SILENT_READ; and whether there
        are more, which come first at the next look."""
        self.refresh()
        running = (self._state.engines[name] for name in self._silent if self._state.engines[name].running)
        found, samples = list[LeasedEngine](), 0
        for engine in running:
            if samples >= SILENT_READ:
                break
            found.append(engine)
            samples += len(engine.running)
        else:
            return found, False
        for engine in found:
            del self._silent[engine.name]
            self._silent[engine.name] = None
        return found, True

    def reading(self) -> list[LeasedEngine]:
        """Engines that have prompts to read."""
        self.refresh()
        return [engine for engine in (self._state.engines[name] for name in self._reading) if engine.reading]

    def tried(self) -> list[LeasedEngine]:
        """Engines beside the trainer's own that run something and were not measured yet."""
        self.refresh()
        return [engine for engine in (self._state.engines[name] for name in self._tried) if engine.running]

    def reserved(self) -> list[LeasedEngine]:
        """The trainer's own engines."""
        self.refresh()
        return [self._state.engines[name] for name in self._reserved]

    def kinds(self) -> Iterable[tuple[int, int]]:
        """(version, context) of the engines that do not drain, each once."""
        self.refresh()
        return self._kinds.keys()

    def may_load_older(self) -> bool:
        """Whether one that serves nothing may bring an older version than the newest: it greeted before that came."""
        self.refresh()
        return bool(self._old)

    def num_engines(self, low: int, high: int) -> int:
        """How many that do not drain are at these versions."""
        self.refresh()
        return sum(count for (version, _), count in self._kinds.items() if low <= version <= high)

    def roomy_kinds(self, *, with_own: bool) -> Iterable[tuple[int, int]]:
        """The same of those with a free slot, some twice; `with_own`: of the trainer's too."""
        self.refresh()
        return (*self._roomy_kinds, *self._roomy_own_kinds) if with_own else self._roomy_kinds.keys()

    def mean_step(self) -> float:
        """`Pace.step_s` of an engine without measurements: the mean of the others."""
        self.refresh()
        return self._steps / self._measured if self._measured else speed.DEFAULT_STEP_S

    def fastest(self) -> speed.Pace | None:
        """Pace of the engine on which one sample takes least; None when none was measured."""
        self.refresh()
        return speed.pace_of(self._state.engines[self._alone[0][1]], 0.0) if self._alone else None

    def refresh(self) -> None:
        """Puts what changed in order. After each input: two thousand engines' measurements are not left to one tick."""
        if not self._changed:
            return
        mean = self._steps / self._measured if self._measured else speed.DEFAULT_STEP_S
        for name in self._changed:
            engine = self._state.engines.get(name)
            before = self._entries.pop(name, None)
            after = None if engine is None else _entry(engine, mean)
            if before != after:
                self._replace(before, after)
            if engine is None or after is None:
                self._turns.pop(name, None)
                names = (self._idle, self._reserved, self._draining, self._silent, self._reading)
                for those in (*names, self._tried, self._loading, self._old):
                    those.pop(name, None)
                continue
            self._entries[name] = after
            _keep(self._idle, name, wanted=not engine.occupied)
            _keep(self._reserved, name, wanted=engine.pool is Pool.RESERVED)
            _keep(self._draining, name, wanted=bool(engine.draining))
            _keep(self._silent, name, wanted=engine.silent)
            _keep(self._reading, name, wanted=engine.reading > 0)
            loads = engine.version < 0 and not engine.draining and engine.rest.phase is RestPhase.AWAKE
            _keep(self._loading, name, wanted=loads)
            _keep(self._old, name, wanted=loads and engine.greeted_at <= self._state.published_at)
            _keep(self._tried, name, wanted=bool(engine.occupied) and not (engine.step_scale or after.own))
        self._changed.clear()

    def _replace(self, before: _Entry | None, after: _Entry | None) -> None:
        for entry, put in ((before, _take), (after, insort)):
            if entry is None:
                continue
            roomy = self._roomy_own if entry.own else self._roomy
            orders: tuple[list[Any], ...] = (roomy, self._busy, self._alone)
            for order, place in zip(orders, (entry.roomy, entry.busy, entry.alone), strict=True):
                if place is not None:
                    put(order, place)
            more = 1 if entry is after else -1
            self._steps += more * entry.step_s
            self._measured += more * (entry.step_s > 0)
            if entry.kind is not None:
                _add(self._kinds, entry.kind, more)
                if entry.roomy is not None:
                    _add(self._roomy_own_kinds if entry.own else self._roomy_kinds, entry.kind, more)


def _entry(engine: LeasedEngine, mean: float) -> _Entry:
    pace, running = speed.pace_of(engine, mean), engine.expected_running
    load = engine.occupied / engine.capacity.max_running
    takes = engine.version >= 0 and not engine.draining and not engine.silent
    limit = 1 if engine.unproven else engine.capacity.max_running
    return _Entry(
        roomy=(pace.step(running + 1), load, engine.name) if takes and engine.occupied < limit else None,
        busy=(pace.step(running), load, engine.name) if engine.running else None,
        kind=None if engine.draining else (engine.version, engine.capacity.max_context),
        step_s=0.0 if engine.on_trial else engine.step_scale,
        alone=(pace.step(1), engine.name) if engine.step_scale else None,
        own=engine.pool is Pool.RESERVED,
    )


def _may_place_anew(engine: LeasedEngine, at: float) -> bool:
    """Whether tokens that come now may change its place: only what they measure does, or that they come again."""
    return bool(engine.unproven or engine.rejections or at - engine.window_at >= speed.WINDOW_S)


def may_ever_serve(engines: Iterable[LeasedEngine], high: int, context: int, refused: Sequence[str]) -> bool:
    """Whether one of them, beside those that refused it, has the context, and serves these versions or will."""
    return any(
        e.version <= high and not e.draining and e.capacity.max_context >= context and e.name not in refused
        for e in engines
    )


def _take(order: list[Any], place: Any) -> None:
    del order[bisect_left(order, place)]


def _add(kinds: Counter[tuple[int, int]], kind: tuple[int, int], more: int) -> None:
    kinds[kind] += more
    if not kinds[kind]:
        del kinds[kind]


def _keep(names: dict[str, None], name: str, *, wanted: bool) -> None:
    if wanted:
        names.setdefault(name)
    else:
        names.pop(name, None)


def _of_assignment(state: LedgerState, number: int) -> Iterable[str]:
    """The engine that runs it, and the one that has set room aside."""
    assignment = state.assignments.get(number)
    return () if assignment is None else (assignment.engine, assignment.recall_target)


def _of_sample(state: LedgerState, name: str) -> Iterable[str]:
    return _of_assignment(state, state.samples[name].assignment)


def _of_group(state: LedgerState, number: int) -> Iterable[str]:
    samples = (sample_id(number, index) for index in range(state.groups[number].group.n))
    return [engine for name in samples for engine in _of_sample(state, name)]


_ENGINES_OF: Final[dict[type, Callable[[LedgerState, Any], Iterable[str]]]] = {
    **{
        kind: lambda state, event: (event.engine,)
        for kind in (
            f.Assigned,
            f.TokensTaken,
            f.EngineServing,
            f.EngineTried,
            f.EngineRests,
            f.EngineReturned,
            f.EngineQuarantined,
            f.EngineDraining,
        )
    },
    **{
        kind: lambda state, event: (event.engine, *_recalled_to(state, event.engine))
        for kind in (f.EngineGreeted, f.EngineGreetedAgain, f.EngineSilent, f.EngineGone)
    },
    f.LeasesRenewed: lambda state, event: tuple(state.engines),
    f.Moved: lambda state, event: _of_assignment(state, event.assignment),
    f.RecallSent: lambda state, event: (event.to, *_of_assignment(state, event.assignment)),
    f.Reclaimed: lambda state, event: (event.engine, *_of_sample(state, event.sample)),
    f.TurnEnded: lambda state, event: _of_sample(state, event.sample),
    f.GroupDiscarded: lambda state, event: _of_group(state, event.group),
}


_BEGINS_TO_SERVE: Final = (f.EngineGreeted, f.EngineServing, f.EngineReturned)
"""Events after which an engine may take what it did not."""


def _recalled_to(state: LedgerState, name: str) -> Iterable[str]:
    engine = state.engines.get(name)
    return () if engine is None else (state.assignments[number].recall_target for number in engine.running)
