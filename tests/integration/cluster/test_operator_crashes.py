"""kill -9 of the operator at every request of its turns: whatever it was doing, its successor ends where an undisturbed
one ends, with no twin, no orphan and no number used twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from kubernetes.aio.client.api_client import ApiClient

from polyrl_operator.api.connect import load_configuration
from polyrl_operator.api.kinds import JOB, POD
from polyrl_operator.app import Operator
from polyrl_operator.informer import resync
from polyrl_operator.managers.client import manager_session
from polyrl_operator.metrics import RequestCounter


class Fuse:
    """Ends an operator before or after its n-th writing request."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.at, self.after = at, after
        self.sent = 0
        self.blown = asyncio.Event()

    def fit(self, one: Operator) -> None:
        attempt = one.client._attempt

        async def fused(method: str, url: str, body: Any, headers: dict[str, str]) -> Any:
            if self.blown.is_set():
                await asyncio.Event().wait()
            if method == "GET":
                return await attempt(method, url, body, headers)
            self.sent += 1
            last = self.sent == self.at
            try:
                if self.after or not last:
                    return await attempt(method, url, body, headers)
            finally:
                if last:
                    self.blown.set()
                    await asyncio.Event().wait()

        one.client._attempt = fused  # type: ignore[method-assign]


@asynccontextmanager
async def alive(place: Any, fuse: Fuse | None = None) -> AsyncIterator[Operator]:
    """An operator that dies without a last word when the fuse blows: its Lease is not given back, but is its own."""
    configuration = await load_configuration(place.server.kubeconfig())
    async with ApiClient(configuration) as api, manager_session() as managers:
        one = Operator(place.options(identity="same"), api, managers, RequestCounter())
        if fuse is not None:
            fuse.fit(one)

        async def poll() -> None:
            while True:
                one.resync.request()
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(work) for work in (*one.tasks(), poll())]
        try:
            yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await one.managers.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "SETTLE_S", 0.02)


@dataclass
class Scene:
    """What the operator is about to do when it dies, and how the cluster looks when it is done."""

    place: Any
    nodes: Any
    name: str

    async def prepare(self) -> None:
        """With an operator that lives."""

    async def provoke(self) -> None:
        """Between two operators."""

    async def settled(self) -> bool:
        raise NotImplementedError

    async def rollouts(self) -> list[dict[str, Any]]:
        pods = await self.place.pods("rollout")
        return [pod for pod in pods if pod["metadata"]["labels"]["polyrl.dev/job-name"] == self.name]

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.place.job(self.name)).get("status") or {}
        return found

    async def outcome(self) -> dict[str, Any]:
        """What must be the same whenever the operator died."""
        children = await self.place.children()
        status = await self.status()
        named = [(kind, name) for kind, name in children if name == self.name or name.startswith(f"{self.name}-")]
        own = {(kind, name.removeprefix(self.name).removeprefix("-")) for kind, name in named}
        # A ConfigMap is named by its content, which names the job.
        own = {(kind, "cfg" if name.startswith("cfg-") else name) for kind, name in own}
        numbers = {key: status["rollout"].get(key) for key in ("created", "preemptions", "failures", "replicas")}
        return {"children": {one for one in own if "trainer-0" not in one[1]}, **numbers, "state": status["state"]}


class Grows(Scene):
    """From nothing to two rollouts."""

    async def provoke(self) -> None:
        await self.place.submit(self.name)

    async def settled(self) -> bool:
        status = await self.status()
        return len(await self.rollouts()) == 2 and status.get("rollout", {}).get("readyReplicas") == 2


class Replaces(Grows):
    """One of two rollouts was taken away."""

    async def prepare(self) -> None:
        await self.place.submit(self.name)
        await self.place.until("two rollouts", super().settled)

    async def provoke(self) -> None:
        taken = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        status = {"phase": "Failed", "conditions": [taken]}
        name = f"{self.name}-r-1"
        await self.place.client.patch(POD, self.place.namespace, name, {"status": status}, "status")

    async def settled(self) -> bool:
        names = {pod["metadata"]["name"] for pod in await self.rollouts()}
        done = await super().settled()
        return done and names == {f"{self.name}-r-2", f"{self.name}-r-3"}


