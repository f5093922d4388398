"""One long-poll per live manager, which keeps its status fresh, and drains that are sent until one is confirmed.

A manager is reached at its pod's address and must show the certificate of its own run, so neither DNS nor a stranger
that got the address next can speak for it. Which changes of a status wake a job is decided here; what they mean is not.
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
from polyrl_operator.informer.cache import JobKey
from polyrl_operator.managers.client import Address, ManagerClient, ManagerUnreachable
from polyrl_operator.secret import ManagerCredentials

log = structlog.get_logger(__name__)

POLLS: Final = 512
"""Long-polls at a time; drains do not queue behind them. Beyond it polls come later, and do not count as failures."""

READS: Final = 8
"""Secrets read at a time: a thousand managers found at once would take all connections, the Lease's among them."""

FIRST_CONTACT_S: Final = 1.0
"""Before the second try to reach a manager that never answered; doubles."""

MAX_CONTACT_S: Final = 30.0
"""Longest pause between two such tries: a thousand managers out of reach cost 33 tries a second."""

WAKING_FAILURES: Final = 3
"""Failed polls in a row that each wake the job; further ones change nothing."""

DRAIN_RETRY_S: Final = 0.25
"""Between tries of a drain: a fraction of the two seconds that it may take from the first sign to the agent."""

MIN_DRAIN_S: Final = 5.0
"""A drain whose deadline is nearer, or over, is tried for so long all the same: the manager learns who is gone."""


class DrainMetrics(Protocol):
    """Who counts drains."""

    def drained(self, seconds: float, known: bool) -> None: ...

    def drain_failed(self) -> None: ...


class ManagerPoller:
    """Polls the managers of all jobs. `confirmed` is called with job and uid of the pod for each confirmed drain,
    `wake` when something changed for a job; `now` is the cluster's time."""

    def __init__(
        self,
        client: ManagerClient,
        read_credentials: Callable[[JobKey], Awaitable[ManagerCredentials]],
        wake: Callable[[JobKey], None],
        confirmed: Callable[[JobKey, str], None],
        drains: DrainMetrics,
        now: Callable[[], float],
    ) -> None:
        self._client, self._read_credentials = client, read_credentials
        self._wake, self._confirmed, self._drains = wake, confirmed, drains
        self._now = now
        self._managers: dict[JobKey, _PolledManager] = {}
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._polls, self._reads = asyncio.Semaphore(POLLS), asyncio.Semaphore(READS)

    def follow(self, key: JobKey, address: Address | None, *, ready: bool = True) -> None:
        """The job's manager is there now; None: it has none. Polling begins when it is ready; one that is polled is
        not left for a failed probe."""
        manager = self._managers.get(key)
        if manager is not None and manager.address != address:
            manager.task.cancel()
            del self._managers[key]
            manager = None
        if manager is None and address is not None and ready:
            manager = self._managers[key] = _PolledManager(address)
            manager.task = asyncio.create_task(self._poll(key, manager))

    def facts(self, key: JobKey) -> ManagerFacts | None:
        """The manager's newest status; None: nothing yet."""
        manager = self._managers.get(key)
        return None if manager is None else manager.facts

    def drain(self, key: JobKey, action: DrainEngine, first_sign_at: float | None) -> None:
        """Sends it until the manager confirms or the deadline is over; does nothing for a pod whose drain is under way.
        `first_sign_at`: when what caused it was seen (monotonic), for the metric."""
        if action.uid not in self._draining:
            task = asyncio.create_task(self._drain(key, action, first_sign_at))
            self._draining[action.uid] = task
            task.add_done_callback(lambda _: self._draining.pop(action.uid, None))

    def stop(self) -> list[asyncio.Task[None]]:
        """Ends all polls and drains, for another replica may have them now. Returns the tasks, which end soon after."""
        tasks = [manager.task for manager in self._managers.values()] + list(self._draining.values())
        for task in tasks:
            task.cancel()
        self._managers.clear()
        return tasks

    async def close(self) -> None:
        """Stops all, and waits until they have ended."""
        await asyncio.gather(*self.stop(), return_exceptions=True)

    async def _poll(self, key: JobKey, manager: _PolledManager) -> None:
        """Until cancelled. A manager that cannot be read counts as one that does not answer."""
        address, seq, contact_s = manager.address, -1, FIRST_CONTACT_S
        while True:
            began = time.monotonic()
            try:
                if manager.credentials is None:
                    async with self._reads:
                        manager.credentials = await self._read_credentials(key)
                credentials = manager.credentials
                async with self._polls:
                    began = time.monotonic()
                    status = await self._client.status(address, credentials, seq, address.poll_s)
            except (ManagerUnreachable, PolyRLError, KeyError) as error:
                self._on_failure(key, manager, error)
            else:
                seq = status.seq
                self._on_status(key, manager, status)
            spacing = address.poll_s if manager.facts is not None else contact_s
            contact_s = min(2 * contact_s, MAX_CONTACT_S)
            await asyncio.sleep(max(0.0, began + spacing - time.monotonic()))

    def _on_status(self, key: JobKey, manager: _PolledManager, status: ManagerStatus) -> None:
        before, manager.facts = manager.facts, ManagerFacts(status, self._now())
        if before is None or before.failed_polls or _waking(before.status) != _waking(status):
            self._wake(key)

    def _on_failure(self, key: JobKey, manager: _PolledManager, error: Exception) -> None:
        if not isinstance(error, ManagerUnreachable):
            # A refusal may mean that the Secret was made anew.
            manager.credentials = None
        if manager.facts is None:
            return
        failures = manager.facts.failed_polls + 1
        manager.facts = ManagerFacts(manager.facts.status, manager.facts.answered_at, failed_polls=failures)
        if failures <= WAKING_FAILURES:
            log.info("manager did not answer", job=str(key), consecutive_failures=failures, error=str(error))
            self._wake(key)

    async def _drain(self, key: JobKey, action: DrainEngine, first_sign_at: float | None) -> None:
        began = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(action.deadline_s, MIN_DRAIN_S)):
                known = await self._send_drain(key, action, began + action.deadline_s)
                if action.ended:
                    return
                self._drains.drained(time.monotonic() - (began if first_sign_at is None else first_sign_at), known)
                self._confirmed(key, action.uid)
                self._wake(key)
                return
        if action.ended:
            # Should its name be used, the manager's status will show it, and the next reconcile asks again.
            return
        self._drains.drain_failed()
        log.warning("drain was not confirmed", job=str(key), pod=action.pod, deadline_s=action.deadline_s)

    async def _send_drain(self, key: JobKey, action: DrainEngine, deadline: float) -> bool:
        """Until a manager answered; True when it knew the engine."""
        while True:
            manager = self._managers.get(key)
            if manager is not None and manager.credentials is not None:
                with suppress(ManagerUnreachable, PolyRLError):
                    left = max(0.0, deadline - time.monotonic())
                    at, credentials = manager.address, manager.credentials
                    return await self._client.drain(at, credentials, action.pod, left, action.why, ended=action.ended)
            await asyncio.sleep(DRAIN_RETRY_S)


class _PolledManager:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.credentials: ManagerCredentials | None = None
        self.facts: ManagerFacts | None = None
        self.task: asyncio.Task[None]


def _waking(status: ManagerStatus) -> tuple[object, ...]:
    """What a job is woken for; token counts are not."""
    return (
        status.run_epoch,
        status.phase,
        status.step,
        status.weight_version,
        status.trainer_connected,
        status.finished,
        tuple((fetch.pod, fetch.amount) for fetch in status.fetches),
        tuple((engine.name, engine.state) for engine in status.engines),
    )
