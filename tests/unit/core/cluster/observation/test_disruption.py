"""Signs of a pod's end, each in a row of a table, and their union."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster import names
from polyrl.cluster.observation.disruption import NODE_KNOWN_S, SHUTDOWN_S, is_dead, is_gone, notice_of
from polyrl.cluster.observation.facts import ClaimFacts, PodPhase, Taint
from polyrl.cluster.state import ReconcileState
from polyrl.cluster.timestamps import millisecond
from polyrl.sample import Pool

DRAIN_S = 20

CONFIRMED_TAINTS = {
    "aws-node-termination-handler/spot-itn": ("SpotInterruption", "NodeDrain"),
    "cloud.google.com/impending-node-termination": ("SpotInterruption", "NodeDrain"),
    "remediator.kubernetes.azure.com/unschedulable": ("SpotInterruption", "NodeDrain"),
    "remediator.aks.microsoft.com/unschedulable": ("SpotInterruption", "NodeDrain"),
    "ToBeDeletedByClusterAutoscaler": ("NodeDrain", "NodeDrain"),
    "aws-node-termination-handler/scheduled-maintenance": ("NodeDrain", "NodeDrain"),
    "aws-node-termination-handler/asg-lifecycle-termination": ("NodeDrain", "NodeDrain"),
    "node.kubernetes.io/out-of-service": ("NodeLost", "NodeLost"),
}
AT_RISK_TAINTS = (
    "DeletionCandidateOfClusterAutoscaler",
    "aws-node-termination-handler/rebalance-recommendation",
    "node.kubernetes.io/unschedulable",
    "karpenter.sh/disrupted",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
)


def notice(build: Any, pod: Any, *, silent: bool = False, **facts: Any) -> Any:
    return notice_of(pod, ctx(build, pod, **facts), silent=silent)


def ctx(build: Any, pod: Any, **facts: Any) -> Any:
    return build.ctx(build.job({"drainSeconds": DRAIN_S}), pods=(pod,), **facts)


@pytest.mark.parametrize("key", CONFIRMED_TAINTS)
def test_taint_that_confirms(build: Any, key: str) -> None:
    for pool, kind in zip((Pool.SPOT, Pool.ON_DEMAND), CONFIRMED_TAINTS[key], strict=True):
        pod = build.pod(pool=pool)
        seen = notice(build, pod, nodes=build.nodes(pod, taints=(Taint(key, build.now - 3),)))
        assert seen.confirmed
        assert seen.kind == kind
        assert seen.deadline <= build.now + DRAIN_S
        assert key in seen.why


@pytest.mark.parametrize("key", AT_RISK_TAINTS)
def test_taint_that_only_threatens(build: Any, key: str) -> None:
    pod = build.pod()
    seen = notice(build, pod, nodes=build.nodes(pod, taints=(Taint(key),)))
    assert seen is not None
    assert not seen.confirmed


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("PreemptionByScheduler", "Eviction"),
        ("EvictionByEvictionAPI", "Eviction"),
        ("DeletionByTaintManager", "NodeDrain"),
        ("DeletionByPodGC", "NodeLost"),
        ("TerminationByKubelet", "Eviction"),
        ("SomethingNew", "Unknown"),
    ],
)
def test_disruption_target(build: Any, reason: str, kind: str) -> None:
    seen = notice(build, build.pod(disruption=reason))
    assert (seen.kind, seen.confirmed) == (kind, True)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Terminated", "SpotInterruption"),
        ("NodeShutdown", "SpotInterruption"),
        ("Preempting", "Eviction"),
        ("NodeLost", "NodeLost"),
    ],
)
def test_pod_that_the_kubelet_ended(build: Any, reason: str, kind: str) -> None:
    seen = notice(build, build.pod(phase=PodPhase.FAILED, reason=reason))
    assert (seen.kind, seen.confirmed) == (kind, True)


def test_deletion_gives_the_rest_of_its_grace(build: Any) -> None:
    seen = notice(build, build.pod(deletion_at=build.now + 7, deletion_grace_s=25))
    assert (seen.kind, seen.confirmed, seen.at, seen.deadline) == ("PodDeleted", True, build.now - 18, build.now + 7)


def test_nodeclaim_tells_interruption_from_choice(build: Any) -> None:
    pod = build.pod()
    taints = (Taint("karpenter.sh/disrupted"),)
    claim = ClaimFacts(pod.node, build.now - 1)
    assert notice(build, pod, nodes=build.nodes(pod, claim=claim, taints=taints)).kind == "SpotInterruption"
    chosen = ClaimFacts(pod.node, build.now - 1, reason="Drifted")
    drifted = notice(build, pod, nodes=build.nodes(pod, claim=chosen, taints=taints))
    assert (drifted.kind, drifted.confirmed) == ("NodeDrain", True)


def test_shutdown_leaves_fifteen_seconds(build: Any) -> None:
    pod = build.pod()
    off = {"ready": False, "ready_reason": "KubeletNotReady: node is shutting down", "ready_changed_at": build.now - 4}
    seen = notice(build, pod, nodes=build.nodes(pod, **off))
    assert (seen.kind, seen.confirmed, seen.deadline) == ("SpotInterruption", True, build.now - 4 + SHUTDOWN_S)
    assert not is_dead(pod, ctx(build, pod, nodes=build.nodes(pod, **off)))


@pytest.mark.parametrize(
    ("silent", "confirmed"),
    [pytest.param(False, False, id="the manager hears it"), pytest.param(True, True, id="the manager has lost it")],
)
def test_node_that_is_not_ready_needs_a_second_witness(build: Any, silent: bool, confirmed: bool) -> None:
    pod = build.pod()
    nodes = build.nodes(pod, ready=False, ready_reason="NodeStatusUnknown")
    seen = notice(build, pod, nodes=nodes, silent=silent)
    assert (seen.kind, seen.confirmed) == ("NodeLost", confirmed)
    assert is_dead(pod, ctx(build, pod, nodes=nodes))
    assert not is_gone(pod, ctx(build, pod, nodes=nodes))


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        (ReconcileState(), False),
        (ReconcileState(absent_since={"n-j-r-1": 1_000_001.0 - NODE_KNOWN_S}), False),
        (ReconcileState(absent_since={"n-j-r-1": 1_000_000.0 - NODE_KNOWN_S}), True),
        (ReconcileState(nodes=frozenset({"n-j-r-1"})), True),
    ],
    ids=["pods may come before their nodes", "not for long", "for long", "it was there before"],
)
def test_absent_node(build: Any, state: ReconcileState, lost: bool) -> None:
    pod = build.pod()
    seen = notice(build, pod, nodes={}, state=state)
    assert (seen is not None and seen.confirmed) == lost
    assert is_gone(pod, ctx(build, pod, nodes={}, state=state)) == lost


@pytest.mark.parametrize(("placed", "lost"), [(59.0, False), (60.0, True)], ids=["not for a minute", "for a minute"])
def test_each_pod_on_a_node_that_was_never_seen_has_time_of_its_own(build: Any, placed: float, lost: bool) -> None:
    """A pod, and its replacements on the same node, were lost at once: three managers a second."""
    pod = build.pod(placed=placed)
    assert is_gone(pod, ctx(build, pod, nodes={}, state=ReconcileState(absent_since={pod.node: 0.0}))) == lost


@pytest.mark.parametrize(
    ("placed", "lost"),
    [pytest.param(51.0, True, id="it was on the machine that went"), pytest.param(49.0, False, id="it came later")],
)
def test_a_pod_on_the_next_machine_of_the_name_waits_for_its_node(build: Any, placed: float, lost: bool) -> None:
    """The next machine has the name of the one that went, whose pod is still there: its own was lost at once."""
    pod = build.pod(placed=placed)
    state = ReconcileState(nodes=frozenset({pod.node}), absent_since={pod.node: build.now - 50.0})
    assert is_gone(pod, ctx(build, pod, nodes={}, state=state)) == lost


def test_without_rights_on_nodes_their_absence_means_nothing(build: Any) -> None:
    pod = build.pod()
    assert notice(build, pod, nodes={}, sees_nodes=False) is None
    assert not is_dead(pod, ctx(build, pod, nodes={}, sees_nodes=False))


def test_another_machine_under_the_old_name(build: Any) -> None:
    pod = build.pod(placed=90.0)
    assert notice(build, pod, nodes=build.nodes(pod, created_at=build.now - 30)).kind == "NodeLost"
    assert notice(build, pod, nodes=build.nodes(pod, created_at=build.now - 88)) is None


def test_most_telling_sign_names_the_union_and_the_earliest_deadline_holds(build: Any) -> None:
    pod = build.pod(disruption="EvictionByEvictionAPI", deletion_at=build.now + 3, deletion_grace_s=25)
    taint = Taint("aws-node-termination-handler/spot-itn", build.now - 60)
    seen = notice(build, pod, nodes=build.nodes(pod, taints=(taint,)))
    assert (seen.kind, seen.at, seen.deadline) == ("SpotInterruption", build.now - 60, build.now + 3)


def test_what_was_written_stays_though_the_sign_goes(build: Any) -> None:
    written = {names.ANNOTATION_NOTICED_AT: millisecond(build.now - 8), names.ANNOTATION_NOTICE: "NodeDrain"}
    seen = notice(build, build.pod(annotations=written))
    assert (seen.kind, seen.confirmed, seen.at, seen.deadline) == ("NodeDrain", True, build.now - 8, build.now + 12)


def test_calm(build: Any) -> None:
    assert notice(build, build.pod()) is None
    assert notice(build, build.pod(placed=None)) is None
