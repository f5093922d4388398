"""Deletions by force, and releases: what is written, deleted, and when."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster import names
from polyrl.cluster.actions import Annotate, Delete
from polyrl.cluster.fleet.removal import GIVEN_UP_S, forced_deletions, release

ENDED_S = 10.0
"""Since when the pod's own grace is over."""


@pytest.mark.parametrize(
    ("deleting", "node", "deleted", "due"),
    [
        pytest.param(False, {"ready": False}, False, None, id="not being deleted"),
        pytest.param(True, {}, False, None, id="its kubelet answers"),
        pytest.param(True, {"ready": False}, False, GIVEN_UP_S - ENDED_S, id="silent for a moment"),
        pytest.param(True, {"ready": False, "ready_reason": "node is shutting down"}, False, None, id="shutting down"),
        pytest.param(True, {"created_at": 1e9}, True, None, id="another machine under its name"),
    ],
)
def test_force_only_where_no_kubelet_will_answer(
    build: Any, deleting: bool, node: dict[str, Any], deleted: bool, due: float | None
) -> None:
    pod = build.pod(deletion_at=build.now - ENDED_S if deleting else None)
    forced, due_at = forced_deletions(build.ctx(pods=(pod,), nodes=build.nodes(pod, **node)))
    assert [(action.uid, action.grace_s) for action in forced] == ([(pod.uid, 0)] if deleted else [])
    assert due_at == (None if due is None else build.now + due)


def test_a_silent_node_is_given_up_after_a_while(build: Any) -> None:
    pod = build.pod(deletion_at=build.now - GIVEN_UP_S)
    forced, _ = forced_deletions(build.ctx(pods=(pod,), nodes=build.nodes(pod, ready=False)))
    assert [action.grace_s for action in forced] == [0]


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        pytest.param({}, [Annotate, Delete], id="fresh"),
        pytest.param({"annotations": {names.ANNOTATION_RELEASED: "why"}}, [Delete], id="annotated before"),
        pytest.param({"deletion_at": 1.0}, [Annotate], id="being deleted"),
        pytest.param({"annotations": {names.ANNOTATION_RELEASED: "why"}, "deletion_at": 1.0}, [], id="both done"),
    ],
)
def test_release_does_what_is_left_to_do(build: Any, pod: dict[str, Any], expected: list[type]) -> None:
    assert [type(action) for action in release(build.pod(**pod), "spot is back")] == expected
