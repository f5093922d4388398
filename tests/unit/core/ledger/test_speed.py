"""What is known of an engine's speed before it has generated anything."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from polyrl.ledger import speed
from polyrl.ledger.state import LeasedEngine
from polyrl.wire import WeightsLoaded, pack_ids
from polyrl_rollout.testing.flow import Flow, Speed
from polyrl_rollout.testing.stage import Stage

STEP_S = 0.02


def measured(stage: Stage, name: str) -> LeasedEngine:
    return stage.ledger.state.engines[name]


def tried(stage: Stage, name: str, step_s: float, read_s: float | None = None) -> None:
    """An engine whose agent says so; reading is fifty times as fast by default."""
    stage.engine(name, max_running=16)
    announce(stage, name, step_s, step_s / 50 if read_s is None else read_s)


def announce(stage: Stage, name: str, step_s: float, read_s: float, ago_s: float = inf) -> None:
    loaded = WeightsLoaded(
        0,
        0.1,
        load_seconds=0.1,
        bytes_pulled=100,
        step_seconds=step_s,
        read_seconds=read_s,
        tried_seconds_ago=ago_s,
    )
    stage.agent(name, loaded)


def idle(stage: Stage, name: str, seconds: float) -> None:
    """An engine that was measured at STEP_S, and gave its last token so long ago."""
    stage.engine(name, max_running=16)
    stage.pass_time_heard(seconds)
    engine = measured(stage, name)
    engine.step_scale = STEP_S / (1 + 1 / speed.HALF_BATCH)
    engine.prefill_s, engine.token_at, engine.line = STEP_S / 50, stage.now - seconds, (6.0, 6.0, 0.12, 6.0, 0.12)


def test_work_goes_by_what_agents_have_tried() -> None:
    """Without that the slow engine gets a sample, which waits there until it shows how slow it is."""
    stage = Stage()
    tried(stage, "fast", STEP_S)
    tried(stage, "slow", 10 * STEP_S)
    stage.submit(16)
    assert len(stage.placed()["fast"]) == 16


def test_an_engine_that_was_not_tried_gets_a_sample_to_show_it() -> None:
    stage = Stage()
    tried(stage, "fast", STEP_S)
    stage.engine("slow", max_running=16)
    stage.submit(16)
    assert stage.placed()["slow"]


def test_both_numbers_count_until_tokens_come() -> None:
    stage = Stage()
    tried(stage, "a", STEP_S)
    pace = speed.pace_of(measured(stage, "a"), 1.0)
    assert pace.step(1) == pytest.approx(STEP_S)
    assert pace.read(50) == pytest.approx(STEP_S)


def test_its_first_window_replaces_a_trial() -> None:
    """A first request may find kernels that are not compiled yet."""
    stage = Stage()
    tried(stage, "a", 100 * STEP_S)
    engine = measured(stage, "a")
    for tick in range(60):
        speed.observe_tokens(engine, 1, 1, tick * STEP_S)
    assert speed.pace_of(engine, 1.0).step(1) == pytest.approx(STEP_S, rel=0.05)


def test_an_engine_whose_trial_was_slow_is_tried_again_by_a_sample_once_that_is_old() -> None:
    """A neighbour may have had the device just then. Without that it never gets a sample, and shows no other speed."""
    stage = Stage()
    tried(stage, "fast", STEP_S)
    tried(stage, "slow", 10 * STEP_S)
    stage.submit(8)
    assert not stage.placed()["slow"]
    stage.finish_all()
    stage.pass_time_heard(speed.STALE_S + 1)
    stage.submit(8)
    assert len(stage.placed()["slow"]) == 1
    assert measured(stage, "slow").on_trial, "its next window replaces what was tried"


def test_a_trial_is_not_old_because_its_engine_greeted_long_before() -> None:
    """A start takes minutes."""
    stage = Stage()
    tried(stage, "fast", STEP_S)
    stage.engine("slow", version=-1, max_running=16)
    stage.pass_time_heard(speed.STALE_S + 1)
    announce(stage, "slow", 10 * STEP_S, STEP_S)
    stage.submit(8)
    assert not stage.placed()["slow"]


@pytest.mark.parametrize("step_s", [3.0, 10.0])
def test_samples_that_leave_replace_what_was_tried(step_s: float) -> None:
    """They leave an engine that turned slow before it shows a window: the next ones would go there again and again."""
    flow = Flow({"fast": Speed(STEP_S, max_running=64), "slow": Speed(step_s)}, lambda sample, turn: 300)
    for name in flow.engines:
        announce(flow, name, STEP_S, STEP_S / 50)
    flow.submit(16, max_new_tokens=400)
    begun = flow.run(100.0)
    flow.submit(16, max_new_tokens=400)
    assert not flow.placed()["slow"]
    assert flow.run(begun + 100.0) - begun < 300 * STEP_S * 1.5


def test_samples_that_leave_while_their_prompts_are_read_say_nothing_of_a_step() -> None:
    """The first engine with a step's weights gets all of it, and gives up what it has not come to: it is no slower."""
    stage = Stage()
    tried(stage, "a", STEP_S)
    stage.submit(8, prompt_ids=pack_ids([9] * 4000))
    tried(stage, "b", STEP_S)
    stage.pass_time_heard(2.0)
    stage.give_back()
    assert stage.placed()["b"]
    assert speed.pace_of(measured(stage, "a"), 1.0).step(1) == pytest.approx(STEP_S)


