"""A bad API server between the operator and the cluster: refusals, cut and silent streams, old lists, no server at all.

The operator neither falls nor storms it, ends where it would have ended, and says so when it can no longer see.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from polyrl_operator.api.connect import stream_session
from polyrl_operator.api.kinds import JOB, POD
from polyrl_operator.api.tenant_objects import JOBS_PAGE

SLOW_S = 3.0
REGIME_S = 15.0
MOST_ASKED = 15.0
"""Requests a second while a verb fails, for two jobs."""
POLL_S = 0.5
HOLD_S = 120.0


class FaultProxy:
    """Plain HTTP on loopback in front of the API server. What goes wrong is drawn by `seed`."""

    def __init__(self, place: Any, folder: Path, seed: int) -> None:
        self._place, self._folder, self._draw = place, folder, random.Random(seed)
        self.rate = 0.0
        self.frozen = False
        self.garbled = False
        self.gone = Counter[tuple[str, str]]()
        """What was answered 410 as a whole, while it is `expiring`."""
        self.expiring = False
        self.regime: Callable[[web.Request], str] = lambda request: ""
        """The fault of each request, for as long as it is set; empty: none."""
        self.deaf = asyncio.Event()
        self.requests = 0
        self.faults: list[str] = []
        self.writes: list[str] = []
        """Paths of requests that change something, in order."""
        self._lists: dict[str, bytes] = {}
        self._port = 0

    async def start(self) -> None:
        self._session = stream_session(self._place.configuration)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await self.open()

    async def open(self) -> None:
        """Listens, on the same port every time."""
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Nobody is there any more; open streams break."""
        for site in list(self._runner.sites):
            await site.stop()
        assert self._runner.server is not None
        await self._runner.server.shutdown(0.1)

    async def stop(self) -> None:
        self.deaf.set()
        await self._runner.cleanup()
        await self._session.close()

    def kubeconfig(self) -> Path:
        config = json.loads(self._place.server.kubeconfig().read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._port}"}
        file = self._folder / "through-proxy.kubeconfig"
        file.write_text(json.dumps(config))
        return file

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if request.method != "GET":
            self.writes.append(request.path)
        what = "watch" if request.query.get("watch") else "page" if request.query.get("continue") else ""
        if self.expiring and what and self.gone[what, request.path] < 2:
            self.gone[what, request.path] += 1
            return _refusal(410, "Expired")
        if fault := self.regime(request):
            self.faults.append(fault)
            return await self._fault(fault, request) or await self._forward(request)
        if "leases" not in request.path and self._draw.random() < self.rate:
            fault = self._draw.choice(["429", "500", "503", "late", "cut", "409", "410", "old"])
            answer = await self._fault(fault, request)
            if answer is not None:
                self.faults.append(fault)
                return answer
        return await self._forward(request)

    async def _fault(self, fault: str, request: web.Request) -> web.StreamResponse | None:
        listing = request.method == "GET" and not request.query.get("watch")
        if fault == "late":
            await asyncio.sleep(1.0)
            return await self._forward(request)
        if fault == "slow":
            await asyncio.sleep(SLOW_S)
            return await self._forward(request)
        if fault == "busy":
            return _refusal(429, "TooManyRequests", {"Retry-After": "30"})
        if fault == "cut" and request.transport is not None:
            request.transport.close()
            return web.Response(status=500)
        if fault == "410" and request.query.get("watch"):
            # As API servers say it: an event in a stream that began well.
            gone = {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired", "message": "too old"}
            return web.json_response({"type": "ERROR", "object": gone})
        if fault == "409" and request.method != "GET":
            return _refusal(409, "Conflict") if request.method == "PATCH" else None
        if fault == "old" and listing and request.path in self._lists:
            return web.Response(body=self._lists[request.path], content_type="application/json")
        if fault in ("429", "500", "503"):
            return _refusal(int(fault), "Trouble", {"Retry-After": "1"} if fault == "429" else None)
        return None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        data = await request.read() or None
        passed = ("accept", "content-type") if data is not None else ("accept",)
        headers = {key: value for key, value in request.headers.items() if key.lower() in passed}
        url = self._place.configuration.host + str(request.rel_url)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with self._session.request(request.method, url, data=data, headers=headers, timeout=timeout) as upstream:
            kind = {"Content-Type": upstream.headers.get("Content-Type", "application/json")}
            if not request.query.get("watch") or upstream.status != 200:
                body = await upstream.read()
                if request.method == "GET" and upstream.status == 200 and "limit" in request.query:
                    self._lists.setdefault(request.path, body)
                return web.Response(status=upstream.status, body=body, headers=kind)
            return await self._stream(request, upstream, kind)

    async def _stream(
        self, request: web.Request, upstream: aiohttp.ClientResponse, kind: dict[str, str]
    ) -> web.StreamResponse:
        """A watch, with empty lines as its heartbeat; a frozen one stands open and says nothing. One that is cut ends
        in order, in the middle of a line."""
        answer = web.StreamResponse(headers=kind)
        await answer.prepare(request)
        reading: asyncio.Task[bytes] | None = None
        last = b"\n"
        try:
            while not self.deaf.is_set():
                if self.frozen:
                    await asyncio.sleep(POLL_S)
                    continue
                reading = reading or asyncio.create_task(upstream.content.readany())
                done, _ = await asyncio.wait({reading}, timeout=POLL_S)
                data = reading.result() if done else b"\n" if last.endswith(b"\n") else b""
                if done:
                    reading = None
                if (done and not data) or self.garbled:
                    break
                if self.rate and self._draw.random() < self.rate / 4:
                    await answer.write(data[: len(data) // 2])
                    break
                if data:
                    await answer.write(data)
                    last = data
            if self.garbled:
                await answer.write(b"no event\n")
        finally:
            if reading is not None:
                reading.cancel()
        return answer


def _refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "code": status, "reason": reason, "message": f"drawn {status}"}
    return web.json_response(body, status=status, headers=headers)


@pytest.fixture
async def proxy(place: Any, tmp_path: Path, seed: int) -> AsyncIterator[FaultProxy]:
    made = FaultProxy(place, tmp_path, seed)
    await made.start()
    yield made
    await made.stop()


@pytest.mark.timeout(900)  # eight waits, one after another
async def test_trouble_of_every_kind_changes_nothing_in_the_end(
    place: Any, nodes: Any, start_operator: Any, proxy: FaultProxy
) -> None:
    proxy.rate = 0.3
    async with start_operator("--watch-silence=20", kubeconfig=proxy.kubeconfig()) as operator:
        for name in ("job", "two", "three"):
            await place.submit(name)
        for name in ("job", "two", "three"):
            await place.rollouts(2, name)
        lost = (await place.rollouts(2))[0]["metadata"]
        await place.client.delete(POD, place.namespace, lost["name"], lost["uid"], 0)
        await place.client.patch(JOB, place.namespace, "two", {"spec": {"suspend": True}})
        await nodes.finish_trainer(place.namespace, "three")
        await place.state("Suspended", name="two")
        await place.state("Complete", name="three")
        survivors = await place.rollouts(2)
        assert lost["uid"] not in {pod["metadata"]["uid"] for pod in survivors}
        await place.until("only the running job has rollouts", lambda: only(place, "job"))
        assert operator.process.returncode is None, operator.lines[-5:]
        assert len(proxy.faults) > 10, "there was trouble"
        print(f"{len(proxy.faults)} faults in {proxy.requests} requests: {sorted(set(proxy.faults))}")
        proxy.rate = 0.0
        before = proxy.requests
        await asyncio.sleep(5)
        assert proxy.requests - before < 150, "it does not storm the server when all is well"


async def only(place: Any, job: str) -> bool:
    return {pod["metadata"]["labels"]["polyrl.dev/job-name"] for pod in await place.pods("rollout")} == {job}


# A connection that was accepted while the proxy's listener closed is nobody's.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_server_that_is_away_is_waited_for(
    place: Any, nodes: Any, start_operator: Any, proxy: FaultProxy
) -> None:
    async with start_operator(kubeconfig=proxy.kubeconfig()) as operator:
        await place.submit()
        await place.rollouts(2)
        await proxy.close()
        lost = (await place.rollouts(2))[0]["metadata"]
        await place.client.delete(POD, place.namespace, lost["name"], lost["uid"], 0)
        # Longer than the holder of a Lease may act without renewing it.
        await asyncio.sleep(12)
        before, written = proxy.requests, len(proxy.writes)
        await proxy.open()
        await place.until("the lost rollout is replaced", lambda: replaced(place, lost["uid"]))
        assert operator.process.returncode is None
        assert "leases" in proxy.writes[written], "it takes the Lease anew before it writes anything else"
        assert proxy.requests - before < 500


async def replaced(place: Any, lost: str) -> bool:
    pods = [pod for pod in await place.pods("rollout") if pod["status"].get("phase") == "Running"]
    return len(pods) == 2 and lost not in {pod["metadata"]["uid"] for pod in pods}


async def test_a_watch_that_stands_open_and_is_silent_makes_it_unhealthy(
    place: Any, nodes: Any, start_operator: Any, proxy: FaultProxy
) -> None:
    async with start_operator("--watch-silence=2", kubeconfig=proxy.kubeconfig()) as operator:
        await place.submit()
        await place.rollouts(2)
        healthy_until = time.monotonic() + 9
        while time.monotonic() < healthy_until:
            assert await operator.get("/healthz") == (200, "ok\n")
            await asyncio.sleep(1)
        proxy.frozen = True
        _, message = await place.until("it is unhealthy", lambda: unhealthy(operator))
        assert message == "not ok\n", "a watch's path names a namespace"
        wrong = str(operator.logged("health changed")[-1]["wrong"])
        assert "the watch on" in wrong
        assert "gave nothing for" in wrong
        proxy.frozen = False
        await place.until("it is healthy again", lambda: healthy(operator))


async def test_while_watches_are_silent_lists_keep_it_right(
    place: Any, nodes: Any, start_operator: Any, proxy: FaultProxy
) -> None:
    """Streams stand open and say nothing, while what they would tell happens: it acts late, never wrongly."""
    async with start_operator("--watch-silence=2", kubeconfig=proxy.kubeconfig()) as operator:
        await place.submit()
        kept, lost = (pod["metadata"] for pod in await place.rollouts(2))
        proxy.frozen = True
        await asyncio.sleep(2 * POLL_S)
        await place.client.delete(POD, place.namespace, lost["name"], lost["uid"], 0)
        await place.until("the lost one is replaced", lambda: replaced(place, lost["uid"]))
        await place.submit("two")
        await place.rollouts(2, "two")
        proxy.frozen = False
        await place.until("all watches speak again", lambda: healthy(operator))
        live = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await place.pods("rollout")}
        assert live[kept["name"]] == kept["uid"], "who was well was left alone"
        assert len(live) == 4, "and nothing was made twice"
        assert [line["action"] for line in operator.logged("action") if line["action"].startswith("delete")] == []


