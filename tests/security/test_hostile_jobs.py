"""Hostile PolyRLJobs against all that reads one: lists, watches, the parser behind them, the cache, the decision."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from kubernetes.aio.client.api_client import ApiClient
from yarl import URL

from polyrl.cluster.observation.job import job_facts
from polyrl.cluster.reconcile import reconcile
from polyrl.cluster.resources.owner import Settings
from polyrl.cluster.state import ReconcileState
from polyrl.testing.job_values import raw_job
from polyrl_operator.api import tenant_objects
from polyrl_operator.api.client import Client
from polyrl_operator.api.kinds import JOB
from polyrl_operator.api.tenant_objects import JOBS_PAGE, MAX_JOB_BYTES
from polyrl_operator.informer.cache import Cache, JobKey
from polyrl_operator.informer.watch import StreamMonitor
from tests.security.hostile_jobs import DEEP, LONG, NESTED, hostile_job

PAGES = 400 * int(os.environ.get("POLYRL_FUZZ", "1"))
"""Of eight jobs: 3,200 in 4 s on an idle core; POLYRL_FUZZ=32 makes it 100,000."""
GOOD = raw_job() | {
    "metadata": {"name": "good", "namespace": "ns", "uid": "uid-good", "resourceVersion": "7", "generation": 1}
}
ROOT = Path(__file__).parents[2]
FLOOD = 150
"""Hostile jobs for the operator's process: two seconds on an idle core, beside its start."""
MOST_RSS_MIB = 320
LONGEST_PAUSE_S = 1.0
"""Of the operator's loop; half of it is parsed by a thread that gives way every few milliseconds."""
SETTINGS = Settings(manager_image="m", trainer_image="t", rollout_image="r")
KEY = JobKey("ns", "good")


