"""What kopf's streams are given and what is seen of them: whole lines, signs of life, gaps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import kopf
import pytest
from hypothesis import given, strategies as st
from yarl import URL

from polyrl_operator.api.answers import LIST_ANEW
from polyrl_operator.api.kinds import POD
from polyrl_operator.informer import watch
from polyrl_operator.informer.watch import StreamMonitor, kopf_settings


class Content:
    """Gives what it was made with."""

    total_bytes = 7

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


class Streams:
    """A monitored session: `get` is a request of kopf's, `read` reads a stream to its end."""

    def __init__(self, clock: Any) -> None:
        self.gaps, self.clock = 0, clock
        self.monitor = StreamMonitor(self._on_gap)

    def _on_gap(self) -> None:
        self.gaps += 1

    async def get(self, url: str, *chunks: bytes, status: int = 200) -> Any:
        request = cast(aiohttp.ClientRequest, SimpleNamespace(method="GET", url=URL(f"http://api{url}")))

        async def answer(_: object) -> Any:
            return SimpleNamespace(status=status, content=Content(list(chunks)), close=lambda: None)

        return (await self.monitor.middleware(request, answer)).content

    async def read(self, url: str, *chunks: bytes, status: int = 200) -> list[bytes]:
        return [data async for data in (await self.get(url, *chunks, status=status)).iter_chunked(1)]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watch, "checked_line", lambda line, place: line)  # tests/security/test_hostile_api_server.py
    monkeypatch.setattr(watch, "AGAIN_S", 0.0)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return Streams(clock)


PODS = POD.path()
WATCH = f"{PODS}?watch=true"


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
    ids=["nothing", "half a line", "a line", "cut within lines", "byte by byte", "heartbeats"],
)
async def test_a_watch_gives_whole_lines(streams: Streams, chunks: list[bytes], lines: list[bytes]) -> None:
    assert await streams.read(WATCH, *chunks) == lines


@given(chunks=st.lists(st.text("a\n", max_size=4).map(str.encode), max_size=8))
async def test_all_whole_lines_and_nothing_else(chunks: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "checked_line", lambda line, place: line)
        out = await Streams(None).read(WATCH, *chunks)
    sent = b"".join(chunks)
    assert b"".join(out) == sent[: sent.rfind(b"\n") + 1]
    assert all(data.endswith(b"\n") for data in out)


async def test_all_else_of_a_stream_is_as_it_was(streams: Streams) -> None:
    assert (await streams.get(WATCH)).total_bytes == 7
    assert isinstance(await streams.get("/api/v1/namespaces"), Content)
    assert isinstance(await streams.get(PODS, status=403), Content)
    assert isinstance(await streams.get(WATCH, status=403), Content)


async def test_what_has_expired_is_listed_anew_and_ends_nothing(streams: Streams) -> None:
    assert await streams.read(WATCH, b"{}\n", status=410) == [LIST_ANEW]
    with pytest.raises(aiohttp.ClientPayloadError):
        await streams.get(f"{PODS}?continue=old", status=410)


async def test_only_bytes_are_life(streams: Streams) -> None:
    await streams.read(WATCH)
    streams.clock.now = 5.0
    await streams.read(WATCH)
    assert streams.monitor.ages() == {PODS: 5.0}, "a stream that is opened again and stays silent is dead"
    await streams.read(WATCH, b"\n")
    assert streams.monitor.ages() == {PODS: 0.0}


async def test_a_watch_that_gave_nothing_may_have_missed_something(streams: Streams) -> None:
    await streams.read(WATCH, b"{}\n")
    await streams.read(WATCH)
    assert streams.gaps == 0
    await streams.read(WATCH)
    assert streams.gaps == 1


async def test_a_second_list_is_a_gap_and_further_pages_are_not(streams: Streams) -> None:
    for url in (PODS, f"{PODS}?continue=more", "/apis/polyrl.dev/v1alpha1", "/apis/polyrl.dev/v1alpha1"):
        await streams.get(url)
    await streams.get(PODS, status=500)
    assert streams.gaps == 0
    await streams.get(PODS)
    assert streams.gaps == 1


def test_kopf_remembers_nothing_in_anybodys_object() -> None:
    persistence = kopf_settings(70.0).persistence
    body = kopf.Body({"metadata": {"name": "p"}, "spec": {"a": 1}})
    patch = kopf.Patch()
    essence = persistence.diffbase_storage.build(body=body)
    assert essence == {}
    persistence.diffbase_storage.store(body=body, patch=patch, essence=essence)
    persistence.progress_storage.touch(body=body, patch=patch, value="now")
    assert patch == {}
    assert persistence.diffbase_storage.fetch(body=body) is None
