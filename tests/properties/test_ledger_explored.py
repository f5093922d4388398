"""Every order of events of a small run, with every fault at every moment; the larger bounds run by command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyrl.ledger import apply, events as f
from polyrl.ledger.apply import samples
from polyrl_rollout.testing.simulation import Violation
from polyrl_rollout.testing.simulation.explore import Bounds, explore

ONE_FAULT = Bounds(groups=1, n=1, faults=1)
Patch = pytest.MonkeyPatch


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


def tokens_not_journaled(patch: Patch) -> None:
    patch.setattr(f.TokensTaken, "durable", False)


def tokens_lost_when_moved(patch: Patch) -> None:
    def moved(state: Any, event: f.Moved) -> None:
        sample = state.samples[state.assignments[event.assignment].sample]
        honest(state, event)
        del sample.ids[-4:]

    honest = apply._APPLY[f.Moved]
    patch.setitem(apply._APPLY, f.Moved, moved)


def sample_lost_when_moved(patch: Patch) -> None:
    def moved(state: Any, event: f.Moved) -> None:
        sample = state.samples[state.assignments[event.assignment].sample]
        honest(state, event)
        samples._unqueue_sample(state, sample)

    honest = apply._APPLY[f.Moved]
    patch.setitem(apply._APPLY, f.Moved, moved)


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
