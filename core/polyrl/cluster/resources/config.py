"""The job's ConfigMap: what its workers read of the job, and where the manager is. Immutable, named by its content.

It holds only what a worker acts on, so that a change of scaling, suspension or a template makes no new one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources.owner import Owner, hash_of, with_content_hash
from polyrl.control import Endpoints
from polyrl.manifest.job import API_VERSION, KIND


def config_map(owner: Owner) -> Object:
    """ConfigMap with job.json and manager.json."""
    data = {"job.json": _job(owner), "manager.json": _endpoints(owner)}
    return with_content_hash(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": owner.metadata(names.config_map(owner.name, hash_of(data))),
            "immutable": True,
            "data": data,
        }
    )


def _job(owner: Owner) -> str:
    """A PolyRLJob again, so that workers read on a cluster what they read on a laptop."""
    spec = owner.job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    rollout, trainer = spec["rollout"], spec["trainer"]
    read: dict[str, Any] = {
        "recipe": spec["recipe"],
        "trainer": {key: trainer[key] for key in ("replicas", "reservedEngine")},
        "rollout": {key: rollout[key] for key in ("engine", "drainSeconds")},
    }
    read["rollout"]["capacity"] = {"preset": rollout["capacity"]["preset"]}
    job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": owner.name}, "spec": read}
    return msgspec.json.format(msgspec.json.encode(job, order="sorted"), indent=1).decode() + "\n"


def _endpoints(owner: Owner) -> str:
    """The keys are in the key files. Peers look up the whole name, dot and all: a shorter one would be asked for in
    every search domain, and of the world outside, wherever the cluster has no IPv6 address for it."""
    host = names.manager_service(owner.name)
    whole = f"{host}.{owner.namespace}.svc.{owner.domain}."
    endpoints = Endpoints(
        agents=f"tcp://{whole}:{names.AGENTS_PORT}",
        trainer=f"tcp://{whole}:{names.TRAINER_PORT}",
        http=f"https://{host}:{owner.job.spec.manager.port}",
        pid=0,
        run_epoch=names.EPOCH,
        public_key="",
    )
    return msgspec.json.format(msgspec.json.encode(endpoints)).decode() + "\n"
