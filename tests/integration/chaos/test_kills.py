"""Rollouts killed at random moments over real processes: the measurement of benchmarks/kills, small, as a test.

A report's violations are: a token id or logprob that differs from undisturbed decoding, a sample that did not end
exactly once, a wait beyond its deadline, an invariant that the run's journal shows broken.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from polyrl.testing.started import ran

RUN = Path(__file__).parents[3] / "benchmarks" / "kills" / "run.py"
DEADLINE_S = 500
SHORT, LONG = 80, 320
"""Tokens of a response."""

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)
Report = dict[str, Any]


def kill(folder: Path, tokens: int, kills: int, *options: str) -> Report:
    """The report of a run that kept all promises."""
    seed = int(os.environ.get("POLYRL_SEED") or random.randrange(1 << 30))
    print("seed", seed)
    script = [sys.executable, "-m", "polyrl.testing.script", str(RUN)]
    argv = [*script, "--kills", str(kills), "--seed", str(seed), "--tokens", str(tokens), *options]
    run = ran([*argv, "--out", str(folder)], timeout_s=DEADLINE_S)
    print(run.stdout, run.stderr)
    report: Report = json.loads(run.stdout)
    assert report["violations"] == []
    assert run.returncode == 0
    assert report["kills"] == kills
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """Of short and of long responses."""
    pace = ("--between", "1500", "3000")
    return [kill(tmp_path_factory.mktemp("kills"), tokens, 3, *pace) for tokens in (SHORT, LONG)]


@pytest.mark.slow
def test_every_sample_ends_once_whatever_is_killed(reports: list[Report]) -> None:
    for report in reports:
        samples = report["samples"]
        assert samples["submitted"] == samples.get("acknowledged", 0) + samples.get("discarded", 0)
        assert samples["acknowledged"] > 0
        assert report["movedByKill"]["max"] >= 1, "no kill took a sample along"


@pytest.mark.slow
def test_nobody_waits_beyond_a_deadline(reports: list[Report]) -> None:
    for report in reports:
        assert {wait["what"] for wait in report["waits"] if wait["seconds"] > wait["deadline"]} == set()
        assert report["killToAllTokens"]["max"] > 0


@pytest.mark.slow
def test_bytes_per_token_do_not_grow_with_the_response(reports: list[Report]) -> None:
    short, long = (report["bytesPerToken"] for report in reports)
    assert 8 <= short <= 16
    assert 8 <= long <= 16


@pytest.mark.sglang
def test_sglang_is_killed_and_its_greedy_output_stays(tmp_path: Path) -> None:
    """Token ids and logprobs are those of plain transformers, undisturbed: migration changes none."""
    pace = ("--between", "500", "1500")
    report = kill(tmp_path / "run", LONG, 1, "--engine", "sglang", "--rollouts", "2", *pace)
    assert report["movedByKill"]["max"] >= 1, "the kill took no sample along"
