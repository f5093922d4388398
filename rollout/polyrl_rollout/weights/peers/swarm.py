"""This agent among those of its run that give each other chunks: its key, what it gives, whom it may dial.

The manager tells who belongs to it (`wire.Peers`). Others are let in by the keys on that list alone, dialled by its
endpoints, and believed in nothing: what they give counts by its hash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from polyrl import wire
from polyrl.weights.neighbours import Neighbours
from polyrl.wire.sealing import PeerHandshake, PeerKeys
from polyrl_rollout.weights.peers.server import PeerServer
from polyrl_rollout.weights.peers.shelf import Shelf
from polyrl_rollout.weights.stream import WeightStream

SILENCE_S: Final = 2.5
"""An agent that cannot be dialled, or gives nothing, for so long is left for another one."""
LOOPBACK: Final = ("tcp://127.", "tcp://[::1]")

log = structlog.get_logger(__name__)


class Swarm:
    """Until `close`; `update` is the agent's, all else may be called by any thread."""

    def __init__(
        self,
        engine: str,
        port: int | None = None,
        host: str = "",
        least_bytes: int = 0,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Listens at that port of `host`, 0 being any port and no host every address; None: it only takes.
        `least_bytes`: where all together have less to get, each takes it from the publisher. Raises OSError when the
        port is taken."""
        self.engine, self._least_bytes, self._silence_s = engine, least_bytes, silence_s
        self._keys, self.shelf = PeerKeys.draw(), Shelf()
        self._members: dict[str, wire.Peer] = {}
        self._admitted = frozenset[bytes]()
        self.neighbours, self.lock = Neighbours(engine), threading.Lock()
        """`lock` is around every use of `neighbours`."""
        self.server = None if port is None else PeerServer(port, host, self._keys, self._admits, self.shelf.find)

    @property
    def public_key(self) -> bytes:
        return self._keys.public

    @property
    def port(self) -> int:
        return self.server.port if self.server is not None else 0

    def update(self, peers: wire.Peers) -> None:
        """What the manager says of who belongs to it."""
        before = self._members
        after = {} if peers.whole else {name: peer for name, peer in before.items() if name not in peers.gone}
        after |= {peer.engine: peer for peer in peers.added if peer.engine != self.engine}
        with self.lock:
            self._members, self._admitted = after, frozenset(peer.public_key for peer in after.values())
            for name in before.keys() | after.keys():
                if before.get(name) == after.get(name):
                    continue
                self.neighbours.remove(name)
                if name in after and after[name].endpoint:
                    self.neighbours.add(name, near=after[name].endpoint.startswith(LOOPBACK))
        ended = {peer.public_key for peer in before.values()} - self._admitted
        if ended and self.server is not None:
            self.server.end(ended)

    def pays(self, size: int) -> bool:
        """Whether to ask others for so many bytes costs less than it spares."""
        with self.lock:
            return size * (1 + len(self.neighbours.expected())) >= self._least_bytes

    def dial(self, name: str, check: Callable[[], None]) -> WeightStream:
        """A connection with the agent of that engine. Raises OSError."""
        peer = self._members.get(name)
        if peer is None:
            raise ConnectionRefusedError(f"{name} has left")
        handshake = PeerHandshake(self._keys.towards(peer.public_key))
        return WeightStream(peer.endpoint, handshake, self._silence_s, check)

    def take_liars(self) -> tuple[str, ...]:
        """Who gave a false chunk since this was asked last."""
        with self.lock:
            return self.neighbours.take_liars()

    def close(self) -> None:
        """Idempotent."""
        if self.server is not None:
            self.server.close()

    def _admits(self, public: bytes) -> bool:
        return public in self._admitted
