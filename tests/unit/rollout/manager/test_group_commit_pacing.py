"""How long a commit waits that somebody waits for, after a burst of orders that waited for the disk themselves."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from polyrl_rollout.manager.group_commit import AT_ONCE, SHARED_S, GroupCommit
from polyrl_rollout.manager.journal import Journal

DEADLINE_S = 20.0


class FastDisk:
    """A journal whose syncs take no time."""

    def __init__(self) -> None:
        self.commits = self.synced = 0

    def sync(self) -> None:
        self.synced = self.commits


@pytest.mark.parametrize("orders", [0, 3 * AT_ONCE, 2000], ids=["none", "a few", "a zone that is reclaimed"])
async def test_orders_put_nobody_off_beyond_one_pause(orders: int) -> None:
    """A thousand of them put the next sample's receipt off by ten seconds: each added to a debt without bound."""
    disk, synced = FastDisk(), asyncio.Event()
    group = GroupCommit(cast(Journal, cast(Any, disk)), synced.set)
    loop = asyncio.get_running_loop()
    planned: list[float] = []
    for _ in range(orders):
        disk.commits += 1
        await group.until_safe()
    honest = loop.call_at
    disk.commits += 1
    synced.clear()
    loop.call_at = lambda when, *rest, **more: (planned.append(when - loop.time()), honest(when, *rest, **more))[1]  # type: ignore[method-assign, assignment]
    try:
        group.plan(urgent=True)
    finally:
        loop.call_at = honest  # type: ignore[method-assign]
    async with asyncio.timeout(DEADLINE_S):
        await synced.wait()
    assert all(wait <= SHARED_S for wait in planned)
    await group.close()
