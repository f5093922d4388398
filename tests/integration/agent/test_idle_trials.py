"""An engine without work is tried anew by its agent: when, what ends it, and that nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest

from polyrl.wire import WeightsFailed, WeightsLoaded
from polyrl_rollout.agent import idle_trials
from polyrl_rollout.engines.port import GenerateRequest, TokenChunk
from tests.integration.agent.played_manager import Rig, undisturbed

AGAIN_S = 0.3
MODEL = b'{"vocab_size": 1000, "max_position_embeddings": 1024}'


@pytest.fixture
async def idle_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(idle_trials, "AGAIN_S", AGAIN_S)
    monkeypatch.setattr(idle_trials, "BUSY_S", AGAIN_S / 3)
    rig = Rig(tmp_path, tries_idle=True)
    rig.model_config = MODEL
    yield rig
    await rig.close()


async def begins_a_trial(rig: Rig) -> None:
    """One that takes longer than a test."""
    tried = rig.engine.begun
    rig.engine.tokens_per_second = 0.5
    async with asyncio.timeout(10.0):
        while rig.engine.begun == tried:  # noqa: ASYNC110 - the engine is to be as any other
            await asyncio.sleep(0.01)


async def test_an_engine_without_work_is_tried_again_and_again(idle_rig: Rig) -> None:
    await idle_rig.serve(0)
    idle_rig.engine.tokens_per_second, begun = 200.0, asyncio.get_running_loop().time()
    await idle_rig.manager.receive(WeightsLoaded, 4)
    assert asyncio.get_running_loop().time() - begun > 3 * AGAIN_S, "not at once, each time"
    first, *_, last = idle_rig.manager.all_of(WeightsLoaded)
    assert last.step_seconds > 3 * first.step_seconds, "it has become slower, and that is said"
    assert (last.version, last.bytes_pulled, last.receipt) == (0, 0, first.receipt)
    assert all(one.tried_seconds_ago < AGAIN_S for one in idle_rig.manager.all_of(WeightsLoaded))


async def test_when_it_was_tried_is_said_with_what_is_said_again(
    idle_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_trials, "AGAIN_S", 60.0)
    await idle_rig.serve(0)
    await asyncio.sleep(2 * AGAIN_S)
    await idle_rig.manager.send(idle_rig.announcement(0))
    assert 2 * AGAIN_S < (await idle_rig.manager.receive(WeightsLoaded, 2)).tried_seconds_ago < 60.0


async def test_an_engine_that_works_is_not_tried(idle_rig: Rig) -> None:
    """Also while it reads a prompt, and gives no token."""
    await idle_rig.serve(0)
    idle_rig.engine.tokens_per_second, idle_rig.engine.chunk_tokens = 100.0, 100
    await idle_rig.assign(1, budget=150)
    begun = idle_rig.engine.begun
    await idle_rig.finished(range(1, 2))
    assert idle_rig.engine.begun == begun + 1
    idle_rig.engine.chunk_tokens = 4
    await idle_rig.manager.receive(WeightsLoaded, 2)


async def test_a_sample_ends_a_trial(idle_rig: Rig) -> None:
    await idle_rig.serve(0)
    await begins_a_trial(idle_rig)
    idle_rig.engine.tokens_per_second = 2000.0
    loads = len(idle_rig.manager.all_of(WeightsLoaded))
    await idle_rig.assign(1)
    await idle_rig.finished(range(1, 2))
    assert idle_rig.manager.tokens[1] == undisturbed(1, 40)
    assert not idle_rig.engine._running, "the trial's request has ended with it"
    assert len(idle_rig.manager.all_of(WeightsLoaded)) == loads, "it says nothing that was cut short"


async def test_weights_do_not_wait_for_a_trial(idle_rig: Rig) -> None:
    """The engine refuses them while a request runs: an agent that does not end its own would give it up."""
    await idle_rig.serve(0)
    await begins_a_trial(idle_rig)
    idle_rig.engine.tokens_per_second = 2000.0
    await idle_rig.serve(1)
    assert idle_rig.engine.version == 1


async def test_weights_wait_for_the_end_of_a_trial_that_a_sample_has_cut_short(
    idle_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine lets go of a request some time after it was asked to."""
    await idle_rig.serve(0)
    running, generate = idle_rig.engine._running, idle_rig.engine.generate

    async def lingers(request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        try:
            async for chunk in generate(request):
                yield chunk
        finally:
            running.add(request.rid)
            try:
                await asyncio.sleep(AGAIN_S)
            finally:
                running.discard(request.rid)

    monkeypatch.setattr(idle_rig.engine, "generate", lingers)
    await begins_a_trial(idle_rig)
    idle_rig.engine.tokens_per_second = 2000.0
    await idle_rig.assign(1)
    await idle_rig.finished(range(1, 2))
    await idle_rig.serve(1)
    assert not idle_rig.manager.all_of(WeightsFailed)


async def test_an_agent_that_ends_ends_a_trial(idle_rig: Rig) -> None:
    await idle_rig.serve(0)
    await begins_a_trial(idle_rig)
    await idle_rig.close_agent()
    assert not [task for task in asyncio.all_tasks() if "try_engine" in repr(task.get_coro())]


async def test_an_engine_that_shares_what_it_computes_on_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_trials, "AGAIN_S", 0.05)
    monkeypatch.setattr(idle_trials, "BUSY_S", 0.05)
    rig = Rig(tmp_path)
    try:
        rig.model_config = MODEL
        await rig.serve(0)
        begun = rig.engine.begun
        await asyncio.sleep(AGAIN_S)
        assert rig.engine.begun == begun
    finally:
        await rig.close()
