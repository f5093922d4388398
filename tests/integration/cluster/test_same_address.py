"""Addresses are used again: who has one now is known by its pod's uid and keys, never by the address itself."""

from __future__ import annotations

import asyncio
from typing import Any

from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus
from polyrl_operator.api.kinds import POD


def engine(name: str) -> EngineStatus:
    return EngineStatus(
        name=name, pool=Pool.SPOT, state=EngineState.SERVING, weight_version=0, running=0, max_running=4, tokens=0
    )


async def rollout_status(place: Any) -> dict[str, Any]:
    found: dict[str, Any] = ((await place.job()).get("status") or {}).get("rollout", {})
    return found


async def registered(place: Any, count: int) -> bool:
    return (await rollout_status(place)).get("registeredReplicas") == count


async def test_a_rollout_with_a_dead_ones_address_is_another(
    place: Any, nodes: Any, run_operator: Any, serve_manager: Any, unused_tcp_port: int
) -> None:
    """Every pod of the stand-in nodes has the same address, so a replacement has the dead one's at once."""
    async with run_operator():
        await place.submit(manager={"port": unused_tcp_port}, telemetry={"pollSeconds": 2})
        dead, other = (pod["metadata"] for pod in await place.rollouts(2))
        manager = await serve_manager(unused_tcp_port)
        try:
            await manager.report(engines=(engine(dead["name"]), engine(other["name"])))
            ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
            await place.client.patch(POD, place.namespace, "job-manager-1", ready, "status")
            await place.until("both are registered", lambda: registered(place, 2))
            await place.client.delete(POD, place.namespace, dead["name"], dead["uid"], 0)
            names = {pod["metadata"]["name"] for pod in await place.rollouts(2)}
            assert names == {other["name"], "job-r-3"}
            assert {pod["status"]["podIP"] for pod in await place.pods()} == {"127.0.0.1"}
            await place.until("one is left", lambda: registered(place, 1))
            # The lease of the dead one has not run out yet, and the new one has greeted.
            await manager.report(engines=tuple(engine(name) for name in (dead["name"], other["name"], "job-r-3")))
            await place.until("the new one counts, the dead one does not", lambda: registered(place, 2))
            await manager.report(engines=(engine(other["name"]), engine("job-r-3")))
            await asyncio.sleep(1)
            status = await rollout_status(place)
            assert (status["preemptions"], status["registeredReplicas"], status["replicas"]) == (1, 2, 2)
            assert {drain.engine for drain in manager.drains} <= {dead["name"]}
        finally:
            await manager.stop()
