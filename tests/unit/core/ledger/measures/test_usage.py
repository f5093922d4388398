"""Engine-seconds of each finished step, over a fleet that changes, and what one more engine would have saved."""

from __future__ import annotations

from random import Random

import pytest

from polyrl.ledger.apply import apply
from polyrl.ledger.events import WindowSet
from polyrl.ledger.journal import decode_state, encode_state
from polyrl.ledger.measures.usage import SIZES, STEPS_PER_SIZE, keep_step
from polyrl.sample import Pool, Purpose
from polyrl.status import FinishedStep, StepValue
from polyrl.wire import EndStep, TrainerHello, TrainerReport
from polyrl_rollout.testing.flow import Flow, Speed
from polyrl_rollout.testing.stage import Stage, replay

TIMES = {StepValue.ROLLOUT_SECONDS: 10.0, StepValue.TRAIN_SECONDS: 4.0, StepValue.STEP_SECONDS: 12.0}


def end(stage: Stage, step: int, phase: str = "rl", **values: float) -> None:
    """The trainer wants nothing more of it, and reports."""
    stage.trainer(EndStep(stage.request(), step, purpose=Purpose.TRAIN))
    stage.trainer(TrainerReport(stage.request(), phase, step=step, values={**TIMES, **values}))


def newest(stage: Stage) -> FinishedStep:
    return stage.ledger.status(stage.now).finished_steps[-1]


def finish(stage: Stage, sample: str) -> None:
    live = stage.ledger.state.assignments[stage.number(sample)]
    stage.tokens(live.engine, stage.number(sample), [5, 2], "stop")
    stage.score(sample)


def test_busy_seconds_over_engines_that_come_and_go() -> None:
    stage = Stage()
    stage.engine("a", max_running=1)
    stage.submit(3, step=1)  # 0.0 runs on a
    stage.now = 4.0
    stage.engine("b", max_running=1)  # 1.0 runs on b
    stage.now = 6.0
    finish(stage, "0.0")  # 2.0 runs on a
    stage.now = 9.0
    stage.drain("b", 0.0)
    stage.pass_time(0.0)  # 1.0 waits again: b was busy for 5 s
    stage.now = 10.0
    finish(stage, "2.0")  # 1.0 runs on a
    stage.now = 16.0
    finish(stage, "1.0")  # a was busy for 16 s
    stage.now = 30.0
    end(stage, 1)
    step = newest(stage)
    assert step.busy_engine_seconds == 21.0
    assert step.engines == round((16 + 5) / 16, 3), "what came after its last turn is no part of it"
    assert step.shared_engine_seconds == 21.0, "every engine was full all the time"
    assert step.next_engine_saves_seconds == pytest.approx(21 / (step.engines * (step.engines + 1)), abs=0.01)
    assert (step.rollout_seconds, step.train_seconds, step.step_seconds) == (10.0, 4.0, 12.0)


def test_an_engine_of_two_works_for_each_in_proportion_and_evaluations_are_set_apart() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(3, step=1)
    stage.submit(1, step=7, purpose=Purpose.EVAL)
    stage.now = 8.0
    stage.finish_all()
    end(stage, 1)
    assert (newest(stage).busy_engine_seconds, newest(stage).evaluation_engine_seconds) == (6.0, 2.0)
    stage.now = 100.0
    stage.submit(1, step=2)
    stage.now = 103.0
    stage.finish_all()
    end(stage, 2)
    assert (newest(stage).busy_engine_seconds, newest(stage).evaluation_engine_seconds) == (3.0, 0.0)


def test_a_sample_that_runs_alone_is_not_shared() -> None:
    stage = Stage()
    for name in ("a", "b"):
        stage.engine(name)
    stage.submit(2, step=1)
    stage.now = 8.0
    stage.finish_all()
    end(stage, 1)
    step = newest(stage)
    assert (step.busy_engine_seconds, step.shared_engine_seconds, step.next_engine_saves_seconds) == (16.0, 0.0, 0.0)


