"""The operator's link to a manager, over real TLS to a stand-in: news wake, silence is counted, drains are sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from polyrl.cluster.actions import DrainEngine
from polyrl.errors import ProtocolError
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, ManagerStatus
from polyrl_operator.api.connect import CONNECTIONS
from polyrl_operator.informer.cache import JobKey
from polyrl_operator.managers import client as client_module, poller
from polyrl_operator.managers.client import Address, ManagerClient, manager_session
from polyrl_operator.managers.poller import ManagerPoller
from polyrl_operator.secret import ManagerCredentials, make_certificate

KEY = JobKey("ns", "job")
DEADLINE_S = 20.0
POLL_S = 0.01
AGE_S = 100.0
"""Of a fact that was seen long before it is reported."""


class Callbacks:
    """What the links tell."""

    def __init__(self) -> None:
        self.woken = 0
        self.requested: list[str] = []
        self.drained_in: list[tuple[float, bool]] = []
        self.failed = 0

    def wake(self, key: JobKey) -> None:
        self.woken += 1

    def record_drain(self, key: JobKey, uid: str) -> None:
        self.requested.append(uid)

    def drained(self, seconds: float, known: bool) -> None:
        self.drained_in.append((seconds, known))

    def drain_failed(self) -> None:
        self.failed += 1


@pytest.fixture(autouse=True)
def slow_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked again, or taken for silent, because this process had to wait for a core: who is away refuses."""
    for limit in ("MANAGER_ANSWER_S", "DRAIN_S", "CONNECT_S"):
        monkeypatch.setattr(client_module, limit, DEADLINE_S)


@pytest.fixture
def callbacks() -> Callbacks:
    return Callbacks()


@pytest.fixture
async def links(manager: Any, callbacks: Callbacks) -> AsyncIterator[ManagerPoller]:
    async def access(key: JobKey) -> ManagerCredentials:
        return manager.access

    async with manager_session() as session:
        made = ManagerPoller(
            ManagerClient(session), access, callbacks.wake, callbacks.record_drain, callbacks, time.time
        )
        yield made
        await made.close()


async def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(POLL_S)


def engine(name: str, state: EngineState = EngineState.SERVING, tokens: int = 0) -> EngineStatus:
    return EngineStatus(
        name=name, pool=Pool.SPOT, state=state, weight_version=1, running=0, max_running=1, tokens=tokens
    )


def last_status(links: ManagerPoller) -> ManagerStatus:
    facts = links.facts(KEY)
    assert facts is not None
    return facts.status


async def test_news_wake_and_token_counts_do_not(manager: Any, links: ManagerPoller, callbacks: Callbacks) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: callbacks.woken == 1)
    await manager.report(engines=(engine("job-r-1"),))
    await until(lambda: callbacks.woken == 2)
    await manager.report(engines=(engine("job-r-1", tokens=500),))
    await until(lambda: last_status(links).engines[0].tokens == 500)
    assert callbacks.woken == 2
    await manager.report(step=3)
    await until(lambda: callbacks.woken == 3)


async def test_a_thousand_managers_found_at_once_leave_connections_to_others(callbacks: Callbacks) -> None:
    reading = most = 0

    async def access(key: JobKey) -> ManagerCredentials:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0)
        reading -= 1
        raise ProtocolError("not there yet")

    async with manager_session() as session:
        links = ManagerPoller(
            ManagerClient(session), access, callbacks.wake, callbacks.record_drain, callbacks, time.time
        )
        for number in range(1000):
            links.follow(JobKey("ns", str(number)), Address("127.0.0.1", 1))
        await until(lambda: most)
        await asyncio.sleep(0.5)
        await links.close()
    assert most == poller.READS < CONNECTIONS / 2


async def test_polls_are_as_far_apart_as_the_job_says(manager: Any, links: ManagerPoller) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: manager.polls)
    before, end = manager.polls, time.monotonic() + 1.5
    while time.monotonic() < end:
        await manager.report(samples=manager.status.samples)
        await asyncio.sleep(POLL_S)
    assert manager.polls - before <= 1.5 / manager.address.poll_s + 2


