"""Whom a requested fault hits, and when nobody."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from polyrl.errors import UserError
from polyrl.local.planner import ObservedWorker, Reclaim, WorkerPhase
from polyrl.worker import Role
from polyrl_cli.chaos.faults import Fault, FaultRequest, choose_victim
from polyrl_cli.chaos.kinds import ChaosAction, Direction, Target


def seen(name: str, role: Role = Role.ROLLOUT, **facts: Any) -> ObservedWorker:
    return ObservedWorker(name, role, uid=name, **({"phase": WorkerPhase.RUNNING, "started_at": 0.0} | facts))


FLEET = [
    seen("manager", Role.MANAGER),
    seen("trainer", Role.TRAINER, phase=WorkerPhase.EXITED, exit_code=-9),
    seen("trainer-1", Role.TRAINER),
    seen("reserved", Role.RESERVED),
    seen("rollout-0", phase=WorkerPhase.EXITED, exit_code=-9),
    seen("rollout-1", reclaim=Reclaim(9.0)),
    seen("rollout-2"),
    seen("rollout-3"),
    seen("rollout-4"),
]
LIVE_ROLLOUTS = {"rollout-2", "rollout-3", "rollout-4"}


GREETED = {"rollout-3", "reserved"}


def hit(fleet: list[ObservedWorker] = FLEET, **request: Any) -> Fault:
    return choose_victim(FaultRequest(**({"action": ChaosAction.KILL} | request)), fleet, GREETED)


def refusal(fleet: list[ObservedWorker] = FLEET, **request: Any) -> str:
    with pytest.raises(UserError) as raised:
        hit(fleet, **request)
    return str(raised.value)


@pytest.mark.parametrize(
    ("target", "victims"),
    [
        (Target.AGENT, LIVE_ROLLOUTS),
        (Target.ENGINE, LIVE_ROLLOUTS),
        (Target.MANAGER, {"manager"}),
        (Target.TRAINER, {"trainer-1"}),
    ],
)
def test_the_seed_draws_among_the_living_of_a_role(target: Target, victims: set[str]) -> None:
    assert {hit(target=target, seed=seed).victim for seed in range(40)} == victims
    assert len({hit(target=target, seed=7).victim for _ in range(5)}) == 1


def test_the_order_in_which_workers_are_seen_does_not_matter() -> None:
    assert [hit(FLEET[::-1], seed=seed) for seed in range(9)] == [hit(seed=seed) for seed in range(9)]


def test_a_named_one_is_hit_even_the_reserved_engine() -> None:
    assert hit(worker="rollout-4").victim == "rollout-4"
    assert hit(worker="reserved").role is Role.RESERVED


def test_only_a_rollout_is_taken_away_as_capacity_is() -> None:
    assert hit().takes_capacity
    assert hit(action=ChaosAction.PREEMPT).takes_capacity
    for other in (hit(worker="reserved"), hit(target=Target.ENGINE), hit(target=Target.MANAGER)):
        assert not other.takes_capacity
    assert not hit(action=ChaosAction.FREEZE).takes_capacity


def test_a_partition_wants_an_agent_that_has_greeted() -> None:
    assert {hit(action=ChaosAction.PARTITION, seed=seed).victim for seed in range(20)} == {"rollout-3"}
    assert "that has greeted the manager" in refusal(action=ChaosAction.PARTITION, worker="rollout-2")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"worker": "rollout-0"}, "a live rollout called rollout-0 now; alive: reserved, rollout-2"),
        ({"worker": "manager"}, "a live rollout called manager"),
        ({"worker": "reserved", "action": ChaosAction.PREEMPT}, "a live rollout called reserved"),
        ({"target": Target.TRAINER, "action": ChaosAction.PREEMPT}, "--role trainer: only an agent gets a notice"),
        (
            {"target": Target.MANAGER, "action": ChaosAction.PARTITION},
            "--role manager: only an agent can be cut off",
        ),
        (
            {"action": ChaosAction.FREEZE, "direction": Direction.IN},
            "--direction in: only a partition has one, not freeze",
        ),
        (
            {"target": Target.ENGINE, "action": ChaosAction.PARTITION},
            "--role engine: only an agent can be cut off",
        ),
    ],
    ids=[
        "a dead rollout",
        "a manager as a rollout",
        "a notice for the reserved engine",
        "a notice for the trainer",
        "a partition of the manager",
        "a freeze in one direction",
        "a partition of an engine",
    ],
)
def test_refused_in_a_sentence(wanted: dict[str, Any], words: str) -> None:
    assert words in refusal(**wanted)


@pytest.mark.parametrize("target", Target)
def test_nobody_of_a_role_is_a_sentence(target: Target) -> None:
    assert refusal([], target=target).startswith("this run does not have a live ")
    assert "alive: reserved" in refusal([seen("reserved", Role.RESERVED)])


@pytest.mark.parametrize(
    "change", [{"seconds": -1.0}, {"seconds": 1e9}, {"speed": 0.0}, {"speed": 1.0}, {"more": 1}], ids=str
)
def test_a_wantedout_of_bounds_is_not_understood(change: dict[str, float]) -> None:
    sent = msgspec.to_builtins(FaultRequest(action=ChaosAction.SLOW)) | change
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(sent, FaultRequest)


def test_every_fault_has_its_words() -> None:
    words = {str(hit(action=action, worker="rollout-3")) for action in ChaosAction}
    assert len(words) == len(ChaosAction)
    assert all(text.startswith("rollout-3 ") for text in words)
    assert str(hit(target=Target.ENGINE, worker="rollout-3")) == "the engine of rollout-3 killed without notice"
