"""Where waiting samples go: as soon as an engine has room, to the engine where they cost least (see `cost`).

Ties go to the emptier engine; one that failed the sample goes last. If the engine that holds a sample's prefix has no
room, the sample waits for it as long as

    waited + cost there after the next end < cost elsewhere

so it never takes twice as long as it would have by going elsewhere at once, and among engines that are alike waiting
never costs more than reading again would have. Likewise it waits for the reserved window, for its turn on the trainer's
own engines while those have no room (see `keeping`), and for an engine that has its share of what needs the newest
weights (see `arrivals`).

Order is priority, then age of the group. A group that finds no room keeps one engine, where room comes free first (see
`keeping`): nothing behind it gets what would be in its way there, or a long prompt would starve. All other engines are
open to what waits behind.
What an engine runs that gives no sign of life takes its turn in the same order, and leaves for an engine with room as
soon as staying costs more.

While finished groups that the trainer has not taken hold more than `backlog_tokens`, groups of later steps do not
begin: memory stays flat, and engines wait for the trainer.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from math import inf
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.events import Assigned, PlacementPaused
from polyrl.ledger.scheduling.arrivals import Share, share
from polyrl.ledger.scheduling.cost import (
    SILENT_TIMES,
    Costs,
    PlacementRequest,
    fits,
    has_slot,
    may_generate,
    others_can,
    placement_request,
    retry_at,
    serves,
    sibling_engines,
    takes_back,
)
from polyrl.ledger.scheduling.keeping import LONGEST_HOLD_S, SHORTEST_HOLD_S, HomeTurns, Keeping
from polyrl.ledger.scheduling.moves import move
from polyrl.ledger.state import GroupState, LeasedEngine, LedgerState, SamplePhase, assign_message, kept_until
from polyrl.ledger.transition import Transition
from polyrl.sample import Group, Pool, Purpose, sample_id

CANDIDATES: Final = 8
"""Engines asked for a sample besides those that know it: the next one would have to read much faster to be better."""

TRIALS: Final = 2
"""Engines asked because they were idle for longest: one of them may be tried."""

PLACED_AT_ONCE: Final = 256
"""Samples placed before other inputs get their turn: some 0.03 s of a large fleet."""

ASKS_AT_ONCE: Final = 128
"""Times that engines are asked for a sample before other inputs get their turn, some 0.05 s as well: siblings are asked
for together, while turns of differing lengths, as a lost machine leaves them, are not, nor is what may wait for the
window."""

SITTING_OUT: Final = 16
"""Samples of silent engines in a row that are better off staying: the rest is looked at another time."""

HEAD_GROUPS: Final = 32
"""Groups that find no room in a row, at the head of the queue, before the rest waits for the next WHOLE_PASS_S: some
5 ms, and each end of a turn is a look."""

WHOLE_PASS_S: Final = 0.25
"""How often the queue is looked through further, up to TRIED_GROUPS such groups: what fits into the room that nothing
before it could use."""

TRIED_GROUPS: Final = 256
"""Beside those that no engine with a free slot could take whatever its room."""

ASKED: Final = 128
"""Engines with a free slot that one look asks whether they take a sample, a tenth of a millisecond: half of them the
fastest, the others in turns, so that of two thousand each is asked within 30 looks."""

ASK_AGAIN_S: Final = 0.1
"""Time until such a look goes on."""


class Room:
    """Engines with a free slot during one pass over the queue."""

    def __init__(self, transition: Transition) -> None:
        self._transition, self._keeping = transition, Keeping(transition)
        self.share = Share()
        """What an engine with the newest weights may be given now, see `arrivals`."""
        self.awaited = Counter[str]()
        """Samples that are better off waiting for an engine that has its share already."""
        self.asks = 0
        """Samples for which engines were asked."""
        self.home = HomeTurns(transition)
        self._lacking: list[LeasedEngine] = []
        """Engines with a slot that did not fit when they were asked last."""
        self._in_vain: list[PlacementRequest] = []
        """Samples that found no room, none of them needing more than one before it."""
        self._holds: dict[tuple[int, int, int], bool] = {}
        """By versions and tokens of a prompt, see `holds`."""
        self._others: dict[tuple[int | str, ...], bool] = {}
        """By versions, tokens of a prompt and engines that refused: whether another one may be given it now."""

    def candidates(self, request: PlacementRequest, known: Iterable[str], costs: Costs) -> Iterator[LeasedEngine]:
        """Engines worth asking: those that have read something of it (`known`), one that was idle for long, and of all
        others that fit it the CANDIDATES that are fastest with one more sample."""
        if self._is_in_vain(request):
            return
        self.asks += 1
        state, found = self._transition.state, set[str]()
        near = [state.engines[name] for name in (*known, request.prefix) if name in state.engines]
        idle = itertools.islice(self._transition.fleet.idle(), TRIALS)
        for engine in (*near, *idle):
            if engine.name not in found and self._takes(engine, request) and self._leaves(engine, request, costs):
                found.add(engine.name)
                yield engine
        own = state.window_open or not others_can(self._transition, request.low, request.high)
        asked = self._fitting(self._transition.fleet.asked(ASKED, with_own=own), request)
        able = (one for one in asked if one.name not in found and self._takes(one, request))
        able = (one for one in able if self._leaves(one, request, costs))
        left = {False: CANDIDATES, True: CANDIDATES}
        for engine in able:  # those that have their share take no other's place
            later = self.opens_in(engine) > 0
            left[later] -= 1
            if left[later] >= 0:
                yield engine
            if not left[False]:
                break

    def holds(self, group: Group) -> bool:
        """Whether an engine with a free slot serves its versions, has the context for its prompt, and has not refused
        all that waits of it lately: else it is looked at again when the first of them may come again."""
        low, high, prompt = about = (group.min_version, group.max_version, len(group.prompt_ids) // 4)
        if about not in self._holds:
            own = self._transition.state.window_open or not others_can(self._transition, low, high)
            kinds = self._transition.fleet.roomy_kinds(with_own=own)
            self._holds[about] = any(low <= version <= high and prompt < context for version, context in kinds)
        return self._holds[about] and not self._is_refused(group)

    def _is_refused(self, group: Group) -> bool:
        transition, low, high, again_at = self._transition, group.min_version, group.max_version, inf
        state, now, prompt = transition.state, transition.now, len(group.prompt_ids) // 4
        for index in state.groups[group.id].waiting:
            sample = state.samples[sample_id(group.id, index)]
            if not sample.rejected_by:
                return False  # without a look at the fleet, all of which may pause
            about: tuple[int | str, ...] = (low, high, prompt, *sample.rejected_by)
            if about not in self._others:
                others = (e for e in transition.fleet.roomy() if e.name not in sample.rejected_by and has_slot(e, now))
                others = (e for e in others if prompt < e.capacity.max_context)
                self._others[about] = any(may_generate(transition, e, low, high) for e in others)
            again_at = min(again_at, retry_at(state, sample))
            if again_at <= now or self._others[about]:
                return False
        if again_at < state.due:
            transition.record(PlacementPaused(max(again_at, now + SHORTEST_HOLD_S)))
        return True

    def keep(self, request: PlacementRequest, costs: Costs) -> None:
        """`request` found no room: an engine is kept for its group, where there is one."""
        if not self._is_in_vain(request):
            self._in_vain.append(request)
        free = (one for one in self._lacking if self.is_unclaimed(one))
        lacking = (one for one in free if request.context <= one.capacity.max_context)
        self._keeping.keep(request, (one for one in lacking if self._takes(one, request)), costs)

    def found(self, request: PlacementRequest) -> None:
        """`request` has room."""
        self._keeping.found(request)

    def leaves(self, engine: LeasedEngine, seconds: float) -> bool:
        """Whether nothing before in the queue keeps an engine from what costs so many seconds there."""
        return self._keeping.leaves(engine, seconds)

    def is_unclaimed(self, engine: LeasedEngine) -> bool:
        """Whether nothing in the queue has it kept: what runs elsewhere may move there."""
        return not self._keeping.keeps(engine)

    def _leaves(self, engine: LeasedEngine, request: PlacementRequest, costs: Costs) -> bool:
        return self.is_unclaimed(engine) or self.leaves(engine, costs.on(engine, request, has_sibling=False))

    def opens_in(self, engine: LeasedEngine) -> float:
        """Seconds until it may get one more sample; 0 unless it has its share of the newest weights' already."""
        late = engine.version < self._transition.state.weights.version
        return 0.0 if late or engine.occupied < self.share.most else self.share.until - self._transition.now

    def has_slot(self, engine: LeasedEngine) -> bool:
        """Whether it may get one more sample beside those that wait for it, now or when it has no share any more."""
        awaited = self.awaited.get(engine.name, 0)
        free = not awaited or engine.occupied + awaited < engine.capacity.max_running
        return free and has_slot(engine, self._transition.now)

    def _takes(self, engine: LeasedEngine, request: PlacementRequest) -> bool:
        able = self.has_slot(engine)
        able = able and takes_back(self._transition.state, engine, request, self._transition.now)
        return able and may_generate(self._transition, engine, request.low, request.high)

    def _fitting(self, engines: Iterable[LeasedEngine], request: PlacementRequest) -> Iterator[LeasedEngine]:
        self._lacking.clear()
        for engine in engines:
            if fits(engine, request, self._transition.now):
                yield engine
            else:
                self._lacking.append(engine)

    def _is_in_vain(self, request: PlacementRequest) -> bool:
        """Whether it needs no less than one that found no room."""
        return any(
            one.low <= request.low
            and request.high <= one.high
            and one.context <= request.context
            and one.size <= request.size
            and one.expected <= request.expected
            and not one.rejected_by
            for one in self._in_vain
        )


