"""The manager's HTTP API: shows status and waits, lets an engine be drained. Paths and bodies: `polyrl.control`.

Every path but /healthz needs the run's bearer token. A malformed request gets 400 and one sentence; nothing here can
change a sample. Plain HTTP is for the loopback only; elsewhere certificate and key come from files, and clients pin the
run's own authority, so the certificate needs no name that the world knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import math
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import prometheus_client
import structlog
from aiohttp import web

from polyrl import control
from polyrl.errors import UNDECODABLE, InvalidData
from polyrl.ledger import Effects, Ledger
from polyrl.manifest.job import PolyRLJob
from polyrl.status import ManagerStatus
from polyrl.worker import EVERYWHERE
from polyrl_rollout.manager.history import RunHistory
from polyrl_rollout.manager.page import RunPage

MAX_BODY_BYTES: Final = 64 << 10
"""The only body is a drain request of at most 2 kB; anything large is refused unread."""
FINAL_STATUS_S: Final = 3.0
"""Longest time the final status waits for somebody to read it, once all agents are gone."""
MIN_INTERVAL_S: Final = 0.2
"""Shortest time between two changes that watchers see; people and controllers need no more."""

CERTIFICATE_CHECK_S: Final = 60.0
"""Between two readings of the certificate's file; a kubelet takes a minute or two to bring a change, which has days."""

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StatusFeed:
    """A number that grows with changes, and a way to wait for it."""

    def __init__(self) -> None:
        self.seq = 0
        self._loop = asyncio.get_running_loop()
        self._planned: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    def note_change(self) -> None:
        """Something changed; watchers see it within MIN_INTERVAL_S."""
        if self._planned is None:
            self._planned = self._loop.call_later(MIN_INTERVAL_S, self.publish)

    def publish(self) -> None:
        """Lets watchers go on now."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        self.seq += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_beyond(self, since: int, timeout_s: float) -> None:
        """Returns when `seq` > since, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.seq <= since:
                    await self._changed.wait()


class ManagerCore(Protocol):
    """What the control service needs of the manager."""

    def now(self) -> float: ...

    def deliver_and_settle(self, effects: Effects) -> None: ...

    async def revoke(self, engine: str) -> None:
        """Refuses an engine whose pod is gone, for good."""

    async def until_safe(self) -> None:
        """Returns once everything so far would survive a power cut."""

    def waits(self) -> list[str]:
        """Who waits for whom, as sentences."""

    def complete(self, status: ManagerStatus) -> ManagerStatus:
        """Adds what the ledger does not know: connections, bytes."""


class _BadRequest(Exception):
    """A request that is refused with its message."""


