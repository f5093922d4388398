"""Which steps may be measured: statuses of a run, one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as but

from polyrl.cluster.autoscaling import StepMeasurement, StepObservation, observe_step
from polyrl.cluster.observation.facts import ManagerFacts
from polyrl.cluster.state import ReconcileState, StepWatch
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, ManagerStatus, StepValue

TIMES = {StepValue.ROLLOUT_SECONDS: 30.0, StepValue.TRAIN_SECONDS: 20.0, StepValue.STEP_SECONDS: 31.0}


def engine(number: int, state: EngineState = EngineState.SERVING, pool: Pool = Pool.SPOT) -> EngineStatus:
    return EngineStatus(
        name=f"j-r-{number}", pool=pool, state=state, weight_version=1, running=0, max_running=8, tokens=0
    )


def status(step: int, engines: int = 2, **more: Any) -> ManagerStatus:
    fleet = tuple(engine(number) for number in range(engines))
    plain = ManagerStatus(seq=1, run_epoch=1, step=step, trainer_connected=True, engines=fleet, values=dict(TIMES))
    return but(plain, **more)


def observations(build: Any, statuses: list[ManagerStatus]) -> list[StepObservation]:
    seen: list[StepObservation] = []
    state = ReconcileState()
    for reported in statuses:
        seen.append(observe_step(build.ctx(manager=ManagerFacts(reported, build.now), state=state)))
        state = replace(state, watch=seen[-1].watch)
    return seen


def test_step_that_was_watched_from_start_to_end(build: Any) -> None:
    first, second, third = observations(build, [status(4), status(5), status(6)])
    assert (first.measurement, first.boundary) == (None, False)
    assert second.measurement is not None
    assert not second.measurement.steady, "its start was not seen"
    assert third.measurement == StepMeasurement(6, 2, rollout_s=30.0, train_s=20.0, step_s=31.0)
    assert third.boundary


JOINING = (engine(0), engine(1), engine(2, EngineState.JOINING))
RESERVED = (engine(0), engine(1), engine(9, pool=Pool.RESERVED))


@pytest.mark.parametrize(
    ("during", "end", "steady"),
    [
        pytest.param(status(5), status(6), True, id="nothing"),
        pytest.param(status(5, engines=3), status(6), True, id="one came and went"),
        pytest.param(status(5), status(6, engines=1), True, id="an engine left"),
        pytest.param(
            status(5, engines=2),
            status(6, values=TIMES | {StepValue.POLLUTED_STEP: 1.0}),
            False,
            id="a validation or checkpoint",
        ),
        pytest.param(
            ManagerStatus(seq=1, run_epoch=1, step=5, engines=JOINING),
            status(6),
            True,
            id="an engine that joins counts not",
        ),
        pytest.param(
            ManagerStatus(seq=1, run_epoch=1, step=5, engines=RESERVED), status(6), True, id="nor a reserved one"
        ),
    ],
)
def test_what_makes_a_step_no_measure(build: Any, during: ManagerStatus, end: ManagerStatus, steady: bool) -> None:
    measured = observations(build, [status(4), status(5), during, end])[-1].measurement
    assert measured is not None
    assert measured.steady == steady


@pytest.mark.parametrize(
    "values", [pytest.param({}, id="none"), pytest.param({StepValue.ROLLOUT_SECONDS: 1.0}, id="one of three")]
)
def test_without_times_nothing_is_measured(build: Any, values: dict[str, float]) -> None:
    assert observations(build, [status(4), status(5), status(6, values=values)])[-1].measurement is None


def test_engines_that_come_and_go_count_for_their_time() -> None:
    watch = StepWatch(5, 4, whole=True, at=100.0)
    assert watch.until(130.0, 2).until(160.0, 0).mean_engines == 3.0
    assert watch.mean_engines == 4.0


def test_trainer_that_went_back_begins_anew(build: Any) -> None:
    back = observations(build, [status(4), status(5), status(3)])[-1]
    assert (back.measurement, back.boundary, back.watch) == (None, True, StepWatch(3, 2, whole=False, at=build.now))


def test_reserved_engine_did_what_it_says_or_all_of_a_lonely_step(build: Any) -> None:
    alone = observations(build, [status(4, 0), status(5, 0), status(6, 0)])[-1].measurement
    assert alone is not None
    assert (alone.engines, alone.reserved_s) == (0, 30.0)
    message = observations(build, [status(4), status(5), status(6, values=TIMES | {StepValue.RESERVED_SECONDS: 7.0})])[
        -1
    ].measurement
    assert message is not None
    assert message.reserved_s == 7.0


def test_manager_that_is_silent_or_unknown_tells_nothing(build: Any) -> None:
    watch = StepWatch(4, 2, whole=True)
    old = build.ctx(manager=ManagerFacts(status(5), build.now - 500), state=ReconcileState(watch=watch))
    assert observe_step(old) == StepObservation(watch)
    assert observe_step(build.ctx(state=ReconcileState(watch=watch))) == StepObservation(watch)


def test_no_step_is_under_way_without_a_trainer(build: Any) -> None:
    assert all(one.boundary for one in observations(build, [status(4, trainer_connected=False)] * 2))
