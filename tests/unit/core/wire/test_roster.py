"""Which agents hear of which others, and that who is gone is let in no more."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.sample import Pool
from polyrl.wire import Hello, Peer, Peers
from polyrl.wire.roster import PEER_KEY_BYTES, Roster, peer_of

A, B, C = (Peer(name, name.encode() * PEER_KEY_BYTES, f"tcp://10.0.0.{name}:5004") for name in "123")


def hello(**fields: Any) -> Hello:
    known = {"max_running": 1, "kv_tokens": 9, "max_context": 9, "weight_version": 0, "peer_key": b"k" * 32}
    return Hello(1, "e", **{"pool": Pool.SPOT, "peer_port": 5004, **known, **fields})


def test_others_know_an_agent_by_its_key_at_the_address_it_came_from() -> None:
    assert peer_of(hello(), "10.0.0.7") == Peer("e", b"k" * 32, "tcp://10.0.0.7:5004")
    assert peer_of(hello(), "[fd00::7]") == Peer("e", b"k" * 32, "tcp://[fd00::7]:5004")


@pytest.mark.parametrize("port", [0, -1, 1 << 16], ids=["none", "negative", "too large"])
def test_one_that_listens_nowhere_only_takes(port: int) -> None:
    assert peer_of(hello(peer_port=port), "10.0.0.7") == Peer("e", b"k" * 32)


def test_one_whose_address_is_not_known_only_takes() -> None:
    assert peer_of(hello(), "") == Peer("e", b"k" * 32)


@pytest.mark.parametrize("key", [b"", b"short", b"l" * 33], ids=["none", "short", "long"])
def test_one_without_a_key_takes_no_part(key: bytes) -> None:
    assert peer_of(hello(peer_key=key), "10.0.0.7") is None


def test_who_is_welcome_hears_of_all_and_the_others_of_it_first() -> None:
    roster = Roster()
    roster.welcome("1", A)
    roster.welcome("2", B)
    assert roster.messages() == [("1", Peers((A, B), whole=True)), ("2", Peers((A, B), whole=True))]
    assert not roster.has_news
    roster.welcome("3", C)
    assert roster.messages() == [("1", Peers((C,))), ("2", Peers((C,))), ("3", Peers((A, B, C), whole=True))]
    assert roster.messages() == []


def test_all_hear_who_is_gone_and_it_hears_nothing() -> None:
    roster = Roster()
    for name, peer in (("1", A), ("2", B), ("3", C)):
        roster.welcome(name, peer)
    roster.messages()
    roster.remove("2")
    assert roster.has_news
    assert roster.messages() == [("1", Peers((), ("2",))), ("3", Peers((), ("2",)))]
    roster.remove("2")
    assert not roster.has_news


def test_who_greets_again_is_no_news_to_others_but_hears_all() -> None:
    roster = Roster()
    roster.welcome("1", A)
    roster.welcome("2", B)
    roster.messages()
    roster.welcome("1", A)
    assert roster.messages() == [("1", Peers((A, B), whole=True))]


def test_one_that_comes_back_with_another_key_is_known_by_that_alone() -> None:
    roster, other = Roster(), Peer("1", b"o" * 32)
    roster.welcome("1", A)
    roster.welcome("2", B)
    roster.messages()
    roster.welcome("1", other)
    assert roster.messages() == [("2", Peers((other,))), ("1", Peers((other, B), whole=True))]


def test_one_that_comes_back_without_a_key_is_gone_for_others() -> None:
    roster = Roster()
    roster.welcome("1", A)
    roster.welcome("2", B)
    roster.messages()
    roster.welcome("1", None)
    assert roster.messages() == [("2", Peers((), ("1",)))]
