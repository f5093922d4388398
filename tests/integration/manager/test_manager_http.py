"""The HTTP API: what it answers fits its OpenAPI document; without the token, or malformed, it answers one sentence."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from polyrl.control import DrainAnswer, Health, History, Waits
from polyrl.keys import OperatorKeys, read_keys
from polyrl.status import ManagerStatus
from polyrl.weights import WeightsRef
from polyrl_rollout.manager.openapi import make_openapi

DOCUMENT = Path(__file__).parents[3] / "docs/reference/manager-api.json"
DEADLINE_S = 20.0


@pytest.fixture
async def http(site: Any) -> AsyncIterator[aiohttp.ClientSession]:
    token = read_keys(OperatorKeys, site.keys / "operator.key").http_token
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(site.manager.endpoints.http, headers=headers, timeout=timeout) as session:
        yield session


def check_answer(path: str, method: str, body: bytes) -> None:
    """`body` is what the document promises."""
    document = json.loads(DOCUMENT.read_text())
    answer = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(json.loads(body), {**answer, "components": document["components"]})


def test_the_document_is_current() -> None:
    assert json.loads(DOCUMENT.read_text()) == json.loads(json.dumps(make_openapi())), (
        "run: python -m polyrl_rollout.manager.openapi"
    )


async def test_answers_are_what_the_document_promises(site: Any, http: aiohttp.ClientSession) -> None:
    agent = asyncio.create_task(site.agent("engine-1").run())
    async with site.client() as client:
        await site.run_work(client, [site.group(number) for number in range(2)])
        await client.submit([site.group(5, tokens=5000)])
        await client.report(
            "rl", 3, {"reward/mean": 0.5, "timing_s/step": 2.0, "reward": 0.5, "odd": math.nan}, [b"{}"]
        )
        bodies = {"/v1/status": ManagerStatus, "/v1/waits": Waits, "/v1/history": History, "/healthz": Health}
        for path, kind in bodies.items():
            async with http.get(path) as response:
                body = await response.read()
            assert response.status == 200
            check_answer(path, "get", body)
            msgspec.json.decode(body, type=kind)
        async with http.get("/metrics") as response:
            text = await response.text()
        async with http.get("/v1/history") as response:
            kept = msgspec.json.decode(await response.read(), type=History)
        async with http.get(f"/v1/history?after={kept.rows[-1].time}") as response:
            assert msgspec.json.decode(await response.read(), type=History).rows == ()
    assert [(row.phase, row.step, row.values) for row in kept.rows] == [
        ("rl", 3, {"reward/mean": 0.5, "timing_s/step": 2.0})
    ]
    assert {(event.kind, event.worker) for event in kept.events} == {
        ("started", "trainer"), ("started", "engine-1"), ("serving", "engine-1")
    }  # fmt: skip
    assert "polyrl_reward 0.5" in text
    assert 'polyrl_steps{stage="rl"} 3.0' in text
    assert 'polyrl_step_seconds{stage="rl"} 2.0' in text
    assert "polyrl_cost" not in text  # no prices, no money
    assert "polyrl_samples_acknowledged_total 8.0" in text
    assert 'polyrl_engines{pool="spot",state="serving"} 1.0' in text
    assert 'polyrl_frames_total{direction="in",socket="agents"}' in text
    assert 'polyrl_weight_pause_seconds_total{part="wait"}' in text
    assert "polyrl_weight_pull_seconds_total" in text
    assert "engine-1" not in text
    agent.cancel()


async def test_waits_name_who_waits_for_whom(site: Any, http: aiohttp.ClientSession) -> None:
    async with site.client() as client:
        await client.submit([site.group(0)])
        async with http.get("/v1/waits") as response:
            waits = msgspec.json.decode(await response.read(), type=Waits).waits
    assert any("4 samples" in wait and "any engine that serves version 0 (there is none)" in wait for wait in waits)


async def test_drain_moves_the_work_and_can_be_repeated(site: Any, http: aiohttp.ClientSession) -> None:
    first, second = (asyncio.create_task(site.agent(name).run()) for name in ("first", "second"))
    async with site.client() as client:
        work = asyncio.create_task(site.run_work(client, [site.group(n, tokens=2000) for n in range(4)]))
        await site.eventually(lambda: site.manager.status().tokens.generated > 500)
        body = {"engine": "first", "deadlineSeconds": 0, "reason": "spot notice"}
        for _ in range(2):
            async with http.post("/v1/drain", json=body) as response:
                answer = await response.read()
            check_answer("/v1/drain", "post", answer)
        await asyncio.wait_for(first, DEADLINE_S)
        assert len(await asyncio.wait_for(work, DEADLINE_S)) == 16
    assert site.manager.status().engines_lost == 0
    async with http.post("/v1/drain", json=body) as response:
        assert msgspec.json.decode(await response.read(), type=DrainAnswer) == DrainAnswer(engine="first", known=False)
    second.cancel()


async def test_the_page_shows_steps_and_samples_and_no_foreign_text_is_markup(
    site: Any, http: aiohttp.ClientSession
) -> None:
    hostile = "</pre><script>alert(1)</script>"
    made = {"time": 1.0, "stage": "rl", "step": 3, "sample": "7.0", "group": 7, "finish": "stop", "versions": [1]}
    texts = {"prompt": hostile, "response": hostile, "prompt_tokens": 1, "response_tokens": 1}
    sample = {**made, **texts, "purpose": "train", "reward": 0.5, "metrics": {hostile: 1.0}}
    async with site.client() as client:
        await client.report(
            "rl", 3, {"reward/mean": 0.5, "timing_s/step": 2.0, f"reward/{hostile}": 1.0}, [json.dumps(sample).encode()]
        )
        async with http.get("/v1/page") as response:
            text, headers = await response.text(), response.headers
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store"
    assert "<script" not in text
    assert "sample 7.0" in text
    assert "3 of 1 rl" in text
    assert 'http-equiv="refresh"' in text


async def test_the_port_of_its_own_shows_numbers_without_a_token_and_nothing_else(site: Any) -> None:
    host, port = site.manager._metrics.address
    async with aiohttp.ClientSession(f"http://{host}:{port}") as http:
        for path, status in (("/metrics", 200), ("/v1/status", 404), ("/v1/history", 404), ("/healthz", 404)):
            async with http.get(path) as response:
                assert response.status == status, path


@pytest.mark.parametrize(
    "path", ["/v1/status", "/v1/waits", "/v1/history", "/v1/page", "/v1/drain", "/metrics", "/nowhere"]
)
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer no"}, {"Authorization": "Basic eDp5"}])
async def test_without_the_token_there_is_nothing(site: Any, path: str, header: dict[str, str]) -> None:
    async with aiohttp.ClientSession(site.manager.endpoints.http) as http, http.get(path, headers=header) as response:
        assert response.status == 401
        assert "bearer token" in (await response.json())["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "sentence"),
    [
        ("POST", "/v1/drain", b"", 400, "not a drain request"),
        ("POST", "/v1/drain", b"{", 400, "not a drain request"),
        ("POST", "/v1/drain", b'{"engine": "e"}', 400, "deadlineSeconds"),
        ("POST", "/v1/drain", b'{"engine": "e", "deadlineSeconds": -1, "reason": "r"}', 400, "deadlineSeconds"),
        ("POST", "/v1/drain", b'{"engine": "e", "deadlineSeconds": "1", "reason": "r"}', 400, "deadlineSeconds"),
        ("POST", "/v1/drain", b'{"engine": "", "deadlineSeconds": 1, "reason": "r"}', 400, "engine"),
        (
            "POST",
            "/v1/drain",
            b'{"engine": "e", "deadlineSeconds": 1, "reason": "r", "x": 1}',
            400,
            "unknown field `x`",
        ),
        ("POST", "/v1/drain", b"x" * (1 << 20), 413, "Too Large"),
        ("GET", "/v1/drain", b"", 405, "Method Not Allowed"),
        ("GET", "/v2/status", b"", 404, "Not Found"),
        ("GET", "/v1/status?since=x", b"", 400, "since is not a number"),
        ("GET", "/v1/status?waitSeconds=inf", b"", 400, "waitSeconds is not a number"),
        ("GET", "/v1/status?waitSeconds=nan", b"", 400, "waitSeconds is not a number"),
    ],
)
async def test_a_malformed_request_gets_one_sentence(
    http: aiohttp.ClientSession, method: str, path: str, body: bytes, status: int, sentence: str
) -> None:
    async with http.request(method, path, data=body) as response:
        assert response.status == status
        assert sentence in (await response.json())["error"]


async def test_a_watcher_is_answered_by_the_next_change(site: Any, http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/status") as response:
        seen = msgspec.json.decode(await response.read(), type=ManagerStatus).seq

    async def watch() -> ManagerStatus:
        async with http.get(f"/v1/status?since={seen}&waitSeconds=15") as response:
            return msgspec.json.decode(await response.read(), type=ManagerStatus)

    watching = asyncio.create_task(watch())
    done, _ = await asyncio.wait([watching], timeout=0.4)
    assert not done
    async with site.client() as client:
        await client.submit([site.group(0)])
        status = await asyncio.wait_for(watching, DEADLINE_S)
    assert status.seq > seen
    assert status.trainer_connected


async def test_a_watcher_without_a_change_is_answered_in_time(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/status?since=1000000&waitSeconds=0.2") as response:
        assert msgspec.json.decode(await response.read(), type=ManagerStatus).seq < 1_000_000


@pytest.mark.parametrize(
    ("phase", "step", "values"),
    [
        pytest.param("rl", 0, {f"reward/{n}": 1.0 for n in range(200)}, id="a reward function that names 200 numbers"),
        pytest.param("rl", 0, {"reward/" + 600 * "n": 1.0}, id="a long name"),
        pytest.param("p" * 600, 0, {}, id="a long phase"),
        pytest.param("rl", 1 << 60, {}, id="a step that JSON's readers round"),
        pytest.param("rl", -1, {}, id="a step before the first"),
        pytest.param("rl", 0, {"stepSeconds": 1e300}, id="a step of more seconds than there are"),
    ],
)
async def test_whatever_a_trainer_reports_the_status_can_be_read(
    site: Any, http: aiohttp.ClientSession, phase: str, step: int, values: dict[str, float]
) -> None:
    """Else who follows it, a run's own runner or the operator, ends or sees nothing any more."""
    times = {"rolloutSeconds": 1.0, "trainSeconds": 2.0, "stepSeconds": 3.0, "reward": 0.5}
    async with site.client() as client:
        await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b"hash"))
        await client.submit([site.group(0)])
        await client.report(phase, step, {**values, **times, **values})
        async with http.get("/v1/status") as response:
            body = await response.read()
    status = msgspec.json.decode(body, type=ManagerStatus)
    assert status.values["reward"] == 0.5
    check_answer("/v1/status", "get", body)
