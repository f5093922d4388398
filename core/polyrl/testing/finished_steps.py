"""Finished steps as a manager reports them."""

from __future__ import annotations

from typing import Any

from polyrl.status import FinishedStep


def finished_step(
    number: int, engines: float, *, rollout_s: float, train_s: float, shared_s: float | None = None, **more: Any
) -> FinishedStep:
    """`shared_s`: engine-seconds that more engines would share; None: all of them."""
    busy_s = engines * rollout_s
    shared_s = busy_s if shared_s is None else shared_s
    plain = {"step_seconds": max(rollout_s, train_s) + 1, "steady": True, "evaluation_engine_seconds": 0.0}
    return FinishedStep(
        step=number,
        engines=engines,
        rollout_seconds=rollout_s,
        train_seconds=train_s,
        busy_engine_seconds=busy_s,
        shared_engine_seconds=shared_s,
        next_engine_saves_seconds=shared_s / (engines * (engines + 1)) if engines else 0.0,
        **plain | more,
    )
