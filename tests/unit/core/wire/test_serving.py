"""A receiver's connection without sockets: what is asked is answered, in order; no strange key, frame or order is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from copy import copy
from itertools import chain, pairwise, permutations

import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, strategies as st
from zmq.utils import z85

from polyrl.errors import InvalidData, ProtocolError
from polyrl.keys import key_bytes
from polyrl.weights import CHUNK_BYTES, MAX_CHUNK_BYTES
from polyrl.wire import FromPuller, GetChunk, GetManifest, ServeOffer, decode_from_peer, decode_from_puller, encode
from polyrl.wire.sealing import (
    FRAME_BYTES,
    GREETING,
    KEY_BYTES,
    LINE_BYTES,
    TAG_BYTES,
    Handshake,
    LastingKeys,
    Opener,
    Sealer,
    sealed_frames,
)
from polyrl.wire.serving import ABOUT_REQUESTS, BUFFER_BYTES, MAX_ASKED, SIZE_BYTES, Content, ServedConnection

PAIRS = {role: tuple(part.decode() for part in zmq.curve_keypair()) for role in ("trainer", "agent", "stranger")}
LARGE = bytes(range(256)) * (FRAME_BYTES // 256 + 7)
HELD = {b"large": LARGE, b"small": b"s"}


def lasting(role: str, peer: str) -> LastingKeys:
    return LastingKeys.of(PAIRS[role][1], PAIRS[role][0], PAIRS[peer][0])


def find(request: FromPuller) -> Content | None:
    data = HELD.get(request.hash) if isinstance(request, GetChunk) else b"manifest"
    return None if data is None else Content(memoryview(data), nullcontext)


class Receiver:
    """The other side of a connection, in memory."""

    def __init__(
        self,
        role: str = "agent",
        *,
        server: ServedConnection[FromPuller] | None = None,
        finds: Callable[[FromPuller], Content | None] = find,
    ) -> None:
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.server = server or ServedConnection(Handshake(lasting("trainer", "agent")), finds, decode_from_puller)
        handshake = Handshake(lasting(role, "trainer"))
        self.server.receive(GREETING + handshake.public)
        self.sealer, self.opener = handshake.finish(bytes(self.server.next(self.buffer)), dialled=True)

    def frames(self, request: FromPuller) -> bytes:
        body = encode(request)
        length = bytes(self.sealer.seal(len(body).to_bytes(2, "big"), ABOUT_REQUESTS, self.buffer))
        return length + bytes(self.sealer.seal(body, ABOUT_REQUESTS, self.buffer))

    def answer(self, request: FromPuller) -> bytes:
        size = memoryview(bytearray(SIZE_BYTES))
        self.opener.open(bytes(self.server.next(self.buffer)), encode(request), size)
        content = memoryview(bytearray(int.from_bytes(size, "big")))
        for begin, end in sealed_frames(len(content)):
            self.opener.open(bytes(self.server.next(self.buffer)), encode(request), content[begin:end])
        return bytes(content)


REQUESTS = (GetManifest(3), GetChunk(3, b"large"), GetChunk(3, b"gone"), GetChunk(3, b"small"))


@given(st.lists(st.integers(0, 400), max_size=12), st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=MAX_ASKED))
def test_answers_come_in_order_however_requests_are_cut(cuts: list[int], requests: list[FromPuller]) -> None:
    receiver = Receiver()
    stream = b"".join(receiver.frames(request) for request in requests)
    ends = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for begin, end in pairwise(ends):
        receiver.server.receive(stream[begin:end])
    for request in requests:
        held = find(request)
        assert receiver.answer(request) == (bytes(held.data) if held else b"")
    assert receiver.server.is_waiting
    assert receiver.server.is_authentic


def test_what_is_still_to_be_found_holds_up_what_was_asked_after_it() -> None:
    finding, woken = Future[Content | None](), []
    finds = [finding, Content(memoryview(b"second"), nullcontext)]
    handshake = Handshake(lasting("trainer", "agent"))
    server = ServedConnection(handshake, lambda _: finds.pop(0), decode_from_puller, wake=lambda: woken.append(1))
    receiver = Receiver(server=server)
    for request in REQUESTS[:2]:
        server.receive(receiver.frames(request))
    assert not server.is_waiting
    assert not len(server.next(receiver.buffer))
    assert server.is_waiting
    assert not woken
    finding.set_result(Content(memoryview(b"first"), nullcontext))
    assert woken
    assert not server.is_waiting
    assert [receiver.answer(request) for request in REQUESTS[:2]] == [b"first", b"second"]
    assert server.is_waiting


@pytest.mark.parametrize("size", [CHUNK_BYTES, MAX_CHUNK_BYTES])
def test_a_chunk_and_its_first_word_fill_lines_of_the_cache(size: int) -> None:
    """What comes after them lies then in its lines as it does where it is copied from: so it is copied fastest."""
    data = memoryview(bytes(size))
    receiver = Receiver(finds=lambda _: Content(data, nullcontext))
    receiver.server.receive(receiver.frames(GetManifest(0)))
    sizes = []
    while not receiver.server.is_waiting:
        sizes.append(len(receiver.server.next(receiver.buffer)))
    assert not any(piece % LINE_BYTES for piece in sizes)
    assert len(sizes) == 1 + size // (1 << 20)


@given(st.integers(0, 3 * FRAME_BYTES))
def test_frames_are_all_of_the_content_and_fit_a_room(size: int) -> None:
    frames = sealed_frames(size)
    assert [end - begin for begin, end in frames if not 0 < end - begin <= BUFFER_BYTES - Sealer.overhead] == []
    assert [place for begin, end in frames for place in range(begin, end, FRAME_BYTES)][:1] == [0] * bool(size)
    assert all(end == begin for (_, end), (begin, _) in pairwise(frames))
    assert sum(end - begin for begin, end in frames) == size


def test_who_has_another_key_is_not_answered() -> None:
    receiver = Receiver("stranger")
    with pytest.raises(ProtocolError, match="not sealed by who"):
        receiver.server.receive(receiver.frames(GetManifest(0)))
    assert not receiver.server.is_authentic


def test_who_has_an_agents_key_cannot_pass_for_the_trainer() -> None:
    """What he can compute of the secrets leaves out the trainer's lasting key with the one that the receiver made."""
    agent, receiver = lasting("agent", "trainer"), Handshake(lasting("agent", "trainer"))
    made = X25519PrivateKey.generate()
    public = made.public_key().public_bytes_raw()
    _, opener = receiver.finish(public, dialled=True)
    theirs, lasts, trainers = map(X25519PublicKey.from_public_bytes, (receiver.public, agent.public, agent.peer))
    known = made.exchange(theirs), made.exchange(lasts), agent.secret.exchange(trainers)
    salt = hashlib.sha256(GREETING + agent.public + receiver.public + agent.peer + public).digest()
    for parts in chain.from_iterable(permutations(known, number) for number in (1, 2, 3)):
        keys = HKDF(SHA256(), 2 * KEY_BYTES, salt, GREETING).derive(b"".join(parts))
        for key in (keys[:KEY_BYTES], keys[KEY_BYTES:]):
            frame = bytes(Sealer(key).seal(b"false", b"", memoryview(bytearray(BUFFER_BYTES))))
            with pytest.raises(ProtocolError, match="not sealed by who"):
                opener.open(frame, b"", memoryview(bytearray(5)))


