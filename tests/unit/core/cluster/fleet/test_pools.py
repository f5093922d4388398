"""Back-off of a pool: each row a moment, then whole courses in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.fleet.pools import (
    MAX_POOL_BACKOFF_S,
    UNLIMITED,
    PoolView,
    backoff_s,
    pool_views,
    refused_until,
    restart_at,
)
from polyrl.cluster.observation.rollouts import PodState
from polyrl.cluster.state import ReconcileState
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.manifest.status import PoolStatus
from polyrl.sample import Pool

TIMEOUT_S = 1200


def spot(build: Any, fleet: list[Any], stored: dict[str, Any] | None = None, **more: Any) -> PoolView:
    """The spot pool's view; `failed` and `preempted` are counted in this look."""
    failed, preempted = more.pop("failed", []), more.pop("preempted", [])
    status = {"rollout": {"pools": [{"name": "spot", **(stored or {})}]}}
    return pool_views(build.ctx(status=status, **more), fleet, failed, preempted)[0]


def waiting(build: Any, name: str, age: float, **more: Any) -> Any:
    return build.rollout(name, PodState.PENDING, age=age, **more)


def test_how_long_a_pool_waits_before_a_stand_in(build: Any) -> None:
    view = spot(build, [waiting(build, "j-r-1", TIMEOUT_S - 1), waiting(build, "j-r-2", 5)])
    assert (view.status.state, view.room, view.surplus) == ("Available", UNLIMITED, ())
    assert view.due == build.now + 1
    assert unix(view.status.limited_since) == build.now - TIMEOUT_S + 1


def test_overdue_pods_make_it_back_off_with_one_probe(build: Any) -> None:
    fleet = [waiting(build, f"j-r-{n}", TIMEOUT_S + n, unschedulable="0/3 nodes") for n in range(3)]
    view = spot(build, [*fleet, waiting(build, "j-r-9", 60)])
    assert (view.status.state, view.room, view.status.consecutive_failures) == ("BackingOff", 0, 1)
    assert [one.pod.name for one in view.surplus] == ["j-r-1", "j-r-2"]
    assert "0/3 nodes" in view.status.last_reason
    until = unix(view.status.backoff_until)
    assert until is not None
    assert build.now + 30 <= until <= build.now + 60


@pytest.mark.parametrize(
    ("number", "full"),
    [
        pytest.param(1, 60, id="the first"),
        pytest.param(2, 120, id="twice as long"),
        pytest.param(3, 240, id="and so on"),
        pytest.param(6, 1800, id="up to the longest"),
        pytest.param(40, 1800, id="for ever"),
    ],
)
def test_length_doubles_with_a_jitter_that_repeats(number: int, full: float) -> None:
    lengths = {backoff_s(number, f"job-{n}") for n in range(50)}
    assert all(full / 2 <= length <= full for length in lengths)
    assert len(lengths) > 40
    assert backoff_s(number, "a") == backoff_s(number, "a")


HELD = {"state": "BackingOff", "consecutiveFailures": 1}


def held(build: Any, left: float) -> dict[str, Any]:
    since = millisecond(build.now - 2000)
    return HELD | {"backoffUntil": millisecond(build.now + left), "limitedSince": since}


@pytest.mark.parametrize(
    ("ages", "left", "room", "surplus", "failures", "state"),
    [
        pytest.param([TIMEOUT_S + 9], 5, 0, 0, 1, "BackingOff", id="the probe waits on"),
        pytest.param([], 5, 1, 0, 1, "BackingOff", id="the probe was lost: another"),
        pytest.param([TIMEOUT_S + 9], -1, 1, 1, 2, "BackingOff", id="its time is up: a fresh one, twice the time"),
        pytest.param([20], -1, 0, 0, 1, "BackingOff", id="a young probe is left alone"),
        pytest.param([], -1, UNLIMITED, 0, 1, "Available", id="nothing waits any more"),
    ],
)
def test_while_held(
    build: Any, ages: list[float], left: float, room: int, surplus: int, failures: int, state: str
) -> None:
    fleet = [waiting(build, f"j-r-{n}", age) for n, age in enumerate(ages)]
    view = spot(build, fleet, held(build, left))
    assert (view.room, len(view.surplus), view.status.consecutive_failures) == (room, surplus, failures)
    assert view.status.state == state


def test_probe_with_a_node_ends_it_but_an_older_pod_does_not(build: Any) -> None:
    old = build.rollout("j-r-1", age=3000, placed=2900)
    assert spot(build, [old, waiting(build, "j-r-2", 1300)], held(build, 5)).status.state == "BackingOff"
    probe = build.rollout("j-r-2", PodState.STARTING, age=1300, placed=2)
    view = spot(build, [old, probe], held(build, 5))
    assert (view.status.state, view.room, view.status.limited_since) == ("Available", UNLIMITED, None)
    assert view.status.consecutive_failures == 1, "forgotten only once a pod has lived"
    lived = build.rollout("j-r-2", age=1300, placed=600)
    assert spot(build, [lived], {"consecutiveFailures": 1}).status.consecutive_failures == 0


