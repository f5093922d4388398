"""Lists everything anew: before the first action under a Lease, after a gap in a watch, and every few minutes.

A watch that is opened again lists what is there, and reports nothing of what went meanwhile; and children that are not
watched are seen only here. Lists are paged, and of fixed children only metadata is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.errors import PolyRLError
from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.kinds import CLAIM, FIXED, JOB, NODE, POD, TRAINER, ResourceKind
from polyrl_operator.informer.cache import Cache

log = structlog.get_logger(__name__)

PERIOD_S: Final = 300.0
"""Between resyncs: how long an unwatched child may be missing unnoticed."""

SETTLE_S: Final = 1.0
"""After a gap: several watches are opened again at once, and one resync serves all."""

RESYNC_RETRY_S: Final = 2.0
"""After a resync that failed."""

CHILDREN: Final = names.LABEL_JOB
"""The one label selector of every list and watch of children. By a label of our own: a tool or policy that sets
`app.kubernetes.io/managed-by` would hide pods, which would be made again and again."""


class Resync:
    """Run `run` as a task; `ready` is true once everything was read since `begin`."""

    def __init__(self, client: Client, cache: Cache, namespaces: Sequence[str] | None, *, nodes: bool) -> None:
        self._client, self._cache = client, cache
        self._namespaces: Sequence[str | None] = namespaces if namespaces is not None else (None,)
        self._nodes = nodes
        self._claims = nodes
        self._requested = asyncio.Event()
        self._ready = asyncio.Event()
        self._leads = False
        self._term = 0

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    async def until_ready(self) -> None:
        """Waits until everything was read since `begin`."""
        await self._ready.wait()

    def begin(self) -> None:
        """This replica leads: it may act once everything was read anew, for another may have acted until now."""
        self._term += 1
        self._leads = True
        self._ready.clear()
        self._requested.set()

    def end(self) -> None:
        """It leads no longer."""
        self._leads = False
        self._ready.clear()

    def request(self) -> None:
        """A watch had a gap. A standby reads nothing: it will when it leads."""
        if self._leads:
            self._requested.set()

    async def run(self, done: Callable[[], None]) -> None:
        """Resyncs until cancelled; `done` is called after each."""
        while True:
            await self._until_due()
            term = self._term
            try:
                await self.read_all()
            except PolyRLError as error:
                log.warning("resync failed", error=str(error))
                self._requested.set()
                asked_s = error.retry_after_s if isinstance(error, ApiError) else 0.0
                await asyncio.sleep(min(max(RESYNC_RETRY_S, asked_s), PERIOD_S))
            else:
                # Leadership may have gone, or come back, during the lists: then these do not count.
                if self._leads and term == self._term:
                    self._ready.set()
                    done()

    async def _until_due(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S if self._leads else None):
                await self._requested.wait()
                if self.ready:
                    await asyncio.sleep(SETTLE_S)
        self._requested.clear()

    async def read_all(self) -> None:
        """Reads everything once. Raises ApiError; what was read by then is kept."""
        if self._nodes:
            await self._read(NODE, None)
        if self._claims:
            try:
                await self._read(CLAIM, None)
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                # No Karpenter here; should it come, the operator is to be restarted.
                self._claims = False
        for namespace in self._namespaces:
            for kind in (*FIXED, TRAINER, POD):
                await self._read(kind, namespace, CHILDREN)
            await self._read(JOB, namespace)

    async def _read(self, kind: ResourceKind, namespace: str | None, selector: str = "") -> None:
        listed: set[str] = set()
        newest = 0
        async for items, version in self._client.pages(kind, namespace, selector, metadata_only=kind in FIXED):
            newest = int(version or 0)
            for item in items:
                listed.add(item["metadata"]["uid"])
                self._take(kind, item)
        gone = self._cache.forget_absent(kind, namespace, listed, newest)
        if gone:
            log.info("resync found objects gone", kind=kind.name, count=gone)

    def _take(self, kind: ResourceKind, item: Object) -> None:
        try:
            self._cache.observe(kind, item)
        except Exception:
            # One object that nobody understands must not keep all others from being read.
            log.exception("object not understood", kind=kind.name, name=item["metadata"].get("name"))
