"""Steps of the run as the operator sees them go by: when one ends, what it measured, and whether that may be judged.

The trainer's report of a finished step travels with the manager's status; a new step number is the boundary between two
steps. A step counts only if it was watched from its start and the number of serving engines stayed the same.
Refuses to hold: what follows (see `gap`, `updates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.gap import Measured
from polyrl.cluster.look import Look
from polyrl.cluster.memory import StepWatch
from polyrl.status import EngineState

ROLLOUT_S: Final = "rolloutSeconds"
TRAIN_S: Final = "trainSeconds"
STEP_S: Final = "stepSeconds"
RESERVED_S: Final = "reservedSeconds"
"""Time in which the reserved engine generated; without it, all of a step that had no rollouts, and none of others."""
POLLUTED: Final = "pollutedStep"
"""1 when validation or a checkpoint fell into the step."""


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
    serving = sum(engine.state is not EngineState.DRAINING for engine in look.engines.values())
    if last is None:
        return StepNews(StepWatch(told.step, serving, whole=False), boundary=not told.trainer_connected)
    if told.step == last.step:
        steady = last.whole and serving == last.engines
        return StepNews(replace(last, whole=steady), boundary=not told.trainer_connected)
    begun = StepWatch(told.step, serving, whole=told.step > last.step)
    return StepNews(begun, _measured(look, last, serving), boundary=True)


def _measured(look: Look, last: StepWatch, serving: int) -> Measured | None:
    values = look.told.values if look.told is not None else {}
    if look.told is None or look.told.step < last.step or not {ROLLOUT_S, TRAIN_S, STEP_S} <= values.keys():
        return None
    alone = last.engines == 0 and look.spec.trainer.reserved_engine
    return Measured(
        step=look.told.step,
        engines=last.engines,
        rollout_s=values[ROLLOUT_S],
        train_s=values[TRAIN_S],
        step_s=values[STEP_S],
        reserved_s=values.get(RESERVED_S, values[ROLLOUT_S] if alone else 0.0),
        steady=last.whole and serving == last.engines and values.get(POLLUTED, 0.0) < 0.5,
    )
