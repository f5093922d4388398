"""The orders in which a fleet is asked, after any events, are those of a fleet that is put in order afresh."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.ledger import fleet, ledger
from polyrl.ledger.events import EngineQuarantined, EngineReturned, LeasesRenewed, Reclaimed
from polyrl.ledger.fleet import Fleet
from polyrl_rollout.testing.simulation import Violation, draw_schedule, run_schedule

SEEDS = 25


def orders(one: Fleet) -> dict[str, list[Any]]:
    return {
        "roomy": sorted(engine.name for engine in one.roomy()),
        "busy": sorted(engine.name for engine in one.busy()),
        "idle": sorted(engine.name for engine in one.idle()),
        "leaving": sorted(engine.name for engine in one.leaving()),
        "reserved": sorted(engine.name for engine in one.reserved()),
        "kinds": sorted(one.kinds()),
        "may load older": [one.may_load_older()],
        "fastest": [one.fastest()],
    }


def compare_after_each_input(patch: pytest.MonkeyPatch) -> None:
    honest = ledger._settled

    def settled(transition: Any) -> Any:
        outcome = honest(transition)
        kept, fresh = transition.fleet, Fleet(transition.state)
        assert orders(kept) == orders(fresh)
        assert kept.mean_step() == pytest.approx(fresh.mean_step())
        measured = {e.name for e in transition.state.engines.values() if e.step_scale}
        steps = [[engine.name for engine in one.busy() if engine.name in measured] for one in (kept, fresh)]
        assert steps[0] == steps[1], "the slowest first"
        return outcome

    patch.setattr(ledger, "_settled", settled)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_orders_follow_every_event(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_after_each_input(monkeypatch)
    run_schedule(draw_schedule(seed))


# An engine is quarantined for a sample that moves, or as it greets: those events name it as well. What a returning
# engine takes back, and a ledger that was away itself, are drawn in a few of a thousand schedules only.
RARE = {EngineQuarantined, EngineReturned, LeasesRenewed, Reclaimed}
# The rarest of the others are noticed in these, which are therefore the first to be drawn.
TELLING_SEEDS = (50, 20, 25, 3)
KINDS = sorted(fleet._ENGINES_OF.keys() - RARE, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_event_that_is_not_noted_is_noticed(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_after_each_input(monkeypatch)
    monkeypatch.delitem(fleet._ENGINES_OF, kind)
    for seed in (*TELLING_SEEDS, *range(240)):
        try:
            run_schedule(draw_schedule(seed))
        except (AssertionError, KeyError, ValueError, Violation):
            return
    pytest.fail(f"nobody noticed that {kind.__name__} changes engines")
