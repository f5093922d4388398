"""A silent engine is back: what it holds is taken back, unless another engine has got further meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from polyrl.ledger import Effects
from polyrl.ledger.apply.samples import MAX_LEFT
from polyrl.ledger.events import Reclaimed
from polyrl.ledger.journal import PageBook, decode_state, encode_state
from polyrl.sample import Pool
from polyrl.wire import (
    Assign,
    Cancel,
    Fenced,
    HandBack,
    HandBackReason,
    Heartbeat,
    HeldAssignment,
    Hello,
    Resend,
    TokensKept,
    Welcome,
)
from polyrl_rollout.testing.stage import Stage, replay, sent, snapshot

HELLO: Final = Hello(1, "a", pool=Pool.SPOT, max_running=8, kv_tokens=100_000, max_context=4096, weight_version=0)


def moved_to_b(*tokens: int) -> Stage:
    """At 4 s: sample 0.0 has left a, silent since 0 s, with two tokens, as assignment 1; b goes on with `tokens`."""
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.tokens("a", 1, [5, 6])
    stage.engine("b")
    stage.now = 4.0
    stage.agent("b", Heartbeat(0, 0, kv_free_tokens=100_000))
    stage.pass_time(0.0)
    assert stage.placed() == {"a": [], "b": ["0.0"]}
    stage.tokens("b", stage.number("0.0"), tokens)
    return stage


def back(stage: Stage, length: int, **changes: Any) -> Effects:
    """It greets, and holds so much of the sample."""
    held = (HeldAssignment(1, "0.0", attempt=1, length=length),)
    return stage.agent("a", msgspec.structs.replace(HELLO, held=held, **changes))


def test_an_engine_that_is_back_is_asked_to_greet_and_keeps_what_it_holds() -> None:
    stage = moved_to_b()
    outcome = stage.tokens("a", 1, [7, 8], offset=2)
    first, *_ = sent(outcome, (Fenced, TokensKept))
    assert isinstance(first, Fenced)
    assert first.lease_over
    assert not sent(stage.agent("a", Heartbeat(1, 0, kv_free_tokens=0)), Fenced), "once"


def test_what_it_holds_is_taken_back_and_the_other_engine_stops() -> None:
    stage = moved_to_b(9, 9)
    other = stage.number("0.0")
    outcome = back(stage, length=7)
    assert sent(outcome, (Cancel, Resend, Welcome))[:2] == [Cancel(other), Resend(1, 2)]
    assert stage.placed() == {"a": ["0.0"], "b": []}
    stage.tokens("a", 1, [7, 8, 9, 10, 2], "stop", offset=2)
    sample = stage.ledger.state.samples["0.0"]
    assert list(memoryview(bytes(sample.ids)).cast("I")) == [5, 6, 7, 8, 9, 10, 2]
    assert [(span.start, span.end, span.engine) for span in sample.spans] == [(0, 2, "a"), (2, 7, "a")]
    tokens = stage.ledger.status(stage.now).tokens
    assert (tokens.generated, tokens.kept, tokens.regenerated) == (9, 7, 2), "two of b were dropped"
    assert (sample.generated, sample.phase) == (7, "turnDone")
    assert not sent(stage.tokens("b", other, [9], offset=4), Assign)
    assert replay(stage.ledger.state.config, stage.events) == stage.ledger.state


def test_also_after_the_engine_was_gone() -> None:
    stage = moved_to_b(9)
    for _ in range(12):
        stage.now += 1.0
        stage.agent("b", Heartbeat(0, 0, kv_free_tokens=100_000))
        stage.pass_time(0.0)
    assert list(stage.ledger.state.engines) == ["b"]
    assert sent(stage.tokens("a", 1, [7], offset=2), Fenced)[0].lease_over
    assert Resend(1, 2) in sent(back(stage, length=40), Resend)
    assert stage.placed() == {"a": ["0.0"], "b": []}


def lost_by_b_too(*tokens: int) -> tuple[Stage, int]:
    """b has fallen silent as well, with `tokens` more than a had; c goes on. Comes with the number that b had."""
    stage = moved_to_b(*tokens)
    number = stage.number("0.0")
    stage.engine("c")
    for _ in range(4):
        stage.now += 1.0
        stage.agent("c", Heartbeat(0, 0, kv_free_tokens=100_000))
        stage.pass_time(0.0)
    assert stage.placed()["c"] == ["0.0"]
    return stage, number


def b_is_back(stage: Stage, number: int, length: int) -> Effects:
    """It holds so much of the sample."""
    held = (HeldAssignment(number, "0.0", attempt=2, length=length),)
    return stage.agent("b", msgspec.structs.replace(HELLO, engine="b", held=held))


def test_what_the_first_of_two_silent_engines_holds_is_taken_back() -> None:
    stage, number = lost_by_b_too(9, 9, 9)
    assert Resend(1, 2) in sent(back(stage, length=90), Resend)
    assert stage.placed()["a"] == ["0.0"]
    assert sent(b_is_back(stage, number, length=95), (Cancel, Resend)) == [Cancel(number)], (
        "it went on from other tokens"
    )
    assert replay(stage.ledger.state.config, stage.events) == stage.ledger.state


def test_each_of_two_silent_engines_is_taken_back_in_turn() -> None:
    stage, number = lost_by_b_too(9, 9, 9)
    assert Resend(number, 5) in sent(b_is_back(stage, number, length=40), Resend)
    assert Resend(1, 2) in sent(back(stage, length=90), Resend), "its tokens up to there are still the sample's"
    assert stage.placed() == {"a": ["0.0"], "b": [], "c": []}
    stage.tokens("a", 1, [7, 8, 2], "stop", offset=2)
    assert list(memoryview(bytes(stage.ledger.state.samples["0.0"].ids)).cast("I")) == [5, 6, 7, 8, 2]
    assert replay(stage.ledger.state.config, stage.events) == stage.ledger.state


def test_what_was_taken_back_and_given_back_is_not_claimed_again() -> None:
    stage = moved_to_b(9)
    back(stage, length=40)
    stage.agent("a", HandBack(1, HandBackReason.REJECTED))
    assert stage.placed()["b"] == ["0.0"]
    assert sent(back(stage, length=40), (Cancel, Resend)) == [Cancel(1)]


def test_a_turn_remembers_few_of_the_engines_that_it_left() -> None:
    stage = moved_to_b()
    for at in range(20):
        name, number = f"e{at}", stage.number("0.0")
        stage.engine(name)
        for _ in range(4):
            stage.now += 1.0
            stage.agent(name, Heartbeat(0, 0, kv_free_tokens=100_000))
            stage.pass_time(0.0)
        assert stage.number("0.0") > number, "it left another one"
    left = stage.ledger.state.samples["0.0"].left
    assert list(left) == [f"e{at}" for at in range(19 - MAX_LEFT, 19)], "the newest"


def test_a_sample_that_waits_is_taken_back_by_who_has_no_more_of_it() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.tokens("a", 1, [5, 6])
    stage.pass_time(3.0)
    stage.pass_time(12.0)
    assert stage.ledger.state.samples["0.0"].phase == "waiting"
    assert sent(back(stage, length=2), Resend) == [Resend(1, 2)]
    assert stage.ledger.state.queue == []


@pytest.mark.parametrize(
    ("tokens", "length", "changes"),
    [
        pytest.param([9, 9, 9], 4, {}, id="the other one is further"),
        pytest.param([9, 9], 4, {}, id="it is as far"),
        pytest.param([], 103, {}, id="it says more than the budget allows"),
        pytest.param([], 90, {"max_context": 80}, id="its context is shorter now"),
    ],
)
def test_what_is_not_taken_back_is_cancelled(tokens: list[int], length: int, changes: dict[str, int]) -> None:
    stage = moved_to_b(*tokens)
    outcome = back(stage, length=length, **changes)
    assert sent(outcome, (Cancel, Resend)) == [Cancel(1)]
    assert stage.placed()["b"] == ["0.0"]
    assert stage.ledger.state.samples["0.0"].length == 2 + len(tokens)


def test_the_turn_is_over_meanwhile() -> None:
    stage = moved_to_b(9)
    stage.tokens("b", stage.number("0.0"), [2], "stop")
    assert sent(back(stage, length=40), (Cancel, Resend)) == [Cancel(1)]


def test_another_engines_claim_is_none() -> None:
    stage = moved_to_b(9)
    held = (HeldAssignment(1, "0.0", attempt=1, length=40),)
    outcome = stage.agent("c", msgspec.structs.replace(HELLO, engine="c", held=held))
    assert sent(outcome, (Cancel, Resend)) == [Cancel(1)]


def test_one_that_says_much_and_sends_nothing_costs_a_sample_little() -> None:
    stage, taken = moved_to_b(9), 0
    for _ in range(9):
        number, _ = stage.ledger.state.samples["0.0"].left["a"]
        held = (HeldAssignment(number, "0.0", attempt=1, length=90),)
        outcome = stage.agent("a", msgspec.structs.replace(HELLO, held=held))
        taken += sum(isinstance(event, Reclaimed) for event in outcome.events)
        for _ in range(4):
            stage.now += 1.0
            stage.agent("b", Heartbeat(0, 0, kv_free_tokens=100_000))
            stage.pass_time(0.0)
        if stage.placed()["b"]:
            stage.tokens("b", stage.number("0.0"), [9])
    assert taken == 3


def test_pages_of_what_was_dropped_do_not_come_back() -> None:
    """A page was written of b's tokens; the snapshot after the reclaim must not be put together with it."""
    stage, book = moved_to_b(9, 9, 9), PageBook()
    rows = {}

    def write(between: Callable[[], object] = lambda: None) -> bytes:
        book.begin_round(stage.ledger.state)
        while book.under_way:
            rows.update({row[0]: row for row in book.write(stage.ledger.state, 10)})
        between()
        body = encode_state(book.rest(stage.ledger.state))
        for number in book.forget_ended(stage.ledger.state):
            del rows[number]
        return body

    def read(body: bytes) -> bytes:
        state = decode_state(body)
        PageBook().restore(state, [rows[number] for number in sorted(rows)])
        return msgspec.msgpack.encode(state)

    assert read(write()) == snapshot(stage.ledger)
    assert read(write(lambda: back(stage, length=90))) == snapshot(stage.ledger)
    stage.tokens("a", 1, [11, 12, 13, 14], offset=2)
    assert read(write()) == snapshot(stage.ledger)
    stage.tokens("a", 1, [15])
    assert read(write()) == snapshot(stage.ledger)


def test_pages_are_dropped_before_the_next_round_writes_what_is_there_instead() -> None:
    stage, book = moved_to_b(9, 9, 9), PageBook()
    book.begin_round(stage.ledger.state)
    before = [row[0] for row in book.write(stage.ledger.state, 10) if row[1] == "0.0"]
    back(stage, length=90)
    stage.tokens("a", 1, [11, 12, 13, 14], offset=2)
    book.begin_round(stage.ledger.state)
    (again,) = [row for row in book.write(stage.ledger.state, 10) if row[1] == "0.0"]
    assert len(again[2]) == 8 * 6
    assert book.forget_ended(stage.ledger.state) == before
