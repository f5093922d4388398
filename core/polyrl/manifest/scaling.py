"""`spec.scaling` and `spec.pricing`: how many rollouts there should be, and what capacity costs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from polyrl.manifest.base import BY_VALUE, Count, ManifestModel, Percent, Positive

Price = Annotated[float, Field(ge=0, le=100_000)]
"""Per pod and hour; the bound catches a price per month."""


class ScalingMode(StrEnum):
    """Who decides on the number of rollouts."""

    GAP = "Gap"
    """The operator, from the gap between rollout time and training time of a step."""
    EXTERNAL = "External"
    """An autoscaler that writes the scale subresource (HPA, KEDA)."""
    MANUAL = "Manual"
    """The user, by `rollout.replicas`."""


class Objective(StrEnum):
    """What mode Gap strives for."""

    THROUGHPUT = "Throughput"
    """Shortest step; price does not matter."""
    COST = "Cost"
    """Fewest money per trained sample."""
    THROUGHPUT_UNDER_BUDGET = "ThroughputUnderBudget"
    """Shortest step that `budgetPerHour` pays for."""


class GapSpec(ManifestModel):
    """Hysteresis of mode Gap. The gap is (rollout time - training time) / step time."""

    tolerance_percent: Percent = 10
    """Dead band: gaps below this percentage of a step change nothing; half as much again to turn round."""
    scale_up_window_steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Steps looked back on before growing; the smallest recommendation in the window counts."""
    scale_down_window_steps: Annotated[int, Field(ge=1, le=100)] = 3
    """Steps looked back on before shrinking; the largest recommendation in the window counts."""
    max_scale_up_per_step: Annotated[int, Field(ge=1, le=1024)] = 4
    """Rollouts added after one step; spot capacity comes back in bulk, so this may be large."""
    max_scale_down_per_step: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts removed after one step."""
    cooldown_seconds: Count = 120
    """Seconds between two changes; replacing lost rollouts never waits for it."""
    stale_after_seconds: Positive = 900
    """Seconds after which measurements count as stale; three steps, where that is longer."""


class ScalingSpec(ManifestModel):
    """How many rollouts there should be."""

    mode: Annotated[ScalingMode, BY_VALUE] = ScalingMode.GAP
    """Who decides."""
    objective: Annotated[Objective, BY_VALUE] = Objective.THROUGHPUT
    """What mode Gap strives for."""
    budget_per_hour: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    """Most that the rollouts may cost per hour, in pricing.currency; for objective ThroughputUnderBudget."""
    gap: GapSpec = GapSpec()
    """Hysteresis of mode Gap."""


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
