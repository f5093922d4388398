"""Lends chunks to receivers that have the Mooncake transfer engine: a copy in this window, which they read.

The window is all that the engine lets others reach: not the images that are served and that the next delta rests on.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
import time
from contextlib import nullcontext
from typing import Final

import structlog

from polyrl.errors import UserError
from polyrl.weights.lending import (
    LEAST_LENT,
    NOT_INSTALLED,
    SLOT_BYTES,
    Loan,
    Slots,
    encode_loan,
    engine_settings,
    start_engine,
)
from polyrl.wire import FromPuller, GetLent
from polyrl.wire.serving import Content, Found

SLOTS: Final = 128
"""512 MiB, touched as they are used: two chunks for each connection of sixteen receivers. Others get theirs sealed."""
TICKET_BITS: Final = 64

log = structlog.get_logger(__name__)


class Lender:
    """Until the process ends: the engine cannot be stopped while somebody may read."""

    def __init__(self, host: str, rdma_devices: str = "", slots: int = SLOTS) -> None:
        """Receivers reach this machine by `host`. Raises UserError where the engine is not installed or does not
        start."""
        os.environ.update(engine_settings())
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise UserError(
                f"spec.rollout.mooncake wants the Mooncake transfer engine, which cannot be loaded here ({error});"
                f" {NOT_INSTALLED}, or leave the field out"
            ) from None
        self._engine, self.window = TransferEngine(), memoryview(mmap.mmap(-1, slots * SLOT_BYTES))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.window))
        if not start_engine(self._engine, host, rdma_devices, (self._address, slots * SLOT_BYTES)):
            raise UserError(
                "spec.rollout.mooncake: the transfer engine does not start; its reason stands above"
                f" (host {host}, rdmaDevices {rdma_devices or 'none, so TCP'})"
            )
        self.port: int = self._engine.get_rpc_port()
        self._slots, self._lock = Slots(slots), threading.Lock()
        log.warning("weights are lent in clear text: whoever reaches this port may read and write them", port=self.port)

    def take_back(self, tickets: tuple[int, ...]) -> None:
        """What was lent so is read."""
        with self._lock:
            self._slots.give_back(tickets)

    def lend(self, content: Content) -> Content:
        """Where it lies; or the content itself, when it is small or too large, or all slots are lent. Raises
        ProtocolError when it is not kept any more."""
        size, ticket = len(content.data), secrets.randbits(TICKET_BITS)
        with self._lock:
            slot = self._slots.take(ticket, time.monotonic()) if LEAST_LENT <= size <= SLOT_BYTES else None
        if slot is None:
            return content
        begin = slot * SLOT_BYTES
        with content.reading():
            self.window[begin : begin + size] = content.data
        loan = Loan(self.port, self._address + begin, size=size, ticket=ticket)
        return Content(memoryview(encode_loan(loan)), nullcontext, is_loan=True)


def lent(lender: Lender | None, request: FromPuller, found: Found) -> Found:
    """What answers `request`, which found this. What is still to be found is not lent."""
    if lender is None or not isinstance(request, GetLent):
        return found
    lender.take_back(request.returned)
    return lender.lend(found) if isinstance(found, Content) else found
