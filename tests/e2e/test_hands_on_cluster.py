"""Somebody deletes the trainer's Job in each way that kubectl knows, and takes its label away: there is one trainer at
a time, a job that waits for a person says so, and it completes with nothing lost or doubled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster.tools import Kubectl, eventually
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.job import COMPLETE_S, RUNNING_S, Run, short_job

STEPS = 120
POLL_S = 0.3
"""Between two looks at what runs; a pod that was made too early is there for a trainer's whole grace."""
OURS = "polyrl.dev/job-name"


@contextmanager
def one_trainer_at_most(run: Run) -> Iterator[None]:
    """At every look; pods that are being deleted count, for they may still write a checkpoint."""
    over, twins = threading.Event(), list[list[str]]()

    def watch() -> None:
        while not over.wait(POLL_S):
            there = [pod for pod in run.pods("trainer") if pod["status"]["phase"] in ("Pending", "Running")]
            if len(there) > 1:
                twins.append([pod["metadata"]["name"] for pod in there])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert twins == []


@pytest.mark.timeout(COMPLETE_S + 4 * RUNNING_S)
def test_there_is_one_trainer_whatever_is_done_to_its_job(kubectl: Kubectl, operator: None) -> None:
    run = Run(kubectl, short_job("hands", STEPS))
    run.apply()
    run.await_step(1)
    trainer = f"{run.name}-trainer"
    with one_trainer_at_most(run):
        for cascade in ("background", "foreground", "orphan"):
            (pod,) = run.live("trainer")
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            kubectl("delete", "job", trainer, f"--cascade={cascade}", "--wait=false")
            if cascade == "orphan":
                eventually("it says what it waits for", lambda name=name: waits_for(run, name), RUNNING_S)
                kubectl("delete", "pod", name, "--wait=false")
            eventually("another trainer is ready", lambda uid=uid: another(run, uid), RUNNING_S)
        kubectl("label", "job", trainer, f"{OURS}-")
        eventually("its Job has its label again", lambda: kubectl.items("jobs", "-l", f"{OURS}={run.name}"), RUNNING_S)
    run.await_complete()
    assert_nothing_lost(read_report(kubectl, run.name))


def waits_for(run: Run, pod: str) -> bool:
    ready = run.condition("TrainerReady")
    return ready.get("reason") == "PodWithoutJob" and pod in ready["message"] and ": delete " in ready["message"]


def another(run: Run, uid: str) -> bool:
    return any(pod["metadata"]["uid"] != uid for pod in run.live("trainer"))
