"""Whom an agent gives chunks, and how many at once: strangers and greedy ones take no place of a member."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from polyrl import wire
from polyrl.wire.sealing import PeerHandshake, PeerKeys
from polyrl.wire.serving import Content
from polyrl_rollout.weights.peers.server import HANDSHAKES, UPLOAD_CORES, UPLOADS
from polyrl_rollout.weights.stream import WeightStream
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.weights.conftest import FILES
from tests.integration.weights.peer_fleet import PULLED_S, SILENCE_S, Fleet, ask, content, pull, weights


async def test_who_is_not_on_the_list_gets_nothing_and_who_leaves_it_is_cut_off(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm, body = fleet.swarms["a"], wire.GetManifest(0)
    endpoint = f"tcp://127.0.0.1:{swarm.port}"

    def dial(keys: PeerKeys) -> WeightStream:
        return WeightStream(endpoint, PeerHandshake(keys.towards(swarm.public_key)), SILENCE_S, lambda: None)

    def ask(stream: WeightStream) -> bool:
        return stream.answer(stream.ask(body), lambda size: memoryview(bytearray(size)))

    member, stranger = PeerKeys.draw(), PeerKeys.draw()
    fleet.list("member", member.public, 0)
    with pytest.raises(OSError, match="closed"):
        await asyncio.to_thread(dial, stranger)
    with await asyncio.to_thread(dial, member) as stream:
        assert await asyncio.to_thread(ask, stream)
        fleet.list("leaves", PeerKeys.draw().public, 9)
        assert swarm.neighbours.choose(0.0, ()) == "leaves"
        fleet.lose("leaves")
        assert swarm.neighbours.choose(0.0, ()) is None
        fleet.lose("member")
        with pytest.raises(OSError, match=r"closed|[Rr]eset|[Bb]roken"):
            await asyncio.to_thread(ask, stream)
    with pytest.raises(OSError, match="closed"):
        await asyncio.to_thread(dial, member)


@pytest.mark.parametrize("makes_way_s", [0.0, 60.0], ids=["silent ones make way", "the newest is refused"])
async def test_it_serves_few_at_once(
    fleet: Fleet, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch, makes_way_s: float
) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.peers.server.MAKES_WAY_S", makes_way_s)
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm = fleet.swarms["a"]
    assert swarm.server is not None

    def dial() -> WeightStream:
        member = PeerKeys.draw()
        fleet.list(member.public.hex(), member.public, 0)
        handshake = PeerHandshake(member.towards(swarm.public_key))
        return WeightStream(f"tcp://127.0.0.1:{swarm.port}", handshake, PULLED_S, lambda: None)

    def take_all(stack: ExitStack) -> list[WeightStream]:
        taken = [stack.enter_context(dial()) for _ in range(UPLOADS)]
        assert all(ask(stream) for stream in taken)
        return taken

    def is_served(stream: WeightStream) -> bool:
        try:
            return bool(ask(stream))
        except ConnectionError:
            return False

    with ExitStack() as stack:
        taken = await asyncio.to_thread(take_all, stack)
        newest = stack.enter_context(await asyncio.to_thread(dial))
        assert await asyncio.to_thread(is_served, newest) is not bool(makes_way_s)
        # Which of them was silent for longest is for their threads to say, each once what it sent has left it.
        served = [await asyncio.to_thread(is_served, stream) for stream in taken]
        assert served.count(False) == (0 if makes_way_s else 1)
        assert len(swarm.server._uploads) <= UPLOADS


def busy(seconds: float) -> Content:
    """What a core has to work on for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return content(b"x")


async def test_who_asks_for_what_takes_long_to_make_gets_half_a_core(fleet: Fleet) -> None:
    """Bytes alone were bounded: deltas to be undone for each chunk, or questions by the thousand, were not."""
    giver, taker = fleet.server("giver", lambda _: busy(0.02)), PeerKeys.draw()
    handshake = PeerHandshake(taker.towards(giver._keys.public))
    with await asyncio.to_thread(
        WeightStream, f"tcp://127.0.0.1:{giver.port}", handshake, PULLED_S, lambda: None
    ) as stream:
        begun = time.monotonic()
        for _ in range(20):
            assert await asyncio.to_thread(ask, stream)
        assert time.monotonic() - begun > 0.9 * 19 * 0.02 / UPLOAD_CORES


