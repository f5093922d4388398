"""Planner and fake fleet together, under random losses in virtual time."""

import asyncio
import random

import pytest
from hypothesis import given, settings, strategies as st

from polyrl.local.planner import RunEnd, RunObservation, StartWorker, StopWorker, WorkerPhase, plan
from polyrl.testing.fake_fleet import FakeFleet
from polyrl.worker import NAME_SLOT, Role, Worker, Workers

SCHEDULES = 300
EVENTS = 40


def wanted(rollouts: int, on_gpus: bool) -> Workers:
    return Workers(
        trainer=Worker("trainer", Role.TRAINER, argv=("trainer",)),
        manager=Worker("manager", Role.MANAGER, argv=("manager",)),
        reserved=Worker("reserved", Role.RESERVED, argv=("agent",)),
        rollout=Worker("rollout", Role.ROLLOUT, argv=("agent", NAME_SLOT)),
        rollouts=rollouts,
        rollout_gpus=tuple((f"{2 * number}", f"{2 * number + 1}") for number in range(rollouts)) if on_gpus else (),
    )


class World:
    """Acts as the runner does; every rollout that runs also serves."""

    def __init__(self, rollouts: int, on_gpus: bool = False) -> None:
        self.fleet = FakeFleet()
        self.wanted = wanted(rollouts, on_gpus)
        self.served: set[str] = set()
        self.end: RunEnd | None = None

    async def settle(self, stopping: bool = False) -> None:
        """Acts until nothing is left to do or to wait for within two virtual seconds."""
        while self.end is None:
            seen = await self.fleet.list()
            self.served |= {one.name for one in seen if one.phase is WorkerPhase.RUNNING}
            facts = RunObservation(seen, "manager" in self.served, served=frozenset(self.served), stopping=stopping)
            for action in plan(self.wanted, facts, self.fleet.now()):
                await self.act(action)
            if not await self.fleet.changed(2.0):
                return

    async def act(self, action: StartWorker | StopWorker | RunEnd) -> None:
        if isinstance(action, RunEnd):
            self.end = action
        elif isinstance(action, StartWorker):
            taken = {name for one in await self.fleet.list() if one.lives for name in one.gpus}
            assert not taken & set(action.worker.gpus), "GPUs of a process that still lives"
            await self.fleet.start(action.worker)
        else:
            await self.fleet.stop(action.name, action.grace_s)

    async def inject_fault(self, rng: random.Random) -> None:
        """One loss of one living rollout, in one of the ways it can be lost."""
        living = [one.name for one in await self.fleet.list() if one.role is Role.ROLLOUT and one.lives]
        if not living:
            return
        name = rng.choice(living)
        way = rng.choice(["kill", "preempt", "crash"])
        if way == "crash" and name in self.served:  # a crash at start is for the table tests: it may end in giving up
            self.fleet.crash(name, 1)
        else:
            await self.fleet.reclaim(name, 0 if way == "kill" else rng.uniform(0.1, 5))


@settings(max_examples=SCHEDULES, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32 - 1), rollouts=st.integers(0, 4), on_gpus=st.booleans())
def test_the_fleet_always_comes_back_to_its_size(seed: int, rollouts: int, on_gpus: bool) -> None:
    async def schedule() -> None:
        rng, world = random.Random(seed), World(rollouts, on_gpus)
        await world.settle()
        for _ in range(EVENTS):
            await world.inject_fault(rng)
            await world.fleet.changed(rng.uniform(0, 0.5))
            if rng.random() < 0.5:
                await world.settle()
        await world.settle()
        await world.settle()  # a back-off that began late is over after one more wait
        seen = await world.fleet.list()
        assert world.end is None
        assert sum(one.counts for one in seen if one.role is Role.ROLLOUT) == rollouts
        names = [worker.name for worker in world.fleet.started]
        assert len(names) == len(set(names))

    asyncio.run(schedule())


@pytest.mark.parametrize("rollouts", [0, 3])
def test_asked_to_stop_it_leaves_nothing(rollouts: int) -> None:
    async def schedule() -> None:
        world = World(rollouts)
        await world.settle()
        await world.settle(stopping=True)
        assert world.end is not None
        assert not any(one.lives for one in await world.fleet.list())

    asyncio.run(schedule())
