"""When the trainer's own devices generate, and when they learn: the reserved window.

The trainer learns on the devices that its reserved engines generate on. The window is open while the trainer waits for
a batch, and closed while it learns one. So the devices always do something that is needed, and a step takes no longer
than the reserved engines alone, whatever the other engines do: what they take over they finish sooner, and what they
do not finish is taken back as soon as the trainer waits again.

What is left to decide is when a batch that could be delivered is delivered. With

    F(engines)   seconds until these engines have generated all that is left of the step
    L            seconds that learning all of the step takes that was not delivered yet

the step ends at max(F(others), L) if the window closes now. If it closes later, F(others) falls meanwhile by
F(others) / F(all) per second; best is when it has come down to L, and the step then ends sooner by

    gain = (1 - F(all) / F(others)) * (F(others) - L)

A batch is held back while F(others) > L and gain > LEAST_GAIN * F(others). With no other engine F(others) is infinite:
the window stays open until all is generated. With many, learning begins with the first batch. In between the window
closes when what others still need is what learning will take (T of the plan), looked at again every REPLAN_S and
whenever an engine comes or goes.

    F = max(tokens left / tokens per second of all engines, tokens until the longest has ended * the fastest step)
        + tokens that they read first / tokens that all of them read per second

What runs on reserved engines is read by others first, prompt and response: slow ones may need longer for that than for
all that is left. Remaining tokens come from the life table of turns (`lengths`), speeds by batch size and learning
seconds per token are measured; engines that were not measured yet count for nothing. Before a trainer has learned
anything L is unknown, and counts as 0. What a step's further turns and verdicts take is unknown too: F is then small
and the window closes early, which costs moves, not the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import Final, NamedTuple

from polyrl.ledger import speed
from polyrl.ledger.causes import RestPhase
from polyrl.ledger.events import BatchHeld, WindowSet
from polyrl.ledger.fleet import may_ever_serve
from polyrl.ledger.state import (
    GroupState,
    LeasedEngine,
    LedgerState,
    SamplePhase,
    SampleState,
    context_used,
    group_tokens,
)
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool, Purpose, sample_id
from polyrl.wire import BatchRequest

REPLAN_S: Final = 0.25
"""Longest time between two looks at a batch that is held back."""

LEAST_GAIN: Final = 0.1
"""Share of F(others) that going on must promise: F is an estimate, and learning early is certain."""

DEADLINE_SHARE: Final = 0.5
"""Share of a request's time after which its batch is held back no longer, whatever is planned."""

UNKNOWN_CLOSED_S: Final = 5.0
"""How long a closed window is expected to stay closed while learning was not measured."""

SHORTEST_CLOSED_S: Final = 0.5
"""The same at least: a trainer that is late is not about to end."""

GROUPS_READ: Final = 512
"""Open groups, evenly taken, from which what is left of a large step is estimated: some 10 ms."""

_UNFINISHED: Final = (SamplePhase.WAITING, SamplePhase.ASSIGNED)


class _Left(NamedTuple):
    """What is left of a step."""

    turns: list[tuple[int, int]]
    """(tokens, budget left) of the turns to be generated of the groups that were read."""
    expected: int
    """Tokens that they will still have."""
    to_read: int
    """Tokens that engines which are not reserved would have to read for it."""
    to_learn: int
    """Tokens that will be learned and were not delivered."""
    stride: int
    """Every how many-th open group was read for it."""


def follow_trainer(transition: Transition) -> None:
    """Opens or closes the window with what the trainer does now."""
    is_open = not isfinite(transition.state.learner.busy_since)
    if is_open != transition.state.window_open:
        token_s, read_s = slowest_pace(transition.state)
        transition.record(WindowSet(is_open, transition.now, token_s=token_s, read_s=read_s))


def opens_in(state: LedgerState, engine: LeasedEngine, now: float) -> float:
    """Seconds until an engine may generate: what was delivered must be learned, and the rest of the step, since the
    window closes when others finish that while it is learned."""
    if engine.pool is not Pool.RESERVED:
        return 0.0
    learner = state.learner
    wakes_s = 0.0 if engine.rest.phase is RestPhase.AWAKE else learner.rests.wake_s
    if state.window_open:
        return wakes_s
    if not learner.token_s:
        return UNKNOWN_CLOSED_S + wakes_s
    tokens = learner.tokens + _groups_to_come(state) * learner.group_tokens
    return max(SHORTEST_CLOSED_S, learner.busy_since + learner.token_s * tokens - now) + wakes_s


