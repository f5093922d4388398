"""Answers that no API server should give: lists and watches of other shapes, without an end, or that lead elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client.api_client import ApiClient
from yarl import URL

from polyrl_operator.api import client as client_module, connect
from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.connect import load_configuration
from polyrl_operator.api.kinds import JOB, KINDS, POD
from polyrl_operator.informer import watch
from polyrl_operator.informer.cache import Cache
from polyrl_operator.informer.resync import Resync
from polyrl_operator.informer.watch import StreamMonitor

CONFIG_MAP = KINDS["ConfigMap"]
GOOD = {"metadata": {"name": "good", "namespace": "n", "uid": "u", "resourceVersion": "3"}}
STRANGE: list[Any] = [
    5,
    "x",
    None,
    [],
    {},
    {"metadata": None},
    {"metadata": {}},
    {"metadata": {"name": 5, "uid": "u"}},
    {"metadata": {"name": "a", "uid": []}},
    {"metadata": {"name": "a", "uid": "u", "namespace": {}}},
    {"metadata": {"name": "a", "uid": "u", "resourceVersion": "abc"}},
    {"metadata": {"name": "a", "uid": "u", "resourceVersion": "9" * 5000}},
]
NO_LISTS: list[Any] = [
    None,
    [1],
    "x",
    {"items": []},
    {"metadata": {"resourceVersion": "x-7"}, "items": []},
    {"metadata": {"resourceVersion": "9" * 5000}, "items": []},
    {"metadata": {}, "items": {"a": 1}},
    {"metadata": {"continue": 5}, "items": []},
]
Answers = dict[str, Any]


class Server:
    """Answers each path as it is said, or as a function of the request says, else by an empty list."""

    def __init__(self) -> None:
        self.answers = Answers()
        self.leads_to = ""
        """Where it redirects all requests."""
        self.arrived: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.arrived.append(f"{request.method} {request.path}")
        found = self.answers.get(request.path.rpartition("/")[2], {"metadata": {"resourceVersion": "9"}, "items": []})
        if self.leads_to:
            raise web.HTTPTemporaryRedirect(self.leads_to)
        if callable(found):
            found = found(request)
        return web.Response(body=found if isinstance(found, bytes) else json.dumps(found).encode())


@pytest.fixture
async def served(tmp_path: Any) -> AsyncIterator[tuple[Server, Client]]:
    server, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {"clusters": [{"name": "c", "cluster": {"server": address}}], "users": [{"name": "u", "user": {}}]}
    config |= {"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "current-context": "c"}
    (tmp_path / "kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config"} | config))
    api = ApiClient(await load_configuration(tmp_path / "kubeconfig"))
    yield server, Client(api)
    await api.close()
    await runner.cleanup()


def resync_of(client: Client) -> tuple[Resync, Cache]:
    cache = Cache(lambda key: None)
    return Resync(client, cache, None, nodes=False), cache


@pytest.mark.parametrize("kind", [JOB, CONFIG_MAP, POD], ids=lambda kind: kind.plural)
async def test_what_is_no_object_is_left_out_and_the_others_are_read(served: tuple[Server, Client], kind: Any) -> None:
    server, client = served
    server.answers[kind.plural] = {"metadata": {"resourceVersion": "9"}, "items": [*STRANGE, GOOD, *STRANGE]}
    pages = [page async for page in client.pages(kind, None)]
    assert [[item["metadata"]["name"] for item in items] for items, _ in pages] == [["good"]]
    await resync_of(client)[0].read_all()


@pytest.mark.parametrize("answer", NO_LISTS, ids=lambda answer: json.dumps(answer)[:40])
@pytest.mark.parametrize("kind", [JOB, CONFIG_MAP], ids=lambda kind: kind.plural)
async def test_what_is_no_list_is_one_error(served: tuple[Server, Client], kind: Any, answer: Any) -> None:
    server, client = served
    server.answers[kind.plural] = answer
    with pytest.raises(ApiError, match="is answered with what"):
        await resync_of(client)[0].read_all()


async def test_pages_without_an_end_are_one_error(
    served: tuple[Server, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = served
    server.answers[POD.plural] = {"metadata": {"continue": "c"}, "items": []}
    with pytest.raises(ApiError, match="it names itself as the next page"):
        await resync_of(client)[0].read_all()
    monkeypatch.setattr(client_module, "MAX_PAGES", 1)
    with pytest.raises(ApiError, match="is answered with more than 1 pages"):
        await resync_of(client)[0].read_all()


async def test_an_answer_larger_than_any_is_one_error(
    served: tuple[Server, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = served
    monkeypatch.setattr(connect, "MAX_BODY", 1000)
    server.answers[POD.plural] = b" " * 1001 + b"{}"
    with pytest.raises(ApiError, match="it sends more than 1,000 bytes"):
        await resync_of(client)[0].read_all()


def fat(name: str) -> Any:
    """An object as large as the API server lets a tenant's be."""
    return {"metadata": {"name": name, "namespace": "n", "uid": name, "resourceVersion": "3"}, "spec": "x" * 400}


def page_as_asked(request: web.Request) -> bytes:
    """Of nine such pods."""
    begin, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
    items = [fat(f"p{number}") for number in range(begin, min(9, begin + limit))]
    more = str(begin + limit) if begin + limit < 9 else ""
    return json.dumps({"metadata": {"resourceVersion": "9", "continue": more}, "items": items}).encode()


