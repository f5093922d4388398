"""Gives chunks although nobody can dial this agent: it opens connections to others, on which they ask.

To each of few it has one connection open, beside those on which it asks itself. The first request on it is a
ServeOffer, and then the other side asks as of any agent; what is answered, and within which bounds, is `server`'s. One
that ends is opened again after a pause. An agent that listens offers nothing for UNDIALLED_S after others came, nor
once one of them has dialled it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from polyrl.errors import ProtocolError
from polyrl.weights.neighbours import NEIGHBOURS, Neighbours
from polyrl.wire.sealing import PeerHandshake
from polyrl_rollout.weights.peers.server import IDLE_S, PeerServer
from polyrl_rollout.weights.stream import WeightStream

UNDIALLED_S: Final = 10.0
"""Others that fetch the same version dial at once; what they ask first comes within 5 s also on a poor link."""
OFFER_CHECK_S: Final = 0.5
"""Between two checks whether a connection is to be opened."""

log = structlog.get_logger(__name__)


class Offers:
    """Offers of one agent to the members of `neighbours`, until `close`."""

    def __init__(
        self,
        server: PeerServer,
        neighbours: Neighbours,
        lock: threading.Lock,
        dial: Callable[[str], tuple[WeightStream, PeerHandshake]],
    ) -> None:
        """`lock` is around every use of `neighbours`, which are used for nothing else."""
        self._server, self._neighbours, self._lock, self._dial = server, neighbours, lock, dial
        self._open = set[str]()
        self._met_at: float | None = None
        self._ending = threading.Event()
        threading.Thread(target=self._run, name="peer-offers", daemon=True).start()

    def close(self) -> None:
        """Opens none any more; those that are open end with the server. Idempotent."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.wait(OFFER_CHECK_S):
            while (name := self._choose(time.monotonic())) is not None:
                try:
                    threading.Thread(target=self._offer, args=(name,), name="peer-offer", daemon=True).start()
                except RuntimeError:  # no thread is left; there will be
                    with self._lock:
                        self._open.discard(name)
                        self._neighbours.failed(name, time.monotonic())

    def _choose(self, now: float) -> str | None:
        with self._lock:
            name = self._neighbours.choose(now, self._open)
            if name is None or len(self._open) >= NEIGHBOURS:
                return None
            self._met_at = now if self._met_at is None else self._met_at
            if self._server.port and (self._server.was_dialled or now - self._met_at < UNDIALLED_S):
                return None
            self._open.add(name)
            return name

    def _offer(self, name: str) -> None:
        begun, was_asked = time.monotonic(), False
        try:
            stream, handshake = self._dial(name)
            with stream:
                was_asked = self._server.answer(*stream.offer(), handshake=handshake)
        except (OSError, ProtocolError) as error:
            log.debug("an agent takes no offer", engine=name, error=str(error))
        finally:
            with self._lock:
                self._open.discard(name)
                self._end(name, time.monotonic(), begun, was_asked=was_asked)

    def _end(self, name: str, now: float, begun: float, *, was_asked: bool) -> None:
        if now - begun >= IDLE_S:
            return  # there for long: there again at once
        if was_asked:
            self._neighbours.reached(name)
            self._neighbours.had_nothing(name, now)
        else:
            self._neighbours.failed(name, now)
