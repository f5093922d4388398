"""How long a batch that could be delivered is held back from the learner, because its devices still generate (I9).

Three bounds, of which none needs to know how the ledger decides:

    its request     a batch waits for generation no longer than half of the time that its request gave
    the work left   it waits no longer than the rest would take the reserved engines by themselves, nor than it would
                    take the others, less what learning takes meanwhile: after that nothing is gained
    the order       it waits for an engine to sleep no longer than GIVEN_UP_S from the first order, whatever that engine
                    says meanwhile

The second one is counted as a debt: seconds in which a batch is held add to it, and what was done of the work meanwhile
takes off what it was expected to take. So a hold that brings nothing shows after HOLD_SLACK_S, however much is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf, isfinite
from typing import Final, NamedTuple

from polyrl.ledger import events as f
from polyrl.ledger.causes import RestPhase
from polyrl.ledger.state import (
    LeasedEngine,
    LedgerState,
    PendingRequest,
    SamplePhase,
    StepState,
    group_tokens,
    step_key,
)
from polyrl.sample import Pool, Purpose, sample_id

REQUEST_SHARE: Final = 0.5
"""Share of the time that a request gave, after which its batch is delivered whatever is planned."""

GIVEN_UP_S: Final = 90.0
"""After the first order to sleep an engine that did not is given up."""

LATE_S: Final = 0.5
"""Pause between two looks at what is held, 0.25 s, and twice the resolution of the ledger's tick."""

HOLD_SLACK_S: Final = 6.0
"""Held without getting on: frames that are late, a lost one that is asked for again, LATE_S, and slow steps in a row:
with less, schedules that hold raise alarms. What is held in vain for less is not noticed."""

HOLD_DRIFT: Final = 0.1
"""And this share of the time that it is held: what an engine gives in a second differs from the mean of its speed."""

IDLE_SLACK_S: Final = 15.0
"""The same once nothing came from the reserved engines at all for SILENT_S: silence until one is gone, and the
debt of it stays when it gives again."""

SILENT_S: Final = 1.0

LEARNED_BATCHES: Final = 3
"""After which what learning takes is measured; a trainer that is killed meanwhile shows it for none."""

PACE_SLACK: Final = 2.0
"""What a token may take more than an engine's step: frames hold whole tokens, and speeds are means."""

TURN_S: Final = 1.0
"""What a turn takes besides its tokens: to be placed, synced to a slow disk, gathered into frames, and scored."""

_UNFINISHED: Final = (SamplePhase.WAITING, SamplePhase.ASSIGNED, SamplePhase.TURN_DONE)


class _Work(NamedTuple):
    """Seconds that what is left takes some engines by themselves."""

    reserved: float
    others: float


