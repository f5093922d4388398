"""A watch that was cut in the middle of a line ends before that line: what was lost comes again with the next watch.

API servers send a long event in pieces, so a connection that a load balancer ends in order may end between two of
them. kopf reads what is left as an event, finds that it is none, and falls.
Refuses to hold: what lines mean (see `watches`). Read next: `connect`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp

CHUNK: Final = 1 << 20
"""Bytes read at once for lines one by one; whatever has come is not waited upon."""


class WholeLines:
    """A response's content whose chunks end with lines; else as the content that it is made from."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Line by line."""
        async for data in self.iter_chunked(CHUNK):
            for line in data.splitlines(keepends=True):
                yield line

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Whole lines, of at most `size` new bytes each time."""
        rest = bytearray()
        async for data in self._content.iter_chunked(size):
            lines, newline, tail = data.rpartition(b"\n")
            if newline:
                yield bytes(rest) + lines + newline
                rest.clear()
            rest += tail
