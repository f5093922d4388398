"""One replica leads; a standby takes over when it falls silent, at once when it gives the Lease back, never before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from polyrl_operator.api.client import Client, NotLeader
from polyrl_operator.api.kinds import LEASE
from polyrl_operator.leader import Leader, Terms

TERMS = Terms(duration_s=3.0, renew_s=2.0, retry_s=0.2)
"""Of replicas whose network comes and goes: they lose the Lease often."""
CALM = Terms(duration_s=9.0, renew_s=6.0, retry_s=0.2)
"""Of a holder that is to keep the Lease while it lives: it renews in time even if the machine pauses for seconds."""
SLOW_TERMS = Terms(duration_s=600.0, renew_s=400.0, retry_s=0.2)
"""Of a Lease that does not run out while a test lasts."""
DEADLINE_S = 30.0
POLL_S = 0.02


class Candidate:
    """A replica that does nothing but hold the Lease; `cut` it off as a broken network does."""

    def __init__(self, place: Any, name: str, terms: Terms) -> None:
        self.partitioned = False
        self._request = place.client._request
        client = Client(place.client._api)
        inner = client._request

        async def ask(*args: Any, **kwargs: Any) -> Any:
            if self.partitioned:
                await asyncio.sleep(DEADLINE_S)
            return await inner(*args, **kwargs)

        client._request = ask  # type: ignore[method-assign]
        self.client = client
        self.leader = Leader(client, place.namespace, "lease", name, terms)
        self.calls: list[str] = []
        self.task = asyncio.create_task(
            self.leader.run(lambda: self.calls.append("began"), lambda: self.calls.append("ended"))
        )

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until
        await asyncio.sleep(POLL_S)


@pytest.fixture
async def candidate(place: Any) -> Any:
    made: list[Candidate] = []

    def make(name: str, terms: Terms = TERMS) -> Candidate:
        made.append(Candidate(place, name, terms))
        return made[-1]

    yield make
    for one in made:
        await one.stop()


async def test_one_leads_and_its_silence_lets_the_other_lead(candidate: Any, place: Any) -> None:
    first = candidate("first", CALM)
    await until(first.leader.leads)
    second = candidate("second", CALM)
    led_at_once = 0
    until_then = time.monotonic() + CALM.duration_s
    while time.monotonic() < until_then:
        led_at_once += second.leader.leads()
        await asyncio.sleep(POLL_S)
    assert not led_at_once, "the holder renews"
    first.partitioned = True
    await until(second.leader.leads)
    assert not first.leader.leads(), "the first stopped before the second began"
    lease = await place.client.get(LEASE, place.namespace, "lease")
    assert lease["spec"]["holderIdentity"] == "second"
    assert lease["spec"]["leaseTransitions"] == 1
    await until(lambda: first.calls == ["began", "ended"])
    assert second.calls == ["began"]
    first.partitioned = False
    await asyncio.sleep(2 * CALM.retry_s)
    assert not first.leader.leads(), "who comes back stands by"


async def test_both_never_lead_at_once_whatever_the_network_does(candidate: Any, seed: int) -> None:
    import random

    draw = random.Random(seed)
    pair = [candidate("a"), candidate("b")]

    end = time.monotonic() + 12
    while time.monotonic() < end:
        leads = [one.leader.leads() for one in pair]
        assert leads.count(True) <= 1
        if draw.random() < 0.02:
            one = draw.choice(pair)
            one.partitioned = not one.partitioned
        await asyncio.sleep(POLL_S)
    for one in pair:
        one.partitioned = False
    await until(lambda: sum(one.leader.leads() for one in pair) == 1)


async def test_a_lease_that_is_given_back_is_taken_at_once(candidate: Any) -> None:
    first = candidate("first", SLOW_TERMS)
    await until(first.leader.leads)
    second = candidate("second", SLOW_TERMS)
    await asyncio.sleep(2 * SLOW_TERMS.retry_s)
    await first.stop()
    await first.leader.release()
    await until(second.leader.leads)
    assert not first.leader.leads()


async def test_a_replica_that_does_not_lead_writes_nothing(place: Any) -> None:
    leader = Leader(place.client, place.namespace, "lease", "nobody", TERMS)
    fenced = Client(place.client._api, may_write=leader.leads)
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": place.namespace}}
    with pytest.raises(NotLeader):
        await fenced.create(item)
    assert await place.children() == set()
