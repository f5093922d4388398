"""How many series the operator's metrics have: as many as there are jobs, whatever happens to their pods."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.timestamps import millisecond
from polyrl.manifest.status import JobStatus
from polyrl_operator.api.kinds import permission_for
from polyrl_operator.informer.cache import JobKey
from polyrl_operator.metrics import Metrics, RequestCounter

PER_JOB = 3
"""Gauges with a job's name."""


def series(metrics: Metrics) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples}


def status(number: int) -> JobStatus:
    """Of a job whose pods come and go under ever new names."""
    ended = {
        "podName": f"job-r-{number}",
        "podUID": f"uid-{number}",
        "nodeName": f"node-{number}",
        "reason": "SpotInterruption",
        "noticeTime": millisecond(number),
        "deleteTime": millisecond(number + 20),
        "noticeMillis": 20_000,
    }
    rollout: dict[str, Any] = {"desiredReplicas": number % 7, "registeredReplicas": number % 5, "preemptions": number}
    return JobStatus.model_validate({"state": "Running", "rollout": rollout, "recentDisruptions": [ended]})


def test_what_happens_to_pods_makes_no_series() -> None:
    requests = RequestCounter()
    metrics = Metrics(requests)
    pods = "/api/v1/namespaces/team/pods"
    sizes = []
    for number in range(1, 301):
        metrics.decided(JobKey("team", "job"), status(number))
        metrics.drained(0.1, known=True)
        for method, path in (("POST", pods), ("DELETE", f"{pods}/job-r-{number}"), ("PATCH", f"{pods}/job-r-{number}")):
            requests.counts[permission_for(method, path), "2xx"] += 1
        sizes.append(len(series(metrics)))
    assert set(sizes) == {sizes[0]}
    assert not [labels for _, labels in series(metrics) if any("-r-" in value for _, value in labels)]
    assert metrics.registry.get_sample_value("polyrl_preemption_notice_seconds_count") == 299, "but all were counted"


@pytest.mark.parametrize("state", ["Complete", "Failed", "Suspended"])
def test_a_job_that_does_not_run_wants_no_rollouts(state: str) -> None:
    """The alert PolyRLJobShort was raised for each of them, half an hour after its end, until it was deleted."""
    metrics, key, value = Metrics(RequestCounter()), JobKey("team", "job"), {"namespace": "team", "job": "job"}
    wanted = ("polyrl_rollout_desired_replicas", "polyrl_rollout_registered_replicas")
    running = status(3)
    for _ in range(2):
        metrics.decided(key, running)
        assert [metrics.registry.get_sample_value(name, value) for name in wanted] == [3.0, 3.0]
        for _ in range(2):
            metrics.decided(key, running.model_copy(update={"state": state}))
            assert [metrics.registry.get_sample_value(name, value) for name in wanted] == [None, None]
    assert metrics.registry.get_sample_value("polyrl_rollout_preemptions", value) == 3.0
    assert metrics.registry.get_sample_value("polyrl_jobs", {"state": state}) == 1.0
    metrics.forget(key)


@pytest.mark.slow
def test_series_grow_with_jobs_and_go_with_them() -> None:
    metrics = Metrics(RequestCounter())
    metrics.decided(JobKey("team", "job-0"), status(1))
    one = len(series(metrics))
    keys = [JobKey("team", f"job-{number}") for number in range(1000)]
    for key in keys:
        metrics.decided(key, status(1))
    assert len(series(metrics)) - one == PER_JOB * (len(keys) - 1)
    for key in keys:
        metrics.forget(key)
    assert not [labels for name, labels in series(metrics) if dict(labels).get("job")]
