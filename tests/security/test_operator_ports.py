"""Strangers who open connections to the operator's ports and send half a request, or nothing, keep nobody out."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
import prometheus_client
import pytest
import structlog

from polyrl_operator import health
from polyrl_operator.secret import make_certificate, server_tls

HALF = b"GET /metrics HTTP/1.1\r\nHost: operator\r\nX-Slow: "
DEADLINE_S = 20.0


@pytest.fixture(params=["plain", "tls"])
async def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, str]]:
    monkeypatch.setattr(health, "CONNECTION_S", 1.0)
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 20)
    app = health.metrics_app(prometheus_client.CollectorRegistry(), None)
    tls = server_tls(make_certificate(["operator"])) if request.param == "tls" else None
    close, bound = await health.serve(app, "127.0.0.1", 0, tls)
    yield bound, request.param
    await close()


def trust(kind: str) -> ssl.SSLContext | None:
    if kind == "plain":
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def half_request(bound: int, kind: str) -> Opened:
    opened = await asyncio.open_connection("127.0.0.1", bound, ssl=trust(kind))
    opened[1].write(HALF)
    return opened


async def closed(opened: Opened) -> None:
    with suppress(OSError):
        await opened[0].read()
    opened[1].transport.abort()


async def test_half_requests_are_closed_at_their_deadline(port: tuple[int, str]) -> None:
    strangers = [await half_request(*port) for _ in range(5)]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*map(closed, strangers))


async def test_beyond_the_most_the_oldest_makes_room_for_who_asks_properly(
    port: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CONNECTION_S", 10 * DEADLINE_S)
    bound, kind = port
    strangers = [await half_request(bound, kind) for _ in range(60)]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*map(closed, strangers[:40]))
        async with aiohttp.ClientSession() as session:
            url = f"{'http' if kind == 'plain' else 'https'}://127.0.0.1:{bound}/metrics"
            async with session.get(url, ssl=False) as answer:
                assert answer.status == 200
                assert answer.headers["Connection"] == "close", "a scrape is one connection"
    for opened in strangers[40:]:
        opened[1].transport.abort()


async def test_nobody_who_shakes_no_hands_stays(port: tuple[int, str]) -> None:
    bound, _ = port
    silent = [await asyncio.open_connection("127.0.0.1", bound) for _ in range(5)]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*map(closed, silent))


async def test_health_names_nothing_to_whoever_asks_and_is_logged_once() -> None:
    wrong = ["the watch on /namespaces/secret-project/pods gave nothing"]
    app = health.health_app([lambda: wrong], lambda: True)
    close, bound = await health.serve(app, "127.0.0.1", 0)
    try:
        with structlog.testing.capture_logs() as logged:
            async with aiohttp.ClientSession() as session:
                for _ in range(3):
                    async with session.get(f"http://127.0.0.1:{bound}/healthz") as answer:
                        assert (answer.status, await answer.text()) == (503, "not ok\n")
    finally:
        await close()
    assert [line["wrong"] for line in logged] == [wrong]


async def test_requests_that_are_none_are_counted_and_not_quoted(
    port: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each wrote a traceback of 24 kB into the log."""
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(20):
            opened = await asyncio.open_connection("127.0.0.1", port[0], ssl=trust(port[1]))
            opened[1].write(b"GET /" + b"\x01" * 6000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            await closed(opened)
    texts = [logging.Formatter().format(record) for record in caplog.records if record.levelno >= logging.WARNING]
    counted = [text for text in texts if "requests that are none" in text]
    assert 1 <= len(counted) <= 5, "1, 2, 4, 8, 16 of them"
    assert max(map(len, texts)) < 200