def _groups_to_come(state: LedgerState) -> int:
    """How many groups the step that trains still gets: the newest step of which some were delivered, else the earliest,
    with what an earlier one left over. What is generated ahead of it is learned another time."""
    steps = [step for step in state.steps.values() if step.purpose is Purpose.TRAIN]
    delivered = max((step.step for step in steps if step.packed), default=-1)
    earliest = min((step.step for step in steps if step.ready or step.open), default=-1)
    return sum(len(step.ready) + step.open for step in steps if step.step <= max(delivered, earliest))


def loss_seconds(state: LedgerState) -> float:
    """What the loss of its engine costs a sample: silence shows after a lease, and is expected to last another."""
    return 2 * state.config.lease_s


def holds_back(transition: Transition, wanted: BatchRequest) -> bool:
    """Whether a batch that could answer `wanted` waits, because the reserved engines go on generating."""
    state, now = transition.state, transition.now
    reserved = [engine for engine in transition.fleet.reserved() if engine.running or _is_waking(engine, now)]
    pending = state.pending[wanted.request]
    late = now >= pending.since + DEADLINE_SHARE * (pending.due - pending.since)
    if wanted.purpose is not Purpose.TRAIN or not state.window_open or not reserved or late:
        return False
    if now < state.learner.held_until:
        return True
    if not _generation_pays(state, wanted, now):
        return False
    transition.record(BatchHeld(now + REPLAN_S))
    return True


def _generation_pays(state: LedgerState, wanted: BatchRequest, now: float) -> bool:
    left = _left(state, _groups_of(state, wanted), now)
    able = _able(state, now)
    others = _measured_others(able)
    alone = _finish_s(state, others, left, now) + _read_s(state, others, left)
    together = _finish_s(state, able, left, now)
    if not isfinite(alone):
        return True
    learning = left.to_learn * state.learner.token_s
    return alone > learning and (1 - together / alone) * (alone - learning) > LEAST_GAIN * alone


def waking_pays(transition: Transition, wanted: BatchRequest, asleep: Sequence[LeasedEngine]) -> bool:
    """Whether what is left of the step is done sooner with these awake, the seconds to wake and to sleep again counted.
    Without others it is not done at all, so only those are read then."""
    state, now = transition.state, transition.now
    able = _able(state, now)
    others = _measured_others(able)
    if not others:
        return True
    if now < state.learner.rests.next_try_at:
        return False
    step = _groups_of(state, wanted)
    if _needs(state, _some_open(step, now)[0], asleep, others):
        return True
    left = _left(state, step, now)
    alone = _finish_s(state, others, left, now)
    cost = state.learner.rests.wake_s + state.learner.rests.sleep_s
    return cost + _finish_s(state, [*able, *asleep], left, now) < (1 - LEAST_GAIN) * alone


def _able(state: LedgerState, now: float) -> list[LeasedEngine]:
    """Engines that generate now, or will in a moment."""
    able = [engine for engine in state.engines.values() if engine.version >= 0 or _is_waking(engine, now)]
    return [one for one in able if not (one.draining or one.silent) and one.quarantined_until <= now]


def _is_waking(engine: LeasedEngine, now: float) -> bool:
    return engine.rest.phase is RestPhase.WAKING and now < engine.rest.due


def _measured_others(able: Iterable[LeasedEngine]) -> list[LeasedEngine]:
    return [engine for engine in able if engine.pool is not Pool.RESERVED and engine.step_scale]


def _needs(
    state: LedgerState, groups: Iterable[GroupState], these: Sequence[LeasedEngine], others: Sequence[LeasedEngine]
) -> bool:
    """Whether the step waits for a sample that none of `others` may ever take, and one of `these` may: it is too long
    for the others, of a version that they have left behind, or refused."""
    for entry in groups:
        for sample in _unfinished(state, entry):
            about = (entry.group.max_version, context_used(state, sample) + 1, sample.rejected_by)
            if not may_ever_serve(others, *about) and may_ever_serve(these, *about):
                return True
    return False


