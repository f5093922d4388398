"""The planner, row by row: what is seen, and what is to be done."""

import dataclasses

import pytest

from polyrl.local.planner import (
    MANAGER_START_S,
    ObservedWorker,
    Reclaim,
    RunEnd,
    RunObservation,
    StartWorker,
    WorkerPhase,
    next_deadline,
    plan,
    run_conditions,
)
from polyrl.local.starts import FIRST_RESTART_BACKOFF_S, LONGEST_RESTART_BACKOFF_S, LONGEST_START_S
from polyrl.worker import FAILED_STARTS_LIMIT, NAME_SLOT, TEMPORARY_EXIT, Role, Worker, Workers

NOW = 100.0
MANAGER = Worker("manager", Role.MANAGER, argv=("manager",), grace_s=3)
TRAINER = Worker("trainer", Role.TRAINER, argv=("trainer",), grace_s=20)
RESERVED = Worker("reserved", Role.RESERVED, argv=("agent",), grace_s=5)
ROLLOUT = Worker("rollout", Role.ROLLOUT, argv=("agent", NAME_SLOT), grace_s=5)
WANTED = Workers(TRAINER, MANAGER, reserved=RESERVED, rollout=ROLLOUT, rollouts=2)
RESTARTING = Workers(TRAINER, MANAGER, reserved=RESERVED, rollout=ROLLOUT, rollouts=2, trainer_restarts=2)


def seen(worker: Worker, phase: WorkerPhase = WorkerPhase.RUNNING, **facts: object) -> ObservedWorker:
    return ObservedWorker(worker.name, worker.role, uid=worker.name, phase=phase, **{"started_at": NOW - 50, **facts})  # type: ignore[arg-type]


def exited(worker: Worker, exit_code: int = 1, ago: float = 10.0, **facts: object) -> ObservedWorker:
    return seen(worker, WorkerPhase.EXITED, exit_code=exit_code, exited_at=NOW - ago, **facts)


def rollout(number: int) -> Worker:
    return ROLLOUT.named(f"rollout-{number}")


def manager(number: int) -> Worker:
    return MANAGER.named(f"manager-{number}")


def trainer(number: int) -> Worker:
    return TRAINER.named(f"trainer-{number}")


def one_after_the_other(template: Worker) -> list[ObservedWorker]:
    """As many failed starts as are no bad luck, each half a second long, the newest 10 s ago."""
    begins = [NOW - 13 + n for n in range(FAILED_STARTS_LIMIT)]
    names = [template.named(f"{template.name}-{n}") for n in range(FAILED_STARTS_LIMIT)]
    return [exited(one, ago=NOW - at - 0.5, started_at=at) for one, at in zip(names, begins, strict=True)]


ALL = [seen(worker) for worker in (MANAGER, TRAINER, RESERVED, rollout(0), rollout(1))]


def without(*names: str) -> list[ObservedWorker]:
    return [one for one in ALL if one.name not in names]


def planned(observed: list[ObservedWorker], wanted: Workers = WANTED, ready: bool = True, **facts: object) -> list[str]:
    served = facts.pop("served", frozenset({"rollout-0", "rollout-1"}))
    return [str(action) for action in plan(wanted, RunObservation(observed, ready, served=served, **facts), NOW)]  # type: ignore[arg-type]


FIRST_GPUS, SECOND_GPUS = ("1", "2"), ("3", "4")
ON_GPUS = dataclasses.replace(WANTED, rollout_gpus=(FIRST_GPUS, SECOND_GPUS))

