"""What it costs to generate a sample on an engine, in seconds until it is done: the one formula behind every decision.

    cost(sample, engine) = opens + queue + expected * step(running + 1) * slowdown
                                 + read(unread there + 2 * unread of the sample)

    opens      until the engine may generate at all: while the trainer learns on its devices (see `window`), else 0
    queue      what the engine has accepted and does not run yet, one after the other
    expected   tokens still to come, by the life table of the run's turns (see `lengths`)
    step(b)    seconds per token when it runs b samples, measured (see `speed`)
    slowdown   1 + losses per engine-second of its pool (see `measures.losses`) * what one costs, two leases.
               A fleet that dies faster than samples end gets the short ones; the reserved engines are never lost
    read(n)    seconds to read n tokens, measured. What is new to an engine counts twice: the sample waits for it, and
               so does everybody else who generates there

An engine that runs a sibling has read their prompt already; the engine that ended a sample's last turn, under the
version that it still serves, has read all of it but what the environment wrote. So siblings gather, and later turns
return, until a fuller engine costs more than reading again.

Where a sample runs, the same formula says what staying costs: what is left to read are the prompts before it and its
own, until its first token comes, and an engine that will be taken away before the sample is done costs infinitely much.
One that is silent is expected to be so for SILENT_TIMES as long: a short stall is sat out where moving would cost far
more, and who waits for the dead pays more from second to second.

Whether an engine can take a sample at all is no matter of cost: it serves a version that may generate, has a free slot,
a context that holds the sample, and KV room (see `fits`).
"""

from __future__ import annotations

import heapq
import itertools
from math import inf
from typing import Final, NamedTuple

from polyrl.ledger import speed
from polyrl.ledger.fleet import may_ever_serve
from polyrl.ledger.scheduling.notice import reserve_of
from polyrl.ledger.scheduling.window import loss_seconds, opens_in
from polyrl.ledger.state import LeasedEngine, LedgerState, SampleState, context_used
from polyrl.ledger.transition import Transition
from polyrl.sample import Group, Pool, sample_id

SILENT_TIMES: Final = 8.0
"""How many times longer than it was an engine's silence is taken to last: most are dead, and what one that is not makes
meanwhile is taken back (see `recalls`)."""

NEAREST_AT_HOME: Final = 8
"""How many of the trainer's own engines, the fastest, are asked for a cost: another would have to read much faster."""

OWN_READ_S: Final = 0.05
"""How often all of them are read for that: each end of a turn is a look, and they end hundreds of samples meanwhile."""

KV_REPORT_S: Final = 5.0
"""Age at which an engine's own count of its free KV room is no longer believed: five of its heartbeats."""


class PlacementRequest(NamedTuple):
    """What a decision depends on, of the sample; numbers are tokens."""

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
    """Engine that failed it last; empty: none has lately."""
    rejected_by: tuple[str, ...]
    retry_at: float
    """When those may be asked again, if no other may ever serve it."""
    is_new: bool
    """No engine has begun it, so none is better off with it than another."""
    prefix: str
    """Engine that generated last; empty: none has."""
    prefix_version: int
    prefix_end: int
    """Response tokens that it has read or written."""

    @property
    def size(self) -> int:
        """KV room to set aside."""
        return self.prompt + self.response + self.expected

    def unread(self, engine: LeasedEngine, *, has_sibling: bool) -> int:
        """Tokens that `engine` must read first; a weight version that it loaded since made it forget."""
        if self.prefix == engine.name and self.prefix_version == engine.version:
            return self.response - self.prefix_end
        return self.response + (0 if has_sibling else self.prompt)


def placement_request(state: LedgerState, name: str, now: float) -> PlacementRequest:
    """The placement request of a live sample."""
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
        avoid=sample.avoid if now < sample.avoid_until else "",
        rejected_by=tuple(sample.rejected_by),
        retry_at=retry_at(state, sample),
        is_new=not sample.attempt,
        prefix=last.engine if last else "",
        prefix_version=last.version if last else -1,
        prefix_end=last.end if last else 0,
    )


def retry_at(state: LedgerState, sample: SampleState) -> float:
    """Pauses double, and the last one ends with the deadline, when the next refusal is believed."""
    if not sample.rejected_by:
        return -inf
    config = state.config
    pause = min(config.suspect_max_s, config.suspect_s * 2.0 ** min(sample.rejections - 1, 16))
    deadline = sample.refused_at + config.refusal_deadline_s
    return sample.moved_at + pause if sample.moved_at >= deadline else min(deadline, sample.moved_at + pause)


def sibling_engines(state: LedgerState, group: Group) -> dict[str, None]:
    """Engines that run samples of the group, each once. In an order: it decides between equals, and the order of a set
    of names differs from process to process."""
    numbers = (state.samples[sample_id(group.id, index)].assignment for index in range(group.n))
    return {state.assignments[number].engine: None for number in numbers if number}


