"""What the trainer sees of the GPU that it shares, and asks by it."""

from __future__ import annotations

import asyncio

import pytest

from polyrl.engines.hand_over import GIB, DeviceUse
from polyrl.manifest.spec import ReservedSleep
from polyrl_trainer.generation import shared_devices
from polyrl_trainer.generation.shared_devices import SharedDevices, not_shared


class Gpu:
    """80 GiB, of which the learner holds 10 and an engine what it says."""

    def __init__(self) -> None:
        self.engine, self.peak, self.asked = 0.0, 0.0, asyncio.Event()

    def use(self) -> DeviceUse:
        self.asked.set()
        free = 80 - 10 - self.engine
        return DeviceUse(80 * GIB, int(free * GIB), own=10 * GIB, own_peak=int(self.peak * GIB))


def test_an_engine_that_was_awake_while_a_batch_was_awaited_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_devices, "GPU_WATCH_S", 0.0)

    async def run() -> list[bool]:
        gpu = Gpu()
        devices, plans = SharedDevices(ReservedSleep.AUTO, gpu.use), list[bool]()
        for engine, peak in ((30.0, 20.0), (50.0, 40.0), (10.0, 40.0)):
            plans.append(devices.needs_alone())

            async def batch(engine: float = engine, peak: float = peak) -> None:
                gpu.engine = engine
                gpu.asked.clear()
                await gpu.asked.wait()  # it is looked at meanwhile
                gpu.engine, gpu.peak = 0.0, peak

            async with asyncio.timeout(10):
                await devices.watched(batch())
        return [*plans, devices.needs_alone()]

    assert asyncio.run(run()) == [True, False, True, True]


def test_without_a_gpu_or_a_shared_one_nothing_is_watched() -> None:
    async def run() -> bool:
        for devices in (not_shared(), SharedDevices(ReservedSleep.AUTO, lambda: None)):
            assert not devices.needs_alone()
            assert await devices.watched(asyncio.sleep(0, result=True))
        return len(asyncio.all_tasks()) == 1

    assert asyncio.run(run())


def test_a_watch_ends_with_what_it_was_for() -> None:
    async def run() -> int:
        with pytest.raises(ValueError, match="no batch"):
            await SharedDevices(ReservedSleep.AUTO, Gpu().use).watched(_fails())
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


async def _fails() -> None:
    raise ValueError("no batch")