def _groups_of(state: LedgerState, wanted: BatchRequest) -> list[GroupState]:
    """Groups of its step that were not delivered, and what an earlier step left over, which is trained with it. All are
    found before what is kept for a checkpoint is read, of which there may be many times more: that is older."""

    def is_meant(step: int, purpose: Purpose) -> bool:
        return purpose is wanted.purpose and step <= wanted.step

    count = sum(len(one.ready) + one.open for one in state.steps.values() if is_meant(one.step, one.purpose))
    live = (entry for entry in reversed(state.groups.values()) if entry.batch < 0)
    return list(itertools.islice((one for one in live if is_meant(one.group.step, one.group.purpose)), count))


def _some_open(groups: Sequence[GroupState], now: float) -> tuple[list[GroupState], int]:
    """Groups that are not ready; of many every so many-th, as said beside them, and other ones at the next look."""
    still_open = [entry for entry in groups if not entry.ready]
    stride = len(still_open) // GROUPS_READ + 1
    return still_open[int(now / REPLAN_S) % stride :: stride], stride


def _left(state: LedgerState, groups: Sequence[GroupState], now: float) -> _Left:
    some, stride = _some_open(groups, now)
    turns, expected, to_learn, to_read = [], 0, 0, 0
    for entry in some:
        to_learn += group_tokens(state, entry.group.id)
        to_read += sum(context_used(state, sample) for sample in _unfinished(state, entry) if _is_ours(state, sample))
        for length, budget, tokens in _turns(state, entry):
            turns.append((length, budget))
            expected += tokens
    ready = sum(entry.tokens for entry in groups if entry.ready)
    to_learn = ready + (to_learn + expected) * stride
    return _Left(turns, expected * stride, to_read=to_read * stride, to_learn=to_learn, stride=stride)


def _is_ours(state: LedgerState, sample: SampleState) -> bool:
    """Whether a reserved engine runs it."""
    if not sample.assignment:
        return False
    return state.engines[state.assignments[sample.assignment].engine].pool is Pool.RESERVED


def _turns(state: LedgerState, entry: GroupState) -> Iterable[tuple[int, int, int]]:
    """(tokens, budget left, tokens expected) of each turn of a group that is not over."""
    for sample in _unfinished(state, entry):
        budget = entry.group.sampling.max_new_tokens - sample.generated
        yield sample.length - sample.turn_start, budget, speed.expected_tokens(state, sample)


def _unfinished(state: LedgerState, entry: GroupState) -> Iterable[SampleState]:
    """Its samples whose turn is not over."""
    samples = (state.samples[sample_id(entry.group.id, index)] for index in range(entry.group.n))
    return (sample for sample in samples if sample.phase in _UNFINISHED)


def _finish_s(state: LedgerState, engines: Sequence[LeasedEngine], left: _Left, now: float) -> float:
    """Seconds until these engines have generated all that is left, losses among them counted."""
    slots = sum(engine.capacity.max_running for engine in engines)
    if not left.turns or not slots:
        return inf if left.turns else 0.0
    mean, share = speed.mean_step(engines), min(1.0, len(left.turns) * left.stride / slots)
    slowdowns = {pool: state.usage.slowdown(pool, now, loss_seconds(state)) for pool in Pool}
    paces = [
        (speed.pace_of(engine, mean).slower(slowdowns[engine.pool]), max(1.0, share * engine.capacity.max_running))
        for engine in engines
    ]
    bulk = left.expected / sum(running / pace.step(running) for pace, running in paces)
    table = state.lengths
    longest = table.outlook.longest(left.turns) if table.is_known else max(budget for _, budget in left.turns)
    return max(bulk, longest * min(pace.step(max(1.0, running / 2)) for pace, running in paces))


def _read_s(state: LedgerState, engines: Sequence[LeasedEngine], left: _Left) -> float:
    """Seconds until these engines have read what they must take over from the reserved ones."""
    if not left.to_read or not engines:
        return 0.0
    mean = speed.mean_step(engines)
    return left.to_read / sum(1 / speed.pace_of(engine, mean).prefill_s for engine in engines)


def slowest_pace(state: LedgerState) -> tuple[float, float]:
    """Seconds per token generated and per token read on the slowest reserved engine when it is full; 0, 0 unless all
    are measured. An audit bounds the window by it: no engine is busy for longer than all work takes it one by one."""
    engines = [engine for engine in state.engines.values() if engine.pool is Pool.RESERVED]
    if not engines or not all(engine.step_scale for engine in engines):
        return 0.0, 0.0
    paces = [(speed.pace_of(engine, 0.0), engine.capacity.max_running) for engine in engines]
    return max(pace.step(running) for pace, running in paces), max(pace.read(running) for pace, running in paces)