def place(transition: Transition) -> Room:
    """Places as much of the queue as there is room for; a large fleet's share of it, and the rest in the next ticks.
    Returns the room that is left for what runs already."""
    state, room = transition.state, Room(transition)
    silent = _of_silent_engines(transition) if transition.fleet.roomy_engines else {}
    if not (state.queue or silent) or not transition.fleet.roomy_engines:
        return room
    room.share = share(transition)
    costs, wanted, placed = Costs(transition), steps_wanted(state), state.next_assignment
    sitting, tries = 0, _Tries(transition, room)
    for number in tries.remaining(_in_turn(state, silent), silent):
        if not transition.fleet.roomy_engines:
            break
        entry = state.groups[number]
        if wanted is not None and entry.group.step not in wanted and not _has_begun(state, entry.group):
            continue
        if _is_much(state.next_assignment - placed, room.asks):
            transition.record(PlacementPaused(transition.now))
            tries.go_on()
            break
        over = tries.are_over()
        if over and not silent:
            break
        if over and number not in silent:
            continue
        group, before = _Group(transition, entry, room, costs), state.next_assignment
        if not over:
            group.place()
            tries.count(state.next_assignment > before)
        for assignment in silent.get(number, ()):
            sitting = 0 if group.leave(assignment) else sitting + 1
        if sitting >= SITTING_OUT:
            silent = {}
    return room


