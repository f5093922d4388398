"""Edits of jobs on a real API server: what is taken up while a job runs, and that none of them ends it for ever."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from polyrl.worker import CANNOT_GO_ON_EXIT
from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import JOB, POD, TRAINER


async def edit(place: Any, **spec: Any) -> None:
    await place.client.patch(JOB, place.namespace, "job", {"spec": spec})


async def accepted(place: Any, reason: str) -> bool:
    conditions = (await place.job()).get("status", {}).get("conditions", [])
    return any((one["type"], one["reason"]) == ("Accepted", reason) for one in conditions)


async def trainer(place: Any) -> dict[str, Any]:
    found: dict[str, Any] = await place.client.get(TRAINER, place.namespace, "job-trainer") or {}
    return found


async def end_trainer(place: Any, code: int) -> None:
    """Its pod ends with this code, which fails its Job."""

    async def begun() -> bool:
        return "startTime" in (await trainer(place)).get("status", {})

    await place.until("its Job has begun", begun)
    (pod,) = await place.until("it has a trainer", lambda: place.pods("trainer"))
    name, at = pod["metadata"]["name"], datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    ended = {"exitCode": code, "reason": "Error", "startedAt": at, "finishedAt": at}
    container = {"name": "trainer", "image": "t", "imageID": "", "ready": False, "restartCount": 0}
    container["state"] = {"terminated": ended}
    status: dict[str, Any] = {"phase": "Failed", "containerStatuses": [container], "conditions": []}
    await place.client.patch(POD, place.namespace, name, {"status": status}, "status")
    kinds = ("FailureTarget", "Failed")
    words = f"Container trainer for pod {place.namespace}/{name} failed with exit code {code} matching FailJob rule"
    why = {"reason": "PodFailurePolicy", "message": words, "lastTransitionTime": at}
    failed = [{"type": one, "status": "True"} | why for one in kinds]
    status = {"active": 0, "ready": 0, "failed": 1, "conditions": failed}
    await place.client.patch(TRAINER, place.namespace, "job-trainer", {"status": status}, "status")


async def test_more_restarts_are_allowed_while_the_trainer_runs(place: Any, nodes: Any, run_operator: Any) -> None:
    async with run_operator():
        await place.submit()
        await place.rollouts(2)
        before = await trainer(place)
        await edit(place, backoffLimit=9)

        async def taken_up() -> bool:
            return bool((await trainer(place))["spec"]["backoffLimit"] == 9)

        await place.until("its Job may start as often", taken_up)
        assert (await trainer(place))["metadata"]["uid"] == before["metadata"]["uid"]
        assert await accepted(place, "Valid")


async def test_an_edit_with_which_the_trainer_cannot_go_on_waits_for_another(
    place: Any, nodes: Any, run_operator: Any
) -> None:
    async with run_operator():
        await place.submit()
        await place.rollouts(2)
        first = await trainer(place)
        await edit(place, suspend=True)
        await place.state("Suspended")
        await edit(place, suspend=False, recipe={"algorithm": {"steps": 1}})

        async def another(than: dict[str, Any]) -> dict[str, Any] | None:
            found = await trainer(place)
            return found if found and found["metadata"]["uid"] != than["metadata"]["uid"] else None

        second = await place.until("its Job is made anew", lambda: another(first))
        await end_trainer(place, CANNOT_GO_ON_EXIT)
        await place.until("it waits for an edit", lambda: accepted(place, "CannotGoOn"))
        conditions = (await place.job())["status"]["conditions"]
        assert not {"Failed", "Complete"} & {one["type"] for one in conditions}
        await place.until("its machines are given back", lambda: none_of(place, "rollout", "manager"))
        for pod in await place.pods("trainer"):
            await place.client.delete(POD, place.namespace, pod["metadata"]["name"], pod["metadata"]["uid"], 0)
        own = {"spec": {"containers": [{"name": "rollout", "command": ["sh"]}]}}
        await edit(place, rollout={"template": own})
        await place.until("a slip is refused", lambda: accepted(place, "Unsupported"))
        await edit(place, rollout={"template": None})
        await place.until("it waits as before", lambda: accepted(place, "CannotGoOn"))
        await edit(place, recipe={"algorithm": {"steps": 20}})
        await place.until("its Job is made anew", lambda: another(second))
        await place.rollouts(2)
        assert await accepted(place, "Valid")
        assert (await place.job())["status"]["rollout"]["preemptions"] == 0


async def none_of(place: Any, *roles: str) -> bool:
    return not [pod for role in roles for pod in await place.pods(role)]


async def test_a_node_that_is_late_does_not_undo_the_end_of_a_trainer(
    place: Any, nodes: Any, run_operator: Any
) -> None:
    """The stand-in said "running" of a pod that had ended since it looked: its manager was then kept for ever."""
    async with run_operator():
        await place.submit()
        await place.rollouts(2)
        (at_start,) = await place.until("it has a trainer", lambda: place.pods("trainer"))
        await end_trainer(place, CANNOT_GO_ON_EXIT)
        with pytest.raises(ApiError, match="modified"):
            await nodes._pod("MODIFIED", at_start | {"status": {"phase": "Pending"}})
        (pod,) = await place.pods("trainer")
        assert pod["status"]["phase"] == "Failed"