async def test_one_member_takes_no_place_of_another(fleet: Fleet, publisher: WeightPublisher) -> None:
    """A few connections that asked for something now and then kept all others out for as long as they liked."""
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm, greedy, modest = fleet.swarms["a"], PeerKeys.draw(), PeerKeys.draw()
    for name, keys in (("greedy", greedy), ("modest", modest)):
        fleet.list(name, keys.public, 0)

    def dial(keys: PeerKeys) -> WeightStream:
        handshake = PeerHandshake(keys.towards(swarm.public_key))
        return WeightStream(f"tcp://127.0.0.1:{swarm.port}", handshake, PULLED_S, lambda: None)

    def take_all(stack: ExitStack) -> list[WeightStream]:
        taken = [stack.enter_context(dial(greedy)) for _ in range(UPLOADS)]
        assert all(ask(stream) for stream in taken)
        return taken

    with ExitStack() as stack:
        newest = (await asyncio.to_thread(take_all, stack))[-1]
        assert await asyncio.to_thread(ask, stack.enter_context(await asyncio.to_thread(dial, modest)))
        assert await asyncio.to_thread(ask, newest)


async def test_strangers_take_no_place_of_a_members(fleet: Fleet, publisher: WeightPublisher) -> None:
    """Some that dialled again and again, without a key, kept members out for as long as they liked."""
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm, member = fleet.swarms["a"], PeerKeys.draw()
    assert swarm.server is not None
    fleet.list("member", member.public, 0)
    with ExitStack() as stack:
        oldest = stack.enter_context(socket.create_connection(("127.0.0.1", swarm.port), PULLED_S))
        for _ in range(HANDSHAKES + UPLOADS):
            stack.enter_context(socket.create_connection(("127.0.0.1", swarm.port), PULLED_S))
        handshake = PeerHandshake(member.towards(swarm.public_key))

        def ask() -> bool:
            with WeightStream(f"tcp://127.0.0.1:{swarm.port}", handshake, PULLED_S, lambda: None) as stream:
                return stream.answer(stream.ask(wire.GetManifest(0)), lambda size: memoryview(bytearray(size)))

        assert await asyncio.to_thread(ask)
        assert await asyncio.to_thread(oldest.recv, 1) == b""
        assert len(swarm.server._dialled) <= HANDSHAKES


async def test_where_no_thread_is_left_for_one_the_next_is_served(
    fleet: Fleet, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that lets agents in had ended."""
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm, member = fleet.swarms["a"], PeerKeys.draw()
    fleet.list("member", member.public, 0)
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        # Of the server's alone: the loop of this test starts some as well.
        if threading.current_thread() is threading.main_thread():
            return start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with socket.create_connection(("127.0.0.1", swarm.port), PULLED_S) as refused:
        assert await asyncio.to_thread(refused.recv, 1) == b""
    handshake = PeerHandshake(member.towards(swarm.public_key))

    def ask() -> bool:
        with WeightStream(f"tcp://127.0.0.1:{swarm.port}", handshake, PULLED_S, lambda: None) as stream:
            return stream.answer(stream.ask(wire.GetManifest(0)), lambda size: memoryview(bytearray(size)))

    assert await asyncio.to_thread(ask)


async def test_strangers_take_no_place_of_what_is_offered(
    fleet: Fleet, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.peers.offers.UNDIALLED_S", 0.1)
    ref = publisher.publish(0, weights(0).items(), FILES)
    behind = fleet.agent("behind")
    fleet.list("behind", fleet.swarms["behind"].public_key, 9)
    await pull(behind, ref)
    fleet.agent("joiner")
    await fleet.offered("joiner", by="behind")
    server = fleet.swarms["behind"].server
    with ExitStack() as strangers:
        for _ in range(HANDSHAKES + 4):
            strangers.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        async with asyncio.timeout(PULLED_S):
            while len(server._dialled) <= HANDSHAKES:  # noqa: ASYNC110 - a thread takes them in
                await asyncio.sleep(0.01)
        assert [one.is_own for one in server._dialled if one.is_own] == [True]
