"""A connection that hides nothing: what the weight plane would carry without encryption. For measurements alone.

Frames lie where their content lies, on both sides: no room is written, no tag is sent.
"""

from __future__ import annotations

from polyrl.wire.sealing import Handshake


class PlainFrames:
    """Both directions."""

    overhead = 0

    def seal(self, content: object, about: bytes, room: memoryview) -> memoryview:
        return memoryview(content)  # type: ignore[arg-type]

    def place(self, content: memoryview, room: memoryview) -> memoryview:
        return content

    def open(self, sealed: bytes | memoryview, about: bytes, content: memoryview) -> None:
        if isinstance(sealed, bytes):
            content[:] = sealed


class PlainHandshake(Handshake):
    """Shows keys and uses none."""

    def finish(self, theirs: bytes, *, dialled: bool) -> tuple[PlainFrames, PlainFrames]:  # type: ignore[override]
        return PlainFrames(), PlainFrames()
