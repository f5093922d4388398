"""A list and then its changes, for commands and tests that follow few objects for a while (the operator has kopf)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import msgspec

from polyrl.cluster.actions import Object
from polyrl_operator.api.client import ApiError, Client, refusal, selectors
from polyrl_operator.api.kinds import ResourceKind

LISTED: Final = "LIST"
"""Type of the changes that begin with a list; all others are as the API server names them."""

WATCH_S: Final = 240
"""One watch; then the list is taken anew, which also repairs gaps."""

SILENCE_S: Final = WATCH_S + 30
"""Longest a stream may be silent: beyond a watch's end its connection is dead."""

RETRY_S: Final = 1.0
"""Between a broken stream and the next one."""


async def follow(
    client: Client,
    session: aiohttp.ClientSession,
    kind: ResourceKind,
    namespace: str | None,
    label_selector: str = "",
    field_selector: str = "",
) -> AsyncIterator[tuple[str, list[Object]]]:
    """What there is, as LISTED, then every change by its type, one object each; again from a list when a watch ends.

    Until the caller stops. Raises ApiError when the cluster refuses; one that is away is awaited.
    """
    while True:
        try:
            found: list[Object] = []
            version = ""
            async for items, listed in client.pages(kind, namespace, label_selector, field_selector=field_selector):
                found, version = found + items, version or listed
            yield LISTED, found
            watch = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
            query = selectors(label_selector, field_selector) | watch | {"timeoutSeconds": str(WATCH_S)}
            url = client.url(kind.path(namespace), query)
            async for change in _changes(session, url):
                yield change
        except (aiohttp.ClientError, TimeoutError, OSError, ApiError) as error:
            if isinstance(error, ApiError) and not error.transient and error.status != 410:
                raise
            await asyncio.sleep(RETRY_S)


async def _changes(session: aiohttp.ClientSession, url: str) -> AsyncIterator[tuple[str, list[Object]]]:
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)) as answer:
        if answer.status >= 400:
            raise refusal(answer.status, await answer.read())
        async for line in answer.content:
            # A load balancer may end a stream, in order, in the middle of a line: the list brings what was lost.
            if not line.endswith(b"\n"):
                return
            change: dict[str, Any] = msgspec.json.decode(line) if line.strip() else {"type": "BOOKMARK"}
            if change["type"] == "ERROR":
                return
            if change["type"] != "BOOKMARK":
                yield change["type"], [change["object"]]