def test_what_one_connection_said_is_worth_nothing_to_another_or_a_second_time() -> None:
    first, second = Receiver(), Receiver()
    frames = first.frames(GetManifest(0))
    with pytest.raises(ProtocolError, match="not sealed by who"):
        second.server.receive(frames)
    first.server.receive(frames)
    with pytest.raises(ProtocolError, match="not sealed by who"):
        first.server.receive(frames)


def offering() -> Receiver:
    return Receiver(server=ServedConnection(Handshake(lasting("trainer", "agent")), find, decode_from_peer))


def test_after_an_offer_the_side_that_was_dialled_asks() -> None:
    dialling = offering()
    dialling.server.receive(dialling.frames(ServeOffer()))
    keys = dialling.server.hand_over(ServeOffer)
    assert keys is not None
    answers = ServedConnection(Handshake(lasting("agent", "trainer")), find, decode_from_peer, dialling_keys(dialling))
    assert answers.is_waiting
    assert answers.is_authentic
    asking = copy(dialling)
    asking.server, (asking.sealer, asking.opener) = answers, keys
    for request in REQUESTS:
        answers.receive(asking.frames(request))
        held = find(request)
        assert asking.answer(request) == (bytes(held.data) if held else b"")


def dialling_keys(dialling: Receiver) -> tuple[Sealer, Opener]:
    return dialling.sealer, dialling.opener


