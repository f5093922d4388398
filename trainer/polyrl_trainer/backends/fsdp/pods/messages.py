"""What two pods of a trainer tell each other, as values and as frames of one length."""

from __future__ import annotations

from typing import Final

import msgspec

from polyrl.errors import UNDECODABLE, ProtocolError

FRAME_BYTES: Final = 512
MESSAGE_LENGTH_BYTES: Final = 2
REASON_CHARACTERS: Final = 100
"""Characters of a sentence; each takes at most four bytes, so that it fits into a frame."""


class HelloMessage(msgspec.Struct, frozen=True, tag="hello"):
    """A pod's first: which one it is."""

    pod: int


class ShareMessage(msgspec.Struct, frozen=True, tag="share"):
    """The first on a connection on which the first pod asks, and this one answers, about its share of versions."""

    pod: int
    endpoint: str
    """Where it serves that."""


class WelcomeMessage(msgspec.Struct, frozen=True, tag="welcome"):
    """The first pod's answer: the port of the store where ranks meet."""

    port: int


class HeartbeatMessage(msgspec.Struct, frozen=True, tag="heartbeat"):
    """This side lives."""


class LeavingMessage(msgspec.Struct, frozen=True, tag="leaving"):
    """A pod was asked to end: what was learned is to be saved."""


class LostMessage(msgspec.Struct, frozen=True, tag="lost"):
    """One of a pod's ranks ended, or is silent."""

    reason: str
    echo: bool = False
    """The pod ended by its own decision, perhaps because another one is lost."""


class OverMessage(msgspec.Struct, frozen=True, tag="over"):
    """The first pod's last: this start of the group is over."""

    done: bool
    """The whole run is, and nobody is started again."""
    kill: bool = False
    """Ranks do not end by themselves."""


PodMessage = (
    HelloMessage | ShareMessage | WelcomeMessage | HeartbeatMessage | LeavingMessage | LostMessage | OverMessage
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PodMessage] = msgspec.msgpack.Decoder(PodMessage)


def frame_of(message: PodMessage) -> bytes:
    """FRAME_BYTES, whatever is said."""
    content = _encoder.encode(message)
    return (len(content).to_bytes(MESSAGE_LENGTH_BYTES, "big") + content).ljust(FRAME_BYTES, b"\0")


def message_of(frame: bytes) -> PodMessage:
    """Inverse of `frame_of`. Raises ProtocolError for what it never makes."""
    length = int.from_bytes(frame[:MESSAGE_LENGTH_BYTES], "big")
    try:
        return _decoder.decode(frame[MESSAGE_LENGTH_BYTES : MESSAGE_LENGTH_BYTES + length])
    except UNDECODABLE as error:
        raise ProtocolError(f"another pod of the trainer said what none says: {error}") from None
