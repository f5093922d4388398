"""When an idle engine takes running samples from a loaded one.

    stay = expected_tokens * step_seconds(victim, running)
    go   = expected_tokens * step_seconds(thief, running + 1) + prefill_seconds(thief, prompt + response) + 2 * delta_s

A sample moves only when `stay - go` exceeds both GAIN_S and GAIN_SHARE of `stay`: the numbers are estimates, tokens on
their way are lost by a move, and a wrong move costs what a right one gains. Hysteresis: a sample that moved stays put
for REST_S, and only an engine that is quite empty takes.

Refuses to hold: waiting samples (`placement` takes those first). Read next: `leases`.
"""

from __future__ import annotations

from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.decision import Decision
from polyrl.ledger.moves import move
from polyrl.ledger.placement import assign, has_slot
from polyrl.ledger.reserved import may_generate
from polyrl.ledger.state import Engine, Phase, State

GAIN_S: Final = 0.5
"""Seconds that a move must promise: above the noise of measured speeds over one window."""

GAIN_SHARE: Final = 0.25
"""Share of the remaining time that a move must promise."""

REST_S: Final = 5.0
"""A sample moves at most this often for speed's sake."""


def rebalance(d: Decision) -> None:
    """Lets each empty engine take from the most loaded one."""
    if d.state.queue or len(d.state.engines) < 2:
        return
    for thief in d.state.engines.values():
        if not thief.running and has_slot(thief, d.now):
            _take_from(d, thief, most_loaded(d.state))


def most_loaded(state: State) -> Engine:
    """The engine on which one more token takes longest."""
    fleet = speed.fleet_scale(state)
    return max(
        state.engines.values(),
        key=lambda e: speed.step_seconds(speed.scale_of(e, fleet), len(e.running)) * bool(e.running),
    )


def _take_from(d: Decision, thief: Engine, victim: Engine) -> None:
    fleet = speed.fleet_scale(d.state)
    numbers = sorted(victim.running, key=lambda n: -_expected(d.state, n))
    for number in numbers:
        if not has_slot(thief, d.now) or len(thief.running) + 1 >= len(victim.running):
            return
        if _worthwhile(d, number, victim, thief, fleet):
            name = d.state.assignments[number].sample
            move(d, number, "rebalanced")
            if d.state.samples[name].phase is Phase.WAITING:
                assign(d, name, thief)


def _expected(state: State, number: int) -> int:
    return speed.expected_tokens(state, state.samples[state.assignments[number].sample])


def _worthwhile(d: Decision, number: int, victim: Engine, thief: Engine, fleet: float) -> bool:
    assignment = d.state.assignments[number]
    sample = d.state.samples[assignment.sample]
    if sample.moved_at + REST_S > d.now or assignment.at + speed.WINDOW_S > d.now:
        return False
    if not may_generate(d.state, thief, assignment.low, assignment.high, d.now):
        return False
    context = len(d.state.groups[sample.group].group.prompt_ids) // 4 + sample.length
    tokens = speed.expected_tokens(d.state, sample)
    if (
        context + assignment.limit - assignment.length > thief.max_context
        or thief.kv + context + tokens > thief.kv_tokens
    ):
        return False
    return gain(tokens, context, (victim, len(victim.running)), (thief, len(thief.running)), fleet, d.config.delta_s)


def gain(
    tokens: int, context: int, victim: tuple[Engine, int], thief: tuple[Engine, int], fleet: float, delta_s: float
) -> bool:
    """Whether moving one sample pays; engines with their numbers of running samples before the move."""
    there, here = speed.scale_of(victim[0], fleet), speed.scale_of(thief[0], fleet)
    stay = tokens * speed.step_seconds(there, victim[1])
    go = tokens * speed.step_seconds(here, thief[1] + 1) + speed.prefill_seconds(here, context) + 2 * delta_s
    return stay - go > max(GAIN_S, GAIN_SHARE * stay)
