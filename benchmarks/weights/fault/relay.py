"""A link for `faults`: a relay whose bytes are slowed, changed, held back one way, or cut, from a byte of a pull on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

PIECE: Final = 16 << 10
SLOW_BYTES: Final = 1000
SLOW_S: Final = 1.0
"""1 KB/s of each connection."""

LINK_FAULTS: Final = ("slow", "changed", "held to", "held from", "cut")


class Relay:
    """Between the receiver and whatever port `port` is now."""

    def __init__(self) -> None:
        self.port = 0
        self.fault, self.at = "", 0
        self.passed = 0
        """Bytes towards the receiver since `arm`."""
        self.reached = asyncio.Event()
        self._healed = asyncio.Event()
        self._ways = set[asyncio.Task[Any]]()
        self._pairs = set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]]()

    async def start(self) -> str:
        """Where it is dialled."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def arm(self, fault: str, at: int) -> None:
        """`fault` befalls once so many bytes have passed; empty: nothing does, but `reached` tells of the bytes."""
        self.fault, self.at, self.passed = fault, at, 0
        self.reached.clear()
        self._healed.clear()

    def heal(self) -> None:
        """Nothing befalls any more. Connections that were held or slowed are cut: a network that is back has forgotten
        them."""
        self.fault = ""
        self._healed.set()
        self._abort_all()

    def _abort_all(self) -> None:
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()
        self._pairs.clear()

    def _is_open(self, end: asyncio.StreamWriter) -> bool:
        return any(end in pair for pair in self._pairs)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.fault and self.at == 0:
            self.reached.set()
        if self.fault == "cut" and self.reached.is_set():
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, back)
        self._pairs.add(pair)
        ways = [
            asyncio.create_task(self._copy(reader, back, inward=False)),
            asyncio.create_task(self._copy(there, writer, inward=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in pair:
                end.transport.abort()
            self._pairs.discard(pair)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, inward: bool) -> None:
        with suppress(ConnectionError):
            while data := await source.read(PIECE):
                before = self.passed
                self.passed += len(data) if inward else 0
                if self.passed >= self.at and not self.reached.is_set():
                    self.reached.set()
                    if self.fault == "changed" and inward:
                        place = max(0, min(self.at - before, len(data) - 1))
                        data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
                    if self.fault == "cut":
                        self._abort_all()
                if self.reached.is_set():
                    await self._apply(data, sink, inward=inward)
                else:
                    sink.write(data)
                await sink.drain()

    async def _apply(self, data: bytes, sink: asyncio.StreamWriter, *, inward: bool) -> None:
        if not self._is_open(sink):
            return
        if self.fault == ("held to" if inward else "held from"):
            await self._healed.wait()
        elif self.fault == "slow" and inward:
            for start in range(0, len(data), SLOW_BYTES):
                if not self._is_open(sink):
                    return
                sink.write(data[start : start + SLOW_BYTES])
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._healed.wait(), SLOW_S)
        else:
            sink.write(data)
