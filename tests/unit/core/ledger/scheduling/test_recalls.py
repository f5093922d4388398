"""Who leaves a draining engine and in which order, and where a recalled sample goes."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import attrgetter

import msgspec
import pytest

from polyrl.ledger.causes import MoveCause
from polyrl.ledger.events import RecallSent
from polyrl.ledger.scheduling.cost import placement_request
from polyrl.ledger.scheduling.notice import reserve_of
from polyrl.ledger.scheduling.placement import place
from polyrl.ledger.scheduling.rebalance import rebalance
from polyrl.ledger.scheduling.recalls import complete_recall, recall
from polyrl.ledger.state import LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import Purpose
from polyrl_rollout.testing.stage import Stage

STEP_S = 0.1


@pytest.mark.parametrize(
    ("notice_s", "reserve_s"),
    [
        pytest.param(120.0, 2.0, id="a long notice"),
        pytest.param(8.0, 2.0, id="the shortest with a whole reserve"),
        pytest.param(4.0, 1.0, id="a share of a short one"),
        pytest.param(0.0, 0.0, id="none"),
        pytest.param(-1.0, 0.0, id="one that is over"),
    ],
)
def test_what_an_agent_keeps_of_its_notice(notice_s: float, reserve_s: float) -> None:
    assert reserve_of(notice_s) == reserve_s


@pytest.mark.parametrize(
    ("notice_s", "recalled", "order"),
    [
        pytest.param(200.0, (), [], id="everything can be finished"),
        pytest.param(60.0, (), [3], id="only the longest cannot"),
        pytest.param(8.0, (), [3, 2], id="the longest first"),
        pytest.param(0.5, (), [4, 3, 2, 1], id="evaluation before training"),
        pytest.param(8.0, (3,), [2], id="what is on its way already is not asked for again"),
        pytest.param(102.0, (), [3], id="the reserve is no time to generate in"),
    ],
)
def test_the_order_of_leaving(notice_s: float, recalled: tuple[int, ...], order: list[int]) -> None:
    """Assignments 1, 2, 3 and the evaluation 4 still need 1, 10, 100.5 and 0.9 s."""
    stage = Stage()
    stage.engine("a")
    for tokens in (10, 100, 1005):
        stage.submit(1, max_new_tokens=tokens)
    stage.submit(1, max_new_tokens=9, purpose=Purpose.EVAL)
    engine = stage.ledger.state.engines["a"]
    for number in recalled:
        stage.ledger.state.assignments[number].recall_cause = MoveCause.DRAINING
    stage.engine("b", max_running=64, max_context=100_000)
    for each in stage.ledger.state.engines.values():
        each.step_scale, each.half_batch = STEP_S, inf
    engine.draining, engine.drain_at = "notice", stage.now + notice_s
    transition = Transition(stage.ledger.state, stage.now)
    rebalance(transition, place(transition))
    assert [event.assignment for event in transition.effects.events if isinstance(event, RecallSent)] == order


def _smaller(state: LedgerState) -> None:
    state.engines["b"].capacity = msgspec.structs.replace(state.engines["b"].capacity, max_context=10)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda state: None, "b", id="its room is there"),
        pytest.param(lambda state: state.engines.pop("b"), "", id="the engine has gone"),
        pytest.param(lambda state: setattr(state.engines["b"], "quarantined_until", inf), "", id="it has failed"),
        pytest.param(lambda state: setattr(state.engines["b"], "version", 7), "", id="it serves another version"),
        pytest.param(lambda state: setattr(state.engines["b"], "draining", "notice"), "", id="it drains itself"),
        pytest.param(_smaller, "", id="it greeted again with less context"),
    ],
)
def test_where_a_recalled_sample_goes(change: Callable[[LedgerState], object], expected: str) -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.engine("b")
    state = stage.ledger.state
    transition = Transition(state, stage.now)
    recall(transition, 1, MoveCause.REBALANCED, to=state.engines["b"], request=placement_request(state, "0.0", 0.0))
    assert state.engines["b"].occupied == 1, "room is set aside"
    change(state)
    complete_recall(transition, 1)
    number = state.samples["0.0"].assignment
    assert (state.assignments[number].engine if number else "") == expected
    assert all(not engine.reserved_kv for engine in state.engines.values())


@pytest.mark.parametrize(
    ("recall_cause", "draining", "cause"),
    [
        pytest.param(MoveCause.WINDOW, "", MoveCause.WINDOW, id="as it was asked for"),
        pytest.param(None, "notice", MoveCause.DRAINING, id="forgotten, of an engine that drains"),
        pytest.param(None, "", MoveCause.REBALANCED, id="forgotten, of one that does not"),
    ],
)
def test_the_cause_of_the_move(recall_cause: MoveCause | None, draining: str, cause: MoveCause) -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    transition = Transition(stage.ledger.state, stage.now)
    stage.ledger.state.assignments[1].recall_cause = recall_cause
    stage.ledger.state.engines["a"].draining = draining
    complete_recall(transition, 1)
    assert list(map(attrgetter("cause"), transition.effects.events)) == [cause]
