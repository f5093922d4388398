"""When the trainer's own devices generate, and when they learn."""

from __future__ import annotations

import pytest

from polyrl.ledger.events import RecallSent
from polyrl.ledger.scheduling.window import SHORTEST_CLOSED_S, opens_in
from polyrl.sample import Pool, Purpose
from polyrl.wire import Batch, Deregister, EndStep, Recall
from polyrl_rollout.testing.stage import Stage, sent


def a_step(others: int, *, learning_s: float = 0.01, others_step_s: float = 0.02) -> Stage:
    """A reserved engine, and others of eight slots each, run groups of one; the first is scored. Each sample has 100
    tokens at most, turns are too few to say that they will be shorter."""
    stage = Stage()
    stage.engine("r", Pool.RESERVED, max_running=64)
    for index in range(others):
        stage.engine(f"s{index}", max_running=8)
    stage.submit(16)
    state = stage.ledger.state
    state.learner.token_s = learning_s
    for engine in state.engines.values():
        engine.step_scale = 0.02 if engine.pool is Pool.RESERVED else others_step_s
    (number, *_) = state.engines["r"].running
    sample = state.assignments[number].sample
    stage.tokens("r", number, [5, 2], "stop")
    stage.score(sample)
    return stage


def test_alone_the_reserved_engines_generate_until_all_is_done() -> None:
    stage = a_step(others=0)
    assert not sent(stage.ask(), Batch)
    for number in tuple(stage.ledger.state.assignments):
        sample = stage.ledger.state.assignments[number].sample
        stage.tokens("r", number, [5, 2], "stop")
        outcome = stage.score(sample)
    (batch,) = sent(outcome, Batch)
    assert len(batch.samples) == 16
    assert not stage.ledger.state.window_open


def test_with_many_others_learning_begins_with_the_first_batch_and_they_take_over() -> None:
    outcome = (stage := a_step(others=8, learning_s=1.0)).ask()
    assert len(sent(outcome, Batch)) == 1
    assert not stage.ledger.state.window_open
    assert len(sent(outcome, Recall)) == len(stage.ledger.state.engines["r"].running) > 0


@pytest.mark.parametrize(
    ("prefill_s", "held"),
    [pytest.param(0.001, False, id="in no time"), pytest.param(10_000.0, True, id="longer than learning takes")],
)
def test_a_batch_is_held_back_while_reading_what_runs_here_would_take_others_long(prefill_s: float, held: bool) -> None:
    """They would read it first, prompt and response; a second of work was left alone for ten seconds of learning."""
    stage = a_step(others=8, learning_s=1.0)
    for engine in stage.ledger.state.engines.values():
        engine.prefill_s = 0.001 if engine.pool is Pool.RESERVED else prefill_s
    assert stage.ledger.state.engines["r"].running
    assert bool(sent(stage.ask(), Batch)) is not held


def test_what_others_run_already_is_not_read_by_them() -> None:
    stage = a_step(others=8, learning_s=1.0)
    for engine in stage.ledger.state.engines.values():
        engine.prefill_s = 0.001 if engine.pool is Pool.RESERVED else 300.0
    _, *rest = stage.ledger.state.engines["r"].running
    for number in rest:
        sample = stage.ledger.state.assignments[number].sample
        stage.tokens("r", number, [5, 2], "stop")
        stage.score(sample)
    assert sent(stage.ask(), Batch)


def test_a_batch_is_held_back_while_one_small_engine_would_take_long() -> None:
    stage = a_step(others=1, others_step_s=0.2)
    assert not sent(stage.ask(), Batch)
    assert stage.ledger.state.window_open


def test_a_tick_meanwhile_does_not_forget_the_next_look_at_a_batch_that_is_held_back() -> None:
    """It waited for whatever came next instead, seconds later, although nothing was left to wait for."""
    stage = a_step(others=0)
    stage.ask()
    held_until = stage.ledger.state.learner.held_until
    assert stage.now < held_until == stage.ledger.next_due()
    stage.pass_time(0.1)
    assert stage.ledger.next_due() == held_until


@pytest.mark.parametrize("at", [29.0, 31.0])
def test_half_of_the_requests_time_is_the_longest_that_a_batch_is_held_back(at: float) -> None:
    stage = a_step(others=0)
    stage.ask(deadline_s=60.0)
    for _ in range(int(at)):
        stage.now += 1.0
        for number in tuple(stage.ledger.state.engines["r"].running):
            stage.tokens("r", number, [5])
        stage.pass_time(0.0)
    assert (not stage.ledger.state.window_open) is (at > 30.0)


def test_evaluation_is_never_held_back() -> None:
    stage = Stage()
    stage.engine("r", Pool.RESERVED)
    stage.submit(2, purpose=Purpose.EVAL)
    stage.tokens("r", 1, [5, 2], "stop")
    stage.score("0.0")
    assert sent(stage.ask(purpose=Purpose.EVAL), Batch)
    assert stage.ledger.state.window_open, "nobody learns from it"


