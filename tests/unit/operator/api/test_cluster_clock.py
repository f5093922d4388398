"""The cluster's time from whole seconds on its answers: near enough after one, nearer with each, whatever our clock
does."""

from __future__ import annotations

import random
from email.utils import formatdate

import pytest

from polyrl_operator.api.client import ClusterClock

BEGAN = 1_000_000.4
"""Of the cluster, Unix seconds, when the steady clock shows 0."""


class Server:
    """Time, and answers that take theirs."""

    def __init__(self, wrong_s: float) -> None:
        self.at, self.leapt_s = 0.0, 0.0
        self.clock = ClusterClock(wall=lambda: BEGAN + wrong_s, steady=lambda: self.at)

    @property
    def truth(self) -> float:
        return BEGAN + self.at + self.leapt_s

    def answer(self, there_s: float = 0.0, back_s: float = 0.0) -> None:
        sent_at = self.at
        self.at += there_s
        date = formatdate(self.truth, usegmt=True)
        self.at += back_s
        self.clock.synchronize(date, sent_at)

    @property
    def error(self) -> float:
        return abs(self.clock.now() - self.truth)


@pytest.mark.parametrize("wrong_s", [0.0, -300.0, 300.0, 1e9])
def test_one_answer_puts_it_right_to_the_second(wrong_s: float) -> None:
    server = Server(wrong_s)
    server.answer()
    assert server.error <= 1.0


def test_a_right_clock_stays_as_it_is() -> None:
    server = Server(0.0)
    for _ in range(100):
        server.answer(0.02, 0.03)
        server.at += 0.37
        assert server.error < 1e-6


def test_a_slow_answer_widens_the_bounds_and_spoils_nothing() -> None:
    server = Server(300.0)
    server.answer()
    server.answer(there_s=4.0, back_s=5.0)
    assert server.error <= 1.0


def test_many_answers_make_it_exact(seed: int) -> None:
    draw = random.Random(seed)
    server = Server(-300.0)
    for _ in range(300):
        server.answer(draw.uniform(0.001, 0.05), draw.uniform(0.001, 0.05))
        server.at += draw.uniform(0.0, 2.0)
    assert server.error < 0.3


@pytest.mark.parametrize("leap_s", [-300.0, 300.0])
def test_a_clusters_clock_that_is_set_is_followed(leap_s: float) -> None:
    server = Server(0.0)
    server.answer()
    server.leapt_s = leap_s
    server.at += 5.0
    server.answer()
    assert server.error <= 1.0


@pytest.mark.parametrize("date", [None, "", "yesterday", "Sat, 99 Nov 2026 22:00:00 GMT"])
def test_an_answer_without_a_date_says_nothing(date: str | None) -> None:
    server = Server(0.0)
    server.clock.synchronize(date, 0.0)
    assert server.error < 1e-6