ROWS = [
    (
        "each rollout has GPUs of its own",
        without("rollout-0", "rollout-1"),
        {"wanted": ON_GPUS},
        ["start rollout-0 on GPU 1,2: the run begins", "start rollout-1 on GPU 3,4: the run begins"],
    ),
    (
        "one under notice holds them to its end",
        [
            *without("rollout-0", "rollout-1"),
            seen(rollout(0), gpus=FIRST_GPUS, reclaim=Reclaim(NOW + 5)),
            seen(rollout(1), gpus=SECOND_GPUS),
        ],
        {"wanted": ON_GPUS},
        [],
    ),
    (
        "so does one that is stopping",
        [
            *without("rollout-0", "rollout-1"),
            seen(rollout(0), WorkerPhase.STOPPING, gpus=FIRST_GPUS),
            seen(rollout(1), gpus=SECOND_GPUS),
        ],
        {"wanted": ON_GPUS},
        [],
    ),
    (
        "its successor has them when it is gone",
        [*without("rollout-0", "rollout-1"), exited(rollout(0), gpus=FIRST_GPUS), seen(rollout(1), gpus=SECOND_GPUS)],
        {"wanted": ON_GPUS},
        ["start rollout-2 on GPU 1,2: another one is gone or going"],
    ),
    ("the manager comes first", [], {"ready": False}, ["start manager: the run begins"]),
    ("others wait for its endpoints", ALL[:1], {"ready": False}, []),
    (
        "then all at once",
        ALL[:1],
        {},
        [
            "start trainer: the run begins",
            "start reserved: the run begins",
            "start rollout-0: the run begins",
            "start rollout-1: the run begins",
        ],
    ),
    ("nothing to do", ALL, {}, []),
    (
        "a rollout under notice is replaced at once",
        [*without("rollout-0"), seen(rollout(0), reclaim=Reclaim(NOW + 5))],
        {},
        ["start rollout-2: another one is gone or going"],
    ),
    (
        "so is one that was taken without notice",
        [*without("rollout-0"), exited(rollout(0), -9, ago=0, reclaim=Reclaim(NOW))],
        {},
        ["start rollout-2: another one is gone or going"],
    ),
    (
        "and one that served and crashed",
        [*without("rollout-0"), exited(rollout(0), ago=0)],
        {},
        ["start rollout-2: another one is gone or going"],
    ),
    (
        "one that failed at its start waits its back-off",
        [*without("rollout-0"), exited(rollout(0), ago=FIRST_RESTART_BACKOFF_S / 2)],
        {"served": frozenset({"rollout-1"})},
        [],
    ),
    (
        "and not a moment longer",
        [*without("rollout-0"), exited(rollout(0), ago=FIRST_RESTART_BACKOFF_S)],
        {"served": frozenset()},
        ["start rollout-2: another one is gone or going"],
    ),
    (
        "the reserved engine is replaced too",
        [*without("reserved"), exited(RESERVED)],
        {},
        ["start reserved-1: reserved is gone"],
    ),
    ("until it is given up", [*without("reserved"), *one_after_the_other(RESERVED)], {}, []),
    (
        "no rollout is replaced once the job is over",
        [*without("rollout-0"), exited(rollout(0), 0)],
        {"finishing": True},
        [],
    ),
    (
        "the trainer's good end is the run's",
        [*without("trainer"), exited(TRAINER, 0)],
        {},
        ["end: the trainer is done"],
    ),
    (
        "its bad end too",
        [*without("trainer"), exited(TRAINER, -9)],
        {},
        ["end: the trainer ended with exit code -9"],
    ),
    (
        "a killed trainer has a successor after a pause",
        [*without("trainer"), exited(TRAINER, -9, ago=FIRST_RESTART_BACKOFF_S)],
        {"wanted": RESTARTING},
        ["start trainer-1: trainer is gone; this one goes on from the newest checkpoint"],
    ),
    (
        "not before",
        [*without("trainer"), exited(TRAINER, -9, ago=FIRST_RESTART_BACKOFF_S / 2)],
        {"wanted": RESTARTING},
        [],
    ),
    ("nor beside it", [*ALL, exited(TRAINER, -9), seen(trainer(1))], {"wanted": RESTARTING}, []),
    (
        "nor one more than backoffLimit",
        [*without("trainer"), *(exited(trainer(n), -9) for n in range(3))],
        {"wanted": RESTARTING},
        ["end: the trainer ended with exit code -9, after 2 restarts"],
    ),
    (
        "but one that was taken away does not count",
        [*without("trainer"), *(exited(trainer(n), -9, reclaim=Reclaim(NOW - 20)) for n in range(3))],
        {"wanted": RESTARTING},
        ["start trainer-3: trainer-2 is gone; this one goes on from the newest checkpoint"],
    ),
    (
        "a trainer that said why it cannot go on has none",
        [*without("trainer"), exited(TRAINER, 1)],
        {"wanted": RESTARTING},
        ["end: the trainer ended with exit code 1"],
    ),
    (
        "nor one that fell after its last words",
        [*without("trainer"), exited(TRAINER, -9)],
        {"wanted": RESTARTING, "finishing": True},
        ["end: the trainer ended with exit code -9"],
    ),
    (
        "unless those were that all went well: then nothing is lost with it",
        [*without("trainer"), exited(TRAINER, -9)],
        {"finishing": True, "succeeded": True},
        ["end: the trainer is done"],
    ),
    (
        "nor with the successor of one that was killed",
        [*without("trainer"), exited(TRAINER, -9), exited(trainer(1), -9)],
        {"wanted": RESTARTING, "finishing": True, "succeeded": True},
        ["end: the trainer is done"],
    ),
    (
        "one that lives is waited for",
        ALL,
        {"finishing": True, "succeeded": True},
        [],
    ),
    (
        "and one that then says what went wrong is believed",
        [*without("trainer"), exited(TRAINER, 1)],
        {"finishing": True, "succeeded": True},
        ["end: the trainer ended with exit code 1"],
    ),
    (
        "asked to stop, the successor is stopped first",
        [*without("trainer"), exited(TRAINER, -9), seen(trainer(1))],
        {"wanted": RESTARTING, "stopping": True},
        ["stop trainer-1 within 20 s: the run was asked to stop"],
    ),
    (
        "a manager that was killed has a successor, which goes on with its journal",
        [*without("manager"), exited(MANAGER, -9, ago=0)],
        {},
        ["start manager-1: manager is gone"],
    ),
    (
        "one that cannot use its input has none",
        [*without("manager"), exited(MANAGER, 2)],
        {},
        ["end: the manager ended with exit code 2 before the trainer was done"],
    ),
    (
        "nor have managers that fail at start again and again",
        [*without("manager"), *one_after_the_other(MANAGER)],
        {},
        ["end: the manager ended with exit code 1 before the trainer was done"],
    ),
    ("unless the job is over", [*without("manager"), exited(MANAGER, 0)], {"finishing": True}, []),
    (
        "a manager that never speaks is given up",
        [seen(MANAGER, started_at=NOW - MANAGER_START_S - 1)],
        {"ready": False},
        ["end: the manager did not say where it listens within 120 s"],
    ),
    (
        "asked to stop: the trainer first",
        ALL,
        {"stopping": True},
        ["stop trainer within 20 s: the run was asked to stop"],
    ),
    (
        "then all others",
        [*without("trainer"), exited(TRAINER, 0)],
        {"stopping": True},
        [
            "stop manager within 3 s: the run was asked to stop",
            "stop reserved within 5 s: the run was asked to stop",
            "stop rollout-0 within 5 s: the run was asked to stop",
            "stop rollout-1 within 5 s: the run was asked to stop",
        ],
    ),
    ("then the end", [exited(TRAINER, 0), exited(MANAGER, 0)], {"stopping": True}, ["end: the run was asked to stop"]),
]