@pytest.mark.parametrize(
    ("idle_s", "ago_s", "step_s", "counts"),
    [
        pytest.param(20.0, 0.0, 10 * STEP_S, True, id="idle since, and slower"),
        pytest.param(20.0, 0.0, STEP_S / 3, True, id="or faster"),
        pytest.param(20.0, 9.0, 10 * STEP_S, True, id="said late"),
        pytest.param(20.0, 11.0, 10 * STEP_S, False, id="of just after its last token"),
        pytest.param(9.0, 0.0, 10 * STEP_S, False, id="hardly idle"),
        pytest.param(20.0, 25.0, 10 * STEP_S, False, id="of before its last token"),
        pytest.param(20.0, inf, 10 * STEP_S, False, id="an agent that does not say when"),
        pytest.param(9.0, -5.0, 10 * STEP_S, False, id="of a time to come"),
        pytest.param(20.0, nan, 10 * STEP_S, True, id="of no time is of now"),
        pytest.param(20.0, 0.0, 1.2 * STEP_S, False, id="about as measured"),
        pytest.param(20.0, 0.0, STEP_S / 1.2, False, id="about as measured, from below"),
        pytest.param(20.0, 0.0, 3.0, False, id="slower than is tried"),
    ],
)
def test_a_trial_replaces_what_tokens_said_of_an_engine_without_work_since(
    idle_s: float, ago_s: float, step_s: float, counts: bool
) -> None:
    stage = Stage()
    idle(stage, "a", idle_s)
    announce(stage, "a", step_s, step_s / 40, ago_s)
    pace = speed.pace_of(measured(stage, "a"), 1.0)
    assert pace.step(1) == pytest.approx(step_s if counts else STEP_S)
    assert pace.prefill_s == pytest.approx(step_s / 40 if counts else STEP_S / 50)


@pytest.mark.parametrize(
    "shown", [pytest.param({"tokens_per_s": 50.0}, id="tokens"), pytest.param({"on_trial": True}, id="who left it")]
)
def test_what_is_fast_only_without_work_is_tried_by_one_sample(shown: dict[str, Any]) -> None:
    """Else it gets all that waits whenever it was idle, and no step that it has a part in ends in time."""
    stage = Stage()
    idle(stage, "a", 20.0)
    engine = measured(stage, "a")
    for name, value in shown.items():
        setattr(engine, name, value)
    announce(stage, "a", STEP_S / 10, STEP_S / 500, 0.0)
    assert speed.pace_of(engine, 1.0).step(1) == pytest.approx(STEP_S)
    assert not speed.is_stale(engine, stage.now)
    stage.pass_time_heard(11.0)
    announce(stage, "a", STEP_S / 10, STEP_S / 500, 0.0)
    assert speed.is_stale(engine, stage.now)


