"""A whole run in virtual time: the production ledger between simulated engines and a simulated trainer, with faults.

    schedule (from a seed) -> world (event heap) -> engines, trainer <-> ledger
                                                 -> watcher (invariants after every event)

`python -m polyrl_rollout.testing.simulation SEED` runs one schedule; the same seed always gives the same run. Nothing
here is a copy of a rule: what is simulated are the peers, the network and the clock.
"""

from __future__ import annotations

from polyrl_rollout.testing.simulation.invariants import Violation
from polyrl_rollout.testing.simulation.run import Result, run_schedule, shrink
from polyrl_rollout.testing.simulation.schedule import Schedule, SimulatedFault, draw_schedule

__all__ = ["Result", "Schedule", "SimulatedFault", "Violation", "draw_schedule", "run_schedule", "shrink"]
