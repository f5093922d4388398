"""Work conservation: no engine that could do something idles beside what waits, or runs far more slowly elsewhere (I5).

It counts only what no policy could mind: the engine is sound, heard of, not the trainer's, the whole budget fits, and
what was last measured of it is not many times slower than others. Each group that waits before another one may have an
engine kept for it: beyond that all of them are for what waits behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from math import isfinite
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.state import Assignment, LeasedEngine, LedgerState, context_used
from polyrl.sample import Group, Pool, sample_id

IDLE_S: Final = 5.0
"""A sample waits no longer where an engine that never failed could take it with its whole budget: above what frames
and looks take. A later turn may wait for the busy engine that has its prefix, and any sample for the trainer's own
while it learns or they are full, for as long as its rest would take here: then it has lost as much as it could gain."""

SLOW_S: Final = 8.0
"""A sample stays no longer on an engine that takes SLOW_STEP_S for a token while another one, SLOW_TIMES as fast,
idles: above the pause between two moves of a sample, and the time over which speeds are measured."""

SLOW_STEP_S: Final = 1.0
"""From here on a move gains more than it must for a single token."""

SLOW_TIMES: Final = 10


class WorkConservation:
    """Watches the work of one run; to be asked after every event."""

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._paces: dict[str, Callable[[], float]] = {}
        """What engines really take for a token."""
        self._shown: dict[str, tuple[float, float]] = {}
        """When an engine last gave a token, and what it really took for one then: of later changes nobody knows."""
        self._room_since: dict[tuple[str, int], float] = {}
        """By engine and group: since when it could take any waiting sample of the group."""
        self._slow_since: dict[tuple[int, str], float] = {}
        """By assignment and engine: since when it could have gone on far sooner there."""

    def started(self, engine: str, step_s: Callable[[], float]) -> None:
        """An engine is there that takes `step_s()` for a token."""
        self._paces[engine] = step_s

    def idle(self, state: LedgerState, silent: Set[str], now: float) -> str:
        """What idles for too long, in a sentence; empty: nothing. `silent`: engines that may be passed over."""
        self._note_paces(state)
        room, slow = self._room_since, self._slow_since
        able = [engine for engine in state.engines.values() if engine.name not in silent and _is_sound(engine)]
        heads = [number for *_, number in state.queue[: len(able)]]
        roomy = [engine for engine in able if _has_slot(engine)] if heads else []
        if roomy:
            # While the trainer learns, a sample may wait for the engines that have its devices afterwards.
            awaited = [one for one in state.engines.values() if one.pool is Pool.RESERVED and not state.window_open]
            roomy = [engine for engine in roomy if not _is_far_slower(engine, [*able, *awaited])]
        self._room_since = {
            (engine.name, number): room.get((engine.name, number), now)
            for number in heads
            for engine in roomy
            if self._takes(state, engine, number) and not _is_refused(state, engine, _waiting(state, number))
        }
        free = [] if state.queue else [engine for engine in able if not engine.occupied and engine.step_scale > 0]
        slowest = self._slow_engines(state) if free else ()
        # What passed before a greeting tells nobody how fast an engine is.
        self._slow_since = {
            (number, engine.name): max(slow.get((number, engine.name), now), state.engines[one.engine].greeted_at)
            for number, one in (state.assignments.items() if slowest else ())
            if one.engine in slowest and not one.recall_cause
            for engine in free
            if self._is_far_better(state, engine, one)
        }
        for place, number in enumerate(heads):
            long = [
                (name, now - since)
                for (name, group), since in self._room_since.items()
                if group == number and now - since > IDLE_S + _hold_s(state, state.engines[name], number)
            ]
            if len(long) > place:
                engines = ", ".join(f"{name} for {seconds:.1f} s" for name, seconds in long)
                return f"group {number} waits behind {place} others, and there has been room for it: {engines}"
        for (number, name), since in self._slow_since.items():
            if now - since > SLOW_S:
                one = state.assignments[number]
                return f"{one.sample} runs on {one.engine}, and {name} has idled for {now - since:.1f} s, far faster"
        return ""

    def _note_paces(self, state: LedgerState) -> None:
        for name, engine in state.engines.items():
            if name not in self._shown or self._shown[name][0] != engine.token_at:
                self._shown[name] = engine.token_at, self._paces[name]()

    def _slow_engines(self, state: LedgerState) -> Set[str]:
        measured = (name for name, engine in state.engines.items() if engine.step_scale > 0)
        return {name for name in measured if self._paces[name]() >= SLOW_STEP_S}

    def _is_far_better(self, state: LedgerState, engine: LeasedEngine, one: Assignment) -> bool:
        faster = self._shown[engine.name][1] * SLOW_TIMES <= self._paces[one.engine]()
        sample = state.samples[one.sample]
        able = faster and engine.name != sample.avoid and self._takes(state, engine, sample.group)
        return able and not _is_refused(state, engine, [one.sample])

    def _takes(self, state: LedgerState, engine: LeasedEngine, number: int) -> bool:
        group = state.groups[number].group
        if not (_has_slot(engine) and group.min_version <= engine.version <= group.max_version):
            return False
        size = len(group.prompt_ids) // 4 + group.sampling.max_new_tokens * self._max_turns
        room = min(engine.load[2] - engine.kv_since - engine.kv_growth, engine.capacity.kv_tokens - engine.kv)
        fits = not engine.occupied or size + sum(engine.reserved_kv.values()) <= room
        return size < engine.capacity.max_context and fits


def _is_sound(engine: LeasedEngine) -> bool:
    failed = isfinite(engine.quarantined_until) or engine.failures
    return not (failed or engine.draining or engine.pool is Pool.RESERVED)


def _has_slot(engine: LeasedEngine) -> bool:
    return engine.occupied < engine.capacity.max_running


def _is_refused(state: LedgerState, engine: LeasedEngine, names: Iterable[str]) -> bool:
    """By the engine: others have the first right then."""
    return any(engine.name in state.samples[name].rejected_by for name in names)


def _is_far_slower(engine: LeasedEngine, others: Iterable[LeasedEngine]) -> bool:
    """As measured last, however long ago: a short wait for another one costs less."""
    return any(0 < one.step_scale * SLOW_TIMES <= engine.step_scale for one in others)


def _hold_s(state: LedgerState, engine: LeasedEngine, number: int) -> float:
    """How much longer all that waits of a group may wait for others, beside an engine with room."""
    pace = speed.pace_of(engine, speed.mean_step(state.engines.values()))
    return min(_rest_s(state, engine, name, pace) for name in _waiting(state, number))


def _rest_s(state: LedgerState, engine: LeasedEngine, name: str, pace: speed.Pace) -> float:
    """What is left of its budget would take so long here, as measured; 0 unless another engine that works has read all
    of it, or one of the trainer's that has not refused it takes it in its turn, or once the trainer has learned."""
    sample = state.samples[name]
    holder = state.engines.get(next((span.engine for span in reversed(sample.spans) if span.engine), ""))
    is_read = holder is not None and holder is not engine and holder.running
    group = state.groups[sample.group].group
    if not (is_read or _waits_for_home(state, group, sample.rejected_by)):
        return 0.0
    left = group.sampling.max_new_tokens - sample.generated
    return left * pace.step(engine.occupied + 1) + pace.read(2 * context_used(state, sample))


def _waits_for_home(state: LedgerState, group: Group, refused_by: Sequence[str]) -> bool:
    own = (one for one in state.engines.values() if one.pool is Pool.RESERVED and one.name not in refused_by)
    busy = (one for one in own if one.running or not state.window_open)
    return any(group.min_version <= one.version <= group.max_version for one in busy)


def _waiting(state: LedgerState, number: int) -> list[str]:
    return [sample_id(number, index) for index in state.groups[number].waiting]
