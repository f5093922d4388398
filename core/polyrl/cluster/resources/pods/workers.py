"""What runs in a job's pods: `polyrl.worker`'s description with the paths, ports and cores that pods have.

Refuses to hold: argv of its own. Read next: `polyrl.worker`, `pods`.
"""

from __future__ import annotations

import math
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.resources.owner import Owner
from polyrl.cluster.resources.pods.template import Fields
from polyrl.sample import Pool
from polyrl.worker import Pods, RunLocation, Workers, workers_of

ADVERTISE_ENV: Final = "POLYRL_ADVERTISE_HOST"
"""The pod's own address, from the downward API."""

POD_NAME_ENV: Final = "POLYRL_POD_NAME"
"""The pod's own name: of a Job's pods nobody knows it before."""

PYTHON: Final = "python"
"""On the PATH of every image of ours."""


def pod_workers(owner: Owner, cpus: int = 1, pool: Pool = Pool.SPOT) -> Workers:
    """Every worker of the job as it runs in pods, rollouts in `pool`; `cpus` is what the trainer may use."""
    pods = Pods(
        job=names.JOB_DIR,
        keys=names.KEYS_DIR,
        journal=names.JOURNAL_DIR,
        http_port=owner.job.spec.manager.port,
        agents_port=names.AGENTS_PORT,
        trainer_port=names.TRAINER_PORT,
        weights_port=names.PUBLISHER_PORT,
        advertise=f"$({ADVERTISE_ENV})",
    )
    place = RunLocation(names.RUN_DIR, names.MANIFEST_DIR, PYTHON, names.EPOCH, cpus, pods=pods)
    return workers_of(owner.job.spec, place, pool)


def whole_cpus(resources: Fields) -> int:
    """Cores that a container with these resources may use, at least 1; its limit counts before its request."""
    for part in ("limits", "requests"):
        amount = resources.get(part, {}).get("cpu")
        if amount is not None:
            return _cores(str(amount))
    return 1


def _cores(amount: str) -> int:
    """Of a quantity such as 2, 1.5 or 500m; 1 when it is none, which is for the API server to refuse."""
    try:
        cores = float(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)
    except ValueError:
        return 1
    return max(1, math.ceil(cores))
