"""Hostile PolyRLJobs against all that reads one: lists, watches, the parser behind them, the cache, the decision."""

from __future__ import annotations

import json
import random
import tracemalloc
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
from polyrl_operator.api.client import Client
from polyrl_operator.api.kinds import JOB
from polyrl_operator.api.tenant_objects import JOBS_PAGE, MAX_JOB_BYTES
from polyrl_operator.informer.cache import Cache, JobKey
from polyrl_operator.informer.watch import StreamMonitor
from tests.security.hostile_jobs import DEEP, LONG, NESTED, hostile_job

PAGES = 400
"""Of eight jobs: 3,200 in 4 s on an idle core."""
GOOD: dict[str, Any] = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "good", "namespace": "ns", "uid": "uid-good", "resourceVersion": "7", "generation": 1},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {"path": "model"},
            "data": {"rl": [{"path": "prompts.jsonl"}]},
            "reward": {"function": "rewards:exact"},
            "algorithm": {"steps": 4},
        },
        "rollout": {"replicas": 2, "minReplicas": 0, "maxReplicas": 8},
    },
}
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
