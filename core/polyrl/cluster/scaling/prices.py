"""What a fleet costs by the hour, and how large a one budgetPerHour pays for."""

from __future__ import annotations

from collections.abc import Callable

from polyrl.manifest.rollout import CapacityPolicy
from polyrl.manifest.scaling import Objective
from polyrl.manifest.spec import JobSpec


def hourly(spec: JobSpec, rollouts: int, num_on_demand: int = 0) -> float:
    """Price of a fleet for an hour; at least `num_on_demand` of them, and baseOnDemand, at the on-demand price."""
    spot, on_demand = spec.pricing.spot_per_hour or 0.0, spec.pricing.on_demand_per_hour or 0.0
    if spec.rollout.capacity.policy is CapacityPolicy.ON_DEMAND:
        return rollouts * on_demand
    costly = min(rollouts, max(num_on_demand, spec.rollout.capacity.base_on_demand))
    return costly * on_demand + (rollouts - costly) * spot


def affordable(spec: JobSpec, rollouts: int, num_on_demand: int = 0) -> int:
    """As many of them as the budget pays for; all where the objective has none."""
    return _within_budget(spec, rollouts, lambda size: hourly(spec, size, num_on_demand))


def affordable_on_demand(spec: JobSpec, rollouts: int) -> int:
    """How many of a fleet of that size may be on-demand, stand-ins included; all where the objective has no budget."""
    return _within_budget(spec, rollouts, lambda num_on_demand: hourly(spec, rollouts, num_on_demand))


def _within_budget(spec: JobSpec, most: int, price: Callable[[int], float]) -> int:
    if spec.scaling.objective is not Objective.THROUGHPUT_UNDER_BUDGET:
        return most
    budget = spec.scaling.budget_per_hour or 0.0
    return max((number for number in range(most + 1) if price(number) <= budget), default=0)
