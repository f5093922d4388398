"""The manager's HTTP API: shows status and waits, lets an engine be drained. Paths and bodies: `polyrl.control`.

Every path but /healthz needs the run's bearer token. A malformed request gets 400 and one sentence; nothing here can
change a sample. Plain HTTP is for the loopback only; elsewhere certificate and key come from files, and clients pin the
run's own authority, so the certificate needs no name that the world knows.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import prometheus_client
from aiohttp import web

from polyrl.control import (
    DRAIN_PATH,
    HEALTH_PATH,
    MAX_WAIT_SECONDS,
    METRICS_PATH,
    STATUS_PATH,
    WAITS_PATH,
    DrainRequest,
    Problem,
)
from polyrl.errors import UNDECODABLE, InvalidData
from polyrl.worker import EVERYWHERE
from polyrl_rollout.manager.http.control import ControlService

MAX_BODY_BYTES: Final = 64 << 10
"""The only body is a drain request of at most 2 kB; anything large is refused unread."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _BadRequest(Exception):
    """A request that is refused with its message."""


def make_app(control: ControlService, token: str, registry: prometheus_client.CollectorRegistry) -> web.Application:
    """The aiohttp application."""
    api = _Api(control, registry)
    app = web.Application(middlewares=[_refusing, _requiring(token)], client_max_size=MAX_BODY_BYTES)
    app.router.add_get(STATUS_PATH, api.status)
    app.router.add_get(WAITS_PATH, api.waits)
    app.router.add_post(DRAIN_PATH, api.drain)
    app.router.add_get(METRICS_PATH, api.metrics)
    app.router.add_get(HEALTH_PATH, api.health)
    return app


class _Api:
    def __init__(self, control: ControlService, registry: prometheus_client.CollectorRegistry) -> None:
        self._control = control
        self._registry = registry

    async def status(self, request: web.Request) -> web.Response:
        since = int(_number(request, "since", default=-1, at_most=2**53))
        wait = _number(request, "waitSeconds", default=0, at_most=MAX_WAIT_SECONDS)
        return _json(await self._control.watch_status(since, wait))

    async def waits(self, request: web.Request) -> web.Response:
        return _json(self._control.waits())

    async def drain(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=DrainRequest)
        except UNDECODABLE as error:
            raise _BadRequest(f"the body is not a drain request: {error}") from error
        return _json(self._control.drain(wanted))

    async def metrics(self, request: web.Request) -> web.Response:
        text = prometheus_client.generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def health(self, request: web.Request) -> web.Response:
        return _json(self._control.health())


def _requiring(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def require_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != HEALTH_PATH and not hmac.compare_digest(given, expected):
            return _json(Problem(error="this path needs the run's bearer token in the Authorization header"), 401)
        return await handler(request)

    return require_token


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _BadRequest as error:
        return _json(Problem(error=str(error)), 400)
    except web.HTTPException as error:
        return _json(Problem(error=f"{request.method} {request.path}: {error.reason}"), error.status)


def _number(request: web.Request, name: str, default: float, at_most: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not -1 <= number < math.inf:
        raise _BadRequest(f"{name} is not a number of -1 or more: {text[:40]!r}")
    return min(number, at_most)


def _json(body: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def https_of(bind: str, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """How the API on address `bind` is encrypted; None: not at all. Raises InvalidData naming what is missing."""
    if (certificate is None) != (key is None):
        raise InvalidData("--tls-cert and --tls-key: give both or neither")
    if certificate is None or key is None:
        if not _is_loopback(bind):
            raise InvalidData(f"--bind {bind}: needs --tls-cert and --tls-key; plain HTTP is for the loopback only")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidData(f"{certificate}, {key}: not a certificate and its key: {error.strerror or error}") from None
    return context


def _is_loopback(bind: str) -> bool:
    if bind == EVERYWHERE:
        return False
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        raise InvalidData(f"--bind {bind}: is not an IP address, nor {EVERYWHERE} for all of them") from None
