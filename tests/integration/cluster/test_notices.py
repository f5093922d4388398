"""From a fact to a drain: whatever announces a rollout's end, its manager learns of it at once, and once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus
from polyrl_operator.api.kinds import NODE, POD
from polyrl_operator.managers.client import DRAIN_S

PROMISED_S = 2.0
"""From the fact to the drain; on a machine that does other things as well it is printed, not checked."""
DEADLINE_S = 30.0


def engine(name: str) -> EngineStatus:
    return EngineStatus(
        name=name, pool=Pool.SPOT, state=EngineState.SERVING, weight_version=0, running=0, max_running=4, tokens=0
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def node(place: Any, nodes: Any) -> AsyncIterator[str]:
    """The node that all pods run on; a cluster has one of that name, so it is made anew."""
    name = f"node-{place.namespace}"
    nodes._node = name
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    stored = await place.client.create(made)
    await place.client.patch(NODE, "", name, {"status": {"conditions": [ready]}}, "status")
    # What the node controller would take away from a node that is ready.
    await place.client.patch(NODE, "", name, {"spec": {"taints": []}})
    yield name
    await place.client.delete(NODE, "", name, stored["metadata"]["uid"])


async def deleted(place: Any, pod: dict[str, Any], node: str) -> None:
    await place.client.delete(POD, place.namespace, pod["name"], pod["uid"], 30)


async def tainted(place: Any, pod: dict[str, Any], node: str) -> None:
    taint = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
    await place.client.patch(NODE, "", node, {"spec": {"taints": [taint]}})


async def disrupted(place: Any, pod: dict[str, Any], node: str) -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    await place.client.patch(POD, place.namespace, pod["name"], {"status": {"conditions": [target]}}, "status")


@pytest.mark.parametrize("fact", [deleted, tainted, disrupted])
async def test_a_fact_becomes_a_drain(
    fact: Any, place: Any, nodes: Any, node: str, start_operator: Any, serve_manager: Any
) -> None:
    port = free_port()
    async with start_operator("--nodes") as operator:
        await place.submit(manager={"port": port}, telemetry={"pollSeconds": 2})
        pods = [pod["metadata"] for pod in await place.rollouts(2)]
        manager = await serve_manager(port)
        try:
            await manager.report(engines=tuple(engine(pod["name"]) for pod in pods))
            ready = {"type": "Ready", "status": "True"}
            await place.client.patch(
                POD, place.namespace, "job-manager-1", {"status": {"conditions": [ready]}}, "status"
            )
            await place.until("both rollouts are registered", lambda: registered(place, 2))
            nodes.held |= {pod["name"] for pod in pods}
            began = time.monotonic()
            await fact(place, pods[0], node)
            await place.until("the manager is informed", lambda: is_drained(manager, pods[0]["name"]))
            print(f"{fact.__name__}: drained {time.monotonic() - began:.2f} s after the fact, promised {PROMISED_S} s")
            expected = {pod["name"] for pod in pods} if fact is tainted else {pods[0]["name"]}
            counted = f"polyrl_drain_seconds_count {float(len(expected))}"
            await place.until("all are reported and counted", lambda: shown(operator, counted))
            await asyncio.sleep(3)
            assert {drain.engine for drain in manager.drains} == expected
            for name in expected:
                # A try that found this process waiting for a core is given up and followed by another one.
                left = [drain.deadline_seconds for drain in manager.drains if drain.engine == name]
                assert all(one - other >= DRAIN_S for one, other in pairwise(left)), "each is sent until it is received"
            _, text = await operator.get("/metrics")
            assert counted in text, "and no more after it was"
            assert "polyrl_drain_failures_total 0.0" in text
        finally:
            await manager.stop()


async def registered(place: Any, count: int) -> bool:
    status = (await place.job()).get("status") or {}
    return bool(status.get("rollout", {}).get("registeredReplicas") == count)


async def shown(operator: Any, line: str) -> bool:
    return line in (await operator.get("/metrics"))[1]


async def is_drained(manager: Any, engine: str) -> bool:
    return any(drain.engine == engine for drain in manager.drains)