def test_reserved_engine_counts_while_it_may_generate() -> None:
    stage = Stage()
    stage.engine("r", Pool.RESERVED, max_running=1)
    stage.submit(2, step=1)
    stage.engine("a", max_running=1)
    stage.now = 4.0
    finish(stage, "0.0")
    apply(stage.ledger.state, WindowSet(False, 4.0))
    stage.now = 9.0
    finish(stage, "1.0")
    end(stage, 1)
    assert newest(stage).engines == round((2 * 4 + 1 * 5) / 9, 3)
    assert newest(stage).busy_engine_seconds == 4 + 9


@pytest.mark.parametrize(
    ("steps", "turn_s", "max_running", "expected"),
    [
        pytest.param(1, 8.0, 1, 8.0, id="none is ahead"),
        pytest.param(2, 8.0, 8, 4.0, id="two steps in 8 s"),
        pytest.param(4, 8.0, 1, 4.0, id="but a step is 8 engine-seconds of work, for two engines"),
        pytest.param(2, 30.0, 1, 10.0, id="no more than the trainer says"),
    ],
)
def test_steps_that_are_under_way_at_once_take_a_part_each(
    steps: int, turn_s: float, max_running: int, expected: float
) -> None:
    """Else one long answer, beside which later steps run, makes all of them as long as training, with any fleet."""
    stage = Stage()
    for name in ("a", "b"):
        stage.engine(name, max_running=max_running)
    for step in range(1, steps + 1):
        stage.submit(1, step=step)
    stage.now = turn_s
    stage.finish_all()
    end(stage, 1, rolloutSeconds=min(10.0, turn_s))
    assert newest(stage).rollout_seconds == expected


def test_what_a_step_left_over_is_work_of_the_next_one() -> None:
    """With overSamplingFactor above 1, which looked as if half as many engines would do."""
    stage = Stage()
    stage.engine("a", max_running=4)
    stage.submit(4, step=1)
    stage.now = 10.0
    for sample in ("0.0", "1.0"):
        finish(stage, sample)
    stage.trainer(TrainerReport(stage.request(), "rl", step=1, values={str(k): v for k, v in TIMES.items()}))
    stage.now = 15.0  # between two steps it is nobody's
    stage.submit(2, step=2)
    stage.now = 25.0
    for sample in ("4.0", "5.0"):
        finish(stage, sample)
    stage.engine("b", max_running=4)
    stage.now = 35.0
    stage.finish_all()
    end(stage, 2)
    assert newest(stage).busy_engine_seconds == 20.0
    assert newest(stage).engines == 1.5, "until the last turn that it used"


def test_a_step_that_was_left_is_not_ahead() -> None:
    stage = Stage()
    stage.engine("a", max_running=8)
    stage.submit(1, step=1)
    stage.submit(1, step=2)
    stage.now = 8.0
    stage.finish_all()
    end(stage, 2, rolloutSeconds=8.0)
    assert newest(stage).rollout_seconds == 8.0


@pytest.mark.parametrize(
    ("step", "values"),
    [
        pytest.param(2, TIMES, id="another step"),
        pytest.param(1, {StepValue.REWARD: 1.0}, id="without times"),
        pytest.param(1, {**TIMES, StepValue.STEP_SECONDS: float("nan")}, id="with a time that is none"),
    ],
)
def test_what_is_no_report_of_a_step(step: int, values: dict[StepValue, float]) -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(1, step=1)
    stage.finish_all()
    stage.trainer(TrainerReport(stage.request(), "rl", step=step, values={str(k): v for k, v in values.items()}))
    assert stage.ledger.status(0.0).finished_steps == ()


def test_an_evaluations_report_repeats_no_step() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(1, step=1)
    stage.now = 2.0
    stage.finish_all()
    end(stage, 1)
    end(stage, 1, phase="eval")
    assert len(stage.ledger.status(2.0).finished_steps) == 1


def test_a_trainer_that_went_back_does_steps_again() -> None:
    stage = Stage()
    stage.engine("a")
    for step in (1, 2, 3, 2):
        stage.submit(1, step=step)
        stage.now += 2.0
        stage.finish_all()
        if step < 3:
            end(stage, step)
        else:  # it is killed, and another one begins at its checkpoint
            stage.trainer(TrainerHello(1, -1, trainer="another"))
    steps = stage.ledger.status(stage.now).finished_steps
    assert [(one.step, one.busy_engine_seconds) for one in steps] == [(1, 2.0), (2, 2.0)]
    assert list(stage.ledger.state.usage.steps) == []


