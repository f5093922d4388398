"""What a puller of weights and its publisher say to each other. Read next: `frames`."""

from __future__ import annotations

from typing import TypeAlias

from polyrl.wire.message import Message


class GetManifest(Message, frozen=True, tag="getm"):
    """Ask for a version's manifest."""

    version: int


class GetChunk(Message, frozen=True, tag="getc"):
    """Ask for one chunk by its content hash; outstanding requests are the puller's own credit."""

    version: int
    hash: bytes


class ManifestReply(Message, frozen=True, tag="manifest"):
    """`body` is msgpack of weights.VersionManifest; empty when the version is no longer kept."""

    version: int
    body: bytes


class ChunkReply(Message, frozen=True, tag="chunk"):
    """A chunk's bytes; empty when it is no longer kept."""

    hash: bytes
    data: bytes


FromPuller: TypeAlias = GetManifest | GetChunk
ToPuller: TypeAlias = ManifestReply | ChunkReply
