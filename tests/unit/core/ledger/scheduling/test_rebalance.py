"""Who takes running samples from whom."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec
import pytest

from polyrl.ledger import speed
from polyrl.ledger.events import RecallSent
from polyrl.ledger.scheduling.rebalance import gain, rebalance
from polyrl.ledger.state import LedgerState
from polyrl.ledger.transition import Transition
from polyrl.wire import (
    Deregister,
    Recall,
)
from polyrl_rollout.testing.stage import Stage, sent


def pace(step_s: float) -> speed.Pace:
    return speed.Pace(step_s, speed.HALF_BATCH, prefill_s=step_s / speed.PREFILL_RATIO)


@pytest.mark.parametrize(
    ("victim", "victim_running", "thief", "context", "moves"),
    [
        pytest.param(0.02, 2, 0.02, 100, False, id="equals"),
        pytest.param(0.20, 2, 0.02, 100, True, id="ten times slower"),
        pytest.param(0.02, 60, 0.02, 100, True, id="much fuller"),
        pytest.param(0.02, 60, 0.02, 100_000, False, id="much fuller, but all must be read again"),
        pytest.param(0.02, 10, 0.02, 100, False, id="a little fuller"),
    ],
)
def test_moving_must_pay(victim: float, victim_running: int, thief: float, context: int, moves: bool) -> None:
    assert gain(500, context, (pace(victim), victim_running), (pace(thief), 0), 0.03) is moves


def slow_beside_fast(samples: int, **room: int) -> Stage:
    """A slow engine runs them, and a fast one has just come; `room` is its."""
    stage = Stage()
    stage.engine("slow")
    stage.submit(samples)
    stage.ledger.state.engines["slow"].step_scale = 0.5
    stage.pass_time(2.0)
    stage.engine("fast", **room)
    stage.ledger.state.engines["fast"].step_scale = 0.01
    return stage


def test_an_idle_fast_engine_takes_from_a_slow_one_and_nothing_flaps() -> None:
    stage = slow_beside_fast(4)
    outcome = stage.pass_time(0.5)
    assert len(sent(outcome, Recall)) == 4
    assert not stage.pass_time(0.1).to_agents, "once is enough"
    assert {name: len(samples) for name, samples in stage.placed().items()} == {"slow": 4, "fast": 0}
    stage.give_back()
    assert {name: len(samples) for name, samples in stage.placed().items()} == {"slow": 0, "fast": 4}
    before = stage.placed()
    stage.pass_time_heard(10)
    assert stage.placed() == before


def test_room_that_is_set_aside_is_given_to_nobody_else_and_comes_free_again() -> None:
    stage = slow_beside_fast(2, max_running=2)
    stage.pass_time(0.5)
    stage.submit(1)
    assert stage.placed()["fast"] == [], "it goes where there is room"
    stage.tokens("slow", stage.number("0.0"), [5, 2], "stop")
    stage.submit(1)
    assert stage.placed()["fast"] == ["3.0"], "one of those it waited for has ended"
    stage.give_back()
    assert sorted(stage.placed()["fast"]) == ["1.0", "3.0"]


def test_a_sample_whose_new_engine_has_gone_waits_like_any_other() -> None:
    stage = slow_beside_fast(1)
    stage.pass_time(0.5)
    stage.agent("fast", Deregister("gone"))
    stage.give_back()
    assert stage.placed() == {"slow": ["0.0"]}


def _small(state: LedgerState) -> None:
    state.engines["fast"].capacity = msgspec.structs.replace(state.engines["fast"].capacity, kv_tokens=50)


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        pytest.param(lambda state, now: None, 1, id="nothing is against it"),
        pytest.param(lambda state, now: setattr(state.engines["fast"], "step_scale", 0.45), 0, id="hardly faster"),
        pytest.param(lambda state, now: setattr(state.engines["fast"], "version", 1), 0, id="of another version"),
        pytest.param(lambda state, now: setattr(state.engines["fast"], "failures", 1), 1, id="half open: one sample"),
        pytest.param(lambda state, now: setattr(state.engines["fast"], "quarantined_until", inf), 0, id="it pauses"),
        pytest.param(lambda state, now: _small(state), 0, id="no KV room"),
        pytest.param(lambda state, now: setattr(state.engines["slow"], "draining", "notice"), 0, id="a drain decides"),
        pytest.param(lambda state, now: setattr(state.engines["slow"], "on_trial", True), 0, id="it measures"),
        pytest.param(lambda state, now: setattr(state.samples["0.0"], "moved_at", now - 4.9), 0, id="it just moved"),
        pytest.param(lambda state, now: setattr(state.samples["0.0"], "moved_at", now - 5.1), 1, id="it has rested"),
        pytest.param(lambda state, now: setattr(state.assignments[1], "at", now - 0.9), 0, id="it just began"),
        pytest.param(lambda state, now: setattr(state, "balanced_at", now - 0.2), 0, id="the search pauses"),
        pytest.param(lambda state, now: setattr(state, "balanced_at", now - 0.3), 1, id="the pause is over"),
        pytest.param(lambda state, now: state.queue.append((0, 9)), 0, id="who waits goes first"),
    ],
)
def test_what_speaks_against_a_move(change: Callable[[LedgerState, float], None], moves: int) -> None:
    stage = slow_beside_fast(1)
    change(stage.ledger.state, stage.now)
    transition = Transition(stage.ledger.state, stage.now)
    rebalance(transition)
    assert sum(isinstance(event, RecallSent) for event in transition.effects.events) == moves
