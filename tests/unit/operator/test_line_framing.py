"""A cut watch ends before the line that was cut, however the bytes come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl_operator.api.line_framing import WholeLines


class Content:
    """Gives what it was made with."""

    total_bytes = 7

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


async def given_out(chunks: list[bytes]) -> list[bytes]:
    content = WholeLines(cast(aiohttp.StreamReader, Content(chunks)))
    return [data async for data in content.iter_chunked(1)]


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([], []),
        ([b"{}"], []),
        ([b"{}\n"], [b"{}\n"]),
        ([b'{"a', b'":1}\n{}\n{"b'], [b'{"a":1}\n{}\n']),
        ([b"{", b"}", b"\n"], [b"{}\n"]),
        ([b"\n", b"", b"\n{"], [b"\n", b"\n"]),
    ],
)
async def test_what_comes_out(chunks: list[bytes], lines: list[bytes]) -> None:
    assert await given_out(chunks) == lines


@given(st.lists(st.text("a\n", max_size=4).map(str.encode), max_size=8))
async def test_all_whole_lines_and_nothing_else(chunks: list[bytes]) -> None:
    out = await given_out(chunks)
    sent = b"".join(chunks)
    assert b"".join(out) == sent[: sent.rfind(b"\n") + 1]
    assert all(data.endswith(b"\n") for data in out)


async def test_line_by_line() -> None:
    content = WholeLines(cast(aiohttp.StreamReader, Content([b"a\nb", b"b\n\nc"])))
    assert [line async for line in content] == [b"a\n", b"bb\n", b"\n"]


def test_all_else_is_as_it_was() -> None:
    content: Any = WholeLines(cast(aiohttp.StreamReader, Content([])))
    assert content.total_bytes == 7
