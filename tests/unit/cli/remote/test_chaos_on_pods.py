"""Whom a fault may hit among the pods that the operator makes, and what is asked for inside them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.errors import UserError
from polyrl.manifest.job import PolyRLJob
from polyrl.partition_signals import HEAL, PARTITION_IN
from polyrl.sample import Pool
from polyrl.worker import Role
from polyrl_cli.chaos.faults import SLOW_PERIOD_S, Fault, FaultRequest, choose_victim
from polyrl_cli.chaos.kinds import ChaosAction, Direction, Target
from polyrl_cli.remote.chaos import PodWorker, check_in_pods, injection_command, live_workers

EXAMPLE = Path(__file__).parents[4] / "examples/sort-digits/job.yaml"
SETTINGS = Settings(manager_image="m", trainer_image="t", rollout_image="r")
SEEDS = 40


def owner() -> Owner:
    return Owner("job", "ns", "uid", PolyRLJob.model_validate(yaml.safe_load(EXAMPLE.read_text())), SETTINGS)


def at_work(pod: dict[str, Any], state: str = "running", **metadata: Any) -> dict[str, Any]:
    """The pod as a kubelet reports it."""
    name = pod["metadata"]["name"]
    spec, metadata = pod["spec"], pod["metadata"] | {"uid": f"uid-{name}"} | metadata
    kinds = {"initContainerStatuses": spec.get("initContainers", []), "containerStatuses": spec["containers"]}
    status = {kind: [{"name": one["name"], "state": {state: {}}} for one in ones] for kind, ones in kinds.items()}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running", **status}}


def rollout(ordinal: int, **facts: Any) -> dict[str, Any]:
    return at_work(rollout_pod(owner(), ordinal, Pool.SPOT), **facts)


def trainer() -> dict[str, Any]:
    template = trainer_job(owner())["spec"]["template"]
    return at_work({"metadata": template["metadata"] | {"name": "job-trainer-0-x"}, "spec": template["spec"]})


PODS = [
    rollout(1),
    rollout(2),
    rollout(3, state="waiting"),
    rollout(4, state="terminated"),
    rollout(5, deletionTimestamp="2026-01-01T00:00:00Z"),
    {**rollout(6), "status": {}},
    at_work(manager_pod(owner(), 1)),
    trainer(),
]
WORKERS = {worker.seen.name: worker for worker in live_workers(PODS)}


def hit(**request: Any) -> Fault:
    made = FaultRequest(**({"action": ChaosAction.KILL} | request))
    check_in_pods(made)
    fault = choose_victim(made, [worker.seen for worker in WORKERS.values()], WORKERS)
    return fault


def test_the_living_and_nobody_else() -> None:
    roles = {name: worker.seen.role for name, worker in WORKERS.items()}
    assert roles == {
        "job-r-1": Role.ROLLOUT,
        "job-r-2": Role.ROLLOUT,
        "job-manager-1": Role.MANAGER,
        "job-trainer-0-x": Role.TRAINER,
        "reserved": Role.RESERVED,
    }


def test_each_is_found_in_its_pod_by_how_its_command_begins() -> None:
    assert [WORKERS[name].pod for name in ("job-r-1", "reserved")] == ["job-r-1", "job-trainer-0-x"]
    assert [WORKERS[name].container for name in ("job-r-1", "reserved")] == ["rollout", "trainer"]
    assert WORKERS["reserved"].uid == "uid-job-trainer-0-x"
    for worker in WORKERS.values():
        assert worker.argv[1] == "-m"
        assert not any("$(" in word for word in worker.argv), "the kubelet has put something else there"
    assert len({worker.argv for worker in WORKERS.values() if worker.pod == "job-trainer-0-x"}) == 2


@pytest.mark.parametrize(
    ("target", "victims"),
    [
        (Target.AGENT, {"job-r-1", "job-r-2"}),
        (Target.ENGINE, {"job-r-1", "job-r-2"}),
        (Target.MANAGER, {"job-manager-1"}),
        (Target.TRAINER, {"job-trainer-0-x"}),
    ],
)
def test_the_same_rule_draws_as_on_one_machine(target: Target, victims: set[str]) -> None:
    assert {hit(target=target, seed=seed).victim for seed in range(SEEDS)} == victims


@pytest.mark.parametrize("action", [ChaosAction.FREEZE, ChaosAction.SLOW])
@pytest.mark.parametrize("target", [Target.AGENT, Target.MANAGER, Target.TRAINER])
def test_process_1_cannot_be_stopped_and_the_error_names_what_can(action: ChaosAction, target: Target) -> None:
    with pytest.raises(
        UserError, match=f"--role {target}: .* process 1 of its container, which nothing inside can stop"
    ):
        hit(action=action, target=target)
    assert hit(action=action, target=Target.ENGINE).victim


def test_the_reserved_engine_is_hit_by_its_name_and_its_agent_is_a_process_that_can_be_killed() -> None:
    assert hit(worker="reserved", target=Target.ENGINE).role is Role.RESERVED
    assert hit(worker="reserved", action=ChaosAction.PARTITION).role is Role.RESERVED
    assert hit(worker="reserved").target is Target.AGENT
    assert WORKERS["reserved"].argv == ("python", "-m", "polyrl_rollout.agent")
    with pytest.raises(UserError, match="a live rollout called reserved"):
        hit(worker="reserved", action=ChaosAction.PREEMPT)


def order(**request: Any) -> dict[str, Any]:
    fault = hit(**request)
    *_, given = injection_command(WORKERS[fault.victim], fault)
    asked: dict[str, Any] = json.loads(given)
    assert asked.pop("argv") == list(WORKERS[fault.victim].argv)
    return asked


def test_what_is_asked_for_inside() -> None:
    stop = {"begin": signal.SIGSTOP, "undo": signal.SIGCONT, "below": True, "listens": False}
    engine = {"target": Target.ENGINE, "seconds": 9.0}
    assert order(action=ChaosAction.FREEZE, **engine) == {**stop, "on": 9.0, "off": 0.0, "seconds": 9.0}
    slow = order(action=ChaosAction.SLOW, speed=0.25, **engine)
    assert slow == {**stop, "on": SLOW_PERIOD_S * 0.75, "off": SLOW_PERIOD_S * 0.25, "seconds": 9.0}
    kill = order(action=ChaosAction.KILL, **engine)
    assert (kill["begin"], kill["undo"], kill["below"]) == (signal.SIGKILL, 0, True)
    cut = order(action=ChaosAction.PARTITION, direction=Direction.IN)
    assert (cut["begin"], cut["undo"], cut["below"], cut["listens"]) == (PARTITION_IN, HEAL, False, True)


def test_the_text_is_run_by_the_containers_own_python() -> None:
    worker = WORKERS["job-r-1"]
    assert isinstance(worker, PodWorker)
    python, flag, text, _ = injection_command(worker, hit(target=Target.ENGINE))
    assert (python, flag) == (worker.argv[0], "-c")
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert "polyrl" not in imported
    assert "polyrl_operator" not in imported, "an image may be of another version"
