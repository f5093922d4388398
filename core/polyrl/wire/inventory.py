"""What an agent answers to GetHeld: which chunks of a version it can give, and which it awaits from the publisher.

one byte     1: it lacks chunks itself, and fetches them
bits         a bit per chunk in the manifest's order, the first in the highest place: it can give the chunk
bits         the same: it has asked the publisher for the chunk
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from polyrl.errors import ProtocolError

Bits: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Inventory:
    """Chunks that the agent can give, and those that it awaits: bool[chunks] each."""

    held: Bits
    coming: Bits
    fetches: bool


def encode_inventory(inventory: Inventory) -> bytes:
    return b"".join((bytes([inventory.fetches]), _packed(inventory.held), _packed(inventory.coming)))


def inventory_bytes(chunks: int) -> int:
    """Bytes of an inventory about so many chunks."""
    return 1 + 2 * ((chunks + 7) // 8)


def decode_inventory(data: bytes, chunks: int) -> Inventory:
    """Raises ProtocolError for what is none of a version of so many chunks."""
    if len(data) != inventory_bytes(chunks) or data[0] > 1:
        raise ProtocolError(f"not an inventory of {chunks} chunks: {len(data)} bytes")
    bits = np.frombuffer(data, np.uint8, offset=1)
    held, coming = (
        np.unpackbits(half, count=chunks).astype(np.bool_) for half in (bits[: len(bits) // 2], bits[len(bits) // 2 :])
    )
    return Inventory(held, coming, fetches=bool(data[0]))


def _packed(bits: Bits) -> bytes:
    return np.packbits(bits).tobytes()
