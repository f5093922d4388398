"""Deletes pods: annotated as our own decision, and by force only where no kubelet will ever answer.

A pod on a silent node stays until its kubelet answers, and keeps its volume and its name. It is removed by force, grace
0, once it is GIVEN_UP_S past its grace (the rule of Kueue's KEP-6757); on a machine that is gone for certain, at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import Action, Annotate, Delete
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.disruption import is_dead, is_gone
from polyrl.cluster.observation.facts import PodFacts

GIVEN_UP_S: Final = 60.0
"""A node that has been silent for its pods' whole grace and this long again is not expected to kill them."""


def forced_deletions(ctx: ReconcileContext) -> tuple[list[Delete], float | None]:
    """Those that are due, of pods of every role that are being deleted on nodes that do not answer, and when the next
    one will be."""
    actions, dues = [], []
    for pod in ctx.facts.pods:
        due = _force_due(pod, ctx)
        if due is not None and ctx.now >= due:
            why = f"node {pod.node} does not answer for it"
            actions.append(Delete("Pod", pod.name, uid=pod.uid, why=why, grace_s=0))
        elif due is not None:
            dues.append(due)
    return actions, min(dues, default=None)


def release(pod: PodFacts, why: str) -> Iterator[Action]:
    """The reason, annotated on the pod, and the deletion with the pod's own grace; neither of them twice."""
    if names.ANNOTATION_RELEASED not in pod.annotations:
        yield Annotate(pod.name, pod.uid, annotations={names.ANNOTATION_RELEASED: why}, why=f"it is released: {why}")
    if pod.deletion_at is None:
        yield Delete("Pod", pod.name, uid=pod.uid, why=why)


def _force_due(pod: PodFacts, ctx: ReconcileContext) -> float | None:
    if pod.deletion_at is None or not is_dead(pod, ctx):
        return None
    return ctx.now if is_gone(pod, ctx) else pod.deletion_at + GIVEN_UP_S
