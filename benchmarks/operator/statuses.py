"""Jobs' statuses as they come, so that the benchmark need not list a thousand jobs every second."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final

import aiohttp
import msgspec

from polyrl_operator.api.kinds import JOB

PAUSE_S: Final = 0.2
"""Before a watch that broke begins again."""


class _Rollout(msgspec.Struct, rename="camel"):
    replicas: int = -1
    ready_replicas: int = -1


class _Status(msgspec.Struct):
    rollout: _Rollout = msgspec.field(default_factory=_Rollout)


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""


class _Job(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    status: _Status = msgspec.field(default_factory=_Status)


class _Event(msgspec.Struct):
    object: _Job


class Statuses:
    """Run `follow` as a task."""

    def __init__(self, session: aiohttp.ClientSession, host: str, namespace: str) -> None:
        self._session, self._url = session, f"{host}{JOB.path(namespace)}?watch=1"
        self._shown: dict[str, _Rollout] = {}
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Until cancelled. Without a version a watch begins with all there is."""
        decoder = msgspec.json.Decoder(_Event)
        while True:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self._session.get(self._url, timeout=aiohttp.ClientTimeout(total=None)) as answer:
                    answer.raise_for_status()  # of a CRD that is not served yet
                    async for line in answer.content:
                        seen = decoder.decode(line).object
                        self._shown[seen.metadata.name] = seen.status.rollout
                        self._news.set()
            await asyncio.sleep(PAUSE_S)

    def ready(self, rollouts: int, name: str = "") -> int:
        """How many jobs (only the one called `name`) have so many rollouts, all ready, and none beyond."""
        shown = [one for job, one in self._shown.items() if not name or job == name]
        return sum(one.ready_replicas == rollouts == one.replicas for one in shown)

    async def until_ready(self, rollouts: int, count: int, deadline_s: float, name: str = "") -> dict[str, Any]:
        """Seconds until half, nine tenths and all of `count` jobs were so. Raises SystemExit after `deadline_s`."""
        began, took = time.monotonic(), {}
        marks = {"half": (count + 1) // 2, "most": (9 * count + 9) // 10, "all": count}
        try:
            async with asyncio.timeout(deadline_s):
                while "all" not in took:
                    self._news.clear()
                    done, now = self.ready(rollouts, name), time.monotonic() - began
                    took |= {mark: round(now, 1) for mark, least in marks.items() if mark not in took and done >= least}
                    if "all" not in took:
                        await self._news.wait()
        except TimeoutError:
            done = self.ready(rollouts, name)
            raise SystemExit(f"only {done} of {count} jobs were ready within {deadline_s:.0f} s") from None
        return took
