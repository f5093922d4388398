"""Money: how long machines were held, at the manifest's prices. What has no price is left out, not counted as free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from polyrl.history.steps import object_in
from polyrl.manifest.scaling import PricingSpec
from polyrl.sample import Pool

SECONDS_PER_HOUR: Final = 3600.0


def prices_in(job: Mapping[str, Any]) -> PricingSpec:
    """Of a manifest from elsewhere; none where it names none that can be read."""
    try:
        return PricingSpec.model_validate(object_in(object_in(job, "spec"), "pricing"))
    except ValidationError:
        return PricingSpec()


def price_per_hour(prices: PricingSpec, pool: Pool) -> float | None:
    """Of one machine; None where the manifest names none."""
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
    shares = spent(prices, seconds)
    if not shares:
        return ""
    parts = ", ".join(f"{pool} {amount:.2f}" for pool, amount in sorted(shares.items()))
    missing = sorted(pool for pool in seconds if pool not in shares)
    unknown = f"; {', '.join(missing)} has no price" if missing else ""
    now = f", {sum(cost_per_hour(prices, machines).values()):.2f} per hour now" if machines else ""
    return f"{sum(shares.values()):.2f} {prices.currency} ({parts}{unknown}){now}"
