"""Strangers who open connections to a manager's HTTP port and send half a request, or nothing, keep nobody out."""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from polyrl.keys import ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl_operator.secret import make_certificate, write_run_keys
from polyrl_rollout import http_server
from polyrl_rollout.manager.api import https_of
from polyrl_rollout.manager.server import Listen, Manager

STRANGERS = 300
HALF = b"GET /healthz HTTP/1.1\r\nHost: manager\r\nX-Slow: "
PROOF_S = 1.0
DEADLINE_S = 20.0


@dataclass
class Site:
    manager: Manager
    token: str
    authority: str

    @property
    def port(self) -> int:
        return int(self.manager.endpoints.http.rpartition(":")[2])

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.authority)

    async def status(self, session: aiohttp.ClientSession, wait_s: float = 0.0) -> int:
        """Of one request with the token."""
        url = f"https://localhost:{self.port}/v1/status?since=9999999&waitSeconds={wait_s}"
        async with session.get(url, ssl=self.tls(), headers={"Authorization": f"Bearer {self.token}"}) as response:
            await response.read()
            return response.status


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(http_server, "PROOF_S", PROOF_S)
    write_run_keys(tmp_path / "keys")
    made = make_certificate(["localhost"])
    (tmp_path / "tls.crt").write_bytes(made.certificate)
    (tmp_path / "tls.key").write_bytes(made.key)
    listen = Listen(tls=https_of("127.0.0.1", tmp_path / "tls.crt", tmp_path / "tls.key"))
    keys = read_keys(ManagerKeys, tmp_path / "keys" / "manager.key")
    async with Manager(Ledger(LedgerConfig(run_epoch=1)), keys, 1, listen) as manager:
        running = asyncio.create_task(manager.run())
        yield Site(manager, keys.http_token, made.authority.decode())
        manager.stop()
        await running


Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def strangers_connection(site: Site) -> Opened:
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", site.port, ssl=stranger)


async def half_request(site: Site) -> Opened:
    opened = await strangers_connection(site)
    opened[1].write(HALF)
    return opened


async def closed(opened: Opened) -> None:
    """Once the manager has closed it."""
    with suppress(OSError):
        await opened[0].read()
    opened[1].transport.abort()


async def test_half_requests_are_closed_and_the_operator_is_answered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2 * STRANGERS)
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        halves = await asyncio.gather(*(half_request(site) for _ in range(STRANGERS)), return_exceptions=True)
        assert await site.status(session) == 200
        await asyncio.gather(*(closed(half) for half in halves if not isinstance(half, BaseException)))
        assert sum(not isinstance(half, BaseException) for half in halves) > 0
        assert len(site.manager._http._connections) <= 1, "the operator's"


@pytest.mark.parametrize("encrypted", [False, True], ids=["silent", "half a request"])
async def test_too_many_make_room_for_whoever_has_the_token(
    site: Site, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(http_server, "PROOF_S", DEADLINE_S)

    async def one() -> Opened:
        return await (half_request(site) if encrypted else asyncio.open_connection("127.0.0.1", site.port))

    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        assert await site.status(session) == 200
        opened = await asyncio.gather(*(one() for _ in range(60)), return_exceptions=True)
        assert len(site.manager._http._connections) <= 20
        began = time.monotonic()
        assert await site.status(session) == 200, "its connection, the oldest, stays"
        async with aiohttp.ClientSession() as another:
            assert await site.status(another) == 200
        assert time.monotonic() - began < DEADLINE_S / 2
        for half in opened:
            if not isinstance(half, BaseException):
                half[1].transport.abort()


async def test_who_has_the_token_may_wait(site: Site) -> None:
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        assert await site.status(session, wait_s=1.5 * PROOF_S) == 200
        assert await site.status(session) == 200


async def test_a_probe_is_answered_and_not_kept(site: Site) -> None:
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        async with session.get(f"https://localhost:{site.port}/healthz", ssl=site.tls()) as response:
            assert response.status == 200
        while site.manager._http._connections:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)


async def test_requests_that_are_none_are_counted_and_not_quoted(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Each wrote a traceback of 24 kB into the log."""
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(20):
            opened = await strangers_connection(site)
            opened[1].write(b"GET /" + b"\x01" * 6000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            await closed(opened)
    texts = [logging.Formatter().format(record) for record in caplog.records if record.levelno >= logging.WARNING]
    counted = [text for text in texts if "requests that are none" in text]
    assert 1 <= len(counted) <= 5, "1, 2, 4, 8, 16 of them"
    assert max(map(len, texts)) < 200