async def test_what_a_watch_gives_garbled_is_seen_by_lists(
    place: Any, nodes: Any, start_operator: Any, proxy: FaultProxy
) -> None:
    """It ended the operator for all jobs, time and again."""
    async with start_operator(kubeconfig=proxy.kubeconfig()) as operator:
        await place.submit()
        lost = (await place.rollouts(2))[0]["metadata"]
        proxy.garbled = True
        await place.until("a watch is garbled", lambda: logged_strange(operator))
        await place.client.delete(POD, place.namespace, lost["name"], lost["uid"], 0)
        await place.until("the lost rollout is replaced", lambda: replaced(place, lost["uid"]))
        assert operator.process.returncode is None


async def test_what_expires_while_it_is_read_is_read_anew(
    place: Any, nodes: Any, start_operator: Any, proxy: FaultProxy
) -> None:
    """Pages of a slow list, and a watch whose version is compacted: as an answer of its own it ended the operator."""
    for number in range(JOBS_PAGE + 1):
        await place.submit(f"page-{number}", suspend=True)
    proxy.expiring = True
    async with start_operator(kubeconfig=proxy.kubeconfig()) as operator:
        await place.submit()
        await place.rollouts(2)
        assert {what for what, _ in proxy.gone} == {"watch", "page"}
        assert operator.process.returncode is None


