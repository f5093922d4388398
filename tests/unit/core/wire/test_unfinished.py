"""Whose unfinished messages are cut off, and whose are not."""

from __future__ import annotations

import socket
import sys

import pytest

from polyrl.wire.unfinished import TCP_INFO_BYTES, UnfinishedMessages, received_bytes

MAX = 1000


def watching(*connections: int) -> UnfinishedMessages:
    messages = UnfinishedMessages(MAX)
    for connection in connections:
        messages.opened(connection)
    return messages


def test_who_holds_most_is_cut_off_until_the_others_are_within_the_bound() -> None:
    messages = watching(1, 2, 3)
    assert messages.check({1: 300, 2: 400, 3: 300}, drained=True) == []
    assert messages.check({1: 300, 2: 900, 3: 301}, drained=True) == [2]
    assert messages.check({1: 900, 2: 950, 3: 300}, drained=True) == [2, 1]


def test_what_was_handed_over_does_not_count_however_much_it_was() -> None:
    messages = watching(1)
    for sent in range(0, 100 * MAX, MAX // 2):
        assert messages.check({1: sent}, drained=True) == []
        messages.handed_over(1)


def test_what_came_after_the_message_that_was_handed_over_counts() -> None:
    """A small message, and a large one that never ends, in one go."""
    messages = watching(1)
    assert messages.check({1: 10}, drained=True) == []
    messages.handed_over(1)
    assert messages.check({1: 900}, drained=True) == []
    assert messages.check({1: 1011}, drained=True) == [1]


def test_small_messages_that_take_long_to_be_decided_hide_no_large_one_behind_them() -> None:
    messages = watching(1)
    messages.check({1: 100}, drained=True)
    for sent in (400, 700, 1000):
        messages.handed_over(1)
        assert messages.check({1: sent}, drained=False) == []
    messages.handed_over(1)
    assert messages.check({1: 1100}, drained=False) == [1]


def test_a_descriptor_that_is_used_again_is_another_connection() -> None:
    messages = watching(1, 2)
    messages.check({1: 900}, drained=True)
    messages.handed_over(1)
    messages.closed(1)
    messages.handed_over(1)
    assert messages.connections == (2,)
    messages.opened(1)
    assert messages.check({1: 900}, drained=True) == []
    assert messages.check({1: 1001}, drained=True) == [1], "what the one before was given is not this one's"
    messages.closed(1)
    assert messages.check({1: 5000}, drained=True) == [], "it is gone"


def test_checks_are_rarer_where_there_are_many_connections() -> None:
    assert watching().check_s == 0.1
    assert watching(*range(1000)).check_s == pytest.approx(0.6)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's TCP_INFO")
def test_the_kernel_says_what_a_connection_has_received() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        accepted, _ = server.accept()
        with accepted:
            for total in (70_000, 140_000):
                peer.sendall(bytes(70_000))
                left = 70_000
                while left:
                    left -= len(accepted.recv(left))
                info = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                assert received_bytes(info) == total
    assert received_bytes(bytes(104)) == 0
