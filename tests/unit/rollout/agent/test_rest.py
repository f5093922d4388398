"""What an agent makes of orders to sleep and to wake, in whatever order they come."""

from __future__ import annotations

import asyncio

import pytest

from polyrl.wire import GoToSleep, WakeUp
from polyrl_rollout.agent.rest import RestOrders, Sleeper

SLEEP = GoToSleep(75.0, 1)
WAKE = WakeUp()
WELCOME = None


@pytest.mark.parametrize(
    ("came", "next_one", "wanted"),
    [
        pytest.param([SLEEP], SLEEP, False, id="to sleep"),
        pytest.param([WAKE], WAKE, True, id="to wake"),
        pytest.param([SLEEP, WAKE], WAKE, True, id="the last one counts"),
        pytest.param([WAKE, SLEEP], SLEEP, False, id="the last one counts, to sleep"),
        pytest.param([WAKE, WELCOME], None, False, id="a greeting takes an order to wake back"),
        pytest.param([WAKE, WELCOME, WAKE], WAKE, True, id="it comes again after the greeting"),
        pytest.param([SLEEP, WELCOME], SLEEP, False, id="an order to sleep stays"),
    ],
)
def test_what_is_to_be_done_next(
    came: list[GoToSleep | WakeUp | None], next_one: GoToSleep | WakeUp | None, *, wanted: bool
) -> None:
    orders = RestOrders(able=True)
    for one in came:
        if one is None:
            orders.welcomed()
        else:
            orders.order(one)
    assert orders.take() == next_one
    assert orders.take() is None, "each is followed once"
    assert orders.is_wanted is wanted


def test_an_engine_that_cannot_sleep_follows_nothing_and_is_never_asleep() -> None:
    orders = RestOrders(able=False)
    orders.order(SLEEP)
    assert orders.take() is None
    assert not orders.asleep


@pytest.mark.parametrize(("asleep", "done"), [(True, "wakes"), (False, "says so")], ids=["asleep", "awake"])
async def test_an_order_to_wake_is_answered_by_one_that_is_awake_too(*, asleep: bool, done: str) -> None:
    """It said nothing, and a manager that took it for asleep waited for it without end."""
    orders, happened = RestOrders(able=True), asyncio.Queue[str]()
    orders.asleep = asleep

    async def sleep(_: GoToSleep) -> None:
        raise AssertionError("nobody ordered it to sleep")

    sleeper = Sleeper(
        orders,
        sleep=sleep,
        begin_waking=lambda: happened.put_nowait("wakes"),
        confirm_awake=lambda: happened.put_nowait("says so"),
    )
    running = asyncio.create_task(sleeper.run())
    sleeper.order(WAKE)
    async with asyncio.timeout(10.0):
        assert await happened.get() == done
    running.cancel()
