"""What `polyrl why` repeats of its runner's conditions."""

from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from polyrl.local import planner
from polyrl.status import ManagerStatus
from polyrl_cli.inspection.why import standing_conditions
from polyrl_cli.local.runner import LocalRun
from polyrl_cli.report.timeline import Timeline, read_timeline

MUTE = "the manager heard nothing of rollout-1 for 120 s; see logs/"
GIVEN_UP = "rollouts given up: the last 3 ended before they served"


def test_a_condition_stands_until_the_runner_says_that_it_is_over(tmp_path: Path) -> None:
    """An engine that hangs was named no more once any other one served, and for ever if none did."""
    shown: list[str] = []
    timeline = Timeline(tmp_path / "fleet.jsonl", lambda: 0.0, lambda event: shown.append(event.text))

    def standing() -> list[str]:
        sentences = standing_conditions(read_timeline(tmp_path / "fleet.jsonl"))
        return [sentence.removeprefix("the runner says: ") for sentence in sentences]

    timeline.note("condition", "", MUTE)
    timeline.note("condition", "", GIVEN_UP)
    timeline.note("serving", "rollout-2", "rollout-2 serves")
    assert standing() == [MUTE, GIVEN_UP]
    timeline.note_over(MUTE)
    assert standing() == [GIVEN_UP]
    timeline.close()
    Timeline(tmp_path / "fleet.jsonl", lambda: 0.0, lambda event: None).close()
    assert standing() == [], "it goes on"
    assert MUTE not in shown[1:]


async def test_the_runner_says_what_is_over_but_what_its_run_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline(tmp_path / "fleet.jsonl", lambda: 0.0, lambda event: None)
    run = LocalRun(MagicMock(), MagicMock(list=AsyncMock(return_value=[])), MagicMock(), timeline, tmp_path)
    for sentences in ([MUTE, GIVEN_UP], [GIVEN_UP], []):
        run.status = ManagerStatus(seq=1, run_epoch=1, finished=not sentences)
        monkeypatch.setattr(planner, "run_conditions", lambda *_, now=sentences: now)
        await run._observe()
    timeline.close()
    assert standing_conditions(read_timeline(tmp_path / "fleet.jsonl")) == (f"the runner says: {GIVEN_UP}",)
