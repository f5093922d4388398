"""Where waiting samples go: as soon as an engine has room, to the engine that is expected to finish them first.

    cost(engine) = wait(queued) + expected_tokens * step(running + 1) + read(what it reads already + 2 * what is new)

What is new to an engine counts twice: the sample waits for it, and so does everybody else who generates there.
An engine that runs a sibling has read their prompt already; the engine that ended a sample's last turn, under the
version that it still serves, has read all of it but what the environment wrote. So siblings gather, and later turns
return, until a fuller engine costs more than reading again. Ties go to the emptier. If the engine with the prefix has
no room, the sample waits for it as long as

    waited + wait(1) + cost there < cost elsewhere

so it never loses more by waiting than reading again would have cost. `speed` says how all of this is measured.

An engine that was idle for `speed.STALE_S` may be faster or slower than it was: one sample that nobody has begun is
offered to it as if it were the fastest. It gets more by what that sample measures.

Order is priority, then age of the group. The head of a queue that does not fit anywhere waits for room; nothing of its
weight versions overtakes it, or a long prompt would starve. While finished groups that the trainer has not taken hold
more than `backlog_tokens`, groups of later steps do not begin: memory stays flat, and engines wait for the trainer.

Reserved engines, the trainer's own devices, generate while the window is open, or when nobody else can: so a step never
needs spot capacity. When the window closes they hand over what they run, if another engine can go on with it; if none
can, they finish it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from polyrl.ledger import speed
from polyrl.ledger.events import Assigned, MoveCause, PlacementPaused
from polyrl.ledger.scheduling.moves import move
from polyrl.ledger.state import GroupState, LeasedEngine, LedgerState, context_used
from polyrl.ledger.transition import Transition
from polyrl.sample import Group, Pool, Purpose, sample_id
from polyrl.wire import Assign

SHORTEST_HOLD_S: Final = 0.05
"""A sample does not wait for its prefix for less: the estimates are not as exact, and each look costs a tick."""

OFFERS_AT_ONCE: Final = 8192
"""Offers of engines computed before other inputs get their turn: some 0.05 s. A step of 16,384 samples on 256 engines
needs half a million."""


def has_slot(engine: LeasedEngine, now: float) -> bool:
    """Whether it may get one more sample; after a failure, one at a time until tokens come."""
    if engine.draining or engine.version < 0 or engine.quarantined_until > now:
        return False
    return engine.occupied < (1 if engine.failures or engine.straggler else engine.capacity.max_running)


def serves(engine: LeasedEngine, low: int, high: int) -> bool:
    """It takes work, and its verified version may generate."""
    return low <= engine.version <= high and not engine.draining


def may_generate(state: LedgerState, engine: LeasedEngine, low: int, high: int, now: float) -> bool:
    """Whether samples of these versions may be placed on it now, room aside."""
    if not serves(engine, low, high):
        return False
    return engine.pool is not Pool.RESERVED or state.window_open or not _others_can(state, low, high, now)


def _others_can(state: LedgerState, low: int, high: int, now: float) -> bool:
    engines = state.engines.values()
    return any(e.pool is not Pool.RESERVED and e.quarantined_until <= now and serves(e, low, high) for e in engines)


def place(transition: Transition) -> None:
    """Places as much of the queue as there is room for; a large fleet's share of it, and the rest in the next ticks."""
    state = transition.state
    first = state.next_assignment
    if not state.queue:
        return
    room = {engine.name: engine for engine in state.engines.values() if has_slot(engine, transition.now)}
    fitting: dict[tuple[int, int], list[str]] = {}
    wanted, offers, computed = steps_wanted(state), _Offers(transition), 0
    for _, number in tuple(state.queue):
        if not room:
            return
        entry = state.groups[number]
        if wanted is not None and entry.group.step not in wanted and not _has_begun(state, entry.group):
            continue
        versions = (entry.group.min_version, entry.group.max_version)
        if versions not in fitting:
            fitting[versions] = [e.name for e in room.values() if may_generate(state, e, *versions, transition.now)]
        engines = {name: room[name] for name in fitting[versions] if name in room}
        computed += len(engines)
        if computed > OFFERS_AT_ONCE and state.next_assignment > first:
            transition.record(PlacementPaused(transition.now))
            return
        if engines and not _place_group(transition, entry, engines, room, offers.afresh()):
            fitting[versions] = []


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


