"""Sums and sentences of a run's end, from made reports and events."""

import io

import pytest
from rich.console import Console

from polyrl.history.fleet import FleetEvent
from polyrl.history.losses import clock_text, losses
from polyrl.history.rows import MetricsRow, parse_metrics
from polyrl.manifest.spec import JobSpec
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, ManagerStatus, TokenCounts
from polyrl_cli.report.progress import Progress, line, picture, sparkline
from polyrl_cli.report.summary import bytes_per_token, seconds_by_stage, step_parts
from polyrl_cli.report.timeline import num_serving

SPEC = {"recipe": {"mode": "rl", "model": {"path": "m"}, "algorithm": {"steps": 5}}}


def rl_step(time: float, seconds: float, step: int = 1) -> MetricsRow:
    return MetricsRow(
        time, "rl", step=step, values={"timing_s/step": seconds, "timing_s/gen": seconds / 2, "timing_s/train": 0.25}
    )


def an_event(event: str, time: float, worker: str = "rollout-0") -> FleetEvent:
    return FleetEvent(time=time, t=time - 100, kind=event, worker=worker, text=f"{worker} {event}")


def test_lines_that_are_no_reports_are_left_out() -> None:
    text = b'{"time": 1.5, "phase": "rl", "step": 2, "reward/mean": 0.5}\nnot json\n{"phase": "rl"}\n[1]\n'
    assert parse_metrics(text) == [MetricsRow(1.5, "rl", step=2, values={"reward/mean": 0.5})]


def test_every_second_of_the_wall_has_its_place() -> None:
    reports = [
        MetricsRow(110.0, "eval", step=0, values={}),
        MetricsRow(112.0, "sft", step=1, values={"timing_s/step": 2.0}),
        rl_step(120.0, 4.0),
        rl_step(125.0, 5.0),
    ]
    seconds = seconds_by_stage(reports, began=100.0, wall_seconds=30.0)
    assert seconds == {"start": 10.0, "sft": 2.0, "rl": 9.0, "rest": 9.0}
    assert sum(seconds.values()) == 30.0


def test_a_run_that_never_reported_was_all_start() -> None:
    assert seconds_by_stage([], began=100.0, wall_seconds=3.0) == {"start": 3.0}


def test_step_parts_are_summed_over_rl_steps_only() -> None:
    parts = step_parts(
        [MetricsRow(1.0, "sft", step=1, values={"timing_s/train": 99.0}), rl_step(2.0, 4.0), rl_step(3.0, 2.0)]
    )
    assert parts["generate"] == 3.0
    assert parts["train"] == 0.5
    assert parts["other"] == 0.0


def test_a_loss_is_shown_with_its_replacement_and_its_step() -> None:
    events = [
        an_event("serving", 105.0),
        an_event("serving", 105.0, "rollout-1"),
        an_event("reclaimed", 120.5),
        an_event("started", 120.6, "rollout-2"),
        an_event("serving", 127.0, "rollout-2"),
    ]
    steps = [rl_step(118.0, 2.0), rl_step(120.0, 2.0), rl_step(124.0, 3.5), rl_step(126.0, 2.0)]
    (loss,) = losses(events, steps)
    assert (loss.worker, loss.at_seconds, loss.replaced_after_seconds) == ("rollout-0", 20.5, 6.5)
    assert (loss.step_seconds, loss.median_step_seconds) == (3.5, 2.0)


def test_a_loss_near_the_end_has_no_replacement() -> None:
    (loss,) = losses([an_event("reclaimed", 120.5)], [])
    assert (loss.replaced_after_seconds, loss.step_seconds, loss.median_step_seconds) == (None, None, None)


@pytest.mark.parametrize(("generated", "expected"), [(0, None), (1000, 9.5)])
def test_bytes_per_token(generated: int, expected: float | None) -> None:
    status = ManagerStatus(seq=1, run_epoch=1, delta_bytes=9500, tokens=TokenCounts(generated=generated))
    assert bytes_per_token(status) == expected


def test_the_reserved_engine_and_joining_ones_do_not_count_as_serving_rollouts() -> None:
    kinds = [
        (Pool.RESERVED, EngineState.SERVING),
        (Pool.SPOT, EngineState.SERVING),
        (Pool.ON_DEMAND, EngineState.SERVING),
        (Pool.SPOT, EngineState.JOINING),
        (Pool.SPOT, EngineState.DRAINING),
    ]
    engines = tuple(
        EngineStatus(name=str(n), pool=pool, state=state, weight_version=0, running=0, max_running=1, tokens=0)
        for n, (pool, state) in enumerate(kinds)
    )
    assert num_serving(ManagerStatus(seq=1, run_epoch=1, engines=engines)) == 2


@pytest.mark.parametrize(("seconds", "text"), [(0, "00:00"), (59.9, "00:59"), (61, "01:01"), (3661, "1:01:01")])
def test_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_sparkline_spans_least_to_greatest() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) in ("▁▄█", "▁▅█")


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("state", EngineState)
def test_an_engine_in_any_state_has_its_line_in_the_picture(state: EngineState, width: int) -> None:
    engine = EngineStatus(
        name="rollout-7", pool=Pool.SPOT, state=state, weight_version=1, running=2, max_running=4, tokens=9
    )
    progress = Progress("job", JobSpec.model_validate(SPEC), clock=lambda: 0.0)
    progress.take(ManagerStatus(seq=1, run_epoch=1, engines=(engine,)), conditions=())
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(picture(progress, width))
    text = console.export_text()
    assert "rollout-7" in text
    assert all(len(line) <= min(width, 80) for line in text.splitlines())


def test_the_picture_shows_what_the_run_has_cost_by_now() -> None:
    priced = JobSpec.model_validate({**SPEC, "pricing": {"spotPerHour": 3.6, "currency": "EUR"}})
    progress = Progress("job", priced, clock=lambda: 1000.0, began=0.0)
    assert progress.cost == ""
    for number in range(2):
        progress.take_event(FleetEvent(time=5000.0, t=0.0, kind="started", worker=f"rollout-{number}"))
    assert progress.cost == "2.00 EUR (spot 2.00), 7.20 per hour now"


@pytest.mark.parametrize(("mode", "name"), [("sft", "sft/loss"), ("dpo", "dpo/loss"), ("reward-model", "rm/loss")])
def test_a_stage_without_rewards_shows_its_loss(mode: str, name: str) -> None:
    section = "rewardModel" if mode == "reward-model" else mode
    spec = JobSpec.model_validate({"recipe": {"mode": mode, "model": {"path": "m"}, section: {"steps": 5}}})
    progress = Progress("job", spec, clock=lambda: 1.0, began=0.0)
    progress.take_report(MetricsRow(1.0, mode, step=2, values={name: 0.25}))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(picture(progress, 80))
    assert line(progress).endswith(f"{mode}  step 2/5  loss 0.250")
    assert "2/5  loss 0.250" in console.export_text()
