"""Ends of rollouts by their own fault: what failed, as half a sentence.

A failure is never taken for a preemption, nor the reverse: one waits longer each time, the other is replaced at once.
Refuses to hold: signs of the cluster (see `disruption`), what is done about it (see `pools`).
"""

from __future__ import annotations

from typing import Final

from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.facts import PodFacts, PodPhase
from polyrl.cluster.observation.node_signals import is_dead

OF_USE_S: Final = 60.0
"""A pod that lived so long before it ended with status 0 had started well: its agent saw a notice that we did not."""

SILENT_S: Final = 120.0
"""A registered engine that the manager has not listed for so long is stuck: a new manager knows all within 30 s."""


def failure(pod: PodFacts, ctx: ReconcileContext, silent_since: float | None) -> str:
    """Why the pod failed, for one that the cluster did not take; empty when it did not."""
    if pod.ended:
        return _ended(pod, ctx)
    if is_dead(pod, ctx) or not ctx.manager_answers:
        return ""
    if silent_since is not None and ctx.now - silent_since >= SILENT_S:
        return f"the manager has not heard its engine for {SILENT_S:.0f} s"
    due = start_due(pod, ctx)
    if due is not None and ctx.now >= due:
        return f"it did not register within {ctx.spec.rollout.startup_timeout_seconds} s of being scheduled"
    return ""


def start_due(pod: PodFacts, ctx: ReconcileContext) -> float | None:
    """Unix seconds by which the pod must have registered; None when it has, or has no node yet. An operator that began
    to look just now may have met a manager that did too, and does not know its engines yet."""
    if pod.scheduled_at is None or pod.name in ctx.engines or pod.uid in ctx.state.registered:
        return None
    began_at = ctx.now if ctx.state.began_at is None else ctx.state.began_at
    return max(pod.scheduled_at + ctx.spec.rollout.startup_timeout_seconds, began_at + SILENT_S)


def _ended(pod: PodFacts, ctx: ReconcileContext) -> str:
    lived = pod.uid in ctx.state.registered or ctx.now - pod.created_at >= OF_USE_S
    if pod.phase is PodPhase.SUCCEEDED:
        return "" if lived else "it ended with status 0 before it was of use"
    bad = next((end for end in pod.exits if end.code != 0), None)
    if bad is None:
        return f"the kubelet refused it: {pod.reason}" if pod.reason else "it ended, and nobody says why"
    return f"container {bad.container} ended with status {bad.code}" + (f" ({bad.reason})" if bad.reason else "")
