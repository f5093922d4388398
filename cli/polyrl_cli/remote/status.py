"""`polyrl status JOB`: what became of a job on a cluster, told from the status that the operator writes.

Refuses to hold: facts of its own; everything said is in `kubectl get prl JOB -o yaml`. Read next: `kubernetes_run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from polyrl.cluster.actions import Object
from polyrl_cli.remote.cluster import ClusterOptions, user_cluster

ENDS: Final = ("Complete", "Failed")
"""Conditions after which nothing more happens."""

TROUBLE: Final = (
    ("Accepted", "False"),
    ("TrainerReady", "False"),
    ("CapacityLimited", "True"),
    ("Disrupting", "True"),
    ("Progressing", "False"),
    ("RolloutAvailable", "False"),
    ("ScalingLimited", "True"),
)
"""Conditions worth a line, and when."""

MICROS: Final = 1_000_000
"""Of a unit of money."""

SHOWN_DISRUPTIONS: Final = 3


def status_lines(name: str, where: ClusterOptions) -> list[str]:
    """The story so far. Raises UserError when there is no such job or no cluster."""

    async def ask() -> list[str]:
        async with user_cluster(where) as cluster:
            return story(await cluster.job(name))

    return asyncio.run(ask())


def story(raw: Object) -> list[str]:
    """A job as stored, in a few lines."""
    status: dict[str, Any] = raw.get("status") or {}
    if not status:
        return [f"{raw['metadata']['name']}: no operator has looked at it yet"]
    return [
        headline(raw),
        *_trainer(status.get("trainer") or {}),
        *_rollouts(status.get("rollout") or {}),
        *_scaling(status.get("scaling") or {}),
        *_cost(status.get("cost") or {}, raw["spec"].get("pricing", {}).get("currency", "")),
        *_trouble(status),
        *_disruptions(status.get("recentDisruptions") or []),
        *_failure(status.get("failure")),
    ]


def headline(raw: Object) -> str:
    """The job in one line: state, step, fleet."""
    status = raw.get("status") or {}
    rollout = status.get("rollout") or {}
    step, steps = (status.get("manager") or {}).get("step", 0), _steps(raw)
    parts = [f"{raw['metadata']['name']}: {status.get('state', 'Pending')}"]
    parts += [f"RL step {step} of {steps}"] if steps else []
    desired = rollout.get("desiredReplicas", 0)
    parts += [f"{rollout.get('registeredReplicas', 0)} of {desired} rollouts"] if desired else []
    return ", ".join(parts)


def condition(raw: Object, kind: str) -> dict[str, Any]:
    """The condition of that type; empty when it was never set."""
    found: list[dict[str, Any]] = (raw.get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {})


def ended(raw: Object) -> dict[str, Any]:
    """The condition by which a job is over; empty while it is not."""
    return next((one for kind in ENDS if (one := condition(raw, kind)).get("status") == "True"), {})


def _steps(raw: Object) -> int:
    recipe = raw["spec"]["recipe"]
    return 0 if recipe.get("mode") == "sft" else int((recipe.get("algorithm") or {}).get("steps", 0))


def _trainer(trainer: dict[str, Any]) -> Iterator[str]:
    if trainer:
        yield (
            f"  trainer   {trainer.get('ready', 0)} of {trainer.get('replicas', 0)} ready,"
            f" {trainer.get('restarts', 0)} restarts by its own fault, {trainer.get('disruptions', 0)} by the cluster's"
        )


def _rollouts(rollout: dict[str, Any]) -> Iterator[str]:
    if rollout:
        yield (
            f"  rollouts  {rollout.get('registeredReplicas', 0)} at work, {rollout.get('pendingReplicas', 0)} without a"
            f" node, {rollout.get('spotReplicas', 0)} on spot, {rollout.get('onDemandReplicas', 0)} on demand;"
            f" {rollout.get('preemptions', 0)} taken away, {rollout.get('failures', 0)} failed"
        )
        for pool in rollout.get("pools") or []:
            if pool.get("state") == "BackingOff":
                yield f"  {pool['name']:<9} backs off until {pool.get('backoffUntil', '?')}: {pool.get('lastReason')}"


def _scaling(scaling: dict[str, Any]) -> Iterator[str]:
    if scaling.get("lastReason"):
        yield f"  scaling   {scaling['lastReason']}"


def _cost(cost: dict[str, Any], currency: str) -> Iterator[str]:
    parts = {"reserved": "reservedMicros", "spot": "spotMicros", "on demand": "onDemandMicros"}
    given = {words: cost.get(key, 0) / MICROS for words, key in parts.items()}
    if any(given.values()):
        shares = ", ".join(f"{words} {amount:.2f}" for words, amount in given.items())
        yield f"  cost      {sum(given.values()):.2f} {currency} ({shares})"


def _trouble(status: dict[str, Any]) -> Iterator[str]:
    for one in status.get("conditions") or []:
        if (one["type"], one["status"]) in TROUBLE and status.get("state") not in ENDS:
            yield f"  {one['type']} is {one['status']} ({one.get('reason', '')}): {one.get('message', '')}"


def _disruptions(disruptions: list[dict[str, Any]]) -> Iterator[str]:
    for one in disruptions[-SHOWN_DISRUPTIONS:]:
        notice = one.get("noticeMillis", 0) / 1000
        yield f"  {one.get('noticeTime', '')}  {one['podName']} lost: {one.get('reason')}, {notice:.1f} s notice"


def _failure(failure: dict[str, Any] | None) -> Iterator[str]:
    if failure:
        code = f", exit status {failure['exitCode']}" if "exitCode" in failure else ""
        yield f"  failed    {failure['reason']}{code}: {failure.get('message', '')}"
