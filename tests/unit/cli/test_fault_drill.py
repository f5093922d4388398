"""When a declared fault strikes, and whom."""

import pytest

from polyrl.local.fleet import ObservedWorker, Reclaim, WorkerPhase
from polyrl.manifest.rollout import FaultSpec
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, ManagerStatus
from polyrl.worker import Role
from polyrl_cli.chaos.injector import DueFault, FaultSchedule

KILL = {"atStep": 5, "action": "Kill"}
PREEMPT = {"atStep": 5, "action": "Preempt", "noticeSeconds": 3}


def a_rollout(number: int, **facts: object) -> ObservedWorker:
    return ObservedWorker(f"rollout-{number}", Role.ROLLOUT, str(number), WorkerPhase.RUNNING, float(number), **facts)  # type: ignore[arg-type]


FLEET = [a_rollout(1), a_rollout(0), ObservedWorker("reserved", Role.RESERVED, "r", WorkerPhase.RUNNING, -1.0)]


def status(step: int, running: int = 4, phase: str = "rl") -> ManagerStatus:
    engines = tuple(
        EngineStatus(
            engine=seen.name,
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


def struck(fault: dict[str, object], now: ManagerStatus, fleet: list[ObservedWorker] = FLEET) -> DueFault | None:
    return FaultSchedule([FaultSpec.model_validate(fault)]).due(now, fleet)


@pytest.mark.parametrize(
    ("name", "now", "strikes"),
    [
        ("before its step", status(3), False),
        ("its step has begun when the one before is whole", status(4), True),
        ("an idle victim is waited for within the step", status(4, running=0), False),
        ("but not beyond it", status(5, running=0), True),
        ("SFT steps do not count", status(9, phase="sft"), False),
        ("nor do evaluations", status(9, phase="eval"), False),
    ],
)
def test_when(name: str, now: ManagerStatus, strikes: bool) -> None:
    assert (struck(KILL, now) is not None) == strikes, name


def test_whom() -> None:
    assert [struck({**KILL, "rollout": n}, status(5)).fault.victim for n in (0, 1, 9)] == [
        "rollout-0",
        "rollout-1",
        "rollout-1",
    ]  # type: ignore[union-attr]


def test_one_that_is_going_or_unknown_to_the_manager_is_spared() -> None:
    going = [a_rollout(0, reclaim=Reclaim(9.0)), a_rollout(7), FLEET[2]]
    assert struck(KILL, status(5), going) is None


def test_each_strikes_once_in_the_order_of_steps() -> None:
    drill = FaultSchedule([FaultSpec.model_validate({**PREEMPT, "atStep": 7}), FaultSpec.model_validate(KILL)])
    strikes = [drill.due(status(step), FLEET) for step in (5, 5, 6, 9)]
    assert [strike and strike.fault.seconds for strike in strikes] == [0.0, None, 3.0, None]
    assert str(strikes[2]) == "declared fault: rollout-0 preempted with 3 s notice at step 7"


@pytest.mark.parametrize(("done_steps", "strikes"), [(4, True), (5, False), (9, False)])
def test_a_resumed_run_repeats_no_fault_of_the_steps_it_has(done_steps: int, strikes: bool) -> None:
    drill = FaultSchedule([FaultSpec.model_validate(KILL)], done_steps)
    assert (drill.due(status(max(5, done_steps + 1)), FLEET) is not None) == strikes
