"""Raw objects to facts: whole ones, empty ones, and any nonsense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from polyrl.cluster import names
from polyrl.cluster.observation.facts import Exit, PodPhase, Taint
from polyrl.cluster.observation.job import child_facts, claim_facts, job_facts, node_facts, pod_facts, trainer_facts
from polyrl.cluster.timestamps import millisecond, second, unix
from polyrl.sample import Pool
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role

AT = 1_774_000_000.0
TIMESTAMP = second(AT)
OOM = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": TIMESTAMP}
LABELS = {names.LABEL_ROLE: "rollout", names.LABEL_POOL: "spot", names.LABEL_TEMPLATE: "abc"}
KEYS = [
    "metadata",
    "spec",
    "status",
    "conditions",
    "labels",
    "taints",
    "annotations",
    "containerStatuses",
    "state",
    "type",
]
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "x", TIMESTAMP, "True", "Ready"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


def observed(job: dict[str, Any], **more: Any) -> Any:
    empty: dict[str, Any] = {"pods": [], "trainer": None, "nodes": {}, "claims": {}, "children": []}
    given = empty | {"manager": None, "dry_run": None} | more
    made = {
        "pods": filter(None, map(pod_facts, given["pods"])),
        "trainer": None if given["trainer"] is None else trainer_facts(given["trainer"]),
        "nodes": None if given["nodes"] is None else {key: node_facts(node) for key, node in given["nodes"].items()},
        "claims": map(claim_facts, given["claims"].values()),
        "children": [child_facts("Service", child) for child in given["children"]],
    }
    return job_facts(job, **given | made)


def test_pod() -> None:
    pod = {
        "metadata": {
            "name": "j-r-4",
            "uid": "u",
            "creationTimestamp": TIMESTAMP,
            "deletionTimestamp": second(AT + 30),
            "deletionGracePeriodSeconds": 25,
            "labels": LABELS,
            "annotations": {names.ANNOTATION_COUNTED: "failure-1", "other/thing": "x"},
        },
        "spec": {"nodeName": "n1", "restartPolicy": "Never"},
        "status": {
            "phase": "Failed",
            "podIP": "10.0.0.4",
            "reason": "Evicted",
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": second(AT + 2)},
                {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"},
                {"type": "Ready", "status": "False"},
            ],
            "containerStatuses": [
                {
                    "name": "rollout",
                    "state": {"terminated": OOM},
                },
                {"name": "side", "state": {"running": {}}},
            ],
        },
    }
    seen = pod_facts(pod)
    assert seen is not None
    assert (seen.name, seen.uid, seen.role, seen.pool) == ("j-r-4", "u", Role.ROLLOUT, Pool.SPOT)
    assert (seen.node, seen.ip) == ("n1", "10.0.0.4")
    assert (seen.phase, seen.reason, seen.disruption) == (PodPhase.FAILED, "Evicted", "TerminationByKubelet")
    assert (seen.created_at, seen.scheduled_at, seen.deletion_at, seen.ended_at) == (AT, AT + 2, AT + 30, AT)
    assert (seen.deletion_grace_s, seen.ready, seen.template_hash) == (25.0, False, "abc")
    assert seen.exits == (Exit("rollout", 137, reason="OOMKilled"),)
    assert seen.annotations == {names.ANNOTATION_COUNTED: "failure-1"}


def test_what_a_tenant_writes_on_pods_and_children_costs_the_operator_of_all_next_to_nothing() -> None:
    """Whoever may make ConfigMaps filled its memory with 1,500 of them, for everybody."""
    long, ours = "x" * 250_000, (names.ANNOTATION_RELEASED, names.ANNOTATION_COUNTED, names.ANNOTATION_NOTICE)
    annotations = {key: long for key in (*ours, names.ANNOTATION_NOTICED_AT, "polyrl.dev/of-nobodys")}
    kept = pod_facts({"metadata": {"name": "p", "labels": LABELS, "annotations": annotations}})
    assert kept is not None
    assert names.ANNOTATION_RELEASED in kept.annotations
    assert sum(len(key) + len(value) for key, value in kept.annotations.items()) < 2000
    child = child_facts("ConfigMap", {"metadata": {"name": "c", "annotations": {names.ANNOTATION_CONTENT: long}}})
    assert 0 < len(child.content_hash) < 500


def test_unschedulable_pod_and_strangers() -> None:
    message = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    seen = pod_facts({"metadata": {"labels": LABELS}, "status": {"phase": "Pending", "conditions": [message]}})
    assert seen is not None
    assert (seen.unschedulable, seen.scheduled_at) == ("0/3 nodes", None)
    gated = pod_facts(
        {"metadata": {"labels": LABELS}, "status": {"conditions": [message | {"reason": "SchedulingGated"}]}}
    )
    assert gated is not None
    assert gated.unschedulable == ""
    assert pod_facts({"metadata": {"labels": {}}}) is None
    assert pod_facts({}) is None


ENDS = "container t ends at each start"
NO_SECRET = "container t cannot be started: secret x not found"


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize(
    ("reason", "last", "crashes", "unstarted"),
    [
        pytest.param("CrashLoopBackOff", OOM, f"{ENDS}, with status 137 (OOMKilled)", "", id="it ends again and again"),
        pytest.param("CrashLoopBackOff", None, ENDS, "", id="nobody says how it ended"),
        pytest.param("CreateContainerConfigError", None, "", NO_SECRET, id="what it names is not there"),
        pytest.param("RunContainerError", OOM, "", NO_SECRET, id="it started before"),
        pytest.param("ContainerCreating", None, "", "", id="it is made"),
        pytest.param("ImagePullBackOff", None, "", "", id="its image is another matter"),
    ],
)
def test_container_that_does_not_come_to_run(
    kind: str, reason: str, last: dict[str, Any] | None, crashes: str, unstarted: str
) -> None:
    waiting = {"waiting": {"reason": reason, "message": "secret x not found"}}
    status = {"name": "t", "state": waiting, "lastState": {"terminated": last} if last else {}}
    pod = pod_facts({"metadata": {"labels": LABELS}, "status": {"phase": "Pending", kind: [status]}})
    assert pod is not None
    assert (pod.crashes, pod.unstarted) == (crashes, unstarted)


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("ErrImagePull", "example.org/trainer:1"),
        ("ImagePullBackOff", "example.org/trainer:1"),
        ("InvalidImageName", "example.org/trainer:1"),
        ("ErrImageNeverPull", "example.org/trainer:1"),
        ("ContainerCreating", ""),
        ("PodInitializing", ""),
        ("CrashLoopBackOff", ""),
    ],
)
def test_image_that_cannot_be_pulled(kind: str, reason: str, expected: str) -> None:
    waits = {"name": "t", "image": "example.org/trainer:1", "state": {"waiting": {"reason": reason, "message": "m"}}}
    started = {"name": "side", "image": "example.org/side:1", "state": {"running": {}}}
    seen = pod_facts({"metadata": {"labels": LABELS}, "status": {kind: [started, waits]}})
    assert seen is not None
    assert seen.unpulled == expected


@pytest.mark.parametrize(
    ("name", "state", "fetches"),
    [
        ("fetch", "running", True),
        ("fetch", "terminated", False),
        ("fetch", "waiting", False),
        ("theirs", "running", False),
    ],
    ids=["fetches", "has fetched", "waits", "another"],
)
def test_a_model_is_fetched_while_that_container_runs(name: str, state: str, fetches: bool) -> None:
    status = {"initContainerStatuses": [{"name": name, "state": {state: {"startedAt": "2026-01-01T00:00:00Z"}}}]}
    seen = pod_facts({"metadata": {"labels": LABELS}, "status": status})
    assert seen is not None
    assert seen.fetching is fetches


def test_container_that_starts_again_has_not_ended() -> None:
    ended = [{"name": "manager", "state": {"terminated": {"exitCode": 1}}}]
    raw = {"metadata": {"labels": {names.LABEL_ROLE: "manager"}}, "spec": {"restartPolicy": "Always"}}
    running = pod_facts(raw | {"status": {"phase": "Running", "containerStatuses": ended}})
    evicted = pod_facts(raw | {"status": {"phase": "Failed", "containerStatuses": ended}})
    assert running is not None
    assert evicted is not None
    assert (running.exits, evicted.exits) == ((), (Exit("manager", 1, reason=""),))


def test_nodes_and_their_claims() -> None:
    pod = {"metadata": {"name": "p", "labels": LABELS}, "spec": {"nodeName": "n1"}}
    node = {
        "metadata": {"name": "n1", "uid": "nu", "creationTimestamp": TIMESTAMP},
        "spec": {"unschedulable": True, "taints": [{"key": "k", "effect": "NoExecute", "timeAdded": TIMESTAMP}]},
        "status": {
            "conditions": [
                {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "node is shutting down"}
            ]
        },
    }
    claim = {
        "metadata": {"name": "c", "deletionTimestamp": TIMESTAMP},
        "status": {
            "nodeName": "n1",
            "conditions": [{"type": "DisruptionReason", "status": "True", "reason": "Drifted"}],
        },
    }
    seen = observed(raw_job(), pods=[pod], nodes={"n1": node, "other": node}, claims={"c": claim})
    assert list(seen.nodes) == ["n1"]
    one = seen.nodes["n1"]
    assert (one.ready, one.unschedulable, one.created_at) == (False, True, AT)
    assert one.ready_reason == "KubeletNotReady: node is shutting down"
    assert one.taints == (Taint("k", AT),)
    assert (one.claim.deletion_at, one.claim.reason) == (AT, "Drifted")
    assert observed(raw_job(), pods=[pod], nodes=None).sees_nodes is False


def test_node_that_has_not_reported_yet_counts_as_ready() -> None:
    pod = {"metadata": {"name": "p", "labels": LABELS}, "spec": {"nodeName": "n1"}}
    assert observed(raw_job(), pods=[pod], nodes={"n1": {"metadata": {"name": "n1"}}}).nodes["n1"].ready


def test_trainer() -> None:
    raw = {
        "metadata": {"uid": "t", "labels": {names.LABEL_TEMPLATE: "h"}, "creationTimestamp": TIMESTAMP},
        "spec": {"suspend": True},
        "status": {
            "active": 1,
            "ready": 1,
            "failed": 2,
            "conditions": [
                {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "lastTransitionTime": TIMESTAMP}
            ],
        },
    }
    seen = observed(raw_job(), trainer=raw).trainer
    assert (seen.uid, seen.active, seen.ready, seen.failed, seen.suspended) == ("t", 1, 1, 2, True)
    assert (seen.failed_at, seen.failed_reason, seen.complete_at, seen.template_hash) == (
        AT,
        "BackoffLimitExceeded",
        None,
        "h",
    )


def test_job_that_is_none_is_refused_with_its_fields() -> None:
    job = raw_job()
    job["spec"]["rollout"]["replicas"] = "three"
    job["spec"]["nonsense"] = 1
    seen = observed(job)
    assert seen.job is None
    assert seen.refusal.startswith("spec.rollout.replicas: ")


def test_fields_of_a_later_crd_are_left_out() -> None:
    """The API server fills in their defaults in every stored job as soon as the CRD is there."""
    job, plain = raw_job(), observed(raw_job())
    job["spec"]["later"] = {"mode": "Off"}
    job["spec"]["rollout"]["colour"] = "grey"
    job["spec"]["recipe"]["data"]["rl"][0]["order"] = "AsWritten"
    seen = observed(job)
    assert (seen.job, seen.refusal) == (plain.job, "")
    assert set(seen.unknown) == {"spec.later", "spec.rollout.colour", "spec.recipe.data.rl.0.order"}
    assert plain.unknown == ()


def test_slices_that_do_not_divide_the_gpus_of_a_pod_are_refused_here_since_the_server_sees_no_containers() -> None:
    job = raw_job()
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    job["spec"]["trainer"] = {"contextParallel": 3, "template": {"spec": {"containers": [{"name": "a", **gpus}]}}}
    assert "spec.trainer.contextParallel: 3 does not divide" in observed(job).refusal
    job["spec"]["trainer"]["contextParallel"] = 2
    assert observed(job).refusal == ""


def test_status_that_cannot_be_read_is_rebuilt() -> None:
    job = raw_job() | {"status": {"rollout": {"preemptions": "many"}}}
    assert observed(job).status.rollout.preemptions == 0
    assert observed(raw_job() | {"status": {"state": "Running", "newer": 1}}).status.state == "Running"


def test_children_and_order() -> None:
    child = {"metadata": {"name": "s", "uid": "c", "annotations": {names.ANNOTATION_CONTENT: "h"}}}
    younger = {"metadata": {"name": "a", "creationTimestamp": second(AT + 1), "labels": LABELS}}
    older = {"metadata": {"name": "b", "creationTimestamp": TIMESTAMP, "labels": LABELS}}
    seen = observed(raw_job(), children=[child], pods=[younger, older])
    assert [(one.kind, one.name, one.content_hash, one.deleting) for one in seen.children] == [
        ("Service", "s", "h", False)
    ]
    assert [pod.name for pod in seen.pods] == ["b", "a"]


@given(pod=st.dictionaries(st.sampled_from(KEYS), NONSENSE), other=st.tuples(*[NONSENSE] * 4))
def test_nonsense_is_not_known_and_never_an_exception(pod: Any, other: tuple[Any, Any, Any, Any]) -> None:
    labelled = pod | {"metadata": {"labels": LABELS, "name": "p"}, "spec": {"nodeName": "n"}}
    node, claim, child, trainer = other
    more = {"nodes": {"n": node}, "claims": {"c": claim}, "children": [child], "trainer": trainer}
    seen = observed({"spec": pod}, pods=[pod, labelled], **more)
    assert seen.job is None
    assert len(seen.pods) <= 2


@pytest.mark.parametrize(
    ("timestamp", "at"),
    [
        pytest.param("2026-11-21T19:35:00Z", 1795289700.0, id="whole seconds"),
        pytest.param("2026-11-21T19:35:00.250Z", 1795289700.25, id="fractions"),
        pytest.param("2026-11-21T20:35:00.123456+01:00", 1795289700.123456, id="another zone"),
        pytest.param("2026-11-21T19:35:00", None, id="no zone"),
        pytest.param("0001-01-01T00:00:00+14:00", None, id="a year that is written by no clock"),
        pytest.param("9999-12-31T23:59:59-14:00", None, id="a year beyond those that can be written"),
        pytest.param("soon", None, id="no time"),
        pytest.param(None, None, id="nothing"),
        pytest.param(7, None, id="a number"),
    ],
)
def test_times(timestamp: object, at: float | None) -> None:
    assert unix(timestamp) == at


@given(st.floats(0, 4e9))
def test_times_are_read_back_as_written(at: float) -> None:
    assert abs((unix(millisecond(at)) or 0.0) - at) <= 0.001
    assert 0 <= at - (unix(second(at)) or 0.0) < 1
