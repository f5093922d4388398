"""The manager's list of agents that give and take chunks of weights: who is on it, and which messages tell them so.

An agent is on it from its Welcome, under the key that it greeted with, until it has left, was lost, or its name was
refused for good. Then all others hear that it is gone, and let it in no more. News are gathered, and go out together:
a fleet of a thousand that starts within a minute costs each agent some sixty small messages.
"""

from __future__ import annotations

from typing import Final

from polyrl.wire.agent import Hello, Peer, Peers

PEER_KEY_BYTES: Final = 32
GATHER_NEWS_S: Final = 0.25
"""News wait so long for others."""


def peer_of(hello: Hello, host: str) -> Peer | None:
    """How others know who greets from `host`; None: it takes no part. Where it listens is at the address that it comes
    from: so it has others dial no strange machine, and behind address translation nobody is sent there in vain but to
    the translator, which refuses at once."""
    if len(hello.peer_key) != PEER_KEY_BYTES:
        return None
    listens = bool(host) and 0 < hello.peer_port < 1 << 16
    return Peer(hello.engine, hello.peer_key, endpoint=f"tcp://{host}:{hello.peer_port}" if listens else "")


class Roster:
    """Who is on the list, and what whom is still to be sent."""

    def __init__(self) -> None:
        self._members: dict[str, Peer] = {}
        self._news: dict[str, Peer | None] = {}
        """Since the last `messages`; None: it is gone."""
        self._new = set[str]()
        """They know nothing yet."""

    @property
    def has_news(self) -> bool:
        return bool(self._news or self._new)

    def welcome(self, engine: str, peer: Peer | None) -> None:
        """An agent was welcomed, for the first time or again."""
        if peer is None:
            self.remove(engine)
            return
        if self._members.get(engine) != peer:
            self._members[engine] = self._news[engine] = peer
        self._new.add(engine)

    def remove(self, engine: str) -> None:
        """It is let in no more."""
        if self._members.pop(engine, None) is not None:
            self._news[engine] = None

    def messages(self) -> list[tuple[str, Peers]]:
        """What is to be sent now, and to whom; those who know nothing come last: others know them before they dial."""
        added = tuple(peer for peer in self._news.values() if peer is not None)
        gone = tuple(name for name, peer in self._news.items() if peer is None)
        everybody = tuple(self._members.values())
        changed = Peers(added, gone)
        known = [(name, changed) for name in self._members if name not in self._new and (added or gone)]
        new = [(name, Peers(everybody, whole=True)) for name in self._members if name in self._new]
        self._news.clear()
        self._new.clear()
        return known + new
