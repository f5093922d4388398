"""Steps of the run as the operator sees them go by: when one ends, what it measured, and whether that may be judged.

The trainer's report of a finished step travels with the manager's status; a new step number is the boundary between two
steps. A step counts only if it was watched from its start and the number of serving engines stayed the same.
Refuses to hold: what follows (see `gap`, `updates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.autoscaling.gap import Measured
from polyrl.cluster.observation.context import Look
from polyrl.cluster.state import StepWatch
from polyrl.status import EngineState, StepValue

GENERATE: Final = (EngineState.SERVING, EngineState.SUSPECT)
"""States in which an engine takes part in a step."""

NEEDED: Final = {StepValue.ROLLOUT_SECONDS, StepValue.TRAIN_SECONDS, StepValue.STEP_SECONDS}
"""Without these a step cannot be judged."""


@dataclass(frozen=True)
class StepNews:
    """What this look tells about steps."""

    watch: StepWatch | None
    """To be remembered."""
    measured: Measured | None = None
    """The step that ended since the last look."""
    boundary: bool = False
    """True in the one look that sees a new step begin, and while no step is under way."""


def step_news(look: Look) -> StepNews:
    """Compares with what was remembered. Without word from the manager nothing is known, and nothing begins."""
    told, last = look.told, look.memory.watch
    if told is None or not look.manager_answers:
        return StepNews(last)
    serving = sum(engine.state in GENERATE for engine in look.engines.values())
    if last is None:
        return StepNews(StepWatch(told.step, serving, whole=False), boundary=not told.trainer_connected)
    if told.step == last.step:
        steady = last.whole and serving == last.engines
        return StepNews(replace(last, whole=steady), boundary=not told.trainer_connected)
    begun = StepWatch(told.step, serving, whole=told.step > last.step)
    return StepNews(begun, _measured(look, last, serving), boundary=True)


def _measured(look: Look, last: StepWatch, serving: int) -> Measured | None:
    values = look.told.values if look.told is not None else {}
    if look.told is None or look.told.step < last.step or not values.keys() >= NEEDED:
        return None
    alone = last.engines == 0 and look.spec.trainer.reserved_engine
    return Measured(
        step=look.told.step,
        engines=last.engines,
        rollout_s=values[StepValue.ROLLOUT_SECONDS],
        train_s=values[StepValue.TRAIN_SECONDS],
        step_s=values[StepValue.STEP_SECONDS],
        reserved_s=values.get(StepValue.RESERVED_SECONDS, values[StepValue.ROLLOUT_SECONDS] if alone else 0.0),
        steady=last.whole and serving == last.engines and values.get(StepValue.POLLUTED_STEP, 0.0) < 0.5,
    )