def _place_group(
    transition: Transition,
    entry: GroupState,
    engines: Mapping[str, LeasedEngine],
    room: dict[str, LeasedEngine],
    offers: _Offers,
) -> bool:
    """Places the group's waiting samples on `engines`; False when one found none. Takes full ones out of `room`."""
    siblings = sibling_engines(transition.state, entry.group)
    before = None
    for index in tuple(entry.waiting):
        name = sample_id(entry.group.id, index)
        request = placement_request(transition.state, name)
        if request != before:
            # Siblings mostly are alike: then only the engine that got the last one has another offer to make.
            before = request
            offers.afresh()
            for engine in engines.values():
                if engine.name in room:
                    offers.update(engine, request, has_sibling=engine.name in siblings)
        best = offers.best()
        if best is None:
            return False
        if request.prefix and _waits_for_prefix(transition, name, request, offers, best):
            continue
        engine = engines[best]
        assign(transition, name, engine, reading=request.unread(engine, has_sibling=best in siblings))
        siblings.add(best)
        if has_slot(engine, transition.now):
            offers.update(engine, request, has_sibling=True)
        else:
            del room[best]
            offers.withdraw(best)
    return True


def sibling_engines(state: LedgerState, group: Group) -> set[str]:
    """Engines that run samples of the group."""
    numbers = (state.samples[sample_id(group.id, index)].assignment for index in range(group.n))
    return {state.assignments[number].engine for number in numbers if number}


class PlacementRequest(NamedTuple):
    """What placing a sample depends on, of the sample; numbers are tokens."""

    group: int
    low: int
    high: int
    """Weight versions that may generate: low <= version <= high."""
    prompt: int
    response: int
    expected: int
    context: int
    """Least that goes on with it: what it has, and one token more."""
    avoid: str
    prefix: str
    """LeasedEngine that generated last; empty: none has."""
    prefix_version: int
    prefix_end: int
    """Response tokens that it has read or written."""

    @property
    def size(self) -> int:
        """KV room to set aside."""
        return self.prompt + self.response + self.expected

    @property
    def is_new(self) -> bool:
        """No engine has begun it, so none is better off with it than another."""
        return not self.prefix and not self.avoid

    def unread(self, engine: LeasedEngine, *, has_sibling: bool) -> int:
        """Tokens that `engine` must read first; a weight version that it loaded since made it forget."""
        if self.prefix == engine.name and self.prefix_version == engine.version:
            return self.response - self.prefix_end
        return self.response + (0 if has_sibling else self.prompt)


def placement_request(state: LedgerState, name: str) -> PlacementRequest:
    """That of a live sample."""
    sample = state.samples[name]
    group = state.groups[sample.group].group
    last = next((span for span in reversed(sample.spans) if span.engine), None)
    return PlacementRequest(
        group=sample.group,
        low=group.min_version,
        high=group.max_version,
        prompt=len(group.prompt_ids) // 4,
        response=sample.length,
        expected=speed.expected_tokens(state, sample),
        context=context_used(state, sample) + 1,
        avoid=sample.avoid,
        prefix=last.engine if last else "",
        prefix_version=last.version if last else -1,
        prefix_end=last.end if last else 0,
    )


class _Offers:
    """Per engine with room for a sample: the cost, ending in what decides ties; one that failed it goes last."""

    def __init__(self, transition: Transition) -> None:
        self._now = transition.now
        self._fleet = speed.fleet_step(transition.state)
        self._fastest = speed.fastest_pace(transition.state, self._fleet)
        self._paces: dict[str, speed.Pace] = {}
        self._costs: dict[str, tuple[bool, float, float]] = {}

    def afresh(self) -> _Offers:
        """The same fleet without offers."""
        self._costs.clear()
        return self

    def update(self, engine: LeasedEngine, request: PlacementRequest, *, has_sibling: bool) -> None:
        """Computes an engine's offer, anew if there is one."""
        if not fits(engine, request):
            self.withdraw(engine.name)
            return
        running = len(engine.running)
        seconds = self.seconds(engine, request, running + 1, has_sibling=has_sibling)
        self._costs[engine.name] = (engine.name == request.avoid, seconds, running / engine.capacity.max_running)

    def seconds(self, engine: LeasedEngine, request: PlacementRequest, running: int, *, has_sibling: bool) -> float:
        """Until it has finished the sample as one of `running`."""
        pace = self._pace(engine, request)
        queue = pace.wait(engine.load[1], running, request.expected)
        return (
            queue
            + request.expected * pace.step(running)
            + pace.read(engine.unread + 2 * request.unread(engine, has_sibling=has_sibling))
        )

    def _pace(self, engine: LeasedEngine, request: PlacementRequest) -> speed.Pace:
        if self._fastest is not None and request.is_new and speed.is_stale(engine, self._now):
            return self._fastest
        pace = self._paces.get(engine.name)
        if pace is None:
            pace = self._paces[engine.name] = speed.pace_of(engine, self._fleet)
        return pace

    def wait_seconds(self, engine: LeasedEngine, request: PlacementRequest) -> float:
        """The same for a full engine: until one of those that run has ended, and then."""
        running = max(1, len(engine.running))
        pace = speed.pace_of(engine, self._fleet)
        return pace.wait(1, running, request.expected) + self.seconds(engine, request, running, has_sibling=True)

    def withdraw(self, name: str) -> None:
        """It has no room."""
        self._costs.pop(name, None)

    def best(self) -> str | None:
        """The engine with the least cost, of equals the one that greeted first; None when nobody has room."""
        return min(self._costs, key=self._costs.__getitem__, default=None)

    def cost(self, name: str) -> float | None:
        """Seconds; None when it has no room."""
        offer = self._costs.get(name)
        return None if offer is None else offer[1]