class ControlService:
    """What the API shows of one running manager, and the one thing it may ask of it, a drain."""

    def __init__(
        self, ledger: Ledger, run_epoch: int, manager: ManagerCore, history: RunHistory, job: PolyRLJob | None
    ) -> None:
        self.feed = StatusFeed()
        self._ledger, self._run_epoch, self._manager, self._history = ledger, run_epoch, manager, history
        self._page = RunPage(job, self.status, history)
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._final_read = asyncio.Event()

    def make_app(
        self, token: str, registry: prometheus_client.CollectorRegistry, keep: Callable[[web.Request], None]
    ) -> web.Application:
        """The aiohttp application; `registry` holds what is scraped, `keep` is called with each request that has the
        token."""
        app = web.Application(middlewares=[_refusing, _requiring(token, keep)], client_max_size=MAX_BODY_BYTES)
        app.router.add_get(control.STATUS_PATH, self._get_status)
        app.router.add_get(control.WAITS_PATH, self._get_waits)
        app.router.add_post(control.DRAIN_PATH, self._post_drain)
        app.router.add_get(control.HISTORY_PATH, self._get_history)
        app.router.add_get(control.PAGE_PATH, self._page.get)
        app.router.add_get(control.METRICS_PATH, metrics_handler(registry))
        app.router.add_get(control.HEALTH_PATH, self._get_health)
        return app

    def status(self) -> ManagerStatus:
        """The whole run now."""
        return self._manager.complete(self._ledger.status(self._manager.now(), self.feed.seq))

    async def await_departures(self, deadline_s: float) -> bool:
        """Waits until all engines are gone and the final status was read; False when `deadline_s` came first."""
        self.feed.publish()
        try:
            async with asyncio.timeout(deadline_s):
                while self.status().engines:
                    await self.feed.wait_beyond(self.feed.seq, deadline_s)
                async with asyncio.timeout(FINAL_STATUS_S):
                    await self._final_read.wait()
        except TimeoutError:
            return False
        return True

    async def _get_status(self, request: web.Request) -> web.Response:
        """Once it is newer than `since`, or `waitSeconds` are over."""
        since = int(_number(request, "since", default=-1, at_most=2**53))
        wait = _number(request, "waitSeconds", default=0, at_most=control.MAX_WAIT_SECONDS)
        await self.feed.wait_beyond(since, wait)
        status = self.status()
        if status.finished:
            self._final_read.set()
        return _json(status)

    async def _get_waits(self, request: web.Request) -> web.Response:
        return _json(control.Waits(waits=tuple(self._manager.waits())))

    async def _get_history(self, request: web.Request) -> web.Response:
        after = _number(request, "after", default=0, at_most=2**53)
        return _json(self._history.since(after, time.time()))

    async def _post_drain(self, request: web.Request) -> web.Response:
        """Drains an engine; again is harmless."""
        try:
            wanted = msgspec.json.decode(await request.read(), type=control.DrainRequest)
        except UNDECODABLE as error:
            raise _BadRequest(f"the body is not a drain request: {error}") from error
        known = any(engine.name == wanted.engine for engine in self.status().engines)
        if wanted.ended:
            await self._manager.revoke(wanted.engine)
        elif known:
            now, seconds = self._manager.now(), wanted.deadline_seconds
            self._manager.deliver_and_settle(self._ledger.drain(wanted.engine, seconds, wanted.reason, now))
            await self._manager.until_safe()
        return _json(control.DrainAnswer(engine=wanted.engine, known=known))

    async def _get_health(self, request: web.Request) -> web.Response:
        return _json(control.Health(run_epoch=self._run_epoch, uptime_seconds=self._loop.time() - self._started))


def make_metrics_app(registry: prometheus_client.CollectorRegistry) -> web.Application:
    """Numbers for Prometheus and nothing else, for a port that needs no token."""
    app = web.Application()
    app.router.add_get(control.METRICS_PATH, metrics_handler(registry))
    return app


def metrics_handler(registry: prometheus_client.CollectorRegistry) -> Handler:
    """Answers with what `registry` collects."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        text = prometheus_client.generate_latest(registry)
        return web.Response(body=text, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    return metrics


def _requiring(token: str, keep: Callable[[web.Request], None]) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def require_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, expected):
            keep(request)
        elif request.path != control.HEALTH_PATH:
            return _json(
                control.Problem(error="this path needs the run's bearer token in the Authorization header"), 401
            )
        return await handler(request)

    return require_token


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _BadRequest as error:
        return _json(control.Problem(error=str(error)), 400)
    except web.HTTPException as error:
        return _json(control.Problem(error=f"{request.method} {request.path}: {error.reason}"), error.status)


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


async def follow_certificate(
    certificate: Path, key: Path, serve_with: Callable[[ssl.SSLContext], None], check_s: float = CERTIFICATE_CHECK_S
) -> None:
    """Gives the two files' content to new connections whenever it changed, for ever; open ones keep what they have. A
    pair that does not fit is one half written: it is read again at the next check."""
    seen: bytes | None = None
    while True:
        try:
            found = await asyncio.to_thread(certificate.read_bytes)
            if seen not in (None, found) and (context := https_of(EVERYWHERE, certificate, key)) is not None:
                serve_with(context)
                log.info("a renewed certificate is served")
            seen = found
        except (OSError, InvalidData) as error:
            log.warning("the certificate cannot be read again; the one before is served on", error=str(error))
        await asyncio.sleep(check_s)


def _is_loopback(bind: str) -> bool:
    if bind == EVERYWHERE:
        return False
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        raise InvalidData(f"--bind {bind}: is not an IP address, nor {EVERYWHERE} for all of them") from None
