"""Events: repeats are counted, and what is remembered of them is bounded."""

from __future__ import annotations

from polyrl_operator.reconciler.events import RECOUNT_S, REMEMBERED, WINDOW_S, EventAggregator


def test_a_sentence_is_recorded_once_and_then_counted() -> None:
    aggregator = EventAggregator()
    assert aggregator.count("a", 0.0) == 1
    assert aggregator.count("a", 1.0) is None
    assert aggregator.count("b", 1.0) == 1
    assert aggregator.count("a", RECOUNT_S) == 3
    assert aggregator.count("a", RECOUNT_S + 1) is None
    assert aggregator.count("a", WINDOW_S + 1) == 1, "after a while it is news again"


def test_what_is_remembered_of_events_is_bounded() -> None:
    aggregator = EventAggregator()
    for number in range(3 * REMEMBERED):
        assert aggregator.count(str(number), 0.0) == 1
    assert len(aggregator._series) == REMEMBERED
