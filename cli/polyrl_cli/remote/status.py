"""`polyrl status JOB`: what became of a job on a cluster, from the status that the operator writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from polyrl.cluster.actions import Object
from polyrl_cli.remote.cluster import ClusterOptions, user_cluster

ENDS: Final = ("Complete", "Failed")
"""Conditions after which nothing more happens."""

TROUBLE: Final = {
    "Accepted": "False",
    "TrainerReady": "False",
    "CapacityLimited": "True",
    "Disrupting": "True",
    "Progressing": "False",
    "RolloutAvailable": "False",
    "ScalingLimited": "True",
}
"""Conditions worth a line, and when."""

MICROS: Final = 1_000_000
"""Status amounts are in millionths of a unit of currency."""

SHOWN_DISRUPTIONS: Final = 3


def status_lines(name: str, options: ClusterOptions) -> list[str]:
    """The report on a job. Raises UserError when there is no such job or no cluster."""

    async def read() -> list[str]:
        async with user_cluster(options) as cluster:
            return status_report(await cluster.job(name))

    return asyncio.run(read())


def status_report(raw: Object) -> list[str]:
    """A job as stored, in a few lines."""
    status: dict[str, Any] = raw.get("status") or {}
    if not status:
        return [f"{raw['metadata']['name']}: no operator has handled it yet"]
    return [headline(raw), *(f"  {line}" for line in _details(status, raw["spec"]))]


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


def find_condition(raw: Object, kind: str) -> dict[str, Any]:
    """The condition of that type; empty when it was never set."""
    found: list[dict[str, Any]] = (raw.get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {})


def ended(raw: Object) -> dict[str, Any]:
    """The condition by which a job is over; empty while it is not."""
    return next((one for kind in ENDS if (one := find_condition(raw, kind)).get("status") == "True"), {})


def _steps(raw: Object) -> int:
    recipe = raw["spec"]["recipe"]
    return 0 if recipe.get("mode") == "sft" else int((recipe.get("algorithm") or {}).get("steps", 0))


def _details(status: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    if trainer := status.get("trainer"):
        yield (
            f"trainer   {trainer.get('ready', 0)} of {trainer.get('replicas', 0)} ready,"
            f" {trainer.get('restarts', 0)} restarts by its own fault, {trainer.get('disruptions', 0)} by the cluster's"
        )
    if rollout := status.get("rollout"):
        yield from _rollouts(rollout)
    if reason := (status.get("scaling") or {}).get("lastReason"):
        yield f"scaling   {reason}"
    yield from _cost(status.get("cost") or {}, spec.get("pricing", {}).get("currency", ""))
    for found in status.get("conditions") or []:
        if TROUBLE.get(found["type"]) == found["status"] and status.get("state") not in ENDS:
            yield f"{found['type']} is {found['status']} ({found.get('reason', '')}): {found.get('message', '')}"
    for lost in (status.get("recentDisruptions") or [])[-SHOWN_DISRUPTIONS:]:
        notice_s = lost.get("noticeMillis", 0) / 1000
        yield f"{lost.get('noticeTime', '')}  {lost['podName']} lost: {lost.get('reason')}, {notice_s:.1f} s notice"
    if failure := status.get("failure"):
        code = f", exit status {failure['exitCode']}" if "exitCode" in failure else ""
        yield f"failed    {failure['reason']}{code}: {failure.get('message', '')}"


def _rollouts(rollout: dict[str, Any]) -> Iterator[str]:
    yield (
        f"rollouts  {rollout.get('registeredReplicas', 0)} at work, {rollout.get('pendingReplicas', 0)} without a"
        f" node, {rollout.get('spotReplicas', 0)} on spot, {rollout.get('onDemandReplicas', 0)} on demand;"
        f" {rollout.get('preemptions', 0)} taken away, {rollout.get('failures', 0)} failed"
    )
    for pool in rollout.get("pools") or []:
        if pool.get("state") == "BackingOff":
            yield f"{pool['name']:<9} backs off until {pool.get('backoffUntil', '?')}: {pool.get('lastReason')}"


def _cost(cost: dict[str, Any], currency: str) -> Iterator[str]:
    keys = {"reserved": "reservedMicros", "spot": "spotMicros", "on demand": "onDemandMicros"}
    shares = {name: cost.get(key, 0) / MICROS for name, key in keys.items()}
    if any(shares.values()):
        text = ", ".join(f"{name} {amount:.2f}" for name, amount in shares.items())
        yield f"cost      {sum(shares.values()):.2f} {currency} ({text})"
