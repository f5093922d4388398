"""What the publisher has each of the learner's machines do with its share of a copy, and what that answers, as values
and as bytes. A copy goes by a number, which counts up. A command may come twice, even at once: that is as good as once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from polyrl.weights import ChunkEntry, TensorEntry
from polyrl.weights.shares import StreamShare


class BufferAnswer(msgspec.Struct, frozen=True):
    """Where an image is opened."""

    path: str
    name: str


class PrepareCopy(msgspec.Struct, frozen=True, tag="prepare"):
    """Makes room for a share of a new copy, and forgets those before it that are not needed."""

    answer: ClassVar[type] = BufferAnswer

    copy: int
    needed: list[int]
    share: StreamShare
    tensors: list[TensorEntry]
    """Tensors of the share, without checksums."""


class CheckedShare(msgspec.Struct, frozen=True):
    checksums: list[bytes]
    """Checksums of the share's tensors."""
    sample: bytes
    """What a receipt takes of it."""


class CheckCopy(msgspec.Struct, frozen=True, tag="check"):
    answer: ClassVar[type] = CheckedShare

    copy: int


class Sampled(msgspec.Struct, frozen=True):
    """How small a delta of some parts of the share is."""

    bytes: int
    of: int
    changed: int
    """Words."""


class SampleChange(msgspec.Struct, frozen=True, tag="sample"):
    answer: ClassVar[type] = Sampled

    copy: int
    base: int
    every: int
    """Bytes of the stream from one part that is looked at to the next."""


class HashedChunks(msgspec.Struct, frozen=True):
    chunks: list[ChunkEntry]
    """Chunks that begin in the share."""


class HashChunks(msgspec.Struct, frozen=True, tag="cut"):
    """From now on its chunks can be given."""

    answer: ClassVar[type] = HashedChunks

    copy: int
    chunk_bytes: int


class Encoded(msgspec.Struct, frozen=True):
    parts: bytes
    """Parts of a delta that begin in the share."""


class EncodeChange(msgspec.Struct, frozen=True, tag="encode"):
    answer: ClassVar[type] = Encoded

    copy: int
    base: int


class Done(msgspec.Struct, frozen=True):
    pass


class KeepDelta(msgspec.Struct, frozen=True, tag="delta"):
    """Some chunks of a delta, which this machine gives."""

    answer: ClassVar[type] = Done

    version: int
    chunks: dict[bytes, bytes]
    """By content hash."""


class KeepVersions(msgspec.Struct, frozen=True, tag="keep"):
    """These versions are given from now on, and no others."""

    answer: ClassVar[type] = Done

    anchors: dict[int, int]
    """To their copies."""
    deltas: list[int]
    needed: list[int]
    """See `PrepareCopy`."""


class Given(msgspec.Struct, frozen=True):
    chunk: bytes
    """Empty: it is not kept."""


class GiveChunk(msgspec.Struct, frozen=True, tag="give"):
    """For a receiver that reaches the first machine alone."""

    answer: ClassVar[type] = Given

    version: int
    hash: bytes


ShareCommand = PrepareCopy | CheckCopy | SampleChange | HashChunks | EncodeChange | KeepDelta | KeepVersions | GiveChunk
_decoder: msgspec.msgpack.Decoder[ShareCommand] = msgspec.msgpack.Decoder(ShareCommand)


def command_of(request: bytes) -> ShareCommand:
    """Inverse of msgspec's encoding."""
    return _decoder.decode(request)


def decode_answer(command: ShareCommand, body: bytes) -> Any:
    """The answer in `body`, of the kind that answers `command`."""
    return msgspec.msgpack.decode(body, type=command.answer)
