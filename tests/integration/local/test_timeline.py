"""fleet.jsonl of a run that was killed and resumed."""

from pathlib import Path

import pytest

from polyrl.history.fleet import seconds_by_pool, worker_lives
from polyrl.sample import Pool
from polyrl_cli.report.timeline import Timeline, read_timeline


def test_whoever_was_there_before_a_kill_is_not_held_until_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now = tmp_path / "fleet.jsonl", 1000.0
    monkeypatch.setattr("polyrl_cli.report.timeline.time.time", lambda: now)
    for now, worker in ((1000.0, "rollout-0"), (2000.0, "rollout-1")):
        timeline = Timeline(file, lambda: now, lambda event: None)  # noqa: B023 - used within its turn
        timeline.note("started", worker, f"start {worker}")
        now += 30.0
        timeline.note("serving", worker, f"{worker} serves")
        timeline.close()
    events = read_timeline(file)
    assert seconds_by_pool(events, until=2050.0) == {Pool.SPOT: 30.0 + 50.0}
    assert [life.ended for life in worker_lives(events, 1000.0)] == [30.0, None]