def _is_much(placed: int, asks: int) -> bool:
    """Whether the rest waits until others were heard; what only looks in vain is bounded by `_Tries`."""
    return placed >= PLACED_AT_ONCE or (placed > 0 and asks >= ASKS_AT_ONCE)


def _in_turn(state: LedgerState, silent: dict[int, list[int]]) -> Iterator[int]:
    """Groups that wait, and those that silent engines run, in the order of the queue."""
    run = sorted(state.groups[number].key for number in silent if not state.groups[number].waiting)
    return (number for *_, number in heapq.merge(tuple(state.queue), run))


class _Tries:
    """Bounds the groups that are looked at in vain: all of a long queue that fits nowhere would be, at every event.

    Groups that no engine with a free slot serves, or none with the context for them, or whose turn at home comes soon,
    are passed by for a fraction of that, and do not count in a look at the whole queue: however many they are, what
    waits behind them is reached."""

    def __init__(self, transition: Transition, room: Room) -> None:
        self._transition, self._room, self._in_vain, self._whole = transition, room, 0, False

    def remaining(self, groups: Iterable[int], silent: Container[int]) -> Iterator[int]:
        """Without those that are passed by; of `silent` engines' groups none is."""
        live = self._transition.state.groups
        for number in groups:
            if not self._whole or number in silent or self._is_open(live[number]):
                yield number

    def _is_open(self, entry: GroupState) -> bool:
        return not self._room.home.passes(entry) and self._room.holds(entry.group)

    def go_on(self) -> None:
        """This look was long, and the next one does not begin anew."""
        if self._whole:
            self._transition.fleet.whole_pass_at = -inf

    def count(self, placed: bool) -> None:
        """One group was looked at."""
        self._in_vain = 0 if placed else self._in_vain + 1

    def are_over(self) -> bool:
        """The rest waits; an event that comes in time is planned."""
        fleet, now = self._transition.fleet, self._transition.now
        if self._in_vain < HEAD_GROUPS:
            return False
        until = fleet.whole_pass_at + WHOLE_PASS_S
        if not self._whole and now >= until:
            self._whole, fleet.whole_pass_at = True, now
        if self._whole:
            return self._in_vain >= TRIED_GROUPS or self._room.asks >= ASKS_AT_ONCE
        # Not the very next instant: a clock that is set a rounding error short of it would never come to it.
        until = max(until, now + SHORTEST_HOLD_S)
        if self._transition.state.due > until:
            self._transition.record(PlacementPaused(until))
        return True


