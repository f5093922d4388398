"""The operator's side of each manager's HTTP API: one long-poll per live manager, and drains told until heard.

A manager is reached at its pod's address and must show the certificate of its own run, so neither DNS nor a stranger
that got the address next can speak for it. Which news wake a job is decided here; what they mean is not.
Refuses to hold: what a status means, when to drain (see `polyrl.cluster`). Read next: `manager_client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol

import structlog

from polyrl.cluster.actions import DrainEngine
from polyrl.cluster.observation.facts import ManagerFacts
from polyrl.errors import PolyRLError
from polyrl.status import ManagerStatus
from polyrl_operator.informer.cached_object import JobKey
from polyrl_operator.managers.client import Address, ManagerClient, ManagerUnreachable
from polyrl_operator.secret import ManagerCredentials

log = structlog.get_logger(__name__)

POLLS: Final = 512
"""Long-polls at a time; drains do not queue behind them. Beyond it polls come later, and are not counted as missed."""

FIRST_CONTACT_S: Final = 1.0
"""Before the second try to reach a manager that never answered; doubles."""

MAX_CONTACT_S: Final = 30.0
"""Longest pause between two such tries: a thousand managers out of reach cost 33 tries a second."""

MISSED_TOLD: Final = 3
"""Missed polls that are each news; further ones change nothing."""

DRAIN_RETRY_S: Final = 0.25
"""Between tries to tell a drain: a fraction of the two seconds that it may take from fact to agent."""

MIN_DRAIN_S: Final = 5.0
"""A drain whose deadline is nearer, or over, is told for so long all the same: the manager learns who is gone."""


class DrainLog(Protocol):
    """Who counts drains; `metrics` fits."""

    def drained(self, seconds: float, known: bool) -> None: ...

    def drain_failed(self) -> None: ...


class ManagerPoller:
    """Polls the managers of all jobs. `told` hears of confirmed drains, by job and uid of the pod; `wake` of news;
    `now` is the cluster's time."""

    def __init__(
        self,
        client: ManagerClient,
        read_access: Callable[[JobKey], Awaitable[ManagerCredentials]],
        wake: Callable[[JobKey], None],
        told: Callable[[JobKey, str], None],
        drains: DrainLog,
        now: Callable[[], float],
    ) -> None:
        self._client, self._read_access = client, read_access
        self._wake, self._told, self._drains = wake, told, drains
        self._now = now
        self._links: dict[JobKey, _Link] = {}
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._polls = asyncio.Semaphore(POLLS)

    def follow(self, key: JobKey, address: Address | None, *, ready: bool = True) -> None:
        """The job's manager is there now; None: it has none. One that is not ready yet is not spoken to; one that was
        is not left for a failed probe."""
        link = self._links.get(key)
        if link is not None and link.address != address:
            link.task.cancel()
            del self._links[key]
            link = None
        if link is None and address is not None and ready:
            self._links[key] = self._linked(key, address)

    def facts(self, key: JobKey) -> ManagerFacts | None:
        """What the manager last said; None: nothing yet."""
        link = self._links.get(key)
        return None if link is None else link.facts

    def drain(self, key: JobKey, action: DrainEngine, fact_at: float | None) -> None:
        """Tells the manager until it has heard or the deadline is over. `fact_at`: when the fact behind it came
        (monotonic), for the record. Saying it again while it is being told changes nothing."""
        if action.uid not in self._draining:
            task = asyncio.create_task(self._drain(key, action, fact_at))
            self._draining[action.uid] = task
            task.add_done_callback(lambda _: self._draining.pop(action.uid, None))

    def leave(self) -> list[asyncio.Task[None]]:
        """Ends all links and drains: another replica may have them now. What was begun ends soon after."""
        tasks = [link.task for link in self._links.values()] + list(self._draining.values())
        for task in tasks:
            task.cancel()
        self._links.clear()
        return tasks

    async def close(self) -> None:
        """Leaves all, and waits until they have ended."""
        await asyncio.gather(*self.leave(), return_exceptions=True)

    def _linked(self, key: JobKey, address: Address) -> _Link:
        link = _Link(address)
        link.task = asyncio.create_task(self._poll(key, link))
        return link

    async def _poll(self, key: JobKey, link: _Link) -> None:
        """Until cancelled. A manager that cannot be read is missed like one that does not answer."""
        seq, contact_s = -1, FIRST_CONTACT_S
        while True:
            began = time.monotonic()
            try:
                access = link.access or await self._read_access(key)
                link.access = access
                async with self._polls:
                    began = time.monotonic()
                    status = await self._client.status(link.address, access, seq, link.address.poll_s)
            except (ManagerUnreachable, PolyRLError, KeyError) as error:
                self._missed(key, link, error)
            else:
                seq = status.seq
                self._heard(key, link, status)
            spacing = link.address.poll_s if link.facts is not None else contact_s
            contact_s = min(2 * contact_s, MAX_CONTACT_S)
            await asyncio.sleep(max(0.0, began + spacing - time.monotonic()))

    def _heard(self, key: JobKey, link: _Link, status: ManagerStatus) -> None:
        before, link.facts = link.facts, ManagerFacts(status, self._now())
        if before is None or before.failed_polls or _news(before.status) != _news(status):
            self._wake(key)

    def _missed(self, key: JobKey, link: _Link, error: Exception) -> None:
        if not isinstance(error, ManagerUnreachable):
            # A refusal may mean that the Secret was made anew.
            link.access = None
        if link.facts is None:
            return
        failed_polls = link.facts.failed_polls + 1
        link.facts = ManagerFacts(link.facts.status, link.facts.answered_at, failed_polls)
        if failed_polls <= MISSED_TOLD:
            log.info("manager did not answer", job=str(key), failed_polls=failed_polls, error=str(error))
            self._wake(key)

    async def _drain(self, key: JobKey, action: DrainEngine, fact_at: float | None) -> None:
        began = time.monotonic()
        deadline = began + action.deadline_s
        with suppress(TimeoutError):
            async with asyncio.timeout(max(action.deadline_s, MIN_DRAIN_S)):
                known = await self._tell(key, action, deadline)
                self._drains.drained(time.monotonic() - (began if fact_at is None else fact_at), known)
                self._told(key, action.uid)
                self._wake(key)
                return
        self._drains.drain_failed()
        log.warning("drain was not heard", job=str(key), pod=action.pod, deadline_s=action.deadline_s)

    async def _tell(self, key: JobKey, action: DrainEngine, deadline: float) -> bool:
        """Until a manager answered; True when it knew the engine."""
        while True:
            link = self._links.get(key)
            if link is not None and link.access is not None:
                with suppress(ManagerUnreachable, PolyRLError):
                    left = max(0.0, deadline - time.monotonic())
                    return await self._client.drain(link.address, link.access, action.pod, left, action.why)
            await asyncio.sleep(DRAIN_RETRY_S)


class _Link:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.access: ManagerCredentials | None = None
        self.facts: ManagerFacts | None = None
        self.task: asyncio.Task[None]


def _news(status: ManagerStatus) -> tuple[object, ...]:
    """What a job is woken for; token counts are not."""
    engines = tuple((engine.engine, engine.state) for engine in status.engines)
    return (
        status.run_epoch,
        status.phase,
        status.step,
        status.weight_version,
        status.trainer_connected,
        status.finished,
        engines,
    )
