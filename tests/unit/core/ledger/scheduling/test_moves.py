"""How an assignment ends: when a turn is over although nobody said so, who is believed, how long an engine pauses."""

from __future__ import annotations

from math import inf

import pytest

from polyrl.ledger.events import EngineQuarantined, GroupDiscarded, MoveCause
from polyrl.ledger.scheduling.moves import already_over, half_open, move, quarantine
from polyrl.ledger.transition import Transition
from polyrl.sample import Finish
from polyrl.wire import Cancel, pack_ids
from polyrl_rollout.testing.stage import Stage, sent

STOP = 2


def one_running(**fields: int) -> tuple[Stage, Transition]:
    """Engine `a` runs sample 0.0 as assignment 1."""
    stage = Stage()
    stage.engine("a")
    stage.submit(1, **fields)
    return stage, Transition(stage.ledger.state, stage.now)


@pytest.mark.parametrize(
    ("ids", "generated", "turn_start", "expected"),
    [
        pytest.param([], 0, 0, None, id="nothing yet"),
        pytest.param([5], 1, 0, None, id="an ordinary token"),
        pytest.param([5, STOP], 2, 0, Finish.STOP, id="its finish was lost with the engine"),
        pytest.param([STOP, 5], 2, 0, None, id="a stop token amid the response"),
        pytest.param([5, 5, 5, 5], 4, 0, Finish.LENGTH, id="the budget is used up"),
        pytest.param([5, 5, 5, STOP], 4, 0, Finish.STOP, id="the last token of the budget stops it"),
        pytest.param([5, STOP], 1, 2, None, id="an environment wrote the stop token"),
        pytest.param([5] * 6, 2, 6, None, id="what an environment writes costs no budget"),
    ],
)
def test_a_turn_that_is_over_without_a_word(
    ids: list[int], generated: int, turn_start: int, expected: Finish | None
) -> None:
    _, transition = one_running(max_new_tokens=4)
    sample = transition.state.samples["0.0"]
    sample.ids += pack_ids(ids)
    sample.generated, sample.turn_start = generated, turn_start
    assert already_over(transition, sample) is expected


@pytest.mark.parametrize(
    ("failures", "first_pause_s", "pause_s"),
    [
        pytest.param(0, None, 1.0, id="the first"),
        pytest.param(1, None, 2.0, id="twice as long"),
        pytest.param(5, None, 32.0, id="and so on"),
        pytest.param(6, None, 60.0, id="up to the longest"),
        pytest.param(5000, None, 60.0, id="for ever"),
        pytest.param(0, 30.0, 30.0, id="a stalled one begins with its deadline"),
        pytest.param(1, 30.0, 60.0, id="which doubles too"),
    ],
)
def test_pauses_of_an_engine_that_fails(failures: int, first_pause_s: float | None, pause_s: float) -> None:
    stage, transition = one_running()
    engine = transition.state.engines["a"]
    engine.failures = failures
    quarantine(transition, "a", MoveCause.ENGINE_ERROR, first_pause_s)
    assert (engine.quarantined_until - stage.now, engine.failures) == (pause_s, failures + 1)


@pytest.mark.parametrize(
    ("times", "pause_s"),
    [
        pytest.param(1, 0.0, id="once may be an accident"),
        pytest.param(2, 1.0, id="twice"),
        pytest.param(3, 2.0, id="twice as long"),
        pytest.param(9, 60.0, id="up to the longest"),
    ],
)
def test_pauses_of_an_engine_that_had_gone_silent(times: int, pause_s: float) -> None:
    stage, transition = one_running()
    transition.state.vanished["a"] = (times, stage.now)
    half_open(transition, "a")
    (event,) = [event for event in transition.effects.events if isinstance(event, EngineQuarantined)]
    assert (event.quarantined_until - stage.now, event.cause) == (pause_s, "returned")


@pytest.mark.parametrize(
    ("cause", "rejections", "discarded"),
    [
        pytest.param(MoveCause.REJECTED, 1, False, id="two engines may be wrong"),
        pytest.param(MoveCause.REJECTED, 2, True, id="three are believed"),
        pytest.param(MoveCause.LOST, 2, False, id="no other cause speaks of the sample"),
    ],
)
def test_who_is_believed_about_a_sample(cause: MoveCause, rejections: int, discarded: bool) -> None:
    _, transition = one_running()
    transition.state.samples["0.0"].rejections = rejections
    move(transition, 1, cause, detail="too long")
    reasons = [event.detail for event in transition.effects.events if isinstance(event, GroupDiscarded)]
    assert reasons == (["engines refused it 3 times: too long"] if discarded else [])


@pytest.mark.parametrize("cancel", [True, False], ids=["it still runs there", "its engine gave it back"])
def test_an_engine_that_still_runs_it_is_stopped(cancel: bool) -> None:
    _, transition = one_running()
    move(transition, 1, MoveCause.STALLED, cancel=cancel)
    assert sent(transition.effects, Cancel) == ([Cancel(1)] if cancel else [])
    assert (transition.state.samples["0.0"].avoid, transition.state.assignments) == ("a", {})
    assert transition.state.samples["0.0"].moved_at > -inf
