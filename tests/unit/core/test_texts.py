"""How a trainer makes whole turns and batches of messages that carry only what is new."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from polyrl.sample import Finish, Purpose, Response, Scored, Span
from polyrl.wire import (
    Accepted,
    Batch,
    Fetch,
    Fetched,
    FetchedText,
    SampleTexts,
    TurnDone,
    TurnsAwaited,
    checksum_of,
    pack_ids,
    part_of,
    texts,
    whole_of,
)

WHOLE = Response(
    "0.0",
    ids=pack_ids([5, 2, 8, 9, 6, 2]),
    logprobs=b"aaaabbbb" + bytes(8) + b"ccccdddd",
    loss_mask=bytes([1, 1, 0, 0, 1, 1]),
    spans=(
        Span(0, 2, version=0, engine="a", attempt=1),
        Span(2, 4, version=-1, engine="", attempt=1),
        Span(4, 6, version=0, engine="b", attempt=2),
    ),
    turn=1,
    finish=Finish.STOP,
)
"""Two tokens, two of an environment, two of the second turn."""


def first() -> Response:
    """Its first turn."""
    return Response(
        "0.0", WHOLE.ids[:8], WHOLE.logprobs[:8], WHOLE.loss_mask[:2], spans=WHOLE.spans[:1], turn=0, finish=Finish.STOP
    )


OTHER = msgspec.structs.replace(first(), ids=pack_ids([6, 2]))


def turn_done(response: Response, start: int = 0) -> TurnDone:
    check = checksum_of(WHOLE.ids[: 4 * start])
    part = part_of(response, start)
    return TurnDone(0, 0, purpose=Purpose.TRAIN, step=0, response=part, start=start, check=check)


def batch(*responses: Response) -> Batch:
    bare = [Response(r.sample, b"", b"", b"", spans=(), turn=r.turn, finish=r.finish) for r in responses]
    samples = tuple(Scored(0, index, response=one, reward=1.0, metrics={}) for index, one in enumerate(bare))
    checks = tuple(checksum_of(response.ids) for response in responses)
    return Batch(7, 3, step=0, samples=samples, last=True, checks=checks)


class Peer:
    """One trainer's texts, what they asked for, and what they handed out."""

    def __init__(self, *known: tuple[str, int]) -> None:
        self.asked: list[Fetch] = []
        self.out: list[Any] = []
        self.texts = SampleTexts(self.asked.append, lambda sample, turn: (sample, turn) in known)

    def get(self, *messages: Any) -> Peer:
        for message in messages:
            self.out += self.texts.receive(message)
        return self


@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_part_and_what_is_before_it_make_the_whole(start: int) -> None:
    before = None if start == 0 else Peer().get(turn_done(WHOLE)).out[0].response
    held = texts._first_positions(before, start) if before else None
    assert whole_of(part_of(WHOLE, start), held) == WHOLE


def test_what_an_environment_wrote_travels_as_ids_alone() -> None:
    part = part_of(WHOLE, 2)
    assert (len(part.ids), len(part.logprobs), part.loss_mask) == (16, 8, b"")


def test_what_the_trainer_wrote_itself_is_not_sent_back() -> None:
    peer = Peer().get(turn_done(first()))
    for _ in range(2):
        peer.texts.extend("0.0", 0, pack_ids([8, 9]))
    peer.get(turn_done(WHOLE, start=4))
    assert peer.out[-1].response == WHOLE


def test_an_extension_counts_once_and_for_its_own_turn_only() -> None:
    peer = Peer().get(turn_done(first()))
    for turn in (7, 0, 0):
        peer.texts.extend("0.0", turn, pack_ids([8, 9]))
    extended = msgspec.structs.replace(first(), ids=WHOLE.ids[:16])
    assert not peer.get(batch(extended)).asked


def test_what_the_manager_did_not_take_of_it_is_noticed() -> None:
    peer = Peer().get(turn_done(first()))
    peer.texts.extend("0.0", 0, pack_ids([8, 8]))
    peer.get(turn_done(WHOLE, start=4))
    assert peer.asked == [Fetch(1, ("0.0",))]


def test_the_second_turn_is_handed_out_whole() -> None:
    peer = Peer().get(turn_done(first()), turn_done(WHOLE, start=2))
    assert [message.response for message in peer.out] == [first(), WHOLE]
    assert [(message.start, message.check) for message in peer.out] == [(0, 0), (0, 0)]
    assert not peer.asked


