"""benchmarks/ahead runs: all is trained, in no order that favours short answers, and no slower for what is ahead."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "ahead" / "run.py"


@pytest.mark.slow
def test_steps_take_no_longer_with_others_ahead_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = spec_from_file_location("ahead_run", FILE)  # other benchmarks have a `run` as well
    assert spec is not None
    assert spec.loader is not None
    run = module_from_spec(spec)
    spec.loader.exec_module(run)
    run.PROMPTS, run.SAMPLES, run.BUDGET = 3, 2, 1200
    sync, ahead = (run.measure(3, 8, 0.8, k) for k in (0, 2))
    assert sync["shortFirst"] == ahead["shortFirst"] == 1.0
    assert ahead["boundS"] == sync["boundS"] < ahead["stepS"] < sync["stepS"]
