"""Turns: none has two while another waits, none holds more than his most, each tenant's keys come in their order."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

from polyrl.cluster.fair_queue import FairQueue, Urgency

MOST, BESIDE = 5, 2
STEPS = 400


def test_no_tenant_has_two_turns_while_another_waits_for_one(seed: int) -> None:
    draw = random.Random(seed)
    queue: FairQueue[tuple[str, int]] = FairQueue(MOST, BESIDE)
    waiting: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    busy: Counter[str] = Counter()
    passed_by: defaultdict[str, Counter[str]] = defaultdict(Counter)
    """By tenant with keys that wait: turns of each other since he began to wait, or since his last turn."""
    for number in range(STEPS):
        tenant = draw.choices("abcd", weights=(20, 1, 1, 1))[0]
        if draw.random() < 0.6:
            key = (tenant, number)
            queue.add(tenant, key, since=float(number))
            queue.add(tenant, key, since=float(number + 1))
            waiting[tenant].append(key)
            continue
        active = {one for one, keys in waiting.items() if keys} | {one for one, count in busy.items() if count}
        most = BESIDE if len(active) > 1 else MOST
        taken = queue.take()
        if taken is None:
            assert all(not keys or busy[one] >= most for one, keys in waiting.items())
        else:
            tenant = taken[0]
            assert taken == waiting[tenant].pop(0)
            busy[tenant] += 1
            assert busy[tenant] <= most
            passed_by.pop(tenant, None)
            for other in (one for one, keys in waiting.items() if keys and one != tenant and busy[one] < most):
                passed_by[other][tenant] += 1
                assert passed_by[other][tenant] <= 1, f"{tenant} had two turns while {other} waited"
        if busy and draw.random() < 0.7:
            done = draw.choice(list(busy.elements()) or ["a"])
            if busy[done]:
                queue.release(done)
                busy[done] -= 1
        assert len(queue) == sum(map(len, waiting.values()))
        assert queue.oldest() == min((float(keys[0][1]) for keys in waiting.values() if keys), default=None)


def test_urgent_keys_come_before_others_of_their_tenant_and_leave_them_every_second_turn() -> None:
    queue: FairQueue[str] = FairQueue(10, 10)
    for key in ("a", "b", "c", "d"):
        queue.add("tenant", key, since=0.0)
    queue.add("tenant", "c", since=1.0, urgency=Urgency.LOSS)
    queue.add("tenant", "new", since=2.0, urgency=Urgency.LOSS)
    queue.add("tenant", "new", since=3.0)
    assert len(queue) == 5
    assert queue.oldest() == 0.0
    assert [queue.take() for _ in range(6)] == ["c", "a", "new", "b", "d", None]


def test_a_loss_comes_before_edits_and_each_leaves_every_second_turn_to_what_is_less_urgent() -> None:
    queue: FairQueue[str] = FairQueue(20, 20)
    for urgency in reversed(Urgency):
        for number in range(4):
            queue.add("tenant", f"{urgency.name} {number}", since=0.0, urgency=urgency)
    queue.add("tenant", "EDIT 3", since=0.0, urgency=Urgency.LOSS)
    queue.add("tenant", "LOSS 0", since=0.0, urgency=Urgency.EDIT)
    assert [queue.take() for _ in range(13)] == [
        *("LOSS 0", "EDIT 0", "LOSS 1", "NONE 0", "LOSS 2", "EDIT 1", "LOSS 3", "NONE 1", "EDIT 3"),
        *("EDIT 2", "NONE 2", "NONE 3", None),
    ]
    assert not any(vars(queue)[name] for name in ("_waiting", "_left"))


def test_an_urgent_key_gives_its_tenant_no_turn_of_another() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(10, 10)
    queue.add("calm", ("calm", 0), since=0.0)
    for number in range(4):
        queue.add("storm", ("storm", number), since=0.0, urgency=Urgency.LOSS)
    queue.add("calm", ("calm", 1), since=0.0)
    assert [(queue.take() or ("", 0))[0] for _ in range(4)] == ["calm", "storm", "calm", "storm"]
