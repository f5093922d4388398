"""What a manager remembers: rows that hold, bounded, and what engines and the trainer cost meanwhile."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from polyrl.history.rows import MetricsRow
from polyrl.ledger import events
from polyrl.ledger.causes import GoneCause
from polyrl.manifest.scaling import PricingSpec
from polyrl.sample import Finish, Pool, Purpose
from polyrl.sample_record import MAX_REPORTED, MAX_REPORTED_BYTES, SampleRecord, to_report
from polyrl.status import ManagerStatus, StepValue
from polyrl.testing.finished_steps import finished_step
from polyrl.wire import EngineCapacity, TrainerReport
from polyrl_rollout.manager import history, reports
from polyrl_rollout.manager.history import RunHistory
from polyrl_rollout.manager.metrics import MAX_EVALUATION_NAMES, RunCollector
from polyrl_rollout.manager.reports import MAX_ROWS

CAPACITY = EngineCapacity(max_running=8, kv_tokens=1000, max_context=100)
PRICES = PricingSpec(spotPerHour=3.6, reservedPerHour=36.0, currency="EUR")


def a_report(step: int, phase: str = "rl", samples: tuple[bytes, ...] = (), **values: float) -> TrainerReport:
    return TrainerReport(step, phase, step=step, values=values, samples=samples)


def a_record(reward: float, text: str = "", purpose: Purpose = Purpose.EVAL) -> SampleRecord:
    return SampleRecord(
        time=0.0, purpose=purpose, stage="rl", step=1, sample=f"{reward:g}", group=0, reward=reward, metrics={},
        finish=Finish.STOP, versions=(0,), prompt_tokens=1, response_tokens=1, prompt="", response=text,
    )  # fmt: skip


def steps(kept: RunHistory) -> list[tuple[str, int]]:
    return [(row.phase, row.step) for row in kept.rows]


def test_a_trainer_that_went_back_does_its_steps_again() -> None:
    kept = RunHistory(100.0, resumed=False, lease_s=3.0)
    for phase, step in (("eval", 0), ("sft", 1), ("rl", 1), ("rl", 2), ("eval", 2), ("rl", 3), ("rl", 2)):
        kept.take_report(a_report(step, phase), 101.0)
    assert steps(kept) == [("eval", 0), ("sft", 1), ("rl", 1), ("rl", 2)]
    for _ in range(2):
        kept.take_report(a_report(2, "eval"), 102.0)
    assert steps(kept)[-2:] == [("rl", 2), ("eval", 2)]


def test_a_long_run_is_thinned_and_its_newest_steps_stay() -> None:
    rows = [MetricsRow(0.0, "eval" if step % 1000 == 0 else "rl", step=step, values={}) for step in range(MAX_ROWS)]
    kept = reports.without_half(rows)
    assert len(kept) < MAX_ROWS
    assert kept[-MAX_ROWS // 2 :] == rows[-MAX_ROWS // 2 :]
    assert [row.step for row in kept if row.phase == "eval"] == [step for step in range(MAX_ROWS) if step % 1000 == 0]


def test_only_so_many_samples_and_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_SAMPLE_BYTES", 1000)
    kept = RunHistory(100.0, resumed=False, lease_s=3.0)
    for step in range(10):
        line = msgspec.json.encode(a_record(float(step), "x" * 200))
        kept.take_report(a_report(step, samples=(line,), **{f"n{n}": 1.0 for n in range(500)}), 101.0)
    assert [one.sample for one in kept.samples()] == ["8", "9"]
    assert len(kept.rows[-1].values) == reports.MAX_VALUES


def test_what_is_sent_is_a_few_of_the_lowest_reward_that_fit() -> None:
    records = [a_record(reward / 10) for reward in range(20, 0, -1)]
    assert [msgspec.json.decode(line)["reward"] for line in to_report(records)] == [
        n / 10 for n in range(1, MAX_REPORTED + 1)
    ]
    huge = [a_record(0.1, "x" * MAX_REPORTED_BYTES), a_record(0.2)]
    assert [msgspec.json.decode(line)["reward"] for line in to_report(huge)] == [0.2]


def test_engines_and_the_trainer_cost_from_their_coming_to_their_end() -> None:
    kept = RunHistory(1000.0, resumed=False, lease_s=400.0)
    kept.take_events([events.TrainerGreeted("t", 0.0)], 1000.0)
    for name in ("a", "b"):
        kept.take_events([events.EngineGreeted(name, Pool.SPOT, capacity=CAPACITY, version=-1, at=0.0)], 1000.0)
    kept.take_events([events.EngineServing("a", 0, at=0.0), events.EngineServing("a", 1, at=0.0)], 1010.0)
    kept.take_events([events.EngineGone("a", GoneCause.SILENT.value, at=0.0)], 1100.0)
    kept.take_events([events.EngineDraining("b", 0.0, reason="spot notice", at=0.0)], 1190.0)
    kept.take_events([events.EngineGone("b", GoneCause.DEREGISTERED.value, at=0.0)], 1200.0)
    shown = kept.since(0.0, 1300.0)
    assert shown.seconds == {Pool.SPOT: 300.0, Pool.RESERVED: 300.0}
    assert shown.machines == {Pool.RESERVED: 1}
    assert [(event.kind, event.worker, event.text) for event in shown.events[3:]] == [
        ("serving", "a", "a serves"), ("reclaimed", "a", "a is gone without a word"),
        ("exited", "b", "b has left: spot notice"),
    ]  # fmt: skip
    kept.take_events([events.RunFinished(True, "done", at=0.0)], 1310.0)
    assert kept.seconds(9999.0) == {Pool.SPOT: 300.0, Pool.RESERVED: 310.0}


def test_engines_that_are_forgotten_have_cost_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_EVENTS", 40)
    kept = RunHistory(0.0, resumed=False, lease_s=3.0)
    for number in range(100):
        name = f"e{number}"
        kept.take_events([events.EngineGreeted(name, Pool.SPOT, capacity=CAPACITY, version=-1, at=0.0)], number * 10.0)
        kept.take_events([events.EngineGone(name, GoneCause.SILENT.value, at=0.0)], number * 10.0 + 5.0)
    assert kept.seconds(2000.0) == {Pool.SPOT: 500.0}
    assert len(kept.since(-1.0, 2000.0).events) <= 40


def test_numbers_for_prometheus_are_there_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = RunHistory(1000.0, resumed=False, lease_s=3.0)
    status = ManagerStatus(seq=0, run_epoch=1)
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: status, kept, PRICES))
    assert generate_latest(registry) == b""
    monkeypatch.setattr(history.RunHistory, "seconds", lambda self, now: {Pool.SPOT: 1000.0, Pool.ON_DEMAND: 5.0})
    monkeypatch.setattr(history.RunHistory, "machines", lambda self, now: {Pool.SPOT: 2})
    step = finished_step(7, 4, rollout_s=2.0, train_s=1.5, shared_s=3.0)
    status = ManagerStatus(seq=1, run_epoch=1, values={StepValue.REWARD: 0.25}, finished_steps=(step,))
    timing = {"timing_s/step": 2.0, "timing_s/train": 1.5, "reward/mean": 0.25}
    kept.take_report(a_report(7, **timing), 1001.0)
    kept.take_report(a_report(7, "eval", **{"eval/reward": 0.5, "eval/exact_match": 0.75, "eval/scored": 9.0}), 1002.0)
    text = generate_latest(registry).decode()
    for line in (
        "polyrl_reward 0.25",
        'polyrl_evaluation{name="exact_match"} 0.75',
        'polyrl_steps{stage="rl"} 7.0',
        'polyrl_step_seconds{stage="rl"} 2.0',
        'polyrl_step_part_seconds{part="train",stage="rl"} 1.5',
        'polyrl_step_engine_seconds{part="busy"} 8.0',
        'polyrl_step_engine_seconds{part="shared"} 3.0',
        'polyrl_step_engine_seconds{part="evaluation"} 0.0',
        'polyrl_cost_total{currency="EUR",pool="spot"} 1.0',
        'polyrl_cost_per_hour{currency="EUR",pool="spot"} 7.2',
    ):
        assert line in text.splitlines(), line
    assert "scored" not in text
    assert "on-demand" not in text  # it has no price


def test_a_silent_trainers_machine_costs_no_more_until_it_comes_again() -> None:
    kept = RunHistory(0.0, resumed=False, lease_s=3.0)
    kept.take_events([events.TrainerGreeted("t", 0.0)], 1.0)
    kept.take_events([events.TrainerHeard(3.0)], 3.0)
    assert kept.machines(6.0) == {Pool.RESERVED: 1}
    assert (kept.machines(36_000.0), kept.seconds(36_000.0)) == ({}, {Pool.RESERVED: 5.0})
    assert [(one.kind, one.time) for one in kept.since(0.0, 36_000.0).events] == [("started", 1.0), ("exited", 6.0)]
    kept.take_events([events.TrainerGreeted("t2", 0.0)], 36_010.0)
    assert (kept.machines(36_011.0), kept.seconds(36_011.0)) == ({Pool.RESERVED: 1}, {Pool.RESERVED: 6.0})
    kept.take_events([events.RunFinished(True, "done", at=0.0)], 36_012.0)
    assert kept.seconds(99_999.0) == {Pool.RESERVED: 7.0}


def test_a_clock_that_is_set_back_ends_no_stay() -> None:
    kept = RunHistory(100.0, resumed=False, lease_s=3.0)
    for name, now in (("a", 100.0), ("b", 90.0)):
        kept.take_events([events.EngineGreeted(name, Pool.SPOT, capacity=CAPACITY, version=-1, at=0.0)], now)
    assert kept.machines(100.0) == {Pool.SPOT: 2}


def test_a_report_is_cut_to_what_it_may_hold_and_the_history_says_so() -> None:
    kept = RunHistory(0.0, resumed=False, lease_s=3.0)
    for step in range(3):
        kept.take_report(a_report(step, samples=(b"",) * 1000, **{f"n{n}": 1.0 for n in range(200)}), 1.0)
    assert len(kept._samples.lines) == 3 * MAX_REPORTED
    assert kept.left_out == {"samples": 3 * (1000 - MAX_REPORTED), "numbers": 3 * (200 - reports.MAX_VALUES)}
    assert [event.text for event in kept.since(0.0, 2.0).events] == [
        "a report has too many numbers: 72 are left out", "a report has too many samples: 992 are left out",
    ]  # fmt: skip


def test_only_so_many_lines_are_kept_however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_SAMPLES", 10)
    kept = reports.KeptSamples()
    for _ in range(5):
        kept.take([b""] * MAX_REPORTED)
    assert len(kept.lines) == 10


@pytest.mark.parametrize("phase", ["rl", "eval"])
def test_rows_of_long_names_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    monkeypatch.setattr(reports, "MAX_ROWS_BYTES", 200_000)
    kept = RunHistory(0.0, resumed=False, lease_s=3.0)
    for step in range(60):
        kept.take_report(a_report(step, phase, **{f"{n}" + "\n" * 190: 1.0 for n in range(20)}), float(step))
    assert len(msgspec.json.encode(kept.rows)) <= 200_000
    assert kept.rows[-1].step == 59
    kept.take_report(a_report(60, phase, **{f"{n}{'x' * 190}": 1.0 for n in range(128)}), 60.0)
    assert len(msgspec.json.encode(kept.rows[-1])) <= reports.MAX_ROW_BYTES


def test_a_rewards_many_names_hide_no_number_that_pictures_need() -> None:
    named = {f"reward/a{n}": 1.0 for n in range(200)} | {"reward/mean": 0.5, "rollout/samples": 8.0}
    values = reports.bounded_values(named | {"timing_s/step": 3.0, "timing_s/train": 1.0})
    assert {"reward/mean", "rollout/samples", "timing_s/step", "timing_s/train"} <= values.keys()
    assert len(values) == reports.MAX_VALUES


def test_a_worker_that_came_again_stays_when_its_first_stay_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_EVENTS", 40)
    kept = RunHistory(0.0, resumed=False, lease_s=3.0)

    def comes(name: str, now: float) -> None:
        kept.take_events([events.EngineGreeted(name, Pool.SPOT, capacity=CAPACITY, version=-1, at=0.0)], now)

    def leaves(name: str, now: float) -> None:
        kept.take_events([events.EngineGone(name, GoneCause.SILENT.value, at=0.0)], now)

    comes("same", 0.0)
    leaves("same", 1.0)
    comes("same", 2.0)
    for number in range(100):
        comes(f"e{number}", 3.0 + number)
        leaves(f"e{number}", 3.5 + number)
    assert kept.machines(1000.0) == {Pool.SPOT: 1}
    assert kept.seconds(1002.0) == {Pool.SPOT: 1.0 + 50.0 + 1000.0}


def test_a_trainers_words_become_no_labels_without_end() -> None:
    kept = RunHistory(0.0, resumed=False, lease_s=3.0)
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: ManagerStatus(seq=0, run_epoch=1), kept, PRICES))
    shown: set[str] = set()
    for step in range(20):
        kept.take_report(a_report(step, f"p{step}", **{f"timing_s/{step}_{n}": 1.0 for n in range(9)}), 1.0)
        kept.take_report(a_report(step, "rl", **{f"timing_s/{step}_{n}": 1.0 for n in range(9)}), 1.0)
        kept.take_report(a_report(step, "eval", **{f"eval/{step}_{n}": 1.0 for n in range(9)}, **{"x" * 99: 1.0}), 1.0)
        series = generate_latest(registry).decode().splitlines()
        shown |= {line for line in series if line.startswith("polyrl_evaluation{")}
    assert [line for line in series if "step" in line and line[0] != "#"] == ['polyrl_steps{stage="rl"} 19.0']
    assert len(shown) == MAX_EVALUATION_NAMES
