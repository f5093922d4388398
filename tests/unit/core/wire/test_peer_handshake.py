"""Connections between agents: both must have the keys that the manager named them by, and each has its own."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from polyrl.errors import ProtocolError
from polyrl.wire import FromPeer, GetHeld, GetManifest, decode_from_peer, decode_from_puller, encode
from polyrl.wire.sealing import GREETING, Handshake, PeerHandshake, PeerKeys, PeerReception
from polyrl.wire.serving import ABOUT_REQUESTS, BUFFER_BYTES, SIZE_BYTES, Content, ServedConnection

SERVER, AGENT, STRANGER = (PeerKeys.draw() for _ in range(3))
ASKED = GetHeld(b"hash")


def find(request: FromPeer) -> Content:
    return Content(memoryview(b"held"), nullcontext)


def served(admitted: PeerKeys = AGENT) -> ServedConnection[FromPeer]:
    reception = PeerReception(SERVER, lambda public: public == admitted.public)
    return ServedConnection(reception, find, decode_from_peer)


def ask(server: ServedConnection[FromPeer], keys: PeerKeys, towards: bytes = SERVER.public) -> bytes:
    """Greets, and asks; returns what the answer to it says."""
    buffer, handshake = memoryview(bytearray(BUFFER_BYTES)), PeerHandshake(keys.towards(towards))
    server.receive(handshake.greeting)
    sealer, opener = handshake.finish(bytes(server.next(buffer)), dialled=True)
    body = encode(ASKED)
    server.receive(bytes(sealer.seal(len(body).to_bytes(2, "big"), ABOUT_REQUESTS, buffer)))
    server.receive(bytes(sealer.seal(body, ABOUT_REQUESTS, buffer)))
    size = memoryview(bytearray(SIZE_BYTES))
    opener.open(bytes(server.next(buffer)), body, size)
    content = memoryview(bytearray(int.from_bytes(size, "big")))
    opener.open(bytes(server.next(buffer)), body, content)
    return bytes(content)


def test_an_agent_on_the_list_is_answered() -> None:
    server = served()
    assert ask(server, AGENT) == b"held"
    assert server.is_authentic


def test_one_that_is_not_on_the_list_gets_no_byte() -> None:
    server = served()
    with pytest.raises(ProtocolError, match="not an agent on the manager's list"):
        ask(server, STRANGER)
    assert server.is_waiting, "nothing is to be sent"


def test_one_that_shows_anothers_key_cannot_ask() -> None:
    server, thief = served(), PeerKeys(STRANGER.secret, AGENT.public)
    with pytest.raises(ProtocolError, match="not sealed by who"):
        ask(server, thief)
    assert not server.is_authentic


def test_one_that_passes_for_the_server_cannot_answer() -> None:
    """Who dials has another agent's key in mind."""
    with pytest.raises(ProtocolError, match="not sealed by who"):
        ask(served(), AGENT, towards=STRANGER.public)


def test_a_receiver_of_the_publisher_is_none_of_agents_and_the_other_way_round() -> None:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    handshake = Handshake(AGENT.towards(SERVER.public))
    server = served()
    with pytest.raises(ProtocolError, match="not an agent on the manager's list"):
        server.receive(handshake.greeting + bytes(PeerReception.greeting_bytes - len(handshake.greeting)))
    publisher = ServedConnection(Handshake(SERVER.towards(AGENT.public)), find, decode_from_puller)
    with pytest.raises(ProtocolError, match="not a receiver of weights"):
        publisher.receive(PeerHandshake(AGENT.towards(SERVER.public)).greeting)
    publisher = ServedConnection(Handshake(SERVER.towards(AGENT.public)), find, decode_from_puller)
    publisher.receive(GREETING + handshake.public)
    publisher.next(buffer)


def test_each_process_has_a_pair_of_its_own() -> None:
    assert len({SERVER.public, AGENT.public, STRANGER.public, PeerKeys.draw().public}) == 4


def test_the_publisher_answers_no_question_of_agents() -> None:
    with pytest.raises(ProtocolError):
        decode_from_puller(encode(ASKED))
    assert decode_from_peer(encode(GetManifest(3))) == GetManifest(3)
