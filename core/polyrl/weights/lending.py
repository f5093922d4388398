"""Chunks that are lent: the publisher puts one into a window that a transfer engine (Mooncake) lets others read, and
says over the sealed connection where it lies; the receiver fetches it from there, copies it and hashes the copy.

The engine's wire is clear text, and it asks nobody who he is: whoever reaches its ports may read the windows and write
into them, on either side. So nothing but copies of chunks lies there, and what was fetched counts by its hash alone.

A slot is lent to one receiver. It is free when he names its ticket with his next request, or LENT_S later: he may have
died. One that is late finds other bytes there, which his hash shows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Protocol

from polyrl.errors import ProtocolError
from polyrl.weights.manifest import CHUNK_BYTES

FIRST_PORT: Final = 5100
LAST_PORT: Final = 5163
"""The engine listens at two of these on each side: a range for 32 processes of one machine, beside the run's other
ports."""
SLOT_BYTES: Final = CHUNK_BYTES
LEAST_LENT: Final = 16 << 10
"""A smaller chunk is sent sealed: to say where it lies would take as long."""
LENT_S: Final = 30.0
"""Longer than any receiver waits for a chunk."""
PROGRESS_S: Final = 5
"""Without a byte for so many seconds the engine gives a transfer up; by itself it waits 30."""
NOT_INSTALLED: Final = "pip install 'polyrl[mooncake]', and the system's libibverbs1, bring it"

_LOAN: Final = struct.Struct(">HQQQ")


class TransferEngine(Protocol):
    """What both sides use of `mooncake.engine.TransferEngine`; 0 is success."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, size: int, /) -> int: ...


def start_engine(engine: TransferEngine, host: str, rdma_devices: str, memory: tuple[int, int]) -> bool:
    """Has it listen, with `memory` (address, size) open to others; False where it does not, for reasons that it logs.
    Without devices it speaks TCP."""
    protocol = "rdma" if rdma_devices else "tcp"
    started = not engine.initialize(host, "P2PHANDSHAKE", protocol, rdma_devices)
    return started and not engine.register_memory(*memory)


def engine_settings() -> dict[str, str]:
    """Variables that the engine reads once, when it starts: its ports, and its own deadlines."""
    return {
        "MC_MIN_RPC_PORT": str(FIRST_PORT),
        "MC_MAX_RPC_PORT": str(LAST_PORT),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_S),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(PROGRESS_S),
    }


@dataclass(frozen=True)
class Loan:
    """Where a chunk lies."""

    port: int
    """Port of the lending engine, on the host that the sealed connection leads to."""
    address: int
    size: int
    ticket: int


LOAN_BYTES: Final = _LOAN.size


def encode_loan(loan: Loan) -> bytes:
    return _LOAN.pack(loan.port, loan.address, loan.size, loan.ticket)


def decode_loan(data: bytes | bytearray) -> Loan:
    """Raises ProtocolError for what is none."""
    if len(data) != LOAN_BYTES:
        raise ProtocolError(f"a loan of {len(data)} bytes is none")
    port, address, size, ticket = _LOAN.unpack(data)
    if not port or not address or not LEAST_LENT <= size <= SLOT_BYTES:
        raise ProtocolError(f"a loan of {size} bytes at port {port} is none")
    return Loan(port, address, size=size, ticket=ticket)


class Slots:
    """Which of so many slots is whose, by tickets that nobody guesses."""

    def __init__(self, number: int) -> None:
        self._free = list(range(number))
        self._lent: dict[int, tuple[int, float]] = {}
        """Slot and time by ticket, oldest first."""

    def take(self, ticket: int, now: float) -> int | None:
        """A slot for that ticket; None: all are lent."""
        for old, (slot, since) in list(self._lent.items()):
            if now - since < LENT_S:
                break
            del self._lent[old]
            self._free.append(slot)
        if not self._free or ticket in self._lent:
            return None
        slot = self._free.pop()
        self._lent[ticket] = slot, now
        return slot

    def give_back(self, tickets: tuple[int, ...]) -> None:
        """Unknown ones are those of slots that were taken back meanwhile."""
        for ticket in tickets:
            if ticket in self._lent:
                self._free.append(self._lent.pop(ticket)[0])
