"""Buffers for frames on their way: one that is free goes to whoever waits, whatever happens to who was first."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest
import zmq

from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl.wire.serving import Content
from polyrl_trainer.weights.server import (
    ALONE_FRAMES,
    LEAST_READ,
    MAKES_WAY_S,
    STALL_S,
    WeightServer,
    _Peer,
    _ServingThread,
)


class Asking:
    """A connection that always has something to send."""

    is_waiting = False
    is_authentic = True
    requests = 0

    def receive(self, data: bytes) -> None:
        """A request ends with a dot."""
        self.requests += data.count(b".")

    def next(self, buffer: memoryview) -> memoryview:
        return buffer


def handshake() -> Handshake:
    public, secret = (part.decode() for part in zmq.curve_keypair())
    return Handshake(LastingKeys.of(secret, public, public))


ROOMS = 1
CONNECTIONS = 32


@pytest.fixture
def thread() -> Iterator[_ServingThread]:
    """A serving thread of one buffer that is not started: the test takes its turns."""
    server = WeightServer("tcp://127.0.0.1:*", handshake, lambda _: Content(memoryview(b""), nullcontext))
    thread = _ServingThread(server, ROOMS, CONNECTIONS)
    yield thread
    server.close()
    for ours in (thread._wake, thread._waker, thread._selector):
        ours.close()


@pytest.fixture
def peers(thread: _ServingThread) -> Iterator[list[_Peer]]:
    """The first has the buffer, the others wait for it in order."""
    with ExitStack() as stack:
        made = [connect(thread, stack)[0] for _ in range(3)]
        for peer in made:
            thread._get_buffer(peer)
        yield made


def connect(thread: _ServingThread, stack: ExitStack, address: str = "10.0.0.1") -> tuple[_Peer, socket.socket]:
    """A connection from an address, and its other end."""
    ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
    ours.setblocking(False)
    now = time.monotonic()
    peer = _Peer(ours, Asking(), begun=now, heard=now, address=address)  # type: ignore[arg-type]
    thread._peers.add(peer)
    thread._selector.register(ours, 1, peer)
    return peer, theirs


def is_called(thread: _ServingThread, peer: _Peer) -> bool:
    return thread._selector.get_key(peer.socket).events == 3


def test_who_ends_when_it_is_its_turn_gives_the_turn_on(thread: _ServingThread, peers: list[_Peer]) -> None:
    first, second, third = peers
    thread._give_buffer(first)
    assert is_called(thread, second)
    assert not is_called(thread, third)
    thread._end(second)
    assert is_called(thread, third)


def test_who_got_a_room_out_of_turn_takes_no_second_turn(thread: _ServingThread, peers: list[_Peer]) -> None:
    first, second, third = peers
    thread._give_buffer(first)
    assert thread._get_buffer(third)
    assert not thread._get_buffer(second)
    thread._give_buffer(third)
    assert is_called(thread, second)
    assert not thread._waiting


class Counting(Asking):
    """How many pieces, which the system always takes, were sent."""

    def __init__(self) -> None:
        self.pieces = 0

    def next(self, buffer: memoryview) -> memoryview:
        self.pieces += 1
        return buffer[:64]


def test_who_is_alone_takes_several_frames_a_turn_and_no_room_beyond_it(thread: _ServingThread) -> None:
    with ExitStack() as stack:
        alone, _ = connect(thread, stack)
        alone.connection = Counting()  # type: ignore[assignment]
        thread._select(alone, 3)
        thread._take_turns()
        assert alone.connection.pieces == ALONE_FRAMES  # type: ignore[attr-defined]
        assert alone.buffer is None
        thread._waiting.append(alone)  # as good as another one: who gets its buffer is none of this test's business
        thread._take_turns()
        assert alone.connection.pieces == ALONE_FRAMES + 1  # type: ignore[attr-defined]


def test_of_two_that_are_ready_each_sends_a_frame_in_turn(thread: _ServingThread) -> None:
    with ExitStack() as stack:
        both = [connect(thread, stack)[0] for _ in range(2)]
        for peer in both:
            peer.connection = Counting()  # type: ignore[assignment]
            thread._select(peer, 3)
        for turn in range(3):
            thread._take_turns()
            assert [peer.connection.pieces for peer in both] == [turn + 1] * 2  # type: ignore[attr-defined]


def test_asking_for_more_keeps_no_room(thread: _ServingThread, peers: list[_Peer]) -> None:
    """One byte of a request every few seconds kept a receiver that read nothing in its buffer for ever."""
    first, _, third = peers
    with ExitStack() as stack:
        asks, theirs = connect(thread, stack)
        thread._give_buffer(first)
        assert thread._get_buffer(asks)
        taken_at = asks.heard
        theirs.send(b"1.")
        thread._read(asks)
        assert asks.heard == taken_at
        thread._end_overdue(taken_at + STALL_S - 0.1)
        assert asks in thread._peers
        thread._end_overdue(taken_at + STALL_S + 0.1)
        assert asks not in thread._peers
    assert is_called(thread, third)


def test_reading_a_little_keeps_no_room_and_reading_on_does(thread: _ServingThread, peers: list[_Peer]) -> None:
    with ExitStack() as stack:
        thread._give_buffer(peers[0])
        reads, theirs = connect(thread, stack)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        thread._write(reads)
        since, reads.read = reads.heard, 0
        while reads.left and reads.heard == since:
            assert reads.read < LEAST_READ
            theirs.recv(16 << 10)
            thread._write(reads)
        assert reads.heard > since
        assert reads.read == 0
        since = reads.heard
        while not reads.read:
            theirs.recv(16 << 10)
            thread._write(reads)
        assert reads.heard == since


def test_the_last_rooms_are_for_addresses_that_hold_none(thread: _ServingThread) -> None:
    eight = _ServingThread(thread._server, 8, CONNECTIONS)
    with ExitStack() as stack:
        stack.callback(eight._selector.close)
        one = [connect(eight, stack)[0] for _ in range(10)]
        assert [eight._get_buffer(peer) for peer in one] == [True] * 6 + [False] * 4
        other, again = (connect(eight, stack, "10.0.0.2")[0] for _ in range(2))
        assert eight._get_buffer(other)
        assert not eight._get_buffer(again), "it holds one, and only a spare one is left"
        eight._give_buffer(other)
        assert is_called(eight, again), "its own turn comes before those who hold the others"
        assert not any(is_called(eight, peer) for peer in one)
        for ours in (eight._wake, eight._waker):
            ours.close()


def test_a_connection_that_asks_for_nothing_whole_is_idle(thread: _ServingThread) -> None:
    """One byte of a request every minute kept a connection for ever, and 5,120 of them the whole server."""
    with ExitStack() as stack:
        drips, theirs = connect(thread, stack)
        since = drips.heard
        theirs.send(b"1")
        thread._read(drips)
        assert drips.heard == since
        theirs.send(b"2.")
        thread._read(drips)
        assert drips.heard > since


def arrive(thread: _ServingThread, stack: ExitStack, address: str) -> _Peer | None:
    """A new connection from an address; None: it was not let in."""
    before, (ours, _) = set(thread._peers), [stack.enter_context(end) for end in socket.socketpair()]
    thread.adopt(ours, address)
    thread._take_new()
    return next(iter(thread._peers - before), None)


@pytest.mark.parametrize(
    ("many", "few", "newcomer", "silent", "ended"),
    [
        pytest.param(31, 1, "10.0.0.3", 0.0, "10.0.0.1", id="of the address that has most"),
        pytest.param(31, 1, "10.0.0.1", 0.0, "10.0.0.1", id="also when that one comes again"),
        pytest.param(16, 16, "10.0.0.3", MAKES_WAY_S + 1.0, "10.0.0.1", id="who was silent"),
        pytest.param(16, 16, "10.0.0.3", 0.0, "", id="nobody, where no address has more than half, and all ask"),
    ],
)
def test_who_makes_way_for_a_new_connection(
    thread: _ServingThread, many: int, few: int, newcomer: str, silent: float, ended: str
) -> None:
    with ExitStack() as stack:
        peers = [connect(thread, stack, "10.0.0.1")[0] for _ in range(many)]
        peers += [connect(thread, stack, "10.0.0.2")[0] for _ in range(few)]
        oldest = peers[2]
        oldest.heard -= max(silent, 0.1)
        came = arrive(thread, stack, newcomer)
        gone = [peer for peer in peers if peer not in thread._peers]
        assert bool(came) is bool(ended)
        assert {peer.address for peer in gone} == ({ended} if ended else set())
        assert (oldest in gone) is bool(ended)
        assert len(gone) <= CONNECTIONS // 16
        for peer in tuple(thread._peers):
            thread._end(peer)


class Full:
    """A listener whose process may open no more."""

    def accept(self) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_process_that_can_open_nothing_more_is_not_asked_again_and_again(
    thread: _ServingThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited there had it use half a core."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread.listen(listener)
        monkeypatch.setattr(thread._server, "_listener", Full())
        thread._accept()
        assert listener not in thread._selector.get_map()
        thread._listen_again()
        assert listener in thread._selector.get_map()
        monkeypatch.undo()


def test_a_connection_that_comes_as_the_server_ends_is_closed(thread: _ServingThread) -> None:
    """It stayed open until its memory was collected, and who had dialled waited for an answer."""
    thread._stopping = True
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
        thread.adopt(ours, "10.0.0.1")
        thread.run()
        theirs.settimeout(5.0)
        assert theirs.recv(1) == b""


def test_taking_a_room_spells_no_peer_out(thread: _ServingThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frame by frame a peer that waits for nothing was looked for by an error, whose text holds all of the peer."""

    def spelled(peer: _Peer) -> str:
        raise AssertionError("a peer was spelled out")

    monkeypatch.setattr(_Peer, "__repr__", spelled)
    with ExitStack() as stack:
        peer, _ = connect(thread, stack)
        thread._get_buffer(peer)
        assert peer.buffer is not None
        thread._end(peer)