def test_who_offers_may_not_speak_on() -> None:
    dialling = offering()
    dialling.server.receive(dialling.frames(ServeOffer()) + b"x")
    with pytest.raises(ProtocolError, match="speaks first"):
        dialling.server.hand_over(ServeOffer)


def test_one_that_asks_hands_nothing_over() -> None:
    dialling = offering()
    dialling.server.receive(dialling.frames(GetManifest(3)))
    assert dialling.server.hand_over(ServeOffer) is None
    dialling.answer(GetManifest(3))
    dialling.server.receive(dialling.frames(ServeOffer()))
    assert dialling.server.hand_over(ServeOffer) is None


def test_an_answer_to_another_request_is_none() -> None:
    receiver = Receiver()
    receiver.server.receive(receiver.frames(GetChunk(3, b"small")))
    with pytest.raises(ProtocolError, match="not sealed by who"):
        receiver.answer(GetChunk(3, b"large"))


def test_frames_in_another_order_do_not_open() -> None:
    receiver = Receiver()
    receiver.server.receive(receiver.frames(GetChunk(3, b"large")))
    receiver.server.next(receiver.buffer)
    receiver.server.next(receiver.buffer)
    last = bytes(receiver.server.next(receiver.buffer))
    with pytest.raises(ProtocolError, match="not sealed by who"):
        receiver.opener.open(last, encode(GetChunk(3, b"large")), memoryview(bytearray(len(last) - TAG_BYTES)))


def test_what_is_sent_is_not_what_is_hidden() -> None:
    receiver = Receiver()
    receiver.server.receive(receiver.frames(GetChunk(3, b"large")))
    receiver.server.next(receiver.buffer)
    assert LARGE[:32] not in bytes(receiver.server.next(receiver.buffer))


@pytest.mark.parametrize("number", [0, 1])
def test_keys_that_fix_the_secret_are_refused(number: int) -> None:
    public = number.to_bytes(32, "little")
    server = ServedConnection(Handshake(lasting("trainer", "agent")), find, decode_from_puller)
    with pytest.raises(ProtocolError, match="key is none"):
        server.receive(GREETING + public)


def test_each_direction_and_each_connection_has_keys_of_its_own() -> None:
    def sealed(part: Sealer) -> bytes:
        return bytes(part.seal(bytes(16), b"", memoryview(bytearray(BUFFER_BYTES))))

    one, two = Receiver(), Receiver()
    server = one.server._keys
    assert server is not None
    assert len({sealed(one.sealer), sealed(two.sealer), sealed(server[0])}) == 3
    assert isinstance(server[1], Opener)


def test_keys_of_key_files_are_their_bytes() -> None:
    for public, secret in PAIRS.values():
        assert (key_bytes(public), key_bytes(secret)) == (z85.decode(public.encode()), z85.decode(secret.encode()))
    with pytest.raises(InvalidData, match="no 32 bytes"):
        key_bytes("#" * 40)
