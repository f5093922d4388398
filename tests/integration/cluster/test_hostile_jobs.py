"""Hostile PolyRLJobs on a real API server and the operator's own process: the others are looked after, within its
memory, and a bad one learns why in its own condition. POLYRL_FUZZ=100 makes it some thousands."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from polyrl_operator.api.connect import stream_session
from polyrl_operator.api.kinds import JOB
from tests.security.hostile_jobs import NESTED, hostile_job

TIMES = int(os.environ.get("POLYRL_FUZZ", "1"))
DRAWN = 12 * TIMES
LIMIT_S = 300 + 15 * TIMES
"""Of the test: a job of those that are taken has some twenty objects, which the API server makes and deletes."""
LARGE = 8
MOST_MEMORY = 320 << 20
"""Resident, of the chart's 512 MiB: an idle operator holds 110."""


@pytest.mark.timeout(LIMIT_S)
async def test_hostile_jobs_hurt_nobody_else(place: Any, nodes: Any, start_operator: Any) -> None:
    good = await place.submit()
    await submit_texts(place, hostile(good, "listed"))
    async with start_operator() as operator:
        await place.rollouts(2)
        # What was there at the start came by lists, what comes now comes by watches.
        await submit_texts(place, hostile(good, "watched"))
        await place.submit("second")
        await place.rollouts(2, "second")
        for name in ("listed-deep-0", "watched-deep-0", "listed-large-0", "watched-large-0"):
            accepted = await place.until(f"{name} is refused", lambda name=name: refused(place, name))
            assert "at most" in accepted["message"]
        assert resident(operator.process.pid) < MOST_MEMORY
        assert (await operator.get("/healthz"))[0] == 200
        assert await operator.end() == 0


def hostile(good: dict[str, Any], prefix: str) -> list[str]:
    """Deep ones, large ones, and some drawn by a seed."""
    draw = random.Random(prefix)
    base = {key: good[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {}}
    many = "[" + "[]," * (200 << 10) + "[]]"
    configs = [(f"deep-{number}", nested(1100)) for number, nested in enumerate(NESTED)]
    configs += [(f"large-{number}", many) for number in range(LARGE)]
    made = [with_config(base, f"{prefix}-{name}", config) for name, config in configs]
    return made + [hostile_job(draw, f"{prefix}-drawn-{number}", base) for number in range(DRAWN)]


def with_config(base: dict[str, Any], name: str, config: str) -> str:
    job = json.loads(json.dumps(base | {"metadata": {"name": name}}))
    # What the CRD asks of a model that is made from a config.
    job["spec"]["rollout"]["engine"] = {"type": "embedded"}
    job["spec"]["recipe"]["model"] = {"tokenizer": {"path": "tokenizer"}} | {
        "config": {"model_type": "qwen3", "x": "HERE"}
    }
    return json.dumps(job).replace('"HERE"', config)


async def submit_texts(place: Any, texts: list[str]) -> None:
    """The API server refuses those that break the CRD: the rest is the operator's to bear."""
    url = place.client.url(JOB.path(place.namespace))
    taken = 0
    async with stream_session(place.configuration) as session:
        for text in texts:
            body = text.replace('"namespace": "ns", ', "").replace('"resourceVersion": "7", ', "")
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                taken += answer.status == 201
                await answer.read()
    assert taken > LARGE + len(NESTED), "too few were taken to show anything"


async def refused(place: Any, name: str) -> dict[str, Any] | None:
    conditions = (await place.job(name)).get("status", {}).get("conditions", ())
    found = [one for one in conditions if one["type"] == "Accepted" and one["status"] == "False"]
    return found[0] if found else None


def resident(pid: int) -> int:
    """Most bytes that a process has held."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        pytest.skip("the most that a process held is shown by Linux alone")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
