"""The operator's link to a manager, over real TLS to a stand-in: news wake, silence is counted, drains are told."""

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
from polyrl_operator.informer.cache import JobKey
from polyrl_operator.managers import client as client_module, poller
from polyrl_operator.managers.client import ManagerClient, manager_session
from polyrl_operator.managers.poller import ManagerPoller
from polyrl_operator.secret import ManagerCredentials, make_certificate

KEY = JobKey("ns", "job")
DEADLINE_S = 20.0
LOOK_S = 0.01
AGE_S = 100.0
"""Of a fact that was seen long before it is told."""


class Heard:
    """What the links tell."""

    def __init__(self) -> None:
        self.woken = 0
        self.told: list[str] = []
        self.drained_in: list[tuple[float, bool]] = []
        self.failed = 0

    def wake(self, key: JobKey) -> None:
        self.woken += 1

    def tell(self, key: JobKey, uid: str) -> None:
        self.told.append(uid)

    def drained(self, seconds: float, known: bool) -> None:
        self.drained_in.append((seconds, known))

    def drain_failed(self) -> None:
        self.failed += 1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked again, or taken for silent, because this process had to wait for a core: who is away refuses."""
    for limit in ("ANSWER_S", "DRAIN_S", "CONNECT_S"):
        monkeypatch.setattr(client_module, limit, DEADLINE_S)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def links(manager: Any, heard: Heard) -> AsyncIterator[ManagerPoller]:
    async def access(key: JobKey) -> ManagerCredentials:
        return manager.access

    async with manager_session() as session:
        made = ManagerPoller(ManagerClient(session), access, heard.wake, heard.tell, heard, time.time)
        yield made
        await made.close()


async def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(LOOK_S)


def engine(name: str, state: EngineState = EngineState.SERVING, tokens: int = 0) -> EngineStatus:
    return EngineStatus(
        engine=name, pool=Pool.SPOT, state=state, weight_version=1, running=0, max_running=1, tokens=tokens
    )


def said(links: ManagerPoller) -> ManagerStatus:
    facts = links.facts(KEY)
    assert facts is not None
    return facts.status


async def test_news_wake_and_token_counts_do_not(manager: Any, links: ManagerPoller, heard: Heard) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: heard.woken == 1)
    await manager.say(engines=(engine("job-r-1"),))
    await until(lambda: heard.woken == 2)
    await manager.say(engines=(engine("job-r-1", tokens=500),))
    await until(lambda: said(links).engines[0].tokens == 500)
    assert heard.woken == 2
    await manager.say(step=3)
    await until(lambda: heard.woken == 3)


async def test_polls_are_as_far_apart_as_the_job_says(manager: Any, links: ManagerPoller) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: manager.polls)
    before, end = manager.polls, time.monotonic() + 1.5
    while time.monotonic() < end:
        await manager.say(samples=manager.status.samples)
        await asyncio.sleep(LOOK_S)
    assert manager.polls - before <= 1.5 / manager.address.poll_s + 2


async def test_silence_is_counted_and_told_until_it_is_no_news(
    manager: Any, links: ManagerPoller, heard: Heard
) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    await manager.stop()
    await until(lambda: links.facts(KEY).failed_polls == poller.WAKING_FAILURES + 2)  # type: ignore[union-attr]
    assert heard.woken == 1 + poller.WAKING_FAILURES
    await manager.start()
    await until(lambda: links.facts(KEY).failed_polls == 0)  # type: ignore[union-attr]
    assert heard.woken == 2 + poller.WAKING_FAILURES


async def test_a_drain_is_told_and_recorded_from_the_fact_on(manager: Any, links: ManagerPoller, heard: Heard) -> None:
    await manager.say(engines=(engine("job-r-1"),))
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    began = time.monotonic()
    fact_at = began - AGE_S
    for _ in range(3):
        links.drain(KEY, DrainEngine("job-r-1", "uid-1", deadline_s=30.0, why="spot interruption"), fact_at)
    await until(lambda: heard.told)
    took_s = time.monotonic() - began
    assert heard.told == ["uid-1"]
    assert len(manager.drains) == 1, "saying it again while it is told changes nothing"
    (seconds, known) = heard.drained_in[0]
    assert known
    assert AGE_S <= seconds <= AGE_S + took_s
    assert 30 - took_s <= manager.drains[0].deadline_seconds <= 30


async def test_a_drain_waits_for_a_manager_that_is_away(manager: Any, links: ManagerPoller, heard: Heard) -> None:
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    await manager.stop()
    links.drain(KEY, DrainEngine("job-r-9", "uid-9", deadline_s=30.0, why="drain"), None)
    await asyncio.sleep(0.5)
    assert not heard.told
    await manager.start()
    await until(lambda: heard.told == ["uid-9"])
    assert heard.drained_in[0][1] is False, "it knew no such engine, and said so"


async def test_a_drain_that_nobody_hears_is_given_up(
    manager: Any, links: ManagerPoller, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "MIN_DRAIN_S", 0.3)
    links.drain(KEY, DrainEngine("job-r-1", "uid-1", deadline_s=0.1, why="drain"), None)
    await until(lambda: heard.failed == 1)
    assert heard.told == []
    await asyncio.sleep(LOOK_S)
    links.drain(KEY, DrainEngine("job-r-1", "uid-1", deadline_s=0.1, why="drain"), None)
    await until(lambda: heard.failed == 2)


async def test_a_stranger_at_the_managers_address_gets_nothing(manager: Any, heard: Heard) -> None:
    other = ManagerCredentials(manager.token, make_certificate([manager.name]).authority.decode())

    async def access(key: JobKey) -> ManagerCredentials:
        return other

    async with manager_session() as session:
        links = ManagerPoller(ManagerClient(session), access, heard.wake, heard.tell, heard, time.time)
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
    await manager.say(step=9)
    links.follow(KEY, manager.address)
    await until(lambda: links.facts(KEY))
    links.follow(KEY, replace(manager.address, pod_uid="another"))
    assert links.facts(KEY) is None, "nothing that the first one said is the second one's word"
    await until(lambda: links.facts(KEY))


async def test_a_secret_that_is_not_there_yet_is_asked_for_again(manager: Any, heard: Heard) -> None:
    asked = 0

    async def access(key: JobKey) -> ManagerCredentials:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise ProtocolError("there is no Secret yet")
        return manager.access

    async with manager_session() as session:
        links = ManagerPoller(ManagerClient(session), access, heard.wake, heard.tell, heard, time.time)
        links.follow(KEY, manager.address)
        await until(lambda: links.facts(KEY))
        assert asked == 3
        await links.close()