@pytest.mark.parametrize("kind", [JOB, CONFIG_MAP, POD], ids=lambda kind: kind.plural)
async def test_a_page_of_objects_that_are_too_large_together_is_asked_for_with_fewer(
    served: tuple[Server, Client], monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """A tenant's 200 pods, each as large as may be, kept all new jobs of the cluster waiting."""
    server, client = served
    monkeypatch.setattr(connect, "MAX_BODY", 1200)
    server.answers[kind.plural] = page_as_asked
    pages = [items async for items, _ in client.pages(kind, None)]
    assert [item["metadata"]["name"] for items in pages for item in items] == [f"p{number}" for number in range(9)]
    monkeypatch.setattr(connect, "MAX_BODY", 300)
    with pytest.raises(ApiError, match="it sends more than 300 bytes"):
        [page async for page in client.pages(kind, None)]


@pytest.mark.parametrize("kind", [JOB, POD], ids=lambda kind: kind.plural)
async def test_kopf_lists_in_smaller_pages_after_one_that_was_too_large(kind: Any) -> None:
    class Oversized:
        async def read(self) -> bytes:
            raise connect.OversizedAnswer("it sends more than that")

    monitor, limits = StreamMonitor(lambda: None), list[int]()

    async def list_once() -> None:
        request = SimpleNamespace(method="GET", url=URL(f"http://server{kind.path(None)}"))

        async def handle(sent: Any) -> Any:
            limits.append(int(sent.url.query["limit"]))
            return SimpleNamespace(status=200, content=Oversized())

        response = await monitor.middleware(request, handle)  # type: ignore[arg-type]
        with pytest.raises(connect.OversizedAnswer):
            await response.content.read()

    for _ in range(10):
        await list_once()
    first = limits[0]
    assert limits[:3] == [first, first // 2, first // 4]
    assert limits[-1] == 1


async def test_what_is_written_is_sent_nowhere_else(served: tuple[Server, Client]) -> None:
    server, client = served
    port = client.url("").rpartition(":")[2]
    server.leads_to = f"http://localhost:{port}/elsewhere"
    item = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "a", "namespace": "n"}}
    with pytest.raises(ApiError, match="does not answer: it redirects to http://localhost"):
        await client.create(item)
    assert not any("elsewhere" in one for one in server.arrived)


@pytest.mark.parametrize("kind", [JOB, POD], ids=lambda kind: kind.plural)
async def test_kopf_is_given_objects_and_changes_alone(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the operator at what is none, and at each error of a watch but 410."""
    monkeypatch.setattr(watch, "AGAIN_S", 0.0)
    changes = [{"type": "ADDED", "object": one} for one in (*STRANGE, GOOD)] + [{"type": "ADDED"}, 5, [], None]
    changes += [{"type": "WHAT", "object": GOOD}, {"type": "BOOKMARK", "object": 5}]
    changes += [{"type": "ERROR", "object": one} for one in (None, {"code": "500"}, {"code": 500})]
    lines = [json.dumps(one).encode() + b"\n" for one in changes] + [b"\0no json\n"]
    gaps = list[None]()
    monitor = StreamMonitor(lambda: gaps.append(None))
    content = (await asked(kind, "?watch=true", b"".join(lines), monitor)).content
    given = [json.loads(one) async for part in content.iter_chunked(1 << 20) for one in part.splitlines()]
    assert [one["type"] for one in given] == ["ADDED", "ERROR", "ERROR", "ERROR"]
    assert given[0]["object"]["metadata"] == GOOD["metadata"]
    assert {one["object"]["code"] for one in given[1:]} == {410}
    assert gaps, "what was left out may have been a change: everything is listed"
    page = {"metadata": {"resourceVersion": "9"}, "items": [*STRANGE, GOOD]}
    listed = json.loads(await (await asked(kind, "", json.dumps(page).encode())).content.read())
    assert [one["metadata"]["name"] for one in listed["items"]] == ["good"]
    for answer in NO_LISTS:
        with pytest.raises(aiohttp.ClientPayloadError):
            await (await asked(kind, "", json.dumps(answer).encode())).content.read()


async def test_a_watch_that_ends_at_once_is_opened_no_more_than_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(watch, "asyncio", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monitor = StreamMonitor(lambda: None)
    for _ in range(3):
        await asked(POD, "?watch=true", b"", monitor)
    assert pauses == [0.0, watch.AGAIN_S, 2 * watch.AGAIN_S]


async def test_a_line_without_an_end_ends_its_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_LINE", 1000)
    content = (await asked(POD, "?watch=true", b"x" * 1001)).content
    with pytest.raises(aiohttp.ClientPayloadError, match="a line without an end"):
        [part async for part in content.iter_chunked(1 << 20)]


class Content:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        yield self._data


async def asked(kind: Any, query: str, data: bytes, monitor: StreamMonitor | None = None) -> Any:
    """The answer to a request of kopf's."""

    async def answer(_: object) -> Any:
        return SimpleNamespace(status=200, content=Content(data))

    request: Any = SimpleNamespace(method="GET", url=URL(f"http://api{kind.path()}{query}"))
    return await (monitor or StreamMonitor(lambda: None)).middleware(request, answer)