class Suspends(Replaces):
    """A running job is suspended: nothing of it runs."""

    async def provoke(self) -> None:
        await self.place.client.patch(JOB, self.place.namespace, self.name, {"spec": {"suspend": True}})

    async def settled(self) -> bool:
        pods = [pod["metadata"]["name"] for pod in await self.place.pods()]
        left = [pod for pod in pods if pod.startswith(self.name)]
        status = await self.status()
        return not left and status.get("state") == "Suspended" and status["rollout"].get("replicas") == 0


class Ends(Suspends):
    """The trainer is done: the job is complete, and its pods go."""

    async def provoke(self) -> None:
        await self.nodes.finish_trainer(self.place.namespace, self.name)

    async def settled(self) -> bool:
        names = [pod["metadata"]["name"] for pod in await self.place.pods()]
        left = [name for name in names if name.startswith(self.name) and "-trainer-" not in name]
        status = await self.status()
        return not left and status.get("state") == "Complete" and status["rollout"].get("replicas") == 0


async def over(scene: Scene, fuse: Fuse) -> bool:
    return fuse.blown.is_set() or await scene.settled()


async def played(scene: Scene, fuse: Fuse) -> dict[str, Any]:
    """The outcome of a scene whose operator dies by `fuse`, if that blows, and has a successor."""
    async with alive(scene.place):
        await scene.prepare()
    await scene.provoke()
    async with alive(scene.place, fuse):
        # The last writes are statuses, of which there may be one more or less: then there is nothing to die at.
        await scene.place.until(f"{scene.name} settles", lambda: over(scene, fuse))
    async with alive(scene.place):
        await scene.place.until(f"{scene.name} settles after its operator died", scene.settled)
    outcome = await scene.outcome()
    job = await scene.place.job(scene.name)
    await scene.place.client.delete(JOB, scene.place.namespace, scene.name, job["metadata"]["uid"])
    return outcome


SCENES = (Grows, Replaces, Suspends, Ends)
DRAWN = 2
"""Deaths of each scene that are drawn; each costs three lives of an operator."""


@pytest.mark.parametrize("scene", SCENES)
async def test_an_operator_may_die_at_some_requests(scene: type[Scene], place: Any, nodes: Any, seed: int) -> None:
    undisturbed, deaths = await calm(scene, place, nodes)
    for death in random.Random(f"{seed}/{scene.__name__}").sample(deaths, DRAWN):
        await same_when_killed(scene(place, nodes, death.name), death, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
async def test_an_operator_may_die_at_every_request(scene: type[Scene], place: Any, nodes: Any) -> None:
    undisturbed, deaths = await calm(scene, place, nodes)
    for death in deaths:
        await same_when_killed(scene(place, nodes, death.name), death, undisturbed)


@dataclass(frozen=True)
class Death:
    """Before or after the n-th writing request."""

    at: int
    after: bool

    @property
    def name(self) -> str:
        return f"k{self.at}{'after' if self.after else 'before'}"


async def calm(scene: type[Scene], place: Any, nodes: Any) -> tuple[dict[str, Any], list[Death]]:
    """The outcome that nobody disturbs, and the deaths that might."""
    count = Fuse(0, after=False)
    undisturbed = await played(scene(place, nodes, "calm"), count)
    assert count.sent > 2, "there is something to be interrupted"
    print(f"{scene.__name__}: {count.sent} writes, each with a death before and after it")
    return undisturbed, [Death(at, after) for at in range(1, count.sent + 1) for after in (False, True)]


async def same_when_killed(scene: Scene, death: Death, undisturbed: dict[str, Any]) -> None:
    outcome = await played(scene, Fuse(death.at, after=death.after))
    assert outcome == undisturbed, f"died {'after' if death.after else 'before'} write {death.at}"
