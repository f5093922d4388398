"""What two pods of a trainer tell each other, as values and as frames of one length."""

from __future__ import annotations

from typing import Final

import msgspec

from polyrl.errors import UNDECODABLE, ProtocolError

FRAME_BYTES: Final = 512
WORD_LENGTH_BYTES: Final = 2
REASON_CHARACTERS: Final = 100
"""Of a sentence; each takes at most four bytes, so that it fits into a frame."""


class HelloWord(msgspec.Struct, frozen=True, tag="hello"):
    """A pod's first: which one it is."""

    pod: int


class ShareWord(msgspec.Struct, frozen=True, tag="share"):
    """The first on a connection on which the first pod asks, and this one answers, about its share of versions."""

    pod: int
    endpoint: str
    """Where it serves that."""


class WelcomeWord(msgspec.Struct, frozen=True, tag="welcome"):
    """The first pod's answer: the port of the store where ranks meet."""

    port: int


class HeartbeatWord(msgspec.Struct, frozen=True, tag="heartbeat"):
    """This side lives."""


class LeavingWord(msgspec.Struct, frozen=True, tag="leaving"):
    """A pod was asked to end: what was learned is to be saved."""


class LostWord(msgspec.Struct, frozen=True, tag="lost"):
    """One of a pod's ranks ended, or is silent."""

    reason: str
    echo: bool = False
    """It ended by its own decision, perhaps because another one is lost."""


class OverWord(msgspec.Struct, frozen=True, tag="over"):
    """The first pod's last: this start of the group is over."""

    done: bool
    """The whole run is, and nobody is started again."""
    kill: bool = False
    """Ranks do not end by themselves."""


PodWord = HelloWord | ShareWord | WelcomeWord | HeartbeatWord | LeavingWord | LostWord | OverWord

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PodWord] = msgspec.msgpack.Decoder(PodWord)


def frame_of(word: PodWord) -> bytes:
    """FRAME_BYTES, whatever is said."""
    content = _encoder.encode(word)
    return (len(content).to_bytes(WORD_LENGTH_BYTES, "big") + content).ljust(FRAME_BYTES, b"\0")


def word_of(frame: bytes) -> PodWord:
    """Inverse of `frame_of`. Raises ProtocolError for what it never makes."""
    length = int.from_bytes(frame[:WORD_LENGTH_BYTES], "big")
    try:
        return _decoder.decode(frame[WORD_LENGTH_BYTES : WORD_LENGTH_BYTES + length])
    except UNDECODABLE as error:
        raise ProtocolError(f"another pod of the trainer said what none says: {error}") from None
