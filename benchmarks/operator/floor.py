"""The floor under the operator: a plain client that makes the same objects on the same API server, and decides nothing.

Bodies are encoded beforehand and answers are not read, so what it takes is the API server, the scheduler, the job
controller and the nodes; no operator of whatever language is quicker on this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Final

import aiohttp
import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import MakeKeys, Object
from polyrl.cluster.resources.fixed import fixed_children, manager_hosts
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Pool
from polyrl_operator.api.kinds import KINDS, POD
from polyrl_operator.secret import engine_secret, keys_secret, role_secrets

SETTINGS: Final = Settings("m", "t", rollout_image="r")
SIDE_BY_SIDE: Final = 32
"""As many as the operator sends."""
POLL_S: Final = 0.2
DEADLINE_S: Final = 120.0


def objects_of(manifest: Object) -> list[Object]:
    """All that the operator makes for a job, but for Events."""
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    job = PolyRLJob.model_validate(manifest)
    owner = Owner(name, namespace, f"uid-{name}", job=job, settings=SETTINGS)
    keys = MakeKeys(names.keys_secret_name(name), manager_hosts(owner), now=time.time())
    root = keys_secret(owner, keys)
    stored = root | {"metadata": root["metadata"] | {"uid": f"keys-of-{name}"}}
    rollouts = [rollout_pod(owner, number + 1, Pool.SPOT) for number in range(job.spec.rollout.replicas or 0)]
    engines = [pod["metadata"]["name"] for pod in rollouts]
    return [
        root,
        *role_secrets(owner, stored, keys),
        *fixed_children(owner),
        manager_pod(owner, 1),
        trainer_job(owner),
        *rollouts,
        *(engine_secret(owner, stored, engine, f"uid-{engine}") for engine in engines),
    ]


async def floor(session: aiohttp.ClientSession, host: str, manifests: list[Object]) -> dict[str, Any]:
    """Seconds until all objects of these jobs are made, and until their pods run. Raises SystemExit."""
    made = [(host + KINDS[item["kind"]].path(item["metadata"]["namespace"]), msgspec.json.encode(item))
            for manifest in manifests for item in objects_of(manifest)]  # fmt: skip
    began, left = time.monotonic(), iter(made)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(_send(session, left) for _ in range(SIDE_BY_SIDE)))
        created = time.monotonic() - began
        pods = host + POD.path(manifests[0]["metadata"]["namespace"])
        wanted = len(manifests) * (2 + manifests[0]["spec"]["rollout"]["replicas"])
        while not await _all_run(session, pods, wanted):  # noqa: ASYNC110 - a watch would be the operator's cost
            await asyncio.sleep(POLL_S)
    run = time.monotonic() - began
    return {"jobs": len(manifests), "objects": len(made), "createSeconds": round(created, 1), "seconds": round(run, 1)}


async def _send(session: aiohttp.ClientSession, left: Iterator[tuple[str, bytes]]) -> None:
    for url, body in left:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            if answer.status != 201:
                raise SystemExit(f"POST {url}: {answer.status} {await answer.text()}")


async def _all_run(session: aiohttp.ClientSession, pods: str, wanted: int) -> bool:
    async with session.get(f"{pods}?limit=1") as answer:
        metadata = (await answer.json())["metadata"]
    if 1 + metadata.get("remainingItemCount", 0) < wanted:
        return False
    async with session.get(f"{pods}?limit=1&fieldSelector=status.phase=Pending") as answer:
        return not (await answer.json())["items"]
