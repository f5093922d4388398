"""What GitOps tools compare stays as it was applied: a job's spec, labels and annotations, however often the operator
scales it; and nothing that is not a job's own is written to."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus
from polyrl.testing.finished_steps import finished_step
from polyrl_operator.api.kinds import JOB, POD, TRAINER

WRITES = {
    ("create", "pods"), ("patch", "pods"), ("delete", "pods"), ("create", "jobs"), ("create", "secrets"),
    ("create", "services"), ("create", "serviceaccounts"), ("create", "configmaps"),
    ("create", "persistentvolumeclaims"), ("create", "poddisruptionbudgets"), ("create", "networkpolicies"),
    ("patch", "polyrljobs/status"), ("create", "events"), ("patch", "events"),
    ("create", "leases"), ("update", "leases"),
}  # fmt: skip
"""All that it writes in such an hour; of the job its status alone."""
GAP = {"cooldownSeconds": 0, "scaleUpWindowSteps": 1, "scaleDownWindowSteps": 1, "maxScaleDownPerStep": 8}
SLOW, QUICK = 60.0, 5.0
"""Seconds of generation, when training takes TRAIN_S."""
TRAIN_S = 20.0
STEPS = (QUICK, SLOW, QUICK, SLOW)


async def run_step(place: Any, manager: Any, step: int, rollout_s: float) -> None:
    """A step goes by in which all rollouts that run generated for `rollout_s`."""
    # One that was let go may still be there for a moment, and would be registered for no longer.
    live = [pod["metadata"] for pod in await place.pods("rollout") if "deletionTimestamp" not in pod["metadata"]]
    names = sorted(metadata["name"] for metadata in live)
    engines = tuple(
        EngineStatus(name=name, pool=Pool.SPOT, state=EngineState.SERVING, weight_version=1, running=1,
                     max_running=4, tokens=0) for name in names
    )  # fmt: skip
    await manager.report(engines=engines)
    await place.until(f"{len(engines)} are registered", lambda: registered(place, len(engines)))
    finished = finished_step(step, len(engines), rollout_s=rollout_s, train_s=TRAIN_S, step_seconds=80.0)
    await manager.report(step=step, finished_steps=(finished,))
    await place.until(f"step {step} is seen", lambda: seen(place, step))


async def registered(place: Any, count: int) -> bool:
    rollout = ((await place.job()).get("status") or {}).get("rollout", {})
    return rollout.get("registeredReplicas") == count == rollout.get("desiredReplicas")


async def seen(place: Any, step: int) -> bool:
    status = (await place.job()).get("status") or {}
    return bool(status.get("manager", {}).get("step") == step)


async def desired(place: Any) -> int:
    return int((await place.job())["status"]["rollout"]["desiredReplicas"])


def applied(job: dict[str, Any]) -> str:
    """What a GitOps tool compares."""
    metadata = {key: job["metadata"].get(key) for key in ("labels", "annotations", "finalizers", "generation")}
    return json.dumps([metadata, job["spec"]], sort_keys=True)


async def test_autoscaling_leaves_no_drift(
    place: Any, nodes: Any, run_operator: Any, serve_manager: Any, unused_tcp_port: int
) -> None:
    async with run_operator() as held:
        stored = await place.submit(
            manager={"port": unused_tcp_port},
            scaling={"mode": "Gap", "gap": GAP},
            telemetry={"pollSeconds": 2},
            rollout={"replicas": 2, "minReplicas": 1, "maxReplicas": 6},
        )
        await place.rollouts(2)
        manager = await serve_manager(unused_tcp_port)
        try:
            await manager.report(trainer_connected=True)
            ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
            await place.client.patch(POD, place.namespace, "job-manager-1", ready, "status")
            sizes = [2]
            for step, rollout_s in enumerate(STEPS, start=1):
                await run_step(place, manager, step, rollout_s)
                sizes.append(await desired(place))
                await place.rollouts(sizes[-1])
        finally:
            await manager.stop()
        counts = held.one.requests.counts
    print(f"desired over {len(STEPS)} steps: {sizes}")
    assert sum(one != other for one, other in pairwise(sizes)) >= 3, "it was scaled up and down"
    job = await place.job()
    assert applied(job) == applied(stored)
    fields = {(one["manager"], one.get("subresource", "")) for one in job["metadata"]["managedFields"]}
    assert fields == {("test", ""), ("polyrl-operator", "status")}
    writes = {(access.verb, access.resource) for access, _ in counts if access.verb not in ("get", "list", "watch")}
    assert writes <= WRITES
    assert JOB.plural not in {resource for _, resource in writes}


async def test_a_label_that_many_tools_set_hides_no_child(place: Any, nodes: Any, run_operator: Any) -> None:
    """A pod that the operator does not see would hold its GPU until the job is deleted, beside the one made for it."""
    label = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "argocd"}}}
    async with run_operator() as held:
        await place.submit()
        pods = await place.rollouts(2)
        for kind, name in ((TRAINER, "job-trainer"), *((POD, pod["metadata"]["name"]) for pod in pods)):
            await place.client.patch(kind, place.namespace, name, label)
        await held.one.resync.read_all()
        manager = (await place.pods("manager"))[0]["metadata"]
        await place.client.delete(POD, place.namespace, manager["name"], manager["uid"])
        await place.until("it looks on", lambda: place.client.get(POD, place.namespace, "job-manager-2"))
        assert {pod["metadata"]["uid"] for pod in await place.rollouts(2)} == {pod["metadata"]["uid"] for pod in pods}
        assert (await place.job())["status"]["rollout"]["preemptions"] == 0
