"""Reads everything anew: before the first act under a Lease, after a watch began again, and every few minutes.

A watch that begins again lists what is there, and says nothing of what went meanwhile; and children that are not
watched are seen only here. Lists are paged, and of fixed children only metadata is asked for.
Refuses to hold: what is kept (see `cache`). Read next: `watches`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from polyrl.cluster import names
from polyrl.errors import PolyRLError
from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.kinds import CLAIM, FIXED, JOB, NODE, POD, TRAINER, ResourceKind
from polyrl_operator.informer.cache import Cache

log = structlog.get_logger(__name__)

PERIOD_S: Final = 300.0
"""Between resyncs: how long an unwatched child may be missing unnoticed."""

SETTLE_S: Final = 1.0
"""After a watch began again: several begin at once, and one resync serves all."""

RETRY_S: Final = 2.0
"""After a resync that failed."""

OURS: Final = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
"""The one selector of every list and watch of children."""


class Resync:
    """Run `keep` as a task; `ready` tells whether everything was read since `restart`."""

    def __init__(self, client: Client, cache: Cache, namespaces: Sequence[str] | None, *, nodes: bool) -> None:
        self._client, self._cache = client, cache
        self._places: Sequence[str | None] = namespaces if namespaces is not None else (None,)
        self._nodes = nodes
        self._claims = nodes
        self._wanted = asyncio.Event()
        self._ready = asyncio.Event()
        self._leads = False
        self._term = 0
        self.rounds = 0

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    async def until_ready(self) -> None:
        """Waits until everything was read since `begin`; ends when cancelled."""
        await self._ready.wait()

    def begin(self) -> None:
        """This replica leads: it may act once everything was read anew, for another may have acted until now."""
        self._term += 1
        self._leads = True
        self._ready.clear()
        self._wanted.set()

    def end(self) -> None:
        """It leads no longer."""
        self._leads = False
        self._ready.clear()

    def soon(self) -> None:
        """A watch began again. A standby reads nothing: it will when it leads."""
        if self._leads:
            self._wanted.set()

    async def keep(self, done: Callable[[], None]) -> None:
        """Resyncs until cancelled; `done` is called after each."""
        while True:
            await self._next()
            term = self._term
            try:
                await self.once()
            except PolyRLError as error:
                log.warning("resync failed", error=str(error))
                self._wanted.set()
                await asyncio.sleep(RETRY_S)
            else:
                if self._leads and term == self._term:
                    self._ready.set()
                    done()

    async def _next(self) -> None:
        """Waits until a resync is asked for, or due."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S if self._leads else None):
                await self._wanted.wait()
                if self.ready:
                    await asyncio.sleep(SETTLE_S)
        self._wanted.clear()

    async def once(self) -> None:
        """Reads everything. Raises ApiError; what was read by then is kept."""
        if self._nodes:
            await self._read(NODE, None)
        if self._claims:
            try:
                await self._read(CLAIM, None)
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                # No Karpenter here; should it come, the operator is to be started anew.
                self._claims = False
        for place in self._places:
            for kind in (*FIXED, TRAINER, POD):
                await self._read(kind, place, OURS, metadata_only=kind in FIXED)
            await self._read(JOB, place)
        self.rounds += 1

    async def _read(
        self, kind: ResourceKind, place: str | None, selector: str = "", *, metadata_only: bool = False
    ) -> None:
        seen: set[str] = set()
        listed = 0
        async for items, version in self._client.pages(kind, place, selector, metadata_only=metadata_only):
            listed = int(version or 0)
            for item in items:
                seen.add(item["metadata"]["uid"])
                self._cache.observe(kind, item)
        gone = self._cache.forget_absent(kind, place, seen, listed)
        if gone:
            log.info("resync found objects gone", kind=kind.name, count=gone)
