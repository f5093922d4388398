"""Where waiting samples go: as soon as an engine has room, to the engine that is expected to finish them first.

    cost(engine) = expected_tokens * step_seconds(engine, running + 1) + prefill_seconds(engine, tokens to read)

An engine that runs a sibling has read their prompt already, so only the response so far counts as "to read": siblings
gather where their prefix is cached, until a fuller engine costs more than reading the prompt again. Ties go to the
emptier.

Order is priority, then age of the group. The head of a queue that does not fit anywhere waits for room; nothing of its
weight versions overtakes it, or a long prompt would starve.

Refuses to hold: polling; moving what runs (see `rebalance`). Read next: `reserved`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polyrl.ledger import speed
from polyrl.ledger.decision import Decision
from polyrl.ledger.discards import needed_context
from polyrl.ledger.facts import Assigned
from polyrl.ledger.reserved import may_generate
from polyrl.ledger.state import Engine, GroupState, SampleState, State
from polyrl.sample import Group, sample_id
from polyrl.wire import Assign


def has_slot(engine: Engine, now: float) -> bool:
    """Whether it may get one more sample; after a failure, one at a time until tokens come."""
    if engine.draining or engine.version < 0 or engine.trusted_at > now:
        return False
    return len(engine.running) < (1 if engine.strikes else engine.max_running)


def place(d: Decision) -> None:
    """Places as much of the queue as there is room for."""
    state = d.state
    if not state.queue:
        return
    room = {engine.name: engine for engine in state.engines.values() if has_slot(engine, d.now)}
    fitting: dict[tuple[int, int], list[str]] = {}
    for _, number in tuple(state.queue):
        if not room:
            return
        entry = state.groups[number]
        versions = (entry.group.min_version, entry.group.max_version)
        if versions not in fitting:
            fitting[versions] = [e.name for e in room.values() if may_generate(state, e, *versions, d.now)]
        engines = {name: room[name] for name in fitting[versions] if name in room}
        if engines and not _place_group(d, entry, engines, room):
            fitting[versions] = []


def _place_group(d: Decision, entry: GroupState, engines: Mapping[str, Engine], room: dict[str, Engine]) -> bool:
    """Places the group's waiting samples on `engines`; False when one found none. Takes full ones out of `room`."""
    homes = _homes(d.state, entry.group)
    fleet = speed.fleet_scale(d.state)
    asked, offers = None, _Offers()
    for index in tuple(entry.waiting):
        name = sample_id(entry.group.group, index)
        need = _need(d, entry, d.state.samples[name])
        if need != asked:
            # Siblings mostly are alike: then only the engine that got the last one has another offer to make.
            asked, offers = need, _Offers()
            for engine in engines.values():
                if engine.name in room:
                    offers.update(engine, need, engine.name in homes, fleet)
        best = offers.best()
        if best is None:
            return False
        assign(d, name, engines[best])
        homes.add(best)
        if has_slot(engines[best], d.now):
            offers.update(engines[best], need, True, fleet)
        else:
            del room[best]
            offers.withdraw(best)
    return True


def _homes(state: State, group: Group) -> set[str]:
    """Engines that run samples of the group."""
    numbers = (state.samples[sample_id(group.group, index)].assignment for index in range(group.n))
    return {state.assignments[number].engine for number in numbers if number}


class _Need(NamedTuple):
    """What placing a sample depends on, of the sample; all in tokens but the last."""

    prompt: int
    response: int
    expected: int
    context: int
    avoid: str


def _need(d: Decision, entry: GroupState, sample: SampleState) -> _Need:
    prompt = len(entry.group.prompt_ids) // 4
    expected = speed.expected_tokens(d.state, sample)
    return _Need(prompt, sample.length, expected, needed_context(d.state, entry, sample.index), sample.avoid)


class _Offers:
    """Per engine with room for a sample: the cost, ending in what decides ties; one that failed it goes last."""

    def __init__(self) -> None:
        self._costs: dict[str, tuple[bool, float, float]] = {}

    def update(self, engine: Engine, need: _Need, is_home: bool, fleet: float) -> None:
        """Asks an engine, anew if need be."""
        size = need.prompt + need.response + need.expected
        if need.context > engine.max_context or (engine.running and engine.kv + size > engine.kv_tokens):
            self.withdraw(engine.name)
            return
        running, scale = len(engine.running), speed.scale_of(engine, fleet)
        to_read = need.response + (0 if is_home else need.prompt)
        seconds = need.expected * speed.step_seconds(scale, running + 1) + speed.prefill_seconds(scale, to_read)
        self._costs[engine.name] = (engine.name == need.avoid, seconds, running / engine.max_running)

    def withdraw(self, name: str) -> None:
        """It has no room."""
        self._costs.pop(name, None)

    def best(self) -> str | None:
        """The engine with the least cost, of equals the one that greeted first; None when nobody has room."""
        return min(self._costs, key=self._costs.__getitem__, default=None)


def assign(d: Decision, name: str, engine: Engine) -> None:
    """Gives a waiting sample to an engine: prompt and everything after it so far, and what is left of the budget."""
    state = d.state
    sample = state.samples[name]
    group = state.groups[sample.group].group
    number = state.next_assignment
    kv = len(group.prompt_ids) // 4 + sample.length + speed.expected_tokens(state, sample)
    d.record(Assigned(number, name, engine.name, kv, d.now))
    d.tell(
        engine.name,
        Assign(
            assignment=number,
            sample=name,
            attempt=sample.attempt,
            input_ids=group.prompt_ids + sample.ids,
            offset=sample.length,
            max_new_tokens=group.sampling.max_new_tokens - sample.generated,
            sampling=group.sampling,
            min_version=group.min_version,
            max_version=group.max_version,
        ),
    )
