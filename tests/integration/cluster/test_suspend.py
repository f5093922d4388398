"""Suspend and resume on a real API server: pods that a kubelet has not ended yet still count, so trainer, rollouts and
manager end one after the other, and no second trainer begins beside the first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from polyrl_operator.api.kinds import JOB, TRAINER

LISTS = 2
"""The operator has listed all pods so often again, and decided after the first."""
LABELS = {"test.polyrl.dev/template": "second"}
OTHER = {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "trainer"}]}}


async def suspend(place: Any, yes: bool, **spec: Any) -> None:
    await place.client.patch(JOB, place.namespace, "job", {"spec": {"suspend": yes} | spec})


async def is_ending(place: Any, role: str) -> bool:
    pods = await place.pods(role)
    return bool(pods) and all(pod["metadata"].get("deletionTimestamp") for pod in pods)


async def gone(place: Any, role: str) -> bool:
    return not await place.pods(role)


async def listed_again(place: Any, held: Any) -> None:
    """The operator has seen what there is, and decided."""
    counts = held.one.requests.counts

    def lists() -> int:
        return sum(
            number for (access, _), number in counts.items() if (access.verb, access.resource) == ("list", "pods")
        )

    before = lists()

    async def enough() -> bool:
        return lists() >= before + LISTS

    await place.until("the operator has listed pods again", enough)


async def suspended(place: Any) -> bool:
    conditions = (await place.job())["status"]["conditions"]
    return any((one["type"], one["status"]) == ("Suspended", "True") for one in conditions)


@asynccontextmanager
async def one_trainer_at_most(place: Any) -> AsyncIterator[None]:
    """At every moment of it."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(await place.pods("trainer")))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(watch())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert most == 1


async def begin(place: Any, nodes: Any) -> list[dict[str, Any]]:
    """A running job whose pods no kubelet will end by itself; its trainer."""
    await place.submit()
    await place.rollouts(2)
    trainer: list[dict[str, Any]] = await place.until("it has a trainer", lambda: place.pods("trainer"))
    nodes.held |= {pod["metadata"]["name"] for pod in await place.pods()}
    return trainer


async def test_each_ends_once_what_needs_it_has_ended(place: Any, nodes: Any, run_operator: Any) -> None:
    async with run_operator() as held:
        await begin(place, nodes)
        await suspend(place, True)
        for role, needed in (("trainer", ("rollout", "manager")), ("rollout", ("manager",)), ("manager", ())):
            await place.until(f"{role} is being deleted", lambda role=role: is_ending(place, role))
            if needed:
                await listed_again(place, held)
            for other in needed:
                pods = await place.pods(other)
                assert pods, f"{other} is needed while {role} has not ended"
                assert not any(pod["metadata"].get("deletionTimestamp") for pod in pods)
            assert not await suspended(place), f"{role} has not ended"
            for pod in await place.pods(role):
                await nodes.end(pod)
            await place.until(f"{role} has ended", lambda role=role: gone(place, role))
        await place.until("the job is suspended", lambda: suspended(place))


@pytest.mark.parametrize(
    "change",
    [pytest.param({}, id="as it was"), pytest.param({"trainer": {"template": OTHER}}, id="with another template")],
)
async def test_a_resume_waits_for_the_trainer_that_still_ends(
    place: Any, nodes: Any, run_operator: Any, change: dict[str, Any]
) -> None:
    async with run_operator() as held:
        (old,) = await begin(place, nodes)
        async with one_trainer_at_most(place):
            await suspend(place, True)
            await place.until("the trainer is being deleted", lambda: is_ending(place, "trainer"))
            job = await place.client.get(TRAINER, place.namespace, "job-trainer")
            await suspend(place, False, **change)
            await listed_again(place, held)
            assert await is_ending(place, "trainer"), "nothing took its place"
            await nodes.end(old)

            async def begun() -> list[dict[str, Any]]:
                pods = await place.pods("trainer")
                return [pod for pod in pods if pod["metadata"]["uid"] != old["metadata"]["uid"]]

            (new,) = await place.until("its successor has begun", begun)
            await listed_again(place, held)
        again = await place.client.get(TRAINER, place.namespace, "job-trainer")
        assert (job["metadata"]["uid"] == again["metadata"]["uid"]) == (not change)
        expected = LABELS if change else {}
        assert expected.items() <= new["metadata"]["labels"].items()