def is_request(request: web.Request, method: str, end: str = "") -> bool:
    return request.method == method and request.path.endswith(end) and "leases" not in request.path


def watching(request: web.Request) -> bool:
    return bool(request.query.get("watch"))


REGIMES: dict[str, Callable[[web.Request], str]] = {
    "no status is stored": lambda request: "500" if is_request(request, "PATCH", "/status") else "",
    "no pod is made": lambda request: "500" if is_request(request, "POST", "/pods") else "",
    "nothing is changed": lambda request: "503" if request.method != "GET" and "leases" not in request.path else "",
    "no event is stored": lambda request: "500" if is_request(request, "POST", "/events") else "",
    "no watch begins": lambda request: "500" if watching(request) else "",
    "nothing is listed": lambda request: "503" if is_request(request, "GET") and not watching(request) else "",
    "all is reset": lambda request: "cut",
    "all is busy": lambda request: "busy",
    "all is slow": lambda request: "" if watching(request) else "slow",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("regime", REGIMES)
async def test_what_fails_for_a_while_is_neither_forgotten_nor_done_twice(
    regime: str, place: Any, nodes: Any, start_operator: Any, proxy: FaultProxy
) -> None:
    async with start_operator("--watch-silence=20", kubeconfig=proxy.kubeconfig()) as operator:
        await place.submit(scaling={"mode": "Manual"})
        lost = (await place.rollouts(2))[0]["metadata"]
        await asyncio.sleep(3)
        proxy.regime, before = REGIMES[regime], proxy.requests
        await place.client.delete(POD, place.namespace, lost["name"], lost["uid"], 0)
        await place.submit("two", activeDeadlineSeconds=3600)
        await asyncio.sleep(REGIME_S)
        rate = (proxy.requests - before) / REGIME_S
        proxy.regime, began = (lambda request: ""), time.monotonic()
        await place.rollouts(2, "two")
        took = time.monotonic() - began
        await place.until("the lost one is replaced and counted", lambda: counted(place, lost["uid"]))
        print(f"{regime}: {rate:.1f} requests/s; all is well {took:.1f} s and {time.monotonic() - began:.1f} s later")
        status = (await place.job())["status"]["rollout"]
        ordinals = [int(pod["metadata"]["name"].rpartition("-")[2]) for pod in await place.pods("rollout")]
        assert status["created"] == 3, "one follower"
        assert max(ordinals) <= 3
        assert operator.process.returncode is None
        assert rate < MOST_ASKED


async def counted(place: Any, lost: str) -> bool:
    pods = [pod for pod in await place.pods("rollout") if pod["metadata"]["labels"]["polyrl.dev/job-name"] == "job"]
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    status = (await place.job())["status"]["rollout"]
    return len(running) == 2 == len(pods) and status.get("preemptions") == 1


async def logged_strange(operator: Any) -> bool:
    return bool(operator.logged("a watch holds what is no change; it is left out"))


async def unhealthy(operator: Any) -> tuple[int, str] | None:
    answer: tuple[int, str] = await operator.get("/healthz")
    return answer if answer[0] == 503 else None


async def healthy(operator: Any) -> bool:
    return bool((await operator.get("/healthz"))[0] == 200)