@pytest.mark.parametrize(
    "held",
    [
        pytest.param([], id="nothing"),
        pytest.param([turn_done(OTHER)], id="another text"),
    ],
)
def test_a_turn_without_its_beginning_is_fetched(held: list[TurnDone]) -> None:
    peer = Peer().get(*held, turn_done(WHOLE, start=2))
    assert len(peer.out) == len(held)
    assert peer.asked == [Fetch(1, ("0.0",))]
    peer.get(turn_done(WHOLE), Fetched(1, 1))
    assert peer.out[-1].response == WHOLE


def test_what_the_manager_forgot_in_a_power_cut_is_cut_off_here() -> None:
    other = msgspec.structs.replace(WHOLE, ids=pack_ids([5, 2, 8, 9, 7, 2]))
    peer = Peer().get(turn_done(WHOLE), turn_done(other, start=2))
    assert peer.out[-1].response == other


def test_only_turns_that_are_not_known_are_fetched() -> None:
    peer = Peer(("0.0", 1), ("0.1", 0)).get(TurnsAwaited((("0.0", 1), ("0.1", 1), ("0.2", 0))))
    assert peer.asked == [Fetch(1, ("0.1", "0.2"))]
    peer.get(TurnsAwaited((("0.1", 1), ("0.3", 0))))
    assert len(peer.asked) == 1, "one at a time"
    peer.get(Fetched(1, 1))
    assert peer.asked[1] == Fetch(2, ("0.2", "0.3")), "what was left of the first, and what came since"
    peer.get(Fetched(1, 1), Fetched(2, 2))
    assert len(peer.asked) == 2


def test_a_new_connection_begins_anew() -> None:
    peer = Peer().get(TurnsAwaited((("0.1", 0),)), batch(WHOLE))
    peer.texts.reconnect()
    peer.get(FetchedText(part_of(WHOLE, 0)))
    assert not peer.out, "the batch is asked for again"
    peer.get(TurnsAwaited((("0.2", 0),)))
    assert peer.asked[-1].samples == ("0.2",)


def test_a_batch_gets_its_texts_back() -> None:
    peer = Peer().get(turn_done(WHOLE), batch(WHOLE))
    (whole,) = [message for message in peer.out if isinstance(message, Batch)]
    assert ([scored.response for scored in whole.samples], whole.checks) == ([WHOLE], ())
    assert not peer.asked


@pytest.mark.parametrize("held", [None, first()], ids=["nothing is held", "another text is held"])
def test_a_batch_waits_for_the_texts_that_are_not_here(held: Response | None) -> None:
    peer = Peer().get(*([] if held is None else [turn_done(held)]), batch(WHOLE))
    assert not [message for message in peer.out if isinstance(message, Batch)]
    assert peer.asked == [Fetch(1, ("0.0",))]
    peer.get(FetchedText(part_of(WHOLE, 0)), Fetched(1, 1))
    assert peer.out[-1].samples[0].response == WHOLE


def test_texts_are_kept_within_bounds_and_a_batch_larger_than_that_still_becomes_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "MAX_HELD_BYTES", 60)
    others = [msgspec.structs.replace(WHOLE, sample=f"0.{n}") for n in range(3)]
    peer = Peer().get(*(turn_done(other) for other in others), batch(*others))
    assert peer.asked == [Fetch(1, ("0.0", "0.1"))]
    peer.get(FetchedText(part_of(others[0], 0)), FetchedText(part_of(others[1], 0)), Fetched(1, 2))
    assert [scored.response for scored in peer.out[-1].samples] == others


def test_what_is_forgotten_is_fetched_when_it_is_wanted_after_all() -> None:
    peer = Peer().get(turn_done(WHOLE))
    peer.texts.forget([1])
    peer.get(batch(WHOLE))
    assert not peer.asked
    peer.texts.forget([0])
    peer.get(batch(WHOLE))
    assert peer.asked


def test_everything_else_is_handed_on_as_it_is() -> None:
    assert Peer().get(Accepted(4)).out == [Accepted(4)]
    empty = Batch(7, 3, step=0, samples=(), last=True)
    assert Peer().get(empty).out == [empty]
