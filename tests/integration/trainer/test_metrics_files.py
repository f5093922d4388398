"""metrics.jsonl between its writer, which may be killed and go back, and whoever follows it."""

import json
from pathlib import Path

import pytest

from polyrl_cli.report.timeline import MetricsTail, read_metrics
from polyrl_trainer.metrics import METRICS, MetricsLogger, rewind_metrics
from polyrl_trainer.state import TrainerState, TrainingStage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a time of its own."""
    ticks = iter(range(1, 1000))
    monkeypatch.setattr("polyrl_trainer.metrics.time.time", lambda: float(next(ticks)))


def write(run: Path, *steps: int) -> None:
    metrics = MetricsLogger(run)
    for step in steps:
        metrics.log("rl", step, {"loss": 1 / step})
    metrics.close()


@pytest.mark.usefixtures("clock")
def test_a_restarted_trainer_writes_each_step_once_and_followers_see_each_row_once(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path / METRICS)
    write(tmp_path, 1, 2, 3)
    assert [report.step for report in tail.read()] == [1, 2, 3]
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"time": 99, "phase": "rl", "st')  # its writer was killed over it
    rewind_metrics(tmp_path / METRICS, TrainerState(1, TrainingStage.RL, step=2))
    assert tail.read() == []
    write(tmp_path, 3, 4)
    assert [report.step for report in tail.read()] == [3, 4]
    assert [report.step for report in read_metrics(tmp_path / METRICS)] == [1, 2, 3, 4]
    assert tail.read() == []
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


@pytest.mark.usefixtures("clock")
def test_a_follower_that_comes_late_tells_only_what_is_new(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    tail = MetricsTail(tmp_path / METRICS)
    rewind_metrics(tmp_path / METRICS, TrainerState(1, TrainingStage.RL, step=1))
    write(tmp_path, 2)
    assert [report.step for report in tail.read()] == [2]
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2]


def test_nothing_to_go_back_to(tmp_path: Path) -> None:
    rewind_metrics(tmp_path / METRICS, TrainerState(1, TrainingStage.RL, step=2))
    assert list(tmp_path.iterdir()) == []
