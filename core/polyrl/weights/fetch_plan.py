"""Who is asked for which chunk: a value that a receiver's threads read and tell what came; it knows no socket or clock.

peers         an agent that has a chunk is asked for it, the rarest first; at most PEER_AHEAD chunks at once
publisher     is asked for what nobody has. Receivers that fetch together share its chunks out without a word: each
              ranks all of them for a chunk by the same hash, and asks for those at which it is first. What others
              should bring and do not, since no neighbour got anything new for STALL_S, it asks for where it is second,
              then third. So the publisher sends each chunk about once, and a few more for each receiver that dies
machines      of a publisher with several each is asked for the chunks of its share (`weights.shares`). Where there is
              no connection to one for REACH_S, or those that there are end before a chunk comes, the first one is
              asked for its chunks as well. One that is far slower than the first is left for good
again         no chunk is asked for twice at once. A source that is slow, dies or lies is given up (`leave`), and what
              it was asked for is to be had again

A source is an agent's name, or the number of one of the publisher's machines, PUBLISHER the first. Without peers chunks
are asked for in the order of the stream.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from polyrl.weights.manifest import ChunkEntry, digest

Source: TypeAlias = str | int
PUBLISHER: Final = 0
PUBLISHER_AHEAD: Final = 8
"""Chunks under way from one of its machines to one receiver: what a link of 10 Gbit/s holds over 25 ms."""
REACH_S: Final = 1.0
"""To connect to a machine, once and again; so much longer takes a pull that reaches none but the first."""
SHARED_AHEAD: Final = 2
"""The same while others fetch too: the fewer arrive at a time, the sooner the first can be given on."""
PEER_AHEAD: Final = 2
"""From one agent: the next chunk is on its way while one arrives."""
STALL_S: Final = 1.0
"""No neighbour got a new chunk for so long: whoever should have asked for one is late or gone."""
MAX_RANK: Final = 4
"""Rank that all further places have: four stalls after the last news anybody may ask."""
ALLOWED_S: Final = 3.0
"""A chunk may take so long whatever the others do: a link of 11 Mbit/s."""
SLOW_FACTOR: Final = 4.0
"""Times as long as the middle one of the last chunks; a source that takes longer is slow."""
FAR_SLOWER: Final = 16.0
"""Times as long as the first machine takes for a chunk, on the average: it gives all of a slower one sooner, whatever
it is asked for besides."""
SLUGGISH_S: Final = 1.0
"""All that have a chunk are busy for so long with what they were asked for: the publisher helps."""
REMEMBERED: Final = 16
"""Chunks by whose time a usual one is known."""

Flags: TypeAlias = npt.NDArray[np.bool_]

_WANTED, _ASKED, _HERE = range(3)


@dataclass(eq=False)
class _Source:
    held: Flags
    coming: Flags
    coming_since: npt.NDArray[np.float64]
    """When a chunk was first seen on its way from the publisher to it, for good: one that says so again and again does
    not keep others waiting; inf: never."""
    ever_held: Flags
    """Likewise: what it says it has once more is no news."""
    asked: dict[int, float] = field(default_factory=dict)
    """When; oldest first."""
    arrived_at: float = -inf
    given: int = 0
    """Chunks, in `busy_s` seconds while something was asked of it."""
    busy_s: float = 0.0
    fetches: bool = False
    """It lacks something of the version itself."""

    def waits(self, now: float) -> float:
        """How long nothing has come of what it was asked for."""
        return now - max(next(iter(self.asked.values())), self.arrived_at) if self.asked else 0.0


@dataclass(eq=False)
class _Machine:
    """One of the publisher's, but the first."""

    away_since: float
    """Inf once a chunk has come from it, until a connection ends."""
    connections: int = 0
    is_broken: bool = False
    """A connection has ended since a chunk came."""
    is_left: bool = False
    """It is not asked any more."""