def test_a_restart_goes_on_from_the_journal() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(2, step=1)
    stage.now = 5.0
    stage.ledger.state = decode_state(encode_state(stage.ledger.state))
    stage.now = 8.0
    stage.finish_all()
    end(stage, 1)
    assert newest(stage).busy_engine_seconds == 8.0
    durable = [event for event in stage.events if event.durable]
    again = replay(stage.ledger.state.config, durable)
    assert again.usage == stage.ledger.state.usage


def step_of(number: int, engines: float, *, steady: bool = True) -> FinishedStep:
    fields = ("rollout_seconds", "train_seconds", "step_seconds", "busy_engine_seconds", "shared_engine_seconds")
    more = ("evaluation_engine_seconds", "next_engine_saves_seconds")
    return FinishedStep(step=number, engines=engines, steady=steady, **dict.fromkeys((*fields, *more), 1.0))


def kept(*steps: FinishedStep) -> list[int]:
    found: list[FinishedStep] = []
    for one in steps:
        found = keep_step(found, one)
    return [one.step for one in found]


def test_what_is_kept_of_finished_steps() -> None:
    assert kept(*(step_of(number, 4.0) for number in range(9))) == list(range(9))[-STEPS_PER_SIZE:]
    assert kept(*(step_of(number, number) for number in range(20))) == list(range(20))[-SIZES:]
    assert kept(step_of(1, 2), step_of(2, 2, steady=False), step_of(3, 2)) == [1, 3]
    assert kept(step_of(1, 2), step_of(2, 2, steady=False)) == [1, 2]
    assert kept(step_of(1, 2), step_of(2, 4), step_of(3, 4), step_of(2, 8)) == [1, 2]


def lengths(sample: str, turn: int) -> int:
    return 50 + int(150 * Random(f"{sample}/{turn}").lognormvariate(0, 0.8))


def measured(engines: int, speed: Speed, count: int) -> FinishedStep:
    """A step on so many engines whose speeds are known, since they did one before."""
    flow = Flow({f"e{number}": speed for number in range(engines)}, lengths)
    for step in (1, 2):
        begun = flow.now
        flow.submit(count, n=4, step=step, max_new_tokens=2000)
        flow.run()
    values = {**TIMES, StepValue.ROLLOUT_SECONDS: flow.now - begun}
    flow.trainer(TrainerReport(flow.request(), "rl", step=2, values=values))
    return newest(flow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speed", "count", "error"),
    [
        pytest.param(Speed(0.02, half_batch=8.0), 12, 0.1, id="batches slow engines"),
        pytest.param(Speed(0.02, half_batch=64.0), 12, 0.1, id="they hardly do"),
        pytest.param(Speed(0.02, half_batch=64.0, max_running=4), 24, 0.25, id="samples wait: the longest may be late"),
    ],
)
def test_one_step_tells_what_twice_the_engines_take(speed: Speed, count: int, error: float) -> None:
    """a + b / n of a step with two engines against a step with four."""
    two, four = measured(2, speed, count), measured(4, speed, count)
    fixed = two.rollout_seconds - two.shared_engine_seconds / two.engines
    assert fixed + two.shared_engine_seconds / four.engines == pytest.approx(four.rollout_seconds, rel=error)


@pytest.mark.parametrize(("another", "seconds"), [(False, 10.0), (True, 4.0)], ids=["late", "done again"])
def test_a_late_group_of_a_finished_step_leaves_later_steps_alone(*, another: bool, seconds: float) -> None:
    """Another trainer, which goes back to that step, does what came after it again."""
    stage = Stage()
    stage.engine("a")
    stage.submit(1, step=0)
    finish(stage, "0.0")
    stage.submit(1, step=1)
    end(stage, 0)
    stage.now = 6.0
    if another:
        stage.trainer(TrainerHello(1, -1, trainer="another"))
    stage.submit(1, step=0)
    finish(stage, "2.0")
    stage.submit(1, step=1)
    finish(stage, "3.0")
    stage.now = 10.0
    finish(stage, "1.0")
    end(stage, 1)
    assert newest(stage).step == 1
    assert newest(stage).busy_engine_seconds == seconds
