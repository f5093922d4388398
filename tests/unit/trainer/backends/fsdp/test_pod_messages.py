"""What two pods tell each other, as frames."""

from __future__ import annotations

import pytest

from polyrl.errors import ProtocolError
from polyrl_trainer.backends.fsdp.pods.messages import (
    FRAME_BYTES,
    REASON_CHARACTERS,
    HeartbeatMessage,
    HelloMessage,
    LeavingMessage,
    LostMessage,
    OverMessage,
    PodMessage,
    WelcomeMessage,
    frame_of,
    message_of,
)

MESSAGES = [
    HelloMessage(511),
    WelcomeMessage(65535),
    HeartbeatMessage(),
    LeavingMessage(),
    LostMessage("\N{SNOWMAN}" * REASON_CHARACTERS, echo=True),
    OverMessage(True, kill=False),
]


@pytest.mark.parametrize("message", MESSAGES, ids=[type(message).__name__ for message in MESSAGES])
def test_a_frame_is_of_one_length_and_is_its_word_again(message: PodMessage) -> None:
    frame = frame_of(message)
    assert len(frame) == FRAME_BYTES
    assert message_of(frame) == message


@pytest.mark.parametrize("frame", [b"", b"\0" * FRAME_BYTES, b"\xff" * FRAME_BYTES], ids=["none", "zeros", "ones"])
def test_nonsense_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="another pod of the trainer"):
        message_of(frame)
