"""What a reward function returns becomes a number or a typed reason, and never a silent 0."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from polyrl.errors import RunFailed
from polyrl.sample import DiscardReason
from polyrl_trainer import user_calls
from polyrl_trainer.rewards import Reward, RewardFunction, Unscored, read_reward
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_calls import UserCalls

SAMPLE = Sample(np.array([1, 2, 3]), np.array([0, 1, 1], np.float32), 1, sample="4.0", prompt="a", response="bc")
TIMEOUT_S = 0.2


async def score(function, calls=None, timeout_s=TIMEOUT_S):
    own = calls or UserCalls(4)
    reward = RewardFunction(function, own, timeout_s)
    verdict = await reward.score(SAMPLE)
    if calls is None:
        own.close()
    return verdict, reward.failures


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, Reward(1.0)),
        (0.0, Reward(0.0)),
        (True, Reward(1.0)),
        (np.float32(0.5), Reward(0.5)),
        (np.int64(3), Reward(3.0)),
        (np.array(2.0), Reward(2.0)),
        (torch.tensor(0.25), Reward(0.25)),
        ({"reward": 1, "exact_match": True}, Reward(1.0, {"exact_match": 1.0})),
    ],
)
def test_numbers_of_every_kind_are_rewards(returned, reward):
    assert read_reward(returned) == reward


@pytest.mark.parametrize(
    "returned",
    [
        None, "1.0", float("nan"), float("inf"), 10**400, 1j, [1.0], (1.0,), np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]), np.complex64(1), {}, {"score": 1.0}, {"reward": None},
        {"reward": 1.0, "why": "text"}, object(),
    ],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_invalid(returned):
    verdict = read_reward(returned)
    assert isinstance(verdict, Unscored)
    assert verdict.reason is DiscardReason.REWARD_INVALID


async def test_sync_and_async_functions_are_called_with_the_sample():
    async def async_score(sample):
        await asyncio.sleep(0)
        return len(sample.response)

    assert (await score(lambda sample: len(sample.prompt)))[0] == Reward(1.0)
    assert (await score(async_score))[0] == Reward(2.0)


@pytest.mark.parametrize(
    "error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), StopIteration(), TimeoutError("own")]
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_raises_is_reported_with_its_message(error, is_async):
    def sync_raise(sample):
        raise error

    async def async_raise(sample):
        raise error

    verdict, failures = await score(async_raise if is_async else sync_raise)
    assert isinstance(verdict, Unscored)
    assert verdict.reason is DiscardReason.REWARD_RAISED
    assert type(error).__name__ in verdict.detail
    assert failures.counts == {"rewardRaised": 1}
    assert failures.first == {"rewardRaised": verdict.detail}


async def test_an_escaping_cancellation_is_the_users_failure_not_ours():
    async def cancel(sample):
        raise asyncio.CancelledError

    assert (await score(cancel))[0].reason is DiscardReason.REWARD_RAISED


async def test_a_hanging_function_times_out_and_holds_nobody_up():
    release = threading.Event()
    calls = UserCalls(2)

    def hang(sample):
        release.wait(30)
        return 1.0

    started = time.monotonic()
    verdicts = await asyncio.gather(*(score(hang, calls) for _ in range(6)))
    assert {verdict.reason for verdict, _ in verdicts} == {DiscardReason.REWARD_TIMED_OUT}
    assert time.monotonic() - started < 10
    assert calls.lost_threads == 6
    assert (await score(lambda sample: 1.0, calls))[0] == Reward(1.0)
    release.set()
    async with asyncio.timeout(10):
        while calls.lost_threads:  # noqa: ASYNC110 - threads that end have no event
            await asyncio.sleep(0.01)


async def test_the_deadline_runs_from_the_calls_own_start():
    calls = UserCalls(1)

    def slow(sample):
        time.sleep(TIMEOUT_S / 2)
        return 1.0

    verdicts = await asyncio.gather(*(score(slow, calls, timeout_s=TIMEOUT_S * 4) for _ in range(10)))
    assert all(verdict == Reward(1.0) for verdict, _ in verdicts)


async def test_an_async_function_that_blocks_its_loop_costs_one_thread(monkeypatch):
    monkeypatch.setattr(user_calls, "WEDGED_SECONDS", 0.1)
    calls, release = UserCalls(4), threading.Event()

    async def block(sample):
        release.wait(30)
        return 1.0

    async def fine(sample):
        return 2.0

    assert (await score(block, calls))[0].reason is DiscardReason.REWARD_TIMED_OUT
    assert calls.lost_threads == 1
    assert (await score(fine, calls))[0] == Reward(2.0)
    release.set()
    calls.close()


async def test_too_many_hanging_calls_fail_the_run(monkeypatch):
    monkeypatch.setattr(user_calls, "MAX_LOST_THREADS", 2)
    calls, release = UserCalls(4), threading.Event()
    for _ in range(2):
        await score(lambda sample: release.wait(30), calls, timeout_s=0.05)
    with pytest.raises(RunFailed, match="2 calls of user code hang"):
        await score(lambda sample: 1.0, calls)
    release.set()