def learning() -> Stage:
    """The trainer learns a batch; a fast engine has taken over all but what it has no slot for."""
    stage = a_step(others=1, learning_s=1.0)
    stage.ask()
    assert not stage.ledger.state.window_open
    stage.give_back()
    return stage


def test_only_what_others_finish_sooner_is_handed_over() -> None:
    stage = learning()
    assert len(stage.placed()["s0"]) == 8, "it is full"
    assert stage.placed()["r"], "what is left waits for the devices"


def test_what_waits_for_the_devices_is_not_stalled() -> None:
    stage = learning()
    left = stage.placed()["r"]
    stage.pass_time_heard(100)
    assert set(left) <= set(stage.placed()["r"])
    assert not stage.ledger.state.engines["r"].failures


@pytest.mark.parametrize("sign", ["ask", "acknowledge"])
def test_the_window_opens_when_the_trainer_waits_and_work_is_taken_back(sign: str) -> None:
    stage = learning()
    for number in stage.ledger.state.engines["s0"].running:
        stage.ledger.state.assignments[number].at = stage.ledger.state.samples[
            stage.ledger.state.assignments[number].sample
        ].moved_at = -100.0
    stage.ledger.state.engines["s0"].step_scale = 1.0
    stage.now += 10.0
    outcome = stage.ask() if sign == "ask" else stage.acknowledge(0)
    assert stage.ledger.state.window_open
    assert any(isinstance(event, RecallSent) and event.to == "r" for event in outcome.events)


def test_learning_is_measured_from_the_batch_to_the_next_request() -> None:
    stage = Stage()
    stage.engine("s")
    stage.submit(2)
    stage.finish_all()
    stage.ask(most=1)
    stage.now += 6.0
    stage.ask(most=1)
    assert stage.ledger.state.learner.token_s == pytest.approx(6.0 / 12), "10 tokens of prompt and 2 of response"


@pytest.mark.parametrize("sign", ["the step before ends", "an evaluation ends", "the batch before is acknowledged"])
def test_what_ends_beside_a_batch_that_is_learned_opens_no_window(sign: str) -> None:
    """The trainer's engines generated, or woke, beside the learner, which seemed to learn far faster than it does."""
    stage = Stage()
    stage.engine("r", Pool.RESERVED, max_running=64)
    stage.engine("s", max_running=64)
    stage.submit(4)
    stage.submit(4, step=1)
    stage.submit(1, step=1, purpose=Purpose.EVAL)
    stage.finish_all()
    stage.ask(most=4)
    if sign != "the batch before is acknowledged":
        stage.acknowledge(0)
    stage.ask(step=1, most=4)
    learner = stage.ledger.state.learner
    learner.token_s = 0.25
    stage.now += 1.0
    if sign == "the step before ends":
        stage.trainer(EndStep(stage.request(), 0, purpose=Purpose.TRAIN))
    elif sign == "an evaluation ends":
        stage.trainer(EndStep(stage.request(), 1, purpose=Purpose.EVAL))
    else:
        stage.acknowledge(0)
    assert not stage.ledger.state.window_open
    stage.now += 11.0
    stage.acknowledge(1)
    assert stage.ledger.state.window_open
    assert learner.token_s == pytest.approx(0.25), "48 tokens in 12 s"


def test_the_end_of_its_own_step_ends_what_is_learned() -> None:
    stage = learning()
    stage.trainer(EndStep(stage.request(), 0, purpose=Purpose.TRAIN))
    assert stage.ledger.state.window_open


def test_what_is_generated_ahead_keeps_the_window_closed_no_longer() -> None:
    stage = learning()
    reserved = stage.ledger.state.engines["r"]
    alone = opens_in(stage.ledger.state, reserved, stage.now)
    assert alone > SHORTEST_CLOSED_S
    stage.submit(50, step=1)
    assert opens_in(stage.ledger.state, stage.ledger.state.engines["r"], stage.now) == alone
    stage.submit(4)
    assert opens_in(stage.ledger.state, stage.ledger.state.engines["r"], stage.now) > alone


def test_what_an_earlier_step_left_over_is_learned_with_the_one_that_trains() -> None:
    """And what comes of that one is, until the window opens."""
    stage = learning()
    state = stage.ledger.state
    stage.engine("s1")
    stage.submit(2, step=1)
    number = max(state.engines["s1"].running)
    sample = state.assignments[number].sample
    assert state.groups[state.samples[sample].group].group.step == 1
    stage.tokens("s1", number, [5, 2], "stop")
    stage.score(sample)
    stage.ask(step=1, most=1)
    assert not state.window_open
    opens_s = opens_in(state, state.engines["r"], stage.now)
    stage.submit(4, step=1)
    longer_s = opens_in(state, state.engines["r"], stage.now)
    stage.submit(4, step=2)
    assert SHORTEST_CLOSED_S < opens_s < longer_s == opens_in(state, state.engines["r"], stage.now)


def test_outside_the_window_reserved_engines_get_only_what_nobody_else_could_take() -> None:
    stage = learning()
    stage.submit(4)
    assert len(stage.ledger.state.queue) == 4
    stage.agent("s0", Deregister("gone"))
    assert not stage.ledger.state.queue
