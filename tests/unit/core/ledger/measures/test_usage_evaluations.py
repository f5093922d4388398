"""An evaluation while steps are generated ahead: what it takes of engines is no part of the steps that it holds up."""

from __future__ import annotations

import pytest

from polyrl.ledger.apply.work import count_work
from polyrl.ledger.measures.usage import EVALUATION, EngineWork, Usage
from polyrl.ledger.speed import HALF_BATCH
from polyrl.sample import Purpose
from polyrl.status import StepValue
from polyrl.wire import TrainerReport
from polyrl_rollout.testing.stage import Stage

EVAL_STEP = 7
REPORTED_S = 90.0
"""The trainer knows no better."""
TIMES = {StepValue.ROLLOUT_SECONDS: REPORTED_S, StepValue.TRAIN_SECONDS: 4.0, StepValue.STEP_SECONDS: 12.0}


def rollout_s(stage: Stage, step: int) -> float:
    """As the manager says once the trainer has reported the step."""
    values = {str(name): seconds for name, seconds in TIMES.items()}
    stage.trainer(TrainerReport(stage.request(), "rl", step=step, values=values))
    newest = stage.ledger.status(stage.now).finished_steps[-1]
    assert (newest.step, newest.steady) == (step, True)
    return newest.rollout_seconds


class CountedQueue(list[tuple[int, int, int]]):
    """Counts how often it is read."""

    read = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        self.read += 1
        return super().__getitem__(place)


def test_the_queue_is_not_read_whole_where_each_group_has_a_priority_of_its_own() -> None:
    """At each end of a turn; what it costs to find the next priority grows by the logarithm."""
    read = []
    for groups in (100, 1600):
        stage = Stage()
        stage.engine("a", max_running=1)
        for priority in range(groups):
            stage.submit(priority=priority)
        state = stage.ledger.state
        state.queue = CountedQueue(state.queue)
        (engine,) = state.engines.values()
        count_work(state, engine, stage.now + 1.0)
        read.append(state.queue.read)
    assert read[1] <= 2 * read[0], read


def finish(stage: Stage, *samples: str) -> None:
    for sample in samples:
        live = stage.ledger.state.assignments[stage.number(sample)]
        stage.tokens(live.engine, stage.number(sample), [5, 2], "stop")
        stage.score(sample)


@pytest.mark.parametrize("priority", [0, 1, -1])
@pytest.mark.parametrize("evaluation_s", [0.0, 8.0, 80.0])
def test_where_a_step_waits_an_evaluation_takes_none_of_its_time(evaluation_s: float, priority: int) -> None:
    """Each step of two samples of 8 s, one after the other; between those of step 2 an evaluation of two."""
    stage = Stage()
    stage.engine("a", max_running=1)
    for step in (1, 2):
        stage.submit(2, step=step, priority=priority)
    for sample in ("0.0", "1.0"):
        stage.now += 8.0
        finish(stage, sample)
    assert rollout_s(stage, 1) == 16.0
    evaluated = ("4.0", "5.0") if evaluation_s else ()
    if evaluated:
        stage.submit(len(evaluated), step=EVAL_STEP, purpose=Purpose.EVAL, priority=priority)
    stage.now += 8.0
    finish(stage, "2.0")
    for sample in evaluated:
        stage.now += evaluation_s / len(evaluated)
        finish(stage, sample)
    stage.submit(2, step=3, priority=priority)
    stage.now += 8.0
    finish(stage, "3.0")
    assert rollout_s(stage, 2) == 16.0


@pytest.mark.parametrize("max_running", [3, 8], ids=["full", "not full"])
def test_where_no_sample_waits_an_evaluation_takes_what_it_adds_to_the_batch(max_running: int) -> None:
    stage = Stage()
    stage.engine("a", max_running=max_running)
    for step in (1, 2):
        stage.submit(1, step=step)
    stage.now = 10.0
    finish(stage, "0.0")
    assert rollout_s(stage, 1) == 5.0
    stage.submit(2, step=EVAL_STEP, purpose=Purpose.EVAL)
    stage.now = 20.0
    finish(stage, "2.0", "3.0")
    stage.submit(1, step=3)
    stage.now = 30.0
    finish(stage, "1.0")
    added_s = 10.0 * 2 / 3 * 3 / (HALF_BATCH + 3)
    assert rollout_s(stage, 2) == pytest.approx((30.0 - added_s) / 2, abs=1e-3)


@pytest.mark.parametrize(
    ("ends_at", "expected"),
    [
        pytest.param(8.0, 4.0, id="before the evaluation"),
        pytest.param(16.0, 6.5, id="in its midst"),
        pytest.param(28.0, 11.5, id="after it"),
    ],
)
def test_what_an_evaluation_takes_after_a_steps_last_turn_is_not_taken_of_it(ends_at: float, expected: float) -> None:
    """An engine of two evaluates from 10 s to 20 s, which is known when that ends."""
    usage, evaluates = Usage(), EngineWork(10.0, {EVALUATION: 1})
    usage.change_present(2, 0.0)
    for step in (1, 2):
        usage.submit(str(step), step, 0.0)
    for at in sorted([20.0, ends_at]):
        if at == ends_at:
            usage.end_turn("1", at)
        else:
            usage.work(evaluates, at, 1.0, batched=1.0, waits_from=1)
    usage.finish("1", {str(name): seconds for name, seconds in TIMES.items()})
    assert usage.finished[-1].rollout_seconds == expected
    assert usage.finished[-1].evaluation_engine_seconds == 10.0
