"""What waits although engines have free slots: for KV room, or for its turn on the trainer's own engines.

A group that finds no room, although engines that serve it have free slots, keeps one of them: the one where the room
comes free first, by what runs there and how long that is expected to take. One, since all of them would idle beside
whatever waits behind it, for as long as the longest of its samples runs; the next group that finds no room keeps
another one, while there is one.

Others get of a kept engine only what they are expected to have ended by then. When that is stays as it was first
expected: so whatever is expected wrongly, nothing new comes there from then on, and no group waits for ever.

Where none of the trainer's own engines has room, a sample waits for its turn there as long as

    waited + until those have ended as many as wait before it + cost there < cost elsewhere

Those alone would give it that, and an engine with room may be ten times slower. But not for longer than it takes there
to make what is worth reading it again at home: who begins elsewhere takes that along. So long prompts wait, and the
first of a long queue; who goes elsewhere is far behind them, and a look over the queue passes by what lies between.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from math import inf
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.events import PlacementPaused
from polyrl.ledger.scheduling.cost import Costs, PlacementRequest, kv_room, serves
from polyrl.ledger.state import GroupState, LeasedEngine
from polyrl.ledger.transition import Transition
from polyrl.sample import Group, sample_id

SHORTEST_HOLD_S: Final = 0.05
"""A sample does not wait for its prefix for less: the estimates are not as exact, and each look costs a tick."""

LONGEST_HOLD_S: Final = 1.0
"""Time between two looks at what waits for the window: the trainer ends earlier or later than was thought."""

LACKING_READ: Final = 16
"""Engines that lack room of which the roomiest are compared."""

COMPARED: Final = 4
"""Engines of which it is looked up when room comes free there, those that lack least: each runs up to hundreds."""

CHOSEN_AT_ONCE: Final = 8
"""Groups for which one pass over the queue chooses an engine: a few milliseconds. The next one goes on."""


class Keeping:
    """During one pass over the queue; what was chosen before is kept beside the fleet."""

    def __init__(self, transition: Transition) -> None:
        self._transition, self._chosen = transition, transition.fleet.kept
        self._until: dict[str, float] = {}
        """By engine that something before in the queue has kept: until when others may use it."""
        self._choices = 0
        groups = transition.state.groups
        for number in [one for one in self._chosen if one not in groups or not groups[one].waiting]:
            del self._chosen[number]

    def keeps(self, engine: LeasedEngine) -> bool:
        """Whether something before in the queue has it kept."""
        return engine.name in self._until

    def leaves(self, engine: LeasedEngine, seconds: float) -> bool:
        """Whether it may take what costs so many seconds there."""
        return self._transition.now + seconds <= self._until.get(engine.name, inf)

    def keep(self, request: PlacementRequest, lacking: Iterable[LeasedEngine], costs: Costs) -> None:
        """`request` found no room; `lacking`: engines that nobody keeps and that may take it, but for their KV room."""
        known = self._chosen.get(request.group)
        if known is None or not self._is_sound(known[0], request):
            self._chosen.pop(request.group, None)
            free = list(itertools.islice(lacking, LACKING_READ if self._choices < CHOSEN_AT_ONCE else 0))
            if not free:
                return  # it waits behind those that have them kept
            self._choices += 1
            known = self._chosen[request.group] = self._choose(request, free, costs)
        name, until = known
        self._until[name] = min(until, self._until.get(name, until))

    def found(self, request: PlacementRequest) -> None:
        """`request` has room: its group needs no engine kept, unless it finds none for the rest."""
        self._chosen.pop(request.group, None)

    def _choose(self, request: PlacementRequest, free: list[LeasedEngine], costs: Costs) -> tuple[str, float]:
        now = self._transition.now
        roomiest = heapq.nlargest(COMPARED, free, key=lambda engine: kv_room(engine, now))
        seconds, name = min((self._comes_free_in(one, request.size, costs), one.name) for one in roomiest)
        return name, now + seconds

    def _comes_free_in(self, engine: LeasedEngine, size: int, costs: Costs) -> float:
        """Seconds until what runs there has left room of `size`, or until nothing runs any more: then it takes all."""
        state, lacks = self._transition.state, size - kv_room(engine, self._transition.now)
        running = (state.assignments[number] for number in engine.running)
        tokens = 0
        for end, kv in sorted((speed.expected_tokens(state, state.samples[one.sample]), one.kv) for one in running):
            if lacks <= 0:
                break
            tokens, lacks = end, lacks - kv
        return tokens * costs.step(engine)

    def _is_sound(self, name: str, request: PlacementRequest) -> bool:
        engine = self._transition.state.engines.get(name)
        if engine is None or name in request.rejected_by or request.context > engine.capacity.max_context:
            return False
        return serves(engine, request.low, request.high) and engine.quarantined_until <= self._transition.now


class HomeTurns:
    """During one pass over the queue."""

    def __init__(self, transition: Transition) -> None:
        self._transition = transition
        self.waiting = 0
        """Samples so far that wait on."""
        self._ahead: dict[tuple[int, int, int], tuple[float, int]] = {}
        """By versions and budget: with so many samples before it, and so long a prompt, one that nobody has begun
        waits. A shorter one may fit where there was no room."""
        self._due = inf

    def waits(self, name: str, request: PlacementRequest, best: tuple[LeasedEngine, float], costs: Costs) -> bool:
        """Whether a sample is better off so; `best`: of the engines with room, and what it costs there. It is looked at
        again in time."""
        engine, elsewhere = best
        state, now, turn = self._transition.state, self._transition.now, costs.home(request)
        wait_s = turn.until(self.waiting)
        gains = state.samples[name].since + elsewhere - now - wait_s - turn.there
        spare_s = min(gains - SHORTEST_HOLD_S, costs.home_awaited_s(engine, request) - wait_s)
        if not spare_s > 0:
            return False
        if request.is_new:
            about = _about(state.groups[request.group].group)
            ahead, prompt = self._ahead.get(about, (inf, request.prompt))
            self._ahead[about] = min(ahead, self.waiting + spare_s / turn.end_s), min(request.prompt, prompt)
        until = now + min(gains, LONGEST_HOLD_S)
        if until < self._due:
            self._due = until
            self._transition.record(PlacementPaused(until))
        return True

    def passes(self, entry: GroupState) -> bool:
        """Whether all that waits of a group waits on, by those before it that do: it is not looked at."""
        group, waiting = entry.group, self.waiting + len(entry.waiting)
        ahead, prompt = self._ahead.get(_about(group), (-inf, 0))
        if waiting > ahead or len(group.prompt_ids) // 4 < prompt:
            return False
        samples = self._transition.state.samples
        if any(samples[sample_id(group.id, index)].attempt for index in entry.waiting):
            return False
        self.waiting = waiting
        return True


def _about(group: Group) -> tuple[int, int, int]:
    return group.min_version, group.max_version, group.sampling.max_new_tokens
