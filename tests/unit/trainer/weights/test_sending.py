"""Room on the way to receivers: bounded in all, a frame for everybody, in turns."""

from __future__ import annotations

from dataclasses import dataclass

from zmq import MessageTracker

from polyrl.wire import GetManifest
from polyrl_trainer.weights.sending import MAX_WAITING, Sending

FRAME = 10


@dataclass
class Frame(MessageTracker):
    """Says by itself whether it has left."""

    left: bool = False

    @property
    def done(self) -> bool:
        return self.left


def send_all(sending: Sending) -> list[tuple[bytes, int, Frame]]:
    sent = []
    while (turn := sending.next()) is not None:
        receiver, request = turn
        frame = Frame()
        sending.sent(receiver, frame, FRAME)
        assert isinstance(request, GetManifest)
        sent.append((receiver, request.version, frame))
    return sent


def test_receivers_take_turns_and_each_gets_what_it_asked_for_in_order() -> None:
    sending = Sending(max_bytes=1000)
    for receiver, version in ((b"a", 1), (b"a", 2), (b"a", 3), (b"b", 4), (b"b", 5)):
        assert sending.ask(receiver, GetManifest(version))
    assert [(receiver, version) for receiver, version, _ in send_all(sending)] == [
        (b"a", 1), (b"b", 4), (b"a", 2), (b"b", 5), (b"a", 3)
    ]  # fmt: skip
    assert not sending.waits


def test_when_the_room_is_full_a_newcomer_still_gets_one_frame() -> None:
    sending = Sending(max_bytes=3 * FRAME)
    for version in range(5):
        sending.ask(b"reads nothing", GetManifest(version))
    held = send_all(sending)
    assert len(held) == 3
    for version in range(2):
        sending.ask(b"reads", GetManifest(version))
    for version in range(2):
        ((receiver, sent, frame),) = send_all(sending)
        assert (receiver, sent) == (b"reads", version)
        assert send_all(sending) == [], "one at a time"
        frame.left = True
    assert sending.waits
    held[0][2].left = True
    assert [receiver for receiver, _, _ in send_all(sending)] == [b"reads nothing"]
    assert sending.num_bytes == 3 * FRAME


def test_what_one_receiver_may_ask_ahead_is_bounded() -> None:
    sending = Sending(max_bytes=0)
    asked = [sending.ask(b"a", GetManifest(version)) for version in range(MAX_WAITING + 3)]
    assert asked == [True] * MAX_WAITING + [False] * 3
    assert sending.ask(b"b", GetManifest(0))
