"""A connection that hides nothing: what the weight plane would carry without encryption. For measurements alone.

Frames lie where their content lies, on both sides: no room is written. Small ones are as long as sealed ones, so that
what follows fills whole lines of the processor's cache as it would after those.
"""

from __future__ import annotations

from typing import Final

from polyrl.wire.sealing import LAST_BYTES, TAG_BYTES, Handshake

SMALL_BYTES: Final = LAST_BYTES
"""Below: requests, and first words of answers."""


class PlainFrames:
    """Both directions."""

    overhead = TAG_BYTES

    def seal(self, content: object, about: bytes, buffer: memoryview) -> memoryview:
        clear = memoryview(content)  # type: ignore[arg-type]
        if len(clear) >= SMALL_BYTES:
            return clear
        buffer[: len(clear)] = clear
        return buffer[: len(clear) + TAG_BYTES]

    def place(self, content: memoryview, buffer: memoryview) -> memoryview:
        return content if len(content) >= SMALL_BYTES else buffer[: len(content) + TAG_BYTES]

    def open(self, sealed: bytes | memoryview, about: bytes, content: memoryview) -> None:
        if len(content) < SMALL_BYTES:
            content[:] = memoryview(sealed)[: len(content)]


class PlainHandshake(Handshake):
    """Shows keys and uses none."""

    def finish(self, theirs: bytes, *, dialled: bool) -> tuple[PlainFrames, PlainFrames]:  # type: ignore[override]
        return PlainFrames(), PlainFrames()
