"""How long machines were held, and what that cost."""

import pytest

from polyrl.history.cost import cost_words, spent
from polyrl.history.fleet import FleetEvent, machines_by_pool, seconds_by_pool, worker_lives
from polyrl.local.planner import ENGINE_ROLES
from polyrl.manifest.scaling import PricingSpec
from polyrl.page.charts import LOSS_COLOR, SERVING_COLOR, fleet_chart
from polyrl.sample import Pool
from polyrl.worker import Role

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
        an_event(0, "run", "", start=2000),
        an_event(0, "started", "trainer", start=2000),
    ]
    assert seconds_by_pool(events, until=2010.0) == {Pool.RESERVED: 60.0}


def test_a_clock_that_is_set_back_ends_no_stay() -> None:
    events = [
        an_event(0, "started", "a", Pool.SPOT),
        an_event(-500, "started", "b", Pool.SPOT),
        an_event(-400, "exited", "a", Pool.SPOT),
    ]
    assert seconds_by_pool(events[:2], until=600.0) == {Pool.SPOT: 200.0}
    assert machines_by_pool(events[:2]) == {Pool.SPOT: 2}
    assert seconds_by_pool(events, until=600.0) == {Pool.SPOT: 200.0}
    assert seconds_by_pool(events, until=0.0) == {Pool.SPOT: 100.0}


def test_a_manager_knows_the_pool_of_each_engine() -> None:
    events = [an_event(0, "started", "job-r-1", Pool.ON_DEMAND), an_event(0, "started", "job-trainer-0", Pool.RESERVED)]
    assert seconds_by_pool(events, until=1010.0) == {Pool.ON_DEMAND: 10.0}


@pytest.mark.parametrize("name", ["trainer-test-rollout-0", "manager-demo-rollout-0", "trainer", "manager-1"])
def test_an_engine_is_paid_as_its_pool_whatever_it_is_called(name: str) -> None:
    events = [an_event(0, "started", name, Pool.SPOT), an_event(1, "serving", name, Pool.SPOT)]
    assert seconds_by_pool(events, until=1010.0) == {Pool.SPOT: 10.0}
    assert [life.worker for life in worker_lives(events, 1000.0)] == [name]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("number", ["", "-1"])
def test_a_local_worker_is_known_by_its_role(role: Role, number: str) -> None:
    events = [an_event(0, "started", f"{role}{number}")]
    paid = {Role.TRAINER: {Pool.RESERVED: 1}, Role.ROLLOUT: {Pool.SPOT: 1}}
    assert machines_by_pool(events) == paid.get(role, {})
    assert bool(worker_lives(events, 1000.0)) == (role in ENGINE_ROLES)


def test_an_engine_that_came_back_lives_again() -> None:
    events = [
        an_event(0, "started", "e", Pool.SPOT), an_event(1, "serving", "e", Pool.SPOT),
        an_event(10, "reclaimed", "e", Pool.SPOT), an_event(11, "exited", "e", Pool.SPOT),
        an_event(20, "started", "e", Pool.SPOT), an_event(21, "serving", "e", Pool.SPOT),
    ]  # fmt: skip
    first, second = worker_lives(events, 1000.0)
    assert (first.started, first.serving, first.ended, first.reclaimed) == (0.0, 1.0, 10.0, True)
    assert (second.started, second.serving, second.ended) == (20.0, 21.0, None)
    drawn = fleet_chart([first, second], 30.0)
    assert drawn.count(SERVING_COLOR) == 2
    assert drawn.count(LOSS_COLOR) == 1
    assert drawn.count(">e</text>") == 1


def test_an_engine_that_a_new_manager_first_sees_serve_is_there() -> None:
    (life,) = worker_lives([an_event(5, "serving", "e")], 1000.0)
    assert (life.started, life.serving, life.ended) == (5.0, 5.0, None)


def test_what_has_no_price_is_unknown_and_not_free() -> None:
    seconds = {Pool.SPOT: 1800.0, Pool.ON_DEMAND: 3600.0}
    assert spent(PRICES, seconds) == {Pool.SPOT: pytest.approx(1.0)}
    assert cost_words(PRICES, seconds, {Pool.SPOT: 2}) == (
        "1.00 EUR (spot 1.00; on-demand has no price), 4.00 per hour now"
    )
    assert cost_words(PricingSpec(), seconds, {}) == ""


def test_a_rate_names_the_machines_that_have_no_price() -> None:
    def now(machines: dict[Pool, int], prices: PricingSpec) -> str:
        words = cost_words(prices, {Pool.RESERVED: 3600.0}, machines)
        return words.removeprefix("10.00 USD (reserved 10.00), ")

    prices = PricingSpec(reservedPerHour=10.0)
    assert now({Pool.SPOT: 3, Pool.RESERVED: 1}, prices) == "10.00 per hour now, without spot, which has no price"
    assert now({Pool.SPOT: 3}, prices) == "an unknown amount per hour now, for spot, which has no price"
    both = {Pool.SPOT: 3, Pool.ON_DEMAND: 1, Pool.RESERVED: 1}
    assert now(both, prices).endswith("without on-demand and spot, which have no price")
    assert now({Pool.SPOT: 3}, PricingSpec(reservedPerHour=10.0, spotPerHour=0.0)) == "0.00 per hour now"
