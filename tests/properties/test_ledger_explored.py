"""Every order of events of a small run, with every fault at every moment; the larger bounds run by command."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ledger_mutants.disk import tokens_not_journaled
from ledger_mutants.mutant import Patch
from ledger_mutants.samples import sample_lost_when_moved
from ledger_mutants.tokens import tokens_lost_when_moved

from polyrl_rollout.testing.simulation import Violation
from polyrl_rollout.testing.simulation.explore import Bounds, explore

ONE_FAULT = Bounds(groups=1, n=1, faults=1)


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(ONE_FAULT, id="one fault"),
        pytest.param(Bounds(groups=2, n=1, faults=0, ticks=1), id="two groups"),
        pytest.param(Bounds(faults=0, ticks=1), id="one group"),
    ],
)
def test_every_invariant_holds_in_every_scene(bounds: Bounds) -> None:
    seen = explore(bounds)
    print(bounds, seen)
    assert seen.ends > 1
    assert seen.steps > seen.scenes > 500


@pytest.mark.parametrize(
    ("mutant", "invariant"),
    [
        pytest.param(tokens_not_journaled, "I10", id="tokens not journaled"),
        pytest.param(tokens_lost_when_moved, "I4", id="tokens lost when moved"),
        pytest.param(sample_lost_when_moved, "I5", id="sample lost when moved"),
    ],
)
def test_a_broken_ledger_is_noticed(mutant: Callable[[Patch], None], invariant: str, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation) as caught:
        explore(ONE_FAULT)
    assert caught.value.invariant == invariant
