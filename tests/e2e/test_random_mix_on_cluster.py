"""Thirty faults in a row, drawn at random, on one job: it completes, and nothing is lost or doubled."""

from __future__ import annotations

import json
import random

import pytest
from cluster.port import POOL_LABEL, Cluster
from cluster.tools import Kubectl
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.faults import FAULTS, Victims, mend
from on_cluster.job import Run, short_job

ROUNDS = 30
DRAWN = sorted(FAULTS.keys() - {"out_of_memory", "freeze_node", "api_away"})
"""All but those that last a minute each or need a memory limit."""
STEPS = 700
"""More than thirty faults last."""
BACKOFF_LIMIT = 30
"""backoffLimit: a trainer that is killed counts, and may be drawn every time."""
STEPS_S = 1800.0
"""For what is left of them after the last fault."""


@pytest.mark.timeout(5400)
def test_a_job_survives_thirty_faults_in_a_row(whole_bed: Cluster, kubectl: Kubectl, operator: None, seed: int) -> None:
    draw = random.Random(seed)
    job = short_job("mix", STEPS)
    job["spec"]["backoffLimit"] = BACKOFF_LIMIT
    run = Run(kubectl, job)
    run.apply()
    run.await_step(1)
    nodes = {
        n["metadata"]["name"]: n["metadata"]["labels"][POOL_LABEL] for n in kubectl.items("nodes", "-l", POOL_LABEL)
    }
    for number in range(ROUNDS):
        run.await_whole()
        run.await_step(
            run.step() + 2
        )  # at work again, so that there is something to hit; one may have been notified late
        fault = draw.choice(DRAWN)
        print(f"{number}: {fault} at step {run.step()}")
        hit = FAULTS[fault](Victims(whole_bed, kubectl, run=run))
        run.await_whole(without=hit.engines)
        assert not run.twins()
        for name, pool in nodes.items():
            mend(whole_bed, name, pool)
    run.await_whole()
    run.await_step(run.step() + 2)
    run.await_complete(STEPS_S)
    report = read_report(kubectl, run.name)
    print(json.dumps(report["samples"]))
    assert_nothing_lost(report)
