"""Ledgers broken on purpose: the invariant that speaks of it must notice each of them within a few schedules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ledger_mutants.mutant import Mutant
from ledger_mutants.table import MUTANTS

from polyrl_rollout.testing.simulation import Violation, draw_schedule, run_schedule

SEEDS = 300
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "ledger.md"


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.breaks.__name__ for mutant in MUTANTS])
def test_a_broken_ledger_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.breaks(monkeypatch)
    for seed in (mutant.seed, *range(SEEDS)):
        try:
            run_schedule(draw_schedule(seed))
        except Violation as violation:
            if violation.invariant == mutant.invariant:
                print(f"{mutant.breaks.__name__}: seed {seed}: {violation}")
                return
    pytest.fail(f"{mutant.invariant} did not notice {mutant.breaks.__name__} in {SEEDS} schedules")


def test_each_invariant_notices_something() -> None:
    assert {mutant.invariant for mutant in MUTANTS} >= {f"I{number}" for number in range(1, 12)}


def test_the_page_names_every_mutant_beside_its_invariant() -> None:
    rows = re.findall(r"^\| `(I\d+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    named = {(invariant, name) for invariant, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == {(mutant.invariant, mutant.breaks.__name__) for mutant in MUTANTS}