def has_slot(engine: LeasedEngine, now: float) -> bool:
    """Whether it may get one more sample; after a failure, one at a time until tokens come."""
    if engine.draining or engine.silent or engine.version < 0 or engine.quarantined_until > now:
        return False
    return engine.occupied < (1 if engine.unproven else engine.capacity.max_running)


def serves(engine: LeasedEngine, low: int, high: int) -> bool:
    """It takes work, and its verified version may generate."""
    return low <= engine.version <= high and not engine.draining and not engine.silent


def takes_back(state: LedgerState, engine: LeasedEngine, request: PlacementRequest, now: float) -> bool:
    """Whether it may be given the sample by its refusals: if it refused, only while no other may serve it, and not at
    once."""
    refused = request.rejected_by
    if engine.name not in refused:
        return True
    return now >= request.retry_at and not may_ever_serve(
        state.engines.values(), request.high, request.context, refused
    )


def may_generate(transition: Transition, engine: LeasedEngine, low: int, high: int) -> bool:
    """Whether samples of these versions may be given to it now, room aside. Outside the window reserved engines get
    nothing that others could ever take: a step never needs spot capacity, and the learner has its devices."""
    if not serves(engine, low, high):
        return False
    if engine.pool is not Pool.RESERVED or transition.state.window_open:
        return True
    return not others_can(transition, low, high)


def others_can(transition: Transition, low: int, high: int) -> bool:
    """Whether an engine that is not reserved takes samples of these versions. The one that was found last mostly does,
    and else the fleet is read; that none does is known until one of them changes, or its pause ends."""
    engines, fleet, now = transition.state.engines, transition.fleet, transition.now
    if now < fleet.no_other.get((low, high), -inf):
        return False
    last, until = engines.get(fleet.last_other), inf
    for engine in itertools.chain(() if last is None else (last,), engines.values()):
        if engine.pool is Pool.RESERVED or not serves(engine, low, high):
            continue
        if engine.quarantined_until <= now:
            fleet.last_other = engine.name
            return True
        until = min(until, engine.quarantined_until)
    fleet.no_other[low, high] = until
    return False


def kv_room(engine: LeasedEngine, now: float) -> int:
    """KV tokens that can be set aside: of what it reports as free, or while its report is old of its whole room."""
    reserved = sum(engine.reserved_kv.values())
    if now - engine.load_at > KV_REPORT_S:
        return engine.capacity.kv_tokens - engine.kv - reserved
    return engine.load[2] - engine.kv_since - engine.kv_growth - reserved


def fits(engine: LeasedEngine, request: PlacementRequest, now: float) -> bool:
    """Whether its context and its free KV room suffice; an empty engine takes what its context can hold."""
    if request.context > engine.capacity.max_context:
        return False
    return not engine.occupied or request.size <= kv_room(engine, now)


class HomeTurn(NamedTuple):
    """What waiting for the trainer's own engines costs a sample, in seconds; infinite: none of them may take it."""

    end_s: float
    """Until one of all that they run ends."""
    there: float
    """From then on."""
    step_s: float
    """Per token there, on the fastest."""
    again_s: float
    """Until that has read all of it, counted twice as in every cost."""

    def until(self, ahead: int) -> float:
        """Seconds until one ends for this sample, with so many that wait before it."""
        return (ahead + 1) * self.end_s


