"""A pod that can read a job's volume when the trainer's pod has ended: nothing can be run in one that has.

It is made of the trainer's own template, so it may run wherever the trainer did: the same image, volume, user and
tolerations; but no devices, no keys, no token, and the volume read-only. It ends by itself, and with the job.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.errors import UserError
from polyrl_cli.remote.cluster import GONE, UserCluster
from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import POD

CONTAINER: Final = "reader"
LIVES_S: Final = 3600
"""Longest reading; after it the pod ends, whatever became of this command."""
START_S: Final = 180.0
"""Longest wait for a node, the volume and the image."""
NAME_BYTES: Final = 3
"""Random bytes in the pod's name: several people may read at a time."""

KEPT_OF_THE_POD: Final = (
    "imagePullSecrets", "nodeSelector", "securityContext", "serviceAccountName", "tolerations",
)  # fmt: skip
KEPT_OF_THE_CONTAINER: Final = ("image", "imagePullPolicy", "securityContext")

FORBIDDEN: Final = 403


def reader_pod(job: Object, trainer: Object) -> Object:
    """The pod, from the job and the trainer's Job. Raises UserError when the run's folder ended with its pod."""
    template = trainer["spec"]["template"]["spec"]
    theirs = template["containers"][0]
    mount = next(one for one in theirs["volumeMounts"] if one["mountPath"] == names.RUN_DIR)
    volume = next(one for one in template["volumes"] if one["name"] == mount["name"])
    name = job["metadata"]["name"]
    if "emptyDir" in volume:
        raise UserError(f"{name}: its files ended with the trainer's pod (trainer.storage.ephemeral)")
    container: dict[str, Any] = {key: theirs[key] for key in KEPT_OF_THE_CONTAINER if key in theirs}
    container |= {"name": CONTAINER, "command": [theirs["command"][0], "-c", f"import time; time.sleep({LIVES_S})"]}
    container |= {"volumeMounts": [mount | {"readOnly": True}]}
    container["resources"] = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
    spec = {key: template[key] for key in KEPT_OF_THE_POD if key in template}
    spec |= {"containers": [container], "volumes": [volume], "restartPolicy": "Never"}
    spec |= {"activeDeadlineSeconds": LIVES_S, "terminationGracePeriodSeconds": 0}
    spec |= {"automountServiceAccountToken": False, "enableServiceLinks": False}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(job), "spec": spec}


def _metadata(job: Object) -> Object:
    """Without the labels by which the operator, its Services and network rules know a job's pods."""
    whose = job["metadata"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": whose["name"], "uid": whose["uid"]}
    return {
        "name": f"{whose['name']}-reader-{secrets.token_hex(NAME_BYTES)}",
        "namespace": whose["namespace"],
        "labels": {f"{names.APP}/name": "polyrl", f"{names.APP}/component": CONTAINER},
        "ownerReferences": [owner],
    }


@asynccontextmanager
async def running_reader(cluster: UserCluster, job: Object, trainer: Object) -> AsyncIterator[str]:
    """The name of a reader that runs, and is deleted afterwards. Raises UserError when none can be had."""
    wanted = reader_pod(job, trainer)
    try:
        made = await cluster.client.create(wanted)
    except ApiError as error:
        if error.status == FORBIDDEN:
            raise UserError(
                f"the trainer's pod has ended, and you may not make one that reads its volume in namespace"
                f" {cluster.namespace}: it takes create and delete of pods"
            ) from None
        raise
    name = made["metadata"]["name"]
    try:
        await _until_running(cluster, name)
        yield name
    finally:
        await cluster.client.delete(POD, cluster.namespace, name, made["metadata"]["uid"], 0)


async def _until_running(cluster: UserCluster, name: str) -> None:
    seen: Object = {}
    try:
        async with asyncio.timeout(START_S):
            async for change, pods in cluster.changes(POD, field_selector=f"metadata.name={name}"):
                seen = pods[0] if pods else seen
                phase = (seen.get("status") or {}).get("phase")
                if phase == "Running":
                    return
                if change == GONE or phase in ("Succeeded", "Failed"):
                    break
    except TimeoutError:
        pass
    raise UserError(f"the pod {name}, which would read the volume, does not run: {waits_for(seen)}")


def waits_for(pod: Object) -> str:
    """Why a pod does not run yet, in its cluster's words."""
    status = pod.get("status") or {}
    waiting = [one.get("state", {}).get("waiting") for one in status.get("containerStatuses") or ()]
    for reason in filter(None, waiting):
        return f"{reason.get('reason', 'waiting')}: {reason.get('message', '')}".removesuffix(": ")
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            return str(condition["message"])
    return f"it is {status.get('phase', 'not there')}"
