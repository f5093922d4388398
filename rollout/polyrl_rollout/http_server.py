"""An HTTP server on which strangers cost little: a connection without a whole request that has the token is soon
closed, and when there are too many the oldest such one makes room.

    accept -> [TLS handshake] -> a request with the token: stays      all of it within PROOF_S, else closed
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Final, cast

from aiohttp import web

from polyrl.history.strange_requests import request_log

PROOF_S: Final = 5.0
"""From the accept to a whole request with the token. Ours takes milliseconds; a probe needs no more than one answer."""

MAX_CONNECTIONS: Final = 256
"""An encrypted one costs up to 300 kB. The operator, a scraper and some people at the command line hold a dozen."""

KEEPALIVE_S: Final = 75.0
"""How long a connection that has shown the token may rest; the operator asks every few seconds."""


class HttpServer:
    """Serves one application on one port."""

    def __init__(self) -> None:
        self.tls: ssl.SSLContext | None = None
        self._connections: dict[_Connection, None] = {}
        """The oldest first."""
        self._runner: web.AppRunner
        self._listener: asyncio.Server

    async def start(
        self, app: web.Application, host: str | None, port: int, *, tls: ssl.SSLContext | None, shutdown_s: float
    ) -> None:
        """Binds; `host` None: all addresses. Raises OSError."""
        self.tls = tls
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=request_log(__name__),
            shutdown_timeout=shutdown_s,
            keepalive_timeout=KEEPALIVE_S,
        )
        await self._runner.setup()
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(lambda: _Connection(self, self._runner), host, port)
        except OSError:
            await self._runner.cleanup()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """The first that it listens on."""
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    def keep(self, request: web.Request) -> None:
        """The connection of a request that had the token may stay."""
        for connection in self._connections:
            if connection.handler is request.protocol:
                connection.proven()
                return

    async def close(self) -> None:
        """Open requests get `shutdown_s` to end."""
        self._listener.close()
        await self._runner.cleanup()
        for connection in list(self._connections):
            connection.drop()

    def opened(self, connection: _Connection) -> None:
        """Makes room for it. Where all others have shown the token, it is itself closed."""
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            next(one for one in self._connections if one.is_strange).drop()

    def closed(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)


class _Connection(asyncio.Protocol):
    """Between the socket and aiohttp's handler, which has no deadline for a request and no cap of its own."""

    def __init__(self, server: HttpServer, runner: web.AppRunner) -> None:
        self.handler = cast("web.Server", runner.server)()
        self._server = server
        self._transport: asyncio.Transport
        self._attached = False
        self._early = bytearray()
        """Came with the end of the handshake, before the handler was there."""
        self._handshake: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_strange(self) -> bool:
        """Whether it has not shown the token yet."""
        return self._deadline is not None

    def proven(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def drop(self) -> None:
        """Now, whatever it does."""
        self._forget()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(PROOF_S, self.drop)
        if self._server.tls is None:
            self._attach(self._transport)
        else:
            self._transport.pause_reading()
            self._handshake = loop.create_task(self._encrypt(self._server.tls))
        self._server.opened(self)

    async def _encrypt(self, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            encrypted = await loop.start_tls(
                self._transport, self, tls, server_side=True, ssl_handshake_timeout=PROOF_S
            )
            if encrypted is not None and self.is_strange:  # not lost meanwhile
                self._attach(encrypted)
                return
        self.drop()

    def _attach(self, transport: asyncio.Transport) -> None:
        self._attached = True
        self.handler.connection_made(transport)
        if self._early:
            self.handler.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        if self._attached:
            self.handler.data_received(data)
        else:
            self._early += data

    def eof_received(self) -> None:
        if self._attached:
            self.handler.eof_received()

    def pause_writing(self) -> None:
        if self._attached:
            self.handler.pause_writing()

    def resume_writing(self) -> None:
        if self._attached:
            self.handler.resume_writing()

    def connection_lost(self, error: BaseException | None) -> None:
        self._forget()
        if self._attached:
            self._attached = False
            self.handler.connection_lost(error)

    def _forget(self) -> None:
        self.proven()
        self._server.closed(self)
        if self._handshake is not None and self._handshake is not asyncio.current_task():
            self._handshake.cancel()
