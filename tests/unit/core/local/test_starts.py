"""Failed starts, row by row: again, and when, or given up, and why."""

import random

import pytest

from polyrl.local.planner import ObservedWorker, RunEnd, RunObservation, StartWorker, WorkerPhase, next_deadline, plan
from polyrl.local.starts import (
    FIRST_RESTART_BACKOFF_S,
    LONGEST_RESTART_BACKOFF_S,
    RETRIES_S,
    FailedStart,
    judge,
    pause_after,
)
from polyrl.worker import TEMPORARY_EXIT, Role, Worker, Workers

OWN, KILLED, ENGINE_LOST, ENDED = 1, -9, TEMPORARY_EXIT, 0


def starts(*codes: int, apart: float = 10.0, lived: float = 3.0) -> list[FailedStart]:
    ends = [n * apart for n in range(len(codes))]
    return [
        FailedStart(f"rollout-{n}", code, started_at=at - lived, exited_at=at)
        for n, (code, at) in enumerate(zip(codes, ends, strict=True))
    ]


@pytest.mark.parametrize(
    ("failures", "again_after"),
    [
        (starts(OWN), FIRST_RESTART_BACKOFF_S),
        (starts(OWN, OWN), 2 * FIRST_RESTART_BACKOFF_S),
        (starts(OWN, OWN, OWN), None),
        (starts(2, 127, 1), None),
        (starts(OWN, KILLED, OWN, KILLED), 8 * FIRST_RESTART_BACKOFF_S),
        (starts(OWN, KILLED, OWN, KILLED, OWN), None),
        (starts(KILLED, KILLED, KILLED), 4 * FIRST_RESTART_BACKOFF_S),
        (starts(137, 143, ENGINE_LOST, ENDED), 8 * FIRST_RESTART_BACKOFF_S),
        (starts(*[ENDED] * 3), None),
        (starts(*[KILLED] * 100), LONGEST_RESTART_BACKOFF_S),
        (starts(KILLED, KILLED, apart=RETRIES_S - 1), 2 * FIRST_RESTART_BACKOFF_S),
        (starts(KILLED, KILLED, apart=RETRIES_S), None),
        (starts(*[OWN] * 8, apart=0.1), FIRST_RESTART_BACKOFF_S),
        (starts(*[OWN] * 8, apart=1.6), None),
        (starts(*[OWN] * 4, apart=1.6), 2 * FIRST_RESTART_BACKOFF_S),
    ],
    ids=[
        "one of its own",
        "two",
        "three are no bad luck",
        "whatever the code",
        "killed in between, two of its own",
        "and three",
        "three killed say nothing",
        "nor do other ends from outside",
        "a command that does nothing and ends well, three times",
        "the pause has a bound",
        "just before the deadline",
        "at the deadline",
        "eight that started together are one",
        "of eight that overlap each second one began after a failure",
        "of four two did",
    ],
)
def test_judge(failures: list[FailedStart], again_after: float | None) -> None:
    verdict = judge(failures)
    assert verdict is not None
    assert verdict.again_at == (None if again_after is None else failures[-1].exited_at + again_after)


def test_no_failure_no_verdict() -> None:
    assert judge([]) is None


def test_a_role_of_which_another_one_served_meanwhile_is_not_given_up() -> None:
    failures = starts(OWN, OWN, OWN, OWN)
    assert [judge(failures, failures[n].started_at).again_at is None for n in range(4)] == [True, True, False, False]  # type: ignore[union-attr]
    killed = judge(starts(KILLED, KILLED, apart=RETRIES_S), proven_until=0.0)
    assert killed is not None
    assert killed.again_at == RETRIES_S + 2 * FIRST_RESTART_BACKOFF_S


def test_what_failed_before_one_that_waited_long_in_good_health_is_over() -> None:
    """As for its first weights, while a stage before generates nothing: its engine is then lost for the first time."""
    first = FailedStart("rollout-0", KILLED, started_at=0.0, exited_at=20.0)
    waited = FailedStart("rollout-1", ENGINE_LOST, started_at=21.0, exited_at=6 * RETRIES_S)
    verdict = judge([first, waited])
    assert verdict is not None
    assert verdict.again_at == waited.exited_at + 2 * FIRST_RESTART_BACKOFF_S
    late = FailedStart("rollout-2", ENGINE_LOST, started_at=6 * RETRIES_S + 2, exited_at=7 * RETRIES_S)
    given_up = judge([first, waited, late])
    assert given_up is not None
    assert given_up.again_at is None, "the deadline counts on from its end"


def test_the_back_off_has_a_bound_however_many_failed() -> None:
    assert pause_after(5000) == LONGEST_RESTART_BACKOFF_S


def test_reasons() -> None:
    killed, own = judge(starts(KILLED)), judge(starts(OWN, OWN, OWN))
    assert killed is not None
    assert own is not None
    assert killed.why == "rollout-0 was killed (SIGKILL) before it served"
    assert own.why == "3 ended before they served (newest rollout-2, exit code 1)"


TRAINER = Worker("trainer", Role.TRAINER, argv=("trainer",))
MANAGER = Worker("manager", Role.MANAGER, argv=("manager",))
RESERVED = Worker("reserved", Role.RESERVED, argv=("agent",))
ROLLOUT = Worker("rollout", Role.ROLLOUT, argv=("agent",))
START_S = 30.0


@pytest.mark.parametrize("seed", range(20))
def test_a_run_whose_starting_engines_are_killed_goes_on_when_that_ends(seed: int) -> None:
    """Everything that starts is killed for up to twenty minutes; then each start serves."""
    draw = random.Random(seed)
    wanted = Workers(TRAINER, MANAGER, reserved=RESERVED, rollout=ROLLOUT, rollouts=draw.randint(0, 8))
    quiet_at, now = draw.uniform(60, 1200), 0.0
    seen: dict[str, ObservedWorker] = {}
    served: set[str] = set()
    while not served:
        run = RunObservation(list(seen.values()), manager_ready=True, served=frozenset(served))
        for action in plan(wanted, run, now):
            assert not isinstance(action, RunEnd), f"{action} at {now:.0f} s"
            assert isinstance(action, StartWorker)
            worker = action.worker
            seen[worker.name] = ObservedWorker(
                worker.name, worker.role, uid=worker.name, phase=WorkerPhase.RUNNING, started_at=now
            )
        engines = [one for one in seen.values() if one.lives and one.role in (Role.RESERVED, Role.ROLLOUT)]
        due = next_deadline(wanted, RunObservation(list(seen.values()), manager_ready=True), now)
        now = min(now + draw.uniform(4, 12) if engines else 1e9, due or 1e9)
        assert now < quiet_at + LONGEST_RESTART_BACKOFF_S + 2 * START_S, "nobody was tried again"
        served = {one.name for one in engines if now >= quiet_at and now - one.started_at >= START_S}
        if engines and now < quiet_at:
            victim = draw.choice(engines)
            code = draw.choice((KILLED, ENGINE_LOST, -15, 137))
            seen[victim.name] = ObservedWorker(
                victim.name,
                victim.role,
                uid=victim.name,
                phase=WorkerPhase.EXITED,
                started_at=victim.started_at,
                exit_code=code,
                exited_at=now,
            )
