"""A connection whose chunks come by the Mooncake transfer engine, where the publisher lends them; all else is sealed.

What lies in the engine's memory anybody may have written who reaches its ports (`polyrl.weights.lending`). So a chunk
is fetched into a window, copied from there to its place, and the copy is hashed: what is written into the window later
changes nothing that was believed. After a false or failed chunk all goes by the sealed connection for REST_S; whatever
is wrong with the engine or its network costs no more than that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

from polyrl import wire
from polyrl.errors import ProtocolError
from polyrl.weights import digest
from polyrl.weights.lending import (
    LOAN_BYTES,
    NOT_INSTALLED,
    SLOT_BYTES,
    Loan,
    decode_loan,
    engine_settings,
    start_engine,
)
from polyrl.wire.sealing import Handshake
from polyrl.wire.serving import LENT
from polyrl_rollout.weights.stream import WeightStream

SLOTS: Final = 8
"""Slots of the window: twice as many as connections, so that some may be left to transfers that were given up."""
FETCH_S: Final = 10.0
"""A chunk that takes longer has a link of 3 Mbit/s, at which the sealed way loses nothing; or the engine hangs."""
PROBE_S: Final = 0.0002
"""Between two looks at a transfer: a tenth of what a chunk takes."""
REST_S: Final = 30.0
DONE: Final = 1
RUNNING: Final = 0

log = structlog.get_logger(__name__)


class LoanReader:
    """This process's engine, with a window of its own; any thread."""

    def __init__(self, rdma_devices: str = "", rest_s: float = REST_S) -> None:
        """It starts with the first loan, when it is known by which address the publisher is reached."""
        self._devices, self._rest_s = rdma_devices, rest_s
        self._memory: mmap.mmap | None = None
        self._engine: Any = None
        self._address, self._unable = 0, False
        self._free, self._abandoned = list(range(SLOTS)), dict[int, int]()
        """Slots, and those that a transfer which was given up may still write, by its number."""
        self._rests_until = 0.0
        self._lock = threading.Lock()
        self.chunks = self.false = self.failed = 0
        """Chunks that came so, that were others than their hashes say, and that did not come."""

    def is_ready(self, host: str) -> bool:
        """Whether to ask for a loan, on a connection that leaves from `host`."""
        with self._lock:
            if self._engine is None and not self._unable:
                self._unable = not self._start(host)
            return not self._unable and time.monotonic() >= self._rests_until

    def fetch(self, host: str, loan: Loan, place: memoryview, expected: bytes, check: Callable[[], None]) -> None:
        """Into `place`, with the hash `expected`. Raises OSError when it cannot be had so."""
        slot = self._slot()
        if slot is None:
            raise self._rest("no slot is free: transfers that were given up hang")
        transfer = self._engine.batch_transfer_async_read(
            f"{host}:{loan.port}", [self._address + slot * SLOT_BYTES], [loan.address], [loan.size]
        )
        left = transfer if transfer > 0 else None
        try:
            if left is None or not self._wait(transfer, check):
                left = None
                raise self._rest("the engine did not bring it")
            left = None
            assert self._memory is not None
            # Copied first: in the window it may change between the hash and its use.
            place[:] = memoryview(self._memory)[slot * SLOT_BYTES : slot * SLOT_BYTES + loan.size]
        finally:
            self._give_back(slot, left)
        if digest(place) != expected:
            self.false += 1
            raise self._rest("it is another one: somebody may have written into the publisher's window, or into ours")
        self.chunks += 1

    def _start(self, host: str) -> bool:
        os.environ.update(engine_settings())
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            log.warning(
                f"spec.rollout.mooncake: the Mooncake transfer engine cannot be loaded here ({error}); {NOT_INSTALLED}."
                " Weights come over the sealed connection"
            )
            return False
        engine, memory = TransferEngine(), mmap.mmap(-1, SLOTS * SLOT_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if not start_engine(engine, host, self._devices, (address, SLOTS * SLOT_BYTES)):
            log.warning(
                "spec.rollout.mooncake: the transfer engine does not start; its reason stands above."
                " Weights come over the sealed connection",
                host=host,
                rdma_devices=self._devices,
            )
            return False
        self._engine, self._memory, self._address = engine, memory, address
        return True

    def _slot(self) -> int | None:
        with self._lock:
            for slot, transfer in list(self._abandoned.items()):
                if self._engine.transfer_check_status(transfer) != RUNNING:
                    del self._abandoned[slot]
                    self._free.append(slot)
            return self._free.pop() if self._free else None

    def _give_back(self, slot: int, transfer: int | None) -> None:
        with self._lock:
            if transfer is None:
                self._free.append(slot)
            else:
                self._abandoned[slot] = transfer

    def _wait(self, transfer: int, check: Callable[[], None]) -> bool:
        """Until it is over; whether it went well. Raises what `check` does, and TimeoutError: then it goes on."""
        until = time.monotonic() + FETCH_S
        while (status := self._engine.transfer_check_status(transfer)) == RUNNING:
            check()
            if time.monotonic() > until:
                raise self._rest(f"it takes longer than {FETCH_S:g} s")
            time.sleep(PROBE_S)
        return bool(status == DONE)

    def _rest(self, why: str) -> OSError:
        with self._lock:
            self.failed += 1
            self._rests_until = time.monotonic() + self._rest_s
        log.warning("a chunk did not come by Mooncake; the sealed connection is used", reason=why, seconds=self._rest_s)
        return ConnectionAbortedError(why)


class LentStream(WeightStream):
    """Asks for loans in place of chunks, as long as they can be read."""

    def __init__(
        self, endpoint: str, handshake: Handshake, silence_s: float, check: Callable[[], None], reader: LoanReader
    ) -> None:
        super().__init__(endpoint, handshake, silence_s, check)
        self._reader, self._returned = reader, list[int]()

    def __exit__(self, *_: object) -> None:
        if self._returned:
            # Nobody waits for the answer; slots whose tickets do not arrive are free after a while.
            with contextlib.suppress(OSError):
                super().ask(wire.GetLent(0, b"", returned=tuple(self._returned)))
        super().__exit__()

    def ask(self, request: wire.FromPeer | wire.GetLent) -> bytes:
        if isinstance(request, wire.GetChunk) and self._reader.is_ready(self._socket.getsockname()[0]):
            request = wire.GetLent(request.version, request.hash, returned=tuple(self._returned))
            self._returned.clear()
        return super().ask(request)

    def _fill(self, number: int, about: bytes, place: Callable[[int], memoryview]) -> None:
        if not number & LENT:
            super()._fill(number, about, place)
            return
        request, buffer = wire.decode_from_puller(about), bytearray(LOAN_BYTES)
        if number != LENT | LOAN_BYTES or not isinstance(request, wire.GetLent):
            raise ProtocolError("a loan that nobody asked for")
        super()._fill(LOAN_BYTES, about, lambda _: memoryview(buffer))
        loan = decode_loan(buffer)
        self._returned.append(loan.ticket)
        self._reader.fetch(self._socket.getpeername()[0], loan, place(loan.size), request.hash, self._check)
