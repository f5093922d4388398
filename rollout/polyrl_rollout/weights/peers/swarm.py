"""This agent among those of its run that give each other chunks: its key, what it gives, whom it may dial.

The manager tells who belongs to it (`wire.Peers`). Others are let in by the keys on that list alone, dialled by its
endpoints, and believed in nothing: what they give counts by its hash. One that cannot be dialled offers connections,
and is asked on these.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from polyrl import wire
from polyrl.weights.neighbours import Neighbours
from polyrl.wire.sealing import PeerHandshake, PeerKeys
from polyrl_rollout.weights.peers.offers import Offers
from polyrl_rollout.weights.peers.server import AnswerKeys, PeerServer
from polyrl_rollout.weights.peers.shelf import Shelf
from polyrl_rollout.weights.stream import OfferedStream, WeightStream

SILENCE_S: Final = 2.5
"""An agent that cannot be dialled, or gives nothing, for so long is left for another one."""
OFFERS: Final = 48
"""Kept, of as many agents: eight times as many as are asked at once. Further ones are for others to take."""
LOOPBACK: Final = ("tcp://127.", "tcp://[::1]")

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Offer:
    """A connection on which an agent may be asked."""

    socket: socket.socket
    keys: AnswerKeys
    is_used: bool = False

    def close(self) -> None:
        """Who uses it wakes, and closes it himself."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if not self.is_used:
            self.socket.close()


class Swarm:
    """Until `close`; `update` is the agent's, all else may be called by any thread."""

    def __init__(
        self, engine: str, port: int | None = None, host: str = "", least_bytes: int = 0, silence_s: float = SILENCE_S
    ) -> None:
        """Listens at that port of `host`, 0 being any port and no host every address; None: it does not.
        `least_bytes`: where all together have less to get, each takes it from the publisher. Raises OSError when the
        port is taken."""
        self.engine, self._least_bytes, self._silence_s = engine, least_bytes, silence_s
        self._keys, self.shelf = PeerKeys.draw(), Shelf()
        self._members: dict[str, wire.Peer] = {}
        self._admitted = frozenset[bytes]()
        self.neighbours, self.lock = Neighbours(engine), threading.Lock()
        """`lock` is around every use of `neighbours`."""
        self._offered: dict[str, _Offer] = {}
        """By others: the newest of each, used or not."""
        self.server = PeerServer(port, host, self._keys, self._admits, self.shelf.find, self._take_offer)
        self._listening = Neighbours(engine)
        """Agents to whom offers are made."""
        self._offers = Offers(self.server, self._listening, self.lock, self._dial_to_offer)

    @property
    def public_key(self) -> bytes:
        return self._keys.public

    @property
    def port(self) -> int:
        return self.server.port

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
                self._forget(name)
                if name in after:
                    self._meet(name, after[name].endpoint)
        if ended := {peer.public_key for peer in before.values()} - self._admitted:
            self.server.end(ended)

    def _meet(self, name: str, endpoint: str) -> None:
        near = endpoint.startswith(LOOPBACK)
        self.neighbours.add(name, near=near, hidden=not endpoint)
        if endpoint:
            self._listening.add(name, near=near)

    def _forget(self, name: str) -> None:
        self.neighbours.remove(name)
        self._listening.remove(name)
        if (offer := self._offered.pop(name, None)) is not None:
            offer.close()

    def pays(self, size: int) -> bool:
        """Whether to ask others for so many bytes costs less than it spares."""
        with self.lock:
            return size * (1 + len(self.neighbours.expected())) >= self._least_bytes

    def dial(self, name: str, check: Callable[[], None]) -> WeightStream:
        """A connection with the agent of that engine: one that it has offered, or a new one. Raises OSError."""
        with self.lock:
            offer = self._offered[name] if self.neighbours.take_offer(name) else None
            if offer is not None:
                offer.is_used = True
        if offer is not None:
            return OfferedStream(offer.socket, offer.keys, self._silence_s, check)
        return self._dial(name, check)[0]

    def _dial(self, name: str, check: Callable[[], None]) -> tuple[WeightStream, PeerHandshake]:
        peer = self._members.get(name)
        if peer is None or not peer.endpoint:
            raise ConnectionRefusedError(f"{name} has left, or does not listen")
        handshake = PeerHandshake(self._keys.towards(peer.public_key))
        return WeightStream(peer.endpoint, handshake, self._silence_s, check), handshake

    def _dial_to_offer(self, name: str) -> tuple[WeightStream, PeerHandshake]:
        with self.lock:
            self.neighbours.is_hidden = True
        return self._dial(name, lambda: None)

    def _take_offer(self, public_key: bytes, connected: socket.socket, keys: AnswerKeys) -> None:
        """By a thread of the server: the agent of that key may be asked on that connection."""
        over: _Offer | None = _Offer(connected, keys)
        with self.lock:
            name = next((name for name, peer in self._members.items() if peer.public_key == public_key), "")
            has_place = name in self._offered or len(self._offered) < OFFERS
            if has_place and self.neighbours.offered(name):
                over, self._offered[name] = self._offered.get(name), _Offer(connected, keys)
        if over is not None:
            over.close()

    def take_liars(self) -> tuple[str, ...]:
        """Who gave a false chunk since this was asked last."""
        with self.lock:
            return self.neighbours.take_liars()

    def close(self) -> None:
        """Idempotent."""
        self._offers.close()
        self.server.close()
        with self.lock:
            for offer in self._offered.values():
                offer.close()

    def _admits(self, public: bytes) -> bool:
        return public in self._admitted
