"""One manager, one trainer, fixed children: what is made, suspended and deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyrl.cluster.actions import Annotate, Apply, Create, Delete, FindTrainer, LimitRestarts, MakeKeys, SuspendTrainer
from polyrl.cluster.fleet.singletons import (
    MANAGER_PACE_S,
    children,
    disrupted,
    manager,
    stop_manager,
    trainer,
    trainer_numbers,
)
from polyrl.cluster.lifecycle import Lifecycle, LifecycleStage
from polyrl.cluster.observation.facts import ChildFacts, PodPhase
from polyrl.cluster.timestamps import millisecond, second
from polyrl.worker import Role

RUNS, SUSPENDED, FAILED = (Lifecycle(LifecycleStage[name]) for name in ("RUNS", "SUSPENDED", "FAILED"))
ENDED = {"phase": PodPhase.FAILED}
STUCK = {
    "failed_at": 1.0,
    "active": 0,
    "failed_message": "Container trainer for pod n/p failed with exit code 78 matching F",
}
STOPPED = {"suspended": True, "stopped": True, "active": 0}


@pytest.mark.parametrize(
    ("pods", "node", "expected", "due"),
    [
        pytest.param([], {}, [(Create, "j-manager-1")], None, id="none yet"),
        pytest.param([{}], {}, [], None, id="one runs"),
        pytest.param([{}, {}], {}, [(Annotate, "j-manager-2"), (Delete, "j-manager-2")], None, id="a twin goes"),
        pytest.param([{"deletion_at": 1.0}], {}, [], None, id="one that is being deleted is waited for"),
        pytest.param([{}], {"ready": False}, [(Delete, "j-manager-1")], None, id="its node does not answer"),
        pytest.param([ENDED | {"age": 1.0}], {}, [], MANAGER_PACE_S - 1.0, id="it ended at once: a pause"),
        pytest.param([ENDED], {}, [(Delete, "j-manager-1"), (Create, "j-manager-2")], None, id="it ended"),
    ],
)
def test_manager(
    build: Any, pods: list[dict[str, Any]], node: dict[str, Any], expected: list[Any], due: float | None
) -> None:
    made = tuple(build.pod(f"j-manager-{n}", Role.MANAGER, **pod) for n, pod in enumerate(pods, start=1))
    actions, next_due = manager(build.ctx(pods=made, nodes=build.nodes(*made, **node)))
    named = [(type(one), one.object["metadata"]["name"] if isinstance(one, Create) else _name(one)) for one in actions]
    assert (named, next_due) == (expected, None if due is None else build.now + due)


def _name(action: Any) -> str:
    return str(action.name if isinstance(action, Delete) else action.pod)


def test_manager_that_still_answers_is_kept_though_its_node_seems_dead(build: Any) -> None:
    pod = build.pod("j-manager-1", Role.MANAGER)
    ctx = build.ctx(pods=(pod,), nodes=build.nodes(pod, ready=False), manager=build.manager())
    assert manager(ctx) == ([], None)


@pytest.mark.parametrize(
    ("stage", "job", "expected"),
    [
        pytest.param(RUNS, None, [Create], id="the job begins"),
        pytest.param(SUSPENDED, None, [], id="a suspended job makes none"),
        pytest.param(RUNS, {}, [], id="it runs"),
        pytest.param(SUSPENDED, {}, [SuspendTrainer], id="suspend"),
        pytest.param(FAILED, {}, [SuspendTrainer], id="the job failed"),
        pytest.param(RUNS, {"suspended": True, "template_hash": "same"}, [SuspendTrainer], id="resume"),
        pytest.param(RUNS, STOPPED, [Delete], id="its template was changed"),
        pytest.param(RUNS, {"suspended": True}, [], id="changed, but pods still run"),
        pytest.param(RUNS, STOPPED | {"terminating": 1}, [], id="changed, but pods still end"),
        pytest.param(RUNS, STOPPED | {"stopped": False}, [], id="changed, but its controller has not stopped it"),
        pytest.param(SUSPENDED, {"complete_at": 1.0}, [], id="complete"),
        pytest.param(RUNS, STUCK, [Delete], id="it could not go on, and was edited"),
        pytest.param(RUNS, STUCK | {"failed_message": "backoff"}, [], id="its end is awaited"),
        pytest.param(SUSPENDED, {"failed_at": 1.0, "active": 0}, [Delete], id="it could not go on"),
        pytest.param(RUNS, STUCK | {"terminating": 1}, [], id="it could not go on, but a pod still ends"),
        pytest.param(FAILED, {"failed_at": 1.0, "active": 0}, [], id="it has failed"),
        pytest.param(RUNS, {"backoff_limit": 3}, [], id="as many restarts as it may have"),
        pytest.param(RUNS, {"backoff_limit": 2}, [LimitRestarts], id="more restarts than it was made with"),
        pytest.param(SUSPENDED, {"backoff_limit": 2, "suspended": True}, [], id="more once it goes on"),
        pytest.param(SUSPENDED, {"deleting": True}, [], id="being deleted"),
    ],
)
def test_trainer(build: Any, stage: Lifecycle, job: dict[str, Any] | None, expected: list[type]) -> None:
    facts = None if job is None else build.trainer(**job)
    ctx = build.ctx(trainer=facts)
    if facts is not None and facts.template_hash == "same":
        ctx = build.ctx(trainer=replace(facts, template_hash=ctx.hashes.templates[Role.TRAINER]))
    assert [type(action) for action in trainer(ctx, stage)] == expected


@pytest.mark.parametrize(
    ("stage", "pod", "expected"),
    [
        pytest.param(RUNS, {}, [FindTrainer], id="it runs on: none is made beside it"),
        pytest.param(SUSPENDED, {}, [FindTrainer], id="nor does a suspended job forget a Job without a label"),
        pytest.param(RUNS, ENDED, [Create], id="it has ended"),
    ],
)
def test_a_trainer_s_pod_without_a_job(build: Any, stage: Lifecycle, pod: dict[str, Any], expected: list[type]) -> None:
    seen = build.ctx(pods=(build.pod("j-trainer-0-x", Role.TRAINER, **pod),))
    assert [type(action) for action in trainer(seen, stage)] == expected


def test_children_are_made_mended_and_removed(build: Any) -> None:
    ctx = build.ctx()
    first = list(children(ctx))
    assert isinstance(first[0], MakeKeys)
    assert {action.object["kind"] for action in first[1:]} >= {"ServiceAccount", "ConfigMap", "Service"}
    there = [
        ChildFacts(kind, name, uid="uid", content_hash=content) for (kind, name), content in ctx.hashes.fixed.items()
    ]
    secrets = ("j-keys", "j-keys-manager", "j-keys-trainer", "j-keys-reserved")
    there += [ChildFacts("Secret", name, uid="uid", content_hash="uid") for name in secrets]
    assert list(children(build.ctx(children=tuple(there)))) == []
    for secret in secrets:
        (mended,) = children(build.ctx(children=tuple(one for one in there if one.name != secret)))
        assert isinstance(mended, MakeKeys), "the operator may have died between two of them"
    others = [replace(one, uid="made anew") if one.name == "j-keys" else one for one in there]
    (again,) = children(build.ctx(children=tuple(others)))
    assert isinstance(again, MakeKeys), "it is refused as long as a copy is of other keys"
    edited = ("Service", "ConfigMap", "ServiceAccount")
    changed = [replace(one, content_hash="x") if one.kind in edited else one for one in there]
    applied = list(children(build.ctx(children=tuple(changed))))
    assert {(type(one), one.object["kind"]) for one in applied} == {(Apply, "Service")}, "others stay as they were made"
    unasked = (*there, ChildFacts("NetworkPolicy", "j-old", uid="uid", content_hash=""))
    assert [one.name for one in children(build.ctx(children=unasked))] == ["j-old"]


@pytest.mark.parametrize("role", [Role.MANAGER, Role.TRAINER])
@pytest.mark.parametrize(
    ("pod", "asked"),
    [
        pytest.param({"placed": 59.0}, False, id="it may yet start"),
        pytest.param({"placed": 60.0}, True, id="it does not start"),
        pytest.param({"placed": None}, False, id="it has no node"),
        pytest.param({"placed": 99.0, "unpulled": "image"}, False, id="it waits for an image"),
        pytest.param({"placed": 99.0, "fetching": True}, False, id="it fetches its model"),
        pytest.param({"placed": 99.0, "phase": PodPhase.RUNNING}, False, id="it runs"),
    ],
)
def test_keys_are_looked_after_where_a_pod_does_not_start(
    build: Any, role: Role, pod: dict[str, Any], asked: bool
) -> None:
    """No list shows that a Secret is gone: a manager's pod waited for it for ever."""
    secrets = ("j-keys", "j-keys-manager", "j-keys-trainer", "j-keys-reserved")
    there = tuple(ChildFacts("Secret", name, uid="uid", content_hash="uid") for name in secrets)
    ctx = build.ctx(pods=(build.pod("j-x", role, **{"phase": PodPhase.PENDING} | pod),), children=there)
    assert any(isinstance(action, MakeKeys) for action in children(ctx)) is asked


