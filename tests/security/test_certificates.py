"""A manager's certificate lives for days, and is replaced while the manager serves."""

from __future__ import annotations

import asyncio
import ssl
import time
from datetime import timedelta
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509

from polyrl.cluster.fleet.certificate import LIFE_S
from polyrl_operator.secret import (
    AUTHORITY,
    CERTIFICATE,
    LOCAL_NAME,
    PRIVATE_KEY,
    renew_run_certificate,
    write_run_keys,
)
from polyrl_rollout.http_server import HttpServer
from polyrl_rollout.manager.api import follow_certificate, https_of

DEADLINE_S = 20.0
CHECK_S = 0.02


class Connection:
    """One that stays open; it trusts the run's authority alone."""

    def __init__(self, keys: Path, port: int) -> None:
        self._tls = ssl.create_default_context(cafile=keys / AUTHORITY)
        self._port = port

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._tls, server_hostname=LOCAL_NAME
        )
        return self

    async def answer(self) -> bytes:
        self._writer.write(b"GET / HTTP/1.1\r\nHost: m\r\n\r\n")
        head = await self._reader.readuntil(b"\r\n\r\n")
        return head.partition(b"\r\n")[0] + await self._reader.readexactly(2)

    @property
    def serial(self) -> int:
        leaf = self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(leaf).serial_number

    async def close(self) -> None:
        self._writer.close()


async def served(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def test_new_connections_see_the_renewed_certificate_and_old_ones_live_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    write_run_keys(keys)
    files = keys / CERTIFICATE, keys / PRIVATE_KEY
    server, app = HttpServer(), web.Application()
    app.router.add_get("/", served)
    await server.start(app, "127.0.0.1", 0, tls=https_of("127.0.0.1", *files), shutdown_s=0.1)
    changed = asyncio.Event()

    def serve_with(tls: ssl.SSLContext) -> None:
        server.tls = tls
        changed.set()

    follows = asyncio.create_task(follow_certificate(*files, serve_with, CHECK_S))
    try:
        async with asyncio.timeout(DEADLINE_S):
            old = await Connection(keys, server.address[1]).open()
            assert await old.answer() == b"HTTP/1.1 200 OKok"
            # Half written: another's certificate, and the key of before.
            right = files[0].read_bytes()
            write_run_keys(tmp_path / "others")
            files[0].write_bytes((tmp_path / "others" / CERTIFICATE).read_bytes())
            await asyncio.sleep(3 * CHECK_S)
            assert not changed.is_set()
            files[0].write_bytes(right)
            assert not renew_run_certificate(keys, time.time()), "it is fresh"
            # By a clock that has gone back since: so it has begun, and is stale as well.
            assert renew_run_certificate(keys, time.time() - 0.6 * LIFE_S)
            await changed.wait()
            new = await Connection(keys, server.address[1]).open()
            assert await new.answer() == await old.answer() == b"HTTP/1.1 200 OKok"
            assert new.serial != old.serial
            await old.close()
            await new.close()
    finally:
        follows.cancel()
        await server.close()


@pytest.mark.parametrize(("name", "life"), [(CERTIFICATE, timedelta(days=14)), (AUTHORITY, timedelta(days=3650))])
def test_what_a_node_holds_ends_in_days(tmp_path: Path, name: str, life: timedelta) -> None:
    write_run_keys(tmp_path / "keys")
    made = x509.load_pem_x509_certificate((tmp_path / "keys" / name).read_bytes())
    assert made.not_valid_after_utc - made.not_valid_before_utc == life + timedelta(days=1)
