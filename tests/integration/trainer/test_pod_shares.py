"""What the first pod asks the others about their shares of weights: several things at once, each answered or not in
time, over connections that are made anew."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from polyrl.errors import InvalidData, RunFailed
from polyrl_operator.secret import write_run_keys
from polyrl_trainer.backends.fsdp.heartbeat import SILENT_S, RankHeartbeat
from polyrl_trainer.backends.fsdp.pods.link import GONE_S, PodLink
from polyrl_trainer.backends.fsdp.pods.other_pods import OtherPods
from polyrl_trainer.backends.fsdp.pods.shares import CONNECTIONS, ShareAnswers, ShareLinks
from polyrl_trainer.testing.pods import pod_keys

WITHIN_S = 20.0
LARGE = bytes(range(256)) * (3 << 12)
"""Several frames."""


@dataclass
class Share:
    """Says what it was asked."""

    pod: int
    hang: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        return f"tcp://pod-{self.pod}:5003"

    @endpoint.setter
    def endpoint(self, _: str) -> None:
        raise AssertionError

    def answer(self, request: bytes) -> bytes:
        if request == b"hang":
            self.hang.wait(WITHIN_S)
        if request == b"fail":
            raise InvalidData("the memory is full")
        return b"%d " % self.pod + request


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[tuple[ShareLinks, list[Share]]]:
    write_run_keys(tmp_path / "keys")
    keys, heartbeat, shares = pod_keys(tmp_path), RankHeartbeat(SILENT_S), [Share(1), Share(2)]
    others = OtherPods(2, 0, keys)
    others.watch(heartbeat, lambda *_: None)
    dial = partial(PodLink.dial, ("127.0.0.1", others.port), keys)
    answers = [ShareAnswers(dial, share.pod, share) for share in reversed(shares)]
    yield others.shares, shares
    for one in answers:
        one.close()
    for share in shares:
        share.hang.set()
    others.end_all(done=True)
    others.close()
    heartbeat.close()


def test_each_pod_answers_for_itself(pods: tuple[ShareLinks, list[Share]]) -> None:
    links, _ = pods
    assert links.endpoints() == ("tcp://pod-1:5003", "tcp://pod-2:5003")
    assert links.ask(0, b"", WITHIN_S) == b"1 "
    assert links.ask(1, LARGE, WITHIN_S) == b"2 " + LARGE
    with pytest.raises(RunFailed, match="pod 2 of the trainer: InvalidData: the memory is full"):
        links.ask(1, b"fail", WITHIN_S)
    assert links.ask(1, b"again", WITHIN_S) == b"2 again"


def test_one_that_hangs_is_given_up_and_others_are_answered_meanwhile(pods: tuple[ShareLinks, list[Share]]) -> None:
    links, shares = pods
    for _ in range(CONNECTIONS - 1):
        began = time.monotonic()
        with pytest.raises(ConnectionAbortedError, match="pod 1 did not answer"):
            links.ask(0, b"hang", 0.2)
        assert time.monotonic() - began < WITHIN_S / 2
    assert links.ask(0, b"beside", WITHIN_S) == b"1 beside", "no late answer is taken for this one's"
    with pytest.raises(ConnectionAbortedError, match="pod 1 did not answer"):
        links.ask(0, b"hang", 0.2)
    shares[0].hang.set()
    for _ in range(3 * CONNECTIONS):  # none of the first connections is left
        assert links.ask(0, b"later", WITHIN_S) == b"1 later"


@pytest.mark.parametrize("broken", range(1, CONNECTIONS + 1))
def test_connections_that_break_unused_are_replaced_by_others(
    pods: tuple[ShareLinks, list[Share]], broken: int
) -> None:
    links, _ = pods
    free = links._free[0]
    assert comes(lambda: len(free) == CONNECTIONS)
    for link in list(free)[-broken:]:
        link._connection.shutdown(socket.SHUT_RDWR)
    assert links.ask(0, b"all the same", WITHIN_S) == b"1 all the same"
    assert comes(lambda: len(free) == CONNECTIONS and not any(link.has_ended() for link in free)), (
        "none of them is left"
    )


def test_a_connection_that_breaks_while_an_answer_is_awaited_costs_nothing(
    pods: tuple[ShareLinks, list[Share]],
) -> None:
    links, shares = pods
    assert comes(lambda: len(links._free[0]) == CONNECTIONS)
    asked, answers = links._free[0][-1], list[bytes]()
    asking = threading.Thread(target=lambda: answers.append(links.ask(0, b"hang", WITHIN_S)), daemon=True)
    asking.start()
    assert comes(lambda: asked not in links._free[0])
    asked._connection.shutdown(socket.SHUT_RDWR)
    shares[0].hang.set()
    asking.join(WITHIN_S)
    assert answers == [b"1 hang"]


def test_once_all_is_over_nobody_waits_for_a_connection(pods: tuple[ShareLinks, list[Share]]) -> None:
    links, _ = pods
    links.endpoints()
    links.close()
    with pytest.raises(TimeoutError, match="no connection to pod 1"):
        links.ask(0, b"", WITHIN_S)


def test_both_sides_notice_that_the_network_between_them_is_gone(pods: tuple[ShareLinks, list[Share]]) -> None:
    links, _ = pods
    assert comes(lambda: all(len(free) == CONNECTIONS for free in links._free))
    known = [one for one in gc.get_objects() if isinstance(one, PodLink) and one._connection.fileno() >= 0]
    assert len(known) == 2 * 2 * CONNECTIONS
    for link in known:
        assert link._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert link._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == GONE_S * 1000


def comes(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + WITHIN_S
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()
