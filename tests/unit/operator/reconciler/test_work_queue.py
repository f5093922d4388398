"""The queue: one turn per job at a time, changes coalesce, nothing is lost, back-off is cut short by news."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from polyrl.cluster.fair_queue import Urgency
from polyrl_operator.informer.cache import JobKey
from polyrl_operator.reconciler.reconciler import WORKERS
from polyrl_operator.reconciler.work_queue import (
    BESIDE_OTHERS,
    MAX_BACKOFF_S,
    MIN_PAUSE_S,
    MOST_OF_A_NAMESPACE,
    SPACING_S,
    SWEEP_AT,
    WorkQueue,
)

A, B = JobKey("ns", "a"), JobKey("ns", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def taken(queue: WorkQueue) -> JobKey | None:
    """The next key, or None when there is none now."""
    try:
        return await asyncio.wait_for(queue.take(), 0.01)
    except TimeoutError:
        return None


async def test_a_thousand_changes_are_one_turn() -> None:
    queue = WorkQueue()
    for _ in range(1000):
        queue.add(A)
    assert await taken(queue) == A
    assert await taken(queue) is None


async def test_a_change_during_a_turn_is_a_turn_after_it_and_never_beside_it() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    assert await taken(queue) == A
    queue.add(A)
    assert await taken(queue) is None
    queue.done(A)
    clock.now += SPACING_S
    assert await taken(queue) == A


@pytest.mark.parametrize("busy", [True, False])
async def test_what_happens_soon_after_a_turn_is_one_turn_and_holds_up_no_other_job(busy: bool) -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    assert await taken(queue) == A
    if busy:
        queue.add(A)
    queue.done(A)
    for _ in range(10):
        queue.add(A)
        clock.now += SPACING_S / 20
    queue.add(B)
    assert await taken(queue) == B
    assert await taken(queue) is None
    clock.now += SPACING_S / 2
    assert await taken(queue) == A
    queue.done(A)
    clock.now += 10
    assert await taken(queue) is None


async def test_turns_come_in_the_order_of_their_causes() -> None:
    queue = WorkQueue()
    queue.add(B)
    queue.add(A)
    queue.add(B)
    assert [await taken(queue), await taken(queue)] == [B, A]


async def test_only_the_earliest_wake_up_counts() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.wake_at(A, 130.0)
    queue.wake_at(A, 110.0)
    queue.wake_at(A, 120.0)
    assert await taken(queue) is None
    clock.now = 110.0
    assert await taken(queue) == A
    queue.done(A)
    clock.now = 200.0
    assert await taken(queue) is None


async def test_failures_back_off_further_and_further_up_to_a_limit() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    pauses = []
    for _ in range(12):
        queue.add(A)
        clock.now += 1000
        assert await taken(queue) == A
        pauses.append(queue.failed(A))
    assert pauses[0] < 1
    assert pauses[3] > pauses[0]
    assert max(pauses) <= MAX_BACKOFF_S * 1.5


async def test_news_cut_a_back_off_short_but_not_to_nothing() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    for _ in range(9):
        queue.add(A)
        clock.now += 1000
        assert await taken(queue) == A
        queue.failed(A)
    queue.add(A)
    assert await taken(queue) is None
    clock.now += MIN_PAUSE_S
    assert await taken(queue) == A


async def test_a_failed_turn_comes_again_by_itself() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    assert await taken(queue) == A
    pause = queue.failed(A)
    clock.now += pause
    assert await taken(queue) == A


async def test_the_age_is_that_of_the_oldest_that_waits() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    assert queue.oldest_age() == 0.0
    queue.add(A)
    clock.now += 5
    queue.add(B)
    assert queue.oldest_age() == queue.stalled_for() == 5.0
    assert len(queue) == 2


async def test_a_queue_that_moves_has_not_stalled_however_long_a_flood_makes_it() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    for number in range(3):
        queue.add(JobKey("flood", str(number)))
    clock.now += 500
    assert await taken(queue) is not None
    clock.now += 2
    assert (queue.oldest_age(), queue.stalled_for()) == (502.0, 2.0)


@pytest.mark.parametrize("workers", [1, 4])
async def test_nothing_is_lost_and_no_key_has_two_turns_at_once(workers: int, seed: int) -> None:
    draw = random.Random(seed)
    keys = [JobKey("ns", str(number)) for number in range(5)]
    queue = WorkQueue()
    wanted: Counter[JobKey] = Counter()
    seen: Counter[JobKey] = Counter()
    busy: set[JobKey] = set()
    finished = asyncio.Event()

    async def work() -> None:
        while True:
            key = await queue.take()
            assert key not in busy
            busy.add(key)
            seen[key] = wanted[key]
            await asyncio.sleep(draw.random() / 500)
            busy.discard(key)
            queue.done(key)
            finished.set()

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    for _ in range(300):
        key = draw.choice(keys)
        wanted[key] += 1
        queue.add(key)
        if draw.random() < 0.3:
            await asyncio.sleep(draw.random() / 500)
    async with asyncio.timeout(10):
        while seen != wanted:
            await asyncio.wait_for(finished.wait(), 5)
            finished.clear()
    for task in tasks:
        assert not task.done()
        task.cancel()
    assert seen == wanted


async def test_a_flood_in_one_namespace_delays_others_by_one_turn() -> None:
    queue, honest = WorkQueue(), JobKey("honest", "a")
    for number in range(1000):
        queue.add(JobKey("flood", str(number)))
    queue.add(honest)
    assert honest in [await taken(queue), await taken(queue)]


async def test_a_loss_waits_for_no_burst_of_its_own_namespace() -> None:
    queue = WorkQueue()
    for number in range(1000):
        queue.add(JobKey("ns", str(number)))
    queue.hurry(A)
    queue.hurry(JobKey("ns", "999"))
    begun = [await taken(queue) for _ in range(3)]
    assert begun == [A, JobKey("ns", "0"), JobKey("ns", "999")]


async def test_a_loss_waits_for_no_burst_of_edits() -> None:
    """A thousand jobs are edited at once by whoever deploys them, and one of them, or another one, loses a pod."""
    queue = WorkQueue()
    for number in range(1000):
        queue.hurry(JobKey("ns", str(number)), Urgency.EDIT)
    queue.hurry(A)
    queue.hurry(JobKey("ns", "999"))
    queue.hurry(JobKey("ns", "999"), Urgency.EDIT)
    assert [await taken(queue) for _ in range(3)] == [A, JobKey("ns", "0"), JobKey("ns", "999")]


async def test_a_loss_during_a_turn_or_soon_after_it_is_as_urgent() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    assert await taken(queue) == A
    queue.hurry(A)
    for number in range(1000):
        queue.add(JobKey("ns", str(number)))
    queue.done(A)
    clock.now += SPACING_S
    assert A in [await taken(queue), await taken(queue)]


async def test_an_edit_makes_a_loss_no_less_urgent() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    assert await taken(queue) == A
    queue.hurry(A)
    queue.hurry(A, Urgency.EDIT)
    for number in range(1000):
        queue.hurry(JobKey("ns", str(number)), Urgency.EDIT)
    queue.done(A)
    clock.now += SPACING_S
    assert A in [await taken(queue), await taken(queue)]


async def test_slow_turns_of_one_namespace_leave_workers_to_others() -> None:
    queue, honest = WorkQueue(), JobKey("honest", "a")
    for number in range(1000):
        queue.add(JobKey("flood", str(number)))
    begun = [await taken(queue) for _ in range(MOST_OF_A_NAMESPACE)]
    assert None not in begun
    assert await taken(queue) is None
    assert MOST_OF_A_NAMESPACE < WORKERS
    queue.add(honest)
    assert await taken(queue) == honest
    waits = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    for number in range(1 + MOST_OF_A_NAMESPACE - BESIDE_OTHERS):
        assert not waits.done()
        queue.done(JobKey("flood", str(number)))
        await asyncio.sleep(0)
    assert (await asyncio.wait_for(waits, 1)).namespace == "flood"


async def test_nothing_is_kept_of_jobs_that_are_gone() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    for number in range(3 * SWEEP_AT):
        key = JobKey("ns", str(number))
        for ends in (queue.failed, queue.done, queue.gone):
            clock.now += 1
            queue.hurry(key)
            assert await queue.take() == key
            queue.wake_at(key, clock.now + 86_400)
            ends(key)
    kept = {name: len(value) for name, value in vars(queue).items() if isinstance(value, dict | set | list)}
    assert kept.pop("_wakes") <= SWEEP_AT + 1
    assert not any(kept.values())
