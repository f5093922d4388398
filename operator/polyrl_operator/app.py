"""One replica of the operator, wired: who feeds whom, which tasks run, and how it ends.

Refuses to hold: behaviour (each part has its own). Read next: `watches`, `worker`, `leader`, `health`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import structlog
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from polyrl.cluster import names
from polyrl.errors import ProtocolError
from polyrl_operator import health
from polyrl_operator.api.client import Client
from polyrl_operator.api.connect import load_configuration, watch_session
from polyrl_operator.api.kinds import CLAIM, SECRET, ResourceKind
from polyrl_operator.api.server_clock import ClusterClock
from polyrl_operator.api.service_account import own_reference
from polyrl_operator.api.tracing import RequestTracer
from polyrl_operator.informer.cache import Cache
from polyrl_operator.informer.cached_object import JobKey
from polyrl_operator.informer.resync import Resync
from polyrl_operator.informer.watch import KopfWatches, watched_kinds
from polyrl_operator.leader import Leader
from polyrl_operator.managers.client import ManagerClient, manager_session
from polyrl_operator.managers.poller import ManagerPoller
from polyrl_operator.metrics import Metrics
from polyrl_operator.options import Options
from polyrl_operator.reconciler.events import SENDERS, Events
from polyrl_operator.reconciler.executor import Executor
from polyrl_operator.reconciler.reconciler import WORKERS, Reconciler
from polyrl_operator.reconciler.work_queue import WorkQueue
from polyrl_operator.secret import ManagerCredentials, access

log = structlog.get_logger(__name__)


class Operator:
    """All parts. Made inside a running loop; `run` until it ends or is cancelled, then `close`."""

    def __init__(
        self, options: Options, api: ApiClient, managers: aiohttp.ClientSession, requests: RequestTracer
    ) -> None:
        self.options, self.requests = options, requests
        place = options.lease_namespace, options.lease_name
        self.clock = ClusterClock()
        own = Client(api, clock=self.clock)
        self.leader = Leader(own, *place, options.identity, options.terms, own_reference())
        self.client = Client(api, may_write=self.leader.leads, clock=self.clock)
        self.queue = WorkQueue()
        self.cache = Cache(self.queue.add)
        self.metrics = Metrics(requests)
        self.events = Events(self.client, options.identity)
        self.resync = Resync(self.client, self.cache, options.namespaces, nodes=options.watch_nodes)
        managed = ManagerClient(managers)
        self.links = ManagerPoller(managed, self._access, self.queue.add, self._told, self.metrics, self.clock.now)
        actor = Executor(self.client, self.cache, self.events, self.links)
        self.turns = Reconciler(
            self.cache,
            self.client,
            actor,
            self.links,
            self.queue,
            self.metrics,
            options.settings,
            sees_nodes=options.watch_nodes,
        )
        self._gauges()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """All that runs side by side, but for the watches."""
        workers = [self.turns.work(self.resync.until_ready) for _ in range(WORKERS)]
        return [
            self.leader.hold(self.resync.begin, self._stand_by),
            self.resync.keep(self._wake_all),
            *(self.events.send() for _ in range(SENDERS)),
            *workers,
        ]

    def checks(self, watched: tuple[ResourceKind, ...]) -> list[health.Check]:
        """What /healthz looks at."""
        places = self.options.namespaces or (None,)
        paths = [kind.path(place) for kind in watched for place in (places if kind.namespaced else (None,))]
        return [
            health.silent_watches(self.requests.stream_ages, paths, health.SILENCES * self.options.silence_s),
            health.too_old("a job has been at its turn", self.turns.longest, health.TURN_S),
            health.too_old("a job has waited for its turn", self._waited, health.QUEUE_S),
        ]

    def ready(self) -> bool:
        """A leader has read everything; a standby is ready to lead."""
        return self.resync.ready or not self.leader.leads()

    def _waited(self) -> float:
        """Only a leader with everything read takes turns."""
        return self.queue.oldest_age() if self.resync.ready else 0.0

    def _stand_by(self) -> None:
        self.resync.end()
        self.links.leave()

    def _wake_all(self) -> None:
        for key in self.cache.all_jobs():
            self.queue.add(key)

    def _told(self, key: JobKey, uid: str) -> None:
        self.turns.told(key, uid)

    async def _access(self, key: JobKey) -> ManagerCredentials:
        secret = await self.client.get(SECRET, key.namespace, names.keys_secret(key.name))
        if secret is None:
            raise ProtocolError(f"{key}: there is no Secret {names.keys_secret(key.name)}")
        return access(secret)

    def _gauges(self) -> None:
        gauge = self.metrics.gauge
        gauge("polyrl_queue_length", "Jobs whose turn it is.", lambda: float(len(self.queue)))
        gauge("polyrl_queue_age_seconds", "Wait of the job that has waited longest.", self._waited)
        gauge("polyrl_leads", "1 when this replica holds the Lease.", lambda: float(self.leader.leads()))
        gauge("polyrl_events_dropped", "Events that were not stored.", lambda: float(self.events.dropped))
        ages = self.requests.stream_ages
        gauge("polyrl_watch_silence_seconds", "Of the most silent watch.", lambda: max(ages().values(), default=0.0))


@asynccontextmanager
async def operator(options: Options, configuration: Configuration) -> AsyncIterator[Operator]:
    """An operator with its connections, which are closed at the end; nothing runs yet."""
    made: list[Operator] = []
    requests = RequestTracer(on_doubt=lambda: made[0].resync.soon())
    configuration.trace_configs = [requests.trace()]
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiClient(configuration))
        managers = await stack.enter_async_context(manager_session())
        made.append(Operator(options, api, managers, requests))
        stack.push_async_callback(made[0].leader.release)
        stack.push_async_callback(made[0].links.close)
        yield made[0]


async def run(options: Options) -> None:
    """Until a signal ends it. Raises UserError when no cluster is reached, and what kopf cannot mend."""
    configuration = await load_configuration(options.kubeconfig)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(operator(options, configuration))
        watched = watched_kinds(nodes=options.watch_nodes, claims=await _has_claims(one, options))

        def connect() -> tuple[aiohttp.ClientSession, str]:
            session = watch_session(configuration, [one.requests.trace(watches=True)])
            return session, configuration.host

        for app, port in (
            (health.metrics_app(one.metrics.registry), options.metrics_port),
            (health.health_app(one.checks(watched), one.ready), options.health_port),
        ):
            runner, bound = await health.serve(app, options.host, port)
            stack.push_async_callback(runner.cleanup)
            log.info("listens", port=bound, paths=sorted({one.canonical for one in app.router.resources()}))
        watches = KopfWatches(one.cache, connect, options.namespaces, watched, options.silence_s)
        await _until_first_ends([watches.run(), *one.tasks()])


async def _has_claims(one: Operator, options: Options) -> bool:
    """Whether this cluster has Karpenter's NodeClaims."""
    if not options.watch_nodes:
        return False
    group = await one.client.discover(CLAIM)
    return CLAIM.plural in group


async def _until_first_ends(work: list[Coroutine[Any, Any, None]]) -> None:
    """The watches end when a signal comes; that anything else ends is a fault, and is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
