"""Agents that exchange weights hear of each other from the manager: where they are, and when one is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import zmq.asyncio

from polyrl.wire import Deregister, Heartbeat, Peer, Peers, WeightsLoaded, Welcome, decode_to_agent, encode

DEADLINE_S = 60.0
KEYS = {name: name.encode() * 32 for name in "abc"}


class Greeted:
    """An agent that greeted; `peers` is what it knows of others."""

    def __init__(self, site: Any, name: str, **fields: Any) -> None:
        self.socket: zmq.asyncio.Socket = site.agent_socket(name)
        self.hello = site.hello(name, **fields)
        self.peers: dict[str, Peer] = {}

    async def greet(self) -> None:
        await self.send(self.hello)

    async def send(self, message: Any) -> None:
        await self.socket.send(encode(message))

    async def kinds_until_welcome(self, times: int) -> set[type[Any]]:
        kinds = set()
        async with asyncio.timeout(DEADLINE_S):
            while times:
                kind = type(decode_to_agent(await self.socket.recv()))
                kinds.add(kind)
                times -= kind is Welcome
        return kinds

    async def until(self, names: str) -> None:
        """Knows of exactly these."""
        async with asyncio.timeout(DEADLINE_S):
            while sorted(self.peers) != sorted(names):
                await self.send(Heartbeat(0, 0, kv_free_tokens=9))
                if not await self.socket.poll(200):
                    continue
                message = decode_to_agent(await self.socket.recv())
                if isinstance(message, Peers):
                    self.peers = {} if message.whole else self.peers
                    self.peers |= {peer.engine: peer for peer in message.added}
                    self.peers = {name: peer for name, peer in self.peers.items() if name not in message.gone}


Make: TypeAlias = Callable[..., Greeted]


@pytest.fixture
def agent(site: Any) -> Iterator[Make]:
    made: list[Greeted] = []

    def make(name: str, port: int = 5004, key: bytes | None = None) -> Greeted:
        made.append(Greeted(site, name, peer_key=KEYS[name] if key is None else key, peer_port=port))
        return made[-1]

    yield make
    for each in made:
        each.socket.close()


async def test_agents_hear_where_others_listen_and_who_only_takes(agent: Make) -> None:
    one, other = agent("a", port=7001), agent("b", port=0)
    await one.greet()
    await other.greet()
    for each in (one, other):
        await each.until("ab")
        assert each.peers["a"] == Peer("a", KEYS["a"], "tcp://127.0.0.1:7001")
        assert each.peers["b"] == Peer("b", KEYS["b"])


async def test_one_that_takes_no_part_is_not_named_and_hears_nothing(agent: Make) -> None:
    silent, one = agent("c", key=b""), agent("a")
    await silent.greet()
    await one.greet()
    await one.until("a")
    await silent.greet()
    assert await silent.kinds_until_welcome(2) == {Welcome}


@pytest.mark.parametrize("site", [1.0], indirect=True)
async def test_who_leaves_is_lost_or_revoked_is_gone_for_the_others(site: Any, agent: Make) -> None:
    stays, leaves, lost = (agent(name) for name in "abc")
    for each in (stays, leaves, lost):
        await each.greet()
    await stays.until("abc")
    await leaves.send(Deregister("its machine goes"))
    # The other sends nothing more, and its lease of a second runs out.
    await stays.until("a")
    again = agent("c")
    await again.greet()
    await stays.until("ac")
    await site.manager.revoke("c")
    await stays.until("a")


async def test_bytes_of_weights_are_counted_by_source(site: Any, agent: Make) -> None:
    one = agent("a")
    await one.greet()
    await one.until("a")
    loaded = {"load_seconds": 0.0, "bytes_pulled": 100, "bytes_from_peers": 70}
    await one.send(WeightsLoaded(0, 0.0, **loaded, liars=("b",)))
    await one.send(WeightsLoaded(0, 0.0, **(loaded | {"bytes_from_peers": -5})))
    await one.send(WeightsLoaded(0, 0.0, **(loaded | {"bytes_from_peers": 1 << 40})))
    weights = site.manager._agents.weights
    await site.eventually(lambda: weights.of_peers + weights.of_publisher == 300)
    assert (weights.of_peers, weights.of_publisher, weights.false_chunks) == (170, 130, 1)
