"""`polyrl chaos --on kubernetes`: each action on each role that takes it, on one job, whose journal is whole.

Run as a user runs it, with the kubeconfig of the bed; what each was done to is looked up in the cluster.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from cluster.port import Cluster
from cluster.tools import Kubectl, eventually
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.command import polyrl
from on_cluster.job import Run, short_job

FREEZE_S = 15.0
"""Less than the 20 s after which an agent may give up an engine that does not answer."""
STEPS = 300
"""The job must outlast all the faults."""
SMALL = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
ENGINE_STATES = """
import psutil
engine = "polyrl_rollout.engines.embedded.process"
print(*(one.status() for one in psutil.process_iter() if engine in one.cmdline()), sep=",")
"""

pytestmark = pytest.mark.timeout(2400)


class Chaos:
    """The command on one job."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, action: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return polyrl(self.run.kubectl, "chaos", action, self.run.name, "--on", "kubernetes", *flags)

    def does(self, action: str, *flags: str) -> str:
        """What it says it has done."""
        done = self(action, *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refuses(self, action: str, *flags: str) -> str:
        """Why it does nothing."""
        done = self(action, *flags)
        assert done.returncode == 2, done.stdout
        assert done.stderr.count("\n") == 1, "one sentence"
        return done.stderr

    def victim(self) -> str:
        """A rollout that serves, and that the manager knows."""
        self.run.await_whole()
        name: str = self.run.live("rollout")[0]["metadata"]["name"]
        eventually(f"{name} listens", lambda: self("partition", "--worker", name, "--for", "0.1").returncode == 0, 60)
        return name


def uids(run: Run, role: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in run.live(role)}


def engine_states(run: Run, pod: str, container: str = "rollout") -> str:
    return run.kubectl("exec", pod, "-c", container, "--", "python", "-c", ENGINE_STATES).strip()


def small_job() -> dict[str, Any]:
    """One that finds room beside another one."""
    job = short_job("chaos", STEPS)
    for role in ("trainer", "manager", "rollout"):
        container = {"name": role, "resources": SMALL}
        job["spec"].setdefault(role, {})["template"] = {"spec": {"containers": [container]}}
    return job


@pytest.fixture
def chaos(bed: Cluster, kubectl: Kubectl, operator: None) -> Chaos:
    run = Run(kubectl, small_job())
    run.apply()
    run.await_step(3)
    return Chaos(run)


def test_every_action_on_every_role_that_takes_it(chaos: Chaos) -> None:
    run = chaos.run
    engines_stop_and_go(chaos)
    agents_are_partitioned_and_let_back(chaos)
    what_cannot_be_done_is_reported(chaos)
    rollouts_are_taken(chaos)
    for role in ("manager", "trainer"):
        singletons_are_replaced(chaos, role)
    run.await_complete()
    report = read_report(run.kubectl, run.name)
    print(report["samples"])
    assert_nothing_lost(report)


def engines_stop_and_go(chaos: Chaos) -> None:
    run, name = chaos.run, chaos.victim()
    output = chaos.does("freeze", "--role", "engine", "--worker", name, "--for", f"{FREEZE_S}")
    assert f"the engine of {name} frozen for {FREEZE_S:g} s" in output
    assert "stopped" in engine_states(run, name)
    eventually("it thaws", lambda: "stopped" not in engine_states(run, name), FREEZE_S + 30)
    chaos.does("slow", "--role", "engine", "--worker", name, "--for", "3", "--speed", "0.5")
    reserved: str = run.live("trainer")[0]["metadata"]["name"]
    chaos.does("freeze", "--role", "engine", "--worker", "reserved", "--for", "2")
    eventually("it thaws", lambda: "stopped" not in engine_states(run, reserved, "trainer"), 30)
    assert name in {pod["metadata"]["name"] for pod in run.live("rollout")}, "a pause is no end"


def agents_are_partitioned_and_let_back(chaos: Chaos) -> None:
    for direction in ("both", "in", "out"):
        output = chaos.does("partition", "--worker", chaos.victim(), "--for", "2", "--direction", direction)
        assert "cut off from" in output


def what_cannot_be_done_is_reported(chaos: Chaos) -> None:
    for role in ("agent", "manager", "trainer"):
        assert "is process 1 of its container" in chaos.refuses("freeze", "--role", role)
    assert "only an agent gets a notice" in chaos.refuses("preempt", "--role", "engine")
    assert "a live rollout called nobody" in chaos.refuses("kill", "--worker", "nobody")


def rollouts_are_taken(chaos: Chaos) -> None:
    """And others come."""
    for flags in (("preempt", "--for", "5"), ("kill",), ("kill", "--role", "engine")):
        name = chaos.victim()
        assert name in chaos.does(*flags, "--worker", name)
        chaos.run.await_whole(without={name})


def singletons_are_replaced(chaos: Chaos, role: str) -> None:
    run, before = chaos.run, uids(chaos.run, role)
    output = chaos.does("kill", "--role", role)
    assert "its pod is deleted with a grace of 1 s" in output

    def replaced() -> Any:
        assert not run.twins()
        return uids(run, role) - before

    eventually(f"another {role} is ready", replaced, 300)
