"""`spec.pricing`: what capacity costs. Prices are the user's; nothing is looked up. Read next: `rules`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyrl.manifest.base import ManifestModel

Price = Annotated[float, Field(ge=0, le=100_000)]
"""Per pod and hour; the bound catches a price per month."""


class PricingSpec(ManifestModel):
    """Prices of one pod for an hour, all its devices together; without a price its share of the cost stays unknown."""

    currency: Annotated[str, Field(min_length=3, max_length=3, pattern=r"^[A-Z]{3}$")] = "USD"
    """ISO 4217 code; only printed, never converted."""
    spot_per_hour: Price | None = None
    """One rollout on spot capacity."""
    on_demand_per_hour: Price | None = None
    """One rollout on on-demand capacity."""
    reserved_per_hour: Price | None = None
    """One trainer pod, its reserved engine included."""
