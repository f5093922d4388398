"""The CRD is upgraded before the operator, by Helm as by GitOps: its new fields' defaults stand in every stored job
while an older operator, or one that was rolled back, looks after them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from polyrl_operator.api.kinds import POD

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/polyrljobs.polyrl.dev"


@pytest.fixture
def later_field(crd: Any) -> Iterator[Any]:
    """Call it to add a field with a default to the CRD of the server."""
    before = crd.request("GET", CRD)[1]["spec"]

    def add() -> None:
        later = copy.deepcopy(before)
        properties = later["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        properties["rollout"]["properties"]["colour"] = {"type": "string", "default": "grey"}
        replace(crd, later)

    yield add
    replace(crd, before)


def replace(server: Any, spec: dict[str, Any]) -> None:
    stored = server.request("GET", CRD)[1]
    status, answer = server.request("PUT", CRD, stored | {"spec": spec})
    assert status == 200, answer


async def test_jobs_go_on_under_an_operator_that_is_older_than_the_crd(
    place: Any, nodes: Any, run_operator: Any, later_field: Any
) -> None:
    async with run_operator():
        await place.submit()
        lost = (await place.rollouts(2))[0]["metadata"]
        later_field()
        await place.until("the default is in the stored job", lambda: has_colour(place))
        await place.client.delete(POD, place.namespace, lost["name"], lost["uid"])
        await place.until("the lost rollout is replaced", lambda: replaced(place, lost["uid"]))
        accepted = await place.until("what is left out is said", lambda: accepted_with(place, "spec.rollout.colour"))
        assert accepted["status"] == "True"
        await place.submit("young")
        await place.rollouts(2, "young")


async def has_colour(place: Any) -> bool:
    return "colour" in (await place.job())["spec"]["rollout"]


async def replaced(place: Any, uid: str) -> bool:
    pods = await place.rollouts(2)
    return uid not in {pod["metadata"]["uid"] for pod in pods}


async def accepted_with(place: Any, words: str) -> dict[str, Any] | None:
    conditions = (await place.job())["status"]["conditions"]
    return next((one for one in conditions if one["type"] == "Accepted" and words in json.dumps(one)), None)