class HeldBatches:
    """Watches the held batches of one run; to be asked after every event, by the ledger's clock."""

    def __init__(self, learn_s: float = 0.0, paces: dict[str, Callable[[], float]] | None = None) -> None:
        """`learn_s`: what the trainer takes for each batch at least; `paces`: of engines that are there already."""
        self.paces = {} if paces is None else paces
        """Seconds per token, by engine."""
        self._learn_s, self._largest, self._learns, self._token_s = learn_s, 0, False, 0.0
        """Tokens of its largest batch; whether it has one; and what a token took it at least, 0 before the first."""
        self._falling: dict[str, float] = {}
        """Engines that were ordered to sleep and have not: since when."""
        self._at, self._learned = 0.0, 0
        self._left: _Work | None = None
        """What is left, while a batch is held for generation."""
        self._debt = _Work(0.0, 0.0)
        self._held_s = self._idle_s = self._longest_idle_s = 0.0
        """Seconds held: all, those since tokens last came from the reserved engines, and the longest without any."""

    def started(self, engine: str, step_s: Callable[[], float]) -> None:
        """An engine is there that takes `step_s()` for a token."""
        self.paces[engine] = step_s

    def restarted(self, state: LedgerState) -> None:
        """The manager goes on from its journal. An order to sleep that is not there was never sent."""
        ordered = {name for name, engine in state.engines.items() if engine.rest.phase is RestPhase.FALLING}
        self._falling = {name: since for name, since in self._falling.items() if name in ordered}

    def deaf(self, state: LedgerState, now: float) -> None:
        """The manager was away, and not all have greeted: what is held is counted anew, and nothing is overdue."""
        self._late_to_sleep(state, now)
        self._count_anew()

    def _count_anew(self) -> None:
        self._left, self._debt = None, _Work(0.0, 0.0)
        self._held_s = self._idle_s = self._longest_idle_s = 0.0

    def happened(self, events: Iterable[f.Event], state: LedgerState) -> None:
        """The ledger has decided this."""
        for event in events:
            if isinstance(event, f.TrainerGreeted):
                self._learns = False  # perhaps another process, which learns nothing yet
            elif isinstance(event, f.BatchRequested) and self._learns:
                self._learns, self._token_s = False, self._learn_s / self._largest
                self._learned += self._learn_s > 0
            elif isinstance(event, f.BatchPacked) and event.groups and event.wanted.purpose is Purpose.TRAIN:
                tokens = sum(group_tokens(state, number) for number in event.groups if number in state.groups)
                self._learns, self._largest = True, max(self._largest, tokens)

    def overdue(self, state: LedgerState, now: float) -> str:
        """What is held for too long, in a sentence; empty if nothing is."""
        seconds, self._at = now - self._at, now
        if self._learned >= LEARNED_BATCHES and not state.learner.token_s:
            return f"{self._learned} batches were learned, and nobody knows how long that takes"
        late = self._late_to_sleep(state, now)
        held = [one for one in state.pending.values() if _is_held(state, one)]
        if late or not held:
            self._left = None
            if not state.pending or not state.window_open:
                self._count_anew()
            return late
        for one in held:
            if now > one.since + REQUEST_SHARE * (one.due - one.since) + LATE_S:
                return f"a batch of request {one.request.request} is held for {now - one.since:.1f} s of its time"
        return self._unpaid(state, seconds, now)

    def _late_to_sleep(self, state: LedgerState, now: float) -> str:
        falling = self._falling
        sharing = [engine for engine in state.engines.values() if engine.pool is Pool.RESERVED and engine.rest.able]
        if not sharing:
            self._falling = {}
            return ""
        phases = {engine.name: engine.rest.phase for engine in sharing}
        # One that greets awake while it was to sleep still has the memory.
        self._falling = {
            name: falling.get(name, now)
            for name, phase in phases.items()
            if phase is RestPhase.FALLING or (phase is RestPhase.AWAKE and name in falling)
        }
        for name, since in self._falling.items():
            if now - since > GIVEN_UP_S + LATE_S:
                return f"{name} was ordered to sleep {now - since:.1f} s ago, and keeps its devices"
        return ""

    def _unpaid(self, state: LedgerState, seconds: float, now: float) -> str:
        before, left = self._left, self._work(state)
        self._left = left
        if any(engine.rest.phase is RestPhase.WAKING for engine in state.engines.values()):
            return ""  # its request bounds how long it is waited for
        if before is None:
            return ""
        debts = zip(self._debt, before, left, strict=True)
        self._debt = _Work(*(max(0.0, debt + seconds - _done(was, rest)) for debt, was, rest in debts))
        running = [engine for engine in state.engines.values() if engine.pool is Pool.RESERVED and engine.running]
        gives = any(engine.token_at >= now for engine in running)
        self._idle_s = 0.0 if gives else self._idle_s + seconds
        self._longest_idle_s = max(self._longest_idle_s, self._idle_s)
        self._held_s += seconds
        slack = HOLD_DRIFT * self._held_s + (IDLE_SLACK_S if self._longest_idle_s > SILENT_S else HOLD_SLACK_S)
        if isfinite(left.others) and self._debt.others > slack:
            return (
                f"a batch is held {self._debt.others:.1f} s longer than others need for the rest, {left.others:.1f} s"
            )
        if self._debt.reserved > slack:
            return f"a batch is held {self._debt.reserved:.1f} s longer than what its devices generated takes"
        return ""

    def _work(self, state: LedgerState) -> _Work:
        left = list(_unfinished(state))
        engines = state.engines.values()
        own = [engine for engine in engines if engine.pool is Pool.RESERVED]
        others = [engine for engine in engines if engine.pool is not Pool.RESERVED and _is_sound(state, engine)]
        ready = sum(group_tokens(state, number) for step in state.steps.values() for number in step.ready)
        alone = _seconds(others, left, self.paces) - ready * self._token_s if _hold(others, state, left) else inf
        return _Work(_seconds(own, left, self.paces), max(0.0, alone))


