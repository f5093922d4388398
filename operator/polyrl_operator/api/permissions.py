"""Which permission a request to the API server needs, and how many requests used each: metrics and the chart's Role
are compared with these counts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Final, NamedTuple

import aiohttp
from yarl import URL

_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Permission(NamedTuple):
    """One permission, as a rule of a Role grants it."""

    verb: str
    group: str
    resource: str
    """Plural, with `/subresource` where there is one; a path starting with `/` for what is no resource."""


def permission_for(method: str, path: str, watch: bool = False) -> Permission:
    """The permission that a request needs."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) > 2:
        group, rest = "", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, rest = parts[1], parts[3:]
    else:
        return Permission(method.lower(), "", path)
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    if method != "GET":
        verb = _VERBS[method]
    elif watch:
        verb = "watch"
    else:
        verb = "get" if len(rest) > 1 else "list"
    return Permission(verb, group, "/".join((rest[0], *rest[2:])))


class RequestCounter:
    """Counts requests where bytes pass: in our client's session and in kopf's."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Permission, str]] = Counter()
        """By permission and status class, as `2xx`; `error` where no answer came."""

    def trace(self) -> aiohttp.TraceConfig:
        """Hooks for one session."""
        hooks = aiohttp.TraceConfig()
        hooks.on_request_end.append(self._on_end)
        hooks.on_request_exception.append(self._on_exception)
        return hooks

    async def _on_end(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, end: aiohttp.TraceRequestEndParams
    ) -> None:
        self._count(end.method, end.url, f"{end.response.status // 100}xx")

    async def _on_exception(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, end: aiohttp.TraceRequestExceptionParams
    ) -> None:
        self._count(end.method, end.url, "error")

    def _count(self, method: str, url: URL, outcome: str) -> None:
        self.counts[permission_for(method, url.path, watch="watch" in url.query), outcome] += 1
