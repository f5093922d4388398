"""Whether the learner needs its GPU alone: by what was measured, or by the manifest."""

from __future__ import annotations

import pytest

from polyrl.engines.hand_over import GIB, LEAST_ENGINE_BYTES, DeviceUse, plan_hand_over
from polyrl.manifest.spec import ReservedSleep


def use(*, own_peak: float, total: int = 80, free: float = 20.0, own: float = 10.0) -> DeviceUse:
    return DeviceUse(total * GIB, int(free * GIB), own=int(own * GIB), own_peak=int(own_peak * GIB))


@pytest.mark.parametrize(
    ("others", "own_peak", "alone"),
    [
        pytest.param(20, 40, False, id="both fit"),
        pytest.param(20, 56, False, id="both just fit, with what allocators lose"),
        pytest.param(20, 56.1, True, id="they would fill it"),
        pytest.param(50, 40, True, id="they do not fit"),
        pytest.param(20, 0, True, id="nothing was learned yet"),
        pytest.param(1.9, 1, True, id="no engine was awake yet"),
    ],
)
def test_both_hold_memory_at_once_where_what_was_measured_of_them_fits(
    others: float, own_peak: float, alone: bool
) -> None:
    assert plan_hand_over(ReservedSleep.AUTO, use(own_peak=own_peak), int(others * GIB)).alone is alone


def test_without_a_gpu_nobody_sleeps_unless_the_manifest_says_so() -> None:
    assert not plan_hand_over(ReservedSleep.AUTO, None).alone
    assert not plan_hand_over(ReservedSleep.NEVER, use(own_peak=80), 80 * GIB).alone
    always = plan_hand_over(ReservedSleep.ALWAYS, None)
    assert (always.alone, always.why) == (True, "trainer.reservedSleep is always")


def test_a_plan_says_by_what_it_was_made() -> None:
    plan = plan_hand_over(ReservedSleep.AUTO, use(own_peak=40), 50 * GIB)
    assert plan.why == "engine and contexts 50.0 GiB, the learner 40.0 GiB, of 80.0 GiB"


def test_what_others_hold_is_what_neither_is_free_nor_our_own() -> None:
    assert use(own_peak=1).others == 50 * GIB
    assert DeviceUse(10, 9, own=2, own_peak=2).others == 0, "two questions to a driver, and a pass between"
    assert LEAST_ENGINE_BYTES < 4 * GIB