class Costs:
    """The cost of any sample on any engine, at one moment; what engines run may change meanwhile."""

    def __init__(self, transition: Transition) -> None:
        self._state, self._now = transition.state, transition.now
        self._mean, self._fastest = transition.fleet.mean_step(), transition.fleet.fastest()
        self._reserved = transition.fleet.reserved()
        self._paces: dict[str, speed.Pace] = {}
        if self._now >= transition.fleet.own_read_until:
            transition.fleet.own_read_until = self._now + OWN_READ_S
            transition.fleet.own_rates.clear()
        self._own_rates, self._kinds = transition.fleet.own_rates, transition.fleet.kinds()
        self._home: tuple[PlacementRequest, HomeTurn] | None = None
        loss_s, usage = loss_seconds(self._state), self._state.usage
        self._slowdowns = {pool: usage.slowdown(pool, self._now, loss_s) for pool in Pool}

    def on(self, engine: LeasedEngine, request: PlacementRequest, *, has_sibling: bool, awaited: int = 0) -> float:
        """For a sample that comes to `engine`, after all that is on its way there, and `awaited` that will be."""
        return self._among(engine, request, engine.expected_running + awaited + 1, has_sibling=has_sibling)

    def in_window_at_least(self, request: PlacementRequest) -> float:
        """A bound of what the sample costs on any reserved engine, without looking at one: as soon as the window opens,
        alone on the fastest of all, with nothing to read."""
        reserved = next(iter(self._reserved), None)
        if reserved is None:
            return inf
        step_s = speed.OPTIMISM * self._mean
        if self._fastest is not None:
            step_s = min(step_s, self._fastest.step(1))
        return opens_in(self._state, reserved, self._now) + request.expected * step_s * self._slowdowns[Pool.RESERVED]

    def home(self, request: PlacementRequest) -> HomeTurn:
        """For a sample that waits for the trainer's own engines; infinite without any that serves it. What runs there
        is taken to need as many tokens as it does."""
        if self._home is None or self._home[0] != request:
            ends, nearest = self._at_home(request)
            there = (self._among(e, request, e.expected_running, has_sibling=False) for e in nearest)
            end_s = request.expected / ends if ends else inf
            step_s = self.step(nearest[0]) if nearest else inf
            again_s = self.pace(nearest[0]).read(2 * request.context) if nearest else 0.0
            self._home = request, HomeTurn(end_s, min(there, default=inf), step_s=step_s, again_s=again_s)
        return self._home[1]

    def home_awaited_s(self, engine: LeasedEngine, request: PlacementRequest) -> float:
        """For so long a sample would have made no more on `engine` meanwhile than reading it again at home costs: who
        begins elsewhere takes it along."""
        turn = self.home(request)
        made_s = turn.again_s * self.step(engine, 1) / turn.step_s
        return self.pace(engine).read(engine.unread + request.context) + made_s

    def _at_home(self, request: PlacementRequest) -> tuple[float, list[LeasedEngine]]:
        """Tokens per second of the trainer's own engines that may take it once they have room, and the fastest of
        them. Hundreds are read once in a while for all that is alike in that."""
        retries = not request.rejected_by or self._now >= request.retry_at
        longer = sum(request.context <= context for _, context in self._kinds)
        about = (request.low, request.high, longer, request.rejected_by, retries)
        found = self._own_rates.get(about)
        if found is None:
            able = [e for e in self._reserved if e.running and serves(e, request.low, request.high) and not e.unproven]
            able = [e for e in able if e.quarantined_until <= self._now and request.context <= e.capacity.max_context]
            able = [e for e in able if takes_back(self._state, e, request, self._now)]
            steps = [(self.step(engine), engine) for engine in able]
            ends = sum(len(engine.running) / step for step, engine in steps)
            nearest = heapq.nsmallest(NEAREST_AT_HOME, steps, key=lambda pair: pair[0])
            found = self._own_rates[about] = ends, [engine for _, engine in nearest]
        return found

    def after_next_end(self, engine: LeasedEngine, request: PlacementRequest) -> float:
        """The same for a full engine that holds the sample's prefix: until one of those that run has ended."""
        running = max(1, len(engine.running))
        wait = self.pace(engine).wait(1, running, request.expected)
        return wait + self._among(engine, request, running, has_sibling=True)

    def staying(self, engine: LeasedEngine, expected: int, unread: int = 0) -> float:
        """For a sample that `engine` runs, with so many tokens to come, after so many that it reads before."""
        tokenless = speed.tokenless_s(engine)
        seconds = expected * max(self.step(engine), tokenless if tokenless >= speed.TOKENLESS_S else 0.0)
        seconds += self.pace(engine).read(unread)
        if engine.draining:
            left = engine.drain_at - self._now
            return inf if seconds > left - reserve_of(left) else seconds
        if engine.silent:
            seconds += SILENT_TIMES * (self._now - engine.heard_at)
        return opens_in(self._state, engine, self._now) + seconds

    def step(self, engine: LeasedEngine, more: int = 0) -> float:
        """Seconds per token, with `more` samples on top of what it will run anyway."""
        return self.pace(engine).step(engine.expected_running + more) * self._slowdowns[engine.pool]

    def pace(self, engine: LeasedEngine) -> speed.Pace:
        """Pace of an engine, measured or assumed."""
        pace = self._paces.get(engine.name)
        if pace is None:
            pace = speed.pace_of(engine, self._mean)
            if engine.step_scale:  # what is assumed changes with the first sample
                self._paces[engine.name] = pace
        return pace

    def _among(self, engine: LeasedEngine, request: PlacementRequest, running: int, *, has_sibling: bool) -> float:
        # An engine that has been idle may be faster or slower than it was: one sample that nobody has begun tries it.
        trial = self._fastest is not None and request.is_new and speed.is_stale(engine, self._now)
        pace = self._fastest if trial and self._fastest is not None else self.pace(engine)
        unread = engine.unread + 2 * request.unread(engine, has_sibling=has_sibling)
        if request.context + request.expected > engine.capacity.max_context:
            unread += request.context  # it will outgrow this engine, and be read again on a longer one
        queue = pace.wait(engine.load[1], running, request.expected)
        generating = request.expected * pace.step(running) * self._slowdowns[engine.pool]
        return opens_in(self._state, engine, self._now) + queue + generating + pace.read(unread)
