"""What a reward function returns becomes a number or a typed reason, and never a silent 0."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from polyrl.errors import RunFailed
from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code import calls as calls_module
from polyrl_trainer.user_code.calls import UserCalls
from polyrl_trainer.user_code.rewards import Reward, RewardFunction, Unscored, read_reward

SAMPLE = Sample(
    np.array([1, 2, 3]), np.array([0, 1, 1], np.float32), prompt_length=1, id="4.0", prompt="a", response="bc"
)
TIMEOUT_S = 0.2
"""Of a call that is meant to miss it."""
LONG_TIMEOUT_S = 60.0
"""Of one that is not: on crowded cores a thread may wait seconds for its turn."""


async def score(function, calls=None, timeout_s=LONG_TIMEOUT_S):
    own = calls or UserCalls(4)
    reward = RewardFunction(function, own, timeout_s=timeout_s)
    verdict = await reward.score(SAMPLE)
    if calls is None:
        own.close()
    return verdict, reward.failures


@contextmanager
def much_later():
    """The running loop's clock says that all deadlines of PATIENCE_S are over, without anybody's having waited."""
    loop = asyncio.get_running_loop()
    now = loop.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: now() + 2 * LONG_TIMEOUT_S)
        yield


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
    ids=["int", "float", "bool", "numpy float", "numpy int", "numpy scalar array", "torch scalar", "dict"],
)
def test_numbers_of_every_kind_are_rewards(returned, reward):
    assert read_reward(returned) == reward


def test_more_named_numbers_than_are_carried_are_no_reward():
    verdict = read_reward({"reward": 1.0} | {f"m{number:07}": 1.0 for number in range(400)}, "score")
    assert verdict.reason is DiscardReason.REWARD_INVALID
    assert verdict.detail.startswith("the numbers that score names beside `reward` take 9600 bytes")
    assert isinstance(read_reward({"reward": 1.0} | {f"m{number:07}": 1.0 for number in range(300)}), Reward)


@pytest.mark.parametrize(
    "returned",
    [
        None, "1.0", float("nan"), float("inf"), 10**400, 1j, [1.0], (1.0,), np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]), np.complex64(1), {}, {"score": 1.0}, {"reward": None},
        {"reward": 1.0, "why": "text"}, object(),
    ],
    ids=lambda returned: "object()" if type(returned) is object else repr(returned),
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
    "error",
    [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), StopIteration(), TimeoutError("own")],
    ids=repr,
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
    # asyncio makes a TimeoutError anew on its way between loops, and its frames are lost.
    assert isinstance(error, TimeoutError) or f"({__file__}:" in verdict.detail
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
        release.wait(LONG_TIMEOUT_S)
        return 1.0

    verdicts = await asyncio.gather(*(score(hang, calls, TIMEOUT_S) for _ in range(6)))
    assert {verdict.reason for verdict, _ in verdicts} == {DiscardReason.REWARD_TIMED_OUT}
    assert calls.lost_threads == 6, "none has returned: nobody waited for them"
    assert (await score(lambda sample: 1.0, calls))[0] == Reward(1.0)
    release.set()
    async with asyncio.timeout(LONG_TIMEOUT_S):
        while calls.lost_threads:  # noqa: ASYNC110 - threads that end have no event
            await asyncio.sleep(0.01)


async def test_the_deadline_runs_from_the_calls_own_start():
    calls, release = UserCalls(1), threading.Event()

    def slow(sample):
        release.wait(LONG_TIMEOUT_S)
        return 1.0

    first = asyncio.create_task(score(slow, calls, timeout_s=10 * LONG_TIMEOUT_S))
    queued = [asyncio.create_task(score(lambda sample: 1.0, calls)) for _ in range(9)]
    await asyncio.sleep(0)
    with much_later():
        # A deadline that had run while they queued is over now.
        await asyncio.sleep(TIMEOUT_S)
        release.set()
        verdicts = await asyncio.gather(first, *queued)
    assert all(verdict == Reward(1.0) for verdict, _ in verdicts)


async def test_an_async_function_that_blocks_its_loop_costs_one_thread(monkeypatch):
    monkeypatch.setattr(calls_module, "WEDGED_SECONDS", 0.1)
    calls, began, release = UserCalls(4), threading.Event(), threading.Event()

    async def block(sample):
        began.set()
        release.wait(LONG_TIMEOUT_S)
        return 1.0

    async def fine(sample):
        return 2.0

    blocked = asyncio.create_task(score(block, calls))
    # One that times out before it has begun blocks nothing.
    assert await asyncio.to_thread(began.wait, LONG_TIMEOUT_S)
    with much_later():
        assert (await blocked)[0].reason is DiscardReason.REWARD_TIMED_OUT
        assert calls.lost_threads == 1
        assert (await score(fine, calls))[0] == Reward(2.0)
    release.set()
    calls.close()


async def test_too_many_hanging_calls_fail_the_run(monkeypatch):
    monkeypatch.setattr(calls_module, "MAX_LOST_THREADS", 2)
    calls, release = UserCalls(4), threading.Event()
    for _ in range(2):
        await score(lambda sample: release.wait(LONG_TIMEOUT_S), calls, TIMEOUT_S)
    with pytest.raises(RunFailed, match="2 calls of user code hang"):
        await score(lambda sample: 1.0, calls)
    release.set()


@pytest.mark.parametrize("name", ["", "  ", 3, None, ("a", 1), b"length"])
async def test_a_metric_needs_a_name_that_is_text(name: object) -> None:
    def score_length(sample):
        return {"reward": 1.0, name: 2.0}

    verdict, _ = await score(score_length)
    assert isinstance(verdict, Unscored)
    assert verdict.reason is DiscardReason.REWARD_INVALID
    assert f"score_length names a number {name!r}; a name is text that is not empty" in verdict.detail
    assert "\n" not in verdict.detail


async def test_what_user_code_names_is_cut_in_a_refusal() -> None:
    verdict, _ = await score(lambda sample: {"x" * 1_000_000: 1.0})
    assert isinstance(verdict, Unscored)
    assert len(verdict.detail) < 1000