def fits(engine: LeasedEngine, request: PlacementRequest) -> bool:
    """Whether its context and what is left of its KV room suffice; an empty engine takes what its context can hold."""
    is_empty = not engine.occupied
    return request.context <= engine.capacity.max_context and (
        is_empty or engine.kv_taken + request.size <= engine.capacity.kv_tokens
    )


def _waits_for_prefix(transition: Transition, name: str, request: PlacementRequest, offers: _Offers, best: str) -> bool:
    """Whether it is better off waiting for the full engine that holds its prefix; it is looked at again in time."""
    state, now = transition.state, transition.now
    holder, other = state.engines.get(request.prefix), offers.cost(best)
    if holder is None or other is None or offers.cost(holder.name) is not None or holder.name == request.avoid:
        return False
    able = may_generate(state, holder, request.low, request.high, now)
    if not able or holder.version != request.prefix_version or not holder.running:
        return False
    if holder.failures or holder.straggler or holder.quarantined_until > now:
        return False
    until = state.samples[name].since + other - offers.wait_seconds(holder, request)
    if until <= now + SHORTEST_HOLD_S:
        return False
    transition.record(PlacementPaused(until))
    return True


def engine_for(transition: Transition, request: PlacementRequest, without: str) -> LeasedEngine | None:
    """Where an assigned sample would go now; None when no other engine has room."""
    state, now = transition.state, transition.now
    siblings, offers = sibling_engines(state, state.groups[request.group].group), _Offers(transition)
    for engine in state.engines.values():
        able = engine.name != without and has_slot(engine, now)
        if able and may_generate(state, engine, request.low, request.high, now):
            offers.update(engine, request, has_sibling=engine.name in siblings)
    best = offers.best()
    return None if best is None else state.engines[best]


def assign(transition: Transition, name: str, engine: LeasedEngine, *, reading: int) -> None:
    """Gives a waiting sample to an engine: prompt and everything after it so far, and how much it may generate.
    `reading`: tokens that the engine has not read yet."""
    state = transition.state
    sample = state.samples[name]
    group = state.groups[sample.group].group
    number = state.next_assignment
    kv = len(group.prompt_ids) // 4 + sample.length + speed.expected_tokens(state, sample)
    transition.record(Assigned(number, name, engine=engine.name, kv=kv, at=transition.now, reading=reading))
    message = Assign(
        assignment=number,
        sample=name,
        attempt=sample.attempt,
        input_ids=group.prompt_ids + sample.ids,
        offset=sample.length,
        max_new_tokens=state.assignments[number].limit - sample.length,
        sampling=group.sampling,
        min_version=group.min_version,
        max_version=group.max_version,
    )
    transition.send(engine.name, message)


def hand_over(transition: Transition) -> None:
    """Moves what reserved engines run outside the window, as far as others can go on with it."""
    if transition.state.window_open:
        return
    for engine in transition.state.engines.values():
        if engine.pool is Pool.RESERVED:
            for number in tuple(engine.running):
                assignment = transition.state.assignments[number]
                if _others_can(transition.state, assignment.low, assignment.high, transition.now):
                    move(transition, number, MoveCause.WINDOW)


def slowest_pace(state: LedgerState) -> tuple[float, float]:
    """Seconds per token generated and per token read on the slowest reserved engine when it is full; 0, 0 unless all
    are measured. An audit bounds the window by it: no engine is busy for longer than all work takes it one by one."""
    engines = [engine for engine in state.engines.values() if engine.pool is Pool.RESERVED]
    if not engines or not all(engine.step_scale for engine in engines):
        return 0.0, 0.0
    paces = [(speed.pace_of(engine, 0.0), engine.capacity.max_running) for engine in engines]
    return max(pace.step(running) for pace, running in paces), max(pace.read(running) for pace, running in paces)
