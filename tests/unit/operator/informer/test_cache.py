"""The cache: order of arrival does not matter, heartbeats wake nobody, lists and watches cannot undo each other."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest

from polyrl.worker import Role
from polyrl_operator.api.kinds import CLAIM, FIXED, JOB, NODE, POD, TRAINER
from polyrl_operator.informer.cache import DELETION_TIMEOUT_S, TOMBSTONE_TTL_S, Cache, Expectations, JobKey, Place

KEY = JobKey("ns", "j")
MANY = 3072
CONFIG_MAP = next(kind for kind in FIXED if kind.name == "ConfigMap")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def job(version: int = 1, uid: str = "job-uid", **spec: Any) -> dict[str, Any]:
    metadata = {"name": "j", "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec}


def pod(
    name: str, version: int, *, uid: str = "", node: str = "", phase: str = "Pending", **more: Any
) -> dict[str, Any]:
    owners = [{"kind": "PolyRLJob", "uid": more.pop("owner", "job-uid"), "controller": True}]
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": uid or f"uid-{name}",
        "resourceVersion": str(version),
        "labels": {"polyrl.dev/job-name": "j", "polyrl.dev/role": "rollout"},
        "ownerReferences": owners,
        "managedFields": [{"big": "x" * 100}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x" * 100, "polyrl.dev/counted": "yes"},
    } | more
    spec = {"nodeName": node, "containers": [{"image": "x" * 100}], "restartPolicy": "Never"}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


def node(name: str, version: int, *, heartbeat: str = "", taints: tuple[str, ...] = ()) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": heartbeat}
    spec = {"taints": [{"key": key} for key in taints]}
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec, "status": {"conditions": [ready]}}


@pytest.fixture
def woken() -> list[JobKey]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(woken: list[JobKey], clock: Clock) -> Cache:
    made = Cache(woken.append, clock)
    made.observe(JOB, job())
    woken.clear()
    return made


def names(cache: Cache) -> set[str]:
    return {one.name for one in cache.pods(KEY, "job-uid")}


def test_what_is_kept_is_small_and_is_what_decisions_read(cache: Cache) -> None:
    cache.observe(POD, pod("p", 5, node="n", phase="Running"))
    (kept,) = cache.pods(KEY, "job-uid")
    assert kept.annotations == {"polyrl.dev/counted": "yes"}
    assert (kept.node, kept.phase, kept.role) == ("n", "Running", Role.ROLLOUT)


def test_a_job_is_kept_without_what_may_be_long(cache: Cache) -> None:
    raw = job(5, replicas=2)
    raw["metadata"] |= {"managedFields": [{"big": "x" * 100}], "annotations": {"kubectl.kubernetes.io/x": "x" * 100}}
    cache.observe(JOB, raw)
    kept = cache.job(KEY)
    assert kept is not None
    assert kept["spec"] == {"replicas": 2}
    assert kept["metadata"]["resourceVersion"] == "5"
    assert kept["metadata"]["annotations"] == {}
    assert "managedFields" not in kept["metadata"]


def test_the_order_of_arrival_does_not_matter() -> None:
    news = [
        (pod("p", 3), False),
        (pod("p", 4, node="n"), False),
        (pod("p", 6, node="n", phase="Running"), False),
        (pod("p", 9, node="n"), True),
        (pod("q", 5), False),
    ]
    for order in permutations(news):
        cache = Cache(lambda key: None)
        for raw, gone in order:
            cache.observe(POD, raw, deleted=gone)
        assert names(cache) == {"q"}, order


def test_an_old_list_neither_revives_nor_removes(cache: Cache) -> None:
    cache.observe(POD, pod("dead", 3))
    cache.observe(POD, pod("dead", 9), deleted=True)
    cache.observe(POD, pod("young", 12))
    assert not cache.observe(POD, pod("dead", 5)), "it was seen to be gone"
    assert cache.forget_absent(POD, None, listed=set(), version=10) == 0
    assert names(cache) == {"young"}
    assert cache.forget_absent(POD, None, listed=set(), version=12) == 1
    assert names(cache) == set()


def test_a_name_that_is_used_again_is_another_object(cache: Cache) -> None:
    cache.observe(POD, pod("p", 3, uid="one"))
    cache.observe(POD, pod("p", 8, uid="two"))
    cache.observe(POD, pod("p", 5, uid="one"), deleted=True)
    assert [one.uid for one in cache.pods(KEY, "job-uid")] == ["two"]


def test_heartbeats_wake_nobody_and_changes_wake_only_whom_they_concern(cache: Cache, woken: list[JobKey]) -> None:
    cache.observe(NODE, node("n", 1, heartbeat="1"))
    cache.observe(POD, pod("p", 3, node="n"))
    woken.clear()
    assert not cache.observe(NODE, node("n", 4, heartbeat="2"))
    assert not cache.observe(POD, pod("p", 5, node="n"))
    assert woken == []
    cache.observe(NODE, node("n", 6, taints=("karpenter.sh/disrupted",)))
    assert woken == [KEY]
    woken.clear()
    cache.observe(NODE, node("other", 7, taints=("karpenter.sh/disrupted",)))
    assert woken == []


def test_ends_are_urgent_and_beginnings_are_not() -> None:
    woken: list[str] = []
    cache = Cache(lambda key: woken.append("add"), hurry=lambda key, urgency: woken.append(urgency.name))
    cache.observe(JOB, job())
    cache.observe(POD, pod("p", 5))
    cache.observe(POD, pod("p", 6, node="n", phase="Running"))
    assert woken == ["add"] * 3
    cache.observe(NODE, node("n", 7, taints=("karpenter.sh/disrupted",)))
    ends = pod("p", 8, node="n", phase="Running")
    ends["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cache.observe(POD, ends)
    cache.observe(POD, pod("p", 9, node="n", phase="Failed"), deleted=True)
    cache.observe(JOB, job(10, suspend=True))
    assert woken == ["add"] * 3 + ["LOSS"] * 3 + ["EDIT"]


def test_a_claim_wakes_the_jobs_on_its_node(cache: Cache, woken: list[JobKey], clock: Clock) -> None:
    cache.observe(POD, pod("p", 3, node="n"))
    claim = {"metadata": {"name": "c", "uid": "c", "resourceVersion": "4"}, "status": {"nodeName": "n"}}
    woken.clear()
    clock.now = 1007.0
    cache.observe(CLAIM, claim)
    assert woken == [KEY]
    assert [claim.node for claim in cache.nodes_of(cache.pods(KEY, "job-uid"))[1]] == ["n"]
    assert cache.changed_at(KEY, "p") == 1007.0
    assert cache.changed_at(KEY, "unknown") is None


def test_a_node_without_our_pods_any_more_concerns_nobody(cache: Cache, woken: list[JobKey]) -> None:
    cache.observe(POD, pod("p", 3, node="n"))
    cache.observe(POD, pod("q", 4, node="n"))
    cache.observe(POD, pod("p", 5, node="n"), deleted=True)
    woken.clear()
    cache.observe(NODE, node("n", 6))
    assert woken == [KEY]
    cache.observe(POD, pod("q", 7, node="n"), deleted=True)
    woken.clear()
    cache.observe(NODE, node("n", 8, taints=("x",)))
    assert woken == []


def test_children_of_a_namesake_that_was_deleted_are_not_ours(cache: Cache) -> None:
    cache.observe(POD, pod("old", 3, owner="former-uid"))
    cache.observe(POD, pod("new", 4))
    assert names(cache) == {"new"}


def test_pods_of_the_trainer_belong_to_its_job(cache: Cache) -> None:
    cache.observe(POD, pod("j-trainer-0-abc", 4, owner="trainer-uid"))
    assert names(cache) == set()
    trainer = pod("j-trainer", 3, uid="trainer-uid")
    cache.observe(TRAINER, trainer)
    assert names(cache) == {"j-trainer-0-abc"}
    assert cache.trainer(KEY, "other-uid") is None


OF_TRAINER = {"polyrl.dev/job-name": "j", "polyrl.dev/role": "trainer"}


@pytest.mark.parametrize(
    ("phase", "owner", "seen"),
    [("Running", "trainer-uid", True), ("Running", "", True), ("Failed", "trainer-uid", False)],
    ids=["its Job was deleted", "its Job was deleted with --cascade=orphan", "it has ended"],
)
@pytest.mark.parametrize("watched", [True, False], ids=["in sight", "while no operator was there"])
def test_a_pod_that_outlives_the_trainer_s_job_is_seen_until_it_ends(
    cache: Cache, clock: Clock, phase: str, owner: str, seen: bool, watched: bool
) -> None:
    """Another trainer began beside it, at once or after two minutes, and both wrote checkpoints to one volume."""
    if watched:
        cache.observe(TRAINER, pod("j-trainer", 3, uid="trainer-uid"))
    cache.observe(POD, pod("j-trainer-0-abc", 4, owner=owner, labels=OF_TRAINER, phase=phase))
    if watched:
        cache.observe(TRAINER, pod("j-trainer", 5, uid="trainer-uid"), deleted=True)
    clock.now += TOMBSTONE_TTL_S
    assert names(cache) == ({"j-trainer-0-abc"} if seen else set())


@pytest.mark.parametrize(
    ("owner", "deleted", "seen"),
    [("former-uid", True, True), ("former-uid", False, False), ("", True, False)],
    ids=["it is collected", "it is another's", "it is a copy that somebody looked into"],
)
def test_beside_a_trainer_s_job_only_pods_that_are_collected_are_seen(
    cache: Cache, owner: str, deleted: bool, seen: bool
) -> None:
    cache.observe(TRAINER, pod("j-trainer", 3, uid="trainer-uid"))
    deletion = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    cache.observe(POD, pod("j-trainer-0-abc", 4, owner=owner, labels=OF_TRAINER, phase="Running", **deletion))
    assert names(cache) == ({"j-trainer-0-abc"} if seen else set())


def test_a_deletion_of_ours_shows_until_its_end_or_until_it_is_overdue(cache: Cache, clock: Clock) -> None:
    cache.observe(POD, pod("p", 3))
    cache.expect_deletion("uid-p")
    assert cache.pods(KEY, "job-uid")[0].deletion_at is not None
    clock.now += DELETION_TIMEOUT_S
    assert cache.pods(KEY, "job-uid")[0].deletion_at is None


def test_fixed_children_go_with_their_job_and_pods_when_they_are_gone(cache: Cache) -> None:
    cache.observe(CONFIG_MAP, pod("cfg", 3))
    cache.observe(POD, pod("p", 4))
    assert [child.kind for child in cache.children(KEY, "job-uid")] == ["ConfigMap"]
    cache.observe(JOB, job(9), deleted=True)
    assert cache.job(KEY) is None
    assert cache.children(KEY, "job-uid") == []
    assert names(cache) == {"p"}


def test_a_quiet_observation_wakes_nobody(cache: Cache, woken: list[JobKey]) -> None:
    assert cache.observe(JOB, job(5, suspend=True), quiet=True)
    assert woken == []
    stored = cache.job(KEY)
    assert stored is not None
    assert stored["spec"] == {"suspend": True}


def test_whatever_comes_in_whatever_order_the_newest_is_what_is_kept(seed: int) -> None:
    """A history of one pod name, delivered twice, shuffled, with stale lists in between."""
    draw = random.Random(seed)
    for _ in range(100):
        history: list[tuple[dict[str, Any], bool]] = []
        version, alive = 0, ""
        for life in range(draw.randint(1, 4)):
            for _ in range(draw.randint(1, 4)):
                version += 1
                history.append((pod("p", version, uid=f"life-{life}", node=f"node-{version}"), False))
            alive = f"life-{life}"
            if draw.random() < 0.7:
                version += 1
                history.append((pod("p", version, uid=f"life-{life}"), True))
                alive = ""
        delivered = history * 2
        draw.shuffle(delivered)
        cache = Cache(lambda key: None)
        for raw, gone in delivered:
            cache.observe(POD, raw, deleted=gone)
            if draw.random() < 0.2:
                cache.forget_absent(POD, None, set(), draw.randint(0, version) if not alive else 0)
        assert [one.uid for one in cache.pods(KEY, "job-uid")] == ([alive] if alive else [])


def test_expectations_end_by_themselves_and_do_not_pile_up() -> None:
    expectations = Expectations()
    for number in range(MANY):
        expectations.deletion_accepted(str(number), float(number))
        expectations.ended(Place("Pod", "ns", str(number)), f"other-{number}", number, float(number))
    end = float(MANY)
    assert expectations.is_pending(str(MANY - 1), end)
    assert not expectations.is_pending("0", end)
    assert expectations.is_old(Place("Pod", "ns", str(MANY - 1)), 5, end)
    assert not expectations.is_old(Place("Pod", "ns", "0"), 0, end)
    assert len(expectations._deletions) <= DELETION_TIMEOUT_S + 1
    assert len(expectations._tombstones) <= TOMBSTONE_TTL_S + 1


def test_an_end_that_was_seen_is_no_longer_expected() -> None:
    expectations = Expectations()
    expectations.deletion_accepted("uid", 0.0)
    expectations.ended(Place("Pod", "ns", "p"), "uid", 7, 1.0)
    assert not expectations.is_pending("uid", 1.0)
    assert expectations.is_old(Place("Pod", "ns", "p"), 7, 1.0)
    assert not expectations.is_old(Place("Pod", "ns", "p"), 8, 1.0)