@pytest.mark.parametrize(("observed", "facts", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_plan(observed: list[ObservedWorker], facts: dict[str, object], expected: list[str]) -> None:
    assert planned(observed, **facts) == expected  # type: ignore[arg-type]


def failed(number: int, ago: float = 60.0) -> ObservedWorker:
    return exited(rollout(number), ago=ago, started_at=NOW - 70 + number)


def test_a_rollout_that_fails_at_start_again_and_again_is_given_up_and_the_run_goes_on() -> None:
    facts = RunObservation([*ALL[:3], *one_after_the_other(ROLLOUT)], True)
    assert plan(WANTED, facts, NOW) == []
    (sentence,) = run_conditions(WANTED, facts, NOW)
    assert sentence == "rollouts given up: the last 3 ended before they served (newest rollout-2, exit code 1)"


def test_engines_of_which_nothing_is_heard_are_named() -> None:
    """As one whose agent hangs before it greets: it was awaited without a word."""
    late = [seen(rollout(n), started_at=NOW - MANAGER_START_S - 1) for n in range(2)]
    facts = RunObservation([*ALL[:3], *late], True, heard=frozenset({"reserved", "rollout-0"}))
    sentence = "the manager heard nothing of rollout-1 for 120 s; see logs/"
    assert run_conditions(WANTED, facts, NOW) == [sentence]
    assert run_conditions(WANTED, facts, NOW - 2) == []
    assert run_conditions(WANTED, dataclasses.replace(facts, manager_ready=False), NOW) == []


def test_one_that_served_in_between_starts_the_count_anew() -> None:
    facts = RunObservation([*ALL[:3], *(failed(n) for n in range(4))], True, served=frozenset({"rollout-1"}))
    assert [str(action) for action in plan(WANTED, facts, NOW)] == [
        "start rollout-4: another one is gone or going",
        "start rollout-5: another one is gone or going",
    ]
    assert run_conditions(WANTED, facts, NOW) == []


EIGHT = dataclasses.replace(WANTED, rollouts=8)


def test_of_eight_that_started_together_three_that_end_at_once_are_one_failure() -> None:
    """Whatever becomes of the other five: they may still load."""
    together = [seen(rollout(n)) if n < 5 else exited(rollout(n), ago=1, started_at=NOW - 50) for n in range(8)]
    starts = planned([*ALL[:3], *together], EIGHT, served=frozenset())
    assert len(starts) == 3
    assert run_conditions(EIGHT, RunObservation([*ALL[:3], *together], True), NOW) == []


def test_what_fails_while_another_one_serves_is_tried_again_and_a_person_hears_of_it() -> None:
    """A broken device, say: its failures must not leave the good ones without successors."""
    one_bad = [seen(rollout(9), started_at=NOW - 90), *one_after_the_other(ROLLOUT)]
    facts = RunObservation([*ALL[:3], *one_bad], True, served=frozenset({"rollout-9"}))
    assert len(plan(WANTED, facts, NOW)) == 1
    assert run_conditions(WANTED, facts, NOW) == [
        "rollouts that start fail, though others have served: the last 3 ended before they served (newest rollout-2, "
        "exit code 1); they are tried again, up to 30 s apart"
    ]


def test_once_those_that_served_are_gone_failures_count_again() -> None:
    gone = exited(rollout(9), -9, ago=20, started_at=NOW - 90)
    facts = RunObservation([*ALL[:3], gone, *one_after_the_other(ROLLOUT)], True, served=frozenset({"rollout-9"}))
    assert plan(WANTED, facts, NOW) == []
    assert run_conditions(WANTED, facts, NOW)[0].startswith("rollouts given up: ")


def test_engines_that_waited_for_weights_in_good_health_did_not_fail_at_their_start() -> None:
    """As in a run that begins with hours of supervised learning, in which somebody kills an engine now and then."""
    waited = [
        exited(rollout(0), -9, ago=2 * LONGEST_START_S, started_at=NOW - 4 * LONGEST_START_S),
        exited(rollout(1), -9, ago=0, started_at=NOW - 2 * LONGEST_START_S),
    ]
    alone = dataclasses.replace(WANTED, reserved=None, rollouts=1)
    assert planned([*ALL[:2], *waited], alone, served=frozenset()) == ["start rollout-2: another one is gone or going"]
    slow = [
        exited(rollout(n), TEMPORARY_EXIT, ago=(2 - n) * LONGEST_START_S, started_at=NOW - (3 - n) * LONGEST_START_S)
        for n in range(3)
    ]
    (end,) = planned([*ALL[:2], *slow], alone, served=frozenset())
    assert end.startswith("end: no engine is left")


def test_a_reclaimed_one_is_no_failure() -> None:
    taken = [exited(rollout(n), -9, reclaim=Reclaim(NOW - 10)) for n in range(FAILED_STARTS_LIMIT)]
    assert len(planned([*ALL[:3], *taken], served=frozenset())) == WANTED.rollouts


def test_the_back_off_doubles() -> None:
    observed = [*ALL[:3], failed(0, ago=69.5), failed(1, ago=0)]
    assert next_deadline(WANTED, RunObservation(observed, True), NOW) == NOW + 2 * FIRST_RESTART_BACKOFF_S
    assert next_deadline(WANTED, RunObservation(ALL, True), NOW) is None


def test_the_trainers_back_off_doubles_too() -> None:
    observed = [*without("trainer"), exited(TRAINER, -9), exited(trainer(1), -11, ago=0)]
    assert next_deadline(RESTARTING, RunObservation(observed, True), NOW) == NOW + 2 * FIRST_RESTART_BACKOFF_S


def test_the_trainers_back_off_has_a_bound_as_that_of_engines() -> None:
    killed = [exited(trainer(n), -9, ago=100 - n) for n in range(1, 20)]
    lenient = dataclasses.replace(RESTARTING, trainer_restarts=100)
    observed = [*without("trainer"), exited(TRAINER, -9, ago=200), *killed, exited(trainer(20), -9, ago=0)]
    assert next_deadline(lenient, RunObservation(observed, True), NOW) == NOW + LONGEST_RESTART_BACKOFF_S


HOURS = 3600.0


@pytest.mark.parametrize(
    ("served", "lived_s", "is_tried"),
    [
        pytest.param(True, 60.0, True, id="one that served in between, however short"),
        pytest.param(False, 2 * HOURS, True, id="one that waited in good health for hours"),
        pytest.param(False, 60.0, False, id="none: killed before they served for too long"),
    ],
)
def test_two_kills_far_apart_give_an_engine_up_only_if_none_was_of_use_between(
    served: bool, lived_s: float, is_tried: bool
) -> None:
    first = exited(RESERVED, -9, started_at=NOW - 3 * HOURS, ago=3 * HOURS - 10)
    between = exited(RESERVED.named("between"), -9, started_at=NOW - 60 - lived_s, ago=60)
    last = exited(RESERVED.named("last"), -9, started_at=NOW - 50, ago=40)
    names = frozenset({"between"} if served else ())
    observed = [*without("reserved"), first, between, last]
    actions = plan(WANTED, RunObservation(observed, True, served=names), NOW)
    assert any(isinstance(one, StartWorker) and one.worker.role is Role.RESERVED for one in actions) is is_tried


def test_without_any_engine_left_the_run_ends_naming_the_last() -> None:
    gone = [*one_after_the_other(RESERVED), *one_after_the_other(ROLLOUT)]
    (end,) = plan(WANTED, RunObservation([*ALL[:2], *gone], True), NOW)
    assert isinstance(end, RunEnd)
    assert (end.ok, end.worker) == (False, "rollout-2")
    assert str(end) == "end: no engine is left: rollout-2 ended with exit code 1"


def test_without_any_engine_from_the_start_the_run_ends_and_names_why() -> None:
    nobody = dataclasses.replace(WANTED, reserved=None, rollouts=0)
    (end,) = planned([seen(manager(0))], nobody)
    assert end == "end: no engine: rollout.replicas is 0 and there is no reserved engine"


def test_a_wrong_input_is_distinguished() -> None:
    (end,) = plan(WANTED, RunObservation([*without("trainer"), exited(TRAINER, 2)], True), NOW)
    assert isinstance(end, RunEnd)
    assert end.user_error


def test_a_run_without_manager_is_the_trainer_alone() -> None:
    alone = Workers(TRAINER, None, reserved=None, rollout=None, rollouts=0)
    assert planned([], alone, ready=False) == ["start trainer: the run begins"]
    assert planned([seen(TRAINER)], alone, ready=False) == []
