"""How many rollouts are wished now, by whoever decides: the gap, an autoscaler, or the user.

Refuses to hold: the sum itself (see `gap`), bounds of machines (see `mix`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyrl.cluster.autoscaling.gap import Measured, Sizing, clamp, sizing
from polyrl.cluster.autoscaling.steps import StepNews
from polyrl.cluster.observation.context import Look
from polyrl.cluster.observation.rollouts import Rollout, of_pool
from polyrl.cluster.state import Recommendation
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import ScalingStatus
from polyrl.sample import Pool
from polyrl.worker import num_rollouts

TEXT: int = 1024
"""Characters of a status text."""


@dataclass(frozen=True)
class Wish:
    """The wished number and what led to it."""

    wished: int
    scaling: ScalingStatus
    window: tuple[Recommendation, ...]
    active: bool
    """True while measurements move the number."""
    reason: str
    """Of the condition ScalingActive."""
    message: str
    changed: str = ""
    """The decision as a sentence, in the look that changes the number."""


def wish(look: Look, fleet: Sequence[Rollout], news: StepNews) -> Wish:
    """Of a running job."""
    stored, window, mode = look.status.scaling, look.memory.recommendations, look.spec.scaling.mode
    if not look.wants_rollouts:
        return Wish(0, stored, (), False, "NotWanted", "this mode samples nothing to train on")
    if mode is not ScalingMode.GAP:
        who = "an autoscaler" if mode is ScalingMode.EXTERNAL else "the user"
        return Wish(num_rollouts(look.spec), stored, (), False, mode.value, f"{who} decides on the number of rollouts")
    begun = look.status.start_time is not None
    now_wished = clamp(look.spec, look.status.rollout.desired_replicas) if begun else num_rollouts(look.spec)
    if news.measured is not None:
        return _measured(look, fleet, news.measured, now_wished)
    last = unix(stored.last_step_time)
    if last is None:
        return Wish(now_wished, stored, window, False, "WarmUp", "no step has been measured yet")
    limit = look.spec.scaling.gap.stale_after_seconds
    if look.now - last > limit:
        said = f"no step has been measured for more than {limit} s, so the number stays"
        return Wish(now_wished, stored, (), False, "MetricsStale", said)
    return Wish(now_wished, stored, window, True, "Measured", "the number follows the measured gap")


def stale_at(look: Look) -> float | None:
    """When measurements become too old to move anything."""
    last = unix(look.status.scaling.last_step_time)
    return None if last is None else last + look.spec.scaling.gap.stale_after_seconds


def _measured(look: Look, fleet: Sequence[Rollout], measured: Measured, now_wished: int) -> Wish:
    stored = look.status.scaling
    scaled_at = unix(stored.last_scale_time)
    cooled = scaled_at is None or look.now - scaled_at >= look.spec.scaling.gap.cooldown_seconds
    dear = len(of_pool(fleet, Pool.ON_DEMAND))
    sized = sizing(look.spec, measured, now_wished, look.memory.recommendations, cooled, dear)
    scaling = _status(look, stored, measured, sized)
    active = ("Measured", "the number follows the measured gap")
    return Wish(sized.wished, scaling, sized.window, True, *active, changed=sized.why if sized.changed else "")


def _status(look: Look, stored: ScalingStatus, measured: Measured, sized: Sizing) -> ScalingStatus:
    return stored.model_copy(
        update={
            "last_step": measured.step,
            "last_step_time": millisecond(look.now),
            "train_millis": _millis(measured.train_s),
            "rollout_millis": _millis(measured.rollout_s),
            "gap_millis": round((measured.rollout_s - measured.train_s) * 1000),
            "seed_millis": _millis(measured.reserved_s),
            "recommended_replicas": max(0, sized.recommended),
            "last_scale_time": millisecond(look.now) if sized.changed else stored.last_scale_time,
            "last_reason": sized.why[:TEXT],
        }
    )


def _millis(seconds: float) -> int:
    return max(0, round(seconds * 1000))