@pytest.mark.parametrize(
    ("trainer", "made"),
    [
        pytest.param({}, False, id="one pod, which talks to nobody"),
        pytest.param({"replicas": 2, "storage": {"accessMode": "ReadWriteMany"}}, True, id="two, which do"),
    ],
)
def test_keys_of_a_job_without_a_manager(build: Any, trainer: dict[str, Any], made: bool) -> None:
    recipe = {"mode": "sft", "data": {"sft": [{"path": "s.jsonl"}]}, "sft": {"steps": 1}, "model": {"path": "model"}}
    actions = children(build.ctx(build.job(recipe=recipe, trainer=trainer)))
    assert any(isinstance(action, MakeKeys) for action in actions) is made


def test_a_trainer_that_still_ends_when_the_job_goes_on_is_not_disrupted(build: Any) -> None:
    pod = build.pod("j-trainer-0-x", Role.TRAINER, disruption="EvictionByEvictionAPI")
    assert disrupted(build.ctx(pods=(pod,), status={"startTime": second(build.now - 99)})) == []


def test_disrupted_trainer_is_numbered_once(build: Any) -> None:
    pod = build.pod("j-trainer-0-x", Role.TRAINER, disruption="EvictionByEvictionAPI")
    status = {"trainer": {"disruptions": 4}, "lastResumeTime": millisecond(build.now - 200)}
    (noted,) = trainer_numbers(build.ctx(pods=(pod,), status=status), [])
    assert dict(noted.annotations) == {"polyrl.dev/counted": "disruption-5"}
    again = replace(pod, annotations=noted.annotations)
    assert list(trainer_numbers(build.ctx(pods=(again,), status=status), [])) == []


@pytest.mark.parametrize(
    ("job", "number"),
    [
        pytest.param({}, 0, id="the trainer runs"),
        pytest.param({"suspended": True, "active": 0}, 0, id="its pod may just be starting"),
        pytest.param({"stopped": True, "active": 0}, 0, id="it went on: that it was stopped is of before"),
        pytest.param(STOPPED, 2, id="nobody needs it"),
        pytest.param({"active": 0, "failed_at": 1.0}, 2, id="it has failed"),
    ],
)
def test_manager_is_stopped_after_the_trainer(build: Any, job: dict[str, Any], number: int) -> None:
    ctx = build.ctx(pods=(build.pod("j-manager-1", Role.MANAGER),), trainer=build.trainer(**job))
    assert len(list(stop_manager(ctx, "the job has ended"))) == number