class ApiServer:
    """Answers every request with the text that it holds, as `ApiClient` gives it and as a session of kopf's does."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.headers: dict[str, str] = {}
        self.status, self.total_bytes = 200, 0
        self.configuration = SimpleNamespace(host="http://api")
        self.rest_client = self

    async def update_params_for_auth(self, *_: object) -> None:
        return None

    async def request(self, *_: object, **__: object) -> ApiServer:
        return self

    async def read(self) -> bytes:
        return self.data

    async def iter_chunked(self, size: int) -> Any:
        for begin in range(0, len(self.data), size):
            yield self.data[begin : begin + size]

    def client(self) -> Client:
        return Client(cast(ApiClient, self))

    async def kopf(self, query: str) -> Any:
        """What kopf is given to read, and the request that was sent for it."""
        request = SimpleNamespace(method="GET", url=URL(f"http://api{JOB.path()}{query}"))

        async def handler(_: object) -> Any:
            return SimpleNamespace(status=200, content=self)

        answer = await StreamMonitor(lambda: None).middleware(cast(aiohttp.ClientRequest, request), handler)
        return answer.content, request


def page(jobs: list[str]) -> str:
    return f'{{"kind":"PolyRLJobList","metadata":{{"resourceVersion":"9"}},"items":[{",".join(jobs)}]}}'


def job_with(config: str, name: str = "bad") -> str:
    job = json.loads(json.dumps(GOOD))
    job["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    job["spec"]["recipe"]["model"]["config"] = {"x": "HERE"}
    return json.dumps(job).replace('"HERE"', config)


async def listed(text: str) -> list[dict[str, Any]]:
    return [item async for items, _ in ApiServer(text).client().pages(JOB, None) for item in items]


def decided(raw: dict[str, Any]) -> Any:
    """The status that one job gets, from the cache on."""
    cache = Cache(lambda _: None)
    cache.observe(JOB, raw)
    held = cache.job(JobKey("ns", raw["metadata"]["name"]))
    assert held is not None
    facts = job_facts(held, pods=(), trainer=None, nodes=None, claims=(), children=(), manager=None, dry_run=None)
    return reconcile(facts, SETTINGS, ReconcileState(), 1000.0).status


@pytest.mark.parametrize("nested", NESTED)
async def test_one_that_is_nested_too_deeply_leaves_the_others_readable(nested: Any) -> None:
    bad = job_with(nested(DEEP))
    found = await listed(page([bad, json.dumps(GOOD)]))
    assert found[1] == GOOD
    accepted = decided(found[0]).condition("Accepted")
    assert (accepted.status, accepted.reason) == ("False", "Invalid")
    assert accepted.message == "the object is nested too deeply; at most 64 levels are read"


async def test_one_that_is_too_large_leaves_the_others_readable() -> None:
    found = await listed(page([job_with(f'"{"x" * LONG}"'), json.dumps(GOOD)]))
    assert found[1] == GOOD
    assert "bytes as stored; at most 262,144 are read" in decided(found[0]).condition("Accepted").message


async def test_its_status_is_kept_and_so_is_who_it_is() -> None:
    bad = json.loads(job_with('"HERE"')) | {"status": {"rollout": {"created": 3}}}
    text = json.dumps(bad).replace('"HERE"', NESTED[0](DEEP))
    (found,) = await listed(page([text]))
    assert found["metadata"]["uid"] == "uid-bad"
    assert found["status"] == {"rollout": {"created": 3}}


async def test_a_status_that_is_none_keeps_no_other_from_being_written() -> None:
    for junk in (5, "x", [[]], None):
        (found,) = await listed(page([json.dumps(GOOD | {"status": junk})]))
        assert found == GOOD
        deep = json.loads(job_with('"HERE"')) | {"status": junk}
        (found,) = await listed(page([json.dumps(deep).replace('"HERE"', NESTED[0](DEEP))]))
        assert "status" not in found


async def test_an_answer_to_one_request_is_screened_as_a_list_is() -> None:
    for text in (job_with(NESTED[0](DEEP)), job_with(f'"{"x" * LONG}"')):
        found = await ApiServer(text).client().get(JOB, "ns", "bad")
        assert found is not None
        assert "spec" not in found
        assert "unreadable" in await ApiServer(text).client().patch(JOB, "ns", "bad", {}, "status")


async def test_kopf_is_given_what_its_parser_takes() -> None:
    bad = job_with(NESTED[0](DEEP))
    content, request = await ApiServer(page([bad, json.dumps(GOOD)])).kopf("?limit=200")
    assert request.url.query["limit"] == str(JOBS_PAGE)
    assert [item["metadata"]["name"] for item in json.loads(await content.read())["items"]] == ["bad", "good"]
    lines = f'{{"type":"ADDED","object":{bad}}}\n{{"type":"ADDED","object":{json.dumps(GOOD)}}}\n'
    content, _ = await ApiServer(lines).kopf("?watch=true")
    seen = b"".join([data async for data in content.iter_chunked(1000)]).splitlines()
    assert [json.loads(line)["object"]["metadata"]["name"] for line in seen] == ["bad", "good"]
    assert json.loads(seen[1])["object"] == GOOD


def flattened(text: str, level: int, deepest: int) -> str:
    """The same, bracket by bracket."""
    kept, begin, depth, too_deep, in_string, escaped = "", 0, 0, False, False, False
    for at, char in enumerate(text):
        if in_string or char == '"':
            in_string, escaped = (
                (char != '"' or escaped) if in_string else True,
                in_string and char == "\\" and not escaped,
            )
        elif char in "[{":
            depth += 1
            begin, too_deep = (at, False) if depth == level else (begin, too_deep or depth > deepest)
            kept += char if depth < level else ""
        elif char in "]}":
            depth -= 1
            kept += char if depth < level - 1 else ""
            if depth == level - 1:
                kept += '"polyrl.dev/cut-off"' if too_deep else text[begin : at + 1]
        if char not in "[]{}" or in_string:
            kept += char if depth < level else ""
    return kept


def test_what_is_cut_off_is_what_reading_bracket_by_bracket_cuts_off(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        monkeypatch.setattr(tenant_objects, "PART_BYTES", draw.choice((1, 2, 3, 7, 64)))
        text = "{" + ",".join(f'"k{n}":{small_value(draw, 5)}' for n in range(draw.randrange(4))) + "}"
        level, deepest = draw.choice(((2, 2), (2, 3), (3, 4)))
        assert tenant_objects._flattened(text.encode(), level, deepest).decode() == flattened(text, level, deepest), (
            text
        )


def small_value(draw: random.Random, depth: int) -> str:
    if not depth or draw.random() < 0.3:
        return draw.choice(('"a"', '"]\\\\"', '"\\"{"', '""', "1", '"\\\\\\"["', "null"))
    values = [small_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return f"[{','.join(values)}]" if draw.random() < 0.5 else "{" + ",".join(f'"x":{one}' for one in values) + "}"


async def test_bookmarks_and_ends_of_a_watch_pass_as_they_are() -> None:
    lines = b'{"type":"BOOKMARK","object":{"kind":"PolyRLJob"}}\n\n{"type":"ERROR","object":{"code":410}}\n'
    content, _ = await ApiServer(lines.decode()).kopf("?watch=true")
    assert b"".join([data async for data in content.iter_chunked(7)]) == lines


async def test_a_page_of_the_largest_jobs_costs_no_multiple_of_its_bytes() -> None:
    """Of small values, a megabyte of JSON is thirty of objects: they are never made."""
    text = page([job_with("[" + "[]," * (100 << 10) + "[]]")])
    tracemalloc.start()
    found = await listed(text)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 1
    assert len(text) > MAX_JOB_BYTES
    assert most < 4 * len(text)


WIDE = "[" + "[]," * 5000 + "[]]"


async def test_one_of_very_many_parts_is_not_read() -> None:
    found = await listed(page([job_with(WIDE), job_with('"' + "[" * 5000 + '"', "long-text"), json.dumps(GOOD)]))
    assert found[2] == GOOD
    assert "lists and maps; at most 4,096 are read" in decided(found[0]).condition("Accepted").message
    assert found[1]["metadata"]["name"] == "long-text", "what stands in a text is no part"
    assert "spec" in found[1]


async def test_a_page_of_the_worst_jobs_keeps_nobody_waiting() -> None:
    """1.4 MB each, of brackets as deep as the API server takes them; this took 12 s, in which no other job was seen."""
    nested = "[" + ",".join("[" * 4000 + "]" * 4000 for _ in range(180)) + "]"
    text, gaps = page([job_with(nested, f"bad-{number}") for number in range(JOBS_PAGE)]), list[float]()

    async def tick() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    assert len(await listed(text)) == JOBS_PAGE
    content, _ = await ApiServer(text).kopf("?limit=200")
    assert len(json.loads(await content.read())["items"]) == JOBS_PAGE
    ticking.cancel()
    assert max(gaps) < LONGEST_PAUSE_S


@pytest.mark.parametrize("seed", range(2))
async def test_thousands_of_hostile_jobs_become_conditions_of_theirs(seed: int) -> None:
    draw = random.Random(seed)
    for number in range(PAGES // 2):
        jobs = [hostile_job(draw, f"j{number}-{n}", GOOD) for n in range(JOBS_PAGE - 1)]
        found = await listed(page([*jobs, json.dumps(GOOD)]))
        assert found[-1] == GOOD, f"seed {seed}, page {number}"
        for raw in found:
            json.loads(json.dumps(raw))
            status = decided(raw)
            assert status.condition("Accepted") is not None
            json.dumps(status.model_dump(mode="json", by_alias=True, exclude_none=True))


def test_a_flood_of_jobs_leaves_honest_ones_looked_after(tmp_path: Path) -> None:
    """A slice of benchmarks/security, with the operator's own process."""
    script = ROOT / "benchmarks/security/hostile_jobs.py"
    command = [sys.executable, str(script), "--bodies", str(FLOOD), "--out", str(tmp_path / "flood.svg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["bodies"], found["distinct"], found["statuses"], found["alive"]) == (FLOOD, FLOOD, FLOOD, True)
    assert found["rssMiB"]["highest"] < MOST_RSS_MIB
    assert (tmp_path / "flood.svg").stat().st_size
