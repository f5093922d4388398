"""What receivers take is measured where it leaves the machine, not where the system's buffers take it."""

from __future__ import annotations

import pytest

from polyrl_trainer.weights.throughput import SAMPLE_S, Throughput

MB = 1 << 20


def test_bulk_counts_while_it_flows_and_pauses_do_not() -> None:
    measured, now = Throughput(), 100.0
    for sent, after in [(MB, 0.0), (MB, 0.01), (MB, 0.01), (200, 0.05), (300, 0.05), (MB, 9.0)]:
        now += after
        measured.send(sent, now)
    measured.sample(0, now)
    assert (measured.bytes, measured.seconds) == (2 * MB, pytest.approx(0.02))


@pytest.mark.parametrize("speed", [MB // 2, 10 * MB, 30 * MB], ids=["4 Mbit/s", "80 Mbit/s", "240 Mbit/s"])
def test_what_the_buffers_take_at_once_counts_as_it_leaves_them(speed: int) -> None:
    """Only the first megabytes were counted, which memory takes: on a slow network a thousand times its speed."""
    measured, now, held, left = Throughput(), 100.0, 0, 60 * MB
    while left or held:
        while left and held <= 3 * MB:  # whenever there is room, all at once
            held, left, now = held + MB, left - MB, now + 1e-4
            measured.send(MB, now)
        held, now = max(0, held - int(speed * SAMPLE_S)), now + SAMPLE_S
        measured.sample(held, now)
    assert measured.bytes / measured.seconds == pytest.approx(speed, rel=0.1)


def test_a_frozen_receiver_says_nothing_of_the_network() -> None:
    measured, now = Throughput(), 100.0
    for _ in range(4):
        measured.send(MB, now)
    for second in range(60):
        measured.sample(4 * MB, now + second)
    assert measured.seconds == 0.0


def test_time_in_which_nobody_asked_counts_for_nothing() -> None:
    measured = Throughput()
    for begun in (100.0, 900.0):
        measured.send(8 * MB, begun)
        measured.sample(4 * MB, begun + 1.0)
        measured.sample(0, begun + 2.0)
    assert (measured.bytes, measured.seconds) == (16 * MB, 4.0)


def test_what_was_before_counts_half() -> None:
    measured = Throughput()
    measured.send(MB, 1.0)
    measured.sample(MB // 2, 2.0)
    measured.halve()
    assert (measured.bytes, measured.seconds) == (MB // 4, 0.5)
