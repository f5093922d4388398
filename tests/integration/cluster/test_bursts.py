"""Hundreds of jobs at once: what they cost, and that nobody who was there before waits for them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polyrl_operator.api.kinds import POD, TRAINER

BURST = 60
SIDE_BY_SIDE = 16
MOST_MEMORY = 250 << 20


async def submit_all(place: Any, count: int) -> None:
    slots = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(number: int) -> None:
        async with slots:
            await place.submit(f"new-{number}", rollout={"replicas": 1})

    await asyncio.gather(*(one(number) for number in range(count)))


async def count(place: Any, kind: Any) -> int:
    return sum([len(items) async for items, _ in place.client.pages(kind, place.namespace)])


async def requests(operator: Any) -> Counter[tuple[str, str]]:
    _, text = await operator.get("/metrics")
    pattern = r'polyrl_api_requests_total\{code="\w+",resource="([^"]+)",verb="(\w+)"\} (\S+)'
    found: Counter[tuple[str, str]] = Counter()
    for resource, verb, number in re.findall(pattern, text):
        found[verb, resource] += int(float(number))
    return found


def memory(pid: int) -> int:
    """Highest so far."""
    return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) << 10


async def followed(place: Any, lost: set[str]) -> bool:
    pods = [pod["metadata"] for pod in await place.pods("rollout")]
    old = [one for one in pods if one["labels"]["polyrl.dev/job-name"] == "old"]
    return len({one["uid"] for one in old} - lost) == 1 and len(old) == 3


@pytest.mark.timeout(900)
async def test_a_loss_is_answered_amid_a_burst_of_its_own_namespace(
    place: Any, nodes: Any, start_operator: Any
) -> None:
    async with start_operator() as operator:
        await place.submit("old")
        pods = [pod["metadata"] for pod in await place.rollouts(2, "old")]
        nodes.held |= {pod["name"] for pod in pods}
        before, began = await requests(operator), time.monotonic()
        await submit_all(place, BURST)
        print(
            f"{BURST} jobs stored after {time.monotonic() - began:.1f} s, {await count(place, TRAINER)} have trainers"
        )
        # The old job was woken before the burst, and has had that turn by now.
        await place.until("the burst is worked off", lambda: some_begun(place, BURST // 6))
        lost_at, before_loss = time.monotonic(), await count(place, TRAINER) - 1
        await place.client.delete(POD, place.namespace, pods[0]["name"], pods[0]["uid"], 30)
        await place.until("its follower is made", lambda: followed(place, {pod["uid"] for pod in pods}))
        took, begun = time.monotonic() - lost_at, await count(place, TRAINER) - 1 - before_loss
        print(f"replaced after {took:.1f} s, while {begun} of {BURST - before_loss} have begun")
        await place.until("all have begun", lambda: all_begun(place), 300.0)
        print(f"all have their children after {time.monotonic() - began:.1f} s")
        await asyncio.sleep(3)
        asked = await requests(operator) - before
        each = {" ".join(key): round(number / BURST, 2) for key, number in asked.most_common(12)}
        print(f"{sum(asked.values()) / BURST:.1f} requests per job: {each}; {memory(operator.process.pid) >> 20} MiB")
        assert begun < (BURST - before_loss) / 2, "it waits for no new jobs"
        assert memory(operator.process.pid) < MOST_MEMORY


async def all_begun(place: Any) -> bool:
    return await some_begun(place, BURST)


async def some_begun(place: Any, jobs: int) -> bool:
    return await count(place, TRAINER) >= jobs + 1
