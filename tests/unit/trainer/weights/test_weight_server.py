"""Rooms for frames on their way: one that is free goes to whoever waits, whatever happens to who was first."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest
import zmq

from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl.wire.serving import Content
from polyrl_trainer.weights.server import WeightServer, _Peer, _ServingThread


class Asking:
    """A connection that always has something to send."""

    is_waiting = False
    is_authentic = True


def handshake() -> Handshake:
    public, secret = (part.decode() for part in zmq.curve_keypair())
    return Handshake(LastingKeys.of(secret, public, public))


@pytest.fixture
def thread() -> Iterator[_ServingThread]:
    """A serving thread of one room that is not started: the test takes its turns."""
    server = WeightServer("tcp://127.0.0.1:*", handshake, lambda _: Content(memoryview(b""), nullcontext))
    thread = _ServingThread(server, 1)
    yield thread
    server.close()
    for ours in (thread._wake, thread._waker, thread._selector):
        ours.close()


@pytest.fixture
def peers(thread: _ServingThread) -> Iterator[list[_Peer]]:
    """The first has the room, the others wait for it in order."""
    with ExitStack() as stack:
        made = []
        for _ in range(3):
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            assert theirs.fileno() >= 0
            peer = _Peer(ours, Asking(), begun=0.0, heard=0.0)  # type: ignore[arg-type]
            thread._peers.add(peer)
            thread._selector.register(ours, 1, peer)
            made.append(peer)
            thread._get_room(peer)
        yield made


def is_called(thread: _ServingThread, peer: _Peer) -> bool:
    return thread._selector.get_key(peer.socket).events == 3


def test_who_ends_when_it_is_its_turn_gives_the_turn_on(thread: _ServingThread, peers: list[_Peer]) -> None:
    first, second, third = peers
    thread._give_room(first)
    assert is_called(thread, second)
    assert not is_called(thread, third)
    thread._end(second)
    assert is_called(thread, third)


def test_who_got_a_room_out_of_turn_takes_no_second_turn(thread: _ServingThread, peers: list[_Peer]) -> None:
    first, second, third = peers
    thread._give_room(first)
    assert thread._get_room(third)
    assert not thread._get_room(second)
    thread._give_room(third)
    assert is_called(thread, second)
    assert not thread._waiting
