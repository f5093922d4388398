"""The agent's protocol: what counts before the greeting is answered, what is held after each message."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from polyrl.ledger.state import SamplePhase
from polyrl.sample import Finish, Pool, SamplingParams
from polyrl.wire import (
    Announce,
    Assign,
    Cancel,
    Fenced,
    FromAgent,
    HandBack,
    HandBackReason,
    Hello,
    PrefixUnknown,
    Recall,
    Resend,
    ToAgent,
    TokensKept,
    Welcome,
    checksum_of,
    pack_ids,
)
from polyrl_rollout.agent import protocol as protocol_module
from polyrl_rollout.agent.protocol import MAX_FENCED, AgentProtocol, Stream
from polyrl_rollout.engines.port import TokenChunk
from polyrl_rollout.testing.stage import Stage

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
    (Fenced("another run"), [], False),
    (Fenced("a lease that ran out", lease_over=True), [1], False),
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
    protocol.receive(WELCOME, 0.0)
    assert isinstance(protocol.accept(assign(), VERSION), Stream)
    assert protocol.accept(assign(), VERSION) is None
    assert protocol.hand_back(1, HandBackReason.RECALLED) == HandBack(1, HandBackReason.RECALLED, detail="")
    assert protocol.hand_back(1, HandBackReason.RECALLED) is None


def test_only_fences_in_a_row_reject_for_good() -> None:
    protocol = AgentProtocol()
    for message in [Fenced("")] * (MAX_FENCED - 1) + [WELCOME] + [Fenced("")] * (MAX_FENCED - 1):
        protocol.receive(message, 0.0)
        protocol.receive(Fenced("", lease_over=True), 0.0)
        assert not protocol.is_rejected
    protocol.receive(Fenced(""), 0.0)
    assert protocol.is_rejected


def keeping(count: int = 1) -> AgentProtocol:
    """The turns of samples `1.0` and following are over, and the manager has them: two tokens each, 5 and 2."""
    protocol = AgentProtocol()
    protocol.receive(WELCOME, 0.0)
    for number in range(1, count + 1):
        protocol.accept(assign(number), VERSION)
        protocol.book.add(number, TokenChunk([5, 2], [0.0, 0.0], version=VERSION, finish=Finish.STOP), 0.0)
    protocol.receive(TokensKept(protocol.book.pack(0.0, 0.03)[-1].seq), 0.0)
    assert not protocol.book.streams
    return protocol


HELD = bytes(8) + pack_ids([5, 2])
"""Prompt and response of sample 1.0."""


def next_turn(base: int, text: bytes = HELD, sample: str = "1.0") -> Assign:
    """An environment wrote 7; the first `base` tokens of `text` are not sent again."""
    rest, check = text[4 * base :] + pack_ids([7]), checksum_of(text[: 4 * base])
    return replace(assign(90), sample=sample, input_ids=rest, offset=3, base=base, base_check=check)


@pytest.mark.parametrize("base", [0, 1, 4])
def test_the_next_turn_begins_with_what_is_held(base: int) -> None:
    stream = keeping().accept(next_turn(base), VERSION)
    assert isinstance(stream, Stream)
    assert stream.input_ids() == [0, 0, 5, 2, 7]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(next_turn(4, sample="77.0"), id="another sample"),
        pytest.param(next_turn(5, HELD + pack_ids([6])), id="more than is held"),
        pytest.param(next_turn(4, bytes(8) + pack_ids([5, 6])), id="another text"),
    ],
)
def test_a_text_that_is_not_held_is_asked_for(message: Assign) -> None:
    protocol = keeping()
    assert protocol.accept(message, VERSION) == PrefixUnknown(90)
    assert not protocol.book.streams
    assert isinstance(protocol.accept(replace(message, base=0, input_ids=HELD), VERSION), Stream)


def test_no_text_outlives_a_fence() -> None:
    protocol = keeping()
    protocol.receive(Fenced("another run"), 0.0)
    assert protocol.accept(next_turn(4), VERSION) == PrefixUnknown(90)


def test_the_oldest_texts_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_module, "MAX_TEXT_TOKENS", 8)
    protocol = keeping(3)
    turns = [replace(next_turn(4, sample=f"{number}.0"), assignment=90 + number) for number in (1, 2, 3)]
    assert [type(protocol.accept(turn, VERSION)) for turn in turns] == [PrefixUnknown, Stream, Stream]


def test_what_nobody_hears_is_handed_back_after_the_next_welcome() -> None:
    protocol = AgentProtocol()
    assert isinstance(protocol.accept(assign(), VERSION), Stream)
    assert protocol.hand_back(1, HandBackReason.DRAINING) is None
    assert protocol.book.streams[1].leaves, "nothing starts it again"
    protocol.receive(WELCOME, 0.0)
    (undelivered,) = protocol.undelivered()
    assert protocol.hand_back(undelivered.assignment, HandBackReason(undelivered.reason)) == undelivered
    assert not protocol.undelivered()


def given_back(*, connected: bool = True) -> AgentProtocol:
    """Two tokens of an unfinished assignment are under way, and it was handed back."""
    protocol = AgentProtocol()
    protocol.receive(WELCOME, 0.0)
    assert isinstance(protocol.accept(assign(), VERSION), Stream)
    protocol.book.add(1, TokenChunk([5, 2], [0.0, 0.0], version=VERSION, finish=None), 0.0)
    assert [frame.seq for frame in protocol.book.pack(0.0, 0.03, flush=True)] == [1]
    assert protocol.hand_back(1, HandBackReason.RECALLED) == HandBack(1, HandBackReason.RECALLED, detail="")
    if not connected:
        protocol.disconnect()
    return protocol


def test_what_is_given_back_is_held_until_its_tokens_are_confirmed() -> None:
    protocol = given_back()
    assert [held.length for held in protocol.book.held()] == [2]
    assert not protocol.book.unfinished(), "nothing generates it any more"
    assert not protocol.book.is_unfinished(1)
    assert not protocol.book.add(1, TokenChunk([7], [0.0], version=VERSION, finish=None), 0.0)
    assert protocol.hand_back(1, HandBackReason.DRAINING) is None, "it was, once"
    protocol.receive(TokensKept(1), 0.0)
    assert not protocol.book.held()
    assert protocol.book.has_room()


def test_texts_count_until_the_manager_can_know_that_they_are_over() -> None:
    """It counts the room of what ends as free itself: reported before, that counted twice."""
    protocol = AgentProtocol()
    protocol.receive(WELCOME, 0.0)
    for number in (1, 2):
        assert isinstance(protocol.accept(assign(number), VERSION), Stream)
    assert protocol.book.text_tokens() == 2 * 2
    protocol.book.add(1, TokenChunk([5, 2], [0.0, 0.0], version=VERSION, finish=Finish.STOP), 0.0)
    assert protocol.book.text_tokens() == 2 + 4
    protocol.book.pack(0.0, 0.03)
    assert protocol.book.text_tokens() == 2
    protocol.hand_back(2, HandBackReason.RECALLED)
    assert protocol.book.text_tokens() == 0


def test_the_newest_assignment_is_the_newest_that_came_since_the_welcome() -> None:
    protocol = AgentProtocol()
    protocol.receive(WELCOME, 0.0)
    assert protocol.book.newest == 0
    for number in (4, 7):
        protocol.accept(assign(number), VERSION)
    assert protocol.book.newest == 7
    protocol.receive(Cancel(7), 0.0)
    assert protocol.book.newest == 7
    protocol.receive(WELCOME, 0.0)
    assert protocol.book.newest == 4, "of a manager that has begun anew the numbers are others"


def test_what_is_given_back_with_nothing_unconfirmed_is_gone_at_once() -> None:
    protocol = given_back()
    protocol.receive(Resend(1, 2), 0.0)
    assert not protocol.book.held(), "a manager that asks for what follows has the rest"
    assert isinstance(protocol.accept(assign(2), VERSION), Stream)
    assert protocol.hand_back(2, HandBackReason.RECALLED)
    assert not protocol.book.held()


@pytest.mark.parametrize("verdict", [Cancel(1), Resend(1, 0), Resend(1, 1), Resend(1, 2)], ids=repr)
def test_after_a_lost_connection_the_greetings_verdict_counts(verdict: ToAgent) -> None:
    protocol = given_back(connected=False)
    protocol.receive(verdict, 1.0)
    protocol.receive(WELCOME, 1.0)
    if isinstance(verdict, Cancel):
        assert protocol.undelivered() == []
        return
    (again,) = protocol.undelivered()
    protocol.book.pack(1.0, 0.03, flush=True)
    assert protocol.hand_back(again.assignment, HandBackReason(again.reason)) == again
    protocol.receive(TokensKept(protocol.book.seq), 1.0)
    assert not protocol.book.held()


def test_tokens_that_were_given_back_and_lost_with_the_connection_are_not_generated_again() -> None:
    stage, protocol = Stage(), AgentProtocol()

    def send(*messages: FromAgent) -> None:
        for message in messages:
            answers = [answer for name, answer in stage.agent("a", message).to_agents if name == "a"]
            for answer in answers:
                protocol.receive(answer, stage.now)
                if isinstance(answer, Assign):
                    protocol.accept(answer, 0)

    def hello() -> Hello:
        held, seq = protocol.book.held(), protocol.book.seq
        capacity = {"max_running": 8, "kv_tokens": 10_000, "max_context": 4096}
        return Hello(1, "a", pool=Pool.RESERVED, **capacity, weight_version=0, versions=(0,), held=held, seq=seq)

    send(hello())
    stage.submit(1, max_new_tokens=1000)
    send(hello())
    (number,) = protocol.book.streams
    for _ in range(500):
        protocol.book.add(number, TokenChunk([5], [0.0], version=0, finish=None), stage.now)
    lost = [*protocol.book.pack(stage.now, 0.03, flush=True), protocol.hand_back(number, HandBackReason.DRAINING)]
    assert len(lost) == 2
    protocol.disconnect()
    send(hello())
    (again,) = protocol.undelivered()
    frames = protocol.book.pack(stage.now, 0.03, flush=True)
    given = protocol.hand_back(again.assignment, HandBackReason(again.reason))
    assert given is not None
    send(*frames, given)
    (sample,) = stage.ledger.state.samples.values()
    assert (sample.length, sample.phase) == (500, SamplePhase.WAITING)
    assert not protocol.book.held()