def _of_silent_engines(transition: Transition) -> dict[int, list[int]]:
    """Assignments of engines that give no sign of life, by group; of many a part, and others at the next look."""
    state, now, found = transition.state, transition.now, dict[int, list[int]]()
    engines, are_more = transition.fleet.some_silent()
    if are_more and state.due > now + SHORTEST_HOLD_S:
        transition.record(PlacementPaused(now + SHORTEST_HOLD_S))
    for engine in engines:
        for number in engine.running:
            found.setdefault(state.samples[state.assignments[number].sample].group, []).append(number)
    return found


def steps_wanted(state: LedgerState) -> set[int] | None:
    """Steps whose groups may begin while the trainer has more to learn from than it takes; None: all may."""
    if state.backlog <= state.config.backlog_tokens:
        return None
    live = (known.step for known in state.steps.values() if known.open or known.ready or known.packed)
    return {min(live, default=0), *(pending.request.step for pending in state.pending.values())}


def _has_begun(state: LedgerState, group: Group) -> bool:
    if group.purpose is Purpose.EVAL:
        return True
    return any(state.samples[sample_id(group.id, index)].attempt for index in range(group.n))


class _Group:
    """The waiting samples of one group on their way to engines."""

    def __init__(self, transition: Transition, entry: GroupState, room: Room, costs: Costs) -> None:
        self._transition, self._entry, self._room, self._costs = transition, entry, room, costs
        self._siblings = sibling_engines(transition.state, entry.group)
        self._offers: dict[str, tuple[bool, float, float]] = {}
        """Per engine that fits: the cost, ending in what decides ties; one that failed the sample goes last."""

    def place(self) -> None:
        """All that finds room."""
        if self._room.home.passes(self._entry):
            return
        state, before = self._transition.state, None
        for index in tuple(self._entry.waiting):
            name = sample_id(self._entry.group.id, index)
            request = placement_request(state, name, self._transition.now)
            if request != before:
                # Siblings mostly are alike: then only the engine that got the last one has another offer to make.
                before = request
                self._ask(request)
            if not self._offers:
                self._room.keep(request, self._costs)
                self._try_again(request)
                self._room.home.waiting += 1
                continue
            best = min(self._offers, key=self._offers.__getitem__)
            if self._room.opens_in(state.engines[best]) > 0:
                self._room.awaited[best] += 1
                self._offer_again(request, state.engines[best])
            elif self._waits(name, request, best):
                self._room.home.waiting += 1
            else:
                self._give(name, request, state.engines[best])

    def _try_again(self, request: PlacementRequest) -> None:
        """In time, where time or a further look may find room."""
        transition, now = self._transition, self._transition.now
        if request.retry_at > now:
            transition.record(PlacementPaused(max(request.retry_at, now + SHORTEST_HOLD_S)))
        if transition.fleet.roomy_engines > ASKED and transition.state.due > now + ASK_AGAIN_S:
            transition.record(PlacementPaused(now + ASK_AGAIN_S))

    def leave(self, number: int) -> bool:
        """A sample of a silent engine goes where it is expected to be done sooner; else it is looked at again in
        time, and the answer is no."""
        transition, state = self._transition, self._transition.state
        assignment = state.assignments[number]
        name, engine = assignment.sample, state.engines[assignment.engine]
        request = placement_request(state, name, transition.now)
        self._ask(request)
        if not self._offers:
            return False
        best = min(self._offers, key=self._offers.__getitem__)
        if self._room.opens_in(state.engines[best]) > 0:
            return False
        sooner = self._costs.staying(engine, request.expected) - self._offers[best][1]
        if sooner <= 0:
            transition.record(PlacementPaused(transition.now + max(SHORTEST_HOLD_S, -sooner / SILENT_TIMES)))
            return False
        move(transition, number, MoveCause.LOST, cancel=False)
        if state.samples[name].phase is SamplePhase.WAITING:
            self._give(name, request, state.engines[best])
        return True

    def _ask(self, request: PlacementRequest) -> None:
        self._offers.clear()
        for engine in self._room.candidates(request, self._siblings, self._costs):
            self._offer(request, engine)

    def _offer(self, request: PlacementRequest, engine: LeasedEngine) -> None:
        awaited = self._room.awaited.get(engine.name, 0)
        seconds = self._costs.on(engine, request, has_sibling=engine.name in self._siblings, awaited=awaited)
        seconds += self._room.opens_in(engine)
        if not (fits(engine, request, self._transition.now) and self._room.leaves(engine, seconds)):
            self._offers.pop(engine.name, None)
            return
        load = engine.occupied / engine.capacity.max_running
        self._offers[engine.name] = (engine.name == request.avoid, seconds, load)

    def _give(self, name: str, request: PlacementRequest, engine: LeasedEngine) -> None:
        self._room.found(request)
        unread = request.unread(engine, has_sibling=engine.name in self._siblings)
        assign(self._transition, name, engine, reading=unread)
        self._siblings[engine.name] = None
        self._offer_again(request, engine)

    def _offer_again(self, request: PlacementRequest, engine: LeasedEngine) -> None:
        """It has got one more, or will when its share binds no longer."""
        if self._room.has_slot(engine):
            self._offer(request, engine)
        else:
            self._offers.pop(engine.name, None)
        if not self._offers:
            self._ask(request)

    def _waits(self, name: str, request: PlacementRequest, best: str) -> bool:
        """Whether it is better off waiting; `best`: the engine with room where it costs least."""
        elsewhere = self._offers[best][1]
        if self._waits_for_prefix(name, request, elsewhere) or self._waits_for_window(name, request, elsewhere):
            return True
        engines = self._transition.state.engines
        if not self._transition.state.window_open or any(engines[one].pool is Pool.RESERVED for one in self._offers):
            return False
        return self._room.home.waits(name, request, (engines[best], elsewhere), self._costs)

    def _waits_for_prefix(self, name: str, request: PlacementRequest, elsewhere: float) -> bool:
        """Whether it is better off waiting for the full engine that holds its prefix; it is looked at again in time."""
        transition, state, now = self._transition, self._transition.state, self._transition.now
        holder = state.engines.get(request.prefix)
        if not request.prefix or holder is None or holder.name in self._offers or not holder.running:
            return False
        if holder.name in (request.avoid, *request.rejected_by):
            return False
        able = may_generate(transition, holder, request.low, request.high) and not holder.unproven
        if not able or holder.version != request.prefix_version or holder.quarantined_until > now:
            return False
        until = state.samples[name].since + elsewhere - self._costs.after_next_end(holder, request)
        if until <= now + SHORTEST_HOLD_S:
            return False
        self._transition.record(PlacementPaused(until))
        return True

    def _waits_for_window(self, name: str, request: PlacementRequest, elsewhere: float) -> bool:
        """Whether it is better off waiting until the trainer has learned, for a reserved engine."""
        transition, state, now = self._transition, self._transition.state, self._transition.now
        latest = state.samples[name].since + elsewhere - self._costs.in_window_at_least(request)
        if state.window_open or latest <= now + SHORTEST_HOLD_S:
            return False
        self._room.asks += 1
        near = [state.engines[known] for known in (*self._siblings, request.prefix) if known in state.engines]
        own = {e.name: e for e in (*near, *itertools.islice(transition.fleet.roomy_own(), CANDIDATES))}.values()
        able = [e for e in own if e.pool is Pool.RESERVED and e.name not in self._offers and has_slot(e, now)]
        able = [e for e in able if serves(e, request.low, request.high) and fits(e, request, now)]
        able = [e for e in able if takes_back(state, e, request, now)]
        costs = (self._costs.on(e, request, has_sibling=e.name in self._siblings) for e in able)
        until = state.samples[name].since + elsewhere - min(costs, default=inf)
        if until <= now + SHORTEST_HOLD_S:
            return False
        transition.record(PlacementPaused(min(until, now + LONGEST_HOLD_S)))
        return True


def assign(transition: Transition, name: str, engine: LeasedEngine, *, reading: int) -> None:
    """Gives a waiting sample to an engine: prompt and everything after it so far, and how much it may generate.
    `reading`: tokens that the engine has not read yet."""
    state = transition.state
    sample = state.samples[name]
    group = state.groups[sample.group].group
    number, kept = state.next_assignment, kept_until(sample, engine.name)
    kv = len(group.prompt_ids) // 4 + sample.length + speed.expected_tokens(state, sample)
    transition.record(Assigned(number, name, engine=engine.name, kv=kv, at=transition.now, reading=reading))
    transition.send(engine.name, assign_message(state, number, kept=kept))