class FetchPlan:
    """Plan of fetching the chunks of one version that are not here; a chunk goes by its place in `chunks`."""

    def __init__(
        self, chunks: Sequence[ChunkEntry], me: str = "", now: float = 0.0, machines: Sequence[int] = ()
    ) -> None:
        """`me`: this receiver's name among those that `expect` names. `machines`: of the publisher, whose each chunk
        is; without them all are the first one's."""
        self.chunks = tuple(chunks)
        self._keys = np.array([int.from_bytes(chunk.hash[:8], "big") for chunk in chunks], np.uint64)
        self._mine = self._weights(me)
        self._state = np.full(len(self.chunks), _WANTED, np.uint8)
        self._holders = np.zeros(len(self.chunks), np.int32)
        self._rank = np.zeros(len(self.chunks), np.int32)
        """How many of the others come before us at the publisher."""
        # Each receiver takes equally rare chunks in an order of its own.
        self._order = np.argsort(np.argsort(self._mine))
        self._expected = set[str]()
        self._machine = np.array(machines or [PUBLISHER] * len(self.chunks), np.int32)
        self._others = {machine: _Machine(now) for machine in {*machines} - {PUBLISHER}}
        self._sources: dict[Source, _Source] = {machine: self._new_source() for machine in (PUBLISHER, *self._others)}
        self._news_at = now
        self._took = deque[float](maxlen=REMEMBERED)
        self._left = len(self.chunks)

    @property
    def is_done(self) -> bool:
        return not self._left

    def expect(self, others: Iterable[str]) -> None:
        """These fetch the same, or are thought to: each is left its share of what the publisher is asked for."""
        expected = set(others)
        for name in self._expected ^ expected:
            self._rank += (1 if name in expected else -1) * (self._weights(name) > self._mine)
        self._expected = expected

    def join(self, source: str) -> None:
        """An agent that answers; `note` takes what it has."""
        self._sources[source] = self._new_source()

    def leave(self, source: str) -> None:
        """An agent is asked no more: what it was asked for is to be had again."""
        known = self._sources.pop(source)
        self._state[list(known.asked)] = _WANTED
        self._holders -= known.held

    def reach(self, machine: int) -> None:
        """A connection to one of the publisher's machines but the first has been made."""
        self._others[machine].connections += 1

    def lose(self, machine: int, now: float) -> None:
        """Such a connection has ended."""
        known = self._others[machine]
        known.connections, known.is_broken, known.away_since = known.connections - 1, True, min(known.away_since, now)

    def refuse(self, machine: int) -> None:
        """That machine does not keep the version, or is left: the first one is asked."""
        self._machine[self._machine == machine] = PUBLISHER

    def left(self, now: float) -> list[int]:
        """Machines for whose chunks the first one is asked, since they are too slow or not reached."""
        return [machine for machine, known in self._others.items() if known.is_left or _is_away(known, now)]

    def note(self, source: str, held: Flags, coming: Flags, now: float, *, fetches: bool) -> None:
        """What an agent says that it has, and awaits from the publisher; `fetches`: it lacks something of the whole."""
        known = self._sources[source]
        if (held & ~known.ever_held & (self._state != _HERE)).any():
            self._news_at = now
        self._holders += held.astype(np.int32) - known.held
        known.held, known.coming, known.fetches = held.copy(), coming.copy(), fetches
        known.ever_held |= held
        known.coming_since[coming & np.isinf(known.coming_since)] = now

    def give_back(self, machine: int, chunks: Iterable[int]) -> None:
        """One of the publisher's connections has ended, on which these were asked for."""
        for chunk in chunks:
            del self._sources[machine].asked[chunk]
            self._state[chunk] = _WANTED

    def lacks(self, source: str, chunk: int) -> None:
        """It was asked for the chunk, and does not have it, or gave something else."""
        known = self._sources[source]
        del known.asked[chunk]
        self._state[chunk] = _WANTED
        if known.held[chunk]:
            known.held[chunk] = False
            self._holders[chunk] -= 1

    def next(self, source: Source, now: float) -> int | None:
        """The chunk to ask this source for, which counts as asked for from now on; None: none at the moment."""
        known = self._sources[source]
        chunk = (
            self._of_peer(known) if isinstance(source, str) else self._of_publisher(known, self._of(source, now), now)
        )
        if chunk is not None:
            self._state[chunk] = _ASKED
            known.asked[chunk] = now
        return chunk

    def came(self, source: Source, chunk: int, now: float) -> None:
        """The chunk is here, and is what its hash says."""
        known = self._sources[source]
        took = now - max(known.asked.pop(chunk), known.arrived_at)
        self._took.append(took)
        known.arrived_at, known.given, known.busy_s = now, known.given + 1, known.busy_s + took
        if isinstance(source, int) and (machine := self._others.get(source)) is not None:
            machine.is_broken, machine.away_since = False, inf
        self._state[chunk] = _HERE
        self._left -= 1

    def is_slow(self, source: Source, chunk: int, now: float) -> bool:
        """The connection that brings this chunk should be given up: it takes too long, and another source has it."""
        if isinstance(source, int) and source in self._others and self._others[source].is_left:
            return True
        known = self._sources[source]
        waits = now - max(known.asked[chunk], known.arrived_at)
        return (isinstance(source, str) or bool(self._holders[chunk])) and waits > self._allowed_s()

    def wants_of(self, source: str) -> bool:
        """Whether it has anything that is not here."""
        return bool((self._sources[source].held & (self._state != _HERE)).any())

    def _of(self, machine: int, now: float) -> Flags:
        """What that one of the publisher's machines is asked for."""
        own: Flags = self._machine == machine
        if machine != PUBLISHER:
            return own
        for other in self._others:
            if self._is_far_slower(other, now):
                self._others[other].is_left = True
                self.refuse(other)
        for other, known in self._others.items():
            if _is_away(known, now):
                own |= self._machine == other
        return own

    def _is_far_slower(self, machine: int, now: float) -> bool:
        """Than the first one, which is not held up by the same."""
        known, first = self._sources[machine], self._sources[PUBLISHER]
        waits, allowed = known.waits(now), self._allowed_s()
        if waits > allowed:
            return first.waits(now) <= allowed
        busy = known.busy_s + waits
        sure = first.given >= REMEMBERED and busy > ALLOWED_S
        return sure and busy * first.given > FAR_SLOWER * first.busy_s * (known.given + 1)

    def _allowed_s(self) -> float:
        """For a chunk, while others are had."""
        return max(ALLOWED_S, SLOW_FACTOR * statistics.median(self._took) if self._took else 0.0)

    def _of_publisher(self, known: _Source, own: Flags, now: float) -> int | None:
        together = any(source.fetches for source in self._sources.values())
        if len(known.asked) >= (SHARED_AHEAD if together else PUBLISHER_AHEAD):
            return None
        wanted = own & (self._state == _WANTED)
        free = wanted & (self._holders == 0)
        if not free.any():
            return _first(wanted) if self._are_sluggish(now) else None
        if not self._expected:
            return _first(free)
        late = np.minimum(self._rank, MAX_RANK) * STALL_S <= now - self._news_at
        may = free & ((self._rank == 0) | (late & ~self._coming(now)))
        return _lowest(may, self._rank * len(self.chunks) + self._order)

    def _of_peer(self, known: _Source) -> int | None:
        if len(known.asked) >= PEER_AHEAD:
            return None
        return _lowest(known.held & (self._state == _WANTED), self._holders * len(self.chunks) + self._order)

    def _coming(self, now: float) -> Flags:
        """What a neighbour awaits from the publisher, and not for too long."""
        coming = np.zeros(len(self.chunks), np.bool_)
        for source in self._sources.values():
            coming |= source.coming & (now - source.coming_since < ALLOWED_S)
        return coming

    def _are_sluggish(self, now: float) -> bool:
        """Whether every agent has more than it can give: all are busy, and have been for too long with one chunk."""
        peers = [source for name, source in self._sources.items() if isinstance(name, str) and source.held.any()]
        return all(
            len(peer.asked) >= PEER_AHEAD and now - max(min(peer.asked.values()), peer.arrived_at) > SLUGGISH_S
            for peer in peers
        )

    def _weights(self, name: str) -> npt.NDArray[np.uint64]:
        """Weight of each chunk: whoever has the largest is first to ask for it (rendezvous hashing)."""
        seed = np.uint64(int.from_bytes(digest(name.encode())[:8], "big"))
        mixed = (self._keys ^ seed) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
        mixed = mixed * np.uint64(0xD6E8FEB86659FD93)
        return mixed ^ (mixed >> np.uint64(32))

    def _new_source(self) -> _Source:
        size = len(self.chunks)
        nothing = np.zeros(size, np.bool_)
        return _Source(nothing, nothing, coming_since=np.full(size, inf), ever_held=nothing.copy())


def _is_away(machine: _Machine, now: float) -> bool:
    return (machine.is_broken or not machine.connections) and now - machine.away_since > REACH_S


def _first(among: Flags) -> int | None:
    return int(among.argmax()) if among.any() else None


def _lowest(among: Flags, by: npt.NDArray[np.int64]) -> int | None:
    return int(np.where(among, by, np.iinfo(np.int64).max).argmin()) if among.any() else None
