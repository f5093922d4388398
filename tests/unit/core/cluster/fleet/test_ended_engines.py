"""Names whose pods are gone are the manager's to refuse; a pod that is there is never named so."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.actions import DrainEngine
from polyrl.cluster.fleet.plan import POD_UNSEEN_S, ended_engines
from polyrl.cluster.observation.facts import PodPhase
from polyrl.cluster.state import LastSeenPod, ReconcileState
from polyrl.sample import Pool
from polyrl.worker import Role


def seen(name: str, role: Role = Role.ROLLOUT) -> LastSeenPod:
    return LastSeenPod(name, role, pool=Pool.SPOT, node="n", settled=True, runs_since=None)


@pytest.mark.parametrize(
    ("last", "listed", "began_s_ago", "ended"),
    [
        pytest.param(["j-r-1", "j-r-2"], [], 0.0, ["j-r-2"], id="gone since the last reconcile"),
        pytest.param([], ["j-r-1", "j-r-2"], POD_UNSEEN_S, ["j-r-2"], id="listed, and has no pod"),
        pytest.param([], ["j-r-2"], POD_UNSEEN_S - 1, [], id="an operator that has just begun may not see it yet"),
        pytest.param([], ["j-r-3"], POD_UNSEEN_S, ["j-r-3"], id="its pod has ended"),
        pytest.param([], ["j-trainer-0-x7k2p", "j-r-x", "other-r-2"], POD_UNSEEN_S, [], id="no rollouts of this job"),
        pytest.param(["j-r-2"], ["j-r-2"], POD_UNSEEN_S, ["j-r-2"], id="named once"),
    ],
)
def test_ended_engines(build: Any, last: list[str], listed: list[str], began_s_ago: float, ended: list[str]) -> None:
    state = ReconcileState(last_seen={f"uid-{name}": seen(name) for name in last}, began_at=build.now - began_s_ago)
    pods = (build.pod("j-r-1"), build.pod("j-r-3", phase=PodPhase.FAILED))
    actions = list(ended_engines(build.ctx(state=state, pods=pods, manager=build.manager(listed))))
    assert [action.pod for action in actions] == ended
    assert all(isinstance(action, DrainEngine) and action.ended and action.deadline_s == 0.0 for action in actions)


def test_without_a_manager_nobody_is_asked(build: Any) -> None:
    assert not list(ended_engines(build.ctx(state=ReconcileState(last_seen={"uid": seen("j-r-2")}))))