def test_pod_pushed_out_by_the_scheduler_holds_the_pool(build: Any) -> None:
    out = build.pod(disruption="PreemptionByScheduler")
    view = spot(build, [], preempted=[out])
    assert (view.status.state, view.status.consecutive_failures, view.room) == ("BackingOff", 1, 1)
    assert spot(build, [], preempted=[build.pod(disruption="EvictionByEvictionAPI")]).status.state == "Available"
    elsewhere = build.pod(disruption="PreemptionByScheduler", pool=Pool.ON_DEMAND)
    assert spot(build, [], preempted=[elsewhere]).status.state == "Available"


@pytest.mark.parametrize(
    ("starts", "wait"),
    [
        pytest.param(1, 10, id="the first"),
        pytest.param(2, 20, id="twice as long"),
        pytest.param(3, 40, id="and so on"),
        pytest.param(6, 300, id="up to the longest"),
        pytest.param(60, 300, id="for ever"),
    ],
)
def test_failed_starts_wait_longer_each_time(build: Any, starts: int, wait: float) -> None:
    stored = {"failedStarts": starts, "lastFailureTime": millisecond(build.now - 1)}
    view = spot(build, [], stored)
    assert (view.status.state, view.room, view.due) == ("BackingOff", 0, pytest.approx(build.now - 1 + wait))
    assert restart_at(view.status) == pytest.approx(build.now - 1 + wait)
    over = {"failedStarts": starts, "lastFailureTime": millisecond(build.now - wait)}
    assert spot(build, [], over).room == UNLIMITED


def test_one_batch_that_fails_counts_once(build: Any) -> None:
    batch = [build.pod(f"j-r-{n}", age=30) for n in range(8)]
    first = spot(build, [], failed=batch[:3]).status
    assert first.failed_starts == 1
    stored = first.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert spot(build, [], stored, failed=batch[3:]).status.failed_starts == 1
    later = build.pod("j-r-9", age=0)
    assert spot(build, [], stored, failed=[later], now=build.now + 60).status.failed_starts == 1
    newer = build.pod("j-r-10", age=-30)
    assert spot(build, [], stored, failed=[newer], now=build.now + 60).status.failed_starts == 2


def test_only_a_newer_rollout_that_registers_proves_the_pool(build: Any) -> None:
    stored = {"failedStarts": 2, "lastFailureTime": millisecond(build.now - 50)}
    assert spot(build, [build.rollout(age=100)], stored).status.failed_starts == 2
    assert spot(build, [build.rollout(age=40)], stored).status.failed_starts == 0


@pytest.mark.parametrize(
    ("times", "wait"),
    [
        pytest.param(1, 60, id="the first"),
        pytest.param(2, 120, id="twice as long"),
        pytest.param(4, 480, id="and so on"),
        pytest.param(9, 600, id="up to the longest"),
    ],
)
def test_refused_requests_are_repeated_slowly(build: Any, times: int, wait: float) -> None:
    state = ReconcileState()
    for number in range(times):
        state = state.with_refusal("exceeded quota", build.now - times + number + 1)
    assert refused_until(state.refusal, build.now) == build.now + wait
    assert spot(build, [], state=state).room == 0
    assert spot(build, [], state=state.without_refusal()).room == UNLIMITED


def test_no_capacity_for_two_hours_is_one_probe_at_a_time(build: Any) -> None:
    """The pool's own rules, driven second by minute: never two overdue pods, and ever rarer fresh ones."""
    made, probe_age, renewals = 0.0, 0.0, []
    stored: dict[str, Any] = {}
    for minute in range(121):
        now = build.now + 60 * minute
        age = now - (build.now + made)
        fleet = [build.rollout("j-r-1", PodState.PENDING, age=-made)]
        view = spot(build, fleet, stored, now=now)
        stored = view.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        assert len(view.surplus) <= 1
        if view.surplus:
            assert view.room == 1
            made = 60 * minute
            renewals.append(age)
        probe_age = max(probe_age, age)
    assert len(renewals) >= 3
    assert view.status.state == "BackingOff"
    assert min(renewals) >= TIMEOUT_S
    assert MAX_POOL_BACKOFF_S < 7200


def test_unknown_fields_of_a_pool_are_plain() -> None:
    plain = PoolStatus.model_validate({"name": "spot"})
    assert restart_at(plain) is None
    assert refused_until(None, 0.0) is None
