"""Who reaches the first pod of a trainer and has not the trainer's keys is no pod of it, and keeps none out."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from polyrl.errors import GroupLeft, GroupLost, ProtocolError
from polyrl.wire.sealing import LastingKeys
from polyrl_operator.secret import write_run_keys
from polyrl_trainer.backends.fsdp.heartbeat import RankHeartbeat
from polyrl_trainer.backends.fsdp.pods.link import PROTOCOL, PodLink
from polyrl_trainer.backends.fsdp.pods.messages import (
    HelloMessage,
    LeavingMessage,
    LostMessage,
    PodMessage,
    WelcomeMessage,
)
from polyrl_trainer.backends.fsdp.pods.other_pods import HANDSHAKES, OtherPods
from polyrl_trainer.testing.pods import pod_keys

WAIT_S = 10.0
RANDOM_KEY = bytes(range(32))


class FirstPod:
    """With one other pod to come, and what it noted."""

    def __init__(self, folder: Path) -> None:
        self.losses: list[tuple[GroupLost, bool]] = []
        self.noted = threading.Event()
        self.links: list[PodLink] = []
        self.heartbeat = RankHeartbeat()
        self.others = OtherPods(1, 0, pod_keys(folder))
        self.others.watch(self.heartbeat, self.note)

    def note(self, why: GroupLost, echo: bool) -> None:
        self.losses.append((why, echo))
        self.noted.set()

    def join(self, keys: LastingKeys, message: PodMessage) -> PodLink:
        link = PodLink.dial(("127.0.0.1", self.others.port), keys)
        self.links.append(link)
        link.send(message)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.heartbeat.close()
        self.others.end_all(done=False)
        self.others.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run_keys(tmp_path / "keys")
    return tmp_path


@pytest.fixture
def first(folder: Path) -> Iterator[FirstPod]:
    made = FirstPod(folder)
    yield made
    made.close()


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\n\r\n" + bytes(64), b"", PROTOCOL + RANDOM_KEY + bytes(600), PROTOCOL + bytes(32)],
    ids=["another protocol", "silence", "no key of ours", "a key that nobody makes"],
)
def test_a_stranger_is_no_pod_and_keeps_none_out(folder: Path, first: FirstPod, words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", first.others.port), WAIT_S) as stranger:
        stranger.sendall(words)
        link = first.join(pod_keys(folder), HelloMessage(1))
        assert isinstance(link.next(), WelcomeMessage)
        first.others.wait(WAIT_S)
        link.close()
    assert first.noted.wait(WAIT_S)
    assert [(type(why), str(why)) for why, _ in first.losses] == [(GroupLeft, "pod 1 of the trainer is gone")]


def test_strangers_who_never_finish_a_handshake_keep_no_pod_out(folder: Path, first: FirstPod) -> None:
    """A byte now and then held each of a few places for an hour, and pods waited behind them."""
    with ExitStack() as stack:
        for _ in range(HANDSHAKES + 50):
            stack.enter_context(socket.create_connection(("127.0.0.1", first.others.port), WAIT_S)).send(PROTOCOL[:1])
        assert isinstance(first.join(pod_keys(folder), HelloMessage(1)).next(), WelcomeMessage)


def test_who_takes_all_descriptors_keeps_no_pod_out_afterwards(
    folder: Path, first: FirstPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that lets pods in had ended."""
    accept, failed = socket.socket.accept, threading.Event()

    def full(listener: socket.socket) -> tuple[socket.socket, object]:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", full)
    with ExitStack() as stack:
        for _ in range(2):  # the first is still taken by the call that waits already
            stack.enter_context(socket.create_connection(("127.0.0.1", first.others.port), WAIT_S))
        assert failed.wait(WAIT_S)
    assert isinstance(first.join(pod_keys(folder), HelloMessage(1)).next(), WelcomeMessage)


def test_who_takes_all_threads_keeps_no_pod_out_afterwards(
    folder: Path, first: FirstPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with socket.create_connection(("127.0.0.1", first.others.port), WAIT_S) as refused:
        assert refused.recv(1) == b""
    assert isinstance(first.join(pod_keys(folder), HelloMessage(1)).next(), WelcomeMessage)


def test_refused_connections_fill_no_log(first: FirstPod) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", first.others.port), WAIT_S) as stranger:
                stranger.sendall(bytes(64))
                with suppress(ConnectionError):
                    assert stranger.recv(1) == b""
    assert 0 < len(logs) < 10


def test_a_byte_now_and_then_is_no_handshake(first: FirstPod, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline was that of each byte, so a stranger kept his place for an hour."""
    monkeypatch.setattr("polyrl_trainer.backends.fsdp.pods.link.POD_HANDSHAKE_S", 0.5)
    with socket.create_connection(("127.0.0.1", first.others.port), WAIT_S) as stranger:
        stranger.settimeout(0.2)
        for byte in PROTOCOL:
            try:
                stranger.send(bytes([byte]))
                if stranger.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    pytest.fail("it may still say a byte now and then")


@pytest.mark.parametrize("public", [False, True], ids=["another run", "who knows this run's public key"])
def test_without_the_trainers_secret_nothing_opens(folder: Path, first: FirstPod, tmp_path: Path, public: bool) -> None:
    write_run_keys(tmp_path / "another" / "keys")
    theirs, ours = pod_keys(tmp_path / "another"), pod_keys(folder)
    link = first.join(replace(ours, secret=theirs.secret) if public else theirs, HelloMessage(1))
    with pytest.raises((OSError, ProtocolError)):
        link.next()
    assert first.losses == []


@pytest.mark.parametrize(
    "message", [HelloMessage(0), HelloMessage(2), LeavingMessage()], ids=["the first", "too many", "no hello"]
)
def test_only_a_pod_of_this_trainer_is_let_in(folder: Path, first: FirstPod, message: PodMessage) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        first.join(pod_keys(folder), message).next()


def test_who_awaits_others_stops_when_it_is_over(first: FirstPod) -> None:
    """The first pod was asked to leave, and its process stayed until the others came."""
    asked = threading.Timer(0.0, lambda: first.others.end_all(done=False))
    asked.start()
    with pytest.raises(GroupLost, match="before all pods of the trainer had come"):
        first.others.wait(WAIT_S)
    asked.join()


def test_a_loss_says_whether_it_may_be_an_echo(folder: Path, first: FirstPod) -> None:
    link = first.join(pod_keys(folder), HelloMessage(1))
    assert isinstance(link.next(), WelcomeMessage)
    link.send(LostMessage("rank 2 of the learner's 4 ended with exit code 1", echo=True))
    assert first.noted.wait(WAIT_S)
    ((why, echo),) = first.losses
    assert str(why) == "rank 2 of the learner's 4 ended with exit code 1"
    assert echo


def test_a_pod_that_comes_a_second_time_was_lost(folder: Path, first: FirstPod) -> None:
    assert isinstance(first.join(pod_keys(folder), HelloMessage(1)).next(), WelcomeMessage)
    first.join(pod_keys(folder), HelloMessage(1))
    assert first.noted.wait(WAIT_S)
    assert "pod 1 of the trainer was started again" in str(first.losses[0][0])
