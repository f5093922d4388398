"""What two pods tell each other, as frames."""

from __future__ import annotations

import pytest

from polyrl.errors import ProtocolError
from polyrl_trainer.backends.fsdp.pods.words import (
    FRAME_BYTES,
    REASON_CHARACTERS,
    HeartbeatWord,
    HelloWord,
    LeavingWord,
    LostWord,
    OverWord,
    PodWord,
    WelcomeWord,
    frame_of,
    word_of,
)

WORDS = [
    HelloWord(511),
    WelcomeWord(65535),
    HeartbeatWord(),
    LeavingWord(),
    LostWord("\N{SNOWMAN}" * REASON_CHARACTERS, echo=True),
    OverWord(True, kill=False),
]


@pytest.mark.parametrize("word", WORDS, ids=[type(word).__name__ for word in WORDS])
def test_a_frame_is_of_one_length_and_is_its_word_again(word: PodWord) -> None:
    frame = frame_of(word)
    assert len(frame) == FRAME_BYTES
    assert word_of(frame) == word


@pytest.mark.parametrize("frame", [b"", b"\0" * FRAME_BYTES, b"\xff" * FRAME_BYTES], ids=["none", "zeros", "ones"])
def test_nonsense_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="another pod of the trainer"):
        word_of(frame)
