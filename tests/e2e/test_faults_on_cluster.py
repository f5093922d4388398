"""One fault each, injected on a running job: it completes, and its own journal shows that nothing was lost or doubled.

Times are printed, not checked, but for the one that is promised: from a notice to the drain in less than 2 s.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster.port import Cluster
from cluster.tools import Kubectl
from on_cluster.audit import Report, assert_nothing_lost, read_report
from on_cluster.faults import FAULTS, Hit, Victims
from on_cluster.job import Run, short_job

STEP = 8
"""The fault comes once the fleet is at work."""
STEPS = {"freeze_node": 160, "api_away": 160, "kill_node": 120}
"""RL steps of jobs that must outlast a long fault; others are over in a minute."""
DRAIN_S = 2.0
LIMIT = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}}

pytestmark = pytest.mark.timeout(1500)


def job_for(fault: str) -> dict[str, Any]:
    job = short_job(fault.replace("_", "-"), STEPS.get(fault, 60))
    container = {"name": "rollout", "resources": LIMIT}
    job["spec"]["rollout"]["template"] = {"spec": {"containers": [container]}}
    return job


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_survives(fault: str, whole_bed: Cluster, kubectl: Kubectl, operator: None) -> None:
    run = Run(kubectl, job_for(fault))
    run.apply()
    run.await_step(STEP)
    run.await_whole()
    hit = FAULTS[fault](Victims(whole_bed, kubectl, run=run))
    run.await_whole(without=hit.engines)
    assert not run.twins()
    run.await_complete()
    assert_no_orphans(run)
    report = read_report(kubectl, run.name)
    print(json.dumps({"fault": fault, **times(hit, report), **report["samples"]}))
    assert_nothing_lost(report)
    assert_noticed(hit, report)


def assert_no_orphans(run: Run) -> None:
    """An ended job keeps no rollout."""
    assert not [
        p["metadata"]["name"] for p in run.pods("rollout") if p["status"].get("phase") in ("Running", "Pending")
    ]


def assert_noticed(hit: Hit, report: Report) -> None:
    if not hit.notice:
        return
    drained = {e["engine"]: e["at"] - hit.at for e in report["engines"] if e["what"] == "EngineDraining"}
    for engine in hit.engines:
        assert drained[engine] < DRAIN_S, f"{engine} was drained {drained[engine]:.1f} s after the first sign"


def times(hit: Hit, report: Report) -> dict[str, Any]:
    """Seconds: from the fact to the drain, to the end of the lease, and to its samples' next engine."""
    mine = [e for e in report["engines"] if e["engine"] in hit.engines and e["at"] >= hit.at]
    moved = [m for m in report["moves"] if m["from"] in hit.engines and m["at"] >= hit.at]

    def first(what: str) -> float | None:
        return min((round(e["at"] - hit.at, 2) for e in mine if e["what"] == what), default=None)

    elsewhere = [round(m["againAt"] - hit.at, 2) for m in moved]
    return {
        "drainS": first("EngineDraining"),
        "goneS": first("EngineGone"),
        "moved": len(moved),
        "elsewhereS": [min(elsewhere), max(elsewhere)] if elsewhere else None,
        "tokensKept": sum(m["tokens"] for m in moved),
    }
