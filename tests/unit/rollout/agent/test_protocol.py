"""The agent's protocol: what counts before the greeting is answered, what is held after each message."""

from __future__ import annotations

import pytest

from polyrl.sample import Finish, SamplingParams
from polyrl.wire import (
    Announce,
    Assign,
    Cancel,
    Fenced,
    HandBack,
    HandBackReason,
    Recall,
    Resend,
    ToAgent,
    TokensKept,
    Welcome,
)
from polyrl_rollout.agent.protocol import MAX_FENCED, AgentProtocol, Stream
from polyrl_rollout.engines.port import TokenChunk

WELCOME = Welcome(run_epoch=1, lease_s=3.0, beat_s=1.0, delta_s=0.03)
VERSION = 4


def assign(number: int = 1, low: int = VERSION, high: int = VERSION, budget: int = 10) -> Assign:
    return Assign(
        assignment=number,
        sample=f"{number}.0",
        attempt=1,
        input_ids=bytes(8),
        offset=0,
        sampling=SamplingParams(budget),
        min_version=low,
        max_version=high,
        max_new_tokens=budget,
    )


def holding() -> AgentProtocol:
    """Two tokens of a finished assignment are under way."""
    protocol = AgentProtocol()
    protocol.receive(WELCOME, 0.0)
    assert isinstance(protocol.accept(assign(), VERSION), Stream)
    protocol.book.add(1, TokenChunk([5, 2], [0.0, 0.0], version=VERSION, finish=Finish.STOP), 0.0)
    assert [frame.seq for frame in protocol.book.pack(0.0, 0.03)] == [1]
    return protocol


BEFORE_WELCOME: list[tuple[ToAgent, bool]] = [
    (WELCOME, True),
    (Fenced("another run"), True),
    (Resend(1, 0), True),
    (Cancel(1), True),
    (assign(), False),
    (TokensKept(1), False),
    (Recall(1), False),
]


@pytest.mark.parametrize(("message", "counts"), BEFORE_WELCOME, ids=[type(m).__name__ for m, _ in BEFORE_WELCOME])
def test_only_what_settles_held_assignments_counts_before_the_welcome(message: ToAgent, counts: bool) -> None:
    protocol = AgentProtocol()
    assert protocol.counts(message) is counts
    protocol.receive(WELCOME, 0.0)
    assert protocol.counts(message)
    protocol.disconnect()
    assert protocol.counts(message) is counts


HELD_AFTER: list[tuple[ToAgent, list[int], bool]] = [
    (TokensKept(1), [], False),
    (TokensKept(0), [1], False),
    (Resend(1, 1), [1], True),
    (Resend(7, 0), [1], False),
    (Cancel(1), [], False),
    (Fenced("a lease that ran out"), [], False),
    (WELCOME, [1], True),
    (Announce(5, "tcp://publisher", public_key="key", manifest_hash=b"hash"), [1], False),
]


@pytest.mark.parametrize(("message", "held", "unsent"), HELD_AFTER, ids=[repr(m)[:24] for m, _, _ in HELD_AFTER])
def test_what_is_held_and_unsent_after_each_message(message: ToAgent, held: list[int], unsent: bool) -> None:
    protocol = holding()
    protocol.receive(message, 1.0)
    assert list(protocol.book.streams) == held
    assert protocol.book.has_unsent() is unsent


OBJECTIONS = [
    (assign(low=5, high=6), {}, HandBackReason.VERSION_CHANGED),
    (assign(), {"switching": True}, HandBackReason.VERSION_CHANGED),
    (assign(budget=0), {}, HandBackReason.REJECTED),
]


@pytest.mark.parametrize(("message", "state", "reason"), OBJECTIONS, ids=["too old", "switching", "no budget"])
def test_what_cannot_be_generated_is_handed_back(message: Assign, state: dict[str, bool], reason: str) -> None:
    answer = AgentProtocol().accept(message, VERSION, **state)
    assert isinstance(answer, HandBack)
    assert (answer.assignment, answer.reason) == (1, reason)


def test_a_draining_agent_takes_nothing_new() -> None:
    protocol = AgentProtocol()
    protocol.draining = True
    answer = protocol.accept(assign(), VERSION)
    assert isinstance(answer, HandBack)
    assert answer.reason == HandBackReason.DRAINING


def test_an_assignment_is_opened_once_and_handed_back_once() -> None:
    protocol = AgentProtocol()
    assert isinstance(protocol.accept(assign(), VERSION), Stream)
    assert protocol.accept(assign(), VERSION) is None
    assert protocol.hand_back(1, HandBackReason.RECALLED) == HandBack(1, HandBackReason.RECALLED, detail="")
    assert protocol.hand_back(1, HandBackReason.RECALLED) is None


def test_only_fences_in_a_row_reject_for_good() -> None:
    protocol = AgentProtocol()
    for message in [Fenced("")] * (MAX_FENCED - 1) + [WELCOME] + [Fenced("")] * (MAX_FENCED - 1):
        protocol.receive(message, 0.0)
        assert not protocol.is_rejected
    protocol.receive(Fenced(""), 0.0)
    assert protocol.is_rejected
