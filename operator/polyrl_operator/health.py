"""What is wrong with this replica, for the kubelet and for Prometheus over HTTP.

    /healthz   503 when a restart may help: a watch is silent, a worker is stuck, the queue does not move
    /readyz    503 until everything was read; a standby is ready as well
    /metrics   on its own port, over TLS and for whom the API server allows it (`metrics_readers`)

Health says no more to whoever asks: what is wrong is in the log.

That an event loop answers says little (kopf's own liveness endpoint answers 200 to that); each check looks at what
was promised instead.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, cast

import prometheus_client
import structlog
from aiohttp import web

from polyrl.history.strange_requests import request_log
from polyrl_operator.metrics_readers import METRICS_PATH, OK, UNAUTHORIZED, MetricsReaders

log = structlog.get_logger(__name__)

SILENCES: Final = 3
"""A watch is opened again after one silence; one that stays silent through three is beyond repair from within."""

RECONCILE_S: Final = 180.0
"""Longest reconcile of one job: beyond its own deadline."""

QUEUE_S: Final = 120.0
"""Longest time in which no job is taken up though some wait, while this replica leads."""

CONNECTION_S: Final = 10.0
"""Longest time of one connection, from its accept to its answer; ours take milliseconds."""

MAX_CONNECTIONS: Final = 64
"""A kubelet, a few scrapers and people with curl."""

Check = Callable[[], list[str]]
"""What is wrong, a sentence each."""


def silent_watches(ages: Callable[[], dict[str, float]], expected: Sequence[str], limit_s: float) -> Check:
    """A check of the watches on `expected` paths; one that never began ages from now on."""
    began = time.monotonic()

    def check() -> list[str]:
        seen, since = ages(), time.monotonic() - began
        silent = {path: seen.get(path, since) for path in expected if seen.get(path, since) > limit_s}
        limit = f"longer than {limit_s:.0f} s"
        return [f"the watch on {path} gave nothing for {age:.0f} s, {limit}" for path, age in silent.items()]

    return check


def too_old(what: str, age: Callable[[], float], limit_s: float) -> Check:
    """A check that an age stays below its limit."""

    def check() -> list[str]:
        now = age()
        return [f"{what} for {now:.0f} s, longer than {limit_s:.0f} s"] if now > limit_s else []

    return check


def health_app(checks: Sequence[Check], ready: Callable[[], bool]) -> web.Application:
    """/healthz and /readyz."""
    logged = 0
    """How much was wrong when it was logged last: who asks again and again fills no log."""

    async def healthz(request: web.Request) -> web.Response:
        wrong = [sentence for check in checks for sentence in check()]
        nonlocal logged
        if len(wrong) != logged:
            logged = len(wrong)
            log.error("health changed", wrong=wrong)
        # Anybody may ask, and a watch's path names a tenant's namespace.
        return web.Response(status=503, text="not ok\n") if wrong else web.Response(text="ok\n")

    async def readyz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n") if ready() else web.Response(status=503, text="still reading the cluster\n")

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    return app


def metrics_app(registry: prometheus_client.CollectorRegistry, readers: MetricsReaders | None) -> web.Application:
    """/metrics; without `readers` for everybody."""

    async def metrics(request: web.Request) -> web.Response:
        status = OK if readers is None else await readers.status(request.headers.get("Authorization", ""))
        if status != OK:
            return web.Response(status=status, headers={"WWW-Authenticate": "Bearer"} if status == UNAUTHORIZED else {})
        text = prometheus_client.generate_latest(registry)
        return web.Response(body=text, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get(METRICS_PATH, metrics)
    return app


async def serve(
    app: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None
) -> tuple[Callable[[], Awaitable[None]], int]:
    """Starts it; what ends it, and the port that it listens on (0: one that is free).

    A connection is for one request and ends at its deadline, whatever it does; beyond the most there may be, the oldest
    makes room. aiohttp alone waits for the rest of a request for ever, and takes any number."""
    app.on_response_prepare.append(_end_connection)
    runner = web.AppRunner(app, access_log=None, logger=request_log(__name__))
    await runner.setup()
    server, loop = cast(web.Server, runner.server), asyncio.get_running_loop()

    def accept() -> asyncio.Protocol:
        for oldest in server.connections[: len(server.connections) + 1 - MAX_CONNECTIONS]:
            _drop(oldest)
        handler = server()
        loop.call_later(CONNECTION_S, _drop, handler)
        return handler

    handshake = None if tls is None else CONNECTION_S / 2
    listener = await loop.create_server(accept, host, port, ssl=tls, ssl_handshake_timeout=handshake)

    async def close() -> None:
        listener.close()
        await runner.cleanup()

    return close, int(listener.sockets[0].getsockname()[1])


async def _end_connection(request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    response.headers["Connection"] = "close"


def _drop(handler: web.RequestHandler) -> None:
    """No-op when it is closed, or still shakes hands, which has a deadline of its own."""
    if handler.transport is not None:
        handler.transport.abort()