def test_a_trial_is_by_one_sequence_on_an_engine_whose_batches_are_known() -> None:
    stage = Stage()
    idle(stage, "a", 20.0)
    measured(stage, "a").half_batch = 4.0
    announce(stage, "a", 10 * STEP_S, STEP_S, 0.0)
    assert speed.pace_of(measured(stage, "a"), 1.0).step(1) == pytest.approx(10 * STEP_S)


def test_of_an_engine_that_works_tokens_say_how_fast_it_is() -> None:
    stage = Stage()
    idle(stage, "a", 20.0)
    stage.submit(1)
    assert measured(stage, "a").running
    stage.pass_time_heard(20.0)
    announce(stage, "a", 10 * STEP_S, STEP_S, 0.0)
    assert speed.pace_of(measured(stage, "a"), 1.0).step(1) == pytest.approx(STEP_S)


def test_a_trial_that_is_said_again_is_no_other_one() -> None:
    """An agent repeats it with each version that it loads, and whenever it is asked what it serves."""
    stage = Stage()
    idle(stage, "a", 20.0)
    announce(stage, "a", 10 * STEP_S, STEP_S, 0.0)
    tried_at = measured(stage, "a").tried_at
    stage.pass_time_heard(15.0)
    announce(stage, "a", 10 * STEP_S, STEP_S, 15.0)
    assert measured(stage, "a").tried_at == tried_at
    announce(stage, "a", 10 * STEP_S, STEP_S, 0.0)
    assert measured(stage, "a").tried_at == tried_at + 15.0


def test_the_next_window_replaces_what_was_tried_anew() -> None:
    stage = Stage()
    idle(stage, "a", 20.0)
    announce(stage, "a", 10 * STEP_S, STEP_S, 0.0)
    engine = measured(stage, "a")
    for tick in range(60):
        speed.observe_tokens(engine, 1, 1, stage.now + tick * STEP_S)
    assert speed.pace_of(engine, 1.0).step(1) == pytest.approx(STEP_S, rel=0.05)


def test_no_sample_tries_an_engine_whose_agent_does_and_it_gets_work_when_that_says_so() -> None:
    stage = Stage()
    tried(stage, "fast", STEP_S)
    tried(stage, "slow", 10 * STEP_S)
    for _ in range(4):
        stage.pass_time_heard(20.0)
        announce(stage, "slow", 10 * STEP_S, STEP_S, 0.0)
    stage.submit(8)
    assert not stage.placed()["slow"]
    stage.finish_all()
    stage.pass_time_heard(20.0)
    announce(stage, "slow", STEP_S / 2, STEP_S / 100, 0.0)
    stage.submit(8)
    assert stage.placed()["slow"]


@pytest.mark.parametrize("claimed", [0.0, -1.0, 1e-9, 1e9, inf, -inf, nan])
def test_no_number_of_an_agent_is_believed_that_no_engine_has(claimed: float) -> None:
    stage = Stage()
    tried(stage, "a", claimed)
    assert (measured(stage, "a").step_scale, measured(stage, "a").prefill_s) == (0.0, 0.0)


@pytest.mark.parametrize("claimed", [-1.0, 2 * STEP_S, inf, nan])
def test_reading_a_token_takes_no_longer_than_making_one(claimed: float) -> None:
    stage = Stage()
    tried(stage, "a", STEP_S, claimed)
    assert measured(stage, "a").prefill_s == 0.0
    assert speed.pace_of(measured(stage, "a"), 1.0).prefill_s > 0