def _hold(others: Sequence[LeasedEngine], state: LedgerState, left: Sequence[tuple[int, int]]) -> bool:
    """Whether none of the rest can outgrow them, and go on where contexts are longer. What runs is given to none
    without the KV room for it, though one that is empty takes what waits."""
    longest = max((engine.capacity.max_context for engine in state.engines.values()), default=0)
    theirs = max((min(one.capacity.max_context, one.capacity.kv_tokens) for one in others), default=0)
    return all(min(room, longest) <= theirs for _, room in left)


def _done(before: float, after: float) -> float:
    """Seconds of work that were done meanwhile."""
    return inf if not (isfinite(before) and isfinite(after)) else max(0.0, before - after)


def _is_held(state: LedgerState, one: PendingRequest) -> bool:
    """Whether its batch could be delivered, and is not since engines generate."""
    wanted = one.request
    step = state.steps.get(step_key(wanted.step, wanted.purpose))
    if step is None or wanted.purpose is not Purpose.TRAIN or not _is_enough(state, step, one):
        return False
    phases = {engine.rest.phase for engine in state.engines.values() if engine.pool is Pool.RESERVED}
    return RestPhase.FALLING not in phases


def _is_enough(state: LedgerState, step: StepState, one: PendingRequest) -> bool:
    """Whether it fills a batch, or as much of it as was asked for at least."""
    wanted, samples, tokens = one.request, 0, 0
    for number in step.ready:
        size, weight = state.groups[number].group.n, group_tokens(state, number)
        if samples + size > wanted.max_samples or (samples and tokens + weight > wanted.max_tokens):
            return samples > 0
        samples, tokens = samples + size, tokens + weight
    return samples >= max(1, min(wanted.min_samples, wanted.max_samples))


def _unfinished(state: LedgerState) -> Iterable[tuple[int, int]]:
    """(tokens that it may still get, room that it may take) of each sample that is not over."""
    for number, entry in state.groups.items():
        budget = entry.group.sampling.max_new_tokens
        for index in range(entry.group.n):
            sample = state.samples[sample_id(number, index)]
            if sample.phase in _UNFINISHED:
                left = budget - sample.generated
                yield left, len(entry.group.prompt_ids) // 4 + sample.length + left


def _seconds(
    engines: Sequence[LeasedEngine], left: list[tuple[int, int]], paces: dict[str, Callable[[], float]]
) -> float:
    if not left:
        return 0.0
    size, slots_of_all, rate, slowest = max(room for _, room in left), 0, 0.0, 0.0
    for engine in engines:
        slots = min(engine.capacity.max_running, max(1, engine.capacity.kv_tokens // size))
        pace = PACE_SLACK * max(paces[engine.name](), engine.step_scale)
        slots_of_all, rate, slowest = slots_of_all + slots, rate + slots / pace, max(slowest, pace)
    if not rate:
        return inf
    bulk = sum(tokens for tokens, _ in left) / rate + TURN_S * len(left) / slots_of_all
    return bulk + max(tokens for tokens, _ in left) * slowest


def _is_sound(state: LedgerState, engine: LeasedEngine) -> bool:
    failed = isfinite(engine.quarantined_until) or engine.failures or engine.rejections
    serves = all(
        entry.group.min_version <= engine.version <= entry.group.max_version for entry in state.groups.values()
    )
    return bool(engine.step_scale) and serves and not (failed or engine.silent or engine.draining)
