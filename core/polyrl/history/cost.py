"""Money: how long machines were held, at the manifest's prices. What has no price is left out, not counted as free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from polyrl.history.steps import object_in
from polyrl.manifest.scaling import PricingSpec
from polyrl.sample import Pool

SECONDS_PER_HOUR: Final = 3600.0


class RunCost(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What a run has cost, as far as the manifest names prices."""

    currency: str
    total: float
    by_pool: dict[Pool, float]
    seconds: dict[Pool, float]
    """Seconds that machines were held, those without a price as well."""

    def words(self) -> str:
        """`12.34 USD (spot 10.00, reserved 2.34)`, and what is not in it."""
        parts = ", ".join(f"{pool} {amount:.2f}" for pool, amount in sorted(self.by_pool.items()))
        missing = sorted(self.seconds.keys() - self.by_pool.keys())
        unknown = f"; {' and '.join(missing)} {_without_price(missing)}" if missing else ""
        return f"{self.total:.2f} {self.currency} ({parts}{unknown})"


def run_cost(prices: PricingSpec, seconds: Mapping[Pool, float]) -> RunCost | None:
    """What a run has cost; None where nothing that was held has a price."""
    shares = spent(prices, seconds)
    if not shares:
        return None
    rounded = {pool: round(amount, 6) for pool, amount in shares.items()}
    total = round(sum(shares.values()), 6)
    held = {pool: round(one, 3) for pool, one in seconds.items()}
    return RunCost(currency=prices.currency, total=total, by_pool=rounded, seconds=held)


def prices_in(job: Mapping[str, Any]) -> PricingSpec:
    """Prices in a manifest from elsewhere; none where it names none that can be read."""
    try:
        return PricingSpec.model_validate(object_in(object_in(job, "spec"), "pricing"))
    except ValidationError:
        return PricingSpec()


def price_per_hour(prices: PricingSpec, pool: Pool) -> float | None:
    """Price of one machine for an hour; None where the manifest names none."""
    named = {
        Pool.RESERVED: prices.reserved_per_hour,
        Pool.SPOT: prices.spot_per_hour,
        Pool.ON_DEMAND: prices.on_demand_per_hour,
    }
    return named[pool]


def spent(prices: PricingSpec, seconds: Mapping[Pool, float]) -> dict[Pool, float]:
    """What so many seconds of machines cost, by pool."""
    priced = {pool: price_per_hour(prices, pool) for pool in seconds}
    return {pool: seconds[pool] / SECONDS_PER_HOUR * price for pool, price in priced.items() if price is not None}


def cost_per_hour(prices: PricingSpec, machines: Mapping[Pool, int]) -> dict[Pool, float]:
    """What so many machines cost in an hour, by pool."""
    return spent(prices, {pool: count * SECONDS_PER_HOUR for pool, count in machines.items()})


def cost_words(prices: PricingSpec, seconds: Mapping[Pool, float], machines: Mapping[Pool, int]) -> str:
    """`12.34 USD (spot 10.00, reserved 2.34), 3.20 per hour now`; empty where nothing has a price."""
    cost = run_cost(prices, seconds)
    if cost is None:
        return ""
    return cost.words() + (f", {_rate_words(prices, machines)}" if machines else "")


def _rate_words(prices: PricingSpec, machines: Mapping[Pool, int]) -> str:
    rate = cost_per_hour(prices, machines)
    missing = sorted(machines.keys() - rate.keys())
    if not missing:
        return f"{sum(rate.values()):.2f} per hour now"
    known = f"{sum(rate.values()):.2f} per hour now, without" if rate else "an unknown amount per hour now, for"
    return f"{known} {' and '.join(missing)}, which {_without_price(missing)}"


def _without_price(pools: Sequence[Pool]) -> str:
    return "has no price" if len(pools) == 1 else "have no price"
