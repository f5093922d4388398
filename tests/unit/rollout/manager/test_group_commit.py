"""Under load syncs are shared; a few in a row are not kept waiting."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from polyrl.errors import RunFailed
from polyrl_rollout.manager.group_commit import AT_ONCE, SHARED_S, GroupCommit

DEADLINE_S = 20.0


class FastDisk:
    """A journal whose commits are counted, and synced in no time; or fail."""

    def __init__(self) -> None:
        self.commits = self.synced = self.syncs = 0
        self.fails = False

    def sync(self) -> None:
        if self.fails:
            raise RunFailed("the disk is gone")
        self.syncs, self.synced = self.syncs + 1, self.commits


class Asker:
    """Commits, and waits for the disk, again as soon as it was synced."""

    def __init__(self, times: int) -> None:
        self.disk, self._left = FastDisk(), times
        self.over = asyncio.get_running_loop().create_future()
        self.sharing = GroupCommit(cast("Any", self.disk), self.ask)

    def ask(self) -> None:
        if not self._left:
            self.over.set_result(None)
            return
        self._left -= 1
        self.disk.commits += 1
        self.sharing.plan(urgent=True)

    async def took_s(self) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.ask()
        async with asyncio.timeout(DEADLINE_S):
            await self.over
        await self.sharing.close()
        return loop.time() - began


async def test_syncs_that_never_end_are_spread() -> None:
    asker = Asker(times=AT_ONCE + 20)
    took_s = await asker.took_s()
    assert asker.disk.syncs == AT_ONCE + 20
    assert asker.disk.syncs <= AT_ONCE + 1 + took_s / SHARED_S


async def test_a_few_syncs_in_a_row_are_not_kept_waiting() -> None:
    asker = Asker(times=AT_ONCE)
    waited: list[float] = []
    loop = asyncio.get_running_loop()
    honest = loop.call_at
    loop.call_at = lambda when, *rest, **named: waited.append(when) or honest(when, *rest, **named)  # type: ignore
    asker.ask()
    await asker.over
    loop.call_at = honest  # type: ignore[method-assign]
    assert not waited
    await asker.sharing.close()


async def test_what_somebody_waits_for_does_not_wait_for_the_quiet_time() -> None:
    disk = FastDisk()
    synced = asyncio.Event()
    sharing = GroupCommit(cast("Any", disk), synced.set)
    disk.commits = 1
    sharing.plan(urgent=False)
    assert sharing._planned is not None
    sharing.plan(urgent=True)
    assert sharing._planned is None
    async with asyncio.timeout(DEADLINE_S):
        await synced.wait()
    assert disk.synced == 1
    await sharing.close()


async def test_a_disk_that_fails_is_raised_on_the_loop_and_for_who_waits() -> None:
    disk = FastDisk()
    disk.fails, disk.commits = True, 1
    sharing = GroupCommit(cast("Any", disk), lambda: pytest.fail("it was not synced"))
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context.get("exception")))
    with pytest.raises(RunFailed, match="the disk is gone"):
        await sharing.until_safe()
    assert [str(error) for error in raised] == ["the disk is gone"]
    await sharing.close()
