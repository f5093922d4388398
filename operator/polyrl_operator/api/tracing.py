"""What is asked of the API server, and which watches live: seen where bytes pass, in kopf's session and in ours.

A watch is alive while bytes come: events, or the bookmarks that the server sends every minute. A stream that stands
open and silent is what `health` looks for.
Refuses to hold: what to do about it. Read next: `health`, `metrics`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp
from yarl import URL

from polyrl_operator.api.kinds import Permission, access_of


@dataclass
class WatchStream:
    """The newest watch of one resource."""

    response: aiohttp.ClientResponse
    seen_bytes: int = 0
    alive_at: float = field(default_factory=time.monotonic)
    """When it first stood, then when it was last seen to give bytes."""


class RequestTracer:
    """Counts requests and keeps an eye on watches."""

    def __init__(self, on_doubt: Callable[[], None] | None = None) -> None:
        """`on_doubt` hears that a watch may have missed something: its collection was listed anew, or it stood open to
        its end and gave nothing, as behind a proxy that lost the server."""
        self.counts: Counter[tuple[Permission, str]] = Counter()
        """By permission and status class, as `2xx`; `error` where no answer came."""
        self._streams: dict[str, WatchStream] = {}
        self._listed: set[str] = set()
        self._on_doubt = on_doubt

    def trace(self, *, watches: bool = False) -> aiohttp.TraceConfig:
        """Hooks for one session; `watches`: its lists and streams are kopf's."""
        hooks = aiohttp.TraceConfig()
        hooks.on_request_exception.append(self._failed)
        hooks.on_request_end.append(self._watching if watches else self._answered)
        return hooks

    def stream_ages(self) -> dict[str, float]:
        """Seconds since each watch last gave a byte, by path. Call it often: it is also what looks."""
        now = time.monotonic()
        for stream in self._streams.values():
            seen = stream.response.content.total_bytes
            if seen != stream.seen_bytes:
                stream.seen_bytes, stream.alive_at = seen, now
        return {path: now - stream.alive_at for path, stream in self._streams.items()}

    async def _answered(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, end: aiohttp.TraceRequestEndParams
    ) -> None:
        self._count(end.method, end.url, f"{end.response.status // 100}xx")

    async def _watching(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, end: aiohttp.TraceRequestEndParams
    ) -> None:
        access = self._count(end.method, end.url, f"{end.response.status // 100}xx")
        if end.response.status != 200:
            return
        if access.verb == "watch":
            stream = self._streams.setdefault(end.url.path, WatchStream(end.response))
            if stream.response is not end.response and not stream.response.content.total_bytes:
                self._doubt()
            # Only bytes count as life: a stream that is opened again and again, and stays silent, is dead.
            stream.response, stream.seen_bytes = end.response, 0
        elif access.verb == "list" and "continue" not in end.url.query:
            if end.url.path in self._listed:
                self._doubt()
            self._listed.add(end.url.path)

    def _doubt(self) -> None:
        if self._on_doubt is not None:
            self._on_doubt()

    async def _failed(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, end: aiohttp.TraceRequestExceptionParams
    ) -> None:
        self._count(end.method, end.url, "error")

    def _count(self, method: str, url: URL, outcome: str) -> Permission:
        access = access_of(method, url.path, watch="watch" in url.query)
        self.counts[access, outcome] += 1
        return access
