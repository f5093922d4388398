"""How long machines were held, and what that cost."""

import pytest

from polyrl.history.cost import cost_words, spent
from polyrl.history.fleet import FleetEvent, machines_by_pool, seconds_by_pool
from polyrl.manifest.scaling import PricingSpec
from polyrl.sample import Pool

PRICES = PricingSpec(spotPerHour=2.0, reservedPerHour=10.0, currency="EUR")


def an_event(t: float, kind: str, worker: str, pool: Pool | None = None, start: float = 1000.0) -> FleetEvent:
    return FleetEvent(time=start + t, t=t, kind=kind, worker=worker, pool=pool)


def test_each_stay_counts_from_its_start_to_its_end() -> None:
    events = [
        an_event(0, "started", "manager"), an_event(0, "started", "trainer"), an_event(0, "started", "reserved"),
        an_event(10, "started", "rollout-0"), an_event(20, "serving", "rollout-0"),
        an_event(40, "reclaimed", "rollout-0"), an_event(41, "exited", "rollout-0"),
        an_event(45, "started", "rollout-1"),
    ]  # fmt: skip
    assert seconds_by_pool(events, until=1100.0) == {Pool.RESERVED: 100.0, Pool.SPOT: 30.0 + 55.0}
    assert machines_by_pool(events) == {Pool.RESERVED: 1, Pool.SPOT: 1}


def test_a_start_after_a_kill_counts_nothing_between() -> None:
    events = [
        an_event(0, "started", "trainer"),
        an_event(50, "fleet", ""),
        an_event(0, "started", "trainer", start=2000),
    ]
    assert seconds_by_pool(events, until=2010.0) == {Pool.RESERVED: 60.0}


def test_a_manager_knows_the_pool_of_each_engine() -> None:
    events = [an_event(0, "started", "job-r-1", Pool.ON_DEMAND), an_event(0, "started", "job-trainer-0", Pool.RESERVED)]
    assert seconds_by_pool(events, until=1010.0) == {Pool.ON_DEMAND: 10.0}


def test_what_has_no_price_is_unknown_and_not_free() -> None:
    seconds = {Pool.SPOT: 1800.0, Pool.ON_DEMAND: 3600.0}
    assert spent(PRICES, seconds) == {Pool.SPOT: pytest.approx(1.0)}
    assert cost_words(PRICES, seconds, {Pool.SPOT: 2}) == (
        "1.00 EUR (spot 1.00; on-demand has no price), 4.00 per hour now"
    )
    assert cost_words(PricingSpec(), seconds, {}) == ""
