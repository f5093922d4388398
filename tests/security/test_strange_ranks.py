"""Another account of the machine meets no rank of the learner: what listens answers nobody, and the group goes on."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import psutil
import pytest

from polyrl.errors import RunFailed
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.fsdp import ranks
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.testing.backend_conformance import MODEL, OPTIMIZER, draw_samples, take_step

WAIT_SECONDS = 120.0
SILENT_S = 5.0
"""After 3 a rank was taken for lost on a machine that was busy with other tests."""
ANSWER_S = 0.5
"""From a question to an answer of torch's store, which takes a millisecond."""


def text(content: bytes) -> bytes:
    """As torch's store frames it."""
    return struct.pack("Q", len(content)) + content


QUESTIONS = [
    # To torch's TCPStore: its magic number, then whether there is such a key.
    struct.pack("=BI", 0, 0x3C85F7CE) + struct.pack("=B", 5) + struct.pack("Q", 1) + text(b"/beat/1"),
    # To gloo: the number of a pair that it may wait for.
    struct.pack("Q", 1),
    b"GET / HTTP/1.1\r\n\r\n",
]


@pytest.fixture
def learning() -> Iterator[LearnerGroup]:
    group = LearnerGroup(2, "cpu", threads=1, wait_seconds=WAIT_SECONDS, silent_s=SILENT_S)
    try:
        yield group
    finally:
        group.close()


def listening_ports() -> set[int]:
    """Of this process and those it started."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = (one for process in family for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return {one.laddr.port for one in found}


def knock(port: int, question: bytes, open_ones: ExitStack) -> bytes:
    """What is answered; the connection stays."""
    stranger = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), ANSWER_S))
    stranger.settimeout(ANSWER_S)
    with suppress(OSError):
        stranger.sendall(question)
        return stranger.recv(1)
    return b""


def test_a_stranger_who_knows_all_ports_learns_nothing_and_ends_nothing(learning: LearnerGroup) -> None:
    backend = learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    take_step(backend, [draw_samples(0, 8)])
    with ExitStack() as open_ones:
        answers = [knock(port, question, open_ones) for port in listening_ports() for question in QUESTIONS]
        assert answers, "gloo listens"
        assert not any(answers)
        began = time.monotonic()
        while time.monotonic() < began + 1.2 * SILENT_S:  # so long that silence would show
            backend.forward_backward(draw_samples(0, 8), sft_loss).result(WAIT_SECONDS)
            backend.optim_step(8.0).result(WAIT_SECONDS)
    assert learning._why_lost() is None


def test_a_connection_to_another_account_ends_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "strangers_here", lambda: [65534])
    group = LearnerGroup(2, "cpu", threads=1, wait_seconds=WAIT_SECONDS, silent_s=SILENT_S)
    try:
        with pytest.raises(RunFailed, match=r"another account \(uid 65534\)"):
            group.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    finally:
        group.close()
