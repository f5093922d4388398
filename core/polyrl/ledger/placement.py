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
    room = [engine for engine in state.engines.values() if has_slot(engine, d.now)]
    fitting: dict[tuple[int, int], list[Engine]] = {}
    for _, number in tuple(state.queue):
        if not room:
            return
        entry = state.groups[number]
        versions = (entry.group.min_version, entry.group.max_version)
        if versions not in fitting:
            fitting[versions] = [e for e in room if may_generate(state, e, *versions, d.now)]
        if fitting[versions] and not _place_group(d, entry, fitting[versions]):
            fitting[versions] = []
        room = [engine for engine in room if has_slot(engine, d.now)]


def _place_group(d: Decision, entry: GroupState, engines: list[Engine]) -> bool:
    """Places the group's waiting samples; False when one found no room. Leaves in `engines` those with room."""
    homes = _homes(d.state, entry.group)
    fleet = speed.fleet_scale(d.state)
    for index in tuple(entry.waiting):
        name = sample_id(entry.group.group, index)
        engine = choose(d, entry, d.state.samples[name], engines, homes, fleet)
        if engine is None:
            return False
        assign(d, name, engine)
        homes.add(engine.name)
        if not has_slot(engine, d.now):
            engines.remove(engine)
    return True


def _homes(state: State, group: Group) -> set[str]:
    """Engines that run samples of the group."""
    numbers = (state.samples[sample_id(group.group, index)].assignment for index in range(group.n))
    return {state.assignments[number].engine for number in numbers if number}


def choose(
    d: Decision, entry: GroupState, sample: SampleState, engines: list[Engine], homes: set[str], fleet: float
) -> Engine | None:
    """The engine with the least cost among those with room; the one that just failed the sample only if it is alone."""
    prompt = len(entry.group.prompt_ids) // 4
    tokens = speed.expected_tokens(d.state, sample)
    context = needed_context(d.state, entry, sample.index)
    need = prompt + sample.length + tokens
    best, least = None, (True, 0.0, 0.0)
    for engine in engines:
        if context > engine.max_context or (engine.running and engine.kv + need > engine.kv_tokens):
            continue
        scale = speed.scale_of(engine, fleet)
        to_read = sample.length + (0 if engine.name in homes else prompt)
        seconds = tokens * speed.step_seconds(scale, len(engine.running) + 1) + speed.prefill_seconds(scale, to_read)
        cost = (engine.name == sample.avoid, seconds, len(engine.running) / engine.max_running)
        if best is None or cost < least:
            best, least = engine, cost
    return best


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