async def test_silence_is_counted_and_wakes_until_it_is_no_news(
    manager: Any, links: ManagerPoller, callbacks: Callbacks
) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    await manager.stop()
    await until(lambda: links.facts(KEY).failed_polls == poller.WAKING_FAILURES + 2)  # type: ignore[union-attr]
    assert callbacks.woken == 1 + poller.WAKING_FAILURES
    await manager.start()
    await until(lambda: links.facts(KEY).failed_polls == 0)  # type: ignore[union-attr]
    assert callbacks.woken == 2 + poller.WAKING_FAILURES


async def test_a_drain_is_sent_and_recorded_with_the_time_of_its_cause(
    manager: Any, links: ManagerPoller, callbacks: Callbacks
) -> None:
    await manager.report(engines=(engine("job-r-1"),))
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    began = time.monotonic()
    fact_at = began - AGE_S
    for _ in range(3):
        links.drain(KEY, DrainEngine("job-r-1", "uid-1", deadline_s=30.0, why="spot interruption"), fact_at)
    await until(lambda: callbacks.requested)
    took_s = time.monotonic() - began
    assert callbacks.requested == ["uid-1"]
    assert len(manager.drains) == 1, "asking again while it is being sent changes nothing"
    (seconds, known) = callbacks.drained_in[0]
    assert known
    assert AGE_S <= seconds <= AGE_S + took_s
    assert 30 - took_s <= manager.drains[0].deadline_seconds <= 30


async def test_a_drain_waits_for_a_manager_that_is_away(
    manager: Any, links: ManagerPoller, callbacks: Callbacks
) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    await manager.stop()
    links.drain(KEY, DrainEngine("job-r-9", "uid-9", deadline_s=30.0, why="drain"), None)
    await asyncio.sleep(0.5)
    assert not callbacks.requested
    await manager.start()
    await until(lambda: callbacks.requested == ["uid-9"])
    assert callbacks.drained_in[0][1] is False, "it knew no such engine, and said so"


async def test_a_drain_that_nobody_receives_is_given_up(
    manager: Any, links: ManagerPoller, callbacks: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "MIN_DRAIN_S", 0.3)
    links.drain(KEY, DrainEngine("job-r-1", "uid-1", deadline_s=0.1, why="drain"), None)
    await until(lambda: callbacks.failed == 1)
    assert callbacks.requested == []
    await asyncio.sleep(POLL_S)
    links.drain(KEY, DrainEngine("job-r-1", "uid-1", deadline_s=0.1, why="drain"), None)
    await until(lambda: callbacks.failed == 2)


async def test_a_stranger_at_the_managers_address_gets_nothing(manager: Any, callbacks: Callbacks) -> None:
    other = ManagerCredentials(manager.token, make_certificate([manager.name]).authority.decode())

    async def access(key: JobKey) -> ManagerCredentials:
        return other

    async with manager_session() as session:
        links = ManagerPoller(
            ManagerClient(session), access, callbacks.wake, callbacks.record_drain, callbacks, time.time
        )
        links.follow(KEY, manager.address)
        links.drain(KEY, DrainEngine("job-r-1", "uid-1", deadline_s=1.0, why="drain"), None)
        await asyncio.sleep(1.5)
        assert links.facts(KEY) is None
        assert manager.polls == 0
        assert manager.drains == []
        await links.close()


async def test_a_manager_elsewhere_is_followed_and_one_that_is_gone_is_not(manager: Any, links: ManagerPoller) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    links.follow(KEY, manager.address)
    assert links.facts(KEY) is not None, "the same address again changes nothing"
    links.follow(KEY, None)
    assert links.facts(KEY) is None
    polls = manager.polls
    await asyncio.sleep(1)
    assert manager.polls == polls


async def test_another_pod_at_the_same_address_is_another_manager(manager: Any, links: ManagerPoller) -> None:
    await manager.report(step=9)
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    links.follow(KEY, replace(manager.address, pod_uid="another"))
    assert links.facts(KEY) is None, "nothing that the first one said is the second one's word"
    await until(lambda: links.facts(KEY))


async def test_a_secret_that_is_not_there_yet_is_asked_for_again(manager: Any, callbacks: Callbacks) -> None:
    asked = 0

    async def access(key: JobKey) -> ManagerCredentials:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise ProtocolError("there is no Secret yet")
        return manager.access

    async with manager_session() as session:
        links = ManagerPoller(
            ManagerClient(session), access, callbacks.wake, callbacks.record_drain, callbacks, time.time
        )
        links.follow(KEY, manager.address)
        await until(lambda: links.facts(KEY))
        assert asked == 3
        await links.close()
