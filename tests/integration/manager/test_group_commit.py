"""A real manager on a disk that is slow, or fails: what promises something waits, all else goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import Any

import pytest

from polyrl.errors import RunFailed
from polyrl.weights import WeightsRef

WEIGHTS = WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b"hash")
WAIT_S = 0.2
"""Long for what needs no disk."""


class SlowDisk:
    """Syncs wait while it is held; or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free, self._honest = threading.Event(), os.fdatasync
        self._free.set()
        self.fails = False
        self.syncs = 0
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def _sync(self, descriptor: int) -> None:
        self._free.wait(60.0)
        self.syncs += 1
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._honest(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    slow = SlowDisk(monkeypatch)
    yield slow
    slow.release()


async def test_a_promise_waits_for_the_disk_and_tokens_do_not(journaled_site: Any, disk: SlowDisk) -> None:
    site = journaled_site
    agent = site.agent("engine-1")
    working = asyncio.create_task(agent.run())
    async with site.client() as client:
        await client.publish(WEIGHTS)
        await client.submit([site.group(0, n=1, tokens=9000)])
        await site.eventually(lambda: agent.tokens_made)
        disk.hold()
        await site.eventually(lambda: agent.tokens_made > 1000)  # more than may be without a receipt
        answer = asyncio.create_task(client.submit([site.group(1, n=1)]))
        await site.eventually(lambda: site.manager.status().samples.submitted == 2)
        await asyncio.sleep(WAIT_S)
        assert not answer.done()
        disk.release()
        await answer
    working.cancel()


async def test_a_run_on_a_real_disk_shares_its_syncs(journaled_site: Any, disk: SlowDisk) -> None:
    site = journaled_site
    agent = site.agent("engine-1")
    working = asyncio.create_task(agent.run())
    async with site.client() as client:
        await site.run_work(client, [site.group(number) for number in range(8)])
    assert 0 < disk.syncs < site.manager._journal.commits
    working.cancel()


async def test_a_sync_that_fails_ends_the_manager_and_promises_nothing(journaled_site: Any, disk: SlowDisk) -> None:
    site = journaled_site
    async with site.client() as client:
        disk.fails = True
        answer = asyncio.create_task(client.submit([site.group(0)]))
        with pytest.raises(RunFailed, match="the journal cannot be written: Input/output error"):
            await site.running
        assert not answer.done()
        answer.cancel()
