"""When a declared fault is due, and whom it hits."""

import pytest

from polyrl.local.planner import ObservedWorker, Reclaim, WorkerPhase
from polyrl.manifest.rollout import FaultSpec
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, ManagerStatus
from polyrl.worker import Role
from polyrl_cli.local.chaos import DueFault, FaultSchedule

KILL = {"atStep": 5, "action": "Kill"}
PREEMPT = {"atStep": 5, "action": "Preempt", "noticeSeconds": 3}


def a_rollout(number: int, **facts: object) -> ObservedWorker:
    return ObservedWorker(
        f"rollout-{number}", Role.ROLLOUT, uid=str(number), phase=WorkerPhase.RUNNING, started_at=float(number), **facts
    )  # type: ignore[arg-type]


FLEET = [
    a_rollout(1),
    a_rollout(0),
    ObservedWorker("reserved", Role.RESERVED, uid="r", phase=WorkerPhase.RUNNING, started_at=-1.0),
]


def status(step: int, running: int = 4, phase: str = "rl") -> ManagerStatus:
    engines = tuple(
        EngineStatus(
            name=seen.name,
            pool=Pool.SPOT,
            state=EngineState.SERVING,
            weight_version=1,
            running=running,
            max_running=8,
            tokens=0,
        )
        for seen in FLEET
    )
    return ManagerStatus(seq=1, run_epoch=1, phase=phase, step=step, engines=engines)


def due(fault: dict[str, object], now: ManagerStatus, fleet: list[ObservedWorker] = FLEET) -> DueFault | None:
    return FaultSchedule([FaultSpec.model_validate(fault)]).due(now, fleet)


@pytest.mark.parametrize(
    ("now", "is_due"),
    [
        (status(3), False),
        (status(4), True),
        (status(4, running=0), False),
        (status(5, running=0), True),
        (status(9, phase="sft"), False),
        (status(9, phase="eval"), False),
    ],
    ids=[
        "before its step",
        "its step has begun when the one before is whole",
        "an idle victim is waited for within the step",
        "but not beyond it",
        "SFT steps do not count",
        "nor do evaluations",
    ],
)
def test_when(now: ManagerStatus, is_due: bool) -> None:
    assert (due(KILL, now) is not None) == is_due


def test_whom() -> None:
    assert [due({**KILL, "rollout": n}, status(5)).fault.victim for n in (0, 1, 9)] == [
        "rollout-0",
        "rollout-1",
        "rollout-1",
    ]  # type: ignore[union-attr]


def test_one_that_is_going_or_unknown_to_the_manager_is_spared() -> None:
    going = [a_rollout(0, reclaim=Reclaim(9.0)), a_rollout(7), FLEET[2]]
    assert due(KILL, status(5), going) is None


def test_each_is_due_once_in_the_order_of_steps() -> None:
    schedule = FaultSchedule([FaultSpec.model_validate({**PREEMPT, "atStep": 7}), FaultSpec.model_validate(KILL)])
    is_due = [schedule.due(status(step), FLEET) for step in (5, 5, 6, 9)]
    assert [found and found.fault.seconds for found in is_due] == [0.0, None, 3.0, None]
    assert str(is_due[2]) == "declared fault: rollout-0 preempted with 3 s notice at step 7"


@pytest.mark.parametrize(("done_steps", "is_due"), [(4, True), (5, False), (9, False)])
def test_a_resumed_run_repeats_no_fault_of_the_steps_it_has(done_steps: int, is_due: bool) -> None:
    schedule = FaultSchedule([FaultSpec.model_validate(KILL)], done_steps)
    assert (schedule.due(status(max(5, done_steps + 1)), FLEET) is not None) == is_due
