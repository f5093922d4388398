"""Whose unfinished messages fill a process, and are cut off.

libzmq hands a message over when its last part is here, keeps the parts until then, and bounds the size of a part and
not their number: a peer that is let in and sends part after part fills the memory of whoever listens. Nothing is seen
of such a message but the bytes of its connection. So those are what is counted: all that a connection has brought
since the last message of its that was handed over.

A connection is known by its file descriptor. Who listens reads the counts and cuts off.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

CHECK_S: Final = 0.1
"""Between two checks: meanwhile some 10 MB come, for one thread of libzmq decrypts all."""
CHECK_S_PER_CONNECTION: Final = 0.0005
"""Added for each: a check takes some 2 µs of each connection, so all of them together 0.4 % of a core at most."""
TCP_INFO_BYTES: Final = 136
"""As much of Linux's `struct tcp_info` as holds tcpi_bytes_received, its last eight bytes (since Linux 4.1)."""


def received_bytes(tcp_info: bytes) -> int:
    """What a connection has received since it was made, by its TCP_INFO; 0 of a kernel that does not say it."""
    return int.from_bytes(tcp_info[TCP_INFO_BYTES - 8 : TCP_INFO_BYTES], sys.byteorder)


class UnfinishedMessages:
    """What connections have brought that was not handed over."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` may be held of all connections together."""
        self._max_bytes = max_bytes
        self._taken: dict[int, int] = {}
        """Bytes by connection that belong to messages that were handed over."""
        self._seen: dict[int, int] = {}
        """Bytes by connection when all whole messages had been handed over."""
        self._handed: set[int] = set()
        """Connections of which a message was handed over since then."""

    @property
    def connections(self) -> tuple[int, ...]:
        """Those that are open."""
        return tuple(self._taken)

    @property
    def check_s(self) -> float:
        """Seconds until the next check."""
        return CHECK_S + CHECK_S_PER_CONNECTION * len(self._taken)

    def opened(self, connection: int) -> None:
        """A new connection has this descriptor."""
        self._taken[connection] = self._seen[connection] = 0
        self._handed.discard(connection)

    def closed(self, connection: int) -> None:
        """Nobody has this descriptor any more."""
        self._taken.pop(connection, None)
        self._seen.pop(connection, None)
        self._handed.discard(connection)

    def handed_over(self, connection: int) -> None:
        """A whole message of it was read."""
        if connection in self._taken:
            self._handed.add(connection)

    def check(self, received: Mapping[int, int], *, drained: bool) -> list[int]:
        """Connections to cut off, those that hold most first, until what the others hold is within the bound.

        `received`: bytes by connection until now. `drained`: no whole message waits to be handed over. Only then is it
        known what belongs to what: a message that comes after that was not finished then, so once it is handed over,
        all that its connection had brought until then has been taken too; what it brought later may be another's.
        """
        if drained:
            for connection in self._handed:
                self._taken[connection] = self._seen[connection]
            self._handed.clear()
            self._seen |= {connection: size for connection, size in received.items() if connection in self._seen}
        held = {each: size - self._taken[each] for each, size in received.items() if each in self._taken}
        excess, cut = sum(held.values()) - self._max_bytes, list[int]()
        for connection in sorted(held, key=lambda each: -held[each]):
            if excess <= 0:
                break
            excess -= held[connection]
            cut.append(connection)
        return cut
